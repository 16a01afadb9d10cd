"""A tensor-parallel rank: model shard, KV pool, kernels, sampling."""
