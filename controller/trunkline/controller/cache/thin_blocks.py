"""Blocks of a model in which some layers have a window and others see everything.

What lies behind the window is read by the layers without one only. So a block is *whole*, with memory for the KV
of all layers, or *thin*, with memory for that of the layers without a window. There are more blocks than memory
for windowed KV: no more than `whole_blocks` are whole at a time.

      block      0       1       2       3       4     …        whole_blocks = 3
      whole    free    chunk     ·       ·     chunk            0: its memory is used again first
      thin       ·       ·     chunk    free     ·

Ids, block tables and addresses are those of one pool: a rank gives the memory of a block's windowed layers back to
the system when the block becomes thin (`trunkline.kernels.thin_memory`), and gets it again with the next write.
"""

from __future__ import annotations

from trunkline.controller.cache.block_pool import BlockPool
from trunkline.kvstore.chunks import BlockId


class ThinPool(BlockPool):
    """A pool in which blocks may be thin. All are at first, since nothing has been written."""

    def __init__(self, num_blocks: int, whole_blocks: int) -> None:
        super().__init__(num_blocks)
        self.whole_blocks = whole_blocks
        self._thinned: dict[BlockId, None] = {}
        """The blocks that have become thin since `take_thinned`, and still are."""
        self._free_whole: list[BlockId] = []
        """The free blocks that are whole; `_free` has the thin ones."""
        self._is_whole = bytearray(num_blocks)
        self.whole_count = 0

    @property
    def free_count(self) -> int:
        return len(self._free) + len(self._free_whole)

    @property
    def whole_free(self) -> int:
        """Number of blocks that can become whole now while no chunk becomes thin."""
        return self.whole_blocks - self.whole_count + len(self._free_whole)

    def is_whole(self, block: BlockId) -> bool:
        return self._is_whole[block] != 0

    def allocate(self) -> BlockId:
        """Take a free block and make it whole; callers make room first."""
        if self._free_whole:
            self._free.append(self._free_whole.pop())
        block = super().allocate()
        if not self._is_whole[block]:
            self._count(block)
        return block

    def allocate_thin(self) -> BlockId:
        """Take a free block and leave it, or make it, thin."""
        if not self._free:
            self._thin_free()
        return super().allocate()

    def widen(self, block: BlockId) -> None:
        """Make a thin block whole; callers make room first (`whole_free`)."""
        assert not self._is_whole[block]
        if self.whole_count == self.whole_blocks:
            self._thin_free()
        self._count(block)

    def thin(self, block: BlockId) -> None:
        """Make a whole block thin. No step that is still to be planned reads the KV of its windowed layers."""
        assert self._is_whole[block]
        self._is_whole[block] = 0
        self.whole_count -= 1
        self._thinned[block] = None

    def take_thinned(self) -> list[BlockId]:
        thinned, self._thinned = list(self._thinned), {}
        return thinned

    def release(self, block: BlockId) -> None:
        super().release(block)
        if self._is_whole[block] and not self.holders(block):
            self._free_whole.append(self._free.pop())

    def free_blocks(self) -> frozenset[BlockId]:
        return super().free_blocks() | frozenset(self._free_whole)

    def _thin_free(self) -> None:
        block = self._free_whole.pop()
        self.thin(block)
        self._free.append(block)

    def _count(self, block: BlockId) -> None:
        assert self.whole_count < self.whole_blocks, "more blocks are whole than there is memory for"
        self._is_whole[block] = 1
        self.whole_count += 1
        self._thinned.pop(block, None)
