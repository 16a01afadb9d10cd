"""Layers of the CUDA kernels, emulated: norms, gates, rounding of inputs to fp8, grouped products.

The mixtures of experts and the fp8 layers that are made of them are tested in `test_experts` and
`test_scaled_products`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from gpu_errors import LIMITS, relative_error
from gpu_host_steps import Operations
from kernels.cuda_emulated import CXX, H200, configure, make_emulated
from kernels.dense_cases import ACTIVATIONS, activated, normed
from kernels.grouped_cases import random_weight
from seeds import seeds
from torch import Tensor

from trunkline.kernels.cuda_library import CudaError
from trunkline.kernels.ops import ExpertMatrices
from trunkline.kernels.scaled_products import Float8Rows, float8_rows

pytestmark = pytest.mark.skipif(CXX is None, reason="no C++ compiler for the emulation")

HALF: Final = (torch.bfloat16, torch.float16)


def assert_same(rows: Float8Rows, expected: Float8Rows) -> None:
    """The same bits, but for the sign of what is no number."""
    assert (rows.codes.dtype, rows.codes.shape) == (torch.float8_e4m3fn, expected.codes.shape)
    assert rows.factor.shape == expected.factor.shape
    # What torch's product is given has factors of a group beside each other.
    assert rows.factor.shape[1] == 1 or rows.factor.stride() == expected.factor.stride()
    torch.testing.assert_close(rows.factor, expected.factor, rtol=0, atol=0, equal_nan=True)
    bits, wanted = (each.codes.view(torch.uint8) for each in (rows, expected))
    is_number = (wanted & 0x7F) != 0x7F
    assert torch.equal(bits[is_number], wanted[is_number])
    assert ((bits & 0x7F) == 0x7F)[~is_number].all()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("group", [128, 256])
def test_all_numbers_are_rounded_as_torch_rounds_them(dtype: torch.dtype, group: int) -> None:
    """Every pattern of 16 bits beside others of its size; and beside 448, so that factors are about 1."""
    kernels = make_emulated()
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype).view(256, 256)
    assert_same(kernels.round_rows(patterns, group, 256), float8_rows(patterns, group))
    beside = patterns.float().nan_to_num(0.0, 1.0, -1.0).clamp(-448, 448).to(dtype)
    beside[:, ::128] = 448
    rows = kernels.round_rows(beside, group, 256)
    assert_same(rows, float8_rows(beside, group))
    assert len(set((rows.codes.view(torch.uint8) & 0x7F).flatten().tolist())) == 127


@pytest.mark.parametrize("seed", seeds(2))
def test_rows_of_any_size_and_number_are_rounded(seed: int) -> None:
    """Rows that are added are zeros."""
    kernels, generator = make_emulated(), torch.Generator().manual_seed(seed)
    for rows, width, group, padded in ((1, 16, 16, 1), (3, 128, 128, 4), (5, 640, 128, 8), (7, 1552, 1552, 7)):
        configure(H200, seed + rows)
        x = torch.randn(rows, width, generator=generator)
        x *= 2.0 ** torch.randint(-60, 60, (rows, 1), generator=generator)
        x[0, : width // 2] = 0.0
        whole = torch.cat([x, x], dim=1).bfloat16()[:, :width]  # its rows do not lie behind each other
        assert_same(kernels.round_rows(whole, group, padded), float8_rows(whole, group, padded))


def test_a_layer_is_a_rounding_and_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, x = make_emulated(), torch.randn(5, 256).bfloat16()
    weight = replace(random_weight("float8, rows", 144, 256, torch.bfloat16), float8_inputs=True)
    layer = kernels.pack_linear(weight, None)
    assert layer.data[0].float8_inputs
    roundings = kernels.counters.calls["round_float8"]
    products: list[int] = []
    real = F.scaled_mm

    def counted(*given: Any, **named: Any) -> Tensor:
        with Operations() as operations:
            out = real(*given, **named)
        products.append(operations.calls)
        return out

    monkeypatch.setattr(F, "scaled_mm", counted)
    with Operations() as outside:
        kernels.linear(x, layer)
    assert kernels.counters.calls["round_float8"] == roundings + 1
    assert len(products) == 1
    assert outside.calls == products[0]  # torch launches nothing beside its product
    with Operations() as plain:
        float8_rows(x, 256)
    assert plain.calls > 5


@pytest.mark.parametrize(("width", "group", "padded"), [(256, 64, 4), (192, 128, 4), (18, 18, 4), (256, 128, 3)])
def test_roundings_that_are_not_there_are_refused(width: int, group: int, padded: int) -> None:
    with pytest.raises(CudaError, match="round_float8 failed"):
        make_emulated().round_rows(torch.zeros(4, width).bfloat16(), group, padded)


WIDTHS: Final = (100, 136, 1056, 2056, 4104, 8200)
"""Whole units of 16 bytes or not; rows that one, two and four units a thread hold, and longer ones."""


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_of_rows_of_any_width(width: int, dtype: torch.dtype) -> None:
    kernels, generator = make_emulated(), torch.Generator().manual_seed(width)
    # One element further rows begin between multiples of 16 bytes.
    for start in (0, 1):
        x, before = (torch.randn(2 * width + 1, generator=generator).to(dtype)[start:][: 2 * width] for _ in "xb")
        x, residual = x.view(2, width), before.view(2, width)
        weight, summed = torch.randn(width, generator=generator).to(dtype), x + residual
        assert relative_error(kernels.rms_norm(x, weight, 1e-5), normed(x, weight)[0]) <= LIMITS[dtype] / 2
        out = kernels.add_rms_norm(x, residual, weight, 1e-5)
        assert torch.equal(residual, summed)
        assert relative_error(out, normed(summed, weight)[0]) <= LIMITS[dtype] / 2


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("width", [100, 136, 2056])
def test_gates_of_rows_of_any_width(width: int, dtype: torch.dtype) -> None:
    kernels, generator = make_emulated(), torch.Generator().manual_seed(width)
    matrix = torch.randn(2 * width, 16, generator=generator).to(dtype)
    x = torch.randn(3, 16, generator=generator).to(dtype)
    for activation in ACTIVATIONS:
        out = kernels.gated_linear(x, kernels.pack_gated_linear(matrix, None, activation))
        exact = activated((x.double() @ matrix.double().T).to(dtype).double(), activation)
        assert relative_error(out, exact) <= LIMITS[dtype]


def random_matrices(
    generator: torch.Generator, form: str, shape: tuple[int, int, int], group: int, dtype: torch.dtype
) -> tuple[ExpertMatrices, Tensor]:
    """Random matrices, and their numbers in float64."""
    count, outputs, width = shape
    if form == "numbers":
        numbers = torch.randn(shape, generator=generator).to(dtype)
        return ExpertMatrices(numbers), numbers.double()
    scale = 0.5 + torch.rand(count, outputs, width // group, generator=generator)
    codes = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
    if form == "fp8":
        codes = torch.where((codes & 0x7F) == 0x7F, 0, codes).to(torch.uint8)
        typed, scale = codes.view(torch.float8_e4m3fn), scale / 200
    else:
        typed, scale = codes.view(torch.int8), scale / 70
    numbers = typed.double().view(*scale.shape, group) * scale.double()[..., None]
    return ExpertMatrices(typed, scale), numbers.view(shape)


def random_stops(generator: torch.Generator, matrices: int, rows: int) -> Tensor:
    """Where the rows of each matrix end: some have none, the last rows belong to none."""
    cuts = torch.randint(0, rows + 1, (matrices,), generator=generator, dtype=torch.int32)
    return cuts.sort().values


CASES: Final = [
    # matrices, outputs, width, group, rows
    (1, 8, 16, 16, 1),
    (3, 72, 48, 16, 5),
    (40, 64, 64, 32, 30),
    (70, 24, 80, 80, 75),
    (5, 136, 640, 128, 40),
    (4, 72, 272, 16, 300),
    (2, 200, 128, 64, 150),
    (9, 64, 192, 192, 0),
]


@pytest.mark.parametrize("form", ["numbers", "fp8", "int8"])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("matrices", "outputs", "width", "group", "rows"), CASES)
def test_each_row_is_multiplied_with_its_matrix(
    matrices: int, outputs: int, width: int, group: int, rows: int, dtype: torch.dtype, form: str
) -> None:
    configure(H200, rows)
    kernels, generator = make_emulated(), torch.Generator().manual_seed(width + rows)
    of_them, numbers = random_matrices(generator, form, (matrices, outputs, width), group, dtype)
    x = torch.randn(rows, width, generator=generator).to(dtype)
    stops = random_stops(generator, matrices, rows)
    x[int(stops[-1]) :] = float("nan")  # not even read
    out = kernels.multiply_grouped(x, of_them, stops)
    assert (out.dtype, out.shape) == (dtype, (rows, outputs))
    start = 0
    for number, stop in enumerate(stops.tolist()):
        if stop > start:
            exact = x[start:stop].double() @ numbers[number].T
            assert relative_error(out[start:stop], exact) <= LIMITS[dtype] / 2
        start = stop


@pytest.mark.parametrize("form", ["numbers", "fp8"])
def test_a_row_is_the_same_bits_in_any_batch(form: str) -> None:
    """In tiles of 16 rows and of 64."""
    kernels, generator = make_emulated(), torch.Generator().manual_seed(1)
    of_them, _ = random_matrices(generator, form, (2, 72, 144), 48, torch.bfloat16)
    x = torch.randn(90, 144, generator=generator).bfloat16()
    whole = kernels.multiply_grouped(x, of_them, torch.tensor([50, 90], dtype=torch.int32))
    few = kernels.multiply_grouped(x[40:60].clone(), of_them, torch.tensor([10, 20], dtype=torch.int32))
    assert torch.equal(whole[40:60], few)


def test_what_is_not_written_stays() -> None:
    """Neither rows of no matrix nor what lies behind the result: the emulation has memory of its own there."""
    kernels = make_emulated()
    of_them = ExpertMatrices(torch.ones(2, 24, 16, dtype=torch.bfloat16))
    torch.use_deterministic_algorithms(True)  # new memory holds NaN
    try:
        out = kernels.multiply_grouped(torch.ones(9, 16).bfloat16(), of_them, torch.tensor([2, 5]).int())
    finally:
        torch.use_deterministic_algorithms(False)
    assert out[:5].eq(16).all()
    assert out[5:].isnan().all()


@pytest.mark.parametrize(("outputs", "width"), [(12, 16), (16, 24)])
def test_products_that_are_not_there_are_refused(outputs: int, width: int) -> None:
    of_them = ExpertMatrices(torch.ones(1, outputs, width, dtype=torch.bfloat16))
    with pytest.raises(CudaError, match="grouped_products failed"):
        make_emulated().multiply_grouped(torch.ones(2, width).bfloat16(), of_them, torch.tensor([2]).int())


def test_rows_that_are_not_aligned_are_refused() -> None:
    x = torch.zeros(33, dtype=torch.bfloat16)[1:].view(2, 16)
    with pytest.raises(ValueError, match="aligned to 16 bytes"):
        make_emulated().round_rows(x, 16, 2)


@pytest.mark.parametrize("form", ["int8", "float8", "float8, rows"])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("tokens", [0, 1, 17, 64, 65])
def test_few_rows_of_codes_are_one_launch(tokens: int, dtype: torch.dtype, form: str) -> None:
    """Up to 64; more are multiplied by torch, by floats that are made of the codes. No input is rounded."""
    kernels, generator = make_emulated(), torch.Generator().manual_seed(tokens)
    if form == "int8":
        layer = kernels.pack_linear(torch.randn(136, 256, generator=generator).to(dtype), None, "int8")
        numbers = layer.data[0].values.double() * layer.data[0].scale.double()[:, None]
    else:
        layer = kernels.pack_linear(random_weight(form, 136, 256, dtype), None)
        numbers = layer.data[0].dequantise(torch.float64)
    x = torch.randn(tokens, 256, generator=generator).to(dtype)
    with Operations() as operations:
        out = kernels.linear(x, layer)
        wide = kernels.linear(x, layer, torch.float32)
    assert (out.dtype, wide.dtype) == (dtype, torch.float32)
    assert (operations.calls == 0) == (tokens <= 64)
    assert kernels.counters.calls.get("own_grouped_products", 0) == 2 * (tokens <= 64)
    if tokens:
        exact = x.double() @ numbers.T
        assert relative_error(out, exact) <= LIMITS[dtype] / 2
        assert relative_error(wide, exact) <= LIMITS[torch.float32]
        with_bias = replace(layer, data=(layer.data[0], torch.randn(136, generator=generator).to(dtype)))
        out = kernels.linear(x, with_bias)
        assert relative_error(out, exact + with_bias.data[1].double()) <= LIMITS[dtype] / 2


@pytest.mark.parametrize("tokens", [5, 70])
def test_gated_layers_over_codes(tokens: int) -> None:
    kernels, weight = make_emulated(), random_weight("float8", 128, 256, torch.bfloat16)
    layer = kernels.pack_gated_linear(weight, None, "silu")
    x = torch.randn(tokens, 256).bfloat16()
    gate, up = (x.double() @ weight.dequantise(torch.float64).T).chunk(2, dim=-1)
    out = kernels.gated_linear(x, layer)
    assert out.dtype == torch.bfloat16
    assert relative_error(out, torch.nn.functional.silu(gate) * up) <= LIMITS[torch.bfloat16] / 2
