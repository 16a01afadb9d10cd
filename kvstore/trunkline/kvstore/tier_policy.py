"""The rules by which tiers evict and fetch: their configuration, the eviction policies, and the jobs that wait.

**Eviction** (CachedAttention §3.3.2). A policy is a sort key; the chunk with the smallest key is evicted first.
Look-ahead first evicts chunks that no waiting job will use, the least recently used one first; or, if the next use
is predicted, the one with the longest wait (`trunkline.kvstore.next_use`). Of wanted chunks it first evicts the
one whose earliest job is farthest from the head of the queue. That *is* the paper's window of
(C_mem + C_disk) / S_kv, by actual sizes: the chunks wanted first stay, as many as fit. A new chunk ranks by the
same key, so an unwanted chunk never evicts a wanted one. Every policy evicts the end of a path before its
beginning, because a chunk is of no use without those above it. A chunk is never used later, wanted earlier or
older than its parent, and ties go by depth.

**Fetching** (§3.3.1). The scheduler names the chunks that each waiting job will use. `WaitingJobs` knows without a
search through the queue how soon a chunk is wanted, and which wanted chunk outside of host memory is wanted first.
The paper's prefetch window L_pw = C_mem / S_kv results from actual sizes: fetching goes on in the order of the
queue while the chunk to be fetched is wanted earlier than the one that it replaces.

**Lazy heaps.** A chunk's rank changes with every use, mostly away from the top: it was used, or a job wants it.
Such changes cost nothing: an entry at the top whose key is outdated is put back under its present one. Only a
change towards the top must be reported, by `push`. So each operation is O(log n), however large the tiers are.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from functools import partial
from itertools import count
from typing import Final, Generic, NamedTuple, TypeVar

from trunkline.kvstore.chunks import NO_PEER, ChunkT, QueueKey, TieredChunk
from trunkline.kvstore.next_use import wait_of
from trunkline.kvstore.tier import TierKind


class EvictionPolicy(StrEnum):
    """The rule that chooses the chunk to be evicted."""

    PREDICTED = "predicted"
    """As look-ahead; of the chunks that no waiting job will use, first those with the longest wait."""
    LOOK_AHEAD = "look-ahead"
    LRU = "lru"
    FIFO = "fifo"

    @property
    def looks_ahead(self) -> bool:
        """Whether chunks that waiting jobs will use are evicted last."""
        return self in (EvictionPolicy.PREDICTED, EvictionPolicy.LOOK_AHEAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryConfig:
    """Sizes of the tiers and rules for moves. Sizes are in slots of one chunk, the same on every rank."""

    host_slots: int = 0
    disk_slots: int = 0
    """Number of slots of the disk tier. A disk tier needs host slots, because all moves go through host memory."""
    remote: bool = False
    """Whether there is a remote tier. A remote tier needs host slots, because all moves go through host memory."""
    peers: bool = False
    """Whether chunks can be pulled from other groups. It needs host slots, into which they are pulled."""
    policy: EvictionPolicy = EvictionPolicy.LOOK_AHEAD
    host_free: int | float = 0.05
    """Host slots to keep free if there is a tier below (CachedAttention §3.3.1): a number (int) or a share
    (float)."""
    write_behind: bool = True
    """Whether to copy chunks that are in host memory only to the tiers below while these have room, so that they
    survive a restart."""
    write_pause_s: float = 0.0
    """Seconds without requests after which chunks are copied so: who comes back at once with a cached prompt does
    not wait beside these writes."""
    write_within_s: float = 0.0
    """Seconds after which they are copied in any case."""
    reads_in_flight: int = 32
    """Largest number of reads at once per tier: enough to keep a disk busy, and few enough that an urgent read
    does not wait long."""
    writes_in_flight: int = 16
    pulls_in_flight: int = 16
    """Largest number of reads at once from one peer."""
    pin_quota: float = 0.5
    """Share of the largest tier that pinned chunks may take; the rest must stay movable."""
    prefetch: bool | None = None
    """Whether to fetch for all waiting jobs and not only for the next one. None: yes if the policy looks ahead."""
    exclusive: bool | None = None
    """Whether a full disk first gives up chunks that are in host memory as well.

    Then more chunks fit into both tiers together, but a session's whole history is written to disk again after
    each of its turns. None: yes if host memory has at least a quarter of the disk's size; with less there is
    little to gain."""
    first_generation: int = 0
    """Generations of disk slots are larger than this number, so larger than those of earlier runs."""
    remote_known: int = 200_000
    """Largest number of chunks to remember of which only the remote tier has a copy; each takes memory."""

    def validate(self) -> None:
        """Check the configuration.

        Raises:
            ValueError: A sentence that says what is wrong.
        """
        if min(self.host_slots, self.disk_slots, self.host_free, self.remote_known, self.first_generation) < 0:
            raise ValueError(
                "host_slots, disk_slots, host_free, remote_known and first_generation must not be negative"
            )
        if (self.disk_slots or self.remote) and not self.host_slots:
            raise ValueError("a disk or remote tier needs host slots: all moves go through host memory")
        if self.peers and not self.host_slots:
            raise ValueError("peers need host slots: chunks are pulled into host memory")
        if min(self.reads_in_flight, self.writes_in_flight, self.pulls_in_flight) < 1:
            raise ValueError("reads_in_flight, writes_in_flight and pulls_in_flight must be at least 1")
        if not 0.0 <= self.write_pause_s <= self.write_within_s < math.inf:
            raise ValueError(
                f"write_pause_s is {self.write_pause_s}, write_within_s {self.write_within_s}; they are times in "
                "seconds, and the pause is not the longer one"
            )
        if not 0.0 <= self.pin_quota <= 1.0:
            raise ValueError(f"pin_quota is {self.pin_quota}; it is a share, from 0 to 1")

    @property
    def prefetches(self) -> bool:
        return self.policy.looks_ahead if self.prefetch is None else self.prefetch

    @property
    def is_exclusive(self) -> bool:
        return 4 * self.host_slots >= self.disk_slots if self.exclusive is None else self.exclusive

    @property
    def host_buffer(self) -> int:
        """Number of host slots to keep free: at least 1 if there is a tier below, at most half of all."""
        if not (self.disk_slots or self.remote):
            return 0
        free = self.host_free if isinstance(self.host_free, int) else round(self.host_free * self.host_slots)
        return min(max(1, free), self.host_slots // 2)

    @property
    def pins_max(self) -> int:
        return int(self.pin_quota * max(self.host_slots, self.disk_slots))


VictimKey = tuple[float, ...]
"""Sort key of a chunk for eviction: of two chunks, the one with the smaller key is evicted first."""


def _look_ahead(chunk: TieredChunk) -> VictimKey:
    if chunk.wants:
        return (1.0, *[-part for part in chunk.wants[0][0]], -chunk.depth)
    return (0.0, chunk.last_use, -chunk.depth)


def _predicted(chunk: TieredChunk) -> VictimKey:
    if chunk.wants:
        return _look_ahead(chunk)
    return (0.0, -wait_of(chunk), chunk.last_use, -chunk.depth)


def _lru(chunk: TieredChunk) -> VictimKey:
    return (chunk.last_use, -chunk.depth)


def _fifo(chunk: TieredChunk) -> VictimKey:
    return (chunk.arrived, -chunk.depth)


def victim_key(policy: EvictionPolicy) -> Callable[[TieredChunk], VictimKey]:
    """Return the sort key of a policy."""
    return {
        EvictionPolicy.PREDICTED: _predicted,
        EvictionPolicy.LOOK_AHEAD: _look_ahead,
        EvictionPolicy.LRU: _lru,
        EvictionPolicy.FIFO: _fifo,
    }[policy]


EntryT = TypeVar("EntryT")


class HeapVerdict(Enum):
    """What `LazyHeap.search` is to do with the entry at the top of the heap."""

    TAKE = auto()
    """Return the entry. It stays in the heap."""
    SKIP = auto()
    """Look at the next entry. The entry at the top stays in the heap."""
    PARK = auto()
    """Look at the next entry. The entry at the top leaves the heap until it is pushed again."""
    STOP = auto()
    """End the search without a result."""


class LazyHeap(Generic[EntryT]):
    """A heap of entries by `key`, smallest first. An entry is in it at most once. Entries are compared by
    identity."""

    def __init__(self, key: Callable[[EntryT], tuple[float, ...]]) -> None:
        self._key = key
        self._heap: list[tuple[tuple[float, ...], int, EntryT]] = []
        self._serials: dict[EntryT, int] = {}
        """For each entry, the serial number of its one valid element of the heap."""
        self._count = count()

    def __len__(self) -> int:
        return len(self._serials)

    def __contains__(self, entry: EntryT) -> bool:
        return entry in self._serials

    def __iter__(self) -> Iterator[EntryT]:
        """Iterate over the entries, in no order."""
        return iter(self._serials)

    def push(self, entry: EntryT) -> None:
        """Add an entry, or report that its key may have become smaller."""
        serial = next(self._count)
        self._serials[entry] = serial
        heapq.heappush(self._heap, (self._key(entry), serial, entry))
        if len(self._heap) > 2 * len(self._serials) + 64:
            self._heap = [e for e in self._heap if self._serials.get(e[2]) == e[1]]
            heapq.heapify(self._heap)

    def discard(self, entry: EntryT) -> None:
        """Remove an entry if it is in the heap."""
        self._serials.pop(entry, None)

    def first(self) -> EntryT | None:
        """Return the entry with the smallest key, which stays in the heap; None if the heap is empty."""
        heap = self._heap
        while heap:
            key, serial, entry = heap[0]
            if self._serials.get(entry) != serial:
                heapq.heappop(heap)
                continue
            present = self._key(entry)
            if present > key:
                heapq.heapreplace(heap, (present, serial, entry))
                continue
            return entry
        return None

    def search(self, judge: Callable[[EntryT], HeapVerdict], tries: int = 64) -> EntryT | None:
        """Return the first entry that `judge` takes; None if it stopped, skipped `tries` entries or took none."""
        skipped: list[EntryT] = []
        found = None
        while len(skipped) < tries and (entry := self.first()) is not None:
            verdict = judge(entry)
            if verdict is HeapVerdict.TAKE:
                found = entry
                break
            if verdict is HeapVerdict.STOP:
                break
            self.discard(entry)
            if verdict is HeapVerdict.SKIP:
                skipped.append(entry)
        for entry in skipped:
            self.push(entry)
        return found


def wanted_later(chunk: ChunkT, other: ChunkT) -> bool:
    """Return whether `chunk` is wanted later than `other`: by a later job, deeper in the same path, or not at
    all."""
    if not chunk.wants:
        return True
    return bool(other.wants) and _wanted_first(chunk) > _wanted_first(other)


def _wanted_first(chunk: ChunkT) -> tuple[float, ...]:
    return (*chunk.wants[0][0], chunk.depth) if chunk.wants else ()


class Source(NamedTuple):
    """A place from which chunks are read into host memory."""

    tier: TierKind
    peer: int = NO_PEER
    """Number of the peer, if the tier is `PEER`."""


DISK: Final = Source(TierKind.DISK)
REMOTE: Final = Source(TierKind.REMOTE)


class WaitingJobs(Generic[ChunkT]):
    """The waiting jobs and the chunks that they will use."""

    def __init__(self, is_thin: Callable[[ChunkT], bool]) -> None:
        """
        Args:
            is_thin: Says of a chunk on the device whether layers with a window have nothing of it there.
        """
        self._is_thin = is_thin
        self._jobs: dict[int, tuple[QueueKey, tuple[ChunkT, ...], int]] = {}
        """Of each job its key, its chunks, and how many of these it does not read in layers with a window."""
        self._heads: list[tuple[QueueKey, int]] = []
        """A heap of the waiting jobs. Jobs that are gone are dropped when they come to the top."""
        self._lacking: dict[Source, LazyHeap[ChunkT]] = {
            DISK: LazyHeap(_wanted_first),
            REMOTE: LazyHeap(_wanted_first),
        }
        """Wanted chunks that are neither in host memory nor, in the layers that are read, on the device, by the
        place to fetch them from."""

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job: int) -> bool:
        return job in self._jobs

    def add(self, job: int, key: QueueKey, chunks: Sequence[ChunkT], behind: int = 0) -> None:
        """Add a waiting job that will use `chunks`, the first `behind` of them in layers without a window only."""
        self._jobs[job] = key, tuple(chunks), behind
        heapq.heappush(self._heads, (key, job))
        for index, chunk in enumerate(chunks):
            insort(chunk.wants, (key, job))
            chunk.whole_wants += index >= behind
            self.note(chunk)

    def remove(self, job: int) -> tuple[ChunkT, ...]:
        """Remove a job that does not wait any more; return the chunks that it wanted."""
        key, chunks, behind = self._jobs.pop(job)
        for index, chunk in enumerate(chunks):
            at = bisect_left(chunk.wants, (key, job))
            if at < len(chunk.wants) and chunk.wants[at] == (key, job):
                del chunk.wants[at]
                chunk.whole_wants -= index >= behind
        if len(self._heads) > 2 * len(self._jobs) + 64:
            self._heads = [(key, job) for job, (key, *_) in self._jobs.items()]
            heapq.heapify(self._heads)
        return chunks

    def forget(self, chunk: ChunkT) -> None:
        """Forget a chunk that does not exist any more."""
        chunk.wants.clear()
        chunk.whole_wants = 0
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
        source = self.source(chunk)
        if source is not None:
            self._queue(source, chunk)

    def _queue(self, source: Source, chunk: ChunkT) -> None:
        heap = self._lacking.get(source)
        if heap is None:
            heap = self._lacking[source] = LazyHeap(_wanted_first)
        heap.push(chunk)

    def source(self, chunk: ChunkT) -> Source | None:
        """Return the place to fetch a chunk from; None if it is not wanted, is near already or cannot be
        fetched."""
        if not chunk.wants or chunk.host >= 0:
            return None
        if chunk.on_device and not (chunk.whole_wants and self._is_thin(chunk)):
            return None
        if chunk.disk_ready:
            return DISK
        if chunk.peer != NO_PEER:
            return Source(TierKind.PEER, chunk.peer)
        return REMOTE if chunk.remote else None

    def is_lacking(self, chunk: ChunkT) -> bool:
        """Return whether a chunk is queued to be fetched."""
        source = self.source(chunk)
        return source is not None and chunk in self._lacking.get(source, ())

    def peer_gone(self, peer: int) -> None:
        """Forget a peer that is not said to have any chunk."""
        self._lacking.pop(Source(TierKind.PEER, peer), None)

    def lacking_at(self) -> list[Source]:
        """Return the places from which chunks may have to be fetched."""
        return [source for source, heap in self._lacking.items() if len(heap)]

    def next_lacking(self, sources: Sequence[Source]) -> ChunkT | None:
        """Return the chunk wanted first of those to be fetched from one of `sources`; None if there is none."""
        best: ChunkT | None = None
        for place in sources:
            chunk = self._lacking[place].search(partial(self._judge, place))
            if chunk is not None and (best is None or _wanted_first(chunk) < _wanted_first(best)):
                best = chunk
        return best

    def _judge(self, place: Source, chunk: ChunkT) -> HeapVerdict:
        source = self.source(chunk)
        if source == place:
            return HeapVerdict.TAKE
        if source is not None:
            self._queue(source, chunk)
        return HeapVerdict.PARK
