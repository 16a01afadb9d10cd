"""Keys and values in 8 bits with a scale: how a vector becomes a row of a chunk, and back, in PyTorch.

Each key and each value of a head has one float32 scale, its largest magnitude over the largest of the type, and
numbers of 8 bits, rounded to nearest, ties to even:

      row     8 bits × head_dim │ float32          vector ≈ numbers * scale

      int8    integers in [-127, 127]              steps are equal: those of the largest number of the vector
      fp8     floats (e4m3) up to 448              steps are at most an eighth of the number; from 2^-6 down 2^-9

A tensor of rows is int8, or uint8 if they are fp8. Keys are rounded behind norm and rotation. A shift turns the
query (`trunkline.kernels.plan`), so a row is never rounded again, wherever it goes. Everything that reads a
token, its own step included, reads the row.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from trunkline.kernels.ops import KvPool
from trunkline.kernels.quantisation import LARGEST

SCALE_BYTES: Final = 4
_LARGEST: Final = {"int8": LARGEST, "fp8": 448}
"""The largest magnitude that a type of 8 bits is used with."""


def to_rows(x: Tensor, kv_dtype: str) -> Tensor:
    """Round vectors `[..., head_dim]` of any floating type; return bytes `[..., head_dim + SCALE_BYTES]`: int8, or
    uint8 if they are fp8.

    A vector with NaN or infinity gets zeros and the scale NaN.

    Args:
        kv_dtype: "int8" or "fp8".
    """
    wide = x.float()
    largest = wide.abs().amax(dim=-1, keepdim=True)
    scale = (largest / _LARGEST[kv_dtype]).clamp_min(torch.finfo(torch.float32).tiny)
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    numbers = (wide / scale).nan_to_num(0.0)
    if kv_dtype == "int8":
        return torch.cat((numbers.round().to(torch.int8), scale.contiguous().view(torch.int8)), dim=-1)
    floats = numbers.to(torch.float8_e4m3fn)
    return torch.cat((floats.view(torch.uint8), scale.contiguous().view(torch.uint8)), dim=-1)


def from_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the vectors `[..., head_dim]` that rows stand for."""
    width = rows.shape[-1] - SCALE_BYTES
    scale = rows[..., width:].contiguous().view(torch.float32)
    wide = torch.promote_types(dtype, torch.float32)
    numbers = rows[..., :width]
    if rows.dtype == torch.uint8:
        numbers = numbers.view(torch.float8_e4m3fn)
    return (numbers.to(wide) * scale.to(wide)).to(dtype)


def vectors_of(pool: KvPool, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the keys or values of a pool's rows `[..., row]`, in the type to compute in."""
    return from_rows(rows, dtype) if pool.format.is_quantised else rows.to(dtype)
