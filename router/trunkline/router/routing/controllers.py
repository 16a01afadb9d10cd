"""The state of each controller as routing knows it: its load, its recent failures, and its sessions. Pure.

Load. A router knows its own requests exactly, and other routers' requests from the controllers' reports. A report
also counts this router's requests. So the others have what was reported less this router's own at that moment;
between two reports only its own load moves on. Its own load is the set of its live tickets; each is released
exactly once, whatever happens to the request.

Failures. A controller that fails gets a pause (circuit breaker):

closed ──failures─► open for 1 s ──time, or it is back──► half open: one request may try
  ▲                     ▲                                     │
  └─────────────────────│───────────── it was admitted ───────┤
                        └── it failed: twice as long as before┘
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from math import inf
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
TOLERATED: Final = 2
"""Number of failures in a row after which a controller gets no pause yet: the requests themselves may be at fault.
Requests that fail together count as one failure."""
PAUSE_SECONDS: Final = 1.0
"""Pause after the first failure that is not tolerated. Each further failure without a success doubles the
pause."""
PAUSE_SECONDS_MAX: Final = 30.0
"""Longest pause of a controller that goes on failing."""
_NO_TRIAL: Final = -1


@dataclass(slots=True)
class SentRequest:
    """A request of this router that was sent to a controller and has not ended."""

    controller: int
    new_tokens: int
    """Prompt tokens that the controller was expected to compute for the request."""
    blocks: int
    """Number of chunks of the request's prompt."""
    sent_at: float
    breaker: Breaker
    """The controller's circuit breaker at that time; the controller has another one if it has been away since."""
    started: bool = False


def resized(values: NDArray[Any], rows: int) -> NDArray[Any]:
    """Return a longer copy of an array; the new rows at its end are zero."""
    longer = np.zeros((rows, *values.shape[1:]), values.dtype)
    longer[: len(values)] = values
    return longer


class Loads:
    """The load of all controllers; arrays are by controller."""

    def __init__(self, controllers: int) -> None:
        self._live: dict[int, SentRequest] = {}
        self.own_inflight = np.zeros(controllers)
        """Requests of this router that have not ended."""
        self.own_queued = np.zeros(controllers)
        """Prompt tokens to compute for this router's requests that have not started."""
        self.own_blocks = np.zeros(controllers)
        """Chunks of the prompts of this router's requests."""
        self.other_inflight = np.zeros(controllers)
        """Requests of other routers, as of the last report."""
        self.other_queued = np.zeros(controllers)
        """Prompt tokens to compute for requests of other routers, as of the last report."""
        self.kv_used = np.zeros(controllers)
        """Part of each controller's blocks that running requests hold, 0 to 1, as of its last report."""
        self.running = np.zeros(controllers)
        """Number of each controller's running requests, as of its last report."""
        self.room = np.full(controllers, inf)
        """Tokens that each controller can keep besides those that it has, as of its last report; infinity: not
        known, or as many as there are."""

    @property
    def inflight(self) -> FloatArray:
        """Requests of all routers."""
        return self.own_inflight + self.other_inflight

    @property
    def queued(self) -> FloatArray:
        """Prompt tokens of all routers' requests that have still to be computed."""
        return self.own_queued + self.other_queued

    def grow(self, controllers: int) -> None:
        """Make room for so many controllers."""
        known = len(self.room)
        for name, values in vars(self).items():
            if isinstance(values, np.ndarray):
                setattr(self, name, resized(values, controllers))
        self.room[known:] = inf

    def report(
        self,
        controller: int,
        *,
        requests: int,
        queued_tokens: int,
        kv_used: float,
        running: int,
        room: float = inf,
    ) -> None:
        """Note a controller's report about the requests of all routers.

        Args:
            requests: requests that have not ended.
            queued_tokens: prompt tokens of these requests that have still to be computed.
            kv_used: part of the controller's blocks that running requests hold, 0 to 1.
            running: requests that run.
            room: tokens that the controller can keep without giving up any that it has.
        """
        self.other_inflight[controller] = max(0.0, requests - self.own_inflight[controller])
        self.other_queued[controller] = max(0.0, queued_tokens - self.own_queued[controller])
        self.kv_used[controller] = kv_used
        self.running[controller] = running
        self.room[controller] = room

    def displaced(self, lacking: NDArray[np.int64], queued: FloatArray) -> FloatArray:
        """Return how many tokens would leave each controller's tiers to make room for those of a request that it
        lacks, and for those of the prompts before it (`queued`)."""
        gone: FloatArray = np.maximum(lacking - np.maximum(self.room - queued, 0.0), 0.0)
        return gone

    def lost(self, controller: int) -> None:
        """Forget a controller's report. Requests that were sent there end ticket by ticket."""
        for reported in (self.other_inflight, self.other_queued, self.kv_used, self.running):
            reported[controller] = 0.0
        self.room[controller] = inf

    def sent(self, ticket: int, live: SentRequest) -> None:
        """Add a request that was sent.

        Raises:
            ValueError: its ticket is in use.
        """
        if ticket in self._live:
            raise ValueError(f"ticket {ticket} is in use; a ticket is one sending of one request")
        self._live[ticket] = live
        self.own_inflight[live.controller] += 1
        self.own_queued[live.controller] += live.new_tokens
        self.own_blocks[live.controller] += live.blocks

    def started(self, ticket: int) -> SentRequest | None:
        """Note that a request's prompt is computed; return the request, or None if it is not live or has started
        before."""
        live = self._live.get(ticket)
        if live is None or live.started:
            return None
        live.started = True
        self.own_queued[live.controller] -= live.new_tokens
        return live

    def ended(self, ticket: int) -> SentRequest | None:
        """Remove a request and return it; None: it was not live."""
        live = self._live.pop(ticket, None)
        if live is None:
            return None
        self.own_inflight[live.controller] -= 1
        self.own_blocks[live.controller] -= live.blocks
        if not live.started:
            self.own_queued[live.controller] -= live.new_tokens
        return live


class SessionPlaces:
    """The controller to which this router has sent each session last, by name; a bounded number of sessions."""

    def __init__(self, sessions_max: int) -> None:
        self._places: OrderedDict[str, str] = OrderedDict()
        self._sessions_max = sessions_max

    def __len__(self) -> int:
        return len(self._places)

    def find(self, session: str) -> str:
        """Return the name of a session's controller; "": not known."""
        return self._places.get(session, "")

    def sent(self, session: str, controller: str) -> None:
        """Note that a request of the session was sent to a controller."""
        self._places[session] = controller
        self._places.move_to_end(session)
        if len(self._places) > self._sessions_max:
            self._places.popitem(last=False)


class Breaker:
    """The circuit breaker of one controller.

    When a controller is lost, all its requests fail at once. So a request that was sent before the last failure
    says nothing: it neither counts as another failure nor closes the breaker.
    """

    __slots__ = ("_failed_at", "_half_open", "_open_until", "_trial", "failures")

    def __init__(self) -> None:
        self.failures = 0
        """Number of failures in a row; up to `TOLERATED` the breaker is closed."""
        self._failed_at = float("-inf")
        self._open_until = float("-inf")
        self._half_open = False
        self._trial = _NO_TRIAL

    @property
    def is_closed(self) -> bool:
        """Whether all requests are allowed."""
        return self.failures <= TOLERATED

    def allows(self, now: float) -> bool:
        """Return whether a request may be sent."""
        if self.is_closed:
            return True
        return self._trial == _NO_TRIAL and (self._half_open or now >= self._open_until)

    def wait_seconds(self, now: float) -> float:
        """Return the seconds until a request may be sent; infinity while the single request of a half-open breaker
        has not ended."""
        if self.allows(now):
            return 0.0
        return float("inf") if self._trial != _NO_TRIAL else self._open_until - now

    def sent(self, ticket: int) -> None:
        """Note that a request was sent, allowed or not. In a half-open breaker the first one is the single request
        that decides whether the breaker closes."""
        if not self.is_closed and self._trial == _NO_TRIAL:
            self._half_open = True
            self._trial = ticket

    def succeeded(self, sent_at: float) -> None:
        """Note that a request, sent at `sent_at`, has been admitted."""
        if sent_at > self._failed_at:
            self.failures = 0
            self._half_open = False
            self._trial = _NO_TRIAL

    def failed(self, sent_at: float, now: float) -> None:
        """Note that a request, sent at `sent_at`, has failed because of the controller."""
        if self.failures and sent_at <= self._failed_at:
            return
        self.failures += 1
        self._failed_at = now
        self._half_open = False
        self._trial = _NO_TRIAL
        if not self.is_closed:
            doublings = min(self.failures - TOLERATED - 1, 10)
            self._open_until = now + min(PAUSE_SECONDS_MAX, PAUSE_SECONDS * 2.0**doublings)

    def ended(self, ticket: int) -> None:
        """Note that a request ended in any way. If it was the single request of a half-open breaker, another one
        may follow."""
        if ticket == self._trial:
            self._trial = _NO_TRIAL

    def back(self) -> None:
        """Allow a single request without delay: the controller reports that it is ready again."""
        self._half_open = not self.is_closed
