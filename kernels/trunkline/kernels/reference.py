"""The PyTorch reference of every op: the specification, and what runs where no native kernels are.

Any device and any floating type; half types are computed in float32. Attention is two-phase like the native
kernels' (ChunkAttention §3.2), see `reference_decode`. Per-plan index tensors are made once, so that a layer
costs a few torch calls whatever the batch.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trunkline.kernels.ops import Angles, AttentionSpec, KernelCounters, swap_halves
from trunkline.kernels.plan import DecodePlan, PrefillPlan, WritePlan
from trunkline.kernels.reference_decode import DecodeState
from trunkline.kernels.reference_prefill import PrefillState
from trunkline.kvstore.layout import Int32Array


class WriteState:
    """Index tensors of a `WritePlan`: only stored tokens, so that slot -1 costs nothing per layer."""

    def __init__(self, plan: WritePlan, device: torch.device) -> None:
        stored = np.flatnonzero(plan.slots >= 0)
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
        kv_pool: Tensor,
        layer: int,
        spec: AttentionSpec,
    ) -> Tensor:
        self.counters.called("write_kv")
        state = plan.state
        if not isinstance(state, WriteState):
            plan.state = state = WriteState(plan, kv_pool.device)
        heads = qkv.view(qkv.shape[0], spec.heads + 2 * spec.kv_heads, spec.head_dim)
        if angles is not None:
            _rotate(heads[:, : spec.heads + spec.kv_heads], angles)
        new = heads[:, spec.heads :].view(qkv.shape[0], 2, spec.kv_heads, spec.head_dim)
        if state.tokens is not None:
            new = new[state.tokens]
        # [blocks, chunk_size, 2, kv_heads, head_dim]: the two indexed dimensions in front.
        kv_pool[:, layer].permute(0, 3, 1, 2, 4)[state.block, state.offset] = new
        return heads[:, : spec.heads]

    def decode_attention(
        self, plan: DecodePlan, q: Tensor, kv_pool: Tensor, layer: int, spec: AttentionSpec, out: Tensor
    ) -> None:
        counters = self.counters
        counters.called("decode_attention")
        state = plan.state
        if not isinstance(state, DecodeState):
            plan.state = state = DecodeState(plan, spec, kv_pool)
            counters.decode_plans += 1
        tokens = state.advance_to(plan.steps)
        counters.decode_tokens_read += tokens
        counters.decode_bytes_read += tokens * 2 * spec.kv_heads * spec.head_dim * kv_pool.element_size()
        state.attend(q, kv_pool, layer, out)

    def prefill_attention(
        self, plan: PrefillPlan, q: Tensor, kv_pool: Tensor, layer: int, spec: AttentionSpec, out: Tensor
    ) -> None:
        self.counters.called("prefill_attention")
        state = plan.state
        if not isinstance(state, PrefillState):
            plan.state = state = PrefillState(plan, spec, kv_pool)
        self.counters.prefill_tokens_read += state.tokens_read
        state.attend(q, kv_pool, layer, out)

    def copy_blocks(self, kv_pool: Tensor, copies: Int32Array) -> None:
        self.counters.called("copy_blocks")
        blocks, chunk_size = kv_pool.shape[0], kv_pool.shape[4]
        for source, destination, first, count in copies.tolist():
            if not (0 <= source < blocks and 0 <= destination < blocks):
                raise ValueError(f"copy of block {source} to {destination}: the pool has {blocks} blocks")
            if not (first >= 0 and count > 0 and first + count <= chunk_size):
                raise ValueError(f"copy of tokens [{first}, {first + count}): a block has {chunk_size}")
            chosen = slice(first, first + count)
            kv_pool[destination, ..., chosen, :].copy_(kv_pool[source, ..., chosen, :])

    def gather_blocks(self, kv_pool: Tensor, blocks: Int32Array, layers: range, out: Tensor) -> None:
        self.counters.called("gather_blocks")
        index = torch.from_numpy(blocks.astype(np.int64)).to(kv_pool.device)
        out.copy_(kv_pool[:, layers.start : layers.stop].index_select(0, index))

    def scatter_blocks(self, kv_pool: Tensor, blocks: Int32Array, layers: range, data: Tensor) -> None:
        self.counters.called("scatter_blocks")
        index = torch.from_numpy(blocks.astype(np.int64)).to(kv_pool.device)
        kv_pool[:, layers.start : layers.stop].index_copy_(0, index, data.to(kv_pool.device))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype in (torch.float16, torch.bfloat16):
            return F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype) * weight
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def rotary(self, x: Tensor, angles: Angles) -> None:
        _rotate(x, angles)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        half = gate_up.shape[-1] // 2
        return F.silu(gate_up[..., :half]).mul_(gate_up[..., half:])


def _rotate(x: Tensor, angles: Angles) -> None:
    turned = x[..., : angles.cos.shape[-1]]
    swapped = swap_halves(turned)
    turned.mul_(angles.cos)
    turned.addcmul_(swapped, angles.sin)
