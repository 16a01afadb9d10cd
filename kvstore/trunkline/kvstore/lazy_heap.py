"""A priority queue whose keys may grow without notice.

A chunk's rank for eviction changes with every use, mostly away from the top: it was used, or a job wants it. Such
changes cost nothing: an entry at the top whose key is outdated is put back under its present one. Only a change
towards the top must be reported, by `push`. So each operation is O(log n), however large the tiers are.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from enum import Enum, auto
from itertools import count
from typing import Generic, TypeVar

EntryT = TypeVar("EntryT")


class HeapVerdict(Enum):
    """What `LazyHeap.search` is to do with the entry at the top."""

    TAKE = auto()
    """Return it. It stays in the heap."""
    SKIP = auto()
    """Look at the next entry. This one stays in the heap."""
    PARK = auto()
    """Look at the next entry. This one leaves the heap until it is pushed again."""
    STOP = auto()
    """End the search without a result."""


class LazyHeap(Generic[EntryT]):
    """Entries by `key`, smallest first; each at most once. Entries are compared by identity."""

    def __init__(self, key: Callable[[EntryT], tuple[float, ...]]) -> None:
        self._key = key
        self._heap: list[tuple[tuple[float, ...], int, EntryT]] = []
        self._serials: dict[EntryT, int] = {}
        """By entry, the serial number of its one valid element of the heap."""
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
