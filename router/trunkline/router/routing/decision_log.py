"""The last choices of controllers, with what was known of each at that time; the dashboard shows them. Pure.

What is kept are references to arrays that each choice makes anew, so that remembering costs next to nothing; they
are made readable only for those whom somebody looks at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

from trunkline.router.routing.request import Decision, Origin, RouteRequest, Weighed

DECISIONS_MAX: Final = 1000


class Logged(NamedTuple):
    """A choice that was carried out."""

    number: int
    """From 1 on, without gaps."""
    at: float
    """On the clock of who carried it out, in seconds."""
    origin: Origin
    controller: int
    reason: str
    """As in `Decision`."""
    prompt_tokens: int
    is_again: bool
    """The request had been somewhere else before: refused, lost, or handed over."""
    weighed: Weighed | None


class DecisionLog:
    """A ring of them."""

    def __init__(self, size: int = DECISIONS_MAX) -> None:
        self.count = 0
        """Choices since the start."""
        self._ring: deque[Logged] = deque(maxlen=size)

    def add(self, decision: Decision, request: RouteRequest, now: float) -> None:
        """Note that a request was sent as decided."""
        self.count += 1
        self._ring.append(
            Logged(
                self.count,
                now,
                request.origin,
                decision.controller,
                decision.reason,
                decision.new_tokens + decision.cached_tokens,
                bool(request.exclude),
                decision.weighed,
            )
        )

    def after(self, number: int, limit: int) -> list[Logged]:
        """Return choices with higher numbers, oldest first; if there are too many, the last ones."""
        wanted = min(max(0, self.count - number), limit, len(self._ring))
        return list(islice(self._ring, len(self._ring) - wanted, None))

    def newest(self) -> Iterator[Logged]:
        """Yield all choices that are kept, the last one first."""
        return reversed(self._ring)
