"""Metrics, request records and traces."""
