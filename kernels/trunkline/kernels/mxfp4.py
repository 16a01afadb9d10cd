"""MXFP4 (OCP Microscaling Formats) as weights in groups: 4-bit floats, 32 to a power of two."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from trunkline.kernels.grouped import GroupedWeight

GROUP: Final = 32
"""Number of values that share a power of two."""
ZERO: Final = 12
DOUBLED: Final = tuple(ZERO + sign * value for sign in (1, -1) for value in (0, 1, 2, 3, 4, 6, 8, 12))
"""Twice the value of each code (one bit of sign, two of exponent, one of fraction), plus `ZERO`."""
NOT_A_NUMBER: Final = 255
"""The exponent that stands for no power of two."""


def mxfp4(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> GroupedWeight:
    """Return the weight; nothing is rounded.

    Args:
        codes: uint8 `[out, in]`, below 16.
        exponents: uint8 `[out, in / 32]`: those of the powers of two, plus 127. `NOT_A_NUMBER` makes a group NaN.
        dtype: The type of what the weight is multiplied with.
    """
    # The table has twice the values, so that they are integers: hence half the power of two, which bfloat16 holds.
    powers = [2.0 ** (exponent - 128) for exponent in range(NOT_A_NUMBER)]
    table = torch.tensor([*powers, float("nan")], dtype=torch.bfloat16, device=exponents.device)
    return GroupedWeight(codes.contiguous(), 4, GROUP, table[exponents.long()], dtype, zero=ZERO, table=DOUBLED)
