"""Which chunks the waiting jobs will use, and how soon (CachedAttention §3.3.1).

The scheduler names the chunks that each waiting job will use; this module keeps them by their earliest job. It
answers two questions without a search through the queue: how soon a chunk is wanted, which ranks it for eviction,
and which wanted chunk outside of host memory is wanted first, which is the next to fetch. The paper's prefetch
window L_pw = C_mem / S_kv results from actual sizes: fetching goes on in the order of the queue while the chunk to
be fetched is wanted earlier than the one that it replaces.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from functools import partial
from typing import Generic

from trunkline.kvstore.chunks import ChunkT, QueueKey
from trunkline.kvstore.lazy_heap import HeapVerdict, LazyHeap
from trunkline.kvstore.tier import TierKind


def wanted_later(chunk: ChunkT, other: ChunkT) -> bool:
    """Return whether `chunk` is wanted later than `other`: by a later job, deeper in the same path, or not at
    all."""
    if not chunk.wants:
        return True
    return bool(other.wants) and _wanted_first(chunk) > _wanted_first(other)


def _wanted_first(chunk: ChunkT) -> tuple[float, ...]:
    return (*chunk.wants[0][0], chunk.depth) if chunk.wants else ()


class WaitingJobs(Generic[ChunkT]):
    """The waiting jobs and the chunks that they will use."""

    def __init__(self) -> None:
        self._jobs: dict[int, tuple[QueueKey, tuple[ChunkT, ...]]] = {}
        self._heads: list[tuple[QueueKey, int]] = []
        """A heap. Entries of jobs that are gone are dropped when they come to the top."""
        self._lacking: dict[TierKind, LazyHeap[ChunkT]] = {
            TierKind.DISK: LazyHeap(_wanted_first),
            TierKind.REMOTE: LazyHeap(_wanted_first),
        }
        """Wanted chunks that are neither in host memory nor on the device, by the tier to fetch them from."""

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job: int) -> bool:
        return job in self._jobs

    def add(self, job: int, key: QueueKey, chunks: Sequence[ChunkT]) -> None:
        """Add a waiting job that will use `chunks`."""
        self._jobs[job] = key, tuple(chunks)
        heapq.heappush(self._heads, (key, job))
        for chunk in chunks:
            insort(chunk.wants, (key, job))
            self.note(chunk)

    def remove(self, job: int) -> tuple[ChunkT, ...]:
        """Remove a job that does not wait any more; return the chunks that it wanted."""
        key, chunks = self._jobs.pop(job)
        for chunk in chunks:
            at = bisect_left(chunk.wants, (key, job))
            if at < len(chunk.wants) and chunk.wants[at] == (key, job):
                del chunk.wants[at]
        if len(self._heads) > 2 * len(self._jobs) + 64:
            self._heads = [(key, job) for job, (key, _) in self._jobs.items()]
            heapq.heapify(self._heads)
        return chunks

    def forget(self, chunk: ChunkT) -> None:
        """Forget a chunk that does not exist any more."""
        chunk.wants.clear()
        for heap in self._lacking.values():
            heap.discard(chunk)

    def head(self) -> int | None:
        """Return the job at the head of the queue; None if no job waits."""
        while self._heads:
            key, job = self._heads[0]
            known = self._jobs.get(job)
            if known is not None and known[0] == key:
                return job
            heapq.heappop(self._heads)
        return None

    def is_next(self, chunk: ChunkT) -> bool:
        """Return whether the job at the head of the queue wants a chunk."""
        return bool(chunk.wants) and chunk.wants[0][1] == self.head()

    def note(self, chunk: ChunkT) -> None:
        """Note that a chunk may have to be fetched: a job wants it now, or its nearer copies are gone."""
        tier = self.source(chunk)
        if tier is not None:
            self._lacking[tier].push(chunk)

    def source(self, chunk: ChunkT) -> TierKind | None:
        """Return the tier to fetch a chunk from; None if it is not wanted, is near already or cannot be
        fetched."""
        if not chunk.wants or chunk.host >= 0 or chunk.on_device:
            return None
        if chunk.disk_ready:
            return TierKind.DISK
        return TierKind.REMOTE if chunk.remote else None

    def is_lacking(self, chunk: ChunkT) -> bool:
        """Return whether a chunk is queued to be fetched."""
        tier = self.source(chunk)
        return tier is not None and chunk in self._lacking[tier]

    def next_lacking(self, tiers: Sequence[TierKind]) -> ChunkT | None:
        """Return the chunk wanted first of those to be fetched from one of `tiers`; None if there is none."""
        best: ChunkT | None = None
        for tier in tiers:
            chunk = self._lacking[tier].search(partial(self._judge, tier))
            if chunk is not None and (best is None or _wanted_first(chunk) < _wanted_first(best)):
                best = chunk
        return best

    def _judge(self, tier: TierKind, chunk: ChunkT) -> HeapVerdict:
        source = self.source(chunk)
        if source is tier:
            return HeapVerdict.TAKE
        if source is not None:
            self._lacking[source].push(chunk)
        return HeapVerdict.PARK
