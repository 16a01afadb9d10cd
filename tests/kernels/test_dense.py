"""Linear layers, gated ones and norms of every implementation against float64; plain and int8 weights."""

from __future__ import annotations

import gc
from itertools import pairwise as neighbours
from itertools import product as combinations
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kernels.dense_cases import ACTIVATIONS, FORMS, activated, check_norms, normed, operands, product
from kernels.implementations import CPU, CUDA, DTYPES, GPU, NATIVE, REFERENCE, make_kernels
from kernels.oracle import assert_as_exact_as
from kernels.pairwise import pairwise
from torch import Tensor

from trunkline.kernels.ops import Activation, Kernels, PackedLinear, Quantisation

SHAPES = (
    *((64, 64), (16, 32), (17, 80), (100, 100), (1, 64), (50, 1), (200, 768), (257, 97), (96, 257), (1, 1)),
    *((130, 1000), (129, 300)),
)
"""Output and input features: remainder panels of every width, odd sums, sums longer than a block."""
TOKENS = (1, 2, 3, 4, 5, 6, 7, 12, 13, 19, 24, 25, 97)
"""Around the sizes of tiles, blocks and units; int8 weights take another way for few rows than for many."""

ON_GPU = tuple(name for name in CUDA if name == GPU)
"""Products are torch's there: the emulation would add nothing."""
level = pairwise(implementation=NATIVE)
everywhere = pairwise(implementation=(*CPU, *CUDA))


@pairwise(shape=SHAPES, implementation=(*CPU, *ON_GPU), biased=(True, False), threads=(1, 3))
def test_linear(shape: tuple[int, int], implementation: str, biased: bool, threads: int) -> None:
    """Each shape meets each type and form of weights: the tiles for the rest of a panel are compiled for each."""
    kernels = make_kernels(implementation, threads)
    out_features, in_features = shape
    for tokens, dtype, quantisation in combinations(TOKENS, DTYPES, FORMS):
        x, weight, bias = operands(tokens, out_features, in_features, dtype, biased)
        layer = kernels.pack_linear(weight.clone(), bias, quantisation)
        assert (layer.out_features, layer.in_features) == shape
        exact = product(x, weight, bias, torch.float64, quantisation)
        for out_dtype in (None, torch.float32):
            out = kernels.linear(x, layer, out_dtype)
            assert out.dtype == (out_dtype or dtype)
            # In the type of the result: float32 results of half types are not rounded to half on the way.
            plain = product(x, weight, bias, torch.float32 if quantisation else out.dtype, quantisation)
            assert_as_exact_as(out, exact, plain.to(out.dtype), sum_terms=in_features)


@pairwise(
    shape=((16, 32), (17, 80), (100, 100), (50, 1), (172, 768), (33, 257)),
    implementation=(*CPU, *CUDA),
    activation=ACTIVATIONS,
    biased=(True, False),
)
def test_gated_linear(shape: tuple[int, int], implementation: str, activation: Activation, biased: bool) -> None:
    kernels, (width, in_features) = make_kernels(implementation), shape
    for tokens, dtype, quantisation in combinations(TOKENS[::3], DTYPES, FORMS):
        x, weight, bias = operands(tokens, 2 * width, in_features, dtype, biased)
        layer = kernels.pack_gated_linear(weight.clone(), bias, activation, quantisation)
        assert (layer.out_features, layer.in_features) == shape
        out = kernels.gated_linear(x, layer)
        assert out.dtype == dtype
        exact = activated(product(x, weight, bias, torch.float64, quantisation), activation)
        plain = activated(
            product(x, weight, bias, torch.float32 if quantisation else dtype, quantisation), activation
        )
        assert_as_exact_as(out, exact, plain.to(dtype), sum_terms=in_features)


@pairwise(implementation=CPU, dtype=DTYPES, quantisation=FORMS, tokens=(1, 5, 40))
def test_clamped_gates(implementation: str, dtype: torch.dtype, quantisation: Quantisation, tokens: int) -> None:
    """Gates and ups beyond both limits; NaN stays."""
    kernels = make_kernels(implementation)
    x, weight, bias = operands(tokens, 200, 48, dtype)
    weight = 6 * weight
    layer = kernels.pack_gated_linear(weight, bias, "clamped_silu", quantisation)
    products = product(x, weight, bias, torch.float64, quantisation)
    assert bool((products.abs() > 7).any())
    plain = activated(product(x, weight, bias, torch.float32, quantisation), "clamped_silu")
    out = kernels.gated_linear(x, layer)
    assert_as_exact_as(out, activated(products, "clamped_silu"), plain.to(dtype), sum_terms=48 * 36)
    assert kernels.gated_linear(torch.full_like(x, float("nan")), layer).isnan().all()


@everywhere
def test_large_products_of_gates(kernels: Kernels) -> None:
    """Activations saturate without NaN: exp overflows at 88 in float32."""
    for dtype, activation in combinations(DTYPES, ACTIVATIONS):
        x = torch.tensor([[1.0], [-1.0], [30.0], [-30.0], [0.0]]).to(dtype)
        weight = torch.tensor([[10.0], [100.0], [1.0], [1.0]]).to(dtype)
        out = kernels.gated_linear(x, kernels.pack_gated_linear(weight, None, activation))
        exact = activated(product(x, weight, None, torch.float64), activation)
        assert_as_exact_as(out, exact, exact.to(dtype))


@level
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_over_their_range(activation: Activation, kernels: Kernels) -> None:
    """The gate is the input itself, the up projection one: the activation function is what is left."""
    values = torch.cat((torch.linspace(-12, 12, 4001), torch.tensor([-1e30, -200.0, -90.0, 90.0, 1e30, 0.0])))
    layer = kernels.pack_gated_linear(torch.tensor([[1.0], [0.0]]), torch.tensor([0.0, 1.0]), activation)
    y = kernels.gated_linear(values[:, None], layer)[:, 0]
    gate = values.double()
    want = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate=activation[5:] or "none")
    error = (y.double() - want).abs()
    assert (error <= 1.5e-7 + 3e-7 * want.abs()).all(), float(error.max())
    assert kernels.gated_linear(torch.tensor([[float("nan")]]), layer).isnan().all()


@pairwise(level=NATIVE, dtype=DTYPES, quantisation=FORMS)
def test_a_row_is_the_same_bits_in_any_batch(level: str, dtype: torch.dtype, quantisation: Quantisation) -> None:
    """Though a few rows convert int8 weights in another place than many; any number of threads, and, for matrix
    registers, of groups of panels."""
    for out_features, in_features in ((200, 768), (129, 301), (70, 90), (150, 2100)):
        x, weight, bias = operands(130, 2 * out_features, in_features, dtype)
        norm_weight = torch.ones(in_features, dtype=dtype)
        whole: list[Tensor] = []
        for threads in (1, 3):
            kernels = make_kernels(level, threads)
            layer = kernels.pack_linear(weight, bias, quantisation)
            gated = kernels.pack_gated_linear(weight, bias, "silu", quantisation)
            for rows, first in ((130, 0), *combinations((1, 2, 6, 7, 31, 96, 100), (0, 30))):
                part = x[first : first + rows]
                found = [
                    kernels.linear(part, layer, torch.float32),
                    kernels.gated_linear(part, gated),
                    kernels.rms_norm(part, norm_weight, 1e-6),
                ]
                whole = whole or found
                for y, expected in zip(found, whole, strict=True):
                    assert torch.equal(y, expected[first : first + rows])


@pytest.mark.skipif(not NATIVE, reason="the compiled kernels are not installed")
@pytest.mark.parametrize("quantisation", FORMS)
def test_rows_of_a_long_prompt_are_those_of_a_short_one(quantisation: Quantisation) -> None:
    """More rows than a unit takes, panels than a group has, and passes than ask for what comes next."""
    x, weight, bias = operands(1100, 1400, 768, torch.bfloat16)
    for threads in (1, 3):
        kernels = make_kernels(NATIVE[-1], threads)
        layer = kernels.pack_linear(weight, bias, quantisation)
        gated = kernels.pack_gated_linear(weight, bias, "silu", quantisation)
        whole = kernels.linear(x, layer, torch.float32), kernels.gated_linear(x, gated)
        for first, rows in ((0, 300), (300, 224), (700, 31), (1070, 30), (1099, 1)):
            part = x[first : first + rows]
            assert torch.equal(kernels.linear(part, layer, torch.float32), whole[0][first : first + rows])
            assert torch.equal(kernels.gated_linear(part, gated), whole[1][first : first + rows])


@level
def test_a_weight_without_inputs_is_refused(kernels: Kernels) -> None:
    for quantisation in FORMS:
        with pytest.raises(ValueError, match="no inputs"):
            kernels.pack_linear(torch.empty(8, 0), None, quantisation)


@pytest.mark.skipif("amx" not in NATIVE, reason="this processor has no matrix registers")
def test_layers_for_matrix_registers_run_nowhere_else() -> None:
    """Their panels lie otherwise."""
    x, weight, _ = operands(3, 20, 40, torch.bfloat16)
    tiles, vectors = make_kernels("amx"), make_kernels("avx512bf16")
    for packs, runs in ((tiles, vectors), (vectors, tiles)):
        with pytest.raises(ValueError, match="matrix registers"):
            runs.linear(x, packs.pack_linear(weight, None))


@pairwise(implementation=CPU, dtype=DTYPES, quantisation=FORMS)
def test_a_broken_token_stays_alone(implementation: str, dtype: torch.dtype, quantisation: Quantisation) -> None:
    """With an odd width the padding of a row must not be the next row's first value: 0 * NaN is NaN."""
    kernels = make_kernels(implementation)
    for in_features in (7, 33, 64):
        x, weight, _ = operands(9, 33, in_features, dtype)
        broken = x.clone()
        broken[1::2] = float("nan")
        layer = kernels.pack_linear(weight, None, quantisation)
        for rows in (9, 3):
            out = kernels.linear(broken[:rows], layer)
            assert not bool(out[::2].isnan().any())
            assert bool(out[1::2].isnan().all())


@level
def test_converted_rows_are_not_reused_by_the_next_call(kernels: Kernels) -> None:
    x, weight, _ = operands(4, 64, 64, torch.float16)
    layer = kernels.pack_linear(weight, None)
    first = kernels.linear(x, layer)
    x.neg_()
    assert torch.equal(kernels.linear(x, layer), -first)


@level
def test_empty_batches(kernels: Kernels) -> None:
    for dtype, quantisation in combinations(DTYPES, FORMS):
        x, weight, bias = operands(0, 10, 8, dtype)
        layer, ones = kernels.pack_linear(weight, bias, quantisation), torch.ones(8, dtype=dtype)
        assert kernels.linear(x, layer).shape == (0, 10)
        assert kernels.linear(x, layer, torch.float32).dtype == torch.float32
        gated = kernels.pack_gated_linear(weight, bias, "gelu", quantisation)
        assert kernels.gated_linear(x, gated).shape == (0, 5)
        assert kernels.rms_norm(x, ones, 1e-6).shape == (0, 8)
        assert kernels.add_rms_norm(x, x.clone(), ones, 1e-6).shape == (0, 8)


@pairwise(implementation=CPU, dtype=DTYPES, quantisation=FORMS)
def test_strided_weights_and_inputs(implementation: str, dtype: torch.dtype, quantisation: Quantisation) -> None:
    """Shards of a tensor-parallel weight are columns or rows of it; an input may be a slice of a wider one."""
    kernels = make_kernels(implementation)
    wide, whole, _ = operands(5, 96, 128, dtype)
    x = wide[:, 64:96]
    for weight in (whole[:, 32:64], whole[16:48, :32], whole.t()[:40, :32], torch.nn.Parameter(whole[:, :32])):
        out = kernels.linear(x, kernels.pack_linear(weight, None, quantisation)).detach()
        exact = product(x, weight.detach(), None, torch.float64, quantisation)
        plain = product(x, weight.detach(), None, torch.float32 if quantisation else dtype, quantisation)
        assert_as_exact_as(out, exact, plain.to(dtype), sum_terms=32)


@level
def test_a_packed_weight_is_a_copy_and_goes_with_its_owner(kernels: Kernels) -> None:
    x, weight, bias = operands(32, 32, 32, torch.float32)
    layer = kernels.pack_linear(weight, bias)
    want = kernels.linear(x, layer)
    weight.fill_(float("nan"))
    assert bias is not None
    bias.fill_(float("nan"))
    assert torch.equal(kernels.linear(x, layer), want)
    del layer
    gc.collect()


@level
def test_layers_share_memory_without_overlap(kernels: Kernels) -> None:
    """Small layers lie side by side, a large one has its own memory; all keep what they were given."""
    sizes = [(5, 3), (64, 64), (17, 1), (2100, 2100), (3, 5), (1000, 64)]
    cases = [operands(2, out, width, torch.float32, False) for out, width in sizes]
    layers = [kernels.pack_linear(weight, None) for _, weight, _ in cases]
    ranges = []
    for (x, weight, _), layer in zip(cases, layers, strict=True):
        memory = layer.data.memory
        assert memory.data_ptr() % 64 == 0
        ranges.append((memory.data_ptr(), memory.data_ptr() + memory.numel()))
        exact = product(x, weight, None, torch.float64)
        torch.testing.assert_close(kernels.linear(x, layer).double(), exact, rtol=1e-4, atol=1e-5)
    ranges.sort()
    assert all(end <= start for (_, end), (start, _) in neighbours(ranges))


@pairwise(width=(1, 7, 8, 64, 80, 100, 768, 1030), implementation=CPU, dtype=DTYPES)
def test_norms(width: int, implementation: str, dtype: torch.dtype) -> None:
    for size in (1e-3, 1.0, 100.0):
        check_norms(make_kernels(implementation), width, dtype, size)


@pairwise(level=NATIVE, dtype=DTYPES)
def test_norms_round_like_the_reference(level: str, dtype: torch.dtype) -> None:
    """Also with weights in float32, as models in half types may have them."""
    torch.manual_seed(10)
    x = torch.randn(64, 768).to(dtype)
    for weight in (torch.randn(768).to(dtype), torch.randn(768)):
        want = make_kernels(REFERENCE).rms_norm(x, weight, 1e-5)
        got = make_kernels(level).rms_norm(x, weight, 1e-5)
        assert got.dtype == dtype
        # A sum in another order may cross a rounding boundary now and then.
        different = (got.to(want.dtype) != want).float().mean()
        assert different < 0.001 or dtype == torch.float32 or want.dtype != dtype
        rounding = torch.finfo(dtype).eps / 2
        torch.testing.assert_close(got.float(), want.float(), rtol=4.2 * rounding + 1e-6, atol=1e-6)


def wrong_calls(kernels: Kernels, layer: PackedLinear, gated: PackedLinear) -> list[tuple[str, Any]]:
    x, ones = torch.ones(2, 8), torch.ones(8)
    int8 = kernels.pack_linear(torch.ones(6, 8).bfloat16(), None, "int8")
    return [
        (r"x is float32 \[2, 7\].* float32 \[tokens, 8\]", lambda: kernels.linear(torch.ones(2, 7), layer)),
        (r"x is bfloat16 \[2, 8\].* float32", lambda: kernels.linear(x.bfloat16(), layer)),
        # The type of the weight that was given, not of its integers, is what the layer takes.
        (r"x is float32 \[2, 8\]; the packed weight takes bfloat16", lambda: kernels.linear(x, int8)),
        (r"x is float64 \[2, 8\]", lambda: kernels.linear(x.double(), layer)),
        (r"x is float32 \[2, 2, 8\]", lambda: kernels.linear(torch.ones(2, 2, 8), layer)),
        (r"out is float16 \[2, 6\]", lambda: kernels.linear(x, layer, torch.float16)),
        (r"x is float32 \[8\]", lambda: kernels.gated_linear(ones, gated)),
        (r"weight is float32 \[4\], x float32 \[2, 8\]", lambda: kernels.rms_norm(x, torch.ones(4), 1e-6)),
        (r"weight is bfloat16 \[8\], x float32", lambda: kernels.rms_norm(x, ones.bfloat16(), 1e-6)),
        (r"x is int64 \[2, 8\]", lambda: kernels.rms_norm(x.long(), ones, 1e-6)),
        (r"residual is float32 \[3, 8\]", lambda: kernels.add_rms_norm(x, torch.ones(3, 8), ones, 1e-6)),
        (r"residual must be a contiguous", lambda: kernels.add_rms_norm(x, torch.ones(8, 2).t(), ones, 1e-6)),
        (r"weight is int64 \[4, 8\]", lambda: kernels.pack_linear(torch.ones(4, 8).long(), None)),
        (r"weight is float32 \[8\]", lambda: kernels.pack_linear(ones, None)),
        (r"weight is float32 \[3, 8\].*even", lambda: kernels.pack_gated_linear(torch.ones(3, 8), None, "silu")),
        (r"bias is float32 \[5\]; .* \[4\]", lambda: kernels.pack_linear(torch.ones(4, 8), torch.ones(5))),
        (r"bias is float32 \[5\]; .* \[4\]", lambda: kernels.pack_linear(torch.ones(4, 8), torch.ones(5), "int8")),
    ]


@pytest.mark.sanitized
@pytest.mark.skipif(not NATIVE, reason="the compiled kernels are not installed")
def test_wrong_calls_name_what_was_given() -> None:
    kernels = make_kernels(NATIVE[0])
    layer = kernels.pack_linear(torch.ones(6, 8), None)
    gated = kernels.pack_gated_linear(torch.ones(6, 8), None, "silu")
    for message, call in wrong_calls(kernels, layer, gated):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("quantisation", FORMS)
def test_float64_of_the_reference(quantisation: Quantisation) -> None:
    kernels, rng = make_kernels(REFERENCE), np.random.default_rng(0)
    x, weight = (torch.from_numpy(rng.standard_normal(shape)) for shape in ((5, 24), (30, 24)))
    want = product(x, weight, None, torch.float64, quantisation)
    out = kernels.linear(x, kernels.pack_linear(weight, None, quantisation))
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    for activation in ACTIVATIONS:
        gated = kernels.gated_linear(x, kernels.pack_gated_linear(weight, None, activation, quantisation))
        torch.testing.assert_close(gated, activated(want, activation), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(kernels.rms_norm(x, weight[0], 1e-5), normed(x, weight[0])[0], rtol=1e-12, atol=0.0)


def test_float32_results_of_a_large_half_layer() -> None:
    """The reference converts such a weight in parts; each lands in its columns."""
    kernels = make_kernels(REFERENCE)
    x, weight, bias = operands(3, 9000, 8, torch.bfloat16)
    out = kernels.linear(x, kernels.pack_linear(weight, bias), torch.float32)
    torch.testing.assert_close(out.double(), product(x, weight, bias, torch.float64), rtol=1e-5, atol=1e-5)
