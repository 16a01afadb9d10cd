"""Reference prefill attention: gather an entry's keys and values, then torch's fused attention.

Entries are independent: what one computes does not depend on the others in the step. Only tokens that an
item covers are gathered, so unused slots cannot leak. Keys of shifted items are turned in the gathered copy;
the pool keeps them as they were computed.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trunkline.kernels.ops import Angles, AttentionSpec, make_angles, swap_halves
from trunkline.kernels.plan import PrefillPlan


class PrefillState:
    """What the reference derives from a `PrefillPlan`; private to `ReferenceKernels`."""

    def __init__(self, plan: PrefillPlan, spec: AttentionSpec, kv_pool: Tensor) -> None:
        self.entries = [_Entry(plan, index, spec, kv_pool) for index in range(plan.num_entries)]
        self.tokens_read = int(plan.count.sum())

    def attend(self, q: Tensor, kv_pool: Tensor, layer: int, out: Tensor) -> None:
        """See `Kernels.prefill_attention`."""
        for entry in self.entries:
            entry.attend(q, kv_pool, layer, out)


class _Entry:
    """Consecutive queries of one sequence and the keys they may see."""

    def __init__(self, plan: PrefillPlan, index: int, spec: AttentionSpec, kv_pool: Tensor) -> None:
        device, chunk_size = kv_pool.device, plan.chunk_size
        self.queries = slice(int(plan.query_indptr[index]), int(plan.query_indptr[index + 1]))
        items = slice(int(plan.item_indptr[index]), int(plan.item_indptr[index + 1]))
        first, count = plan.first[items], plan.count[items]
        block, base, shift = plan.block[items], plan.base[items], plan.shift[items]
        self.spec = spec
        heads, layers = spec.kv_heads, kv_pool.shape[1]
        # Rows of the pool seen as [blocks * layers * 2 * kv_heads, chunk_size * head_dim], head by head.
        first_rows = torch.from_numpy(block.astype(np.int64)).to(device) * (layers * 2 * heads)
        self.key_index = (first_rows + torch.arange(heads, device=device)[:, None]).view(-1)
        self.num_tokens = int(count.sum())
        in_item = np.arange(self.num_tokens) - np.repeat(np.cumsum(count) - count, count)
        stored = np.repeat(np.arange(len(block)) * chunk_size + first, count) + in_item
        is_plain = np.array_equal(stored, np.arange(self.num_tokens))
        self.tokens = None if is_plain else torch.from_numpy(stored).to(device)
        self.angles = _key_angles(np.repeat(shift, count), spec, kv_pool)
        key_position = np.repeat(base + shift, count) + in_item
        query_position = plan.query_position[self.queries]
        visible = key_position <= query_position[:, None]
        self.is_causal = np.array_equal(key_position, query_position)
        self.mask = None if self.is_causal or visible.all() else torch.from_numpy(visible).to(device)

    def attend(self, q: Tensor, kv_pool: Tensor, layer: int, out: Tensor) -> None:
        spec, count = self.spec, self.queries.stop - self.queries.start
        fine = kv_pool.view(-1, kv_pool.shape[4] * spec.head_dim)
        index = self.key_index + layer * 2 * spec.kv_heads
        k = self._select(fine.index_select(0, index))
        v = self._select(fine.index_select(0, index + spec.kv_heads))
        if self.angles is not None:
            width = self.angles.cos.shape[-1]
            turned = k[..., :width]
            k[..., :width] = turned * self.angles.cos + swap_halves(turned) * self.angles.sin
        # Batch dimension: KV heads; heads: the query heads of a group, for which K and V are not copied.
        grouped = q[self.queries].view(count, spec.kv_heads, spec.group, spec.head_dim).permute(1, 2, 0, 3)
        expanded = (spec.kv_heads, spec.group, self.num_tokens, spec.head_dim)
        result = F.scaled_dot_product_attention(
            grouped,
            k[:, None].expand(expanded),
            v[:, None].expand(expanded),
            attn_mask=self.mask,
            is_causal=self.is_causal,
            scale=spec.scale,
        )
        out[self.queries] = result.permute(2, 0, 1, 3).reshape(count, spec.heads, spec.head_dim)

    def _select(self, gathered: Tensor) -> Tensor:
        """The covered tokens `[kv_heads, tokens, head_dim]` of gathered blocks."""
        by_head = gathered.view(self.spec.kv_heads, -1, self.spec.head_dim)
        if self.tokens is None:
            return by_head[:, : self.num_tokens]
        return by_head.index_select(1, self.tokens)


def _key_angles(shifts: np.ndarray, spec: AttentionSpec, kv_pool: Tensor) -> Angles | None:
    if not shifts.any():
        return None
    if spec.inverse_frequencies is None:
        raise ValueError("a shift needs rotary positions")
    angles = make_angles(torch.from_numpy(shifts.astype(np.float64)), spec.inverse_frequencies.double().cpu())
    # [tokens, 1, width] -> [tokens, width]: keys are gathered as [kv_heads, tokens, head_dim].
    return Angles(*(x.squeeze(1).to(kv_pool.device, kv_pool.dtype) for x in angles))
