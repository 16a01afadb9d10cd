"""From a step plan to the flat arrays of a forward pass."""
