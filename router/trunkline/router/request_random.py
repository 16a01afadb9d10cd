"""What a request draws at random: its seed, its ids. With an `Idempotency-Key` they follow from the key, so that
the same request, sent again to any router, is the same request: it gets the same text, and the same ids.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Draws:
    """Numbers that follow from a request's name. Each purpose has its own sequence, so that they do not depend on
    what else is drawn meanwhile."""

    def __init__(self, name: bytes, created: int) -> None:
        """
        Args:
            name: equal for requests that are the same one; 1 to 64 bytes.
            created: when it was first seen, Unix time in seconds.
        """
        self.name = name
        self.created = created
        self._counts: Counter[str] = Counter()

    def draw(self, purpose: str, size: int) -> bytes:
        """The next `size` bytes, 64 at most, for a purpose."""
        number = self._counts[purpose]
        self._counts[purpose] += 1
        return hashlib.blake2b(f"{purpose} {number}".encode(), key=self.name, digest_size=size).digest()


_current: ContextVar[Draws | None] = ContextVar("draws", default=None)


@contextmanager
def drawing_from(draws: Draws) -> Iterator[None]:
    """Let what is done within, and in tasks that are started within, draw from `draws`."""
    token = _current.set(draws)
    try:
        yield
    finally:
        _current.reset(token)


def request_name() -> bytes:
    """The name of the request at hand; b"": it has none, and would not be known again."""
    draws = _current.get()
    return b"" if draws is None else draws.name


def draw_bytes(purpose: str, size: int) -> bytes:
    """Random bytes, 64 at most; the same ones if the same request is made again."""
    draws = _current.get()
    return secrets.token_bytes(size) if draws is None else draws.draw(purpose, size)


def draw_hex(purpose: str, size: int) -> str:
    """As `draw_bytes`, as twice as many hexadecimal digits."""
    return draw_bytes(purpose, size).hex()


def draw_seed() -> int:
    """A seed for a request without one, so that a stream can be continued elsewhere."""
    return int.from_bytes(draw_bytes("seed", 8), "little")


def created_at() -> int:
    """When the request at hand was made, or first made, Unix time in seconds."""
    draws = _current.get()
    return int(time.time()) if draws is None else draws.created
