"""KV below the device, as the controller decides about it: what to load, prefetch, save and wait for. Pure."""
