"""What the queue says about the future: which chunks waiting jobs will use, and when (CachedAttention §3.3.1).

The scheduler tells which chunks each waiting job will use; here they are known by their earliest job. Two
questions are answered without looking through the queue: how soon a chunk is wanted (its rank as a victim) and
which wanted chunk that is not in host memory is wanted first (the next to fetch). The paper's prefetch window
L_pw = C_mem / S_kv comes out by itself, by actual sizes: fetching goes on in the order of the queue while the
chunk to be fetched is wanted earlier than one that it replaces.
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
    """Whether no waiting job wants `chunk` before one wants `other`, or deeper in the same job's path."""
    if not chunk.wants:
        return True
    return bool(other.wants) and _wanted_first(chunk) > _wanted_first(other)


def _wanted_first(chunk: ChunkT) -> tuple[float, ...]:
    return (*chunk.wants[0][0], chunk.depth) if chunk.wants else ()


class WaitingJobs(Generic[ChunkT]):
    """The queue, as far as chunks are concerned."""

    def __init__(self) -> None:
        self._jobs: dict[int, tuple[QueueKey, tuple[ChunkT, ...]]] = {}
        self._heads: list[tuple[QueueKey, int]] = []
        """Heap; entries of jobs that are gone are dropped when they come to the top."""
        self._lacking: dict[TierKind, LazyHeap[ChunkT]] = {
            TierKind.DISK: LazyHeap(_wanted_first),
            TierKind.REMOTE: LazyHeap(_wanted_first),
        }
        """Wanted, but neither in host memory nor on the device, by the tier to fetch from."""

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job: int) -> bool:
        return job in self._jobs

    def add(self, job: int, key: QueueKey, chunks: Sequence[ChunkT]) -> None:
        """A job waits that will use `chunks`."""
        self._jobs[job] = key, tuple(chunks)
        heapq.heappush(self._heads, (key, job))
        for chunk in chunks:
            insort(chunk.wants, (key, job))
            self.note(chunk)

    def remove(self, job: int) -> tuple[ChunkT, ...]:
        """The job waits no more; returns the chunks it wanted."""
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
        """The chunk is no more."""
        chunk.wants.clear()
        for heap in self._lacking.values():
            heap.discard(chunk)

    def head(self) -> int | None:
        """The job that is next."""
        while self._heads:
            key, job = self._heads[0]
            known = self._jobs.get(job)
            if known is not None and known[0] == key:
                return job
            heapq.heappop(self._heads)
        return None

    def is_next(self, chunk: ChunkT) -> bool:
        """Whether the job that is next wants it."""
        return bool(chunk.wants) and chunk.wants[0][1] == self.head()

    def note(self, chunk: ChunkT) -> None:
        """A wanted chunk may have to be fetched: somebody wants it now, or its nearer copies have gone."""
        tier = self.source(chunk)
        if tier is not None:
            self._lacking[tier].push(chunk)

    def source(self, chunk: ChunkT) -> TierKind | None:
        """The tier from which it must be fetched; None: it is not wanted, or need not or cannot be fetched."""
        if not chunk.wants or chunk.host >= 0 or chunk.on_device:
            return None
        if chunk.disk_ready:
            return TierKind.DISK
        return TierKind.REMOTE if chunk.remote else None

    def is_lacking(self, chunk: ChunkT) -> bool:
        """Whether it stands in line to be fetched."""
        tier = self.source(chunk)
        return tier is not None and chunk in self._lacking[tier]

    def next_lacking(self, tiers: Sequence[TierKind]) -> ChunkT | None:
        """The chunk wanted first of those to be fetched from one of `tiers`."""
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
