"""Rendezvous hashing: choices on which processes agree without talking."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def rendezvous(key: str, count: int) -> int:
    """Return which of `count` controllers keeps the records of `key`: the one with the highest hash of both, so
    that when one is added only its share moves. By index, since addresses change from start to start."""
    return rendezvous_among(key, range(count))


def rendezvous_among(key: str, controllers: Iterable[int]) -> int:
    """Return which of these controllers `key` belongs to: when one goes, only what belonged to it moves.

    Raises:
        ValueError: there are none.
    """
    return max(controllers, key=lambda index: hashlib.blake2b(f"{index} {key}".encode(), digest_size=8).digest())
