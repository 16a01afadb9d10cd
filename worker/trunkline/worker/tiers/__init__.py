"""KV below the device: copies to and from host memory, disk and remote stores."""
