"""The ops on NVIDIA GPUs: the host side of `csrc/cuda`, everything enqueued on torch's current stream.

Decode attention and prefill attention are one kernel over one kind of work plan (two-phase partition,
ChunkAttention §3.2-3.3); see `cuda_work` for where plans lie and why CUDA graphs of a decode step stay valid.
Large prompts without shifts and holes may be given to a library (`library_attention`).
Matrix products are cuBLAS's through torch. The pool is always in plain order here (`KvPool.packed` stays zero).

Invariant: no op waits for the device, except that a copy to or from ordinary host memory does, and that the upload
of a plan waits for the upload before the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import byref
from typing import Final

import numpy as np
import torch
from torch import Tensor

from trunkline.kernels import native
from trunkline.kernels.cuda_build import CudaBuildError
from trunkline.kernels.cuda_decode import NARROW_LAYOUT, DecodePlans
from trunkline.kernels.cuda_layers import CudaLayers
from trunkline.kernels.cuda_library import (
    DTYPE_NUMBERS,
    AttentionCall,
    AttentionShape,
    CudaLibrary,
    NormCall,
    WriteCall,
    check_heads,
    check_items,
    check_pool,
    check_queries,
    check_rules,
    check_shifts,
    check_slots,
    check_written,
    kept_type,
    kv_numbers,
    library_of_device,
)
from trunkline.kernels.cuda_moves import PoolMoves
from trunkline.kernels.cuda_sampling import CudaSampling
from trunkline.kernels.cuda_steps import StepBuffers
from trunkline.kernels.cuda_work import (
    WORKSPACE_BYTES,
    CudaDecodeWork,
    DeviceWork,
    PrefillCut,
    PrefillDeviceWork,
    PrefillWork,
    PrefillWorks,
    WorkKey,
    Workspace,
    partial_floats,
    refuse_capture,
)
from trunkline.kernels.library_attention import LibraryPrefill, LibraryWork, PartOps, rest
from trunkline.kernels.live_plan import AnyDecodePlan, LiveDecodePlan
from trunkline.kernels.ops import (
    Activation,
    Angles,
    AttentionSpec,
    ExpertMatrices,
    ExpertStack,
    KernelCounters,
    KvPool,
    PackedLinear,
    QkNorm,
    Quantisation,
    RowAddend,
    Weight,
    add_rows,
)
from trunkline.kernels.plan import PrefillPlan, WritePlan
from trunkline.kernels.scaled_products import Float8Rows
from trunkline.kvstore.chunks import Int32Array

INVARIANT_TOKENS: Final = 512
PREFILL_PIECES: Final = 2
"""Number of pieces of a prefill for each thread block that cuts aim at."""
PREFILL_TOKENS_MIN: Final = 256
"""Fewest tokens of a piece of a prefill that a cut makes."""


class CudaKernels:
    """Implements `trunkline.kernels.ops.Kernels` for tensors of the current CUDA device."""

    name = "cuda"

    def __init__(
        self,
        library: CudaLibrary | None = None,
        stream: Callable[[], int] | None = None,
        *,
        invariant: bool = False,
        share: bool = True,
        workspace_bytes: int = WORKSPACE_BYTES,
        prefill: LibraryPrefill | None = None,
    ) -> None:
        """
        Args:
            library: None: the library for the current device, compiled now if needed.
            stream: Returns the address of the stream to use; None: torch's current stream at each call.
            invariant: Whether a row's decode result is the same bits whatever else is in the batch.
            share: False: every row reads all its tokens alone (the sequence-first baseline).
            workspace_bytes: Memory for partial results. Prefill exceeds it only if a single tile does.
            prefill: What of prefill attention is given to a library; None: nothing.

        Raises:
            CudaBuildError: There is no device, no library that runs on it, or no planner.
        """
        self.counters = KernelCounters()
        self._library = library_of_device() if library is None else library
        if native.library() is None:
            raise CudaBuildError(
                f"the compiled library that holds the planner is not installed; {native.REINSTALL}"
            )
        self._stream = stream or _current_stream
        self._is_capturing = torch.cuda.is_current_stream_capturing if stream is None else lambda: False
        self._invariant_tokens = INVARIANT_TOKENS if invariant else 0
        self._share = share
        self._workspace_bytes = workspace_bytes
        self._prefill = prefill
        # The ops promise sums in float32, also within cuBLAS.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self._layers = CudaLayers(self._library, self.counters, self._stream)
        self._shapes: dict[tuple[torch.dtype, int, str], AttentionShape] = {}
        self._constants: dict[int, tuple[Tensor, Tensor]] = {}
        self._workspace: Workspace | None = None
        self._moves = PoolMoves(self._library, self._stream, self._indices)
        self._decode_plans = DecodePlans(self._library, self.counters, self._stream, lambda: self._is_capturing())

    def sampling(self) -> CudaSampling:
        """Return the ops of sampling on the same device and stream."""
        return CudaSampling(self._library, self._stream, lambda: self._is_capturing())

    # --- attention

    def decode_attention(
        self, plan: AnyDecodePlan, q: Tensor, pool: KvPool, layer: int, spec: AttentionSpec, out: Tensor
    ) -> None:
        counters = self.counters
        counters.called("decode_attention")
        call = self._attention_call(plan, q, pool, layer, spec, out)
        call.rows = len(q)  # in a graph more than the plan has, as a later one may have more
        state, device_work = self._place(plan, pool, spec)
        tokens = state.tokens + plan.steps * plan.num_rows
        counters.decode_tokens_read += tokens
        counters.decode_bytes_read += tokens * pool.format.layer_token_bytes
        call.work, call.steps = device_work.words_address, device_work.steps_address
        call.plan_is_there, device_work.is_written = not device_work.is_written, False
        # While a graph is captured the merge always comes along: a later plan may need it.
        if state.needs_merge or self._is_capturing():
            self._take_workspace(call, state.partials, pool.data.device)
        self._library.call("attention", byref(call), self._stream())

    def prepare_replay(self, plan: AnyDecodePlan, pool: KvPool, spec: AttentionSpec) -> DeviceWork:
        """Bring a plan and its step to the device memory that a captured graph reads, and return that memory. Call
        it before every replay.

        The plan may be another one than the captured one, with at most as many rows as the captured queries. If
        this changes `graph_generation`, the step must be captured again.
        """
        check_pool(pool, plan.chunk_size)
        self._constants_of(spec, pool.data.device)
        return self._place(plan, pool, spec)[1]

    def step_buffers(self, rows: int, pool: KvPool) -> StepBuffers:
        """Return new buffers for decode steps in graphs, of at most so many rows."""
        return StepBuffers(self._library, self._stream, rows, pool.chunk_size, pool.data.device)

    @property
    def graph_generation(self) -> int:
        """Number that changes when the graphs of decode steps captured so far have come to hold stale
        addresses."""
        return self._decode_plans.generation + (self._workspace.generation if self._workspace is not None else 0)

    @property
    def uploaded_words(self) -> int:
        """Number of int32 words of decode plans that were sent to the device so far."""
        return self._decode_plans.uploaded_words

    def prefill_attention(
        self, plan: PrefillPlan, q: Tensor, pool: KvPool, layer: int, spec: AttentionSpec, out: Tensor
    ) -> None:
        self.counters.called("prefill_attention")
        call = self._attention_call(plan, q, pool, layer, spec, out)
        state = self._prefill_state(plan, pool, spec)
        check_shifts(state.has_shifts, spec)
        self.counters.prefill_tokens_read += state.tokens_read
        call.causal, call.plan_is_there = 1, 1  # the host has waited for the copy of a prompt's plan
        for part, address in state.parts:
            call.work, call.rows = address, part.row_stop - part.row_start
            call.q = q.data_ptr() + part.row_start * q.stride(0) * q.element_size()
            call.out = out.data_ptr() + part.row_start * out.stride(0) * out.element_size()
            if part.needs_merge:
                self._take_workspace(call, part.partials, pool.data.device)
            self._library.call("attention", byref(call), self._stream())
        if state.library is not None:
            self.counters.called("library_attention")
            memory = self._reserve(pool.data.device).memory()
            ops = PartOps(memory, self._moves.gather_rows, self._moves.join)
            state.library.attend(q, pool, layer, spec, out, ops)

    def _shape(self, pool: KvPool, spec: AttentionSpec) -> AttentionShape:
        key = (pool.computed, spec.head_dim, kept_type(pool))
        if key not in self._shapes:
            refuse_capture(self._is_capturing(), "the attention kernel is not loaded yet")
            shape = self._shapes[key] = self._library.attention_shape(*key)
            if not NARROW_LAYOUT:
                shape.narrow_stages = 0
        return self._shapes[key]

    def _work_key(self, pool: KvPool, spec: AttentionSpec) -> WorkKey:
        shape = self._shape(pool, spec)
        return WorkKey(
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            dtype=pool.data.dtype,
            device=pool.data.device,
            tile_rows=shape.tile_rows,
            narrow_rows=shape.narrow_rows,
            tile_tokens=shape.tile_tokens,
            grid=shape.grid,
            invariant_tokens=self._invariant_tokens,
            share=self._share,
        )

    def _place(self, plan: AnyDecodePlan, pool: KvPool, spec: AttentionSpec) -> tuple[CudaDecodeWork, DeviceWork]:
        """Bring the plan and its step to the device, if they are not there."""
        work = self._decode_plans.work(plan, self._work_key(pool, spec), spec, pool.format.row_bytes)
        check_items(pool, work.last_block)
        check_shifts(work.has_shifts, spec)
        workspace, device = self._reserve(pool.data.device), pool.data.device
        return work, self._decode_plans.place(
            plan, work, device, lambda partials: workspace.take(partials, spec.heads, spec.head_dim)
        )

    def _prefill_state(self, plan: PrefillPlan, pool: KvPool, spec: AttentionSpec) -> PrefillDeviceWork:
        key, prefill = self._work_key(pool, spec), self._prefill
        window = None if prefill is None else prefill.window(spec, pool)
        if not isinstance(plan.state, PrefillWorks):
            plan.state = PrefillWorks()
        state = plan.state.get((key, pool.data.shape[1], window))
        if state is None:
            refuse_capture(self._is_capturing(), "the prefill plan is not on the device yet")
            cut = PrefillCut(
                rows_per_tile=max(1, key.tile_rows // spec.queries_per_kv),
                units_wanted=-(-PREFILL_PIECES * key.grid // spec.kv_heads),
                piece_tokens_min=PREFILL_TOKENS_MIN,
                piece_tokens=self._invariant_tokens,
                partials_max=self._workspace_bytes // (4 * partial_floats(spec.heads, spec.head_dim)),
            )
            taken = [] if prefill is None else prefill.entries(plan, pool, spec, self._workspace_bytes)
            own = rest(plan, taken) if taken else plan
            state = plan.state[key, pool.data.shape[1], window] = PrefillDeviceWork(
                plan,
                None if own is None else PrefillWork(own, cut),
                LibraryWork(prefill.library, plan, taken, pool, self._workspace_bytes)
                if prefill and taken
                else None,
                key.device,
            )
        check_items(pool, state.last_block)
        return state

    def _attention_call(
        self,
        plan: AnyDecodePlan | PrefillPlan,
        q: Tensor,
        pool: KvPool,
        layer: int,
        spec: AttentionSpec,
        out: Tensor,
    ) -> AttentionCall:
        data = pool.data
        rows = plan.num_rows if isinstance(plan, LiveDecodePlan) else len(plan.query_position)
        check_pool(pool, plan.chunk_size)
        check_heads(pool, layer, spec)
        check_rules(spec)
        shape = self._shape(pool, spec)
        for name, x in (("q", q), ("out", out)):
            check_queries(name, x, pool, spec, (rows, bool(shape.is_matrix)))
        call = AttentionCall(
            q=q.data_ptr(),
            out=out.data_ptr(),
            pool=data.data_ptr(),
            q_row_stride=q.stride(0),
            out_row_stride=out.stride(0),
            head_dim=spec.head_dim,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            chunk_size=pool.chunk_size,
            layers=data.shape[1],
            layer=layer,
            window=spec.window,
            rows=rows,
            tile_rows=shape.tile_rows,
            stages=shape.stages,
            narrow_stages=shape.narrow_stages,
            grid=shape.grid,
            shared_bytes=shape.shared_bytes,
            scale=spec.scale,
            soft_cap=spec.soft_cap,
        )
        call.dtype, call.kv_dtype = kv_numbers(pool)
        call.inverse_frequencies, call.alibi_slopes = self._constants_of(spec, data.device)
        if spec.inverse_frequencies is not None:
            call.rotary_half = len(spec.inverse_frequencies)
        return call

    def _constants_of(self, spec: AttentionSpec, device: torch.device) -> tuple[int | None, int | None]:
        """Return the addresses of inverse frequencies and ALiBi slopes on the device."""
        frequencies, slopes = spec.inverse_frequencies, spec.alibi_slopes
        return (
            None if frequencies is None else self._constant(frequencies, torch.float64, device),
            None if slopes is None else self._constant(slopes, torch.float32, device),
        )

    def _constant(self, x: Tensor, dtype: torch.dtype, device: torch.device) -> int:
        """Return the address on the device of a tensor of a spec. The tensor is copied there once."""
        known = self._constants.get(id(x))
        if known is None or known[0] is not x:
            refuse_capture(self._is_capturing(), "a constant of the model is not on the device yet")
            # The original is kept as well, so that its id is not given to another.
            known = self._constants[id(x)] = (x, x.to(device, dtype).contiguous())
        return known[1].data_ptr()

    def _reserve(self, device: torch.device) -> Workspace:
        if self._workspace is None:
            self._workspace = Workspace(device, self._workspace_bytes)
        return self._workspace

    def _take_workspace(self, call: AttentionCall, partials: int, device: torch.device) -> None:
        workspace = self._reserve(device)
        grows = not workspace.fits(partials, call.heads, call.head_dim)
        refuse_capture(grows and self._is_capturing(), "the memory for partial results has to grow")
        call.partial_acc, call.partial_stats = workspace.take(partials, call.heads, call.head_dim)

    def _indices(self, values: Int32Array, device: torch.device) -> Tensor:
        """Return int32 indices on the device. The array is copied first, because torch warns of read-only
        arrays."""
        refuse_capture(self._is_capturing(), "indices are not on the device yet")
        return torch.from_numpy(np.array(values, dtype=np.int32)).to(device, non_blocking=True)

    # --- the KV pool

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
        data, tokens = pool.data, qkv.shape[0]
        check_pool(pool, plan.chunk_size)
        check_heads(pool, layer, spec)
        check_written(plan, qkv, pool, spec)
        slots = plan.state
        if not isinstance(slots, Tensor) or slots.device != data.device:
            check_slots(plan, pool)
            plan.state = slots = self._indices(plan.slots, data.device)
        call = WriteCall(
            qkv=qkv.data_ptr(),
            pool=data.data_ptr(),
            slots=slots.data_ptr(),
            tokens=tokens,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            chunk_size=plan.chunk_size,
            layers=data.shape[1],
            layer=layer,
        )
        call.dtype, call.kv_dtype = kv_numbers(pool)
        call.angle_dtype, kept = call.dtype, list[Tensor]()
        if angles is not None:
            dtype = angles.cos.dtype if angles.cos.dtype in (qkv.dtype, torch.float32) else torch.float32
            kept += [x.to(dtype).contiguous() for x in angles]
            call.cos, call.sin = kept[0].data_ptr(), kept[1].data_ptr()
            call.angle_dtype, call.rotary_half = DTYPE_NUMBERS[dtype], kept[0].shape[-1] // 2
        if norm is not None:
            kept += [weight.to(qkv.dtype).contiguous() for weight in (norm.q_weight, norm.k_weight)]
            call.q_weight, call.k_weight, call.eps = kept[-2].data_ptr(), kept[-1].data_ptr(), norm.eps
        self._library.call("write_kv", byref(call), self._stream())
        return qkv.view(tokens, spec.heads + 2 * spec.kv_heads, spec.head_dim)[:, : spec.heads]

    def copy_blocks(self, pool: KvPool, copies: Int32Array) -> None:
        self.counters.called("copy_blocks")
        self._moves.copy(pool, copies)

    def gather_blocks(self, pool: KvPool, blocks: Int32Array, layers: range, out: Tensor) -> None:
        self.counters.called("gather_blocks")
        self._moves.gather(pool, blocks, layers, out)

    def scatter_blocks(self, pool: KvPool, blocks: Int32Array, layers: range, data: Tensor) -> None:
        self.counters.called("scatter_blocks")
        self._moves.scatter(pool, blocks, layers, data)

    def gather_slots(
        self, pool: KvPool, blocks: Int32Array, layers: range, host: Tensor, slots: Int32Array
    ) -> None:
        self.counters.called("gather_slots")
        self._moves.gather_slots(pool, blocks, layers, host, slots)

    def scatter_slots(
        self, pool: KvPool, blocks: Int32Array, layers: range, host: Tensor, slots: Int32Array
    ) -> None:
        self.counters.called("scatter_slots")
        self._moves.scatter_slots(pool, blocks, layers, host, slots)

    # --- linear layers and norms

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        self.counters.called("rms_norm")
        return self._norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        self.counters.called("add_rms_norm")
        if not residual.is_contiguous():
            raise ValueError("the residual is changed in place and must be contiguous")
        return self._norm(x, residual, weight, eps)

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        x, width = x.contiguous(), x.shape[-1]
        weight = weight.to(x.dtype).contiguous()
        if x.dtype not in DTYPE_NUMBERS or (residual is not None and residual.dtype != x.dtype):
            raise ValueError(f"a norm of {x.dtype}; the CUDA kernels take float32, float16 and bfloat16")
        out = torch.empty_like(x)
        call = NormCall(
            x=x.data_ptr(),
            residual=None if residual is None else residual.data_ptr(),
            weight=weight.data_ptr(),
            out=out.data_ptr(),
            dtype=DTYPE_NUMBERS[x.dtype],
            rows=x.numel() // width,
            width=width,
            eps=eps,
        )
        self._library.call("rms_norm", byref(call), self._stream())
        return out

    def pack_linear(self, weight: Weight, bias: Tensor | None, quantisation: Quantisation = "") -> PackedLinear:
        return self._layers.pack(weight, bias, quantisation)

    def linear(
        self,
        x: Tensor,
        layer: PackedLinear,
        out_dtype: torch.dtype | None = None,
        addend: RowAddend | None = None,
    ) -> Tensor:
        self.counters.called("linear")
        return add_rows(self._layers.linear(x, layer, out_dtype), addend)

    def pack_gated_linear(
        self, weight: Weight, bias: Tensor | None, activation: Activation, quantisation: Quantisation = ""
    ) -> PackedLinear:
        return self._layers.pack_gated(weight, bias, activation, quantisation)

    def gated_linear(self, x: Tensor, layer: PackedLinear, addend: RowAddend | None = None) -> Tensor:
        self.counters.called("gated_linear")
        return self._layers.gated(x, layer, addend)

    def stack_experts(
        self, experts: Sequence[tuple[PackedLinear, PackedLinear]], dtype: torch.dtype
    ) -> ExpertStack | None:
        return self._layers.stack(experts, dtype)

    def multiply_grouped(self, x: Tensor, matrices: ExpertMatrices, stops: Tensor | None) -> Tensor:
        """As `CudaLayers.multiply_grouped`."""
        return self._layers.multiply_grouped(x, matrices, stops)

    def round_rows(self, x: Tensor, group: int, padded: int) -> Float8Rows:
        """As `CudaLayers.round_rows`."""
        return self._layers.round_rows(x, group, padded)


def _current_stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)
