"""Floats of 8 bits as weights in groups: every number exactly, and everything that is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernels.grouped_cases import random_weight
from kernels.implementations import CPU, DTYPES, make_kernels
from kernels.pairwise import pairwise

from trunkline.kernels.float8 import float8
from trunkline.kernels.grouped import GroupedWeight, stack

NUMBERS = [code for code in range(256) if code & 127 != 127]


def value(code: int) -> float:
    """A code's number as the format's description has it."""
    exponent, fraction = code >> 3 & 15, code & 7
    magnitude = (8 + fraction) * 2.0 ** (exponent - 10) if exponent else fraction * 2.0**-9
    return -magnitude if code & 128 else magnitude


@pairwise(implementation=CPU, dtype=DTYPES, tokens=(1, 2, 3, 5, 16), sizes=((16, 16), (144, 48), (256, 128)))
def test_every_number_is_exact(
    implementation: str, dtype: torch.dtype, tokens: int, sizes: tuple[int, int]
) -> None:
    """At every place of a group; a scale is rounded once, with the finished sum."""
    width, group = sizes
    codes = torch.tensor([[NUMBERS[(row + 17 * column) % 254] for column in range(width)] for row in range(254)])
    expected = torch.tensor([[value(code) for code in row] for row in codes.tolist()])
    stored = codes.to(torch.uint8).view(torch.float8_e4m3fn)
    kernels, x = make_kernels(implementation), torch.eye(width).to(dtype)
    for scale in (torch.ones(254, width // group), torch.rand(254, width // group) * 1e-3):
        weight = float8(stored, scale, dtype)
        scaled = expected * scale.repeat_interleave(group, dim=1)
        assert torch.equal(weight.dequantise(), scaled)
        layer = kernels.pack_linear(weight, None)
        for first in range(0, width, tokens):
            out = kernels.linear(x[first : first + tokens], layer, torch.float32)
            assert torch.equal(out, scaled.T[first : first + tokens])


def test_what_is_no_number_is_refused() -> None:
    codes, scale = torch.ones(4, 64).to(torch.float8_e4m3fn), torch.ones(4, 2)
    assert float8(codes, scale, torch.float32).group == 32
    for code in (0x7F, 0xFF):
        broken = codes.view(torch.uint8).clone()
        broken[3, 63] = code
        with pytest.raises(ValueError, match="a weight is not a number"):
            float8(broken.view(torch.float8_e4m3fn), scale, torch.float32)
    for wrong in (float("nan"), float("inf"), -float("inf"), 2.0**101):
        with pytest.raises(ValueError, match=r"a scale is not a number, or beyond 2\^100"):
            float8(codes, torch.tensor([[1.0, wrong]] * 4), torch.float32)
    for broken in (codes.to(torch.float8_e5m2), codes.view(torch.uint8), codes[0]):
        with pytest.raises(ValueError, match="codes are"):
            float8(broken, scale, torch.float32)
    with pytest.raises(ValueError, match="whole groups"):
        float8(codes, torch.ones(4, 5), torch.float32)


def test_parts_that_do_not_go_with_floats_are_refused() -> None:
    good = random_weight("float8", 4, 256)
    broken: list[dict[str, object]] = [
        {"int8_inputs": True},
        {"zero": 128},
        {"bits": 4},
        {"offset": good.scale},
        {"scale": good.scale.half()},
        {"sub_scale": torch.ones(4, 2, dtype=torch.int8)},
    ]
    for change in broken:
        with pytest.raises(ValueError, match="floats have 8 bits"):
            replace(good, **change)  # type: ignore[arg-type]
    integers = random_weight("8 bits, rows", 4, 256)
    with pytest.raises(ValueError, match="floats cannot be stacked with others"):
        stack([integers, good])


def test_floats_are_stacked_as_they_are() -> None:
    weights = [random_weight("float8", rows, 256) for rows in (4, 7)]
    joined = stack(weights)
    assert joined.floats
    assert torch.equal(joined.dequantise(), torch.cat([weight.dequantise() for weight in weights]))
    assert isinstance(joined, GroupedWeight)
