"""Shares of the tiers: which chunk of which tenant is evicted first. Pure.

A tenant may have a *floor* and a *ceiling*, both parts of each tier of a group (device, host memory, disk). Each
chunk belongs to at most one tenant with a share: the first one whose request made or used it. All other chunks
belong to no tenant, and stand as those of a tenant without floor and ceiling. When a tier needs room, its chunks
go in this order; among chunks of the same standing, the eviction policy decides:

      above its ceiling ──► ordinary ──► at or below its floor

- Free room is for everybody: a ceiling counts when a tier is full. From then on a tenant above its ceiling
  replaces its own chunks.
- A chunk that comes into a tier evicts none of a higher standing than its own, and a fetch for a waiting request
  evicts none of another tenant's floor. Such a chunk stays out instead, as one does that is worth too little.
- Where something must go (a block for a running request, the host copy of a preempted one, the slots that are kept
  free), the chunks of a floor go last, but they do go: no floor can stop the group.

**Cost.** A heap per tenant with a share, so a choice takes O(tenants with shares + log chunks). Standings change
for all chunks of a tenant at once, which costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import IntEnum
from typing import Generic

from trunkline.kvstore.chunks import ChunkT, TieredChunk
from trunkline.kvstore.tier import TierKind
from trunkline.kvstore.tier_policy import HeapVerdict, LazyHeap, VictimKey


class Standing(IntEnum):
    """How soon a tenant's chunks in a tier are evicted: the lowest standing first."""

    ABOVE_CEILING = 0
    ORDINARY = 1
    AT_FLOOR = 2


class KvAccount:
    """A tenant's share of the tiers, and how much of each it has."""

    __slots__ = ("ceiling", "counts", "floor", "tenant")

    def __init__(self, tenant: str, floor: float, ceiling: float) -> None:
        self.tenant = tenant
        self.floor = floor
        """Part of each tier, from 0 to 1, that others cannot evict."""
        self.ceiling = ceiling
        """Part of each tier, from 0 to 1, above which the tenant's chunks are evicted first."""
        self.counts = dict.fromkeys(TierKind, 0)
        """Number of the tenant's chunks in each tier: of device blocks, and of slots."""


class Shares:
    """The accounts of all tenants with a share, and the sizes of the tiers."""

    def __init__(self, key: Callable[[TieredChunk], VictimKey], sizes: Mapping[TierKind, int]) -> None:
        """
        Args:
            key: sort key of the eviction policy.
            sizes: number of blocks or slots of each tier that has a fixed size.
        """
        self.key = key
        self._sizes = sizes
        self._accounts: dict[str, KvAccount] = {}

    def account(self, tenant: str, floor: float, ceiling: float) -> KvAccount | None:
        """Return a tenant's account with these shares from now on; None if the tenant never had a share."""
        account = self._accounts.get(tenant)
        if account is None:
            if floor <= 0.0 and ceiling >= 1.0:
                return None
            account = self._accounts[tenant] = KvAccount(tenant, floor, ceiling)
        account.floor, account.ceiling = floor, ceiling
        return account

    def accounts(self) -> Iterable[KvAccount]:
        """Return the accounts of all tenants that have, or had, a share."""
        return self._accounts.values()

    @staticmethod
    def count(chunk: TieredChunk, tier: TierKind, more: int) -> None:
        """Count a chunk that has come into a tier (`more` is 1) or left it (-1)."""
        if chunk.account is not None:
            chunk.account.counts[tier] += more

    def standing(self, account: KvAccount | None, tier: TierKind, more: int = 0) -> Standing:
        """Return the standing of a tenant's chunks in a tier. `more`: chunks that the tenant is about to add."""
        if account is None:
            return Standing.ORDINARY
        count, size = account.counts[tier] + more, self._sizes[tier]
        if count > account.ceiling * size:
            return Standing.ABOVE_CEILING
        return Standing.AT_FLOOR if count <= account.floor * size else Standing.ORDINARY

    def rank(self, chunk: TieredChunk, tier: TierKind) -> VictimKey:
        """Return the sort key of a chunk in a tier: of two chunks, the one with the smaller rank goes first."""
        return (float(self.standing(chunk.account, tier)), *self.key(chunk))

    def outranks(self, newcomer: TieredChunk, victim: TieredChunk, tier: TierKind) -> bool:
        """Return whether `newcomer` may come into a tier in the place of `victim`."""
        if newcomer.account is not victim.account:
            own = self.standing(newcomer.account, tier, more=1)
            other = self.standing(victim.account, tier)
            if own != other:
                return own > other
        return self.key(newcomer) > self.key(victim)

    def is_protected(self, victim: TieredChunk, tier: TierKind, newcomer: TieredChunk) -> bool:
        """Return whether a chunk in a tier belongs to the floor of a tenant that is not the newcomer's."""
        account = victim.account
        if account is None or account is newcomer.account:
            return False
        return self.standing(account, tier) is Standing.AT_FLOOR


class SharedHeap(Generic[ChunkT]):
    """Chunks of one tier in the order in which they are evicted: a lazy heap for each tenant with a share, and one
    for all other chunks."""

    def __init__(self, shares: Shares, tier: TierKind) -> None:
        self._shares = shares
        self._tier = tier
        self._parts: dict[KvAccount | None, LazyHeap[ChunkT]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._parts.values()))

    def __contains__(self, chunk: ChunkT) -> bool:
        part = self._parts.get(chunk.account)
        return part is not None and chunk in part

    def __iter__(self) -> Iterator[ChunkT]:
        """Iterate over the chunks, in no order."""
        for part in self._parts.values():
            yield from part

    def push(self, chunk: ChunkT) -> None:
        """Add a chunk, or report that its key may have become smaller."""
        part = self._parts.get(chunk.account)
        if part is None:
            part = self._parts[chunk.account] = LazyHeap(self._shares.key)
        part.push(chunk)

    def discard(self, chunk: ChunkT) -> None:
        """Remove a chunk if it is in the heap."""
        part = self._parts.get(chunk.account)
        if part is not None:
            part.discard(chunk)

    def search(self, judge: Callable[[ChunkT], HeapVerdict], tries: int = 64) -> ChunkT | None:
        """Return the first chunk that `judge` takes; None if it took none.

        `STOP` and the limit of skipped chunks end the search among the chunks of one tenant only: those of others
        have another standing.
        """
        standings = {account: self._shares.standing(account, self._tier) for account in self._parts}
        for standing in sorted(set(standings.values())):
            parts = [part for account, part in self._parts.items() if standings[account] == standing]
            found = self._search_parts(parts, judge, tries)
            if found is not None:
                return found
        return None

    def _search_parts(
        self, parts: list[LazyHeap[ChunkT]], judge: Callable[[ChunkT], HeapVerdict], tries: int
    ) -> ChunkT | None:
        """Return the first chunk that `judge` takes of some tenants with the same standing."""
        best: ChunkT | None = None
        least: VictimKey = (math.inf,)
        for part in parts:
            chunk = part.search(judge, tries)
            if chunk is not None and (key := self._shares.key(chunk)) < least:
                best, least = chunk, key
        return best
