"""Controllers that fail get a pause (circuit breaker). Pure: time is an argument.

closed ──failures─► open for 1 s ──time, or it is back──► half open: one request may try
  ▲                     ▲                                     │
  └─────────────────────│───────────── it was admitted ───────┤
                        └── it failed: twice as long as before┘
"""

from __future__ import annotations

from typing import Final

TOLERATED: Final = 2
"""Failures in a row that may be the requests' own; those of requests that were there together count as one."""
PAUSE_SECONDS: Final = 1.0
"""After the first failure that is not tolerated; each one that follows without a success between doubles it, …"""
PAUSE_SECONDS_MAX: Final = 30.0
"""… up to this."""
_NOBODY: Final = -1


class Breaker:
    """One controller's.

    A loss fails all requests that are there at once. So what was sent before the last failure says nothing: it
    neither counts as another one nor closes the breaker.
    """

    __slots__ = ("_failed_at", "_half_open", "_open_until", "_probe", "failures")

    def __init__(self) -> None:
        self.failures = 0
        """In a row; up to `TOLERATED`: closed."""
        self._failed_at = float("-inf")
        self._open_until = float("-inf")
        self._half_open = False
        self._probe = _NOBODY

    @property
    def is_closed(self) -> bool:
        """Whether it takes everything."""
        return self.failures <= TOLERATED

    def allows(self, now: float) -> bool:
        """Whether a request may be sent."""
        if self.is_closed:
            return True
        return self._probe == _NOBODY and (self._half_open or now >= self._open_until)

    def wait_seconds(self, now: float) -> float:
        """How long until a request may be sent, at least; infinity: that depends on the one that tries now."""
        if self.allows(now):
            return 0.0
        return float("inf") if self._probe != _NOBODY else self._open_until - now

    def sent(self, ticket: int) -> None:
        """A request was sent, allowed or not; in a half-open breaker the first one tries."""
        if not self.is_closed and self._probe == _NOBODY:
            self._half_open = True
            self._probe = ticket

    def succeeded(self, sent_at: float) -> None:
        """A request that was sent then has been admitted."""
        if sent_at > self._failed_at:
            self.failures = 0
            self._half_open = False
            self._probe = _NOBODY

    def failed(self, sent_at: float, now: float) -> None:
        """A request that was sent then has failed through no fault of its own."""
        if self.failures and sent_at <= self._failed_at:
            return
        self.failures += 1
        self._failed_at = now
        self._half_open = False
        self._probe = _NOBODY
        if not self.is_closed:
            doublings = min(self.failures - TOLERATED - 1, 10)
            self._open_until = now + min(PAUSE_SECONDS_MAX, PAUSE_SECONDS * 2.0**doublings)

    def ended(self, ticket: int) -> None:
        """A request ended, whichever way: another one may try."""
        if ticket == self._probe:
            self._probe = _NOBODY

    def back(self) -> None:
        """The controller says that it is ready again: it may be tried without delay."""
        self._half_open = not self.is_closed
