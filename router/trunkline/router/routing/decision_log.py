"""The last decisions of routing, for the dashboard. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

from trunkline.router.routing.request import Decision, Origin, RouteRequest, Weighed

DECISIONS_MAX: Final = 1000


class Logged(NamedTuple):
    """A decision that was carried out."""

    number: int
    """Number of the decision; decisions are counted from 1 on, without gaps."""
    at: float
    """Time of the decision: the router's loop time, in seconds."""
    origin: Origin
    controller: int
    name: str
    """The controller's name; its slot may belong to another one by now."""
    reason: str
    """Why the controller was chosen (`Decision.reason`)."""
    prompt_tokens: int
    is_again: bool
    """Whether the request was at another controller before, which refused it, lost it or handed it over."""
    weighed: Weighed | None


class DecisionLog:
    """The last decisions, together with what was known of each controller, for the dashboard.

    The log keeps references to arrays that each decision makes anew, which costs next to nothing. They are made
    readable only when the dashboard asks for them.
    """

    def __init__(self, size: int = DECISIONS_MAX) -> None:
        self.count = 0
        """Number of decisions since the start."""
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
                decision.name,
                decision.reason,
                decision.new_tokens + decision.cached_tokens,
                bool(request.exclude),
                decision.weighed,
            )
        )

    def after(self, number: int, limit: int) -> list[Logged]:
        """Return the decisions with higher numbers, the oldest first; of more than `limit` the last ones."""
        wanted = min(max(0, self.count - number), limit, len(self._ring))
        return list(islice(self._ring, len(self._ring) - wanted, None))

    def newest(self) -> Iterator[Logged]:
        """Yield all decisions that are kept, the last one first."""
        return reversed(self._ring)
