"""Linear layers and norms by their definition: operands, exact results, and those of the same precision."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from kernels.oracle import assert_as_exact_as
from torch import Tensor

from trunkline.kernels.ops import Activation, Kernels, Quantisation
from trunkline.kernels.quantisation import quantise

ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh")
FORMS: tuple[Quantisation, ...] = ("", "int8")


def operands(
    tokens: int, out_features: int, in_features: int, dtype: torch.dtype, biased: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return `x`, weight and bias. `x` lies between rows of NaN, so that reading past a row or the batch shows."""
    generator = torch.Generator().manual_seed(tokens * 1000 + out_features)
    around = torch.full((tokens + 4, in_features), float("nan"))
    around[2:-2] = torch.randn(tokens, in_features, generator=generator)
    # Products of ordinary size: an activation is far from linear only near zero.
    weight = torch.randn(out_features, in_features, generator=generator) * in_features**-0.5
    bias = torch.randn(out_features, generator=generator).to(dtype) if biased else None
    return around.to(dtype)[2:-2], weight.to(dtype), bias


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, quantisation: Quantisation = ""
) -> Tensor:
    """Compute the linear layer in `dtype`; with int8 weights by the integers and scales that are stored."""
    if quantisation:
        stored = quantise(weight)
        y = F.linear(x.to(dtype), stored.values.to(dtype)) * stored.scale.to(dtype)
        return y if bias is None else y + bias.to(dtype)
    return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def activated(gate_up: Tensor, activation: Activation) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return gate * torch.sigmoid(gate) * up
    if activation == "gelu":
        return gate * 0.5 * (1.0 + torch.erf(gate / 2**0.5)) * up
    if activation == "clamped_silu":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1.0)
    return gate * 0.5 * (1.0 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up


def normed(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the exact RMS norm, and one with statistics in float32 and each step rounded."""
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    wide = x.float()
    rounded = (wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).to(x.dtype)
    return exact, rounded * weight


def check_norms(kernels: Kernels, width: int, dtype: torch.dtype, size: float) -> None:
    """Compare both norms over batches of some shapes, with elements of about `size`."""
    generator = torch.Generator().manual_seed(width)
    for shape in ((1, width), (3, 4, width), (90, width)):
        x, delta = ((size * torch.randn(shape, generator=generator)).to(dtype) for _ in range(2))
        weight, kept = torch.randn(width, generator=generator).to(dtype), x.clone()
        assert_as_exact_as(kernels.rms_norm(x, weight, 1e-5), *normed(x, weight), sum_terms=width)
        residual = x.clone()
        out = kernels.add_rms_norm(delta, residual, weight, 1e-5)
        assert torch.equal(x, kept)
        assert torch.equal(residual, x + delta)
        exact, _ = normed(x.double() + delta.double(), weight.double())
        assert_as_exact_as(out, exact, normed(x + delta, weight)[1], sum_terms=width)
