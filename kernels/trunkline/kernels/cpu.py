"""The ops on CPUs, by the compiled library: attention, blocks, linear layers over prepacked weights, RMS norms.

Each op is one native call. The data that it needs of a plan is derived once and kept in the plan's `state`. Decode
attention is the two-phase partition (ChunkAttention §3.2) over the pieces of `csrc/common/work_plan.h`. Partial
results are merged in place, one after the other per row; for comparison also by way of a buffer. Chunks are packed
in place when they are full (`csrc/cpu/attention.h`). The native side of linear layers is `csrc/cpu/linear.h`
(packed form, invariants), that of norms `csrc/cpu/dense_norm.cc`.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trunkline.kernels.large_pages import advise_large_pages
from trunkline.kernels.native import ISA_LEVELS, NativeContext, library
from trunkline.kernels.ops import (
    Activation,
    Angles,
    AttentionSpec,
    KernelCounters,
    KvPool,
    PackedLinear,
    QkNorm,
    Quantisation,
)
from trunkline.kernels.plan import DecodePlan, PrefillPlan, WorkOptions, WritePlan, plan_decode_work
from trunkline.kernels.quantisation import quantise
from trunkline.kvstore.chunks import Int32Array

INVARIANT_TOKENS: Final = 512
VECTORS_PER_READ: Final = 8
"""Query vectors whose products take about as long as reading their tokens: 40 GB/s against 300 GFLOP/s."""
TILE_VECTORS: Final = 256
"""Largest number of query vectors of a piece, so that accumulators stay in the second-level cache."""
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
    """The pieces of a decode plan for certain head counts."""

    def __init__(self, plan: DecodePlan, options: WorkOptions) -> None:
        self.words = plan_decode_work(plan, options)
        words = self.words.numpy()
        self.tokens = int(words[WORK_TOKENS])
        self.shifts: ShiftTable | None = None
        self.entry_query = self.turns = NONE
        entries = int(words[WORK_ENTRIES])
        shift = words[words[WORK_ENTRY_SHIFT] :][:entries]
        moved = np.flatnonzero(shift)
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

    def __init__(self, threads: int, invariant_tokens: int, share: bool) -> None:
        self.invariant_tokens = invariant_tokens
        self._threads = threads
        self._share = share
        self._made: dict[tuple[int, int, int, int], WorkOptions] = {}

    def options(self, spec: AttentionSpec, element_bytes: int) -> WorkOptions:
        """Return the options for a layer: always the same object, because each layer of each step needs it."""
        key = (spec.kv_heads, spec.heads, spec.head_dim, element_bytes)
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = WorkOptions(
                kv_heads=spec.kv_heads,
                group=spec.group,
                kv_token_bytes=2 * spec.head_dim * element_bytes,
                partial_bytes=2 * 4 * (spec.head_dim + 2),
                tile_rows=max(TILE_VECTORS, spec.group),
                workers=self._threads,
                invariant_tokens=self.invariant_tokens,
                share=self._share,
                vectors_per_read=VECTORS_PER_READ,
            )
        return made


class CpuKernels:
    """Implements `trunkline.kernels.ops.Kernels`."""

    name = "cpu"

    def __init__(
        self,
        isa: str | None = None,
        threads: int = 1,
        *,
        invariant: bool = False,
        share: bool = True,
        merge: Literal["in_place", "buffer"] = "in_place",
    ) -> None:
        """
        Args:
            isa: One of `native.isa_levels()`; None: the environment's choice, else the best.
            threads: Threads that share the work of each op, the caller's included.
            invariant: Whether a row's decode result is the same bits whatever else is in the batch.
            share: False: every row reads all its tokens alone (the sequence-first baseline).
            merge: Where partial results of decode attention are merged; the buffer is for comparison.

        Raises:
            NativeLibraryError: There is no library, the level does not run here, or threads cannot be started.
        """
        self._context = context = NativeContext(isa, threads)
        module: Any = library()
        self.isa = ISA_LEVELS[context.level]
        self.counters = KernelCounters()
        self._planning = Planning(threads, INVARIANT_TOKENS if invariant else 0, share)
        self._buffered = merge == "buffer"
        # Looking functions up costs more than calling them.
        self._module = module
        self._write_kv, self._decode = module.write_kv, module.decode_attention
        dense = DenseOps(module, context, self.counters)
        self.rms_norm, self.add_rms_norm = dense.rms_norm, dense.add_rms_norm
        self.pack_linear, self.linear = dense.pack_linear, dense.linear
        self.pack_gated_linear, self.gated_linear = dense.pack_gated_linear, dense.gated_linear

    def write_kv(
        self,
        plan: WritePlan,
        qkv: Tensor,
        angles: Angles | None,
        pool: KvPool,
        layer: int,
        spec: AttentionSpec,
        norm: QkNorm | None = None,
    ) -> Tensor:
        self.counters.called("write_kv")
        slots = plan.state
        if not isinstance(slots, Tensor):
            plan.state = slots = _int32(plan.slots)
        cos, sin = (NONE, NONE) if angles is None else angles
        q_weight, k_weight, eps = (NONE, NONE, 0.0) if norm is None else norm
        handle, data, packed = self._context.handle, pool.data, pool.packed
        self._write_kv(handle, slots, qkv, cos, sin, data, packed, layer, q_weight, k_weight, eps)
        return qkv.view(qkv.shape[0], -1, spec.head_dim)[:, : spec.heads]

    def decode_attention(
        self, plan: DecodePlan, q: Tensor, pool: KvPool, layer: int, spec: AttentionSpec, out: Tensor
    ) -> None:
        counters = self.counters
        counters.called("decode_attention")
        work, steps = self._decode_work(plan, pool, spec), plan.steps
        tokens = work.tokens + steps * plan.num_rows
        data, slopes = pool.data, spec.alibi_slopes
        counters.decode_tokens_read += tokens
        counters.decode_bytes_read += tokens * 2 * spec.kv_heads * spec.head_dim * data.element_size()
        turned = entry_query = NONE
        if work.shifts is not None and turns_queries(spec):
            assert spec.inverse_frequencies is not None
            entry_query = work.entry_query
            turned = q.new_empty((len(work.turns), spec.heads, spec.head_dim))
            angles = work.shifts.angles(spec.inverse_frequencies)
            self._module.turn_queries(self._context.handle, q, work.turns, angles, turned)
        self._decode(
            self._context.handle,
            work.words,
            q,
            data,
            pool.packed,
            layer,
            steps,
            out,
            spec.scale,
            spec.soft_cap,
            spec.window,
            NONE if slopes is None else slopes,
            entry_query,
            turned,
            self._buffered,
            self._planning.invariant_tokens > 0,
        )

    def _decode_work(self, plan: DecodePlan, pool: KvPool, spec: AttentionSpec) -> CpuDecodeWork:
        state = plan.state
        if not isinstance(state, CpuDecodeState):
            _check_items(plan.block, plan.first, plan.count, plan.chunk_size)
            tails = (plan.first + plan.count)[plan.tail_item]
            if int(tails.max(initial=0)) + plan.steps_left > plan.chunk_size:
                raise ValueError(f"a tail does not have room for {plan.steps_left} more tokens")
            plan.state = state = CpuDecodeState(int(plan.block.max(initial=-1)), bool(plan.shifts.any()))
            self.counters.decode_plans += 1
        shape = pool.data.shape
        _check_pool(shape, plan.chunk_size, state.last_block)
        if plan.steps > plan.steps_left:
            raise ValueError(f"decode plan is valid for {plan.steps_left} steps, not for {plan.steps}")
        options = self._planning.options(spec, pool.data.element_size())
        work = state.works.get(options)
        if work is None:
            state.works[options] = work = CpuDecodeWork(plan, options)
        return work

    def prefill_attention(
        self, plan: PrefillPlan, q: Tensor, pool: KvPool, layer: int, spec: AttentionSpec, out: Tensor
    ) -> None:
        self.counters.called("prefill_attention")
        state = plan.state
        if not isinstance(state, CpuPrefillState):
            plan.state = state = CpuPrefillState(plan)
        _check_pool(pool.data.shape, plan.chunk_size, state.last_block)
        self.counters.prefill_tokens_read += state.tokens_read
        angles = NONE
        if state.shifts is not None and turns_queries(spec):
            assert spec.inverse_frequencies is not None
            angles = state.shifts.angles(spec.inverse_frequencies)
        self._module.prefill_attention(
            self._context.handle,
            state.words,
            q,
            pool.data,
            pool.packed,
            layer,
            out,
            spec.scale,
            spec.soft_cap,
            spec.window,
            NONE if spec.alibi_slopes is None else spec.alibi_slopes,
            angles,
        )

    def copy_blocks(self, pool: KvPool, copies: Int32Array) -> None:
        self.counters.called("copy_blocks")
        self._module.copy_blocks(self._context.handle, pool.data, pool.packed, _int32(copies))

    def gather_blocks(self, pool: KvPool, blocks: Int32Array, layers: range, out: Tensor) -> None:
        self.counters.called("gather_blocks")
        plain = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
        self._module.gather_blocks(
            self._context.handle, pool.data, pool.packed, _int32(blocks), layers.start, layers.stop, plain
        )
        if plain is not out:
            out.copy_(plain)

    def scatter_blocks(self, pool: KvPool, blocks: Int32Array, layers: range, data: Tensor) -> None:
        self.counters.called("scatter_blocks")
        self._module.scatter_blocks(
            self._context.handle,
            pool.data,
            pool.packed,
            _int32(blocks),
            layers.start,
            layers.stop,
            data.cpu().contiguous(),
        )

    def gather_slots(
        self, pool: KvPool, blocks: Int32Array, layers: range, host: Tensor, slots: Int32Array
    ) -> None:
        self.counters.called("gather_slots")
        chosen = (pool.data, pool.packed, _int32(blocks), _int32(slots))
        self._module.gather_slots(self._context.handle, *chosen, layers.start, layers.stop, host)

    def scatter_slots(
        self, pool: KvPool, blocks: Int32Array, layers: range, host: Tensor, slots: Int32Array
    ) -> None:
        self.counters.called("scatter_slots")
        chosen = (pool.data, pool.packed, _int32(blocks), _int32(slots))
        self._module.scatter_slots(self._context.handle, *chosen, layers.start, layers.stop, host)


def _int32(array: Int32Array) -> Tensor:
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


ACTIVATIONS: Final[dict[Activation, int]] = {"silu": 1, "gelu": 2, "gelu_tanh": 3}
"""The number of each `Activation` in `csrc/cpu/linear.h`; 0: not gated."""
DENSE_TYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The number of each `DenseType` in `csrc/cpu/linear.h`."""

LARGE_PAGE_BYTES: Final = 2 << 20
SLAB_BYTES: Final = 64 << 20
"""Address space of a slab: so large that its memory is fresh, not reused. Unused pages stay unmapped."""


class PackedMemory:
    """Memory for packed layers, one after the other on large pages.

    A layer on small pages is read 10 to 20 % slower, and most layers are smaller than a large page. A slab lives
    as long as any layer in it.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """Return uint8 `[size]`, aligned to a cache line."""
        rounded = -(-size // 64) * 64
        if rounded > SLAB_BYTES // 4:
            return self._fresh(rounded)[:size]
        if rounded > self._free.numel():
            self._free = self._fresh(SLAB_BYTES)
        taken, self._free = self._free[:size], self._free[rounded:]
        return taken

    def _fresh(self, size: int) -> Tensor:
        pages = -(-size // LARGE_PAGE_BYTES)
        memory = torch.empty((pages + 1) * LARGE_PAGE_BYTES, dtype=torch.uint8)
        start = -memory.data_ptr() % LARGE_PAGE_BYTES
        memory = memory[start : start + pages * LARGE_PAGE_BYTES]
        advise_large_pages(memory)
        return memory


class PackedWeight:
    """The memory of a packed layer, and the native layer that points into it. It is `PackedLinear.data`."""

    __slots__ = ("__weakref__", "gated", "handle", "memory")

    def __init__(self, memory: Tensor, handle: int, gated: bool) -> None:
        self.memory = memory
        self.handle = handle
        self.gated = gated


class DenseOps:
    """The linear layers and norms of `CpuKernels`. Each layer of each step runs this code, so it only allocates
    the output and calls."""

    def __init__(self, module: Any, context: NativeContext, counters: KernelCounters) -> None:
        self._context = context  # kept alive: bound ops outlive the object they were taken from
        self._handle = context.handle
        self._counters = counters
        # Looking a function up costs more than calling it.
        self._rms_norm = module.rms_norm
        self._add_rms_norm = module.add_rms_norm
        self._linear = module.linear
        self._pack = module.linear_pack
        self._packed_bytes = module.linear_packed_bytes
        self._delete = module.linear_delete
        self._memory = PackedMemory()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        self._counters.called("rms_norm")
        x = x.contiguous()
        out = torch.empty_like(x)
        self._rms_norm(self._handle, x, weight, eps, out)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        self._counters.called("add_rms_norm")
        x = x.contiguous()
        out = torch.empty_like(x)
        self._add_rms_norm(self._handle, x, residual, weight, eps, out)
        return out

    def pack_linear(self, weight: Tensor, bias: Tensor | None, quantisation: Quantisation = "") -> PackedLinear:
        return self._packed(weight, bias, 0, quantisation)

    def linear(self, x: Tensor, layer: PackedLinear, out_dtype: torch.dtype | None = None) -> Tensor:
        self._counters.called("linear")
        x = x.contiguous()
        out = torch.empty(x.shape[0], layer.out_features, dtype=out_dtype or x.dtype)
        self._linear(self._handle, layer.data.handle, x, out)
        return out

    def pack_gated_linear(
        self, weight: Tensor, bias: Tensor | None, activation: Activation, quantisation: Quantisation = ""
    ) -> PackedLinear:
        return self._packed(weight, bias, ACTIVATIONS[activation], quantisation)

    def gated_linear(self, x: Tensor, layer: PackedLinear) -> Tensor:
        self._counters.called("gated_linear")
        x = x.contiguous()
        out = torch.empty(x.shape[0], layer.out_features, dtype=x.dtype)
        self._linear(self._handle, layer.data.handle, x, out)
        return out

    def _packed(
        self, weight: Tensor, bias: Tensor | None, activation: int, quantisation: Quantisation
    ) -> PackedLinear:
        type_of_x = DENSE_TYPES.get(weight.dtype, -1)  # of others the library says what it takes
        weight, scale = quantise(weight) if quantisation else (weight.detach(), NONE)
        if weight.dim() == 2 and weight.stride(1) != 1:
            weight = weight.contiguous()
        widened = NONE if bias is None else bias.detach().float().contiguous()
        memory = self._memory.take(self._packed_bytes(weight, activation))
        handle = self._pack(self._handle, weight, scale, widened, type_of_x, activation, memory)
        packed = PackedWeight(memory, handle, activation != 0)
        weakref.finalize(packed, self._delete, handle)
        parts = 2 if activation else 1
        size = memory.nbytes + scale.nbytes + widened.nbytes
        return PackedLinear(weight.shape[0] // parts, weight.shape[1], packed, size)
