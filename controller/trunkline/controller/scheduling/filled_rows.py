"""Chunks of rows that decode: when full ones enter the radix tree, and when rows get their next blocks. Pure.

A row fills a chunk and needs a block once in `chunk_size` tokens, so in a large batch some row does in every step.
Entering chunks and giving blocks takes as long as the rest of a step, though nothing waits for either. So in a
large batch both are done for many rows at once, every few steps, and the steps between have nothing to decide
(`trunkline.controller.engine.calm`):

      chunk 4, entered │ chunk 5, full, enters late │ chunk 6, being filled │ chunk 7, its block comes early
                                                           known ┘

A request that comes meanwhile does not find such a chunk yet. Blocks are given early only while every row could
still have one more without a preemption.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from trunkline.controller.allocation.filled_chunks import append_filled
from trunkline.controller.allocation.kv_manager import KVCacheManager
from trunkline.controller.sequences.plan_builder import DecodeRows, PendingChanges, PlanBuilder

SLACK_ROWS_MIN: Final = 16
"""Smallest number of rows for which it pays to let chunks wait for each other."""
SLACK_PART: Final = 8
"""A chunk enters the tree late by no more than this part of its tokens."""


def slack_of(kv: KVCacheManager, rows: int) -> int:
    """Return how many tokens late the chunks of so many rows may enter the tree, and how many tokens early blocks
    may be given to them."""
    return kv.chunk_size // SLACK_PART if rows >= SLACK_ROWS_MIN and not kv.has_window else 0


def enter_filled(
    kv: KVCacheManager, rows: DecodeRows, slots: NDArray[np.intp], pending: PendingChanges, now: float
) -> None:
    """Put the chunks that these rows have filled into the radix tree, to be shared."""
    is_plain = not kv.has_window
    for slot in slots.tolist():
        sequence, key = rows.take_filled(slot)
        if not kv.prefix_cache or (is_plain and append_filled(kv.tree, sequence, key, now)):
            continue
        for index, block in kv.enter_tree(sequence, sequence.tokens.count, now):
            fences = kv.tree.fences
            fences.reads(fences.ready_after([block]))  # this block's chunk may still be loading from the host
            rows.set_block(sequence.slot, index, block)
            pending.merged.append((sequence.batch_seq_id, index, block))
            pending.rows_changed = True


def give_early(
    kv: KVCacheManager, rows: DecodeRows, slots: NDArray[np.intp], pending: PendingChanges, plan: PlanBuilder
) -> bool:
    """Give a block to each of these rows that needs one soon, and enter the chunks that wait; return whether that
    was done for all rows that need a block in this plan.

    Args:
        slots: the rows that this plan decodes, none of them a beam.
    """
    slack = slack_of(kv, len(slots))
    if not slack:
        return False
    held = rows.block_counts[slots] * np.int64(kv.chunk_size)
    soon = slots[(held - rows.planned[slots] < slack) & (held + 1 < rows.limit[slots])]
    if kv.available < len(soon) + len(slots) or not kv.make_room(len(soon), plan):
        return False
    plan.append_blocks(rows, soon, [kv.pool.allocate() for _ in range(len(soon))])
    enter_filled(kv, rows, slots[rows.known[slots] > rows.fills_at[slots]], pending, plan.now)
    return True
