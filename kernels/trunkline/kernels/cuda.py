"""The ops on NVIDIA GPUs: the host side of `csrc/cuda`, everything enqueued on torch's current stream.

Decode attention and prefill attention are one kernel over one kind of work plan (two-phase partition,
ChunkAttention §3.2-3.3); see `cuda_work` for where plans lie and why CUDA graphs of a decode step stay valid.
Matrix products are cuBLAS's through torch. The pool is always in plain order here (`KvPool.packed` stays zero).

Invariant: nothing waits for the device, except a copy to or from ordinary host memory, and an upload for the
second plan change before it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import byref
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trunkline.kernels.cuda_build import CudaBuildError, library_path
from trunkline.kernels.cuda_library import (
    ACTIVATION_NUMBERS,
    DTYPE_NUMBERS,
    AttentionCall,
    AttentionShape,
    CudaLibrary,
    MoveCall,
    NormCall,
    WriteCall,
)
from trunkline.kernels.cuda_work import PARTIALS, TOKENS, DeviceWork, PrefillCut, PrefillWork, Workspace
from trunkline.kernels.native import WorkOptions, plan_decode_work
from trunkline.kernels.ops import (
    Activation,
    Angles,
    AttentionSpec,
    KernelCounters,
    KvPool,
    PackedLinear,
    QkNorm,
)
from trunkline.kernels.plan import DecodePlan, PrefillPlan, WritePlan
from trunkline.kvstore.layout import Int32Array

PIECE_TOKENS_MIN: Final = 256
INVARIANT_TOKENS: Final = 512
VECTORS_PER_READ: Final = 128
"""Query vectors whose products take about as long as reading their tokens (kernels.md: 790 TFLOP/s, 4.3 TB/s)."""
PIECES_PER_WORKER: Final = 2
ALIGNMENT: Final = 16
"""Bytes; of everything that kernels read in 16-byte units."""


class DecodeWork:
    """A decode plan's words for certain head counts; private to `CudaKernels`."""

    def __init__(self, plan: DecodePlan, key: tuple[int, int, torch.dtype], words: Tensor) -> None:
        self.key = key
        self.words = words
        self.partials = int(words[PARTIALS])
        self.tokens = int(words[TOKENS])
        self.needs_merge = self.partials != plan.num_rows
        self.has_shifts = bool(plan.shifts.any())
        self.device_steps = plan.steps


@dataclass(frozen=True)
class PrefillDeviceWork:
    """A prefill plan's words on the device, for certain head counts."""

    key: tuple[int, int, torch.dtype]
    work: PrefillWork
    words: Tensor
    has_shifts: bool


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
    ) -> None:
        """
        Args:
            library: None: the one for the current device, compiled now if needed.
            stream: address of the stream to use; None: torch's current one at each call.
            invariant: a row's decode result is then the same bit for bit whatever else is in the batch.
            share: False: every row reads all its tokens alone (the sequence-first baseline).

        Raises:
            CudaBuildError: no device, or no library for it.
        """
        self.counters = KernelCounters()
        if library is None:
            if not torch.cuda.is_available():
                raise CudaBuildError("torch finds no CUDA device here")
            library = _library_for(torch.cuda.get_device_capability())
            library.call("set_device", torch.cuda.current_device())
        self._library = library
        self._stream = stream or _current_stream
        self._is_capturing = torch.cuda.is_current_stream_capturing if stream is None else lambda: False
        self._invariant_tokens = INVARIANT_TOKENS if invariant else 0
        self._share = share
        self._shapes: dict[tuple[torch.dtype, int], AttentionShape] = {}
        self._constants: dict[int, tuple[Tensor, Tensor]] = {}
        self._workspace: Workspace | None = None
        self._device_work: DeviceWork | None = None
        self._resident: DecodeWork | None = None

    # --- attention

    def decode_attention(
        self, plan: DecodePlan, q: Tensor, pool: KvPool, layer: int, spec: AttentionSpec, out: Tensor
    ) -> None:
        counters = self.counters
        counters.called("decode_attention")
        shape = self._shape(pool, spec)
        state = self._decode_state(plan, pool, spec, shape)
        _check_shifts(state.has_shifts, spec)
        device_work = self._place(plan, state, pool.data.device)
        tokens = state.tokens + plan.steps * plan.num_rows
        counters.decode_tokens_read += tokens
        counters.decode_bytes_read += tokens * 2 * spec.kv_heads * spec.head_dim * pool.data.element_size()
        call = self._attention_call(q, pool, layer, spec, shape, out)
        call.work, call.steps = device_work.words_address, device_work.steps_address
        call.rows = plan.num_rows
        if self._merges(state):
            self._take_workspace(call, state.partials, pool.data.device)
        self._library.call("attention", byref(call), self._stream())

    def _merges(self, state: DecodeWork) -> bool:
        """While a graph is captured the merge always comes along: a later plan may need it."""
        return state.needs_merge or self._is_capturing()

    def prepare_replay(self, plan: DecodePlan, pool: KvPool, spec: AttentionSpec) -> None:
        """Before a captured step with as many rows is replayed for another plan: bring it to where the graph
        looks. Where that made `graph_generation` change, the step has to be captured again instead."""
        state = self._decode_state(plan, pool, spec, self._shape(pool, spec))
        self._place(plan, state, pool.data.device)
        if self._workspace is None:
            self._workspace = Workspace(pool.data.device)
        self._workspace.take(state.partials, spec.heads, spec.head_dim)

    def note_replay(self, plan: DecodePlan) -> None:
        """A captured step was replayed, so the device's step counter has moved on to `plan.steps` by itself."""
        if isinstance(plan.state, DecodeWork):
            plan.state.device_steps = plan.steps

    @property
    def graph_generation(self) -> int:
        """Graphs of decode steps that were captured at another value hold stale addresses."""
        return sum(part.generation for part in (self._device_work, self._workspace) if part is not None)

    def prefill_attention(
        self, plan: PrefillPlan, q: Tensor, pool: KvPool, layer: int, spec: AttentionSpec, out: Tensor
    ) -> None:
        self.counters.called("prefill_attention")
        shape = self._shape(pool, spec)
        state = self._prefill_state(plan, pool, spec, shape)
        _check_shifts(state.has_shifts, spec)
        self.counters.prefill_tokens_read += state.work.tokens_read
        call = self._attention_call(q, pool, layer, spec, shape, out)
        call.work, call.rows, call.causal = state.words.data_ptr(), state.work.rows, 1
        if state.work.needs_merge:
            self._take_workspace(call, state.work.partials, pool.data.device)
        self._library.call("attention", byref(call), self._stream())

    def _shape(self, pool: KvPool, spec: AttentionSpec) -> AttentionShape:
        key = (pool.data.dtype, spec.head_dim)
        if key not in self._shapes:
            if pool.data.dtype not in DTYPE_NUMBERS:
                raise ValueError(f"KV of type {pool.data.dtype}; the CUDA kernels take float32, float16, bfloat16")
            self._shapes[key] = self._library.attention_shape(*key)
        return self._shapes[key]

    def _decode_state(
        self, plan: DecodePlan, pool: KvPool, spec: AttentionSpec, shape: AttentionShape
    ) -> DecodeWork:
        key = (spec.heads, spec.kv_heads, pool.data.dtype)
        state = plan.state
        if isinstance(state, DecodeWork) and state.key == key:
            return state
        options = WorkOptions(
            kv_heads=spec.kv_heads,
            group=spec.group,
            kv_token_bytes=2 * spec.head_dim * pool.data.element_size(),
            partial_bytes=2 * 4 * (spec.head_dim + 2),
            tile_rows=max(shape.tile_rows, spec.group),
            workers=shape.grid,
            pieces_per_worker=PIECES_PER_WORKER,
            piece_tokens_min=PIECE_TOKENS_MIN,
            invariant_tokens=self._invariant_tokens,
            share=self._share,
            vectors_per_read=VECTORS_PER_READ,
        )
        plan.state = state = DecodeWork(plan, key, plan_decode_work(plan, options))
        return state

    def _place(self, plan: DecodePlan, state: DecodeWork, device: torch.device) -> DeviceWork:
        """Bring the plan and its step to the device, if they are not there ("lazy copy", ChunkAttention §3.3)."""
        if self._device_work is None:
            self._device_work = DeviceWork(device)
        if self._resident is not state:
            self._device_work.upload(state.words, plan.steps)
            self.counters.decode_plans += 1
            self._resident = state
        elif state.device_steps != plan.steps:
            delta = plan.steps - state.device_steps
            self._library.call("add_steps", self._device_work.steps_address, delta, self._stream())
        state.device_steps = plan.steps
        return self._device_work

    def _prefill_state(
        self, plan: PrefillPlan, pool: KvPool, spec: AttentionSpec, shape: AttentionShape
    ) -> PrefillDeviceWork:
        key = (spec.heads, spec.kv_heads, pool.data.dtype)
        state = plan.state
        if isinstance(state, PrefillDeviceWork) and state.key == key:
            return state
        cut = PrefillCut(
            rows_per_tile=max(1, shape.tile_rows // spec.group),
            units_wanted=-(-PIECES_PER_WORKER * shape.grid // spec.kv_heads),
            piece_tokens_min=PIECE_TOKENS_MIN,
            piece_tokens=self._invariant_tokens,
        )
        work = PrefillWork(plan, cut)
        words = work.words().to(pool.data.device)
        plan.state = state = PrefillDeviceWork(key, work, words, bool(plan.shift.any()))
        return state

    def _attention_call(
        self, q: Tensor, pool: KvPool, layer: int, spec: AttentionSpec, shape: AttentionShape, out: Tensor
    ) -> AttentionCall:
        data = pool.data
        if q.dtype != data.dtype or out.dtype != data.dtype:
            raise ValueError(f"queries are {q.dtype} and results {out.dtype}, but the KV pool is {data.dtype}")
        if data.shape[3] != spec.kv_heads or data.shape[5] != spec.head_dim or not data.is_contiguous():
            raise ValueError(f"a pool of shape {tuple(data.shape)} does not fit {spec.kv_heads} x {spec.head_dim}")
        for name, x in (("q", q), ("out", out)):
            if x.shape[1:] != (spec.heads, spec.head_dim) or x.stride()[1:] != (spec.head_dim, 1):
                raise ValueError(f"{name} of shape {tuple(x.shape)}, strides {x.stride()}: heads must be dense")
            if shape.is_matrix and (x.data_ptr() % ALIGNMENT or x.stride(0) * x.element_size() % ALIGNMENT):
                raise ValueError(f"rows of {name} must be aligned to {ALIGNMENT} bytes")
        call = AttentionCall(
            q=q.data_ptr(),
            out=out.data_ptr(),
            pool=data.data_ptr(),
            q_row_stride=q.stride(0),
            out_row_stride=out.stride(0),
            dtype=DTYPE_NUMBERS[data.dtype],
            head_dim=spec.head_dim,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            chunk_size=pool.chunk_size,
            layers=data.shape[1],
            layer=layer,
            window=spec.window,
            tile_rows=shape.tile_rows,
            stages=shape.stages,
            grid=shape.grid,
            shared_bytes=shape.shared_bytes,
            scale=spec.scale,
            soft_cap=spec.soft_cap,
        )
        if spec.inverse_frequencies is not None:
            call.inverse_frequencies = self._constant(spec.inverse_frequencies, torch.float64, data.device)
            call.rotary_half = len(spec.inverse_frequencies)
        if spec.alibi_slopes is not None:
            call.alibi_slopes = self._constant(spec.alibi_slopes, torch.float32, data.device)
        return call

    def _constant(self, x: Tensor, dtype: torch.dtype, device: torch.device) -> int:
        """Address of a tensor of a spec on the device; copied once."""
        known = self._constants.get(id(x))
        if known is None or known[0] is not x:
            # The original is kept as well, so that its id is not given to another.
            known = self._constants[id(x)] = (x, x.to(device, dtype).contiguous())
        return known[1].data_ptr()

    def _take_workspace(self, call: AttentionCall, partials: int, device: torch.device) -> None:
        if self._workspace is None:
            self._workspace = Workspace(device)
        addresses = self._workspace.take(partials, call.heads, call.head_dim)
        call.partial_acc, call.partial_stats = addresses

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
        if qkv.dtype != data.dtype or not qkv.is_contiguous():
            raise ValueError(f"qkv must be contiguous and {data.dtype} like the pool, not {qkv.dtype}")
        slots = plan.state
        if not isinstance(slots, Tensor):
            plan.state = slots = torch.from_numpy(plan.slots).to(data.device, non_blocking=True)
        call = WriteCall(
            qkv=qkv.data_ptr(),
            pool=data.data_ptr(),
            slots=slots.data_ptr(),
            dtype=DTYPE_NUMBERS[data.dtype],
            angle_dtype=DTYPE_NUMBERS[data.dtype],
            tokens=tokens,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            chunk_size=plan.chunk_size,
            layers=data.shape[1],
            layer=layer,
        )
        kept: list[Tensor] = []
        if angles is not None:
            dtype = angles.cos.dtype if angles.cos.dtype in (data.dtype, torch.float32) else torch.float32
            kept += [x.to(dtype).contiguous() for x in angles]
            call.cos, call.sin = kept[0].data_ptr(), kept[1].data_ptr()
            call.angle_dtype, call.rotary_half = DTYPE_NUMBERS[dtype], kept[0].shape[-1] // 2
        if norm is not None:
            kept += [weight.to(data.dtype).contiguous() for weight in (norm.q_weight, norm.k_weight)]
            call.q_weight, call.k_weight, call.eps = kept[-2].data_ptr(), kept[-1].data_ptr(), norm.eps
        self._library.call("write_kv", byref(call), self._stream())
        return qkv.view(tokens, spec.heads + 2 * spec.kv_heads, spec.head_dim)[:, : spec.heads]

    def copy_blocks(self, pool: KvPool, copies: Int32Array) -> None:
        self.counters.called("copy_blocks")
        blocks, layers, _, kv_heads, chunk_size, head_dim = pool.data.shape
        for source, destination, first, count in copies.tolist():
            if not (0 <= source < blocks and 0 <= destination < blocks):
                raise ValueError(f"copy of block {source} to {destination}: the pool has {blocks} blocks")
            if not (first >= 0 and count > 0 and first + count <= chunk_size):
                raise ValueError(f"copy of tokens [{first}, {first + count}): a block has {chunk_size}")
        if not len(copies):
            return
        on_device = torch.from_numpy(np.ascontiguousarray(copies, dtype=np.int32)).to(pool.data.device)
        token_bytes = head_dim * pool.data.element_size()
        tiles = layers * 2 * kv_heads
        pointers = (pool.data.data_ptr(), on_device.data_ptr())
        self._library.call("copy_blocks", *pointers, len(copies), tiles, chunk_size, token_bytes, self._stream())

    def gather_blocks(self, pool: KvPool, blocks: Int32Array, layers: range, out: Tensor) -> None:
        self.counters.called("gather_blocks")
        index = self._block_index(pool, blocks)
        on_device = out.device == pool.data.device and out.is_contiguous()
        target = out if on_device else torch.empty(out.shape, dtype=pool.data.dtype, device=pool.data.device)
        call = self._move(pool, layers, target)
        call.source, call.destination = self._layer_address(pool, layers), target.data_ptr()
        call.source_stride_bytes, call.destination_stride_bytes = _block_bytes(pool), call.region_bytes
        call.source_index, call.regions = index.data_ptr(), len(blocks)
        self._library.call("move_regions", byref(call), self._stream())
        if not on_device:
            out.copy_(target)

    def scatter_blocks(self, pool: KvPool, blocks: Int32Array, layers: range, data: Tensor) -> None:
        self.counters.called("scatter_blocks")
        index = self._block_index(pool, blocks)
        source = data.to(pool.data.device, pool.data.dtype).contiguous()
        call = self._move(pool, layers, source)
        call.source, call.destination = source.data_ptr(), self._layer_address(pool, layers)
        call.source_stride_bytes, call.destination_stride_bytes = call.region_bytes, _block_bytes(pool)
        call.destination_index, call.regions = index.data_ptr(), len(blocks)
        self._library.call("move_regions", byref(call), self._stream())

    def _block_index(self, pool: KvPool, blocks: Int32Array) -> Tensor:
        if len(blocks) and not (int(blocks.min()) >= 0 and int(blocks.max()) < pool.blocks):
            raise ValueError(
                f"blocks {int(blocks.min())} to {int(blocks.max())}: the pool has {pool.blocks} blocks"
            )
        return torch.from_numpy(np.ascontiguousarray(blocks, dtype=np.int32)).to(pool.data.device)

    def _move(self, pool: KvPool, layers: range, moved: Tensor) -> MoveCall:
        expected = (len(layers), *pool.data.shape[2:])
        if tuple(moved.shape[1:]) != expected or moved.dtype != pool.data.dtype:
            raise ValueError(f"layers of blocks are {pool.data.dtype} {expected}, not {tuple(moved.shape[1:])}")
        return MoveCall(region_bytes=len(layers) * _layer_bytes(pool))

    def _layer_address(self, pool: KvPool, layers: range) -> int:
        return pool.data.data_ptr() + layers.start * _layer_bytes(pool)

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

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        return PackedLinear(weight.shape[0], weight.shape[1], (weight, bias))

    def linear(self, x: Tensor, layer: PackedLinear, out_dtype: torch.dtype | None = None) -> Tensor:
        self.counters.called("linear")
        weight, bias = layer.data
        if out_dtype is None or out_dtype == x.dtype:
            return F.linear(x, weight, bias)
        if not x.is_cuda:
            return F.linear(x.to(out_dtype), weight.to(out_dtype), None if bias is None else bias.to(out_dtype))
        # cuBLAS keeps its float32 sums; a product in the type of x would round them first.
        out = torch.mm(x, weight.t(), out_dtype=out_dtype)
        return out if bias is None else out.add_(bias)

    def pack_gated_linear(self, weight: Tensor, bias: Tensor | None, activation: Activation) -> PackedLinear:
        return PackedLinear(weight.shape[0] // 2, weight.shape[1], (weight, bias, activation))

    def gated_linear(self, x: Tensor, layer: PackedLinear) -> Tensor:
        self.counters.called("gated_linear")
        weight, bias, activation = layer.data
        gate_up = F.linear(x, weight, bias)
        rows, width = x.shape[0], layer.out_features
        out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
        numbers = (DTYPE_NUMBERS[x.dtype], ACTIVATION_NUMBERS[activation], rows, width)
        self._library.call("gated_activation", gate_up.data_ptr(), out.data_ptr(), *numbers, self._stream())
        return out


@functools.cache
def _library_for(capability: tuple[int, int]) -> CudaLibrary:
    return CudaLibrary(library_path(capability))


def _current_stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def _layer_bytes(pool: KvPool) -> int:
    return int(np.prod(pool.data.shape[2:])) * pool.data.element_size()


def _block_bytes(pool: KvPool) -> int:
    return pool.data.shape[1] * _layer_bytes(pool)


def _check_shifts(has_shifts: bool, spec: AttentionSpec) -> None:
    if has_shifts and spec.inverse_frequencies is None and spec.alibi_slopes is None:
        raise ValueError("a shift needs rotary positions or ALiBi; this layer's attention has neither")
