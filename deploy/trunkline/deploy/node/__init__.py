"""The part of a cluster on one host or in one pod, and its health endpoints."""
