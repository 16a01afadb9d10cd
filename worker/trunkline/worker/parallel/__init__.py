"""Tensor parallelism: how ranks meet and their collectives."""
