"""Dense CPU ops at every level of this machine: linear layers, gated ones and RMS norms against float64."""

from __future__ import annotations

import gc
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trunkline.kernels import native
from trunkline.kernels.cpu_dense import DenseOps
from trunkline.kernels.ops import Activation, KernelCounters, PackedLinear
from trunkline.kernels.reference import ReferenceKernels

pytestmark = [
    pytest.mark.sanitized,
    pytest.mark.skipif(not native.isa_levels(), reason="the compiled CPU kernels are not installed"),
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Half of the last place, relative."""
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh")
ROWS = (1, 2, 3, 4, 5, 6, 7, 12, 13, 32, 33, 97, 200)
"""Around the sizes of tiles, blocks and units."""
FEATURES = ((64, 64), (768, 200), (33, 7), (1, 1), (300, 129), (257, 192), (16, 16), (130, 1000))
"""In and out: odd sizes, remainder panels of every width, sums longer than a block."""


class Level(NamedTuple):
    """The ops of one level."""

    ops: DenseOps
    counters: KernelCounters
    threads: int


@pytest.fixture(params=[(isa, threads) for isa in native.isa_levels() for threads in (1, 3)], ids=str)
def level(request: pytest.FixtureRequest) -> Level:
    isa, threads = request.param
    module: Any = native.library()
    counters = KernelCounters()
    return Level(DenseOps(module, native.NativeContext(isa, threads), counters), counters, threads)


def generator(seed: int) -> torch.Generator:
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


def random_layer(rng: torch.Generator, out: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    weight = torch.randn(out, width, generator=rng) * width**-0.5
    return weight.to(dtype), torch.randn(out, generator=rng).to(dtype)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


def activated(name: Activation, gate: Tensor) -> Tensor:
    if name == "silu":
        return F.silu(gate)
    return F.gelu(gate, approximate="tanh" if name == "gelu_tanh" else "none")


def assert_within(got: Tensor, want: Tensor, scale: Tensor, width: int) -> None:
    """`scale`: sums of magnitudes, which the error of a float32 sum is proportional to."""
    assert not got.isnan().any()
    sums = scale * (width * 2**-24)
    error = (got.double() - want).abs()
    allowed = want.abs() * ROUNDING[got.dtype] * 1.01 + sums + 1e-7
    assert (error <= allowed).all(), f"error {float((error - allowed).max())} over the allowed one"


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear(level: Level, dtype: torch.dtype) -> None:
    rng = generator(1)
    for width, out in FEATURES:
        weight, bias = random_layer(rng, out, width, dtype)
        plain, biased = level.ops.pack_linear(weight, None), level.ops.pack_linear(weight, bias)
        assert (biased.out_features, biased.in_features) == (out, width)
        for rows in ROWS:
            x = torch.randn(rows, width, generator=rng).to(dtype)
            scale = F.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
            y = level.ops.linear(x, biased)
            assert y.dtype == dtype
            assert_within(y, exact(x, weight, bias), scale, width)
            assert_within(level.ops.linear(x, plain), exact(x, weight, None), scale, width)
            wide = level.ops.linear(x, biased, torch.float32)
            assert wide.dtype == torch.float32
            assert_within(wide, exact(x, weight, bias), scale, width)
    assert level.counters.calls["linear"] == 3 * len(ROWS) * len(FEATURES)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_linear(level: Level, dtype: torch.dtype, activation: Activation) -> None:
    rng = generator(2)
    for (width, out), rows in zip(FEATURES, (1, 6, 7, 40, 97, 13, 2, 5), strict=True):
        weight, bias = random_layer(rng, 2 * out, width, dtype)
        x = torch.randn(rows, width, generator=rng).to(dtype)
        for used in (None, bias):
            layer = level.ops.pack_gated_linear(weight, used, activation)
            assert (layer.out_features, layer.in_features) == (out, width)
            gate, up = exact(x, weight, used).chunk(2, dim=1)
            y = level.ops.gated_linear(x, layer)
            assert y.dtype == dtype
            scale = F.linear(x.double().abs(), weight.double().abs(), bias.double().abs()).chunk(2, dim=1)
            # Of a product of two sums; no activation is steeper than 1.13.
            spread = 1.13 * scale[0] * up.abs() + gate.abs() * scale[1]
            assert_within(y, activated(activation, gate) * up, spread + scale[0] * scale[1] * 1e-6, width + 8)
    assert level.counters.calls["gated_linear"] == 2 * len(FEATURES)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_over_their_range(level: Level, activation: Activation) -> None:
    """The gate is the input itself, the up projection one: the activation function is what is left."""
    values = torch.cat((torch.linspace(-12, 12, 4001), torch.tensor([-1e30, -200.0, -90.0, 90.0, 1e30, 0.0])))
    layer = level.ops.pack_gated_linear(torch.tensor([[1.0], [0.0]]), torch.tensor([0.0, 1.0]), activation)
    y = level.ops.gated_linear(values[:, None], layer)[:, 0]
    want = activated(activation, values.double())
    error = (y.double() - want).abs()
    assert (error <= 1.5e-7 + 3e-7 * want.abs()).all(), float(error.max())
    nan = level.ops.gated_linear(torch.tensor([[float("nan")]]), layer)
    assert nan.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_batch(level: Level, dtype: torch.dtype) -> None:
    rng = generator(3)
    for width, out in ((768, 200), (301, 129)):
        weight, bias = random_layer(rng, 2 * out, width, dtype)
        x = torch.randn(230, width, generator=rng).to(dtype)
        layer, gated = level.ops.pack_linear(weight, bias), level.ops.pack_gated_linear(weight, bias, "silu")
        y, z = level.ops.linear(x, layer, torch.float32), level.ops.gated_linear(x, gated)
        norm_weight = torch.ones(width, dtype=dtype)
        normed = level.ops.rms_norm(x, norm_weight, 1e-6)
        for rows in (1, 2, 5, 7, 31, 96, 100):
            for first in (0, 130):
                part = x[first : first + rows]
                assert torch.equal(level.ops.linear(part, layer, torch.float32), y[first : first + rows])
                assert torch.equal(level.ops.gated_linear(part, gated), z[first : first + rows])
                assert torch.equal(level.ops.rms_norm(part, norm_weight, 1e-6), normed[first : first + rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_leak_into_each_other(level: Level, dtype: torch.dtype) -> None:
    """With an odd width the padding of a row must not be the next row's first value: 0 * NaN is NaN."""
    rng = generator(4)
    for width in (7, 33, 64):
        weight, _ = random_layer(rng, 20, width, dtype)
        x = torch.randn(9, width, generator=rng).to(dtype)
        x[1::2] = float("nan")
        y = level.ops.linear(x, level.ops.pack_linear(weight, None))
        assert not y[::2].isnan().any()
        assert y[1::2].isnan().all()


def test_converted_rows_are_not_reused_by_the_next_call(level: Level) -> None:
    rng = generator(5)
    weight, _ = random_layer(rng, 64, 64, torch.float16)
    layer = level.ops.pack_linear(weight, None)
    x = torch.randn(4, 64, generator=rng).half()
    first = level.ops.linear(x, layer)
    x.neg_()
    assert torch.equal(level.ops.linear(x, layer), -first)


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_batch(level: Level, dtype: torch.dtype) -> None:
    weight, bias = random_layer(generator(6), 10, 8, dtype)
    x = torch.empty(0, 8, dtype=dtype)
    assert level.ops.linear(x, level.ops.pack_linear(weight, bias)).shape == (0, 10)
    assert level.ops.linear(x, level.ops.pack_linear(weight, bias), torch.float32).dtype == torch.float32
    assert level.ops.gated_linear(x, level.ops.pack_gated_linear(weight, bias, "gelu")).shape == (0, 5)
    assert level.ops.rms_norm(x, torch.ones(8, dtype=dtype), 1e-6).shape == (0, 8)
    assert level.ops.add_rms_norm(x, x.clone(), torch.ones(8, dtype=dtype), 1e-6).shape == (0, 8)


def test_strided_weights_and_inputs(level: Level) -> None:
    """Shards of a tensor-parallel weight are columns or rows of it; an input may be a slice of a wider one."""
    rng = generator(7)
    whole, _ = random_layer(rng, 96, 128, torch.bfloat16)
    wide = torch.randn(5, 128, generator=rng).bfloat16()
    for weight in (whole[:, 32:64], whole[16:48, :32], whole.t()[:40, :32], torch.nn.Parameter(whole[:, :32])):
        x = wide[:, 64:96]
        y = level.ops.linear(x, level.ops.pack_linear(weight, None), torch.float32)
        torch.testing.assert_close(y.double(), exact(x, weight.detach(), None), rtol=1e-5, atol=1e-5)


def test_a_packed_weight_is_a_copy_and_goes_with_its_owner(level: Level) -> None:
    weight, bias = random_layer(generator(8), 32, 32, torch.float32)
    layer = level.ops.pack_linear(weight, bias)
    x = torch.eye(32)
    want = level.ops.linear(x, layer)
    weight.fill_(float("nan"))
    bias.fill_(float("nan"))
    assert torch.equal(level.ops.linear(x, layer), want)
    del layer
    gc.collect()


@pytest.mark.parametrize("float_weight", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norms(level: Level, dtype: torch.dtype, float_weight: bool) -> None:
    rng = generator(9)
    for width in (1, 7, 16, 64, 100, 768, 1030):
        weight = torch.randn(width, generator=rng).to(torch.float32 if float_weight else dtype)
        for shape in ((1, width), (5, width), (3, 4, width), (90, width)):
            x, residual = (torch.randn(shape, generator=rng).mul(3).to(dtype) for _ in range(2))
            kept = x.clone()
            assert_norm(level.ops.rms_norm(x, weight, 1e-5), x, weight)
            total = (residual.float() + x.float()).to(dtype)
            y = level.ops.add_rms_norm(x, residual, weight, 1e-5)
            assert torch.equal(residual, total)
            assert torch.equal(x, kept)
            assert_norm(y, total, weight)
    assert level.counters.calls == {"rms_norm": 28, "add_rms_norm": 28}


def assert_norm(got: Tensor, x: Tensor, weight: Tensor) -> None:
    normal = F.rms_norm(x.double(), (x.shape[-1],), None, 1e-5)
    want = normal * weight.double()
    assert got.dtype == x.dtype
    assert got.shape == x.shape
    # Rounded twice, before and after the weight.
    torch.testing.assert_close(got.double(), want, rtol=2.1 * ROUNDING[x.dtype] + 1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_rounds_like_the_reference(level: Level, dtype: torch.dtype) -> None:
    rng = generator(10)
    x, weight = torch.randn(64, 768, generator=rng).to(dtype), torch.randn(768, generator=rng).to(dtype)
    want = ReferenceKernels().rms_norm(x, weight, 1e-5)
    got = level.ops.rms_norm(x, weight, 1e-5)
    # A sum in another order may cross a rounding boundary now and then.
    different = (got != want).float().mean()
    assert different < (1.0 if dtype == torch.float32 else 0.001)
    torch.testing.assert_close(got, want, rtol=4.2 * ROUNDING[dtype] + 1e-6, atol=1e-6)


def wrong_calls(ops: DenseOps, layer: PackedLinear, gated: PackedLinear) -> list[tuple[str, Any]]:
    x, ones = torch.ones(2, 8), torch.ones(8)
    return [
        (r"x is float32 \[2, 7\].* float32 \[tokens, 8\]", lambda: ops.linear(torch.ones(2, 7), layer)),
        (r"x is bfloat16 \[2, 8\].* float32", lambda: ops.linear(x.bfloat16(), layer)),
        (r"x is float64 \[2, 8\]", lambda: ops.linear(x.double(), layer)),
        (r"x is float32 \[2, 2, 8\]", lambda: ops.linear(torch.ones(2, 2, 8), layer)),
        (r"out is float16 \[2, 6\]", lambda: ops.linear(x, layer, torch.float16)),
        (r"x is float32 \[8\]", lambda: ops.gated_linear(ones, gated)),
        (r"weight is float32 \[4\], x float32 \[2, 8\]", lambda: ops.rms_norm(x, torch.ones(4), 1e-6)),
        (r"weight is bfloat16 \[8\], x float32", lambda: ops.rms_norm(x, ones.bfloat16(), 1e-6)),
        (r"x is int64 \[2, 8\]", lambda: ops.rms_norm(x.long(), ones, 1e-6)),
        (r"residual is float32 \[3, 8\]", lambda: ops.add_rms_norm(x, torch.ones(3, 8), ones, 1e-6)),
        (r"residual must be a contiguous", lambda: ops.add_rms_norm(x, torch.ones(8, 2).t(), ones, 1e-6)),
        (r"weight is int64 \[4, 8\]", lambda: ops.pack_linear(torch.ones(4, 8).long(), None)),
        (r"weight is float32 \[8\]", lambda: ops.pack_linear(ones, None)),
        (r"weight is float32 \[3, 8\].*even", lambda: ops.pack_gated_linear(torch.ones(3, 8), None, "silu")),
        (r"bias is float32 \[5\]; .* \[4\]", lambda: ops.pack_linear(torch.ones(4, 8), torch.ones(5))),
    ]


def test_wrong_calls_name_what_was_given(level: Level) -> None:
    layer = level.ops.pack_linear(torch.ones(6, 8), None)
    gated = level.ops.pack_gated_linear(torch.ones(6, 8), None, "silu")
    for message, call in wrong_calls(level.ops, layer, gated):
        with pytest.raises(ValueError, match=message):
            call()


def test_layers_share_memory_without_overlap(level: Level) -> None:
    """Small layers lie side by side, a large one has its own memory; all keep what they were given."""
    rng = generator(11)
    sizes = [(5, 3), (64, 64), (17, 1), (2100, 2100), (3, 5), (1000, 64)]
    weights = [random_layer(rng, out, width, torch.float32)[0] for out, width in sizes]
    layers = [level.ops.pack_linear(weight, None) for weight in weights]
    ranges = []
    for weight, layer in zip(weights, layers, strict=True):
        memory = layer.data.memory
        assert memory.data_ptr() % 64 == 0
        ranges.append((memory.data_ptr(), memory.data_ptr() + memory.numel()))
        x = torch.randn(2, weight.shape[1], generator=rng)
        torch.testing.assert_close(
            level.ops.linear(x, layer).double(), exact(x, weight, None), rtol=1e-4, atol=1e-5
        )
    ranges.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
