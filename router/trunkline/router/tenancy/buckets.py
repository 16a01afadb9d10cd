"""Token buckets: amounts that are used up and flow in again at a steady rate. Pure."""

from __future__ import annotations

from typing import Final

MINUTE_S: Final = 60.0
ROUNDING: Final = 1e-6
"""Rounding that is tolerated when a bucket is checked, in units of the bucket: a client that waited as long as
`Retry-After` said must not be refused again."""
_SHORTEST_WAIT_S: Final = 0.05


class Bucket:
    """A token bucket that fills at a steady rate. It may be overdrawn."""

    __slots__ = ("_at", "_capacity", "_level", "_per_second")

    def __init__(self, per_minute: float, now: float) -> None:
        """Begin with a full bucket. `per_minute`: units that flow in each minute; the bucket holds as many, at
        least 1."""
        self._per_second = per_minute / MINUTE_S
        self._capacity = max(per_minute, 1.0)
        self._level = self._capacity
        self._at = now

    @property
    def capacity(self) -> float:
        """Amount that a full bucket holds."""
        return self._capacity

    def level(self, now: float) -> float:
        """Return the amount in the bucket; below zero: the bucket is overdrawn."""
        if now > self._at:
            self._level = min(self._capacity, self._level + (now - self._at) * self._per_second)
            self._at = now
        return self._level

    def take(self, amount: float, now: float) -> None:
        """Take `amount`, even if the bucket holds less; less than 0: put it back, as far as there is room."""
        self._level = min(self._capacity, self.level(now) - amount)

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until `amount`, which is not more than the capacity, is in the bucket."""
        missing = amount - self.level(now)
        return 0.0 if missing <= ROUNDING else missing / self._per_second

    def admission_wait_s(self, now: float) -> float:
        """Return the seconds until a request may be admitted; 0: it may be now."""
        return self.wait_s(1, now)

    def resize(self, per_minute: float, now: float) -> None:
        """Change the rate. What was taken at the old rate stays taken."""
        taken = self._capacity - self.level(now)
        self._per_second = per_minute / MINUTE_S
        self._capacity = max(per_minute, 1.0)
        self._level = self._capacity - taken


class ReservedBucket:
    """A router's part of a bucket that all routers share (`ledger.py`): what the router has reserved.

    While the record store is away, the router fills a bucket of its own instead, at an equal part of the rate.
    """

    __slots__ = ("_alone", "_alone_from", "_at", "_per_minute", "_rest", "reserved", "used")

    def __init__(self, per_minute: float, now: float) -> None:
        """Begin with nothing reserved. `per_minute`: the rate of the whole cluster's bucket."""
        self._per_minute = per_minute
        self._at = now
        self._rest = self.capacity
        """What was left in the ledger at the last settlement, at the time `_at`."""
        self._alone: Bucket | None = None
        self._alone_from = 0.0
        """What the router's own bucket held at first."""
        self.reserved = 0.0
        """Amount that the last settlement has reserved."""
        self.used = 0.0
        """Amount used since the last settlement; it may be more than `reserved`."""

    @property
    def capacity(self) -> float:
        """Amount that the cluster's full bucket holds."""
        return max(self._per_minute, 1.0)

    @property
    def held(self) -> float:
        """The rest of the reservation; below zero: it is overdrawn."""
        return self.reserved - self.used

    def level(self, now: float) -> float:
        """Return the amount that the cluster's bucket holds, as far as this router knows."""
        if self._alone is not None:
            return self._alone.level(now)
        flowed = max(0.0, now - self._at) * self._per_minute / MINUTE_S
        return min(self.capacity, self._rest + self.held + flowed)

    def take(self, amount: float, now: float) -> None:
        """Take `amount`, even if less is reserved; less than 0: put it back."""
        if self._alone is not None:
            self._alone.take(amount, now)
        else:
            self.used += amount

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until `amount` is in the cluster's bucket, as far as this router knows."""
        if self._alone is not None:
            return self._alone.wait_s(min(amount, self._alone.capacity), now)
        missing = amount - self.level(now)
        return 0.0 if missing <= ROUNDING else missing / (self._per_minute / MINUTE_S)

    def admission_wait_s(self, now: float) -> float:
        """Return the seconds until a request may be admitted; 0: it may be now, from the reservation."""
        if self._alone is None and self.held >= 1 - ROUNDING:
            return 0.0
        wait_s = self.wait_s(1, now)
        return wait_s if self._alone is not None else max(wait_s, _SHORTEST_WAIT_S)

    def resize(self, per_minute: float, now: float) -> None:
        """Change the rate. What is reserved stays reserved until the next settlement."""
        if per_minute != self._per_minute and self._alone is not None:
            self._alone.resize(self._alone.capacity * per_minute / self._per_minute, now)
        self._rest += per_minute - self._per_minute
        self._per_minute = per_minute

    def fall_back(self, routers: int, now: float) -> None:
        """Fill a bucket of this router's own from now on, at the `routers`-th part of the rate. Its first content
        is the reservation or, if there never was one, a full bucket."""
        if self._alone is None:
            alone = self._alone = Bucket(self._per_minute / routers, now)
            if self.reserved or self.used:
                alone.take(alone.capacity - min(self.held, alone.capacity), now)
            self._alone_from = alone.level(now)

    def spent(self, now: float) -> float:
        """Return what is to be paid at a settlement. What flowed into the router's own bucket is not."""
        if self._alone is None:
            return self.used
        return self.used + max(0.0, self._alone_from - self._alone.level(now))

    def paid(self, spent: float, reserved: float) -> None:
        """Note that a settlement is in the ledger, which this router did not know. Arguments are those of
        `settle`."""
        self.used -= spent
        self.reserved = reserved

    def settle(self, spent: float, reserved: float, rest: float, now: float) -> None:
        """Note a settlement.

        Args:
            spent: what was paid.
            reserved: what is reserved now.
            rest: what is left in the ledger.
        """
        self.used = self.spent(now) - spent
        self._alone = None
        self.reserved = reserved
        self._rest = rest
        self._at = now
