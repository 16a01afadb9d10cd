"""The radix cache of a model in which some layers have a window and others see everything.

All chunks of a path keep their blocks, as in other trees, because layers without a window read all of them.
What is given up behind a window is the KV of the layers that have one: a chunk whose block is thin
(`trunkline.controller.cache.thin_blocks`) can be read from further down, not from where it would be in the
window.

      root─[·]─[·]─[·]─[·]─[▪]─[▪]─[▪]─[▪]       a running sequence
           thin or spent   └─── read ────┘
                            (its window)       ▪ whole block, · block that may be thin

Chunks without readers become thin when their memory is needed, spent ones first, whether they are idle or not.
Only whole chunks are saved, so copies in lower tiers have the KV of all layers. A chunk in a window is loaded as a
whole, or, if its block is there and thin, in its windowed layers; a chunk behind it is loaded into a thin block.
A prompt that would see a thin chunk without a copy computes it again. If the chunk is idle it gets the new block,
and keeps the chunks below it.
"""

from __future__ import annotations

from trunkline.controller.cache.block_pool import BlockPool
from trunkline.controller.cache.host_saves import TierCopyPlan
from trunkline.controller.cache.idle_leaves import IdleLeaves
from trunkline.controller.cache.radix_tree import Node
from trunkline.controller.cache.reader_cache import ReaderCache
from trunkline.controller.cache.thin_blocks import ThinPool
from trunkline.controller.totals import Totals
from trunkline.kvstore.chunks import BlockId
from trunkline.kvstore.tier_policy import DirectoryConfig


class ThinCache(ReaderCache):
    """A radix cache over a pool in which blocks may be thin. Copies in lower tiers are whole."""

    def __init__(
        self,
        pool: BlockPool,
        chunk_size: int,
        fingerprint: bytes = b"",
        dtype: str = "",
        tiers: DirectoryConfig | None = None,
        totals: Totals | None = None,
    ) -> None:
        assert isinstance(pool, ThinPool)
        super().__init__(pool, chunk_size, fingerprint, dtype, tiers, totals)
        self._thin_pool = pool
        self._thinnable = 0
        self._unread_wholes = IdleLeaves(self.tiers.shares, pool.num_blocks, self._is_thinnable, self._spent_first)

    @property
    def thinnable(self) -> int:
        return self._thinnable

    def is_thin(self, node: Node) -> bool:
        return node.on_device and not self._thin_pool.is_whole(node.block)

    def _is_whole(self, node: Node) -> bool:
        return node.on_device and self._thin_pool.is_whole(node.block)

    def _is_thinnable(self, node: Node) -> bool:
        return not node.readers and node.parent is not None and self._is_whole(node)

    def _note_idle(self, node: Node) -> None:
        super()._note_idle(node)
        if self._is_thinnable(node):
            self._unread_wholes.push(node)

    def _now_read(self, node: Node) -> None:
        self._thinnable -= self._is_whole(node)

    def _now_unread(self, node: Node) -> None:
        self._thinnable += self._is_whole(node)
        self._note_idle(node)

    def insert(
        self, parent: Node, key: bytes, block: BlockId, ready_step: int, now: float, marker: bytes = b""
    ) -> Node:
        node = super().insert(parent, key, block, ready_step, now, marker)
        self._thinnable += self._is_thinnable(node)
        return node

    def place(self, node: Node, block: BlockId) -> None:
        super().place(node, block)
        self._thinnable += self._is_thinnable(node)

    def unplace(self, node: Node) -> BlockId:
        self._thinnable -= self._is_thinnable(node)
        return super().unplace(node)

    def remove(self, node: Node) -> BlockId:
        self._thinnable -= self._is_thinnable(node)
        return super().remove(node)

    def swap(self, node: Node, block: BlockId) -> BlockId:
        old = super().swap(node, block)
        self._thinnable += self._is_thinnable(node)
        return old

    def thin(self, blocks: int, plan: TierCopyPlan | None = None) -> int:
        done = 0
        while done < blocks and (node := self._unread_wholes.pop()) is not None:
            if plan is not None and node.ready_step < plan.step and self._wants_copy(node):
                self.saves.add(node, plan, forced=node.claims > 0 or node.pins > 0)
            self._thin_pool.thin(node.block)
            self._thinnable -= 1
            self.tiers.left_device(node)
            done += 1
        return done

    def _wants_copy(self, node: Node) -> bool:
        return super()._wants_copy(node) and not self.is_thin(node)
