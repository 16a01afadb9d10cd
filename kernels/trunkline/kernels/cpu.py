"""The ops on CPUs, by the compiled library: attention, blocks, linear layers over prepacked weights, RMS norms.

Each op is one native call. The data that it needs of a plan is derived once and kept in the plan's `state`. Decode
attention is the two-phase partition (ChunkAttention §3.2) over the pieces of `csrc/common/work_plan.h`. Partial
results are merged in place, one after the other per row; for comparison also by way of a buffer. Chunks are packed
in place when they are full (`csrc/cpu/attention.h`). The native side of linear layers is `csrc/cpu/linear.h`
(packed form, invariants), that of norms `csrc/cpu/dense_norm.cc`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from trunkline.kernels.cpu_plans import (
    INVARIANT_TOKENS,
    NONE,
    Planning,
    int32_tensor,
    prefill_state,
    turns_queries,
    write_slots,
)
from trunkline.kernels.grouped import GroupedWeight
from trunkline.kernels.large_pages import LARGE_PAGE_BYTES, advise_large_pages, collect_large_pages
from trunkline.kernels.live_plan import AnyDecodePlan
from trunkline.kernels.native import ISA_LEVELS, NativeContext, library
from trunkline.kernels.ops import (
    Activation,
    Angles,
    AttentionSpec,
    ExpertStack,
    KernelCounters,
    KvPool,
    PackedLinear,
    QkNorm,
    Quantisation,
    RowAddend,
    Weight,
)
from trunkline.kernels.plan import PrefillPlan, WritePlan
from trunkline.kernels.quantisation import quantise, stored_weight
from trunkline.kvstore.chunks import Int32Array


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
        self.context = context = NativeContext(isa, threads)
        module: Any = library()
        self.isa = ISA_LEVELS[context.level]
        self.counters = KernelCounters()
        self.buffered = merge == "buffer"
        tokens = INVARIANT_TOKENS if invariant else 0
        self.planning = Planning(threads, tokens, share, self.counters, carries=not self.buffered)
        # Looking functions up costs more than calling them.
        self._module = module
        self._write_kv, self._decode = module.write_kv, module.decode_attention
        dense = DenseOps(module, context, self.counters)
        self.rms_norm, self.add_rms_norm = dense.rms_norm, dense.add_rms_norm
        self.pack_linear, self.linear = dense.pack_linear, dense.linear
        self.pack_gated_linear, self.gated_linear = dense.pack_gated_linear, dense.gated_linear

    def stack_experts(
        self, experts: Sequence[tuple[PackedLinear, PackedLinear]], dtype: torch.dtype
    ) -> ExpertStack | None:
        return None  # programs run natively, an expert at a time

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
        slots = write_slots(plan)
        cos, sin = (NONE, NONE) if angles is None else angles
        q_weight, k_weight, eps = (NONE, NONE, 0.0) if norm is None else norm
        handle, data, packed = self.context.handle, pool.data, pool.packed
        self._write_kv(handle, slots, qkv, cos, sin, data, packed, layer, spec.latent_dim, q_weight, k_weight, eps)
        return qkv.view(qkv.shape[0], -1, spec.head_dim)[:, : spec.heads]

    def decode_attention(
        self, plan: AnyDecodePlan, q: Tensor, pool: KvPool, layer: int, spec: AttentionSpec, out: Tensor
    ) -> None:
        counters = self.counters
        counters.called("decode_attention")
        work, steps = self.planning.decode_work(plan, pool, spec), plan.steps
        tokens = work.tokens + steps * plan.num_rows
        data, slopes = pool.data, spec.alibi_slopes
        counters.decode_tokens_read += tokens
        counters.decode_bytes_read += tokens * pool.format.layer_token_bytes
        turned = entry_query = NONE
        if work.shifts is not None and turns_queries(spec):
            assert spec.inverse_frequencies is not None
            entry_query = work.entry_query
            turned = q.new_empty((len(work.turns), spec.heads, spec.head_dim))
            angles = work.shifts.angles(spec.inverse_frequencies)
            self._module.turn_queries(self.context.handle, q, work.turns, angles, turned)
        self._decode(
            self.context.handle,
            work.words,
            q,
            data,
            pool.packed,
            layer,
            steps,
            out,
            (spec.scale, spec.soft_cap),
            (spec.window, spec.span),
            NONE if slopes is None else slopes,
            NONE if spec.sinks is None else spec.sinks,
            entry_query,
            turned,
            self.buffered,
            self.planning.invariant_tokens > 0,
        )

    def prefill_attention(
        self, plan: PrefillPlan, q: Tensor, pool: KvPool, layer: int, spec: AttentionSpec, out: Tensor
    ) -> None:
        self.counters.called("prefill_attention")
        state = prefill_state(plan, pool)
        self.counters.prefill_tokens_read += state.tokens_read
        angles = NONE
        if state.shifts is not None and turns_queries(spec):
            assert spec.inverse_frequencies is not None
            angles = state.shifts.angles(spec.inverse_frequencies)
        self._module.prefill_attention(
            self.context.handle,
            state.words,
            q,
            pool.data,
            pool.packed,
            layer,
            out,
            (spec.scale, spec.soft_cap),
            (spec.window, spec.span),
            NONE if spec.alibi_slopes is None else spec.alibi_slopes,
            NONE if spec.sinks is None else spec.sinks,
            angles,
        )

    def copy_blocks(self, pool: KvPool, copies: Int32Array) -> None:
        self.counters.called("copy_blocks")
        self._module.copy_blocks(self.context.handle, pool.data, pool.packed, int32_tensor(copies))

    def gather_blocks(self, pool: KvPool, blocks: Int32Array, layers: range, out: Tensor) -> None:
        self.counters.called("gather_blocks")
        plain = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
        self._module.gather_blocks(
            self.context.handle, pool.data, pool.packed, int32_tensor(blocks), layers.start, layers.stop, plain
        )
        if plain is not out:
            out.copy_(plain)

    def scatter_blocks(self, pool: KvPool, blocks: Int32Array, layers: range, data: Tensor) -> None:
        self.counters.called("scatter_blocks")
        self._module.scatter_blocks(
            self.context.handle,
            pool.data,
            pool.packed,
            int32_tensor(blocks),
            layers.start,
            layers.stop,
            data.cpu().contiguous(),
        )

    def gather_slots(
        self, pool: KvPool, blocks: Int32Array, layers: range, host: Tensor, slots: Int32Array
    ) -> None:
        self.counters.called("gather_slots")
        chosen = (pool.data, pool.packed, int32_tensor(blocks), int32_tensor(slots))
        self._module.gather_slots(self.context.handle, *chosen, layers.start, layers.stop, host)

    def scatter_slots(
        self, pool: KvPool, blocks: Int32Array, layers: range, host: Tensor, slots: Int32Array
    ) -> None:
        self.counters.called("scatter_slots")
        chosen = (pool.data, pool.packed, int32_tensor(blocks), int32_tensor(slots))
        self._module.scatter_slots(self.context.handle, *chosen, layers.start, layers.stop, host)


def _padded(addend: RowAddend | None, rows: int) -> tuple[Tensor, Tensor]:
    """Return an addend as `Addend` of `csrc/cpu/linear.h` has it: values, with a vector's lanes behind them, and
    for each row of x its row of the values, or -1."""
    if addend is None:
        return NONE, NONE
    place = torch.full((rows,), -1, dtype=torch.int32)
    place[addend.rows] = torch.arange(len(addend.rows), dtype=torch.int32)
    return F.pad(addend.values.float().flatten(), (0, LANES_MAX)), place


ACTIVATIONS: Final[dict[Activation, int]] = {"silu": 1, "gelu": 2, "gelu_tanh": 3, "clamped_silu": 4}
"""The number of each `Activation` in `csrc/cpu/linear.h`; 0: not gated."""
DENSE_TYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The number of each `DenseType` in `csrc/cpu/linear.h`."""

LANES_MAX: Final = 16
"""Numbers of the widest vector (`kPanelQuantum`)."""

SLAB_BYTES: Final = 64 << 20
"""Address space of a slab: so large that its memory is fresh, not reused. Unused pages stay unmapped."""


class PackedMemory:
    """Memory for packed layers, one after the other on large pages.

    A layer on small pages is read 10 to 20 % slower, and most layers are smaller than a large page. A slab lives
    as long as any layer in it.
    """

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        """Bytes of the slab that are taken."""

    def take(self, size: int) -> Tensor:
        """Return uint8 `[size]`, aligned to a cache line."""
        rounded = -(-size // 64) * 64
        if rounded > SLAB_BYTES // 4:
            return self._fresh(rounded)[:size]
        if rounded > self._slab.numel() - self._used:
            self._slab, self._used = self._fresh(SLAB_BYTES), 0
        taken = self._slab[self._used : self._used + size]
        self._used += rounded
        return taken

    def written(self, taken: Tensor) -> None:
        """What was taken last has been written: see that it is on large pages."""
        if taken.numel() > SLAB_BYTES // 4:
            collect_large_pages(taken)
        else:  # with the pages that it shares with others
            first = (self._used - taken.numel()) // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES
            collect_large_pages(self._slab[first : -(-self._used // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES])

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
        self._module = module
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

    def pack_linear(self, weight: Weight, bias: Tensor | None, quantisation: Quantisation = "") -> PackedLinear:
        return self._packed(weight, bias, 0, quantisation)

    def linear(
        self,
        x: Tensor,
        layer: PackedLinear,
        out_dtype: torch.dtype | None = None,
        addend: RowAddend | None = None,
    ) -> Tensor:
        self._counters.called("linear")
        x = x.contiguous()
        out = torch.empty(x.shape[0], layer.out_features, dtype=out_dtype or x.dtype)
        self._linear(self._handle, layer.data.handle, x, out, *_padded(addend, len(x)))
        return out

    def pack_gated_linear(
        self, weight: Weight, bias: Tensor | None, activation: Activation, quantisation: Quantisation = ""
    ) -> PackedLinear:
        return self._packed(weight, bias, ACTIVATIONS[activation], quantisation)

    def gated_linear(self, x: Tensor, layer: PackedLinear, addend: RowAddend | None = None) -> Tensor:
        self._counters.called("gated_linear")
        x = x.contiguous()
        out = torch.empty(x.shape[0], layer.out_features, dtype=x.dtype)
        self._linear(self._handle, layer.data.handle, x, out, *_padded(addend, len(x)))
        return out

    def _packed(
        self, weight: Weight, bias: Tensor | None, activation: int, quantisation: Quantisation
    ) -> PackedLinear:
        if isinstance(weight, GroupedWeight):
            stored_weight(weight, quantisation)
            return self._packed_groups(weight, bias, activation)
        type_of_x = DENSE_TYPES.get(weight.dtype, -1)  # of others the library says what it takes
        weight, scale = quantise(weight) if quantisation else (weight.detach(), NONE)
        if weight.dim() == 2 and weight.stride(1) != 1:
            weight = weight.contiguous()
        widened = NONE if bias is None else bias.detach().float().contiguous()
        memory = self._memory.take(self._packed_bytes(weight, activation))
        handle = self._pack(self._handle, weight, scale, widened, type_of_x, activation, memory)
        self._memory.written(memory)
        packed = PackedWeight(memory, handle, activation != 0)
        weakref.finalize(packed, self._delete, handle)
        parts = 2 if activation else 1
        size = memory.nbytes + scale.nbytes + widened.nbytes
        return PackedLinear(weight.shape[0] // parts, weight.shape[1], packed, size)

    def _packed_groups(self, weight: GroupedWeight, bias: Tensor | None, activation: int) -> PackedLinear:
        if weight.dtype not in DENSE_TYPES:
            raise ValueError(f"weights in groups are multiplied with {', '.join(map(str, DENSE_TYPES))}")
        codes, *levels = (NONE if part is None else part.contiguous() for part in weight.parts)
        table = torch.tensor(weight.table, dtype=torch.uint8)
        tensors = (codes, *levels, table)
        widened = NONE if bias is None else bias.detach().float().contiguous()
        form = (weight.bits, weight.group, weight.zero, int(weight.floats))
        size = self._module.linear_groups_bytes(*tensors, *form, activation)
        memory = self._memory.take(size)
        numbers = torch.tensor([*form, DENSE_TYPES[weight.dtype], activation, int(weight.int8_inputs)])
        handle = self._module.linear_pack_groups(self._handle, *tensors, widened, numbers, memory)
        self._memory.written(memory)
        packed = PackedWeight(memory, handle, activation != 0)
        weakref.finalize(packed, self._delete, handle)
        parts = 2 if activation else 1
        return PackedLinear(weight.shape[0] // parts, weight.shape[1], packed, memory.nbytes + widened.nbytes)
