"""Blocks of prompts that are longer than a model's window: given piece by piece, not all at admission. Pure.

      chunks    0 … 9   │ 10 … 19 │ 20 … 29   │ 30 …
                given up│ window  │ this step │ none yet: pending in the tree, so that other requests wait

A sequence is admitted with the blocks of one window and one step. When it goes on it gives up what has come to lie
behind the window, and takes as many blocks for its next piece. Usually these are the same ones. If another request
still reads them, others are evicted, or the newest group is preempted, as for a row that needs a block.

Where only some layers have a window, a prompt has all its blocks at admission, but those of later pieces are thin
(`trunkline.controller.cache.thin_blocks`): what it is given piece by piece is their memory for these layers.
"""

from __future__ import annotations

from collections.abc import Callable

from trunkline.controller.allocation.kv_manager import KVCacheManager
from trunkline.controller.cache.thin_blocks import ThinPool
from trunkline.controller.sequences.plan_builder import PlanBuilder
from trunkline.controller.sequences.sequence import Sequence
from trunkline.kvstore.chunks import blocks_for


def extend_prompts(
    kv: KVCacheManager,
    prompts: list[Sequence],
    step_tokens: int,
    make_room: Callable[[list[Sequence], int, PlanBuilder, int], None],
    plan: PlanBuilder,
) -> None:
    """Give blocks for their next pieces to prompts that were admitted without all of them.

    Args:
        prompts: the sequences that compute their prompts.
        step_tokens: largest number of tokens that a step computes.
        make_room: frees so many blocks for these sequences, and memory for so many whole ones, or preempts them.
    """
    for sequence in prompts.copy():
        blocks = _lacking_blocks(sequence, step_tokens, kv.chunk_size)
        if blocks and sequence.batch_seq_id:  # else it was preempted just now
            kv.move_window(sequence, sequence.computed)
            make_room([sequence], 0 if sequence.stem.keeps_blocks else blocks, plan, blocks)
            if sequence.batch_seq_id:
                _extend(kv, sequence, blocks, plan)


def _lacking_blocks(sequence: Sequence, step_tokens: int, chunk_size: int) -> int:
    """Return how many blocks a prompt must get before its next piece is computed."""
    reserved, whole = sequence.stem.reserved, sequence.blocks_needed(chunk_size)
    stop = sequence.computed + step_tokens
    wanted = whole if stop >= sequence.prefill_stop else blocks_for(stop, chunk_size)
    return max(0, wanted - reserved)


def _extend(kv: KVCacheManager, sequence: Sequence, blocks: int, plan: PlanBuilder) -> None:
    """Give a prompt so many blocks more, which are free."""
    first = sequence.stem.reserved
    for index in range(first, first + blocks):
        if isinstance(kv.pool, ThinPool):
            at = index - len(sequence.path)
            kv.pool.widen(sequence.path[index].block if at < 0 else sequence.private[at])
            continue
        block = kv.pool.allocate()
        if index < len(sequence.path):
            kv.tree.place(sequence.path[index], block)
        else:
            sequence.private.append(block)
        plan.blocks.append((sequence.batch_seq_id, index, block))
    sequence.stem = sequence.stem._replace(reserved=first + blocks)
