"""Keys and values in 8 bits with a scale: how a vector becomes a row of a chunk, and back, in PyTorch.

Each key and each value of a head has one float32 scale, its largest magnitude over the largest of the type, and
numbers of 8 bits, rounded to nearest, ties to even:

      row     8 bits × head_dim │ float32          vector ≈ numbers * scale

      int8    integers in [-127, 127]              steps are equal: those of the largest number of the vector
      fp8     floats (e4m3) up to 448              steps are at most an eighth of the number; from 2^-6 down 2^-9

A latent (`trunkline.kernels.latent`) is rounded in two parts with a scale each, int8 only. Heads' keys and values
are made of the latent itself, which has a norm behind it: 8 bits. The rotary part is a key without a norm, in
which a few numbers may be far larger than the others: 16 bits, as bytes with a sign, `256 high + low` in
`[-32512, 32512]`:

      row     int8 × rotary, high │ int8 × rotary, low │ int8 × latent │ float32, of the rotary part │ float32

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
ROTARY_LARGEST: Final = 127 * 256
_LARGEST: Final = {"int8": LARGEST, "fp8": 448}
"""The largest magnitude that a type of 8 bits is used with."""


def to_rows(x: Tensor, kv_dtype: str, latent: int = 0) -> Tensor:
    """Round vectors `[..., head_dim]` of any floating type; return bytes `[..., head_dim + SCALE_BYTES]`: int8, or
    uint8 if they are fp8.

    A vector (or a part with a scale of its own) with NaN or infinity gets zeros and the scale NaN.

    Args:
        kv_dtype: "int8" or "fp8".
        latent: So many numbers at the end are a latent, those before them its rotary part; 0: it is none.
            Rows, int8 only, are then `[..., 2 * rotary + latent + 2 * SCALE_BYTES]`.
    """
    wide = x.float()
    numbers, scale = _scaled(wide[..., -latent:], _LARGEST[kv_dtype])
    if kv_dtype == "fp8":
        return torch.cat((numbers.to(torch.float8_e4m3fn).view(torch.uint8), scale.view(torch.uint8)), dim=-1)
    parts = [numbers.round().to(torch.int8), scale.view(torch.int8)]
    if latent:
        rotary, rotary_scale = _scaled(wide[..., :-latent], ROTARY_LARGEST)
        rotary = rotary.round()
        high = (rotary + 128).div(256).floor()
        both = (high.to(torch.int8), (rotary - 256 * high).to(torch.int8))
        parts = [*both, parts[0], rotary_scale.view(torch.int8), parts[1]]
    return torch.cat(parts, dim=-1)


def _scaled(wide: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return numbers of magnitudes up to `most`, and their scale `[..., 1]`."""
    largest = wide.abs().amax(dim=-1, keepdim=True)
    scale = (largest / most).clamp_min(torch.finfo(torch.float32).tiny)
    scale = torch.where(largest.isfinite(), scale, torch.nan).contiguous()
    return (wide / scale).nan_to_num(0.0), scale


def from_rows(rows: Tensor, dtype: torch.dtype, latent: int = 0) -> Tensor:
    """Return the vectors `[..., head_dim]` that rows stand for (`latent`: as in `to_rows`)."""
    wide = torch.promote_types(dtype, torch.float32)
    width = rows.shape[-1] - SCALE_BYTES * (2 if latent else 1)
    scales = rows[..., width:].contiguous().view(torch.float32).to(wide)
    numbers = rows[..., :width]
    if rows.dtype == torch.uint8:
        numbers = numbers.view(torch.float8_e4m3fn)
    if not latent:
        return (numbers.to(wide) * scales).to(dtype)
    high, low, own = numbers.to(wide).tensor_split(((width - latent) // 2, width - latent), dim=-1)
    return torch.cat(((256 * high + low) * scales[..., :1], own * scales[..., 1:]), dim=-1).to(dtype)


def vectors_of(pool: KvPool, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the keys or values of a pool's rows `[..., row]`, in the type to compute in."""
    form = pool.format
    return from_rows(rows, dtype, form.latent) if form.is_quantised else rows.to(dtype)
