"""Linear layers with int8 weights: the scheme, and every implementation against float64 on the same integers."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from kernels.implementations import DTYPES, NATIVE, REFERENCE, make_kernels
from kernels.oracle import assert_as_exact_as
from kernels.test_dense import ACTIVATIONS, activated, operands
from torch import Tensor

from trunkline.kernels.ops import Activation, Kernels
from trunkline.kernels.quantisation import LARGEST, QuantisedWeight, quantise

SHAPES = ((64, 64), (16, 32), (17, 80), (1, 64), (50, 1), (200, 768), (257, 97), (96, 257), (130, 513))
"""Output and input features: remainder panels of every width, odd sums, sums longer than a block."""
TOKENS = (1, 2, 3, 4, 5, 6, 7, 13, 24, 25, 70, 97, 100)
"""Around the sizes of tiles and blocks: few rows take another way through the panel than many."""


def product(x: Tensor, weight: QuantisedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The definition, computed in `dtype`."""
    y = F.linear(x.to(dtype), weight.values.to(dtype)) * weight.scale.to(dtype)
    return y if bias is None else y + bias.to(dtype)


def test_the_nearest_integers_are_kept() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 40, generator=generator) * 10.0 ** torch.randint(
        -6, 6, (300, 1), generator=generator
    )
    values, scale = quantise(weight)
    assert (values.dtype, scale.dtype) == (torch.int8, torch.float32)
    # The largest element of a row is exact to rounding, all others are off by half a step at most.
    assert bool((values.abs().amax(dim=1) == LARGEST).all())
    torch.testing.assert_close(scale * LARGEST, weight.abs().amax(dim=1))
    error = (weight.double() - values.double() * scale.double()[:, None]).abs()
    assert bool((error <= scale.double()[:, None] * 0.50001).all())
    mirrored = quantise(-weight)
    assert torch.equal(mirrored.values, -values)
    assert torch.equal(mirrored.scale, scale)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_rows_of_zeros_and_of_extreme_values(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    largest = min(limits.max, torch.finfo(torch.float32).max)
    rows = [[0.0, 0.0, 0.0], [largest, -largest, 0.0], [limits.tiny, 0.0, -limits.tiny], [1.0, -1.0, 1e-4]]
    weight = torch.tensor(rows, dtype=torch.float64).to(dtype)
    values, scale = quantise(weight)
    assert bool(((scale > 0) & scale.isfinite()).all())
    assert values.tolist()[0] == [0, 0, 0]
    assert values.tolist()[1] == [127, -127, 0]
    assert values.tolist()[3] == [127, -127, 0]
    error = (weight.double() - values.double() * scale.double()[:, None]).abs()
    assert bool((error <= scale.double()[:, None] * 0.50001).all())


def test_a_large_weight_is_converted_in_parts() -> None:
    weight = torch.randn(9000, 3, generator=torch.Generator().manual_seed(1)).bfloat16()
    values, scale = quantise(weight)
    for rows in (slice(0, 10), slice(4090, 4100), slice(8990, 9000)):
        part = quantise(weight[rows])
        assert torch.equal(part.values, values[rows])
        assert torch.equal(part.scale, scale[rows])


@pytest.mark.parametrize(
    ("weight", "sentence"),
    [
        (torch.tensor([[1.0, float("nan")]]), "NaN"),
        (torch.tensor([[1.0, 2.0], [float("-inf"), 0.0]]), "NaN or values beyond float32"),
        (torch.tensor([[1e300]], dtype=torch.float64), "beyond float32"),
        (torch.ones(2, 2, dtype=torch.int32), r"int32 \[2, 2\]"),
        (torch.ones(4), r"float32 \[4\]"),
    ],
)
def test_what_has_no_scale_is_refused(weight: Tensor, sentence: str, kernels: Kernels) -> None:
    with pytest.raises(ValueError, match=sentence):
        kernels.pack_linear(weight, None, "int8")
    with pytest.raises(ValueError, match=sentence):
        kernels.pack_gated_linear(weight, None, "silu", "int8")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear(dtype: torch.dtype, shape: tuple[int, int], kernels: Kernels) -> None:
    out_features, in_features = shape
    for tokens, biased in itertools.product(TOKENS, (False, True)):
        x, weight, bias = operands(tokens, out_features, in_features, dtype, biased)
        stored = quantise(weight)
        layer = kernels.pack_linear(weight.clone(), bias, "int8")
        assert (layer.out_features, layer.in_features) == shape
        exact = product(x, stored, bias, torch.float64)
        for out_dtype in (None, dtype, torch.float32):
            out = kernels.linear(x, layer, out_dtype)
            assert out.dtype == (out_dtype or dtype)
            plain = product(x, stored, bias, torch.float32).to(out.dtype)
            assert_as_exact_as(out, exact, plain, sum_terms=in_features)


@pytest.mark.parametrize("shape", [(16, 32), (17, 80), (50, 1), (172, 768), (33, 257), (100, 100)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_linear(
    dtype: torch.dtype, activation: Activation, shape: tuple[int, int], kernels: Kernels
) -> None:
    width, in_features = shape
    for tokens, biased in itertools.product(TOKENS[::2], (False, True)):
        x, weight, bias = operands(tokens, 2 * width, in_features, dtype, biased)
        weight = weight / in_features**0.5
        stored = quantise(weight)
        layer = kernels.pack_gated_linear(weight.clone(), bias, activation, "int8")
        assert (layer.out_features, layer.in_features) == shape
        out = kernels.gated_linear(x, layer)
        assert out.dtype == dtype
        exact = activated(product(x, stored, bias, torch.float64), activation)
        plain = activated(product(x, stored, bias, torch.float32), activation).to(dtype)
        assert_as_exact_as(out, exact, plain, sum_terms=in_features)


@pytest.mark.parametrize("dtype", DTYPES)
def test_channels_of_very_different_size(dtype: torch.dtype, kernels: Kernels) -> None:
    """Each keeps its own precision; zeros give the bias, and nothing overflows on the way."""
    x, weight, bias = operands(9, 40, 96, dtype, True)
    assert bias is not None
    largest = 2.0 ** (10 if dtype == torch.float16 else 90)
    sizes = torch.tensor([0.0, 1.0, largest, 1.0 / largest] * 10)
    weight = (weight * sizes[:, None]).to(dtype)
    stored = quantise(weight)
    layer = kernels.pack_linear(weight, bias * 0.0, "int8")
    out, exact = kernels.linear(x, layer), product(x, stored, None, torch.float64)
    plain = product(x, stored, None, torch.float32).to(dtype)
    assert not bool(out[:, ::4].any())
    for first in (1, 2, 3):
        chosen = slice(first, None, 4)
        assert_as_exact_as(out[:, chosen], exact[:, chosen], plain[:, chosen], sum_terms=96)
    zeros = kernels.linear(x, kernels.pack_linear(torch.zeros_like(weight), bias, "int8"))
    assert torch.equal(zeros, bias.expand(9, 40))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_broken_token_stays_alone(dtype: torch.dtype, kernels: Kernels) -> None:
    for in_features in (7, 64):
        x, weight, _ = operands(9, 33, in_features, dtype, False)
        broken = x.clone()
        broken[1::2] = float("nan")
        for rows in (9, 3):
            out = kernels.linear(broken[:rows], kernels.pack_linear(weight, None, "int8"))
            assert not bool(out[::2].isnan().any())
            assert bool(out[1::2].isnan().all())


@pytest.mark.sanitized
@pytest.mark.parametrize("level", NATIVE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_batch(dtype: torch.dtype, level: str) -> None:
    """Bit by bit, though a few rows convert the weight in another place than many; any number of threads."""
    for out_features, in_features in ((200, 768), (129, 301)):
        x, weight, bias = operands(130, 2 * out_features, in_features, dtype, True)
        whole: list[Tensor] = []
        for threads in (1, 3):
            kernels = make_kernels(level, threads)
            layer = kernels.pack_linear(weight, bias, "int8")
            gated = kernels.pack_gated_linear(weight, bias, "silu", "int8")
            whole = whole or [kernels.linear(x, layer, torch.float32), kernels.gated_linear(x, gated)]
            for rows, first in itertools.product((1, 2, 6, 7, 31, 96, 100), (0, 30)):
                part = slice(first, first + rows)
                assert torch.equal(kernels.linear(x[part], layer, torch.float32), whole[0][part])
                assert torch.equal(kernels.gated_linear(x[part], gated), whole[1][part])


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_weights(dtype: torch.dtype, kernels: Kernels) -> None:
    """Shards of a tensor-parallel weight are rows or columns of it."""
    whole = torch.randn(96, 128, generator=torch.Generator().manual_seed(2)).to(dtype)
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(3)).to(dtype)
    for weight in (whole[:, 32:64], whole[16:48, :32], whole.t()[:40, :32], torch.nn.Parameter(whole[:, :32])):
        stored = quantise(weight)
        out = kernels.linear(x, kernels.pack_linear(weight, None, "int8"))
        exact, plain = (product(x, stored, None, wide) for wide in (torch.float64, torch.float32))
        assert_as_exact_as(out, exact, plain.to(dtype), sum_terms=32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_layer_is_as_small_as_it_says(dtype: torch.dtype, kernels: Kernels) -> None:
    """One byte per weight and four per output, to the padding of the last panel."""
    weight, bias = torch.randn(1000, 512).to(dtype), torch.randn(1000).to(dtype)
    plain, small = kernels.pack_linear(weight, bias), kernels.pack_linear(weight, bias, "int8")
    assert 1000 * 512 * dtype.itemsize <= plain.packed_bytes <= 1024 * 516 * dtype.itemsize
    assert 1000 * 516 <= small.packed_bytes <= 1024 * 520
    gated = kernels.pack_gated_linear(weight, None, "silu", "int8")
    assert 1000 * 516 <= gated.packed_bytes <= 1024 * 520
    empty = torch.empty(0, 512, dtype=dtype)
    assert kernels.linear(empty, small).shape == (0, 1000)
    assert kernels.gated_linear(empty, gated).shape == (0, 500)


@pytest.mark.skipif(not NATIVE, reason="the compiled kernels are not installed")
def test_inputs_of_another_type_are_refused() -> None:
    """The type of the weight that was given, not of its integers, is what the layer takes."""
    kernels = make_kernels(NATIVE[0])
    layer = kernels.pack_linear(torch.ones(6, 8).bfloat16(), None, "int8")
    with pytest.raises(ValueError, match=r"x is float32 \[2, 8\]; the packed weight takes bfloat16 \[tokens, 8\]"):
        kernels.linear(torch.ones(2, 8), layer)
    with pytest.raises(ValueError, match=r"bias is float32 \[5\]; expected is a contiguous float32 \[6\]"):
        kernels.pack_linear(torch.ones(6, 8), torch.ones(5), "int8")


def test_float64_of_the_reference() -> None:
    kernels = make_kernels(REFERENCE)
    generator = torch.Generator().manual_seed(4)
    x, weight = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((5, 24), (30, 24)))
    want = product(x, quantise(weight), None, torch.float64)
    out = kernels.linear(x, kernels.pack_linear(weight, None, "int8"))
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    for activation in ACTIVATIONS:
        gated = kernels.gated_linear(x, kernels.pack_gated_linear(weight, None, activation, "int8"))
        torch.testing.assert_close(gated, activated(want, activation), rtol=1e-12, atol=1e-12)
