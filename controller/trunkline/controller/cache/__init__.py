"""KV on the device: blocks, the radix tree of chunks, who holds what. Pure."""
