"""Keys and values as int8 with a scale: how a vector becomes a row of a chunk, and back, in PyTorch.

Each key and each value of a head has one float32 scale, its largest magnitude over 127, and integers in
`[-127, 127]`, rounded to nearest, ties to even:

      row     int8 × head_dim │ float32          vector ≈ integers * scale

Keys are rounded behind norm and rotation. A shift turns the query (`trunkline.kernels.plan`), so a row is never
rounded a second time, wherever it goes. Everything that reads a token, its own step included, reads the row.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from trunkline.kernels.ops import KvPool
from trunkline.kernels.quantisation import LARGEST

SCALE_BYTES: Final = 4


def to_rows(x: Tensor) -> Tensor:
    """Round vectors `[..., head_dim]` of any floating type; return int8 `[..., head_dim + SCALE_BYTES]`.

    A vector with NaN or infinity gets zeros and the scale NaN.
    """
    wide = x.float()
    largest = wide.abs().amax(dim=-1, keepdim=True)
    scale = (largest / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    values = (wide / scale).nan_to_num(0.0).round().to(torch.int8)
    return torch.cat((values, scale.contiguous().view(torch.int8)), dim=-1)


def from_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the vectors `[..., head_dim]` that rows stand for."""
    width = rows.shape[-1] - SCALE_BYTES
    scale = rows[..., width:].contiguous().view(torch.float32)
    return (rows[..., :width] * scale.to(torch.promote_types(dtype, torch.float32))).to(dtype)


def vectors_of(pool: KvPool, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the keys or values of a pool's rows `[..., row]`, in the type to compute in."""
    return from_rows(rows, dtype) if pool.format.is_quantised else rows.to(dtype)
