"""Attention and KV operations: their interface, their reference, their native versions."""
