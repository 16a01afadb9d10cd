"""The device blocks of a group of workers: which are free, and how many holders each has (PagedAttention §4.2,
§4.4).

Blocks are ids; the memory is in the workers, under the same id on every rank (the pool allocator of ChunkAttention
§3.1). A chunk of the radix tree holds its block once, however many sequences use the chunk. A block outside the
tree is held by one sequence, or by several beams of one search. Invariant: a block's count equals its holders, and
it is free exactly at zero (checked by `integrity`).
"""

from __future__ import annotations

from trunkline.kvstore.chunks import BlockId


class BlockPool:
    """Reference counts and the free list of `num_blocks` ids. The latest freed is reused first: the warmest."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = [BlockId(i) for i in range(num_blocks - 1, -1, -1)]
        self._holders = [0] * num_blocks
        self.taken: list[BlockId] = []
        """Blocks allocated since this list was emptied: by the plan that is being made."""

    @property
    def free_count(self) -> int:
        return len(self._free)

    def allocate(self) -> BlockId:
        """Take a free block; the caller is its one holder.

        Raises:
            IndexError: none is free; callers make room first.
        """
        block = self._free.pop()
        self._holders[block] = 1
        self.taken.append(block)
        return block

    def share(self, block: BlockId) -> None:
        """One holder more of a block that is held."""
        assert self._holders[block] > 0, "a free block cannot be shared"
        self._holders[block] += 1

    def release(self, block: BlockId) -> None:
        """One holder less; the last one frees the block. Steps already sent may still read it: they run before
        any reuse."""
        assert self._holders[block] > 0, "a free block cannot be released"
        self._holders[block] -= 1
        if not self._holders[block]:
            self._free.append(block)

    def holders(self, block: BlockId) -> int:
        """Return how many holders a block has; 0: it is free."""
        return self._holders[block]

    def free_blocks(self) -> frozenset[BlockId]:
        """Return the free ids, for checks."""
        return frozenset(self._free)
