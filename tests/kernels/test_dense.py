"""Linear layers, gated ones, and norms, against float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kernels.implementations import DTYPES, REFERENCE, make_kernels
from kernels.oracle import assert_as_exact_as
from torch import Tensor

from trunkline.kernels.ops import Activation, Kernels

SHAPES = ((64, 64), (16, 32), (17, 80), (100, 100), (1, 64), (50, 1), (200, 768), (257, 96), (96, 257), (768, 200))
"""Output and input features."""
TOKENS = (1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 31, 32, 33, 64, 70)
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh")


def operands(
    tokens: int, out_features: int, in_features: int, dtype: torch.dtype, biased: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`x` lies between rows of NaN, so that reading past a row or past the batch shows."""
    generator = torch.Generator().manual_seed(tokens * 1000 + out_features)
    around = torch.full((tokens + 4, in_features), float("nan"))
    around[2:-2] = torch.randn(tokens, in_features, generator=generator)
    weight = torch.randn(out_features, in_features, generator=generator)
    bias = torch.randn(out_features, generator=generator).to(dtype) if biased else None
    return around.to(dtype)[2:-2], weight.to(dtype), bias


def exactly(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear(dtype: torch.dtype, shape: tuple[int, int], kernels: Kernels) -> None:
    out_features, in_features = shape
    for tokens, biased in itertools.product(TOKENS, (False, True)):
        x, weight, bias = operands(tokens, out_features, in_features, dtype, biased)
        layer = kernels.pack_linear(weight.clone(), bias)
        assert (layer.out_features, layer.in_features) == shape
        exact = exactly(x, weight, bias)
        for out_dtype in (None, dtype, torch.float32):
            out = kernels.linear(x, layer, out_dtype)
            assert out.dtype == (out_dtype or dtype)
            wide = [None if operand is None else operand.to(out.dtype) for operand in (x, weight, bias)]
            assert wide[0] is not None
            assert wide[1] is not None
            # In the type of the result: float32 results of half types are not rounded to half on the way.
            assert_as_exact_as(out, exact, F.linear(wide[0], wide[1], wide[2]), sum_terms=in_features)


@pytest.mark.parametrize("shape", [(16, 32), (17, 80), (100, 100), (50, 1), (172, 768), (33, 257)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_linear(
    dtype: torch.dtype, activation: Activation, shape: tuple[int, int], kernels: Kernels
) -> None:
    width, in_features = shape
    for tokens, biased in itertools.product(TOKENS[::2], (False, True)):
        x, weight, bias = operands(tokens, 2 * width, in_features, dtype, biased)
        # Products of ordinary size: an activation is far from linear only near zero.
        weight = weight / in_features**0.5
        layer = kernels.pack_gated_linear(weight.clone(), bias, activation)
        assert (layer.out_features, layer.in_features) == shape
        out = kernels.gated_linear(x, layer)
        assert out.dtype == dtype
        exact = activated(exactly(x, weight, bias), activation)
        assert_as_exact_as(out, exact, activated(F.linear(x, weight, bias), activation), sum_terms=in_features)


def activated(gate_up: Tensor, activation: Activation) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return gate * torch.sigmoid(gate) * up
    if activation == "gelu":
        return gate * 0.5 * (1.0 + torch.erf(gate / 2**0.5)) * up
    return gate * 0.5 * (1.0 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_products_of_gates(dtype: torch.dtype, kernels: Kernels) -> None:
    """Activations saturate without NaN: exp overflows at 88 in float32."""
    x = torch.tensor([[1.0], [-1.0], [30.0], [-30.0], [0.0]]).to(dtype)
    weight = torch.tensor([[10.0], [100.0], [1.0], [1.0]]).to(dtype)
    for activation in ACTIVATIONS:
        out = kernels.gated_linear(x, kernels.pack_gated_linear(weight, None, activation))
        exact = activated(exactly(x, weight, None), activation)
        assert_as_exact_as(out, exact, exact.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_does_not_depend_on_the_others(dtype: torch.dtype, implementation: str) -> None:
    """Beyond rounding, whatever the batch and the number of workers; a broken one stays alone."""
    x, weight, bias = operands(37, 200, 96, dtype, True)
    weight = weight / 10
    exact, plain = exactly(x, weight, bias), F.linear(x, weight, bias)
    for threads in (1, 2, 3):
        kernels = make_kernels(implementation, threads)
        layer = kernels.pack_linear(weight, bias)
        for chosen in (slice(0, 37), slice(5, 6), slice(1, 30)):
            assert_as_exact_as(kernels.linear(x[chosen], layer), exact[chosen], plain[chosen], sum_terms=96)
        broken = x.clone()
        broken[11, 40] = float("nan")
        nan_rows = kernels.linear(broken, layer).isnan()
        assert nan_rows.all(dim=1).tolist() == nan_rows.any(dim=1).tolist() == [row == 11 for row in range(37)]


@pytest.mark.parametrize("width", [8, 64, 80, 100, 768, 1000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype: torch.dtype, width: int, kernels: Kernels) -> None:
    torch.manual_seed(width)
    for tokens, size in itertools.product((1, 3, 17), (1e-3, 1.0, 100.0)):
        x, delta = ((size * torch.randn(tokens, width)).to(dtype) for _ in range(2))
        weight = torch.randn(width).to(dtype)
        assert_as_exact_as(kernels.rms_norm(x, weight, 1e-5), *normed(x, weight), sum_terms=width)
        residual = x.clone()
        out = kernels.add_rms_norm(delta, residual, weight, 1e-5)
        assert torch.equal(residual, x + delta)
        exact, _ = normed(x.double() + delta.double(), weight.double())
        assert_as_exact_as(out, exact, normed(x + delta, weight)[1], sum_terms=width)


def normed(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Exact, and with statistics in float32 and each step rounded."""
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    wide = x.float()
    rounded = (wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).to(x.dtype)
    return exact, rounded * weight


def test_float64_of_the_reference() -> None:
    kernels, rng = make_kernels(REFERENCE), np.random.default_rng(0)
    x, weight = (torch.from_numpy(rng.standard_normal(shape)) for shape in ((5, 24), (30, 24)))
    out = kernels.linear(x, kernels.pack_linear(weight, None))
    torch.testing.assert_close(out, x @ weight.T, rtol=1e-12, atol=1e-12)
    for activation in ACTIVATIONS:
        gated = kernels.gated_linear(x, kernels.pack_gated_linear(weight, None, activation))
        torch.testing.assert_close(gated, activated(x @ weight.T, activation), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(kernels.rms_norm(x, weight[0], 1e-5), normed(x, weight[0])[0], rtol=1e-12, atol=0.0)


def test_float32_results_of_a_large_half_layer() -> None:
    """The reference converts such a weight in parts; each lands in its columns."""
    kernels = make_kernels(REFERENCE)
    x, weight, bias = operands(3, 9000, 8, torch.bfloat16, True)
    out = kernels.linear(x, kernels.pack_linear(weight, bias), torch.float32)
    torch.testing.assert_close(out.double(), exactly(x, weight, bias), rtol=1e-5, atol=1e-5)
