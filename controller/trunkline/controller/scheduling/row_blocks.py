"""Blocks of rows that decode: when rows get their next ones, and when full chunks enter the radix tree. Pure.

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

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trunkline.controller.allocation.kv_manager import KVCacheManager
from trunkline.controller.allocation.tree_entry import append_full_chunk, enter_full_chunks
from trunkline.controller.scheduling.fair_queue import FairQueue
from trunkline.controller.sequences.decode_rows import DecodeRows
from trunkline.controller.sequences.plan_builder import PendingChanges, PlanBuilder
from trunkline.controller.sequences.sequence import Sequence

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
        if not kv.prefix_cache or (is_plain and append_full_chunk(kv.tree, sequence, key, now)):
            continue
        for index, block in enter_full_chunks(kv.tree, kv.pool, sequence, sequence.tokens.count, now):
            fences = kv.tree.fences
            fences.reads(fences.ready_after([block]))  # this block's chunk may still be loading from the host
            rows.set_block(sequence.slot, index, block)
            pending.merged.append((sequence.batch_seq_id, index, block))
            pending.rows_changed = True


def grow_rows(
    kv: KVCacheManager,
    rows: DecodeRows,
    slots: NDArray[np.intp],
    pending: PendingChanges,
    plan: PlanBuilder,
    queue: FairQueue,
    make_room: Callable[[list[Sequence], int, PlanBuilder, int], None],
    has_beams: bool,
) -> None:
    """Give a block to every row that begins a new chunk in this step.

    Args:
        slots: the rows that this plan decodes.
        queue: says whose rows come first if there are too few blocks: those of the oldest group.
        make_room: frees so many blocks for these sequences, and memory for so many whole ones, or preempts them.
        has_beams: whether some of the rows are beams.
    """
    if not len(slots):
        return
    starting = slots[rows.planned[slots] == rows.block_counts[slots] * np.int64(kv.chunk_size)]
    if not len(starting):
        return
    if not (kv.has_window or has_beams):  # then no row needs more than a block, and all can be served at once
        if give_early(kv, rows, slots, pending, plan):
            return
        if kv.pool.free_count >= len(starting):
            plan.append_blocks(rows, starting, [kv.pool.allocate() for _ in range(len(starting))])
            return
    groups: dict[int, list[Sequence]] = {}
    sequences = [sequence for slot in starting.tolist() if (sequence := rows.sequences[slot]) is not None]
    for sequence in sorted(sequences, key=lambda each: (queue.rank(each.group), each.sample)):
        groups.setdefault(sequence.request_id, []).append(sequence)
    for members in groups.values():
        for sequence in members:
            if kv.move_window(sequence, int(rows.planned[sequence.slot])):
                rows.set_behind(sequence)
        make_room(members, len(members), plan, len(members))
        if members[0].slot < 0:
            continue  # this group was the newest, so it is preempted itself
        for sequence in members:
            plan.append_block(rows, sequence, kv.pool.allocate())
        if members[0].group.search is not None:
            rows.read_alike(members[0], members[1:], int(rows.block_counts[members[0].slot]) - 1)
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
