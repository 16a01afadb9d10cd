"""Requests under way: sending them to controllers, reading their tokens, and going on when a group is lost."""
