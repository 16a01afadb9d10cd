"""Partial results of attention and their merge: the (O, m, n) of ChunkAttention §3.2.

Natural exponentials throughout. An empty state (nothing was attended to) is `(0, -inf, 0)` and is neutral:
merging it changes nothing, and merging only empty states gives an empty one, without NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SoftmaxState(NamedTuple):
    """Unnormalised attention over a part of the context."""

    acc: Tensor
    """`[..., head_dim]`: sum of `exp(score - peak) * value`."""
    peak: Tensor
    """`[...]`: largest score, -inf if there is none."""
    total: Tensor
    """`[...]`: sum of `exp(score - peak)`."""

    def output(self) -> Tensor:
        """Return the result of attention; zeros where the state is empty."""
        return self.acc / self.total.clamp_min(torch.finfo(self.total.dtype).tiny).unsqueeze(-1)


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
