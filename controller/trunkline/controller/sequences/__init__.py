"""Sequences, their samples and beams, and the rows and plans made of them. Pure."""
