"""Fixtures of the tests of prompt programs: a router with a scripted controller behind it."""

from router.conftest import cluster, fake, folder, no_proxy, quiet, router, tokenizer

__all__ = ["cluster", "fake", "folder", "no_proxy", "quiet", "router", "tokenizer"]
