"""Random weights in groups, of every kind that files have."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from trunkline.kernels.float8 import float8
from trunkline.kernels.grouped import GroupedWeight

FP4: Final = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)
"""Twelve more than twice the values of 4-bit floats."""
INTEGERS: Final = ("Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "4 bits, 128", "8 bits, rows", "8 bits, 16", "table")
"""The forms that files are read into, by their names or what they are."""
KINDS: Final = (*INTEGERS, "float8", "float8, rows")


def random_weight(
    kind: str, rows: int, width: int, dtype: torch.dtype = torch.float32, *, int8_inputs: bool = False
) -> GroupedWeight:
    """Return a weight whose numbers are of the size of a layer's; `width` is a multiple of 128, of 256 if the kind
    has scales for so many. Floats are never multiplied with int8 inputs."""
    weight = _random_weight(kind, rows, width, dtype)
    return replace(weight, int8_inputs=int8_inputs and not weight.floats)


def _random_weight(kind: str, rows: int, width: int, dtype: torch.dtype) -> GroupedWeight:
    generator = torch.Generator().manual_seed(rows * 1000 + width)

    def scales(group: int, like: torch.dtype) -> Tensor:
        drawn: Tensor = ((0.5 + torch.rand(rows, width // group, generator=generator)) * width**-0.5).to(like)
        return drawn

    def integers(low: int, high: int, count: int) -> Tensor:
        return torch.randint(low, high, (rows, count), generator=generator)

    codes4, codes8 = integers(0, 16, width).to(torch.uint8), integers(0, 256, width).to(torch.uint8)
    if kind == "Q8_0":
        return GroupedWeight(codes8, 8, 32, scales(32, torch.float16) / 64, dtype, zero=128)
    if kind == "Q4_0":
        return GroupedWeight(codes4, 4, 32, scales(32, torch.float16) / 4, dtype, zero=8)
    if kind in ("Q4_K", "Q5_K"):
        bits, codes = (4, codes4) if kind == "Q4_K" else (6, codes8 & 31)
        sub = [integers(0, 64, width // 32).to(torch.int8) for _ in range(2)]
        scale, offset = (scales(256, torch.float16) / size for size in (128, 16))
        return GroupedWeight(codes, bits, 32, scale, dtype, sub_scale=sub[0], offset=offset, sub_offset=sub[1])
    if kind == "Q6_K":
        sub_scale = integers(-128, 128, width // 16).to(torch.int8)
        scale = scales(256, torch.float16) / 1024
        return GroupedWeight(codes8 & 63, 6, 16, scale, dtype, sub_scale=sub_scale, zero=32)
    if kind == "4 bits, 128":
        scale = scales(128, torch.float32) / 4
        return GroupedWeight(codes4, 4, 128, scale, dtype, offset=scale * integers(0, 16, width // 128))
    if kind == "8 bits, rows":
        return GroupedWeight(codes8, 8, width, scales(width, torch.float32) / 64, dtype, zero=128)
    if kind == "8 bits, 16":
        offset = scales(16, torch.bfloat16)
        return GroupedWeight(codes8 & 127, 8, 16, scales(16, torch.bfloat16) / 64, dtype, offset=offset, zero=100)
    if kind.startswith("float8"):
        group = width if kind.endswith("rows") else 128
        codes = (torch.randn(rows, width, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        return float8(codes, scales(group, torch.float32) / 100, dtype)
    assert kind == "table"
    powers = 2.0 ** integers(-6, 1, width // 32).to(torch.float32) * width**-0.5
    return GroupedWeight(codes4, 4, 32, powers, dtype, zero=12, table=FP4)
