"""The device blocks of a group of workers: which are free, who holds them, and when copies of them are done. Pure.

Blocks are ids; the memory is in the workers, under the same id on every rank (PagedAttention §4.2, §4.4; the pool
allocator of ChunkAttention §3.1). A chunk of the radix tree holds its block once, however many sequences use the
chunk. A block outside the tree is held by one sequence, or by several beams of one search. Invariant: a block's
count equals its holders, and it is free exactly at zero (checked by `integrity`).

Saves and loads run on their own threads beside the computation, in the order of the plans. *Fences* say when the
computation must wait for them: a plan names the last plan whose saves, and the last plan whose loads, must be done
before it may run (`StepPlan.save_fence`, `load_fence`). There are two hazards:

- a block that was given away is written again while an earlier save still reads it, or an earlier load still
  writes;
- a block or slot is read before the save or load that fills it is done.

Fences only grow, and plans run in order, so copies that a fence has covered are done for all later plans.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from trunkline.kvstore.chunks import NO_BLOCK, BlockId, SlotId


class BlockPool:
    """Reference counts and the free list of `num_blocks` ids. The block freed last is reused first, because it is
    the warmest."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.whole_blocks = num_blocks
        """Number of blocks that can hold KV of all layers at once (`trunkline.controller.cache.thin_blocks`)."""
        self._free = [BlockId(i) for i in range(num_blocks - 1, -1, -1)]
        self._holders = [0] * num_blocks
        self.taken: list[BlockId] = []
        """Blocks that the plan in the making has allocated; the scheduler empties the list before each plan."""

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def whole_free(self) -> int:
        """Number of free blocks that can hold KV of all layers now (`trunkline.controller.cache.thin_blocks`)."""
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

    def allocate_thin(self) -> BlockId:
        """Take a free block without memory for the layers that have a window, where there are such blocks."""
        return self.allocate()

    def take_thinned(self) -> list[BlockId]:
        """Return the blocks that have become thin since the last call, and still are."""
        return []

    def share(self, block: BlockId) -> None:
        """Add a holder to a block that is held."""
        assert self._holders[block] > 0, "a free block cannot be shared"
        self._holders[block] += 1

    def release(self, block: BlockId) -> None:
        """Remove a holder from a block; a block without holders is free.

        Steps that were sent already may still read it: they run before any step that writes it again.
        """
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


class Fences:
    """Remembers the last plan that copied each block and slot, and says what a new plan must wait for."""

    def __init__(self, num_blocks: int, host_slots: int) -> None:
        self._block_saved = np.zeros(num_blocks, np.int64)
        self._block_loaded = np.zeros(num_blocks, np.int64)
        self._slot_saved = np.zeros(host_slots, np.int64)
        self._saves_done = 0
        """Number of the last plan whose saves, like those of all plans before it, are done when the next plan
        runs."""
        self._loads_done = 0
        """Number of the last plan whose loads, like those of all plans before it, are done when the next plan
        runs."""
        self._last_save = 0
        """Number of the last plan that saves anything."""
        self._last_load = 0
        """Number of the last plan that loads anything."""
        self._save_fence = 0
        self._load_fence = 0

    def saved(self, block: BlockId, slot: SlotId, step: int) -> None:
        """Note that the plan of `step` saves `block`, before or after computing it."""
        self._block_saved[block] = self._slot_saved[slot] = self._last_save = step

    def loaded(self, block: BlockId, slot: SlotId, step: int) -> None:
        """Note that the plan of `step` loads `slot` into `block`."""
        self._save_fence = max(self._save_fence, int(self._slot_saved[slot]))
        self._block_loaded[block] = self._last_load = step

    def ready_after(self, blocks: list[BlockId]) -> int:
        """Return the number of the plan whose loads must be done before these blocks are read; 0: none."""
        if self._last_load <= self._loads_done:
            return 0
        step, loaded = 0, self._block_loaded[blocks].tolist() if blocks else ()
        for block, loaded_by in zip(blocks, loaded, strict=True):
            if loaded_by > step and block != NO_BLOCK:
                step = loaded_by
        return step if step > self._loads_done else 0

    def reads(self, step: int) -> None:
        """Note that this plan reads blocks that the plan of `step` loads (see `ready_after`)."""
        self._load_fence = max(self._load_fence, step)

    def close(
        self, step: int, taken: Iterable[BlockId], copies: list[tuple[int, int, int, int]]
    ) -> tuple[int, int]:
        """Complete the plan of `step`.

        Args:
            taken: blocks that were free before the plan and that it, or its loads, write.
            copies: its copies between blocks, from the first of each to the second.

        Returns:
            its save fence and its load fence; 0: no need to wait.
        """
        if self._last_save <= self._saves_done and self._last_load <= self._loads_done:
            self._save_fence = self._load_fence = 0
            return 0, 0  # everything is done that was ever saved or loaded
        copied = list[BlockId]()
        for source, target, _, _ in copies:
            copied += (BlockId(source), BlockId(target))
        save_fence, load_fence = self._save_fence, max(self._load_fence, self.ready_after(copied))
        for block in taken:
            save_fence = max(save_fence, int(self._block_saved[block]))
            loaded = int(self._block_loaded[block])
            if loaded < step:  # its own load runs after all earlier ones anyway
                load_fence = max(load_fence, loaded)
        self._save_fence = self._load_fence = 0
        save_fence = save_fence if save_fence > self._saves_done else 0
        load_fence = load_fence if load_fence > self._loads_done else 0
        self._saves_done = max(self._saves_done, min(save_fence, step - 1))
        self._loads_done = max(self._loads_done, load_fence)
        return save_fence, load_fence
