"""Rotary positions: the frequencies of a model's layers, scaled as its config.json says."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trunkline.worker.model.model_config import ModelConfig, RopeConfig


def exact_frequencies(config: ModelConfig, device: torch.device) -> dict[RopeConfig, Tensor]:
    """Return the frequencies of each distinct rope of a model, float64 `[rotary_dim / 2]`.

    Kernels keep what they derive from frequencies by their identity. Angles are in float64 until their cosines
    are taken: behind cuts positions go on counting (CachedAttention §3.4), far beyond the model's maximum, and a
    turn by a shift must take back exactly what was rotated.
    """
    distinct = dict.fromkeys(own.rope for own in config.attention if own.rope)
    return {rope: inverse_frequencies(rope).to(device).double() for rope in distinct}


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """Return the radians per position of each rotated pair, float32 `[rotary_dim / 2]`.

    Raises:
        ValueError: a scaling that `families` should have refused.
    """
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return plain
    if rope.kind == "proportional":
        plain[rope.turning_pairs :] = 0.0
        return plain / rope.factor
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(plain, rope)
    if rope.kind == "longrope":
        return plain / torch.tensor(rope.long_factors if rope.is_long else rope.short_factors)
    raise ValueError(f"rope scaling {rope.kind!r} has no frequencies here")


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Scale frequencies as Llama 3.1 does: slow pairs are slowed down by the factor, fast ones kept, those between
    blended."""
    turns = rope.original_max_positions / (2 * math.pi / plain)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - kept) * plain / rope.factor + kept * plain
    slowed = torch.where(turns < rope.low_freq_factor, plain / rope.factor, plain)
    between = (turns >= rope.low_freq_factor) & (turns <= rope.high_freq_factor)
    return torch.where(between, blended, slowed)


def _yarn(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Scale frequencies as `_llama3` does, but blend linearly in the index of the pair (YaRN, "NTK-by-parts")."""
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
