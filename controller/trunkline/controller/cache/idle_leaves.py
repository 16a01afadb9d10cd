"""The idle leaves of the radix cache in the order in which they lose their blocks: by the standing of their
tenants (`trunkline.kvstore.shares`), then the least recently used first. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

from trunkline.controller.cache.radix_tree import Node
from trunkline.kvstore.shares import KvAccount, Shares
from trunkline.kvstore.tier import TierKind

_Entry = tuple[float, int, Node]
"""Last use of a leaf, a serial number, and the leaf. The first two are the order."""


class IdleLeaves:
    """Leaves that may lose their blocks: a heap for each tenant with a share, and one for all other leaves.

    Entries are checked when they come to the top, because leaves may be in use again.
    """

    def __init__(self, shares: Shares, blocks: int, is_idle_leaf: Callable[[Node], bool]) -> None:
        """
        Args:
            blocks: number of blocks of the device; memory is in proportion to it.
            is_idle_leaf: whether a chunk may lose its block now.
        """
        self._shares = shares
        self._length_max = 4 * blocks + 64
        self._is_idle_leaf = is_idle_leaf
        self._heaps: dict[KvAccount | None, list[_Entry]] = {}
        self._serial = count()

    def __len__(self) -> int:
        return sum(map(len, self._heaps.values()))

    def push(self, node: Node) -> None:
        """Add an idle leaf, or one whose last use has changed."""
        heap = self._heaps.setdefault(node.account, [])
        heapq.heappush(heap, (node.last_use, next(self._serial), node))
        if len(heap) > self._length_max:
            present = {entry[2]: entry for entry in heap if self._is_current(entry, node.account)}
            heap[:] = present.values()
            heapq.heapify(heap)

    def pop(self) -> Node | None:
        """Remove and return the leaf to evict first; None if there is none."""
        best, least = None, (float("inf"), 0.0, 0)
        for account, heap in self._heaps.items():
            while heap and not self._is_current(heap[0], account):
                heapq.heappop(heap)
            if not heap:
                continue
            rank = (float(self._shares.standing(account, TierKind.DEVICE)), *heap[0][:2])
            if rank < least:
                best, least = heap, rank
        return None if best is None else heapq.heappop(best)[2]

    def _is_current(self, entry: _Entry, account: KvAccount | None) -> bool:
        last_use, _, node = entry
        return node.last_use == last_use and node.account is account and self._is_idle_leaf(node)
