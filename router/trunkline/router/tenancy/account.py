"""A router's account with a tenant's ledger: what it has reserved, and when it must settle. Pure.

`shared_limits.py` carries the settlements out.
"""

from __future__ import annotations

import math
from typing import Final

from trunkline.router.config import NO_LIMITS, TenantLimits
from trunkline.router.tenancy.buckets import ROUNDING, ReservedBucket
from trunkline.router.tenancy.ledger import LEASE_S, Ledger, Share, Use, rest_of, settled, time_without_clock

RENEW_S: Final = LEASE_S / 3
"""Time in seconds between two settlements that only keep a share from ending."""
_STALE_S: Final = 0.8 * LEASE_S
"""Age in seconds of a settlement from which on its share may have ended."""
_PAUSES_S: Final = (0.05, 1.0)
"""The shortest and the longest time, in seconds, between two settlements that requests wait for."""


class Account:
    """What a router knows about a tenant's limits in the cluster. Times: seconds of the router's steady clock."""

    def __init__(self, name: str) -> None:
        self.name = name
        """The tenant's name."""
        self.limits = NO_LIMITS
        self.requests: ReservedBucket | None = None
        self.tokens: ReservedBucket | None = None
        self.places = 0
        """How many requests this router may run at once."""
        self.running = 0
        """How many it runs."""
        self.changed = False
        """Whether requests have come or gone since the last settlement."""
        self.ledger: Ledger | None = None
        """The ledger as of the last settlement; None: there was none."""
        self.version = 0
        """The version of the ledger's record; 0: not known."""
        self.is_alone = False
        """Whether the router grants its own part of each limit, because the ledger cannot be read."""
        self._number = 0
        """Number of the last settlement that was begun."""
        self._unknown: Use | None = None
        """What the last settlement was to tell the ledger, while it is not known whether it did."""
        self._clock_offset: float | None = None
        """The ledger's time less this router's; None: not known."""
        self._settled_at = -math.inf
        self._retry_at = -math.inf
        """Time from which on a settlement may find more than the last one has."""

    def obey(self, limits: TenantLimits, now: float) -> None:
        """Take over the tenant's limits."""
        self.limits = limits
        self.requests = _resized(self.requests, limits.requests_per_minute, now)
        self.tokens = _resized(self.tokens, limits.tokens_per_minute, now)

    @property
    def has_limits(self) -> bool:
        """Whether the tenant has limits that routers share."""
        limits = self.limits
        return (limits.requests, limits.requests_per_minute, limits.tokens_per_minute) != (None, None, None)

    @property
    def has_share(self) -> bool:
        """Whether the ledger has a share of this router, as far as it knows."""
        return self._settled_at > -math.inf

    def note_running(self, running: int) -> None:
        """Note how many requests run."""
        self.running = running
        self.changed = True

    def needs(self, now: float) -> bool:
        """Return whether a request must wait for a settlement before it can be admitted or refused."""
        if not self.has_limits or self.is_alone or now < self._retry_at:
            return False
        if now - self._settled_at > _STALE_S:
            return True
        return self._lacks_units() or self._lacks_place()

    def is_due(self, now: float) -> bool:
        """Return whether the router should settle in the background."""
        if self._is_active() or self._has_reserve() or self._unknown is not None:
            return True
        return self.has_share and now - self._settled_at >= RENEW_S

    def is_idle(self) -> bool:
        """Return whether there is nothing to settle until the next request."""
        return not (self.has_share or self.running or self._is_active() or self._unknown is not None)

    def use(self, now: float, *, wants_place: bool) -> Use:
        """Return what to tell the ledger. `wants_place`: whether a request waits for this settlement."""
        requests, tokens = self.requests, self.tokens
        is_active = wants_place or self._is_active()
        self.changed = False
        self._number += 1
        self._unknown = Use(
            0.0 if requests is None else requests.spent(now),
            0.0 if tokens is None else tokens.spent(now),
            self.running,
            is_active,
            wants_place and self.limits.requests is not None,
            (0.0 if requests is None else requests.reserved, 0.0 if tokens is None else tokens.reserved),
            self._number,
        )
        return self._unknown

    @property
    def is_unsure(self) -> bool:
        """Whether a settlement was cut off, for example because its request left: the ledger may have it."""
        return self._unknown is not None

    def catch_up(self, share: Share | None) -> None:
        """Note whether the ledger has the settlement that was cut off. `share`: this router's share in it."""
        use, self._unknown = self._unknown, None
        if use is None:
            return
        self.changed = self.changed or use.is_active
        if share is None or share.number != use.number:
            return
        if self.requests is not None:
            self.requests.paid(use.requests, share.requests)
        if self.tokens is not None:
            self.tokens.paid(use.tokens, share.tokens)

    def propose(self, ledger: Ledger, router: str, use: Use, now: float, wall: float) -> Ledger:
        """Return the ledger as it is to be. Until it is, no place is used that it gives back. `wall`: Unix time in
        seconds."""
        offset = self._clock_offset
        time = time_without_clock(ledger, wall) if offset is None else now + offset
        new = settled(ledger, router, use, self.limits, time, wall)
        share = new.shares.get(router)
        self.places = min(self.places, 0 if share is None else share.places)
        return new

    def settle(self, ledger: Ledger, version: int, router: str, use: Use, now: float) -> None:
        """Note that the ledger is as proposed. `now`: the time of the proposal."""
        self.ledger, self.version = ledger, version
        self.is_alone = False
        self._unknown = None
        self._clock_offset = ledger.time - now
        share = ledger.shares.get(router)
        self._settled_at = -math.inf if share is None else now
        self.places = 0 if share is None else share.places
        rests = rest_of(ledger, self.limits)
        parts = (0.0, 0.0) if share is None else (share.requests, share.tokens)
        wait_s = _PAUSES_S[0] if use.wants_place and self._lacks_place() else 0.0
        for bucket, spent, part, rest in zip(
            (self.requests, self.tokens), (use.requests, use.tokens), parts, rests, strict=True
        ):
            if bucket is not None:
                bucket.settle(spent, part, rest, now)
                wait_s = max(wait_s, bucket.admission_wait_s(now) if use.is_active else 0.0)
        self._retry_at = now + min(wait_s, _PAUSES_S[1])

    def fail(self, routers: int, now: float) -> None:
        """Note that the ledger cannot be read: grant the `routers`-th part of each limit until it can.

        It then tells whether it has the settlement that was cut off.
        """
        self.changed = True
        self.version = 0
        self.is_alone = True
        self._clock_offset = -math.inf  # what flows in meanwhile, each router grants from its own part
        known = 0 if self.ledger is None else len(self.ledger.shares)
        parts = max(routers, known, 1)
        if self.limits.requests is not None:
            self.places = math.ceil(self.limits.requests / parts)
        for bucket in (self.requests, self.tokens):
            if bucket is not None:
                bucket.fall_back(parts, now)

    def _is_active(self) -> bool:
        return self.changed or any(
            bucket.used > 0 for bucket in (self.requests, self.tokens) if bucket is not None
        )

    def _has_reserve(self) -> bool:
        if any(bucket.reserved > 0 for bucket in (self.requests, self.tokens) if bucket is not None):
            return True
        return self.has_share and (self.places > self.running or not self.running)

    def _lacks_units(self) -> bool:
        both = (self.requests, self.tokens)
        return any(bucket.held < 1 - ROUNDING for bucket in both if bucket is not None)

    def _lacks_place(self) -> bool:
        return self.limits.requests is not None and self.running >= self.places


def _resized(bucket: ReservedBucket | None, per_minute: int | None, now: float) -> ReservedBucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return ReservedBucket(per_minute, now)
    bucket.resize(per_minute, now)
    return bucket
