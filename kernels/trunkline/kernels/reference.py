"""The PyTorch reference of every op: the specification, and the fallback on machines without native kernels.

Any device and any floating type; sums of half types are in float32. Attention is two-phase like the native
kernels' (ChunkAttention §3.2), see `reference_decode`. Per-plan index tensors are made once, so that a layer
costs a few torch calls whatever the batch. Blocks are in plain order; one that other kernels have packed is
refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trunkline.kernels.live_plan import AnyDecodePlan, LiveDecodePlan
from trunkline.kernels.ops import (
    CLAMPED_SILU,
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
    add_rows,
    check_copies,
    rotate,
)
from trunkline.kernels.plan import PrefillPlan, WritePlan
from trunkline.kernels.quantisation import linear_quantised, stored_bytes, stored_weight
from trunkline.kernels.quantised_kv import to_rows
from trunkline.kernels.reference_attention import ReferencePrefillState, check_plain
from trunkline.kernels.reference_decode import ReferenceDecodeState
from trunkline.kvstore.chunks import Int32Array

WIDENED_ROWS: Final = 4096
"""Number of rows of a half-type weight that are converted at a time for a float32 result."""


class ReferenceWriteState:
    """Index tensors of a `WritePlan`: only stored tokens, so that slot -1 costs nothing per layer."""

    def __init__(self, plan: WritePlan, pool: KvPool) -> None:
        device = pool.data.device
        stored = np.flatnonzero(plan.slots >= 0)
        check_plain(pool, plan.slots[stored] // plan.chunk_size)
        slots = torch.from_numpy(plan.slots[stored].astype(np.int64)).to(device)
        self.tokens = None if len(stored) == len(plan.slots) else torch.from_numpy(stored).to(device)
        self.block = slots // plan.chunk_size
        self.offset = slots % plan.chunk_size


class ReferenceKernels:
    """Implements `trunkline.kernels.ops.Kernels`."""

    name = "reference"

    def __init__(self) -> None:
        self.counters = KernelCounters()

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
        state = plan.state
        if not isinstance(state, ReferenceWriteState):
            plan.state = state = ReferenceWriteState(plan, pool)
        heads = qkv.view(qkv.shape[0], spec.heads + spec.bands * spec.kv_heads, spec.head_dim)
        q, k = heads[:, : spec.heads], heads[:, spec.heads : spec.heads + spec.kv_heads]
        if norm is not None:
            q.copy_(_rms_norm(q, norm.q_weight, norm.eps))
            k.copy_(_rms_norm(k, norm.k_weight, norm.eps))
        if angles is not None:
            rotate(heads[:, : spec.heads + spec.kv_heads], angles)
        new = heads[:, spec.heads :].view(qkv.shape[0], spec.bands, spec.kv_heads, spec.head_dim)
        if state.tokens is not None:
            new = new[state.tokens]
        if pool.format.is_quantised:
            new = to_rows(new, pool.format.row[0].dtype, spec.latent_dim)
        # [blocks, chunk_size, bands, kv_heads, row]: the two indexed dimensions in front.
        pool.data[:, layer].permute(0, 3, 1, 2, 4)[state.block, state.offset] = new
        return q

    def decode_attention(
        self, plan: AnyDecodePlan, q: Tensor, pool: KvPool, layer: int, spec: AttentionSpec, out: Tensor
    ) -> None:
        counters = self.counters
        counters.called("decode_attention")
        if isinstance(plan, LiveDecodePlan):
            plan = plan.rebuilt()
        state = plan.state
        if not isinstance(state, ReferenceDecodeState):
            plan.state = state = ReferenceDecodeState(plan, pool)
            counters.decode_plans += 1
        tokens = state.advance_to(plan.steps)
        counters.decode_tokens_read += tokens
        counters.decode_bytes_read += tokens * pool.format.layer_token_bytes
        state.attend(q, pool, layer, spec, out)

    def prefill_attention(
        self, plan: PrefillPlan, q: Tensor, pool: KvPool, layer: int, spec: AttentionSpec, out: Tensor
    ) -> None:
        self.counters.called("prefill_attention")
        state = plan.state
        if not isinstance(state, ReferencePrefillState):
            plan.state = state = ReferencePrefillState(plan, pool)
        self.counters.prefill_tokens_read += state.tokens_read
        state.attend(q, pool, layer, spec, out)

    def copy_blocks(self, pool: KvPool, copies: Int32Array) -> None:
        self.counters.called("copy_blocks")
        data = pool.data
        check_copies(pool, copies)
        check_plain(pool, copies[:, :2].reshape(-1))
        for source, destination, first, count in copies.tolist():
            chosen = slice(first, first + count)
            data[destination, ..., chosen, :].copy_(data[source, ..., chosen, :])

    def gather_blocks(self, pool: KvPool, blocks: Int32Array, layers: range, out: Tensor) -> None:
        self.counters.called("gather_blocks")
        check_plain(pool, blocks)
        index = torch.from_numpy(blocks.astype(np.int64)).to(pool.data.device)
        out.copy_(pool.data[:, layers.start : layers.stop].index_select(0, index))

    def scatter_blocks(self, pool: KvPool, blocks: Int32Array, layers: range, data: Tensor) -> None:
        self.counters.called("scatter_blocks")
        index = torch.from_numpy(blocks.astype(np.int64)).to(pool.data.device)
        pool.data[:, layers.start : layers.stop].index_copy_(0, index, data.to(pool.data.device))
        # Nothing of the old contents is left, in whatever order they were.
        pool.packed[:, layers.start : layers.stop].index_fill_(0, index.to(pool.packed.device), 0)

    def gather_slots(
        self, pool: KvPool, blocks: Int32Array, layers: range, host: Tensor, slots: Int32Array
    ) -> None:
        chosen = host[:, layers.start : layers.stop]
        found = torch.empty((len(slots), *chosen.shape[1:]), dtype=host.dtype)
        self.gather_blocks(pool, blocks, layers, found)
        chosen.index_copy_(0, torch.from_numpy(slots.astype(np.int64)), found)

    def scatter_slots(
        self, pool: KvPool, blocks: Int32Array, layers: range, host: Tensor, slots: Int32Array
    ) -> None:
        index = torch.from_numpy(slots.astype(np.int64))
        self.scatter_blocks(pool, blocks, layers, host[:, layers.start : layers.stop].index_select(0, index))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        self.counters.called("rms_norm")
        return _rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        self.counters.called("add_rms_norm")
        residual += x
        return _rms_norm(residual, weight, eps)

    def pack_linear(self, weight: Weight, bias: Tensor | None, quantisation: Quantisation = "") -> PackedLinear:
        stored = stored_weight(weight, quantisation)
        return PackedLinear(weight.shape[0], weight.shape[1], (stored, bias), stored_bytes(stored, bias))

    def linear(
        self,
        x: Tensor,
        layer: PackedLinear,
        out_dtype: torch.dtype | None = None,
        addend: RowAddend | None = None,
    ) -> Tensor:
        self.counters.called("linear")
        weight, bias = layer.data
        if not isinstance(weight, Tensor):
            return add_rows(linear_quantised(x, weight, bias), addend).to(out_dtype or x.dtype)
        if out_dtype is None or out_dtype == x.dtype:
            return add_rows(F.linear(x, weight, bias), addend)
        # F.linear would round to the type of x first. Converted in parts: the output layer of a model is large.
        wide = torch.promote_types(x.dtype, out_dtype)
        out = torch.empty(x.shape[0], layer.out_features, dtype=out_dtype, device=x.device)
        x = x.to(wide)
        for start in range(0, layer.out_features, WIDENED_ROWS):
            rows = slice(start, min(start + WIDENED_ROWS, layer.out_features))
            out[:, rows] = F.linear(x, weight[rows].to(wide), None if bias is None else bias[rows].to(wide))
        return add_rows(out, addend)

    def pack_gated_linear(
        self, weight: Weight, bias: Tensor | None, activation: Activation, quantisation: Quantisation = ""
    ) -> PackedLinear:
        stored = stored_weight(weight, quantisation)
        data = (stored, bias, activation)
        return PackedLinear(weight.shape[0] // 2, weight.shape[1], data, stored_bytes(stored, bias))

    def gated_linear(self, x: Tensor, layer: PackedLinear, addend: RowAddend | None = None) -> Tensor:
        self.counters.called("gated_linear")
        weight, bias, activation = layer.data
        if not isinstance(weight, Tensor):
            gate_up = linear_quantised(x, weight, bias)
        else:
            gate_up = F.linear(x, weight, bias)
        gate_up = add_rows(gate_up, addend)
        gate, up = gate_up[:, : layer.out_features], gate_up[:, layer.out_features :]
        if activation == "clamped_silu":
            slope, limit = CLAMPED_SILU
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return (gate * (gate * slope).sigmoid_()).mul_(up + 1.0).to(x.dtype)
        if activation == "silu":
            return F.silu(gate).mul_(up).to(x.dtype)
        return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none").mul_(up).to(x.dtype)

    def stack_experts(
        self, experts: Sequence[tuple[PackedLinear, PackedLinear]], dtype: torch.dtype
    ) -> ExpertStack | None:
        return None


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype in (torch.float16, torch.bfloat16):
        return F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype) * weight
    return F.rms_norm(x, (x.shape[-1],), weight, eps)
