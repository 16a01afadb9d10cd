"""Reference attention: states of softmax, what an `AttentionSpec` does to scores, and attention of prefills.

The (O, m, n) of ChunkAttention §3.2 is a `SoftmaxState`. Natural exponentials throughout. An empty state (nothing
was attended to) is `(0, -inf, 0)` and is neutral: merging it changes nothing, and merging only empty states gives
an empty one, without NaN.

A score is `cap(q · k * scale) + slope * distance`, distance being the key's acting position minus the query's; it
counts only where the distance is in `(-window, 0]` and, where there is a span, both are in one part of it. A sink
joins the total once, when all parts of a context have been merged. Layers may differ in all of this but share a
plan. So what a plan's state caches is per frequency tensor or follows from the plan alone, and a spec comes with
each call.

Prefill gathers an entry's keys and values, then calls torch's fused attention. Entries are independent: what one
computes does not depend on the others in the step. Only tokens that an item covers are gathered, so unused slots
cannot leak. Keys of shifted items are turned in the gathered copy; the pool keeps them as they were computed. A
soft cap or a bias, which the fused attention does not take (or only as a matrix per head), is computed in blocks
of queries. Decode attention is in `reference_decode`.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from trunkline.kernels.ops import Angles, AttentionSpec, KvPool, make_angles, swap_halves
from trunkline.kernels.plan import PrefillPlan
from trunkline.kernels.quantised_kv import vectors_of
from trunkline.kvstore.chunks import Int32Array

SCORES_MAX: Final = 1 << 22
"""Largest number of scores that the path without fused attention holds at a time."""


class ReferencePrefillState:
    """The data that the reference derives from a `PrefillPlan`; private to `ReferenceKernels`."""

    def __init__(self, plan: PrefillPlan, pool: KvPool) -> None:
        check_plain(pool, plan.block)
        self.entries = [_Entry(plan, index, pool) for index in range(plan.num_entries)]
        self.tokens_read = int(plan.count.sum())

    def attend(self, q: Tensor, pool: KvPool, layer: int, spec: AttentionSpec, out: Tensor) -> None:
        """Compute attention of new tokens (`Kernels.prefill_attention`)."""
        for entry in self.entries:
            entry.attend(q, pool, layer, spec, out)


class _Mask:
    """Which keys each query of an entry sees under a window."""

    def __init__(
        self, key_position: Int32Array, query_position: Int32Array, spec: AttentionSpec, device: torch.device
    ) -> None:
        distance = key_position - query_position[:, None]
        visible = distance <= 0
        if spec.window:
            visible &= distance > -spec.window
        if spec.span:
            visible &= distance >= -(query_position[:, None] % spec.span)
        blind = ~visible.any(axis=1)
        self.blind = torch.from_numpy(np.flatnonzero(blind)).to(device) if blind.any() else None
        """Indices of the queries that see no key. They attend to arbitrary keys, and their results are
        replaced."""
        visible[blind] = True
        size = len(query_position)
        self.is_causal = visible.shape == (size, size) and np.array_equal(visible, np.tri(size, dtype=np.bool_))
        self.mask = None if self.is_causal or visible.all() else torch.from_numpy(visible).to(device)


class _Entry:
    """Consecutive queries of one sequence and the keys they may see."""

    def __init__(self, plan: PrefillPlan, index: int, pool: KvPool) -> None:
        device, chunk_size = pool.data.device, plan.chunk_size
        self.queries = slice(int(plan.query_indptr[index]), int(plan.query_indptr[index + 1]))
        items = slice(int(plan.item_indptr[index]), int(plan.item_indptr[index + 1]))
        first, count = plan.first[items], plan.count[items]
        block, base, shift = plan.block[items], plan.base[items], plan.shift[items]
        _, layers, bands, heads, _, _ = pool.data.shape
        # Rows of the pool seen as [blocks * layers * bands * kv_heads, chunk_size * row], head by head.
        first_rows = torch.from_numpy(block.astype(np.int64)).to(device) * (layers * bands * heads)
        self.key_index = (first_rows + torch.arange(heads, device=device)[:, None]).view(-1)
        self.num_tokens, self.capacity = int(count.sum()), len(block) * chunk_size
        in_item = np.arange(self.num_tokens, dtype=np.int32) - np.repeat(np.cumsum(count) - count, count)
        stored = np.repeat(np.arange(len(block)) * chunk_size + first, count) + in_item
        is_plain = np.array_equal(stored, np.arange(self.num_tokens))
        self.tokens = None if is_plain else torch.from_numpy(stored).to(device)
        self.angles = ShiftAngles(np.repeat(shift, count))
        self.key_position = (np.repeat(base + shift, count) + in_item).astype(np.int32)
        self.query_position = plan.query_position[self.queries]
        self.masks: dict[tuple[int, int], _Mask] = {}

    def attend(self, q: Tensor, pool: KvPool, layer: int, spec: AttentionSpec, out: Tensor) -> None:
        if not self.num_tokens:
            out[self.queries] = 0.0
            return
        fine = pool.data.view(-1, pool.chunk_size * pool.data.shape[-1])
        index = self.key_index + layer * spec.bands * spec.kv_heads
        k = vectors_of(pool, self._select(fine.index_select(0, index), spec), q.dtype)
        if spec.latent_dim:
            v = k[..., -spec.latent_dim :]
        else:
            v = vectors_of(pool, self._select(fine.index_select(0, index + spec.kv_heads), spec), q.dtype)
        angles = self.angles.of(spec, pool)
        if angles is not None:
            k = turn(k.transpose(0, 1), angles).transpose(0, 1).to(q.dtype)
        if spec.soft_cap or spec.alibi_slopes is not None or spec.sinks is not None:
            self._in_blocks(q, k, v, spec, out)
        else:
            self._fused(q, k, v, spec, out)

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, out: Tensor) -> None:
        count = self.queries.stop - self.queries.start
        mask = self.masks.get((spec.window, spec.span))
        if mask is None:
            mask = _Mask(self.key_position, self.query_position, spec, q.device)
            self.masks[spec.window, spec.span] = mask
        # Batch dimension: KV heads; heads: the query heads of a group, for which K and V are not copied.
        grouped = (
            q[self.queries].view(count, spec.kv_heads, spec.queries_per_kv, spec.head_dim).permute(1, 2, 0, 3)
        )
        expanded = (spec.kv_heads, spec.queries_per_kv, self.num_tokens, -1)
        result = F.scaled_dot_product_attention(
            grouped,
            k[:, None].expand(expanded),
            v[:, None].expand(expanded),
            attn_mask=mask.mask,
            is_causal=mask.is_causal,
            scale=spec.scale,
        )
        if mask.blind is not None:
            result.index_fill_(2, mask.blind, 0.0)
        out[self.queries] = result.permute(2, 0, 1, 3).reshape(count, spec.heads, spec.value_dim)

    def _in_blocks(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, out: Tensor) -> None:
        dtype = compute_dtype(q.dtype)
        k, v = k.to(dtype).transpose(-1, -2), v.to(dtype)
        key_position = torch.from_numpy(self.key_position).to(q.device)
        query_position = torch.from_numpy(self.query_position).to(q.device)[:, None]
        step = max(1, SCORES_MAX // (spec.heads * self.num_tokens))
        for start in range(self.queries.start, self.queries.stop, step):
            chosen = slice(start, min(start + step, self.queries.stop))
            rows = chosen.stop - start
            grouped = (
                q[chosen].to(dtype).view(rows, spec.kv_heads, spec.queries_per_kv, spec.head_dim).transpose(0, 1)
            )
            scores = (grouped * spec.scale).flatten(1, 2) @ k
            by_row = scores.view(spec.kv_heads, rows, spec.queries_per_kv, -1)
            own = query_position[start - self.queries.start :][:rows]
            distance = key_position - own
            adjust_scores(by_row, spec, distance, own)
            by_row.masked_fill_((distance > 0)[:, None], float("-inf"))
            shape = (spec.kv_heads, rows, spec.queries_per_kv)
            states = (x.view(*shape, *x.shape[2:]) for x in attend(scores, v))
            state = SoftmaxState(*(x.transpose(0, 1).flatten(1, 2) for x in states))
            out[chosen] = state.output(spec.sinks).to(out.dtype)

    def _select(self, gathered: Tensor, spec: AttentionSpec) -> Tensor:
        """Return the covered tokens `[kv_heads, tokens, row]` of gathered blocks."""
        by_head = gathered.view(spec.kv_heads, self.capacity, -1)
        if self.tokens is None:
            return by_head[:, : self.num_tokens]
        return by_head.index_select(1, self.tokens)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type to compute in: float32 for half types, else the type itself."""
    return torch.float32 if dtype.itemsize == 2 else dtype


def check_plain(pool: KvPool, blocks: NDArray[np.integer[Any]]) -> None:
    """Check that blocks are in plain order, the only one that the reference knows.

    Raises:
        ValueError: a block is packed in some layer.
    """
    packed = pool.packed[torch.from_numpy(blocks.astype(np.int64)).to(pool.packed.device)]
    if packed.any():
        block = int(blocks[int(packed.any(dim=1).nonzero()[0])])
        raise ValueError(f"block {block} is packed by other kernels; the reference cannot read or write it")


class ShiftAngles:
    """The rotary factors of shifts, computed at their first use with a layer's frequencies."""

    def __init__(self, shifts: Int32Array) -> None:
        self._shifts = shifts.astype(np.float64) if shifts.any() else None
        self._made: list[tuple[Tensor, Angles]] = []

    def of(self, spec: AttentionSpec, pool: KvPool) -> Angles | None:
        """Return the factors for a layer; None if no key is shifted.

        Raises:
            ValueError: tokens are shifted, but positions do not enter the scores relatively.
        """
        if self._shifts is None:
            return None
        frequencies = spec.inverse_frequencies
        if frequencies is None:
            if spec.alibi_slopes is None:
                raise ValueError("a shift needs rotary positions or ALiBi; this layer's attention has neither")
            return None
        for known, angles in self._made:
            if known is frequencies:
                return angles
        exact = make_angles(torch.from_numpy(self._shifts), frequencies.double().cpu())
        dtype = compute_dtype(getattr(torch, pool.format.computed))
        angles = Angles(*(x.to(pool.data.device, dtype) for x in exact))
        self._made.append((frequencies, angles))
        return angles


def turn(x: Tensor, angles: Angles | None) -> Tensor:
    """Rotate `[entries, heads, head_dim]` by each entry's angles, in their type."""
    if angles is None:
        return x
    width = angles.cos.shape[-1]
    turned = x[..., :width] * angles.cos + swap_halves(x[..., :width]) * angles.sin
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:].to(turned.dtype)), dim=-1)


def needs_distance(spec: AttentionSpec) -> bool:
    """Return whether decode attention depends on positions; if not, a row sees all tokens of its items."""
    return spec.window > 0 or spec.span > 0 or spec.alibi_slopes is not None


def adjust_scores(scores: Tensor, spec: AttentionSpec, distance: Tensor | None, position: Tensor | None) -> None:
    """Apply soft cap, bias and window to scaled scores, in place.

    Args:
        scores: `[..., kv_heads, rows, group, tokens]`.
        distance: integers `[..., rows, tokens]`; None is allowed if `needs_distance` is false.
        position: the queries' positions, integers `[..., rows, 1]`; likewise.
    """
    if spec.soft_cap:
        scores.div_(spec.soft_cap).tanh_().mul_(spec.soft_cap)
    if distance is None:
        return
    spread = distance[..., None, :, None, :]
    if spec.alibi_slopes is not None:
        slopes = spec.alibi_slopes.to(scores.device, scores.dtype).view(spec.kv_heads, 1, spec.queries_per_kv, 1)
        scores.addcmul_(slopes, spread.to(scores.dtype))
    if spec.window:
        scores.masked_fill_((spread > 0) | (spread <= -spec.window), float("-inf"))
    if spec.span and position is not None:
        hidden = (distance > 0) | (distance < -(position % spec.span))
        scores.masked_fill_(hidden[..., None, :, None, :], float("-inf"))


class SoftmaxState(NamedTuple):
    """Unnormalised attention over a part of the context."""

    acc: Tensor
    """Sum of `exp(score - peak) * value`, `[..., value_dim]`."""
    peak: Tensor
    """Largest score, `[...]`; -inf: there is no score."""
    total: Tensor
    """Sum of `exp(score - peak)`, `[...]`."""

    def output(self, sinks: Tensor | None = None) -> Tensor:
        """Return the result of attention; zeros where the state is empty.

        Args:
            sinks: As in `AttentionSpec`; the last dimension of `peak` is then the heads.
        """
        acc, total = self.acc, self.total
        if sinks is not None:
            sinks = sinks.to(total.device, total.dtype)
            highest = torch.maximum(self.peak, sinks)
            weight = (self.peak - highest).exp_()
            acc, total = acc * weight.unsqueeze(-1), total * weight + (sinks - highest).exp_()
        return acc / total.clamp_min(torch.finfo(total.dtype).tiny).unsqueeze(-1)


def attend(scores: Tensor, v: Tensor) -> SoftmaxState:
    """Weigh values `[..., n, d]` by scores `[..., m, n]`, which are overwritten.

    A key whose score is -inf is not seen, but its value must be finite; a query may see no key at all.
    """
    peak = scores.amax(dim=-1)
    weights = scores.sub_(_finite(peak).unsqueeze(-1)).exp_()
    return SoftmaxState(weights @ v, peak, weights.sum(dim=-1))


def merge(states: SoftmaxState, dim: int) -> SoftmaxState:
    """Merge the states that lie along dimension `dim` (not the last of `acc`)."""
    peak = states.peak.amax(dim=dim, keepdim=True)
    weights = (states.peak - _finite(peak)).exp_()
    return SoftmaxState(
        (states.acc * weights.unsqueeze(-1)).sum(dim=dim),
        peak.squeeze(dim),
        (states.total * weights).sum(dim=dim),
    )


def _finite(peak: Tensor) -> Tensor:
    """Replace -inf by the lowest number: `-inf - -inf` is NaN, `-inf - lowest` is -inf, whose exponential is 0."""
    return peak.clamp_min(torch.finfo(peak.dtype).min)
