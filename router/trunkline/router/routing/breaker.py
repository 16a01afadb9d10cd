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
        """Whether all requests are allowed."""
        return self.failures <= TOLERATED

    def allows(self, now: float) -> bool:
        """Return whether a request may be sent."""
        if self.is_closed:
            return True
        return self._probe == _NOBODY and (self._half_open or now >= self._open_until)

    def wait_seconds(self, now: float) -> float:
        """Return the seconds until a request may be sent; infinity while a trial request has not ended."""
        if self.allows(now):
            return 0.0
        return float("inf") if self._probe != _NOBODY else self._open_until - now

    def sent(self, ticket: int) -> None:
        """Note that a request was sent, allowed or not; in a half-open breaker the first one is the trial."""
        if not self.is_closed and self._probe == _NOBODY:
            self._half_open = True
            self._probe = ticket

    def succeeded(self, sent_at: float) -> None:
        """Note that a request, sent at `sent_at`, has been admitted."""
        if sent_at > self._failed_at:
            self.failures = 0
            self._half_open = False
            self._probe = _NOBODY

    def failed(self, sent_at: float, now: float) -> None:
        """Note that a request, sent at `sent_at`, has failed through no fault of its own."""
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
        """Note that a request ended in any way: another one may be the trial."""
        if ticket == self._probe:
            self._probe = _NOBODY

    def back(self) -> None:
        """Allow a trial without delay: the controller reports that it is ready again."""
        self._half_open = not self.is_closed
