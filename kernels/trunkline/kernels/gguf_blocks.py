"""The blocks of GGUF files as `grouped.GroupedWeight`: where each kind keeps its codes and scales.

A row of a tensor is a sequence of blocks; a block holds some weights in the row's order. Numbers are
little-endian.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from trunkline.kernels.grouped import GroupedWeight
from trunkline.kernels.mxfp4 import mxfp4


class BlockKind(NamedTuple):
    """A kind of block."""

    values: int
    """Number of weights in a block."""
    bytes: int
    """Number of bytes of a block."""
    read: Callable[[Tensor, torch.dtype], GroupedWeight]
    """Function of uint8 `[out, blocks, bytes]` and the weight's type."""


def from_blocks(kind: str, raw: Tensor, dtype: torch.dtype) -> GroupedWeight:
    """Return the weight whose rows' blocks are the rows of `raw`, uint8 `[out, bytes]`; nothing is rounded.

    Raises:
        ValueError: There is no such kind here, or the rows are no whole blocks.
    """
    found = BLOCKS.get(kind)
    if found is None:
        raise ValueError(f"blocks of kind {kind}; there are {', '.join(BLOCKS)}")
    if raw.dtype != torch.uint8 or raw.dim() != 2 or raw.shape[1] == 0 or raw.shape[1] % found.bytes:
        raise ValueError(f"rows of {kind} are whole blocks of {found.bytes} bytes; this is {list(raw.shape)}")
    return found.read(raw.reshape(len(raw), -1, found.bytes), dtype)


def _float16(block: Tensor, first: int) -> Tensor:
    """Return the number at byte `first` of each block, `[out, blocks]`."""
    return block[..., first : first + 2].contiguous().view(torch.float16)[..., 0]


def _nibbles(packed: Tensor) -> Tensor:
    """Return the low halves of bytes `[..., n]`, behind them the high ones: `[..., 2 n]`."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _q8_0(block: Tensor, dtype: torch.dtype) -> GroupedWeight:
    codes = (block[..., 2:] ^ 128).flatten(1)  # of int8, 128 added
    return GroupedWeight(codes, 8, 32, _float16(block, 0), dtype, zero=128)


def _q4_0(block: Tensor, dtype: torch.dtype) -> GroupedWeight:
    return GroupedWeight(_nibbles(block[..., 2:]).flatten(1), 4, 32, _float16(block, 0), dtype, zero=8)


def _q4_1(block: Tensor, dtype: torch.dtype) -> GroupedWeight:
    codes = _nibbles(block[..., 4:]).flatten(1)
    return GroupedWeight(codes, 4, 32, _float16(block, 0), dtype, offset=-_float16(block, 2))


def _five_bits(high: Tensor, low: Tensor) -> Tensor:
    """Return the 32 codes of 4 bytes with a high bit of each, and 16 with the low halves."""
    shifts = torch.arange(8, dtype=torch.uint8, device=high.device)
    bits = ((high[..., None] >> shifts) & 1).flatten(-2)
    return (_nibbles(low) | (bits << 4)).flatten(1)


def _q5_0(block: Tensor, dtype: torch.dtype) -> GroupedWeight:
    codes = _five_bits(block[..., 2:6], block[..., 6:])
    return GroupedWeight(codes, 6, 32, _float16(block, 0), dtype, zero=16)


def _q5_1(block: Tensor, dtype: torch.dtype) -> GroupedWeight:
    codes = _five_bits(block[..., 4:8], block[..., 8:])
    return GroupedWeight(codes, 6, 32, _float16(block, 0), dtype, offset=-_float16(block, 2))


def _mxfp4(block: Tensor, dtype: torch.dtype) -> GroupedWeight:
    return mxfp4(_nibbles(block[..., 1:]).flatten(1), block[..., 0], dtype)


def _six_bits(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 8 scales and the 8 offsets of 12 bytes, int8 `[out, blocks * 8]`: the first four of each in the
    low bits of four bytes; of the others four bits in the last four bytes, two above those of the first."""
    first, second, third = scales[..., :4], scales[..., 4:8], scales[..., 8:]
    scale = torch.cat((first & 63, (third & 15) | (first >> 6 << 4)), dim=-1)
    offset = torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), dim=-1)
    return scale.to(torch.int8).flatten(1), offset.to(torch.int8).flatten(1)


def _k_quants(block: Tensor, codes: Tensor, bits: int, dtype: torch.dtype) -> GroupedWeight:
    scale, offset = _six_bits(block[..., 4:16])
    return GroupedWeight(
        codes, bits, 32, _float16(block, 0), dtype, sub_scale=scale, offset=_float16(block, 2), sub_offset=offset
    )


def _q4_k(block: Tensor, dtype: torch.dtype) -> GroupedWeight:
    codes = _nibbles(block[..., 16:].reshape(*block.shape[:2], 4, 32))  # 32 bytes are two groups
    return _k_quants(block, codes.flatten(1), 4, dtype)


def _q5_k(block: Tensor, dtype: torch.dtype) -> GroupedWeight:
    low = _nibbles(block[..., 48:].reshape(*block.shape[:2], 4, 32)).reshape(*block.shape[:2], 8, 32)
    shifts = torch.arange(8, dtype=torch.uint8, device=block.device)[:, None]
    high = (block[..., None, 16:48] >> shifts) & 1  # bit i of 32 bytes is that of group i
    return _k_quants(block, (low | (high << 4)).flatten(1), 6, dtype)


def _q6_k(block: Tensor, dtype: torch.dtype) -> GroupedWeight:
    low = block[..., :128].reshape(
        *block.shape[:2], 2, 64
    )  # a half of 128 weights: the low bits of 64, then of the others
    high = block[..., 128:192].reshape(*block.shape[:2], 2, 32)
    low = _nibbles(low)
    high = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-1)
    scale = block[..., 192:208].contiguous().view(torch.int8).flatten(1)
    codes = (low | (high << 4)).flatten(1)
    return GroupedWeight(codes, 6, 16, _float16(block, 208), dtype, sub_scale=scale, zero=32)


BLOCKS: Final = {
    "Q8_0": BlockKind(32, 34, _q8_0),
    "Q4_0": BlockKind(32, 18, _q4_0),
    "Q4_1": BlockKind(32, 20, _q4_1),
    "Q5_0": BlockKind(32, 22, _q5_0),
    "Q5_1": BlockKind(32, 24, _q5_1),
    "MXFP4": BlockKind(32, 17, _mxfp4),
    "Q4_K": BlockKind(256, 144, _q4_k),
    "Q5_K": BlockKind(256, 176, _q5_k),
    "Q6_K": BlockKind(256, 210, _q6_k),
}
"""The kinds of blocks that are read, by the names that GGUF files' tools use."""
