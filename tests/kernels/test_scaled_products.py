"""Products of fp8 weights as they are stored: numbers, layouts, trials, and which weights they are for.

Torch's CPU build multiplies e4m3 with a scale for each row, which is what these tests run. For scales in groups it
has nothing; there a stand-in computes in float64 what torch's own description of the GPU's operation accepts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from gpu_errors import LIMITS, relative_error
from gpu_layers import check_float8, check_float8_rounding
from kernels.cuda_emulated import CXX
from kernels.emulated_gpu import EmulatedGpu
from kernels.emulated_graphs import EmulatedGraphs
from kernels.grouped_cases import random_weight
from seeds import seeds
from structlog.testing import capture_logs
from torch import Tensor
from torch.nn.functional import ScalingType

from trunkline.kernels import scaled_products
from trunkline.kernels.float8 import float8
from trunkline.kernels.grouped import GroupedWeight, linear_grouped
from trunkline.kernels.native import NativeLibraryError
from trunkline.kernels.ops import RowAddend
from trunkline.kernels.scaled_products import (
    FLOATS,
    VARIABLE,
    ScaledProducts,
    float8_rows,
    linear_float8,
    why_not,
    widened,
)

needs_emulation = pytest.mark.skipif(CXX is None, reason="no C++ compiler for the emulation")
HALF: Final = (torch.bfloat16, torch.float16)
ROWS, GROUPS = "float8, rows", "float8"


def made(kind: str, out: int = 144, width: int = 256, dtype: torch.dtype = torch.bfloat16) -> GroupedWeight:
    return replace(random_weight(kind, out, width, dtype), float8_inputs=True)


def exact(x: Tensor, weight: GroupedWeight) -> Tensor:
    """The product of the rounded rows."""
    return widened(float8_rows(x, weight.group)) @ weight.dequantise(torch.float64).T


def described(
    a: Tensor, b: Tensor, factor: Tensor, by: ScalingType, scale: Tensor, other: Any, **given: Any
) -> Tensor:
    """What torch's operation for GPUs gives, if its own description of it takes these arguments."""
    on_gpu = (
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in (a, b, factor, scale)
    )
    first, second, third, fourth = on_gpu
    F.scaled_mm(first, second, third, by, fourth, other, **given)
    assert by == other == ScalingType.BlockWise1x128
    assert factor.stride() == (1, len(factor))
    assert len(factor) % 4 == 0
    left, right = (
        x.double().view(len(x), -1, 128) * each.double()[..., None] for x, each in ((a, factor), (b.T, scale))
    )
    return (left.flatten(1) @ right.flatten(1).T).to(given["output_dtype"])


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_mm", stand_in := Standing(F.scaled_mm))
    monkeypatch.setattr(scaled_products, "capability_of", lambda device: (9, 0))
    assert stand_in.called == 0


class Standing:
    """Takes products of scales in groups, and leaves the others to torch."""

    def __init__(self, real: Callable[..., Tensor]) -> None:
        self.real, self.called = real, 0

    def __call__(self, *given: Any, **named: Any) -> Tensor:
        if given[0].device.type == "meta" or given[3] == ScalingType.RowWise:
            return self.real(*given, **named)
        self.called += 1
        return described(*given, **named)


@pytest.mark.parametrize("group", [128, 384])
@pytest.mark.parametrize("seed", seeds(2))
def test_rows_are_rounded_to_the_nearest_code(seed: int, group: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(9, 384, generator=generator) * 2.0 ** torch.randint(-40, 40, (9, 1), generator=generator)
    x[3] = 0.0
    rows = float8_rows(x, group)
    assert (rows.codes.dtype, rows.codes.shape, rows.factor.shape) == (
        torch.float8_e4m3fn,
        x.shape,
        (9, 384 // group),
    )
    spread = rows.factor.repeat_interleave(group, dim=1).double()
    # Half of the last place: of four bits, or of the smallest number.
    allowed = torch.maximum(x.double().abs() / 16, spread * 2.0**-10) * (1 + 1e-6)
    assert ((widened(rows) - x.double()).abs() <= allowed).all()
    largest = rows.codes.float().view(9, -1, group).abs().amax(dim=-1)
    assert largest[[0, 1, 2, 4, 5, 6, 7, 8]].eq(448).all()
    assert widened(rows)[3].eq(0).all()
    assert float8_rows(x[:0], group).codes.shape == (0, 384)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("tokens", [0, 1, 3, 33])
@needs_emulation
def test_layers_give_the_product_of_rounded_rows(tokens: int, dtype: torch.dtype) -> None:
    kernels, weight = EmulatedGpu().kernels(), made(ROWS, dtype=dtype)
    x, bias = torch.randn(tokens, 256).to(dtype), torch.randn(144).to(dtype)
    out = kernels.linear(x, kernels.pack_linear(weight, bias))
    assert (out.dtype, out.shape) == (dtype, (tokens, 144))
    expected = exact(x, weight) + bias.double()
    assert relative_error(out, expected) <= LIMITS[dtype]
    assert relative_error(out, x.double() @ weight.dequantise(torch.float64).T + bias.double()) <= 0.05
    gated = kernels.gated_linear(x, kernels.pack_gated_linear(weight, None, "silu"))
    gate, up = exact(x, weight).chunk(2, dim=-1)
    assert relative_error(gated, F.silu(gate) * up) <= 2 * LIMITS[dtype]
    if tokens:
        addend = RowAddend(torch.tensor([tokens - 1]), torch.full((1, 144), 2.0))
        added = kernels.linear(x, kernels.pack_linear(weight, None), addend=addend)
        expected = exact(x, weight)
        expected[-1] += 2
        assert relative_error(added, expected) <= LIMITS[dtype]


@needs_emulation
def test_a_wider_result_is_that_of_the_rows_as_they_are() -> None:
    kernels, weight = EmulatedGpu().kernels(), made(ROWS)
    x = torch.randn(5, 256).bfloat16()
    out = kernels.linear(x, kernels.pack_linear(weight, None), torch.float32)
    assert relative_error(out, x.double() @ weight.dequantise(torch.float64).T) <= LIMITS[torch.float32]


@pytest.mark.parametrize("tokens", [1, 3, 4, 33])
def test_groups_are_given_as_torch_describes_them(tokens: int, hopper: None) -> None:
    for width in (256, 640):
        weight = ScaledProducts().stored(made(GROUPS, width=width), "")
        assert isinstance(weight, GroupedWeight)
        assert weight.float8_inputs
        x = torch.randn(tokens, width).bfloat16()
        out = ScaledProducts().linear(x, weight, None)
        assert (out.dtype, out.shape) == (torch.bfloat16, (tokens, 144))
        assert relative_error(out, exact(x, weight)) <= LIMITS[torch.bfloat16]


def test_a_row_without_numbers_spoils_no_other() -> None:
    weight = made(ROWS)
    x = torch.randn(4, 256).bfloat16()
    expected = linear_float8(x, weight, None, float8_rows)
    x[1, 7], x[2, 9] = float("nan"), float("inf")
    out = linear_float8(x, weight, None, float8_rows)
    assert out[1:3].isnan().all()
    assert torch.equal(out[[0, 3]], expected[[0, 3]])


@needs_emulation
def test_a_graph_takes_other_rows() -> None:
    """Nothing is read on the host."""
    kernels, weight = EmulatedGpu().kernels(), made(ROWS)
    layer = kernels.pack_linear(weight, None)
    x, out = torch.randn(6, 256).bfloat16(), torch.empty(6, 144, dtype=torch.bfloat16)

    def step() -> None:
        out.copy_(kernels.linear(x, layer))

    with torch.inference_mode():
        replay = EmulatedGraphs(kernels).capture(step)
    for _ in range(3):
        x.copy_(torch.randn(6, 256))
        replay.replay()
        assert relative_error(out, exact(x, weight)) <= LIMITS[torch.bfloat16]


REFUSED: Final = [
    (made(ROWS, dtype=torch.float32), (9, 0), "torch.float32"),
    (made(ROWS, out=24), (9, 0), "no multiples of 16"),
    (
        float8(torch.ones(16, 96).to(torch.float8_e4m3fn), torch.ones(16, 2), torch.bfloat16),
        (9, 0),
        "for 48 inputs",
    ),
    (made(ROWS), (8, 6), "compute capability 8.6"),
    (made(GROUPS), (8, 9), "9.x"),
    (made(GROUPS), (10, 0), "9.x"),
    (made(GROUPS), None, "9.x"),
]


@pytest.mark.parametrize(("weight", "capability", "reason"), REFUSED)
def test_what_has_no_product(weight: GroupedWeight, capability: tuple[int, int] | None, reason: str) -> None:
    assert reason in why_not(weight, capability)


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0), None])
def test_what_has_one(capability: tuple[int, int] | None) -> None:
    assert why_not(made(ROWS), capability) == ""
    if capability == (9, 0):
        assert why_not(made(GROUPS), capability) == ""


@pytest.mark.parametrize("fault", ["wrong", "fails", "not a number", "not meant", "asked"])
def test_what_a_trial_refuses_becomes_floats(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is that of the rows as they are, and the log says once what the reason is."""
    real, weight = F.scaled_mm, made(ROWS)
    if fault == "not meant":
        weight = replace(weight, float8_inputs=False)
    if fault == "asked":
        monkeypatch.setenv(VARIABLE, FLOATS)

    def faulty(*given: Any, **named: Any) -> Tensor:
        if fault == "fails":
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nat line 7")
        out = real(*given, **named)
        return out.mul_(1.02) if fault == "wrong" else out.fill_(float("nan"))

    monkeypatch.setattr(F, "scaled_mm", faulty)
    products = ScaledProducts()
    with capture_logs() as logs:
        stored = [products.stored(weight, "") for _ in range(2)][1]
    assert isinstance(stored, GroupedWeight)
    assert not stored.float8_inputs
    assert [each["log_level"] for each in logs] == ["warning"]
    reasons = {
        "fails": "of 1 rows fails: CUBLAS_STATUS_NOT_SUPPORTED",
        "not meant": "checkpoint",
        "asked": VARIABLE,
    }
    assert reasons.get(fault, "of 1 rows is wrong by") in logs[0]["reason"]
    assert "line 7" not in logs[0]["reason"]
    x = torch.randn(3, 256).bfloat16()
    assert not products.takes(x, stored, x.dtype)
    out = linear_grouped(x, stored, None)
    assert relative_error(out, x.double() @ weight.dequantise(torch.float64).T) <= LIMITS[torch.float32]


def test_the_log_says_what_is_multiplied_as_it_is() -> None:
    products = ScaledProducts()
    with capture_logs() as logs:
        for weight in (made(ROWS), made(ROWS), made(ROWS, width=512)):
            products.stored(weight, "")
    assert [(each["log_level"], each["inputs"]) for each in logs] == [("info", 256), ("info", 512)]


def test_another_value_of_the_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "int8")
    with pytest.raises(NativeLibraryError, match="'int8'; allowed: floats"):
        ScaledProducts().stored(made(ROWS), "")


def test_inputs_are_floats_only_with_floats() -> None:
    with pytest.raises(ValueError, match="floats have 8 bits"):
        replace(random_weight("8 bits, rows", 16, 256), float8_inputs=True)


@needs_emulation
def test_the_kit_s_check_takes_part() -> None:
    for dtype in HALF:
        rounded = dict(check_float8_rounding(EmulatedGpu(), 1, dtype))
        assert rounded == {"round_float8_by_row": 0.0, "round_float8_by_group": 0.0}
        ((name, error),) = check_float8(EmulatedGpu(), 1, dtype)
        assert name == "float8_by_row"
        assert error <= LIMITS[dtype]
    for check in (check_float8, check_float8_rounding):
        assert list(check(EmulatedGpu(), 1, torch.float32)) == []
