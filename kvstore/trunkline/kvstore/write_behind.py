"""Which chunks in host memory are still to be written to the tiers below, and when (write-behind).

They are written in a pause, because who comes back at once with a cached prompt would wait beside these writes.
A chunk may have to leave host memory when only one of the tiers has it. Then it is *owed* to the other tier: it is
queued again once it is read, or that tier would lack it for ever, and with it all of the path below it.
What is read from the remote tier is queued for the disk in any case: another group may have computed it, or the
disk may have lost it. Else it would travel from the remote tier again and again.
Pure: time is an argument.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection
from typing import Final, Generic

from trunkline.kvstore.chunks import NO_SLOT, ChunkT
from trunkline.kvstore.tier import TierKind
from trunkline.kvstore.tier_policy import DirectoryConfig

WAITING_SHARE: Final = 1 / 8
"""Share of host memory whose chunks may wait for a pause: what is evicted before it is written is lost."""


class WriteBehind(Generic[ChunkT]):
    """A queue for each tier below host memory. A chunk is written once no request has run or waited for
    `write_pause_s`, after `write_within_s` in any case, and without a pause if too many wait."""

    def __init__(self, tiers: Collection[TierKind], config: DirectoryConfig) -> None:
        self._config = config
        self.queues: dict[TierKind, OrderedDict[ChunkT, float]] = {tier: OrderedDict() for tier in tiers}
        """The chunks that are not in that tier yet, oldest first, each with the time when `see` first saw it;
        `inf`: it has not."""
        self.owed: dict[TierKind, set[ChunkT]] = {tier: set() for tier in tiers}
        """The chunks that left host memory before they were written to that tier."""
        self.is_hurried = False
        """Whether chunks are written at once, because the system is about to stop."""
        self._is_busy = False
        self._busy_at = -math.inf
        """When requests were last seen to run or wait."""

    def note_requests(self, now: float, *, is_busy: bool) -> None:
        """Note whether requests run or wait; call it before the round of orders of `now`."""
        if is_busy or self._is_busy:
            self._busy_at = now
        self._is_busy = is_busy

    def add(self, chunk: ChunkT) -> None:
        """Queue a chunk that has come into host memory for the tiers that do not have it."""
        if self._config.write_behind:
            for tier in self.queues:
                if not _has(tier, chunk):
                    self.add_again(tier, chunk)

    def add_again(self, tier: TierKind, chunk: ChunkT) -> None:
        """Queue a chunk for one tier, behind all others."""
        if self._config.write_behind:
            self.queues[tier][chunk] = math.inf
            self.owed[tier].discard(chunk)

    def left(self, chunk: ChunkT) -> None:
        """Note that a chunk has left host memory: it is owed to the tiers for which it was queued."""
        for tier, queue in self.queues.items():
            if queue.pop(chunk, None) is not None and not _has(tier, chunk):
                self.owed[tier].add(chunk)

    def came_back(self, chunk: ChunkT) -> None:
        """Queue a chunk that was read into host memory for the tiers to which it is owed, and for the disk if the
        remote tier has it.

        What only a peer has is written when it leaves host memory, because that copy is the only one.
        """
        for tier, owed in self.owed.items():
            if chunk in owed or (tier is TierKind.DISK and chunk.remote):
                owed.discard(chunk)
                if not _has(tier, chunk):
                    self.add_again(tier, chunk)

    def forget(self, chunk: ChunkT) -> None:
        """Forget a chunk that its owner removes."""
        for tier, queue in self.queues.items():
            queue.pop(chunk, None)
            self.owed[tier].discard(chunk)

    def is_due(self, tier: TierKind, chunk: ChunkT) -> bool:
        """Return whether a chunk is still to be written to a tier."""
        return chunk in self.queues[tier] and not _has(tier, chunk)

    def see(self, now: float) -> None:
        """Begin to count the time that new chunks wait."""
        for queue in self.queues.values():
            for chunk in reversed(queue):
                if queue[chunk] < math.inf:
                    break
                queue[chunk] = now

    def take(self, tier: TierKind, now: float) -> ChunkT | None:
        """Return the next chunk to be written to a tier now, and no longer queue it; None: there is none."""
        queue = self.queues[tier]
        while queue and now >= self._time_of(queue):
            chunk, _ = queue.popitem(last=False)
            if not _has(tier, chunk):
                return chunk
        return None

    def next_time(self, now: float) -> float:
        """Return when, if no request comes, the next chunk is to be written; `inf`: none is. While requests run
        there are orders after each step; what was to be written before `now` waits for something else."""
        if self._is_busy:
            return math.inf
        times = [self._time_of(queue) for queue in self.queues.values() if queue]
        return min((at for at in times if at > now), default=math.inf)

    def _time_of(self, queue: OrderedDict[ChunkT, float]) -> float:
        """Return when the first chunk of a queue is written, if no request comes."""
        if self.is_hurried or len(queue) > WAITING_SHARE * self._config.host_slots:
            return -math.inf
        since = next(iter(queue.values()))
        return min(self._busy_at + self._config.write_pause_s, since + self._config.write_within_s)


def _has(tier: TierKind, chunk: ChunkT) -> bool:
    return chunk.disk != NO_SLOT if tier is TierKind.DISK else chunk.remote
