"""Which controller gets a request. Pure: what is known comes in as arguments.

Now: the one with the fewest requests in flight, or the one that keeps the session. The interface already carries
what prefix-aware rules need (the prompt, the session), so that they can be put in its place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final, Protocol

import msgspec

_HOME_LEAD: Final = 4
"""Requests that a session's own controller may have more than 1.5 times the fewest: moving its KV costs more than
waiting for a few steps."""


def rendezvous(key: str, count: int) -> int:
    """Which of `count` controllers keeps the records of `key`: the one with the highest hash of both, so that when
    one is added only its share moves. By index, since addresses change from start to start."""
    return max(range(count), key=lambda index: hashlib.blake2b(f"{index} {key}".encode(), digest_size=8).digest())


class RouteRequest(msgspec.Struct, frozen=True):
    """What a choice may depend on."""

    prompt: Sequence[int]
    salt: bytes = b""
    session: str = ""
    home: int = -1
    """The controller that keeps the session's record, and most likely its KV; -1: none does."""


class ControllerLoad(msgspec.Struct, frozen=True):
    """A controller that can take requests."""

    controller: int
    """Its index in the configuration."""
    inflight: int
    """Requests this router has there."""


class Policy(Protocol):
    """A routing rule."""

    def choose(self, request: RouteRequest, loads: Sequence[ControllerLoad]) -> int:
        """The `controller` of one of `loads`, which are not empty."""


class LeastInflight:
    """Fewest requests in flight; ties go round, so that an idle cluster does not always use its first. A session
    stays at its home unless that is much busier."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, request: RouteRequest, loads: Sequence[ControllerLoad]) -> int:
        """See `Policy`."""
        fewest = min(load.inflight for load in loads)
        for load in loads:
            if load.controller == request.home and load.inflight <= 1.5 * fewest + _HOME_LEAD:
                return load.controller
        ties = [load.controller for load in loads if load.inflight == fewest]
        self._turn += 1
        return ties[self._turn % len(ties)]
