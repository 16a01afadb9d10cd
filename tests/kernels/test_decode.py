"""Decode attention of every implementation against dense attention in float64, over random forests."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
from kernels.attention_cases import CHUNKS, Case, check_decode, decode, make_case, random_decode_case
from kernels.forests import (
    Filling,
    Forest,
    Range,
    Row,
    Shape,
    beam_forest,
    behind_prefix,
    fill_pool,
    no_runs,
    one_row,
    pool_data,
    random_forest,
    wrap,
)
from kernels.implementations import CPU, CUDA, DTYPES, NATIVE, REFERENCE, make_kernels
from kernels.oracle import HEAD_DIMS, alibi_slopes, has_positions, make_spec, random_spec
from kernels.pairwise import pairwise
from seeds import seeds

from trunkline.kernels.cpu import CpuKernels
from trunkline.kernels.ops import AttentionSpec, Kernels, KvPool
from trunkline.kernels.plan import Segments, build_decode_plan
from trunkline.kvstore.chunk_format import KV_DTYPES

everywhere = pairwise(implementation=(*CPU, *CUDA))


@pairwise(
    seeded=True,
    chunk_size=CHUNKS,
    implementation=CPU,
    head_dim=(10, 32, *HEAD_DIMS),
    dtype=DTYPES,
    kv_dtype=KV_DTYPES,
)
def test_random_forests(
    chunk_size: int, implementation: str, head_dim: int, dtype: torch.dtype, kv_dtype: str, seed: int
) -> None:
    case = random_decode_case(seed, chunk_size, head_dim, dtype, kv_dtype)
    check_decode(make_kernels(implementation), case, seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 1000))
def test_more_random_forests(seed: int) -> None:
    """Odd strides: neighbouring seeds differ in everything."""
    chunk_size, implementation = CHUNKS[seed * 7 % len(CHUNKS)], CPU[seed // 30 % len(CPU)]
    case = random_decode_case(seed, chunk_size, HEAD_DIMS[seed % len(HEAD_DIMS)], DTYPES[seed % len(DTYPES)])
    check_decode(make_kernels(implementation), case, seed)


@pytest.mark.soak
@pytest.mark.parametrize("chunk_size", range(1, 257))
def test_every_chunk_size(chunk_size: int, kernels: Kernels) -> None:
    dtype = DTYPES[chunk_size // 3 % len(DTYPES)]
    case = random_decode_case(1000 + chunk_size, chunk_size, HEAD_DIMS[chunk_size % len(HEAD_DIMS)], dtype)
    check_decode(kernels, case, chunk_size)


@pairwise(seeded=True, implementation=CPU, head_dim=(16, 64, 80, 128), chunk_size=(4, 16, 64), dtype=DTYPES)
def test_beams(implementation: str, head_dim: int, chunk_size: int, dtype: torch.dtype, seed: int) -> None:
    """Rows that share blocks in arbitrary subsets, under a hint that covers other rows too."""
    rng = np.random.default_rng(seed)
    sizes = (int(rng.integers(2, 7)), int(rng.integers(1, 9)), int(rng.integers(0, 4)))
    case = make_case(beam_forest(rng, *sizes, chunk_size), random_spec(rng, head_dim), dtype, seed)
    check_decode(make_kernels(implementation), case, seed)


@pairwise(implementation=CPU, dtype=DTYPES)
def test_three_hundred_rows(implementation: str, dtype: torch.dtype) -> None:
    check_decode(make_kernels(implementation), wide_case(dtype), 1)


@functools.lru_cache
def wide_case(dtype: torch.dtype) -> Case:
    shape = Shape(300, 16, depth_max=5, private_max=1, shifts=True, holes=True, modules=4)
    return make_case(random_forest(np.random.default_rng(1), shape), make_spec(2, 1, 64), dtype, 1)


@functools.lru_cache(maxsize=6)
def long_case(dtype: torch.dtype, window: int) -> Case:
    """Rows that share 40 chunks, and one that shares nothing: partial results of several workers merge."""
    forest = behind_prefix(64, 40, [7, 8, 9])
    forest.rows.append(one_row(64, 37 * 64 + 5, forest.blocks))
    forest.blocks += 38
    return make_case(forest, make_spec(8, 2, 64, window=window), dtype, 5)


@pairwise(implementation=CPU, dtype=DTYPES, window=(0, 20))
def test_long_contexts_are_split_and_merged(implementation: str, dtype: torch.dtype, window: int) -> None:
    """Grouped heads, several workers; under the small window, most partial results are empty."""
    case = long_case(dtype, window)
    for threads in (1, 2, 3):
        kernels = make_kernels(implementation, threads)
        pool = fill_pool(kernels, case.data, case.spec, np.random.default_rng(0), "written")
        case.assert_result(decode(kernels, case, pool))


@pairwise(
    seeded=True, implementation=CPU, dtype=DTYPES, head_dim=(64, 128), rows=(8, 13, 17, 32, 41), threads=(1, 2)
)
def test_many_rows_behind_a_prefix(
    implementation: str, dtype: torch.dtype, head_dim: int, rows: int, threads: int, seed: int
) -> None:
    """Many query vectors multiply the prefix, and fetch meanwhile what each row has for itself."""
    rng = np.random.default_rng(seed)
    forest = behind_prefix(64, int(rng.integers(2, 7)), rng.integers(1, 65, rows).tolist())
    kernels = make_kernels(implementation, threads)
    check_decode(kernels, make_case(forest, make_spec(6, 2, head_dim), dtype, seed), seed)


@everywhere
def test_a_shared_prefix_is_read_once(kernels: Kernels) -> None:
    """The case that the kernels are for: 16 rows, 32 shared chunks."""
    rows, shared, chunk_size = 16, 32, 64
    private = sum(range(1, rows + 1))
    forest = behind_prefix(chunk_size, shared, range(1, rows + 1))
    for runs, tokens in (
        (forest.runs, shared * chunk_size + private),
        (no_runs(), rows * shared * chunk_size + private),
    ):
        forest.runs = runs
        case = make_case(forest, make_spec(4, 2, 64), torch.bfloat16, 2)
        filling: Filling = "wrapped" if kernels.name == "cuda" else "written"
        pool = fill_pool(kernels, case.data, case.spec, np.random.default_rng(0), filling)
        before, plan = kernels.counters.decode_tokens_read, case.forest.decode_plan()
        assert plan.tokens_read == tokens
        case.assert_result(decode(kernels, case, pool, plan))
        assert kernels.counters.decode_tokens_read - before == tokens
    assert kernels.counters.calls["decode_attention"] == kernels.counters.decode_plans == 2


@everywhere
def test_rows_with_different_shifts_share_a_read(kernels: Kernels) -> None:
    chunk_size, shared, rows = 16, 24, 8
    forest = Forest(chunk_size, [], np.array([[0, rows, 0, shared]], dtype=np.int32), shared + rows)
    for index in range(rows):
        prefix = [r._replace(shift=10 * index) for r in one_row(chunk_size, shared * chunk_size).ranges]
        end = shared * chunk_size + 10 * index
        forest.rows.append(Row([*prefix, Range(shared, shared + index, 0, 3, end, 0)], end + 2))
    case = make_case(forest, make_spec(8, 2, 128), torch.bfloat16, 4)
    plan = forest.decode_plan()
    assert (plan.shared_items, plan.shifts[:3].tolist()) == (shared, [0, 10, 20])
    pool = fill_pool(kernels, case.data, case.spec, np.random.default_rng(0), "written")
    case.assert_result(decode(kernels, case, pool, plan))
    assert kernels.counters.decode_tokens_read == shared * chunk_size + 3 * rows


@everywhere
def test_a_wrong_run_costs_reads_not_results(kernels: Kernels) -> None:
    forest = random_forest(np.random.default_rng(1), Shape(9, 8, holes=True))
    forest.runs = np.array([[0, 9, 0, 20]], dtype=np.int32)  # claims that all share everything
    check_decode(kernels, make_case(forest, make_spec(), torch.float32, 1), 1)


@everywhere
def test_layers_of_one_plan_may_differ(kernels: Kernels) -> None:
    """Sliding windows on some layers only, another rotary base: a plan's state keeps no layer's spec."""
    rng, base = np.random.default_rng(3), make_spec(4, 2, 64)
    assert base.inverse_frequencies is not None
    forest = random_forest(rng, Shape(7, 16, shifts=True, holes=True, modules=1))
    plan, data = forest.decode_plan(), pool_data(forest, base, torch.float32, 3)
    pool = fill_pool(kernels, data, base, rng, "written")
    for spec in (
        base,
        replace(base, window=11),
        replace(base, window=30, inverse_frequencies=base.inverse_frequencies / 3),
        replace(base, alibi_slopes=alibi_slopes(4), inverse_frequencies=None, soft_cap=3.0),
        base,
    ):
        case = make_case(forest, spec, torch.float32, 3)
        case.assert_result(decode(kernels, case, pool, plan))
    assert kernels.counters.decode_plans == 1


@pairwise(seeded=True, implementation=CPU, dtype=DTYPES, kv_dtype=KV_DTYPES, threads=(1, 3))
def test_sinks_and_spans(implementation: str, dtype: torch.dtype, kv_dtype: str, threads: int, seed: int) -> None:
    """A sink counts once, however many partial results a row has, and whether it is far above its scores or below;
    rows of one chunk see other parts of it."""
    rng = np.random.default_rng(seed)
    spec = random_spec(rng, 64)
    sinks = torch.from_numpy(rng.choice([-40.0, -1.0, 0.5, 3.0, 60.0], size=spec.heads)).float()
    forest = random_forest(rng, Shape(9, 16, depth_max=8, shifts=has_positions(spec), holes=True, modules=1))
    for own in (replace(spec, sinks=sinks), replace(spec, window=0, span=int(rng.integers(1, 90)))):
        case = make_case(forest, own, dtype, seed, kv_dtype=kv_dtype)
        check_decode(make_kernels(implementation, threads), case, seed)


@pairwise(level=NATIVE, dtype=DTYPES)
def test_sinks_merge_by_a_buffer_too(level: str, dtype: torch.dtype) -> None:
    spec = replace(make_spec(8, 2, 64), sinks=torch.linspace(-3, 3, 8))
    forest = behind_prefix(64, 20, [7, 8, 9])
    case = make_case(forest, spec, dtype, 5)
    kernels = CpuKernels(level, 3, merge="buffer")
    case.assert_result(
        decode(kernels, case, fill_pool(kernels, case.data, spec, np.random.default_rng(0), "written"))
    )


@pairwise(implementation=CPU, dtype=DTYPES, group=(1, 2, 4), shared=(False, True))
def test_every_float_of_8_bits_is_read_as_it_is(
    implementation: str, dtype: torch.dtype, group: int, shared: bool
) -> None:
    """Each row sees one token alone. Its value is some of all numbers that there are, those below the normal ones
    included; a value of few large numbers, which has none of them, is read beside it."""
    size, codes = 64, [code for code in range(256) if code & 127 != 127]
    numbers = [[codes[(67 * token + place) % len(codes)] for place in range(size)] for token in range(size)]
    stored = torch.tensor(numbers).to(torch.uint8)
    stored[:, 0], stored[1::4, 8:] = 0x7E, 0x55  # 448: the scale is 1
    values = stored.view(torch.float8_e4m3fn).to(dtype)
    plain = wrap(torch.stack((torch.eye(size, dtype=dtype), values))[None, None, :, None], "fp8")
    pool = wrap(torch.full((1, 1, 2, 1, size, size), float("nan"), dtype=dtype), "fp8")
    kernels, zeros = make_kernels(implementation), np.zeros(size, np.int32)
    kernels.scatter_blocks(pool, np.zeros(1, np.int32), range(1), plain.data)
    rows = np.arange(size, dtype=np.int32)
    segments = Segments(rows, zeros, zeros, zeros, zeros + size, zeros, zeros)
    runs = np.array([[0, size, 0, 1]] if shared else [], np.int32).reshape(-1, 4)
    plan = build_decode_plan(segments, zeros + size - 1, runs, size)
    q = (200 * torch.eye(size, dtype=dtype))[:, None].repeat(1, group, 1)
    out = torch.full_like(q, float("nan"))
    kernels.decode_attention(plan, q, pool, 0, AttentionSpec(group, 1, size, 1.0), out)
    assert torch.equal(out.bfloat16(), values.bfloat16()[:, None].expand_as(out))


@everywhere
def test_a_row_that_sees_nothing_gives_zeros(kernels: Kernels) -> None:
    """Its window has moved past all its keys; its neighbours, which share blocks with it, are as ever."""
    forest = behind_prefix(16, 5, [2] * 4)
    forest.rows[2].position += 100
    case = make_case(forest, make_spec(4, 2, 64, window=30), torch.float32, 6)
    out = decode(kernels, case, fill_pool(kernels, case.data, case.spec, np.random.default_rng(0), "written"))
    assert not bool(out[2].any())
    case.assert_result(out)


@everywhere
def test_a_row_without_tokens_gives_zeros(kernels: Kernels) -> None:
    """An empty tail is all that it has; after a step there is one token, whose value is the result."""
    chunk_size, spec = 8, make_spec(4, 2, 64)
    rows = [one_row(chunk_size, 20), Row([Range(0, 3, 0, 0, 0, 0)], -1), one_row(chunk_size, 2, 4)]
    forest = Forest(chunk_size, rows, no_runs(), 5)
    data = pool_data(forest, spec, torch.float32, 0, spare=1)
    pool, plan = KvPool.wrap(data.clone()), forest.decode_plan()
    q, out = torch.randn(3, 4, 64), torch.full((3, 4, 64), float("nan"))
    kernels.decode_attention(plan, q, pool, 1, spec, out)
    assert not bool(out[1].any())
    assert not bool(out.isnan().any())
    plan.advance()
    kernels.decode_attention(plan, q, pool, 1, spec, out)
    assert kernels.counters.decode_tokens_read == 22 + 25
    torch.testing.assert_close(out[1], data[3, 1, 1, :, 0].repeat_interleave(2, dim=0), rtol=1e-6, atol=1e-6)


@pairwise(implementation=(*CPU, *CUDA), dtype=DTYPES, kv_dtype=KV_DTYPES)
def test_a_broken_row_does_not_touch_others(implementation: str, dtype: torch.dtype, kv_dtype: str) -> None:
    """NaN in one row's own keys stays in that row."""
    rng, spec = np.random.default_rng(2), make_spec(4, 2, 64)
    forest = random_forest(rng, Shape(8, 8))
    data, kernels = pool_data(forest, spec, dtype, 2), make_kernels(implementation)
    tail = forest.rows[3].ranges[-1]
    data[tail.block, ..., tail.first : tail.first + tail.tokens, :] = float("nan")
    q, out = torch.randn(8, 4, 64).to(dtype), torch.zeros(8, 4, 64, dtype=dtype)
    kernels.decode_attention(forest.decode_plan(), q, wrap(data, kv_dtype), 1, spec, out)
    assert out.isnan().any(dim=-1).any(dim=-1).tolist() == [row == 3 for row in range(8)]


@pairwise(implementation=(*CPU, *CUDA), dtype=DTYPES, head_dim=(8, 16, 32))
def test_heads_of_tiny_models(implementation: str, dtype: torch.dtype, head_dim: int) -> None:
    forest = random_forest(np.random.default_rng(head_dim), Shape(6, 8, shifts=True))
    check_decode(
        make_kernels(implementation), make_case(forest, make_spec(4, 2, head_dim), dtype, head_dim), head_dim
    )


@pytest.mark.parametrize("seed", seeds(6))
def test_float64_of_the_reference(seed: int) -> None:
    """The specification itself, to the last places."""
    rng = np.random.default_rng(seed)
    spec = random_spec(rng, 16)
    shape = Shape(int(rng.integers(1, 24)), 8, shifts=has_positions(spec), holes=True, modules=1)
    case = make_case(random_forest(rng, shape), spec, torch.float64, seed)
    torch.testing.assert_close(decode(make_kernels(REFERENCE), case), case.exact, rtol=1e-10, atol=1e-10)


@everywhere
def test_shifts_need_positions(kernels: Kernels) -> None:
    forest = Forest(8, [one_row(8, 12)], no_runs(), 2)
    forest.rows[0].ranges[0] = forest.rows[0].ranges[0]._replace(shift=-3)
    case = make_case(forest, make_spec(4, 2, 64), torch.float32, 0)
    with pytest.raises(ValueError, match="shift needs rotary positions or ALiBi"):
        decode(kernels, replace(case, spec=make_spec(4, 2, 64, rotary_dim=0)))


@pairwise(level=NATIVE, variant=range(6), kv_dtype=KV_DTYPES)
def test_invariant_mode_ignores_the_batch(level: str, variant: int, kv_dtype: str) -> None:
    """Bit by bit: a row alone, among sharers of its prefix, in another order, with another number of threads."""
    rng = np.random.default_rng(variant)
    spec = make_spec(8, 2, (64, 128)[variant % 2], window=(0, 0, 700)[variant % 3])
    shape = Shape(
        9,
        (16, 64)[variant // 2 % 2],
        depth_max=60,
        private_max=12,
        shifts=variant > 2,
        holes=variant > 3,
        modules=1,
    )
    forest = random_forest(rng, shape)
    case = make_case(forest, spec, DTYPES[variant % 3], variant, kv_dtype=kv_dtype)
    filling: Filling = "written" if variant % 2 else "wrapped"
    pool = fill_pool(make_kernels(level, 1, True), case.data, spec, rng, filling, kv_dtype)
    whole = decode(make_kernels(level, 1, True), case, pool)
    case.assert_result(whole)
    orders = [[0], [4], [8], rng.permutation(9).tolist(), [0, 1], [7, 2, 4]]
    for threads, order in enumerate(orders):
        rows = [forest.rows[row] for row in order]
        run = [[0, len(rows), 0, max(len(row.ranges) for row in rows)]]
        part = Forest(forest.chunk_size, rows, np.array(run, dtype=np.int32), forest.blocks)
        again = decode(
            make_kernels(level, 1 + threads % 3, True), replace(case, forest=part, q=case.q[order]), pool
        )
        assert torch.equal(again, whole[order]), f"rows {order}"


@pairwise(merge=("in_place", "buffer"), level=NATIVE, kv_dtype=KV_DTYPES)
def test_a_broken_row_is_not_empty(merge: Literal["in_place", "buffer"], level: str, kv_dtype: str) -> None:
    """Its first pieces are out of its window, the scores of the last are NaN."""
    spec, forest = make_spec(4, 2, 64, window=30), Forest(16, [one_row(16, 800)], no_runs(), 51)
    for dtype in DTYPES:
        pool = wrap(pool_data(forest, spec, dtype, 0), kv_dtype)
        q, out = torch.full((1, 4, 64), float("nan"), dtype=dtype), torch.zeros(1, 4, 64, dtype=dtype)
        kernels = CpuKernels(isa=level, threads=3, merge=merge)
        kernels.decode_attention(forest.decode_plan(), q, pool, 1, spec, out)
        assert bool(out.isnan().all())


@pytest.mark.skipif(not NATIVE, reason="the compiled kernels are not installed")
def test_kernels_of_different_settings_share_a_plan() -> None:
    """Each gets the work that it would get from a plan of its own."""
    spec = make_spec(4, 2, 64)
    rows = [one_row(16, 640) for _ in range(4)]
    forest = Forest(16, rows, np.array([[0, 4, 0, 39]], dtype=np.int32), 41)
    pool, plan = KvPool.wrap(pool_data(forest, spec, torch.float32, 0)), forest.decode_plan()
    q, out = torch.randn(4, 4, 64), torch.empty(4, 4, 64)
    for share in (False, True, False):
        shared, own = CpuKernels(share=share), CpuKernels(share=share)
        shared.decode_attention(plan, q, pool, 1, spec, out)
        own.decode_attention(forest.decode_plan(), q, pool, 1, spec, out)
        assert shared.counters.decode_tokens_read == own.counters.decode_tokens_read
        assert (own.counters.decode_tokens_read == 4 * 640) == (not share)
