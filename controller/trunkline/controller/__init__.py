"""The controller of a group: scheduler, chunk tree and the service around them."""
