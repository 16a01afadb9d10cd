"""`trunkline top` and `trunkline doctor`: looking at a cluster through its router's endpoints."""
