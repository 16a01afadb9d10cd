"""What a rank does before its first step: its device, its kernels, and how much memory is left for KV."""
