"""Mixtures of experts by grouped products: against a dense computation, as a graph, without a wait for the device.

On a CPU torch's own grouped product runs for numbers, with the emulated activation in the middle; for codes of 8
bits, and where torch has none, ours, emulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
from gpu_errors import LIMITS, relative_error
from gpu_layers import FORMS, Mixture, check_experts
from kernels.cuda_emulated import CXX
from kernels.emulated_gpu import EmulatedGpu
from kernels.emulated_graphs import CaptureError, EmulatedGraphs
from seeds import seeds
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trunkline.kernels.experts import has_grouped_products, run_experts
from trunkline.kernels.routing import Routing

pytestmark = pytest.mark.skipif(CXX is None, reason="no C++ compiler for the emulation")

FLOAT: Final = torch.float32
ONE_FOR_ALL: Final = torch.tensor([0.0, 0, 0, 0, 50, 0, 0, 0, 0])
"""A router's bias that sends every token to one expert."""


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """New memory holds NaN, so that rows that nobody has written show."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def run(mixture: Mixture, x: Tensor) -> Tensor:
    with torch.inference_mode():
        out = run_experts(mixture.kernels, mixture.op, x)
    assert (out.dtype, out.shape) == (x.dtype, x.shape)
    return out


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("tokens", [1, 2, 17, 2100])
def test_grouped_products_give_the_dense_sum(tokens: int, seed: int, dtype: torch.dtype) -> None:
    """With few tokens most experts have none; many are summed in several parts."""
    mixture = Mixture.random(EmulatedGpu(), seed, dtype)
    x = mixture.tokens(tokens, seed)
    assert relative_error(run(mixture, x), mixture.exact(x)) <= LIMITS[dtype]
    assert mixture.kernels.counters.calls["grouped_experts"] == 1
    assert "gated_linear" not in mixture.kernels.counters.calls


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 17, 70])
def test_our_grouped_products_give_the_dense_sum(
    tokens: int, dtype: torch.dtype, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trunkline.kernels.experts.has_grouped_products", lambda *_: False)
    mixture = Mixture.random(EmulatedGpu(), tokens, dtype, form=form)
    x = mixture.tokens(tokens, tokens)
    assert relative_error(run(mixture, x), mixture.exact(x)) <= LIMITS[dtype]
    assert mixture.kernels.counters.calls["own_grouped_products"] == 2
    alone = mixture._replace(op=replace(mixture.op, stack=None))
    assert relative_error(run(alone, x), mixture.exact(x)) <= LIMITS[dtype]


@pytest.mark.parametrize(
    "routing",
    [
        Routing(1),
        Routing(9),
        Routing(2, scores="sigmoid", scales_inputs=True, normalised=False),
        Routing(4, factor=2.5, groups=3, groups_per_token=2),
    ],
)
def test_every_way_of_routing(routing: Routing) -> None:
    mixture = Mixture.random(EmulatedGpu(), 3, FLOAT, routing)
    x = mixture.tokens(40)
    assert relative_error(run(mixture, x), mixture.exact(x)) <= LIMITS[FLOAT]


def test_all_tokens_go_to_one_expert() -> None:
    mixture = Mixture.random(EmulatedGpu(), 4, FLOAT, Routing(1), bias=ONE_FOR_ALL)
    x = mixture.tokens(33)
    assert relative_error(run(mixture, x), mixture.exact(x)) <= LIMITS[FLOAT]
    up, down = (weight[4].double() for weight in mixture.weights)
    gate, inner = (x.double() @ up.T).chunk(2, dim=-1)
    only = (torch.nn.functional.silu(gate) * inner) @ down.T
    assert relative_error(run(mixture, x), only) <= LIMITS[FLOAT]


def test_no_token_is_no_work() -> None:
    mixture = Mixture.random(EmulatedGpu(), 4, FLOAT)
    assert run(mixture, mixture.tokens(0)).shape == (0, 64)


@pytest.mark.parametrize("bias", [None, ONE_FOR_ALL])
@pytest.mark.parametrize("dtype", [FLOAT, torch.bfloat16])
def test_ranks_parts_sum_to_the_whole(dtype: torch.dtype, bias: Tensor | None) -> None:
    """Whole experts on each rank, those of other ranks are not computed; with the bias two ranks have no token of
    the first choice."""
    whole = Mixture.random(EmulatedGpu(), 5, dtype, Routing(2), bias=bias)
    x = whole.tokens(50)
    total = torch.zeros_like(x, dtype=torch.float64)
    for here in (range(4), range(4, 7), range(7, 9)):
        part = Mixture.random(EmulatedGpu(), 5, dtype, Routing(2), here, bias)
        out = run(part, x)
        assert relative_error(out, part.exact(x)) <= LIMITS[dtype]
        total += out.double()
    assert relative_error(total, whole.exact(x)) <= LIMITS[dtype]


def test_a_token_without_numbers_spoils_no_other() -> None:
    mixture = Mixture.random(EmulatedGpu(), 6, FLOAT)
    x = mixture.tokens(8)
    expected = run(mixture, x)
    x[3] = float("nan")
    out = run(mixture, x)
    assert out[3].isnan().all()
    others = [0, 1, 2, 4, 5, 6, 7]
    torch.testing.assert_close(out[others], expected[others], rtol=0, atol=2e-6)


class NoWait(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what waits for a GPU: values on the host, and results whose size is a value."""

    REFUSED = (
        "_local_scalar_dense",
        "nonzero",
        "bincount",
        "masked_select",
        "unique",
        "equal",
        "repeat_interleave",
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").partition(".")[0]
        if name.startswith(self.REFUSED):
            raise CaptureError(name)
        return func(*args, **(kwargs or {}))


def one_at_a_time(mixture: Mixture) -> Mixture:
    return mixture._replace(op=replace(mixture.op, stack=None))


KINDS: Final = [(FLOAT, ""), (torch.bfloat16, "fp8 in groups"), (torch.float16, "int8")]


@pytest.mark.parametrize(("dtype", "form"), KINDS)
@pytest.mark.parametrize("here", [range(9), range(2, 6)])
def test_nothing_waits_for_the_device(here: range, dtype: torch.dtype, form: str) -> None:
    """Nor can one expert after the other do without."""
    mixture = Mixture.random(EmulatedGpu(), 7, dtype, here=here, form=form)
    x = mixture.tokens(20)
    with NoWait():  # type: ignore[no-untyped-call]
        run(mixture, x)
    with pytest.raises(CaptureError, match="bincount"), NoWait():  # type: ignore[no-untyped-call]
        run(one_at_a_time(mixture), x)


@pytest.mark.parametrize(("dtype", "form"), KINDS)
@pytest.mark.parametrize("here", [range(9), range(2, 6)])
def test_a_graph_takes_other_tokens(here: range, dtype: torch.dtype, form: str) -> None:
    """Its memory holds NaN before each replay; other experts have tokens than while it was captured."""
    mixture = Mixture.random(EmulatedGpu(), 8, dtype, here=here, form=form)
    x = mixture.tokens(20)
    out = torch.empty_like(x)

    def step() -> None:
        out.copy_(run_experts(mixture.kernels, mixture.op, x))

    with torch.inference_mode():
        replay = EmulatedGraphs(mixture.kernels).capture(step)
    for seed in range(3):
        x.copy_(mixture.tokens(20, 10 + seed))
        replay.replay()
        assert relative_error(out, mixture.exact(x)) <= LIMITS[dtype]


def test_one_expert_after_the_other_gives_the_same() -> None:
    mixture = Mixture.random(EmulatedGpu(), 9, FLOAT)
    x = mixture.tokens(30)
    torch.testing.assert_close(run(one_at_a_time(mixture), x), run(mixture, x), rtol=0, atol=2e-6)


def test_the_kit_s_check_takes_part() -> None:
    for dtype, limit in LIMITS.items():
        found = list(check_experts(EmulatedGpu(), 1, dtype))
        names = ["experts"]
        if dtype != FLOAT:
            names += ["experts_by_own_products", "experts_int8", "experts_fp8", "experts_fp8_in_groups"]
        assert [name for name, _ in found] == [
            each for name in names for each in (name, f"{name}_as_a_graph", f"{name}_as_a_graph")
        ]
        assert max(error for _, error in found) <= limit


@pytest.mark.parametrize("form", FORMS)
def test_a_stack_is_the_experts_only_memory(form: str) -> None:
    stack = Mixture.random(EmulatedGpu(), 1, torch.bfloat16, form=form).op.stack
    assert stack is not None
    for number, layers in enumerate(stack.layers):
        for layer, whole in zip(layers, (stack.up, stack.down), strict=True):
            weight = layer.data[0]
            parts = tuple(weight) if form == "int8" else weight.parts[:2] if form else (weight,)
            own = (whole.weight[number], *(() if whole.scale is None else (whole.scale[number],)))
            assert [part.data_ptr() for part in parts] == [part.data_ptr() for part in own]
            assert layer.data[1:] in ((None, "silu"), (None,))


@pytest.mark.parametrize("kind", ["bias", "int8", "width"])
def test_what_grouped_products_do_not_take_is_not_stacked(kind: str) -> None:
    kernels = EmulatedGpu().kernels()
    hidden = 6 if kind == "width" else 8
    experts = [
        (
            kernels.pack_gated_linear(torch.randn(16, hidden), None, "silu", "int8" if kind == "int8" else ""),
            kernels.pack_linear(torch.randn(hidden, 8), torch.randn(hidden) if kind == "bias" else None),
        )
        for _ in range(2)
    ]
    assert kernels.stack_experts(experts, FLOAT) is None


@pytest.mark.parametrize("form", FORMS)
def test_float32_has_only_torch_s_products(form: str) -> None:
    assert (Mixture.random(EmulatedGpu(), 1, FLOAT, form=form).op.stack is None) == bool(form)


def test_devices_with_grouped_products() -> None:
    """Elsewhere torch's copies numbers of rows to the host, which would end a capture."""
    half, widths = torch.bfloat16, (64, 48)
    assert [has_grouped_products(half, widths, (major, 0)) for major in (8, 9, 10, 12)] == [
        False,
        True,
        True,
        False,
    ]
    assert not has_grouped_products(torch.float16, widths, (9, 0))
    assert not has_grouped_products(FLOAT, widths, (9, 0))
    assert not has_grouped_products(half, (64, 44), (9, 0))
    assert has_grouped_products(FLOAT, (64, 44), None)
    assert not has_grouped_products(torch.float64, widths, None)
