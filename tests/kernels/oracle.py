"""What attention should give, written without plans, blocks of queries or partial results; and how near is near.

An implementation may err at most twice as much as PyTorch computing densely in the same precision does, both
against float64 on the same rounded inputs; see `assert_as_exact_as`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from kernels.forests import Forest, Row
from torch import Tensor

from trunkline.kernels.ops import AttentionSpec, make_angles, swap_halves

HEADS: Final = ((4, 4), (4, 2), (3, 1), (8, 2), (8, 1))
"""Heads and KV heads: groups of 1, 2, 3, 4 and 8."""
HEAD_DIMS: Final = (64, 80, 96, 128, 256)


def make_spec(
    heads: int = 4, kv_heads: int = 2, head_dim: int = 64, *, rotary_dim: int | None = None, **options: Any
) -> AttentionSpec:
    """With rotary positions over the whole head unless `rotary_dim` says otherwise (0: none)."""
    width = head_dim if rotary_dim is None else rotary_dim
    frequencies = 1000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / max(width, 1)) if width else None
    return replace(AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5, frequencies), **options)


def alibi_slopes(heads: int) -> Tensor:
    return torch.tensor([2.0 ** (-8.0 * (head + 1) / heads) for head in range(heads)])


def random_spec(rng: np.random.Generator, head_dim: int) -> AttentionSpec:
    """Rotary (at times of a part of the head), ALiBi or neither; at times a window, at times a soft cap."""
    heads, kv_heads = HEADS[int(rng.integers(len(HEADS)))]
    kind = rng.choice(["rotary", "rotary", "partial", "alibi", "none"])
    rotary_dim = {"rotary": head_dim, "partial": head_dim // 4 * 2}.get(str(kind), 0)
    return make_spec(
        heads,
        kv_heads,
        head_dim,
        rotary_dim=rotary_dim,
        alibi_slopes=alibi_slopes(heads) if kind == "alibi" else None,
        window=int(rng.choice([0, 0, 0, 1, 9, 40, 100])),
        soft_cap=float(rng.choice([0.0, 0.0, 0.0, 2.0, 30.0])),
    )


def has_positions(spec: AttentionSpec) -> bool:
    """Whether tokens may be shifted."""
    return spec.inverse_frequencies is not None or spec.alibi_slopes is not None


def turn_by(x: Tensor, positions: Tensor, spec: AttentionSpec) -> Tensor:
    """`[tokens, heads, head_dim]` rotated by positions, in the precision of `x` (at least float32)."""
    if spec.inverse_frequencies is None:
        return x
    angles = make_angles(positions, spec.inverse_frequencies)
    cos, sin = angles.cos.to(x.dtype), angles.sin.to(x.dtype)
    width = cos.shape[-1]
    turned = x[..., :width] * cos + swap_halves(x[..., :width]) * sin
    return torch.cat((turned, x[..., width:]), dim=-1)


def keys_and_values(row: Row, data: Tensor, layer: int, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """A row's keys and values `[tokens, kv_heads, head_dim]` as stored; a latent key ends with its value."""
    stored = [
        torch.cat(
            [data[r.block, layer, part, :, r.first : r.first + r.tokens].transpose(0, 1) for r in row.ranges]
        )
        for part in range(spec.bands)
    ]
    return stored[0], stored[-1][..., -spec.value_dim :]


def _biased(scores: Tensor, key_position: Tensor, positions: Tensor, spec: AttentionSpec) -> Tensor:
    """Scores `[heads, queries, tokens]` after cap, bias and mask."""
    if spec.soft_cap:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    distance = key_position[None, :] - positions[:, None]
    if spec.alibi_slopes is not None:
        scores = scores + spec.alibi_slopes.to(scores.dtype)[:, None, None] * distance
    visible = distance <= 0
    if spec.window:
        visible &= distance > -spec.window
    if spec.span:
        visible &= key_position[None, :] // spec.span == positions[:, None] // spec.span
    return scores.masked_fill(~visible, -math.inf)


def exact_attention(
    row: Row, q: Tensor, positions: Tensor, data: Tensor, layer: int, spec: AttentionSpec
) -> Tensor:
    """float64 `[queries, heads, head_dim]`: every key turned to where it acts, one plain softmax."""
    k, v = (
        x.double().repeat_interleave(spec.queries_per_kv, dim=1) for x in keys_and_values(row, data, layer, spec)
    )
    shifts = torch.from_numpy(np.repeat([r.shift for r in row.ranges], [r.tokens for r in row.ranges]))
    if bool(shifts.any()):
        k = turn_by(k, shifts, spec)
    scores = torch.einsum("qhd,thd->hqt", q.double(), k) * spec.scale
    scores = _biased(scores, torch.from_numpy(row.key_positions()), positions, spec)
    if spec.sinks is not None:
        sinks = spec.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:2], 1)
        scores, v = torch.cat((scores, sinks), dim=-1), torch.cat((v, torch.zeros_like(v[:1])))
    weights = scores.softmax(dim=-1).nan_to_num(nan=0.0)  # a query that sees nothing gives zeros
    return torch.einsum("hqt,thd->qhd", weights, v)


def plain_attention(
    row: Row, q: Tensor, positions: Tensor, data: Tensor, layer: int, spec: AttentionSpec
) -> Tensor:
    """The same with PyTorch in the precision of `q`.

    What the matrix units see is of that precision (for half types also turned queries and softmax weights, as in
    any fused attention); sums and exponentials are in float32, the result is rounded once.
    """
    dtype, wide = q.dtype, torch.float32 if q.dtype.itemsize == 2 else q.dtype
    k, v = (
        x.to(wide).repeat_interleave(spec.queries_per_kv, dim=1) for x in keys_and_values(row, data, layer, spec)
    )
    shifts = np.repeat([r.shift for r in row.ranges], [r.tokens for r in row.ranges])
    scores = torch.empty(spec.heads, len(q), len(k), dtype=wide)
    for shift in np.unique(shifts):
        chosen = torch.from_numpy(np.flatnonzero(shifts == shift))
        turned = (
            turn_by(q.to(wide), torch.tensor([-float(shift)]), spec).to(dtype).to(wide) if shift else q.to(wide)
        )
        scores[..., chosen] = turned.transpose(0, 1) @ k[chosen].permute(1, 2, 0)
    scores = _biased(scores * spec.scale, torch.from_numpy(row.key_positions()), positions, spec)
    highest = scores.amax(dim=-1, keepdim=True)
    sinks = None if spec.sinks is None else spec.sinks.to(wide)[:, None, None]
    highest = highest if sinks is None else torch.maximum(highest, sinks)
    weights = (scores - highest).exp().nan_to_num(nan=0.0)
    total = weights.sum(dim=-1, keepdim=True)
    total = (total if sinks is None else total + (sinks - highest).exp()).clamp_min(1e-30)
    result = (weights.to(dtype).to(wide) @ v.transpose(0, 1)) / total
    return result.transpose(0, 1).to(dtype)


def attention_oracle(
    forest: Forest, counts: list[int], q: Tensor, data: Tensor, layer: int, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Exact and same-precision results of the last `counts[i]` own tokens of each row.

    Queries lie in `q` one row after the other, the results likewise: `[queries, heads, head_dim]`.
    """
    exact, plain = [], []
    for row, part, count in zip(forest.rows, torch.split(q, counts), counts, strict=True):
        positions = torch.from_numpy(row.query_positions(count))
        exact.append(exact_attention(row, part, positions, data, layer, spec))
        plain.append(plain_attention(row, part, positions, data, layer, spec))
    return torch.cat(exact), torch.cat(plain)


def assert_as_exact_as(out: Tensor, exact: Tensor, plain: Tensor, *, sum_terms: int = 1) -> None:
    """The largest and the mean square error of `out` are at most twice those of `plain`, plus a floor.

    The floor is for cases in which `plain` happens to be exact (one token, a power of two): one rounding of the
    largest result to the type of `out`, four last places of float32 for exponentials and roots, and what the order
    of a float32 sum of `sum_terms` terms may do: rounding errors that wander by the square root of their number.
    """
    assert out.shape == exact.shape
    assert not bool(out.isnan().any()), f"NaN at {out.isnan().nonzero()[:3].tolist()}"
    if not out.numel():
        return
    largest = float(exact.abs().max())
    wide_eps = torch.finfo(torch.float64 if out.dtype == torch.float64 else torch.float32).eps
    floor = largest * (torch.finfo(out.dtype).eps / 2 + wide_eps * (4 + math.sqrt(sum_terms) / 2))
    error, allowed = (out.double() - exact).abs(), (plain.double() - exact).abs()
    worst = int(error.argmax())
    assert float(error.max()) <= 2 * float(allowed.max()) + floor, (
        f"off by {float(error.max()):.3g} at {np.unravel_index(worst, tuple(out.shape))}, "
        f"PyTorch by {float(allowed.max()):.3g}, floor {floor:.3g}"
    )
    mean, mean_allowed = float(error.square().mean().sqrt()), float(allowed.square().mean().sqrt())
    assert mean <= 2 * mean_allowed + floor / 2, f"off by {mean:.3g} on average, PyTorch by {mean_allowed:.3g}"
