"""Blocks for prompts: prefix matches, cuts, modules, and the KV cache manager that admits by them. Pure."""
