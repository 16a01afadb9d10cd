"""Matrices in the blocks of GGUF files: what the worker reads, written by plain rounding.

Scales are those of each group's largest magnitude. llama.cpp's own quantiser searches for better ones, so files
for use should come from it; these serve tests and measurements, which need blocks without other programs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

SUPER: Final = 256
"""Values of a block of two levels."""


def quantised(kind: str, matrix: Tensor) -> Tensor:
    """Return a matrix's blocks, uint8 `[rows, bytes]`.

    Args:
        kind: One of `KINDS`.
        matrix: `[rows, columns]`, the columns a multiple of the block's values.
    """
    values, write = KINDS[kind]
    blocks = matrix.float().reshape(len(matrix), -1, values)
    return write(blocks).flatten(1)


def _q8_0(blocks: Tensor) -> Tensor:
    scale = _half(blocks.abs().amax(dim=-1, keepdim=True) / 127)
    codes = _rounded(blocks, scale, -127, 127).to(torch.int8)
    return torch.cat((_bytes(scale), codes.view(torch.uint8)), dim=-1)


def _q4_0(blocks: Tensor) -> Tensor:
    largest = blocks.gather(-1, blocks.abs().argmax(dim=-1, keepdim=True))
    scale = _half(largest / -8)
    codes = (_rounded(blocks, scale, -8, 7) + 8).to(torch.uint8)
    return torch.cat((_bytes(scale), _nibbles(codes)), dim=-1)


def _q4_k(blocks: Tensor) -> Tensor:
    groups = _split(blocks, 8, 32)
    least = (-groups.amin(dim=-1)).clamp_min(0)
    spread = (groups.amax(dim=-1) + least).clamp_min(0) / 15
    scale, offset = (_half(part.amax(dim=-1, keepdim=True) / 63) for part in (spread, least))
    scales, offsets = (_rounded(part, unit, 0, 63) for part, unit in ((spread, scale), (least, offset)))
    step, low = (scale * scales)[..., None], (offset * offsets)[..., None]
    codes = _rounded(groups + low, step, 0, 15).to(torch.uint8)
    packed = _nibbles(_split(codes.flatten(-2), 4, 64))
    return torch.cat((_bytes(scale), _bytes(offset), _six_bits(scales, offsets), packed.flatten(-2)), dim=-1)


def _q6_k(blocks: Tensor) -> Tensor:
    groups = _split(blocks, 16, 16)
    largest = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True))[..., 0] / -32
    scale = _half(largest.abs().amax(dim=-1, keepdim=True) / 127)
    scales = _rounded(largest, scale, -127, 127)
    codes = (_rounded(groups, (scale * scales)[..., None], -32, 31) + 32).to(torch.uint8)
    quarters = _split(codes.flatten(-2), 2, 4, 32)  # of a half of 128 values
    low, high = quarters & 15, quarters >> 4
    lows = torch.cat((low[..., 0, :] | low[..., 2, :] << 4, low[..., 1, :] | low[..., 3, :] << 4), dim=-1)
    highs = high[..., 0, :] | high[..., 1, :] << 2 | high[..., 2, :] << 4 | high[..., 3, :] << 6
    parts = (lows.flatten(-2), highs.flatten(-2), scales.to(torch.int8).view(torch.uint8), _bytes(scale))
    return torch.cat(parts, dim=-1)


def _split(values: Tensor, *sizes: int) -> Tensor:
    return values.reshape(*values.shape[:-1], *sizes)


def _half(scale: Tensor) -> Tensor:
    """Return scales as float16 can hold them, in float32."""
    return scale.half().float()


def _bytes(scale: Tensor) -> Tensor:
    return scale.half().contiguous().view(torch.uint8)


def _rounded(values: Tensor, step: Tensor, least: int, most: int) -> Tensor:
    """Return values in steps; those of a step of 0 are 0."""
    return torch.where(step == 0, 0.0, values / step).round().clamp(least, most)


def _nibbles(codes: Tensor) -> Tensor:
    """Return codes in half as many bytes: the first half of them low, the second high."""
    low, high = codes.chunk(2, dim=-1)
    return low | high << 4


def _six_bits(scales: Tensor, offsets: Tensor) -> Tensor:
    """Return 8 scales and 8 offsets of 6 bits in 12 bytes."""
    (first, last), (low, high) = (part.to(torch.uint8).chunk(2, dim=-1) for part in (scales, offsets))
    return torch.cat((first | last >> 4 << 6, low | high >> 4 << 6, last & 15 | (high & 15) << 4), dim=-1)


def _mxfp4(blocks: Tensor) -> Tensor:
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    # A power of two by which the largest magnitude becomes at most 6, the largest value of a code.
    exponent = torch.where(largest == 0, -127.0, torch.ceil(torch.log2(largest / 6))).clamp(-127, 127)
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    scaled = blocks * 2.0**-exponent
    codes = (scaled.abs()[..., None] - values).abs().argmin(dim=-1) | torch.where(scaled < 0, 8, 0)
    return torch.cat(((exponent + 127).to(torch.uint8), _nibbles(codes.to(torch.uint8))), dim=-1)


KINDS: Final[dict[str, tuple[int, Callable[[Tensor], Tensor]]]] = {
    "Q8_0": (32, _q8_0),
    "Q4_0": (32, _q4_0),
    "MXFP4": (32, _mxfp4),
    "Q4_K": (SUPER, _q4_k),
    "Q6_K": (SUPER, _q6_k),
}
"""Values of a block, and how blocks `[rows, blocks, values]` become bytes, by the kind's name."""
