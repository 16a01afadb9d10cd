"""Decode attention of every implementation against dense attention in float64, over random forests."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.forests import (
    FILLINGS,
    Filling,
    Forest,
    Range,
    Row,
    Shape,
    beam_forest,
    fill_pool,
    one_row,
    pool_data,
    random_forest,
)
from kernels.implementations import DTYPES, NATIVE, REFERENCE, make_kernels
from kernels.oracle import (
    HEAD_DIMS,
    HEADS,
    alibi_slopes,
    assert_as_exact_as,
    decode_oracle,
    has_positions,
    make_spec,
    random_spec,
)
from torch import Tensor

from trunkline.kernels.cpu import CpuKernels
from trunkline.kernels.ops import AttentionSpec, Kernels, KvPool
from trunkline.kernels.plan import DecodePlan

CHUNKS = (1, 2, 3, 5, 8, 16, 24, 32, 64, 100, 128, 256)


@dataclass(frozen=True)
class Case:
    """A batch, its pool's contents in plain order, and what should come out."""

    forest: Forest
    spec: AttentionSpec
    data: Tensor
    q: Tensor
    exact: Tensor
    plain: Tensor

    @property
    def sum_terms(self) -> int:
        return max(row.tokens for row in self.forest.rows)


def make_case(forest: Forest, spec: AttentionSpec, dtype: torch.dtype, seed: int) -> Case:
    data = pool_data(forest, spec, dtype, seed)
    generator = torch.Generator().manual_seed(seed)
    # Mild to peaked softmax: partial results whose peaks differ are where merges go wrong.
    size = (0.3, 1.0, 3.0)[seed % 3]
    q = (size * torch.randn(len(forest.rows), spec.heads, spec.head_dim, generator=generator)).to(dtype)
    exact, plain = decode_oracle(forest, q, data, 1, spec)
    return Case(forest, spec, data, q, exact, plain)


def random_shape(rng: np.random.Generator, spec: AttentionSpec, chunk_size: int, rows: int) -> Shape:
    longest = 900 // chunk_size
    return Shape(
        rows,
        chunk_size,
        depth_max=min(8, longest),
        private_max=min(3, longest),
        shifts=has_positions(spec) and bool(rng.random() < 0.5),
        holes=bool(rng.random() < 0.5),
        modules=int(rng.choice([0, 0, 1, 3])),
    )


@functools.lru_cache(maxsize=8)
def random_case(seed: int, chunk_size: int | None = None, rows: int | None = None) -> Case:
    rng = np.random.default_rng(seed)
    # Odd strides, so that neighbouring seeds differ in everything and any twenty of them meet all values.
    spec = random_spec(rng, HEAD_DIMS[seed % len(HEAD_DIMS)])
    size = chunk_size or CHUNKS[seed * 7 % len(CHUNKS)]
    most = 5 if size >= 100 or spec.head_dim == 256 else 20
    forest = random_forest(rng, random_shape(rng, spec, size, rows or int(rng.integers(1, most))))
    return make_case(forest, spec, DTYPES[seed % len(DTYPES)], seed)


def decode(
    kernels: Kernels, case: Case, pool: KvPool, plan: DecodePlan | None = None, *, strided: bool = False
) -> Tensor:
    """Run the op with everything around its operands poisoned."""
    rows, heads, head_dim = case.q.shape
    width = heads + 2 * case.spec.kv_heads if strided else heads
    around = torch.full((rows + 4, width, head_dim), float("nan"), dtype=case.q.dtype)
    q = around[2:-2, :heads]
    q.copy_(case.q)
    results = torch.full((rows + 4, heads, head_dim), float("nan"), dtype=case.q.dtype)
    kernels.decode_attention(plan or case.forest.decode_plan(), q, pool, 1, case.spec, results[2:-2])
    assert bool(results[:2].isnan().all() & results[-2:].isnan().all()), "written outside of its rows"
    return results[2:-2]


def check(kernels: Kernels, case: Case, seed: int) -> None:
    filling = FILLINGS[seed % 5 % 3]
    pool = fill_pool(kernels, case.data, case.spec, np.random.default_rng(seed), filling)
    plan = case.forest.decode_plan()
    out = decode(kernels, case, pool, plan, strided=seed % 2 == 0)
    assert_as_exact_as(out, case.exact, case.plain, sum_terms=case.sum_terms)
    counters, spec = kernels.counters, case.spec
    assert (counters.calls["decode_attention"], counters.decode_plans) == (1, 1)
    # Sharing that does not pay, and blocks outside a window, may be left; nothing is read twice for one row.
    assert counters.decode_tokens_read <= sum(row.tokens for row in case.forest.rows)
    assert counters.decode_tokens_read >= case.forest.distinct_tokens() or spec.window
    token_bytes = 2 * spec.kv_heads * spec.head_dim * case.data.element_size()
    assert counters.decode_bytes_read == counters.decode_tokens_read * token_bytes


@pytest.mark.parametrize("seed", range(40))
def test_random_forests(seed: int, kernels: Kernels) -> None:
    check(kernels, random_case(seed), seed)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 9),
    chunk_size=st.integers(1, 40),
    spread=st.fixed_dictionaries({"shifts": st.booleans(), "holes": st.booleans(), "modules": st.integers(0, 2)}),
    heads=st.sampled_from(HEADS),
    window=st.integers(0, 60),
    dtype=st.sampled_from(DTYPES),
)
def test_any_forest(
    implementation: str,
    seed: int,
    rows: int,
    chunk_size: int,
    spread: dict[str, Any],
    heads: tuple[int, int],
    window: int,
    dtype: torch.dtype,
) -> None:
    """Small batches that shrink to the smallest wrong one."""
    forest = random_forest(np.random.default_rng(seed), Shape(rows, chunk_size, depth_max=4, **spread))
    check(make_kernels(implementation), make_case(forest, make_spec(*heads, 64, window=window), dtype, seed), seed)


@pytest.mark.parametrize("seed", range(12))
def test_beams(seed: int, kernels: Kernels) -> None:
    """Rows that share blocks in arbitrary subsets, under a hint that covers other rows too."""
    check(kernels, beam_case(seed), seed)


@functools.lru_cache(maxsize=2)
def beam_case(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    chunk_size = (4, 16, 64)[seed % 3]
    forest = beam_forest(
        rng, int(rng.integers(2, 7)), int(rng.integers(1, 9)), int(rng.integers(0, 4)), chunk_size
    )
    return make_case(forest, random_spec(rng, (16, 64, 80, 128)[seed % 4]), DTYPES[seed % 3], seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 1000))
def test_more_random_forests(seed: int, kernels: Kernels) -> None:
    check(kernels, random_case(seed), seed)


@pytest.mark.soak
@pytest.mark.parametrize("chunk_size", range(1, 257))
def test_every_chunk_size(chunk_size: int, kernels: Kernels) -> None:
    check(kernels, random_case(1000 + chunk_size, chunk_size), chunk_size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_three_hundred_rows(dtype: torch.dtype, kernels: Kernels) -> None:
    rng, spec = np.random.default_rng(1), make_spec(2, 1, 64)
    shape = Shape(300, 16, depth_max=5, private_max=1, shifts=True, holes=True, modules=4)
    case = make_case(random_forest(rng, shape), spec, dtype, 1)
    check(kernels, case, 1)


@functools.lru_cache(maxsize=4)
def long_case(dtype: torch.dtype, window: int) -> Case:
    """Rows that share 40 chunks, and one that shares nothing: partial results of several workers merge."""
    shared, chunk_size = 40, 64
    rows = [one_row(chunk_size, shared * chunk_size) for _ in range(3)]
    for index, row in enumerate(rows):
        row.ranges.append(Range(shared, shared + index, 0, 7 + index, shared * chunk_size, 0))
        row.position += 7 + index
    rows.append(one_row(chunk_size, 37 * chunk_size + 5, shared + 3))
    forest = Forest(chunk_size, rows, np.array([[0, 3, 0, shared]], dtype=np.int32), shared + 3 + 38)
    return make_case(forest, make_spec(8, 2, 64, window=window), dtype, 5)


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_contexts_are_split_and_merged(dtype: torch.dtype, window: int, implementation: str) -> None:
    """Grouped heads, several workers; under the small window, most partial results are empty."""
    case = long_case(dtype, window)
    for threads in (1, 2, 3):
        kernels = make_kernels(implementation, threads)
        pool = fill_pool(kernels, case.data, case.spec, np.random.default_rng(0), "written")
        out = decode(kernels, case, pool)
        assert_as_exact_as(out, case.exact, case.plain, sum_terms=case.sum_terms)


@pytest.mark.parametrize("filling", FILLINGS)
def test_a_shared_prefix_is_read_once(filling: Filling, kernels: Kernels) -> None:
    """The case that the kernels are for: 16 rows, 32 shared chunks."""
    rows, shared, chunk_size = 16, 32, 64
    forest = Forest(chunk_size, [one_row(chunk_size, shared * chunk_size) for _ in range(rows)], runs := no_runs())
    for index, row in enumerate(forest.rows):
        row.ranges.append(Range(shared, shared + index, 0, 1 + index, shared * chunk_size, 0))
        row.position += 1 + index
    forest.blocks = shared + rows
    private = sum(range(1, rows + 1))
    for runs, tokens in (
        (np.array([[0, rows, 0, shared]], dtype=np.int32), shared * chunk_size + private),
        (no_runs(), rows * shared * chunk_size + private),
    ):
        forest.runs = runs
        case = make_case(forest, make_spec(4, 2, 64), torch.bfloat16, 2)
        pool = fill_pool(kernels, case.data, case.spec, np.random.default_rng(0), filling)
        before, plan = kernels.counters.decode_tokens_read, case.forest.decode_plan()
        assert plan.tokens_read == tokens
        out = decode(kernels, case, pool, plan)
        assert_as_exact_as(out, case.exact, case.plain, sum_terms=case.sum_terms)
        assert kernels.counters.decode_tokens_read - before == tokens
    assert kernels.counters.calls["decode_attention"] == kernels.counters.decode_plans == 2


def no_runs() -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return np.zeros((0, 4), dtype=np.int32)


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
    out = decode(kernels, case, pool, plan)
    assert_as_exact_as(out, case.exact, case.plain, sum_terms=case.sum_terms)
    assert kernels.counters.decode_tokens_read == shared * chunk_size + 3 * rows


def test_a_wrong_run_costs_reads_not_results(kernels: Kernels) -> None:
    rng, spec = np.random.default_rng(1), make_spec()
    forest = random_forest(rng, Shape(9, 8, holes=True))
    forest.runs = np.array([[0, 9, 0, 20]], dtype=np.int32)  # claims that all share everything
    check(kernels, make_case(forest, spec, torch.float32, 1), 1)


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
        assert_as_exact_as(decode(kernels, case, pool, plan), case.exact, case.plain, sum_terms=case.sum_terms)
    assert kernels.counters.decode_plans == 1


def test_a_row_that_sees_nothing_gives_zeros(kernels: Kernels) -> None:
    """Its window has moved past all its keys; its neighbours, which share blocks with it, are as ever."""
    chunk_size = 16
    rows = [one_row(chunk_size, 5 * chunk_size) for _ in range(4)]
    for index, row in enumerate(rows):
        row.ranges.append(Range(5, 5 + index, 0, 2, 5 * chunk_size, 0))
        row.position = 5 * chunk_size + 1
    rows[2].position += 100
    forest = Forest(chunk_size, rows, np.array([[0, 4, 0, 5]], dtype=np.int32), 9)
    case = make_case(forest, make_spec(4, 2, 64, window=30), torch.float32, 6)
    out = decode(kernels, case, fill_pool(kernels, case.data, case.spec, np.random.default_rng(0), "written"))
    assert not bool(out[2].any())
    assert_as_exact_as(out, case.exact, case.plain, sum_terms=case.sum_terms)


def test_a_row_without_tokens_gives_zeros(kernels: Kernels) -> None:
    """An empty tail is all that it has; after a step there is one token, whose value is the result."""
    chunk_size, spec = 8, make_spec(4, 2, 64)
    rows = [one_row(chunk_size, 20), Row([Range(0, 3, 0, 0, 0, 0)], -1), one_row(chunk_size, 2, 4)]
    forest = Forest(chunk_size, rows, np.zeros((0, 4), dtype=np.int32), 5)
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


def test_a_broken_row_does_not_touch_others(kernels: Kernels) -> None:
    """NaN in one row's own keys stays in that row."""
    rng, spec = np.random.default_rng(2), make_spec(4, 2, 64)
    forest = random_forest(rng, Shape(8, 8))
    data = pool_data(forest, spec, torch.float32, 2)
    tail = forest.rows[3].ranges[-1]
    data[tail.block, ..., tail.first : tail.first + tail.tokens, :] = float("nan")
    q, out = torch.randn(8, 4, 64), torch.zeros(8, 4, 64)
    kernels.decode_attention(forest.decode_plan(), q, KvPool.wrap(data), 1, spec, out)
    assert out.isnan().any(dim=-1).any(dim=-1).tolist() == [row == 3 for row in range(8)]


@pytest.mark.parametrize("head_dim", [8, 16, 32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_tiny_models(dtype: torch.dtype, head_dim: int, kernels: Kernels) -> None:
    rng, spec = np.random.default_rng(head_dim), make_spec(4, 2, head_dim)
    check(kernels, make_case(random_forest(rng, Shape(6, 8, shifts=True)), spec, dtype, head_dim), head_dim)


@pytest.mark.parametrize("seed", range(8))
def test_float64_of_the_reference(seed: int) -> None:
    """The specification itself, to the last places."""
    rng = np.random.default_rng(seed)
    spec = random_spec(rng, 16)
    forest = random_forest(rng, random_shape(rng, spec, 8, int(rng.integers(1, 24))))
    case = make_case(forest, spec, torch.float64, seed)
    out = decode(make_kernels(REFERENCE), case, KvPool.wrap(case.data))
    torch.testing.assert_close(out, case.exact, rtol=1e-10, atol=1e-10)


def test_shifts_need_positions(kernels: Kernels) -> None:
    forest = Forest(8, [one_row(8, 12)], np.zeros((0, 4), dtype=np.int32), 2)
    forest.rows[0].ranges[0] = forest.rows[0].ranges[0]._replace(shift=-3)
    case = make_case(forest, make_spec(4, 2, 64), torch.float32, 0)
    bare = replace(case, spec=make_spec(4, 2, 64, rotary_dim=0))
    with pytest.raises(ValueError, match="shift needs rotary positions or ALiBi"):
        decode(kernels, bare, KvPool.wrap(case.data))


@pytest.mark.skipif(not NATIVE, reason="the compiled kernels are not installed")
@pytest.mark.parametrize("level", NATIVE)
@pytest.mark.parametrize("seed", range(6))
def test_invariant_mode_ignores_the_batch(seed: int, level: str) -> None:
    """Bit by bit: a row alone, among sharers of its prefix, in another order, with another number of threads."""
    rng, spec = np.random.default_rng(seed), make_spec(8, 2, (64, 128)[seed % 2], window=(0, 0, 700)[seed % 3])
    shape = Shape(9, (16, 64)[seed % 2], depth_max=60, private_max=12, shifts=seed > 2, holes=seed > 3, modules=1)
    forest = random_forest(rng, shape)
    case = make_case(forest, spec, DTYPES[seed % 3], seed)
    pool = fill_pool(make_kernels(level, 1, True), case.data, spec, rng, "written" if seed % 2 else "wrapped")
    whole = decode(make_kernels(level, 1, True), case, pool)
    assert_as_exact_as(whole, case.exact, case.plain, sum_terms=case.sum_terms)
    orders = [[row] for row in range(9)] + [rng.permutation(9).tolist(), [0, 1], [7, 2, 4]]
    for threads, order in enumerate(orders):
        rows = [forest.rows[row] for row in order]
        run = [[0, len(rows), 0, max(len(row.ranges) for row in rows)]]
        part = Forest(forest.chunk_size, rows, np.array(run, dtype=np.int32), forest.blocks)
        again = decode(
            make_kernels(level, 1 + threads % 3, True), replace(case, forest=part, q=case.q[order]), pool
        )
        assert torch.equal(again, whole[order]), f"rows {order}"


@pytest.mark.parametrize("level", NATIVE)
@pytest.mark.parametrize("merge", ["in_place", "buffer"])
def test_a_broken_row_is_not_empty(merge: Literal["in_place", "buffer"], level: str) -> None:
    """Its first pieces are out of its window, the scores of the last are NaN."""
    spec, forest = make_spec(4, 2, 64, window=30), Forest(16, [one_row(16, 800)], np.zeros((0, 4), np.int32), 51)
    pool = KvPool.wrap(pool_data(forest, spec, torch.float32, 0))
    q, out = torch.full((1, 4, 64), float("nan")), torch.zeros(1, 4, 64)
    CpuKernels(isa=level, threads=3, merge=merge).decode_attention(forest.decode_plan(), q, pool, 1, spec, out)
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
