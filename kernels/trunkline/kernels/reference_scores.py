"""How an `AttentionSpec` changes queries, keys and scores, for both decode and prefill attention.

A score is `cap(q · k * scale) + slope * distance`, distance being the key's acting position minus the query's;
it counts only where the distance is in `(-window, 0]`. Layers may differ in all of this but share a plan, so
what a plan's state caches here is per frequency tensor, and distances know nothing of a spec.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trunkline.kernels.ops import Angles, AttentionSpec, KvPool, make_angles, swap_halves
from trunkline.kvstore.chunks import Int32Array


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
        angles = Angles(*(x.to(pool.data.device, compute_dtype(pool.data.dtype)) for x in exact))
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
    return spec.window > 0 or spec.alibi_slopes is not None


def adjust_scores(scores: Tensor, spec: AttentionSpec, distance: Tensor | None) -> None:
    """Apply soft cap, bias and window to scaled scores, in place.

    Args:
        scores: `[..., kv_heads, rows, group, tokens]`.
        distance: integers `[..., rows, tokens]`; None is enough without `needs_distance`.
    """
    if spec.soft_cap:
        scores.div_(spec.soft_cap).tanh_().mul_(spec.soft_cap)
    if distance is None:
        return
    spread = distance[..., None, :, None, :]
    if spec.alibi_slopes is not None:
        slopes = spec.alibi_slopes.to(scores.device, scores.dtype).view(spec.kv_heads, 1, spec.group, 1)
        scores.addcmul_(slopes, spread.to(scores.dtype))
    if spec.window:
        scores.masked_fill_((spread > 0) | (spread <= -spec.window), float("-inf"))
