"""The front door: HTTP, tokenisation, choice of a controller, streams."""
