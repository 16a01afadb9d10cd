"""Floats of 8 bits (e4m3: a sign, four bits of exponent, three of fraction) as weights in groups."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from trunkline.kernels.grouped import GroupedWeight

SCALE_MAX: Final = 2.0**100
"""Scales are not larger: kernels multiply them, and values of codes are at most 448."""
_NOT_A_NUMBER: Final = 0x7F
"""The code, without its sign, that stands for no number. There is no infinity."""


def float8(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> GroupedWeight:
    """Return the weight; nothing is rounded.

    Args:
        codes: float8_e4m3fn `[out, in]`.
        scale: float32 `[out, groups]`.
        dtype: The type of what the weight is multiplied with.

    Raises:
        ValueError: A code or a scale that is not a number, a scale beyond `SCALE_MAX`, other types or shapes.
    """
    if codes.dtype != torch.float8_e4m3fn or codes.dim() != 2 or scale.dim() != 2 or not scale.shape[1]:
        raise ValueError(f"codes are {codes.dtype} {list(codes.shape)}, scales {list(scale.shape)}")
    if not bool((scale.abs() <= SCALE_MAX).all()):
        raise ValueError("a scale is not a number, or beyond 2^100")
    stored = codes.contiguous().view(torch.uint8)
    if bool(((stored & _NOT_A_NUMBER) == _NOT_A_NUMBER).any()):
        raise ValueError("a weight is not a number")
    group = codes.shape[1] // scale.shape[1]
    return GroupedWeight(stored, 8, group, scale.contiguous(), dtype, floats=True)
