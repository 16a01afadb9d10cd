"""The idle leaves of the radix cache in the order in which they lose their blocks: by the standing of their
tenants (`trunkline.kvstore.shares`), then the one with the longest wait (`trunkline.kvstore.next_use`), then the
least recently used first. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

from trunkline.controller.cache.radix_tree import Node
from trunkline.kvstore.shares import KvAccount, Shares
from trunkline.kvstore.tier import TierKind

_Entry = tuple[float, float, int, Node]
"""Negative wait of a leaf, its last use, a serial number, and the leaf. The first three are the order."""


class IdleLeaves:
    """Leaves that may lose their blocks: a heap for each tenant with a share, and one for all other leaves.

    Entries are checked when they come to the top, because leaves may be in use again, or wait otherwise.
    """

    def __init__(
        self,
        shares: Shares,
        blocks: int,
        is_idle_leaf: Callable[[Node], bool],
        wait_of: Callable[[Node], float],
    ) -> None:
        """
        Args:
            blocks: number of blocks of the device; memory is in proportion to it.
            is_idle_leaf: whether a chunk may lose its block now.
            wait_of: a chunk's wait in seconds; 0 if only its last use counts.
        """
        self._shares = shares
        self._length_max = 4 * blocks + 64
        self._is_idle_leaf = is_idle_leaf
        self._wait_of = wait_of
        self._heaps: dict[KvAccount | None, list[_Entry]] = {}
        self._length = 0
        self._serial = count()

    def __len__(self) -> int:
        return self._length

    def push(self, node: Node) -> None:
        """Add an idle leaf, or one whose last use or wait has changed."""
        heapq.heappush(self._heaps.setdefault(node.account, []), self._entry(node))
        self._length += 1
        if self._length > self._length_max:
            self._drop_stale()

    def _drop_stale(self) -> None:
        """Leave one entry of each idle leaf, the present one."""
        self._length = 0
        for account, heap in list(self._heaps.items()):
            # A dict, not a set: of leaves with the same last use, which goes first must not depend on addresses.
            present = dict.fromkeys(entry[3] for entry in heap if self._belongs(entry[3], account))
            heap[:] = map(self._entry, sorted(present, key=lambda leaf: leaf.last_use))
            heapq.heapify(heap)
            self._length += len(heap)
            if not heap:
                del self._heaps[account]

    def pop(self) -> Node | None:
        """Remove and return the leaf to evict first; None if there is none."""
        if len(self._heaps) == 1:
            ((account, heap),) = self._heaps.items()
            return self._pop(heap) if self._bring_up(heap, account) else None
        best, least = None, (float("inf"), 0.0, 0.0, 0)
        for account, heap in self._heaps.items():
            if not self._bring_up(heap, account):
                continue
            rank = (float(self._shares.standing(account, TierKind.DEVICE)), *heap[0][:3])
            if rank < least:
                best, least = heap, rank
        return None if best is None else self._pop(best)

    def _pop(self, heap: list[_Entry]) -> Node:
        self._length -= 1
        return heapq.heappop(heap)[3]

    def _bring_up(self, heap: list[_Entry], account: KvAccount | None) -> bool:
        """Bring an idle leaf to the top of a heap that is there in its present order; False if there is none."""
        while heap:
            wait, last_use, _, node = heap[0]
            if not self._belongs(node, account) or last_use != node.last_use:
                self._pop(heap)
            elif -wait == self._wait_of(node):
                return True
            else:
                heapq.heapreplace(heap, self._entry(node))
        return False

    def _entry(self, node: Node) -> _Entry:
        return -self._wait_of(node), node.last_use, next(self._serial), node

    def _belongs(self, node: Node, account: KvAccount | None) -> bool:
        return node.account is account and self._is_idle_leaf(node)
