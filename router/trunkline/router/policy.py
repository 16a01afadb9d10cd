"""Which controller gets a request. Pure: what is known comes in as arguments.

Now: the one with the fewest requests in flight. The interface already carries what prefix-aware rules
need (the prompt, the session), so that they can be put in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class RouteRequest(msgspec.Struct, frozen=True):
    """What a choice may depend on."""

    prompt: Sequence[int]
    salt: bytes = b""
    session: str = ""


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
    """Fewest requests in flight; ties go round, so that an idle cluster does not always use its first."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, request: RouteRequest, loads: Sequence[ControllerLoad]) -> int:
        """See `Policy`."""
        fewest = min(load.inflight for load in loads)
        ties = [load.controller for load in loads if load.inflight == fewest]
        self._turn += 1
        return ties[self._turn % len(ties)]
