"""Ledgers: what a tenant has used of its limits in the whole cluster, as a record that all routers share. Pure.

    ledger ─► taken: what was used and has not flowed in again
       └────► shares: what each router has reserved, until when, and how many places its running requests have

A router *settles* with the ledger from time to time: it pays what it has used, gives back the rest of its share,
and reserves a new one, from which it admits requests without asking anybody. Shares and what was taken are never
more than the limit together, but for what running requests overdraw. If a router dies, its share ends after
`LEASE_S` and counts as used, so it flows in again.

A ledger has a time of its own, in seconds, which only goes forward. A router goes on from the ledger's time at its
last settlement by its own steady clock, so wrong clocks of hosts change nothing. Only a router that comes to a
ledger for the first time needs the wall clock to know how long the ledger was left alone.
"""

from __future__ import annotations

from typing import Final

import msgspec

from trunkline.router.config import TenantLimits
from trunkline.router.tenancy.buckets import MINUTE_S

LEASE_S: Final = 15.0
"""Time in seconds after which a router's share ends if the router does not settle."""
SKEW_S: Final = 5.0
"""Difference in seconds between the wall clocks of two hosts that does no harm."""
_JUMP_S: Final = 60.0
"""Time in seconds by which a ledger's wall clock may be ahead before it counts as wrong."""


class Share(msgspec.Struct, frozen=True, array_like=True):
    """The part of a tenant's limits that a router has reserved."""

    until: float
    """Time of the ledger at which the share ends."""
    requests: float = 0.0
    tokens: float = 0.0
    places: int = 0
    """How many requests the router may run at once."""
    is_short: bool = False
    """Whether the router has refused a request for want of a place."""
    number: int = 0
    """Number of the settlement that made the share; the router counts them."""


class Ledger(msgspec.Struct, frozen=True, array_like=True):
    """The state of a tenant's limits in the cluster. MessagePack; new fields need defaults."""

    time: float = 0.0
    wall: float = 0.0
    """Unix time in seconds of the last settlement, by the clock that is most ahead."""
    requests: float = 0.0
    """Requests that were used or lost and have not flowed in again."""
    tokens: float = 0.0
    """Likewise; more than the limit if running requests have overdrawn it."""
    shares: dict[str, Share] = {}
    """The routers' shares, by their ids."""


class Use(msgspec.Struct, frozen=True):
    """What a router tells a ledger."""

    requests: float
    """Requests since its last settlement."""
    tokens: float
    """Likewise; less than 0: more were given back than used."""
    running: int
    """Requests that run now."""
    is_active: bool = True
    """Whether the router needs a reserve."""
    wants_place: bool = False
    """Whether a request waits for a place."""
    reserved: tuple[float, float] = (0.0, 0.0)
    """Requests and tokens that it has reserved; others may have ended the share since."""
    number: int = 0
    """Number of this settlement."""


def time_without_clock(ledger: Ledger, wall: float) -> float:
    """Return a ledger's present time, for a router that has not settled with it before. `wall`: Unix time."""
    return ledger.time + max(0.0, wall - ledger.wall - SKEW_S)


def settled(ledger: Ledger, router: str, use: Use, limits: TenantLimits, time: float, wall: float) -> Ledger:
    """Return the ledger after a settlement.

    Args:
        router: the router's id.
        time: the ledger's present time.
        wall: Unix time in seconds.
    """
    time = max(time, ledger.time)
    own = ledger.shares.get(router)
    others = {name: share for name, share in ledger.shares.items() if name != router and share.until > time}
    ended = [share for name, share in ledger.shares.items() if name != router and share.until <= time]
    lost_requests, lost_tokens = (0.0, 0.0) if own is not None else use.reserved  # paid when the share ended
    passed = time - ledger.time
    requests = _flowed(ledger.requests, limits.requests_per_minute, passed)
    requests += sum(share.requests for share in ended) + max(0.0, use.requests - lost_requests)
    tokens = _flowed(ledger.tokens, limits.tokens_per_minute, passed) + sum(share.tokens for share in ended)
    tokens = max(0.0, tokens + max(use.tokens - lost_tokens, min(use.tokens, 0.0)))
    if use.is_active or use.running:
        others[router] = _share(use, limits, requests, tokens, others, time + LEASE_S)
    return Ledger(time, _later(ledger.wall, wall), requests, tokens, others)


def rest_of(ledger: Ledger, limits: TenantLimits) -> tuple[float, float]:
    """Return how many requests and tokens are neither taken nor in a share. Below zero: they are overdrawn."""
    shares = ledger.shares.values()
    return (
        _rest(limits.requests_per_minute, ledger.requests, sum(share.requests for share in shares)),
        _rest(limits.tokens_per_minute, ledger.tokens, sum(share.tokens for share in shares)),
    )


def _share(
    use: Use, limits: TenantLimits, requests: float, tokens: float, others: dict[str, Share], until: float
) -> Share:
    """Return a router's new share. `requests`, `tokens`: taken."""
    routers = len(others) + 1
    there = others.values()
    places = _places(use, limits.requests, others)
    is_short = use.wants_place and places <= use.running
    if not use.is_active:
        return Share(until, places=places, number=use.number)
    return Share(
        until,
        _part(_rest(limits.requests_per_minute, requests, sum(share.requests for share in there)), routers),
        _part(_rest(limits.tokens_per_minute, tokens, sum(share.tokens for share in there)), routers),
        places,
        is_short,
        use.number,
    )


def _places(use: Use, limit: int | None, others: dict[str, Share]) -> int:
    """Return how many requests a router may run: those that it runs already, and some more."""
    if limit is None:
        return use.running
    free = limit - use.running - sum(share.places for share in others.values())
    if free <= 0 or not use.is_active:
        return use.running
    if any(share.is_short for share in others.values()):
        return use.running + (1 if use.wants_place else 0)
    return use.running + max(1, free // (2 * (len(others) + 1)))


def _part(rest: float, routers: int) -> float:
    """Return how much of what is left a router reserves: so little that others find something, too."""
    return max(1.0, rest / (2 * routers)) if rest >= 1 else 0.0


def _rest(per_minute: int | None, taken: float, shared: float) -> float:
    return 0.0 if per_minute is None else max(per_minute, 1) - taken - shared


def _flowed(taken: float, per_minute: int | None, seconds: float) -> float:
    return 0.0 if per_minute is None else max(0.0, taken - seconds * per_minute / MINUTE_S)


def _later(old: float, new: float) -> float:
    """Return the wall clock to note. One that is far ahead was wrong and is forgotten."""
    return new if new > old or old - new > _JUMP_S else old
