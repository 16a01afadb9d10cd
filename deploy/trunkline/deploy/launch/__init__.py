"""`trunkline launch`: a file describes a cluster on several hosts; the commands start it and look after it."""
