"""How long a group that drains waits for a router to hand its chunks over to other groups. Pure.

drain begins ──► a router asks for `live` paths ──► Handed ──► over
     │                  └── the router is gone ──► another one may begin
     └── no router begins within `BEGIN_SECONDS` ──────────► over
"""

from __future__ import annotations

from math import inf
from typing import Final

from trunkline.runtime.looks import Looks

BEGIN_SECONDS: Final = 2.0
"""Time in seconds that routers have to begin a handover, after the drain has begun or the router that did it has
gone."""
LOOKS_WITHIN_S: Final = 1.0
"""`Looks.within_s`; the service looks once a second."""


class HandoverWait:
    """Whether a handover is under way or may still begin. The drain's own time limit is its caller's."""

    def __init__(self) -> None:
        self._until = -inf
        """Time until which a router may begin."""
        self._routers: set[int] = set()
        """Indices of the routers that are at it."""
        self._draining = False
        self._looks = Looks(LOOKS_WITHIN_S)

    def begin(self, routers: int, now: float) -> None:
        """Note that the drain begins.

        Args:
            routers: how many routers are connected; with none, nothing is waited for.
        """
        self._draining = True
        self._looks.begin(now)
        self._until = now + BEGIN_SECONDS if routers else -inf

    def asked(self, router: int) -> None:
        """Note that a router asks for the paths to hand over."""
        if self._draining:
            self._routers.add(router)

    def handed(self, router: int) -> None:
        """Note that a router has handed over what it could."""
        self._routers.discard(router)
        self._until = -inf

    def gone(self, router: int, others: int, now: float) -> None:
        """Note that a router is no longer connected. `others`: how many still are."""
        if not others:
            self._until = -inf
        elif router in self._routers:
            self._until = max(self._until, now + BEGIN_SECONDS)
            self._looks.begin(now)  # a time that is over moves no deadline that begins now
        self._routers.discard(router)

    def is_over(self, now: float) -> bool:
        """Return whether the group need not wait for a handover (any more). Call this once messages are read."""
        self._until += self._looks.late(now)
        return not self._routers and now >= self._until

    @property
    def deadline(self) -> float:
        """Time at which `is_over` may change by itself; infinity: it does not."""
        return self._until if not self._routers and self._until > -inf else inf
