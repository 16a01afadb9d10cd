"""The device blocks of a group: which are free (PagedAttention §4.2; ChunkAttention §3.1's pool allocator).

Blocks are ids: the memory lies in the workers, the same id on every rank. Invariant: a block is either
free here or owned by exactly one chunk of the tree or one sequence (checked by `integrity`).
"""

from __future__ import annotations

from trunkline.kvstore.layout import BlockId


class BlockPool:
    """Free list of `num_blocks` ids. Reuses the latest freed first: its memory is the warmest."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = [BlockId(i) for i in range(num_blocks - 1, -1, -1)]

    @property
    def free_count(self) -> int:
        return len(self._free)

    def allocate(self) -> BlockId:
        """Take a free block.

        Raises:
            IndexError: none is free; callers make room first.
        """
        return self._free.pop()

    def release(self, block: BlockId) -> None:
        """Give a block back. Its content may still be read by steps already sent: they run before any reuse."""
        self._free.append(block)

    def free_blocks(self) -> frozenset[BlockId]:
        """The free ids, for checks."""
        return frozenset(self._free)
