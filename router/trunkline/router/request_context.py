"""What is known of the HTTP request at hand, for whatever works for it, and what that request draws at random.

    RequestMiddleware ─► id, record     AccessMiddleware ─► identity     AdmissionMiddleware ─► meter
                                                                          ReplayMiddleware   ─► random

Each layer of the middleware adds its part with `known`. Code in the request's task, or in a task started by it,
reads the parts with `current`. Outside of a request, as in a health probe, all parts are absent.

With an `Idempotency-Key` the seed and the ids of a request follow from the key: the same request, sent again to
any router, gets the same text and the same ids.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from trunkline.router.telemetry.request_record import RequestRecord
    from trunkline.router.tenancy.auth import Identity
    from trunkline.router.tenancy.tenants import Meter


class RequestRandom:
    """Numbers that follow from a request's name. Each purpose has a sequence of its own, so that none depends on
    what is drawn for the others."""

    def __init__(self, name: bytes, created: int) -> None:
        """
        Args:
            name: equal for requests that are the same one; 1 to 64 bytes.
            created: when the request was first seen, Unix time in seconds.
        """
        self.name = name
        self.created = created
        self._counts: Counter[str] = Counter()

    def draw(self, purpose: str, size: int) -> bytes:
        """Return the next `size` bytes, 64 at most, for a purpose."""
        number = self._counts[purpose]
        self._counts[purpose] += 1
        return hashlib.blake2b(f"{purpose} {number}".encode(), key=self.name, digest_size=size).digest()


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What is known of one HTTP request; None: the part is not known, or does not apply."""

    record: RequestRecord | None = None
    """Its id, its trace, and what its log line will say."""
    identity: Identity | None = None
    """Who sends it, and what the sender may do."""
    meter: Meter | None = None
    """What its tokens are charged to."""
    random: RequestRandom | None = None
    """Only with an `Idempotency-Key`."""


_current: Final[ContextVar[RequestContext]] = ContextVar("request_context", default=RequestContext())  # noqa: B039


def current() -> RequestContext:
    """Return what is known of the request at hand."""
    return _current.get()


@contextmanager
def known(**parts: Any) -> Iterator[None]:
    """Add parts to the current context, for what is done within and in tasks that are started within."""
    token = _current.set(replace(_current.get(), **parts))
    try:
        yield
    finally:
        _current.reset(token)


def request_name() -> bytes:
    """Return the name of the request at hand; b"": it has none, and would not be recognised if it came again."""
    random = _current.get().random
    return b"" if random is None else random.name


def draw_bytes(purpose: str, size: int) -> bytes:
    """Return random bytes, 64 at most; the same ones if the same request is made again."""
    random = _current.get().random
    return secrets.token_bytes(size) if random is None else random.draw(purpose, size)


def draw_hex(purpose: str, size: int) -> str:
    """Return `draw_bytes` as twice as many hexadecimal digits."""
    return draw_bytes(purpose, size).hex()


def draw_seed() -> int:
    """Return a seed for a request without one, so that a stream can be continued elsewhere."""
    return int.from_bytes(draw_bytes("seed", 8), "little")


def created_at() -> int:
    """Return when the request at hand was made, or first made, Unix time in seconds."""
    random = _current.get().random
    return int(time.time()) if random is None else random.created
