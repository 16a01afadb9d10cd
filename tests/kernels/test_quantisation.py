"""The scheme of int8 weights, and what it promises of a layer; `test_dense` compares the results of all layers."""

from __future__ import annotations

import pytest
import torch
from kernels.dense_cases import operands, product
from kernels.implementations import CPU, DTYPES, make_kernels
from kernels.oracle import assert_as_exact_as
from kernels.pairwise import pairwise
from torch import Tensor

from trunkline.kernels.ops import Kernels
from trunkline.kernels.quantisation import LARGEST, quantise


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
def test_weights_without_a_scale_are_refused(weight: Tensor, sentence: str, kernels: Kernels) -> None:
    with pytest.raises(ValueError, match=sentence):
        kernels.pack_linear(weight, None, "int8")
    with pytest.raises(ValueError, match=sentence):
        kernels.pack_gated_linear(weight, None, "silu", "int8")


@pairwise(implementation=CPU, dtype=DTYPES)
def test_channels_of_very_different_size(implementation: str, dtype: torch.dtype) -> None:
    """Each keeps its own precision; zeros give the bias, and nothing overflows on the way."""
    kernels = make_kernels(implementation)
    x, weight, bias = operands(9, 40, 96, dtype)
    assert bias is not None
    largest = 2.0 ** (10 if dtype == torch.float16 else 90)
    sizes = torch.tensor([0.0, 1.0, largest, 1.0 / largest] * 10)
    weight = (weight * sizes[:, None]).to(dtype)
    layer = kernels.pack_linear(weight, bias * 0.0, "int8")
    out, exact = kernels.linear(x, layer), product(x, weight, None, torch.float64, "int8")
    plain = product(x, weight, None, torch.float32, "int8").to(dtype)
    assert not bool(out[:, ::4].any())
    for first in (1, 2, 3):
        chosen = slice(first, None, 4)
        assert_as_exact_as(out[:, chosen], exact[:, chosen], plain[:, chosen], sum_terms=96)
    zeros = kernels.linear(x, kernels.pack_linear(torch.zeros_like(weight), bias, "int8"))
    assert torch.equal(zeros, bias.expand(9, 40))


@pairwise(implementation=CPU, dtype=DTYPES)
def test_a_packed_layer_is_as_small_as_it_says(implementation: str, dtype: torch.dtype) -> None:
    """One byte per weight and four per output, to the padding of the last panel."""
    kernels = make_kernels(implementation)
    weight, bias = torch.randn(1000, 512).to(dtype), torch.randn(1000).to(dtype)
    plain, small = kernels.pack_linear(weight, bias), kernels.pack_linear(weight, bias, "int8")
    assert 1000 * 512 * dtype.itemsize <= plain.packed_bytes <= 1024 * 516 * dtype.itemsize
    assert 1000 * 516 <= small.packed_bytes <= 1024 * 520
    gated = kernels.pack_gated_linear(weight, None, "silu", "int8")
    assert 1000 * 516 <= gated.packed_bytes <= 1024 * 520
