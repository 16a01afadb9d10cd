"""Stores of sessions and schemas, which are records of the controllers."""
