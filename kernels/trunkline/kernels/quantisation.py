"""Weight-only quantisation to int8: the scheme that all kernels share, and its plain form in PyTorch.

Each output (row of the weight) has one float32 scale, its largest magnitude over 127, and integers in
`[-127, 127]`, rounded to nearest; activations stay as they are:

      y = (x · qᵀ) * scale + bias          sums in at least float32, the product over the integers themselves

Every floating type holds these integers exactly, so precision is lost only once, when the weight is packed: at
most half a scale per element. The scheme is symmetric, because a zero point would cost a sum over the inputs per
token. It has a scale per output, because scales per group of inputs would have to be applied inside the sum.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trunkline.kernels.grouped import GroupedWeight, linear_grouped

LARGEST: Final = 127
"""Largest magnitude of a quantised weight: -128 is not used, so that the scheme is symmetric."""
ROWS: Final = 4096
"""Number of rows of a weight that are converted at a time: a copy of a whole weight in float32 would be larger
than the weight."""


class QuantisedWeight(NamedTuple):
    """A weight as integers and scales, `weight ≈ values * scale[:, None]`."""

    values: Tensor
    """The integers, int8 `[out, in]`."""
    scale: Tensor
    """The scale of each output, float32 `[out]`, positive."""

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scale.nbytes


def quantise(weight: Tensor) -> QuantisedWeight:
    """Quantise a floating-point weight `[out, in]`, on its device.

    Raises:
        ValueError: The weight is no matrix of a floating-point type, or holds NaN or infinity.
    """
    if weight.dim() != 2 or not weight.is_floating_point():
        kind = str(weight.dtype).removeprefix("torch.")
        raise ValueError(f"weight is {kind} {list(weight.shape)}; int8 quantisation takes a floating-point matrix")
    weight = weight.detach()
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    for start in range(0, weight.shape[0], ROWS):
        rows = slice(start, start + ROWS)
        part = weight[rows].float()
        largest = part.abs().amax(dim=1) if part.shape[1] else part.new_zeros(len(part))
        if not bool(largest.isfinite().all()):
            raise ValueError("weight contains NaN or values beyond float32; int8 quantisation cannot hold them")
        # Rows of zeros, and of values that vanish beside the smallest normal number, need a scale as well.
        scale[rows] = (largest / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
        values[rows] = (part / scale[rows, None]).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)
    return QuantisedWeight(values, scale)


def linear_int8(x: Tensor, weight: QuantisedWeight, bias: Tensor | None) -> Tensor:
    """Return `(x · valuesᵀ) * scale + bias` of `x` `[tokens, in]`, in float64 if `x` is, else in float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    out = torch.empty(x.shape[0], weight.values.shape[0], dtype=wide, device=x.device)
    # cuBLAS multiplies half types with float32 sums and results; elsewhere such a product would be rounded.
    factor = x.dtype if x.is_cuda else wide
    x = x.to(factor)
    for start in range(0, out.shape[1], ROWS):
        rows = slice(start, start + ROWS)
        values = weight.values[rows].to(factor)
        out[:, rows] = F.linear(x, values) if factor == wide else torch.mm(x, values.t(), out_dtype=wide)
    out *= weight.scale
    return out if bias is None else out.add_(bias)


def stored_weight(weight: Tensor | GroupedWeight, quantisation: str) -> Tensor | QuantisedWeight | GroupedWeight:
    """Return a weight as plain layers and those of GPUs keep it.

    Raises:
        ValueError: The weight cannot be quantised, or is already.
    """
    if not quantisation:
        return weight
    if isinstance(weight, GroupedWeight):
        raise ValueError(f"the weight has {weight.bits} bits already; it is not quantised once more")
    return quantise(weight)


def linear_quantised(x: Tensor, weight: QuantisedWeight | GroupedWeight, bias: Tensor | None) -> Tensor:
    """Return the layer of `x` `[tokens, in]`, in float64 if `x` is, else in float32."""
    if isinstance(weight, GroupedWeight):
        return linear_grouped(x, weight, bias)
    return linear_int8(x, weight, bias)


def stored_bytes(weight: Tensor | QuantisedWeight | GroupedWeight, bias: Tensor | None) -> int:
    """Return how many bytes this weight and bias take in memory, as they are stored."""
    return weight.nbytes + (0 if bias is None else bias.nbytes)
