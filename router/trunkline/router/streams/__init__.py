"""Requests under way: where they are sent, what comes back, and what happens when a group is lost."""
