"""What the CPU kernels derive from plans: pieces of work, arrays in one tensor, angles of shifts.

It is made once and kept in the plan's `state`. The native code trusts what is checked here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trunkline.kernels.live_plan import AnyDecodePlan, LiveDecodePlan, LiveWork
from trunkline.kernels.ops import AttentionSpec, KernelCounters, KvPool
from trunkline.kernels.plan import PrefillPlan, WorkOptions, WritePlan, plan_decode_work
from trunkline.kvstore.chunks import Int32Array

INVARIANT_TOKENS: Final = 1024
"""Tokens between two cuts of a row's context in the batch-invariant mode. The more, the fewer partial results, and
the fewer pieces among which threads can share a single row's context."""
CARRY_TOKENS: Final = 64
"""Keys between two updates of a row's state in the batch-invariant mode (`kShortGroupTokens` in
`csrc/cpu/attention.h`): in between, states are carried from piece to piece."""
VECTORS_PER_READ: Final = 8
"""Query vectors whose products take about as long as reading their tokens: 40 GB/s against 300 GFLOP/s."""
TILE_VECTORS: Final = 256
"""Largest number of query vectors of a piece, so that accumulators stay in the second-level cache."""
UNIT_VECTORS: Final = 48
"""Query vectors up to which several heads' attention is one unit (`kRowBlock` in `csrc/cpu/attention.h`)."""
NONE: Final = torch.empty(0)
"""The tensor that stands for an optional tensor that is not given."""

# Words of the header (csrc/common/work_plan.h, WorkHeader).
WORK_ENTRIES: Final = 4
WORK_TOKENS: Final = 7
WORK_ENTRY_ROW: Final = 16
WORK_ENTRY_SHIFT: Final = 17


class ShiftTable:
    """The angles by which queries are rotated for shifted items, one per distinct shift and frequency tensor."""

    def __init__(self, shifts: NDArray[np.int32]) -> None:
        self.distinct, self.index = np.unique(shifts, return_inverse=True)
        self._made: list[tuple[Tensor, Tensor]] = []

    def angles(self, frequencies: Tensor) -> Tensor:
        """Return float32 `[shifts, 2, rotary_dim / 2]`: cosines and sines of a rotation back by the shift."""
        for known, angles in self._made:
            if known is frequencies:
                return angles
        exact = -self.distinct.astype(np.float64)[:, None] * frequencies.double().cpu().numpy()
        angles = torch.from_numpy(np.stack((np.cos(exact), np.sin(exact)), axis=1).astype(np.float32))
        self._made.append((frequencies, angles))
        return angles


def turns_queries(spec: AttentionSpec) -> bool:
    """Return whether shifted items need rotated queries; with ALiBi a shift acts by positions alone.

    Raises:
        ValueError: Attention of this layer does not depend on distances, so parts cannot be shifted.
    """
    if spec.inverse_frequencies is None and spec.alibi_slopes is None:
        raise ValueError("a shift needs rotary positions or ALiBi; this layer's attention has neither")
    return spec.inverse_frequencies is not None


class CpuDecodeWork:
    """The pieces of a decode plan for certain head counts: `plan_decode_work`'s words, or those of a live plan."""

    def __init__(self, words_of_plan: Tensor, live: LiveWork | None = None) -> None:
        """
        Args:
            live: The plan that goes on, if the words are of one.
        """
        self.words = words_of_plan
        self.live = live
        self.made = 0 if live is None else live.made
        words = self.words.numpy() if live is None else live.array
        self.tokens = int(words[WORK_TOKENS])
        self.shifts: ShiftTable | None = None
        self.entry_query = self.turns = NONE
        if live is not None and not live.is_shifted:
            return
        entries = int(words[WORK_ENTRIES])
        shift = words[words[WORK_ENTRY_SHIFT] :][:entries]
        moved = shift.nonzero()[0]
        if not len(moved):
            return
        # Entries of one row with the same shift use the same turned query.
        row = words[words[WORK_ENTRY_ROW] :][:entries][moved].astype(np.int64)
        pairs, slot = np.unique((row << 32) + shift[moved], return_inverse=True)
        pair_row = (pairs + (1 << 31)) >> 32
        self.shifts = ShiftTable((pairs - (pair_row << 32)).astype(np.int32))
        self.turns = torch.from_numpy(np.stack((pair_row, self.shifts.index), axis=1).astype(np.int32))
        entry_query = np.full(entries, -1, dtype=np.int32)
        entry_query[moved] = slot
        self.entry_query = torch.from_numpy(entry_query)


@dataclass
class CpuDecodeState:
    """The data that `CpuKernels` derives from a `DecodePlan`."""

    last_block: int
    has_shifts: bool
    works: dict[WorkOptions, CpuDecodeWork] = field(default_factory=dict)
    """The pieces of work, by options: layers may differ, and so may the kernels that use the plan."""


class CpuPrefillState:
    """The data that `CpuKernels` derives from a `PrefillPlan`: its arrays in one tensor."""

    def __init__(self, plan: PrefillPlan) -> None:
        _check_items(plan.block, plan.first, plan.count, plan.chunk_size)
        _check_indptr("query_indptr", plan.query_indptr, len(plan.query_position))
        _check_indptr("item_indptr", plan.item_indptr, len(plan.block))
        self.shifts = ShiftTable(plan.shift) if plan.shift.any() else None
        item_angle = np.full(len(plan.block), -1)
        if self.shifts is not None:
            item_angle = np.where(plan.shift != 0, self.shifts.index, -1)
        arrays = (
            np.array([plan.num_entries, len(plan.query_position), len(plan.block)]),
            plan.query_indptr,
            plan.item_indptr,
            plan.query_position,
            plan.block,
            plan.first,
            plan.count,
            plan.base,
            plan.shift,
            item_angle,
        )
        self.words = torch.from_numpy(np.concatenate([array.astype(np.int32) for array in arrays]))
        self.tokens_read = int(plan.count.sum())
        self.last_block = int(plan.block.max(initial=-1))


class Planning:
    """The options by which the kernels of one instance cut decode plans."""

    def __init__(
        self, threads: int, invariant_tokens: int, share: bool, counters: KernelCounters, *, carries: bool = True
    ) -> None:
        """
        Args:
            invariant_tokens: Tokens between two cuts of a row's context; 0: cuts are where they cost least.
            carries: Whether plans that go on may carry states from piece to piece within a cut.
        """
        self._counters = counters
        self.invariant_tokens = invariant_tokens
        self._carry_tokens = CARRY_TOKENS if carries and invariant_tokens else 0
        self._threads = threads
        self._share = share
        self._made: dict[tuple[int, int, int, int, int], WorkOptions] = {}

    def options(self, spec: AttentionSpec, row_bytes: int) -> WorkOptions:
        """Return the options for a layer: always the same object, because each layer of each step needs it."""
        key = (spec.kv_heads, spec.heads, spec.head_dim, spec.latent_dim, row_bytes)
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = WorkOptions(
                kv_heads=spec.kv_heads,
                group=spec.queries_per_kv,
                kv_token_bytes=spec.bands * row_bytes,
                partial_bytes=2 * 4 * (spec.value_dim + 2),
                tile_rows=max(TILE_VECTORS, spec.queries_per_kv),
                workers=self._threads,
                invariant_tokens=self.invariant_tokens,
                share=self._share,
                vectors_per_read=VECTORS_PER_READ,
                unit_vectors=UNIT_VECTORS,
                carry_tokens=self._carry_tokens,
            )
        return made

    def decode_work(self, plan: AnyDecodePlan, pool: KvPool, spec: AttentionSpec) -> CpuDecodeWork:
        """Return the pieces of a plan for layers of this shape.

        Raises:
            ValueError: A plan that contradicts itself or the pool.
        """
        if isinstance(plan, LiveDecodePlan):
            return self._live_work(plan, pool, spec)
        state = plan.state
        if not isinstance(state, CpuDecodeState):
            _check_items(plan.block, plan.first, plan.count, plan.chunk_size)
            tails = (plan.first + plan.count)[plan.tail_item]
            if int(tails.max(initial=0)) + plan.steps_left > plan.chunk_size:
                raise ValueError(f"a tail does not have room for {plan.steps_left} more tokens")
            plan.state = state = CpuDecodeState(int(plan.block.max(initial=-1)), bool(plan.shifts.any()))
            self._counters.decode_plans += 1
        shape = pool.data.shape
        _check_pool(shape, plan.chunk_size, state.last_block)
        if plan.steps > plan.steps_left:
            raise ValueError(f"decode plan is valid for {plan.steps_left} steps, not for {plan.steps}")
        options = self.options(spec, pool.format.row_bytes)
        work = state.works.get(options)
        if work is None:
            state.works[options] = work = CpuDecodeWork(plan_decode_work(plan, options))
        return work

    def _live_work(self, plan: LiveDecodePlan, pool: KvPool, spec: AttentionSpec) -> CpuDecodeWork:
        live = plan.work(self.options(spec, pool.format.row_bytes))
        _check_pool(pool.data.shape, plan.chunk_size, live.last_block)
        work = live.state
        if not isinstance(work, CpuDecodeWork) or work.made != live.made:
            live.state = work = CpuDecodeWork(live.words, live)
            self._counters.decode_plans += 1
        return work


def prefill_state(plan: PrefillPlan, pool: KvPool) -> CpuPrefillState:
    """Return a plan's arrays.

    Raises:
        ValueError: A plan that contradicts itself or the pool.
    """
    state = plan.state
    if not isinstance(state, CpuPrefillState):
        plan.state = state = CpuPrefillState(plan)
    _check_pool(pool.data.shape, plan.chunk_size, state.last_block)
    return state


def write_slots(plan: WritePlan) -> Tensor:
    """Return where each token's KV goes, int32 `[tokens]`."""
    slots = plan.state
    if not isinstance(slots, Tensor):
        plan.state = slots = int32_tensor(plan.slots)
    return slots


def int32_tensor(array: Int32Array) -> Tensor:
    """Return a copy of an array as a tensor."""
    return torch.from_numpy(np.array(array, dtype=np.int32))


def _check_items(block: Int32Array, first: Int32Array, count: Int32Array, chunk_size: int) -> None:
    """Refuse items outside of their blocks: the native code does not check them again."""
    if not len(block):
        return
    if int(block.min()) < 0 or int(first.min()) < 0 or int(count.min()) < 0:
        raise ValueError("an item has a negative block, first or count")
    if int((first.astype(np.int64) + count).max()) > chunk_size:
        raise ValueError(f"an item reaches beyond its block of {chunk_size} tokens")


def _check_indptr(name: str, indptr: Int32Array, length: int) -> None:
    """Refuse offsets that do not ascend from 0 to `length`: the native code does not check them again."""
    if not len(indptr) or indptr[0] != 0 or indptr[-1] != length or bool((indptr[1:] < indptr[:-1]).any()):
        raise ValueError(f"{name} must ascend from 0 to {length}")


def _check_pool(shape: torch.Size, chunk_size: int, last_block: int) -> None:
    if shape[4] != chunk_size:
        raise ValueError(f"the plan is for blocks of {chunk_size} tokens, the pool has blocks of {shape[4]}")
    if last_block >= shape[0]:
        raise ValueError(f"the plan reads block {last_block}: the pool has {shape[0]} blocks")
