"""The model: configuration, families, layers, positions, checkpoints and their shards."""
