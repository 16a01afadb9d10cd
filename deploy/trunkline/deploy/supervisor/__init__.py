"""A cluster on this machine: starting, watching, restarting, draining and stopping its processes."""
