"""The controller without I/O: requests and step results in, step plans and outputs out. Pure."""
