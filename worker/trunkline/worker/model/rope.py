"""Inverse frequencies of rotary positions under the scalings that change them once and for all.

Computed in float32 in the same order of operations as the models were trained with, since a position of a few
thousand magnifies a last-bit difference.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trunkline.worker.model.model_config import RopeConfig


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """Radians per position of each rotated pair, float32 `[rotary_dim / 2]`.

    Raises:
        ValueError: a scaling that `families` should have refused.
    """
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(plain, rope)
    raise ValueError(f"rope scaling {rope.kind!r} has no frequencies here")


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Slow pairs are slowed down by the factor, fast ones kept, those between blended (Llama 3.1)."""
    turns = rope.original_max_positions / (2 * math.pi / plain)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - kept) * plain / rope.factor + kept * plain
    slowed = torch.where(turns < rope.low_freq_factor, plain / rope.factor, plain)
    between = (turns >= rope.low_freq_factor) & (turns <= rope.high_freq_factor)
    return torch.where(between, blended, slowed)


def _yarn(plain: Tensor, rope: RopeConfig) -> Tensor:
    """As llama3, but blended linearly in the index of the pair (YaRN, "NTK-by-parts")."""
    rotary_dim = rope.rotary_dim

    def pair_of(turns: float) -> float:
        wavelength = rope.original_max_positions / (turns * 2 * math.pi)
        return rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without dividing by zero
    ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)
