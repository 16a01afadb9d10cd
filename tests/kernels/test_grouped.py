"""Weights in groups: their form, what files' blocks become, and layers over them."""

from __future__ import annotations

import random
import struct
from dataclasses import replace

import pytest
import torch
from kernels.dense_cases import ACTIVATIONS, activated
from kernels.grouped_cases import INTEGERS, KINDS, random_weight
from kernels.implementations import CPU, DTYPES, NATIVE, make_kernels
from kernels.pairwise import pairwise
from seeds import seeds
from torch import Tensor

from trunkline.kernels.gguf_blocks import BLOCKS, from_blocks
from trunkline.kernels.grouped import GroupedWeight, linear_grouped, rounded_inputs, stack
from trunkline.kernels.ops import Activation, Kernels


def half(block: bytes, at: int) -> float:
    return float(struct.unpack_from("<e", block, at)[0])


def six_bits(block: bytes, group: int) -> tuple[int, int]:
    """Scale and offset of a group of Q4_K and Q5_K, bit by bit."""
    packed = block[4:16]
    if group < 4:
        return packed[group] & 63, packed[group + 4] & 63
    low, high = packed[group + 4], (packed[group - 4] >> 6, packed[group] >> 6)
    return (low & 15) | (high[0] << 4), (low >> 4) | (high[1] << 4)


def weights_of(kind: str, block: bytes) -> list[float]:
    """The weights of a block, one after the other, as the format's description has them."""
    if kind == "Q8_0":
        return [half(block, 0) * value for value in struct.unpack_from("<32b", block, 2)]
    if kind in ("Q4_0", "Q4_1"):
        start = 2 if kind == "Q4_0" else 4
        codes = [byte & 15 for byte in block[start:]] + [byte >> 4 for byte in block[start:]]
        if kind == "Q4_0":
            return [half(block, 0) * (code - 8) for code in codes]
        return [half(block, 0) * code + half(block, 2) for code in codes]
    if kind in ("Q5_0", "Q5_1"):
        start = 2 if kind == "Q5_0" else 4
        (high,) = struct.unpack_from("<I", block, start)
        codes = [byte & 15 for byte in block[start + 4 :]] + [byte >> 4 for byte in block[start + 4 :]]
        codes = [code | (high >> place & 1) << 4 for place, code in enumerate(codes)]
        if kind == "Q5_0":
            return [half(block, 0) * (code - 16) for code in codes]
        return [half(block, 0) * code + half(block, 2) for code in codes]
    if kind == "MXFP4":  # a power of two, then codes of a sign, two bits of exponent and one of fraction
        codes = [byte & 15 for byte in block[1:]] + [byte >> 4 for byte in block[1:]]
        values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
        return [2.0 ** (block[0] - 127) * values[code & 7] * (-1 if code & 8 else 1) for code in codes]
    found = []
    for i in range(256):
        if kind == "Q6_K":
            part, place = divmod(i, 128)
            quarter, column = divmod(place, 32)
            low = block[64 * part + column + 32 * (quarter % 2)] >> (4 * (quarter // 2)) & 15
            high = block[128 + 32 * part + column] >> (2 * quarter) & 3
            scale = struct.unpack_from("<b", block, 192 + i // 16)[0]
            found.append(half(block, 208) * scale * ((low | high << 4) - 32))
            continue
        group, column = divmod(i, 32)
        scale, offset = six_bits(block, group)
        codes_at = 16 if kind == "Q4_K" else 48
        code = block[codes_at + 32 * (group // 2) + column] >> (4 * (group % 2)) & 15
        if kind == "Q5_K":
            code |= (block[16 + column] >> group & 1) << 4
        found.append(half(block, 0) * scale * code - half(block, 2) * offset)
    return found


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("seed", seeds(1))
def test_blocks_of_files(kind: str, seed: int) -> None:
    """Every number that a block can hold is read to the rounding of float32; bytes are random, scales finite."""
    chance = random.Random(seed)
    rows, blocks = 3, 2
    raw = [[bytearray(chance.randbytes(BLOCKS[kind].bytes)) for _ in range(blocks)] for _ in range(rows)]
    halves = {"Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,), "MXFP4": ()}
    for block in (block for row in raw for block in row):
        for at in halves.get(kind, (0, 2)):
            struct.pack_into("<e", block, at, chance.uniform(-2, 2))
        if kind == "MXFP4":
            block[0] = chance.randrange(100, 150)
    joined = torch.tensor([list(b"".join(row)) for row in raw], dtype=torch.uint8)
    weight = from_blocks(kind, joined, torch.bfloat16)
    assert weight.shape == (rows, blocks * BLOCKS[kind].values)
    assert weight.dtype == torch.bfloat16
    expected = torch.tensor([[w for block in row for w in weights_of(kind, bytes(block))] for row in raw])
    torch.testing.assert_close(weight.dequantise(), expected, rtol=1e-6, atol=1e-5)


def test_blocks_that_are_none_are_refused() -> None:
    raw = torch.zeros(2, 34, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"IQ2_XS; there are Q8_0, .*Q6_K"):
        from_blocks("IQ2_XS", raw, torch.float32)
    for broken in (raw[:, :33], raw.float(), raw[0], raw[:, :0]):
        with pytest.raises(ValueError, match="whole blocks of 34 bytes"):
            from_blocks("Q8_0", broken, torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_slices_and_stacks_are_of_the_same_numbers(kind: str) -> None:
    weight = random_weight(kind, 20, 512)
    whole = weight.dequantise()
    assert torch.equal(weight.rows(slice(3, 9)).dequantise(), whole[3:9])
    order = torch.tensor([4, 0, 19])
    assert torch.equal(weight.rows(order).dequantise(), whole[order])
    step = weight.group
    for first, stop in ((0, step), (512 - step, 512), (0, 512), (256, 512)):
        if first % step == 0:
            assert torch.equal(weight.columns(slice(first, stop)).dequantise(), whole[:, first:stop])
    with pytest.raises(ValueError, match="whole groups"):
        weight.columns(slice(0, step - 1))
    for other in KINDS:
        beside = random_weight(other, 7, 512)
        if beside.group <= 32 and weight.group <= 32:
            joined = stack([weight, beside, weight])
            expected = torch.cat([whole, beside.dequantise(), whole])
            torch.testing.assert_close(joined.dequantise(), expected, rtol=1e-6, atol=1e-6)


def test_stacks_of_k_quants_keep_two_levels_of_scales() -> None:
    """Files of mixed types have queries and keys in Q4_K beside values in Q6_K."""
    queries, values = random_weight("Q4_K", 20, 512), random_weight("Q6_K", 7, 512)
    joined = stack([queries, values])
    assert joined.sub_scale is not None
    assert joined.nbytes <= joined.shape.numel() * 9.25 / 8
    assert (joined.bits, joined.zero) == (6, 32)
    torch.testing.assert_close(joined.dequantise(), torch.cat([queries.dequantise(), values.dequantise()]))
    rounded = stack([replace(each, int8_inputs=True) for each in (values, queries)])
    assert rounded.int8_inputs


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_that_are_added_are_zeros(kind: str) -> None:
    weight = random_weight(kind, 5, 512)
    padded = weight.padded(9)
    assert torch.equal(padded.dequantise()[:5], weight.dequantise())
    assert not bool(padded.dequantise()[5:].any())
    assert weight.padded(5).shape == weight.shape


def test_parts_that_do_not_fit_are_refused() -> None:
    good = random_weight("Q4_K", 4, 512)
    assert good.sub_scale is not None
    assert good.offset is not None
    broken: list[dict[str, object]] = [
        {"codes": good.codes.int()},
        {"bits": 5},
        {"group": 24},
        {"group": 0},
        {"group": 384},
        {"scale": good.scale.double()},
        {"scale": good.scale[:2]},
        {"sub_scale": None},
        {"sub_scale": good.sub_scale[:, 1:]},
        {"sub_offset": None},
        {"offset": good.offset.float()},
        {"zero": 256},
        {"zero": -1},
        {"table": (1, 2, 3)},
        {"table": (300,) * 16},
        {"table": (1,) * 16, "bits": 8},
    ]
    for change in broken:
        with pytest.raises(ValueError, match=r".+"):
            replace(good, **change)  # type: ignore[arg-type]


def test_inputs_are_rounded_to_the_nearest_integers() -> None:
    x = torch.randn(5, 80) * 10.0 ** torch.randint(-8, 8, (5, 1))
    x[3] = 0.0
    x[4, 40] = float("inf")
    integers, factor = rounded_inputs(x)
    assert factor.shape == (5, 3)
    assert factor[4].isnan().tolist() == [False, True, False]
    near = integers * factor.repeat_interleave(32, dim=1)[:, :80]
    error, bound = (near - x).abs(), 0.501 * factor.repeat_interleave(32, dim=1)[:, :80]
    assert bool((error[:4] <= bound[:4]).all())
    assert int(integers[:3].abs().max()) == 127


@pytest.mark.parametrize("kind", INTEGERS)
def test_rounding_of_inputs_costs_little(kind: str) -> None:
    """Of sums of 512 products it is below a hundredth of their size."""
    weight = random_weight(kind, 64, 512)
    x = torch.randn(16, 512)
    exact = linear_grouped(x, weight, None)
    torch.testing.assert_close(exact, x @ weight.dequantise().T, rtol=1e-5, atol=1e-4)
    near = linear_grouped(x, replace(weight, int8_inputs=True), None)
    assert 0 < float((near - exact).norm() / exact.norm()) < 0.01


def test_a_quantised_weight_is_not_quantised_again(kernels: Kernels) -> None:
    weight = random_weight("Q8_0", 16, 64)
    with pytest.raises(ValueError, match="8 bits already"):
        kernels.pack_linear(weight, None, "int8")


def oracle(x: Tensor, weight: GroupedWeight, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The layer in float64, and a bound of what float32 sums and their order may change."""
    wide = weight.dequantise(torch.float64)
    if weight.int8_inputs:
        integers, factor = rounded_inputs(x)
        rounded = (integers * factor.repeat_interleave(32, dim=1)[:, : x.shape[1]]).double()
    else:
        rounded = x.double()
    scale, offset = weight.group_scales(torch.float64)
    each = (scale.abs() * 448).repeat_interleave(weight.group, dim=1)
    if offset is not None:
        each = each + offset.abs().repeat_interleave(weight.group, dim=1)
    y = rounded @ wide.T
    bound = 1e-6 * (rounded.abs() @ each.T) + 1e-6
    return (y if bias is None else y + bias.double()), bound


def close(y: Tensor, expected: Tensor, bound: Tensor) -> bool:
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}[y.dtype]
    return bool(((y.double() - expected).abs() <= bound + rounding * expected.abs()).all())


SHAPES = ((64, 256), (100, 512), (17, 256), (200, 768))
TOKENS = (1, 2, 3, 4, 6, 7, 13, 97)


@pairwise(
    implementation=CPU, kind=KINDS, int8_inputs=(False, True), dtype=DTYPES, threads=(1, 3), biased=(True, False)
)
def test_linear(
    implementation: str, kind: str, int8_inputs: bool, dtype: torch.dtype, threads: int, biased: bool
) -> None:
    kernels = make_kernels(implementation, threads)
    for rows, width in SHAPES:
        weight = random_weight(kind, rows, width, dtype, int8_inputs=int8_inputs)
        bias = torch.randn(rows).to(dtype) if biased else None
        layer = kernels.pack_linear(weight, bias)
        assert (layer.out_features, layer.in_features) == (rows, width)
        for tokens in TOKENS[:: 1 if rows == 100 else 3]:
            x = torch.randn(tokens, width).to(dtype)
            expected, bound = oracle(x, weight, bias)
            for out_dtype in (None, torch.float32):
                out = kernels.linear(x, layer, out_dtype)
                assert out.dtype == (out_dtype or dtype)
                assert close(out, expected, bound)


@pairwise(implementation=CPU, kind=KINDS, int8_inputs=(False, True), dtype=DTYPES, activation=ACTIVATIONS)
def test_gated_linear(
    implementation: str, kind: str, int8_inputs: bool, dtype: torch.dtype, activation: Activation
) -> None:
    kernels = make_kernels(implementation)
    for rows, width in ((100, 256), (34, 512)):
        weight = random_weight(kind, rows, width, dtype, int8_inputs=int8_inputs)
        bias = torch.randn(rows).to(dtype)
        layer = kernels.pack_gated_linear(weight, bias, activation)
        for tokens in (1, 5, 13):
            x = torch.randn(tokens, width).to(dtype)
            gate_up, bound = oracle(x, weight, bias)
            out = kernels.gated_linear(x, layer)
            gate, up = gate_up.chunk(2, dim=1)
            gate_bound, up_bound = bound.chunk(2, dim=1)
            spread = 1.2 * gate_bound * up.abs() + up_bound * gate.abs() + gate_bound + up_bound
            assert close(out, activated(gate_up, activation), spread)


@pairwise(level=NATIVE, kind=KINDS, int8_inputs=(False, True), dtype=DTYPES)
def test_a_row_is_the_same_bits_in_any_batch(level: str, kind: str, int8_inputs: bool, dtype: torch.dtype) -> None:
    """Though few rows read codes where they lie and many unpack them once; any number of threads."""
    x = torch.randn(130, 768).to(dtype)
    weight = random_weight(kind, 200, 768, dtype, int8_inputs=int8_inputs)
    whole: list[Tensor] = []
    for threads in (1, 3):
        kernels = make_kernels(level, threads)
        layer, gated = kernels.pack_linear(weight, None), kernels.pack_gated_linear(weight, None, "silu")
        for rows, first in ((130, 0), *((n, start) for n in (1, 2, 4, 6, 7, 12, 31, 97) for start in (0, 30))):
            part = x[first : first + rows]
            found = [kernels.linear(part, layer, torch.float32), kernels.gated_linear(part, gated)]
            whole = whole or found
            for y, expected in zip(found, whole, strict=True):
                assert torch.equal(y, expected[first : first + rows])


@pairwise(level=NATIVE, kind=("Q4_0", "Q4_K", "Q5_K", "Q6_K"), int8_inputs=(False, True))
def test_codes_that_take_more_bits_give_the_same_results(level: str, kind: str, int8_inputs: bool) -> None:
    kernels = make_kernels(level)
    weight = random_weight(kind, 100, 512, torch.bfloat16, int8_inputs=int8_inputs)
    layer, wide = (kernels.pack_linear(each, None) for each in (weight, replace(weight, bits=8)))
    assert layer.packed_bytes < wide.packed_bytes
    for tokens in TOKENS:
        x = torch.randn(tokens, 512).bfloat16()
        assert torch.equal(kernels.linear(x, layer, torch.float32), kernels.linear(x, wide, torch.float32))


@pairwise(implementation=CPU, kind=KINDS, int8_inputs=(False, True))
def test_a_broken_token_stays_alone(implementation: str, kind: str, int8_inputs: bool) -> None:
    kernels = make_kernels(implementation)
    layer = kernels.pack_linear(random_weight(kind, 40, 256, int8_inputs=int8_inputs), None)
    for wrong in (float("nan"), float("inf")):
        x = torch.randn(9, 256)
        x[1::2, 70] = wrong
        for rows in (9, 3):
            out = kernels.linear(x[:rows], layer)
            assert bool(out[::2].isfinite().all())
            assert not bool(out[1::2].isfinite().any())
    zeros = kernels.linear(torch.zeros(2, 256), layer)
    assert not bool(zeros.any())
    tiny = kernels.linear(torch.full((1, 256), 1e-42), layer)
    assert bool((tiny.abs() < 1e-30).all())


@pairwise(level=NATIVE, kind=KINDS)
def test_a_packed_layer_is_as_small_as_its_codes(level: str, kind: str) -> None:
    bits = {
        "Q8_0": 8.5,
        "Q4_0": 4.5,
        "Q4_K": 4.625,
        "Q5_K": 6.625,
        "Q6_K": 6.5625,
        "4 bits, 128": 4.5,
        "table": 5.0,
    }
    bits |= {"float8": 8.25, "float8, rows": 8.0625}
    weight = random_weight(kind, 1024, 512)
    packed = make_kernels(level).pack_linear(weight, None)
    assert packed.packed_bytes <= 1024 * 512 * bits.get(kind, 10.0) / 8
