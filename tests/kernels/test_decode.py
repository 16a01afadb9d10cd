"""Reference decode attention against dense attention in float64, over random forests."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernels.forests import Forest, dense_attention, poisoned_pool, random_forest

from trunkline.kernels.load import KernelsUnavailableError, load_kernels
from trunkline.kernels.ops import AttentionSpec
from trunkline.kernels.plan import DecodePlan, build_decode_plan
from trunkline.kernels.reference import ReferenceKernels
from trunkline.kernels.softmax_state import SoftmaxState, merge

CHUNK = 8


def make_spec(heads: int = 4, kv_heads: int = 2, head_dim: int = 8) -> AttentionSpec:
    frequencies = 100.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    return AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5, frequencies)


def plan_of(forest: Forest, chunk_size: int = CHUNK) -> DecodePlan:
    return build_decode_plan(forest.segments(), forest.positions, forest.runs, chunk_size)


def expected(forest: Forest, q: torch.Tensor, pool: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    return torch.stack([dense_attention(row, q[i].double(), pool, 1, spec) for i, row in enumerate(forest.rows)])


@pytest.mark.parametrize("seed", range(25))
def test_equals_dense_attention(seed: int) -> None:
    rng = np.random.default_rng(seed)
    heads, kv_heads = [(4, 4), (4, 2), (4, 1), (1, 1), (6, 2)][seed % 5]
    spec = make_spec(heads, kv_heads, head_dim=int(rng.choice([4, 8, 16])))
    rows, chunk = int(rng.integers(1, 24)), int(rng.choice([1, 4, 8, 16]))
    forest = random_forest(rng, rows, chunk, shifts=seed % 2 == 1, holes=seed % 3 == 1)
    pool = poisoned_pool(forest, spec, 2, chunk, seed=seed)
    q = torch.randn(rows, heads, spec.head_dim, dtype=torch.float64)
    out = torch.full_like(q, float("nan"))
    plan = plan_of(forest, chunk)
    kernels = ReferenceKernels()
    kernels.decode_attention(plan, q, pool, 1, spec, out)
    torch.testing.assert_close(out, expected(forest, q, pool, spec), rtol=1e-9, atol=1e-9)
    # Shared ranges are read once.
    distinct = {s[1:4] for row in forest.rows for s in row.segments[:-1]}
    tails = sum(row.segments[-1][3] for row in forest.rows)
    assert kernels.counters.decode_tokens_read == sum(s[2] for s in distinct) + tails
    assert kernels.counters.decode_bytes_read == plan.tokens_read * 2 * kv_heads * spec.head_dim * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_types(dtype: torch.dtype) -> None:
    rng, spec = np.random.default_rng(3), make_spec(head_dim=16)
    forest = random_forest(rng, 12, CHUNK, shifts=True)
    pool = poisoned_pool(forest, spec, 2, CHUNK).to(dtype)
    q = torch.randn(12, 4, 16).to(dtype)
    out = torch.full_like(q, float("nan"))
    ReferenceKernels().decode_attention(plan_of(forest), q, pool, 1, spec, out)
    # The inputs are rounded alike, so only the output's rounding is left: half of its last place.
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    want = expected(forest, q, pool.double(), spec)
    torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance)


def test_tails_grow_by_the_counter_alone() -> None:
    rng, spec = np.random.default_rng(5), make_spec()
    forest = random_forest(rng, 6, CHUNK)
    for row in forest.rows:
        row.segments[-1] = (*row.segments[-1][:3], int(rng.integers(1, 4)), *row.segments[-1][4:])
    pool = poisoned_pool(forest, spec, 2, CHUNK, spare=4)
    plan, kernels = plan_of(forest), ReferenceKernels()
    assert plan.steps_left == CHUNK - max(row.segments[-1][3] for row in forest.rows)
    for step in range(4):
        q = torch.randn(6, 4, 8, dtype=torch.float64)
        out = torch.full_like(q, float("nan"))
        kernels.decode_attention(plan, q, pool, 1, spec, out)
        torch.testing.assert_close(out, expected(forest, q, pool, spec), rtol=1e-9, atol=1e-9)
        assert plan.steps == step
        plan.advance()
        for row in forest.rows:
            last = row.segments[-1]
            row.segments[-1] = (*last[:3], last[3] + 1, *last[4:])
    assert kernels.counters.decode_plans == 1
    plan.steps = plan.steps_left
    with pytest.raises(ValueError, match="decode plan is valid"):
        plan.advance()


def test_rows_with_different_shifts_share_a_read() -> None:
    spec, rng = make_spec(), np.random.default_rng(0)
    forest = random_forest(rng, 1, CHUNK)
    shared = [(i, forest.blocks + i, 0, CHUNK, i * CHUNK, 0) for i in range(5)]
    tails = [(5, forest.blocks + 5 + row, 0, 3, 5 * CHUNK, 0) for row in range(3)]
    forest.rows = [type(forest.rows[0])([(*s[:5], 10 * r) for s in shared], 42) for r in range(3)]
    for row, tail in zip(forest.rows, tails, strict=True):
        row.segments.append(tail)
    forest.blocks += 8
    forest.runs = np.array([[0, 3, 0, 5]], dtype=np.int32)
    pool = poisoned_pool(forest, spec, 2, CHUNK)
    q = torch.randn(3, 4, 8, dtype=torch.float64)
    out = torch.empty_like(q)
    plan = plan_of(forest)
    assert (plan.shared_items, plan.shifts[:3].tolist(), plan.tokens_read) == (5, [0, 10, 20], 5 * CHUNK + 9)
    ReferenceKernels().decode_attention(plan, q, pool, 1, spec, out)
    torch.testing.assert_close(out, expected(forest, q, pool, spec), rtol=1e-9, atol=1e-9)


def test_a_wrong_run_costs_reads_not_results() -> None:
    spec, rng = make_spec(), np.random.default_rng(1)
    forest = random_forest(rng, 9, CHUNK, holes=True)
    forest.runs = np.array([[0, 9, 0, 20]], dtype=np.int32)  # claims that all share everything
    pool = poisoned_pool(forest, spec, 2, CHUNK)
    q = torch.randn(9, 4, 8, dtype=torch.float64)
    out = torch.empty_like(q)
    ReferenceKernels().decode_attention(plan_of(forest), q, pool, 1, spec, out)
    torch.testing.assert_close(out, expected(forest, q, pool, spec), rtol=1e-9, atol=1e-9)
    forest.runs = np.array([[0, 10, 0, 1]], dtype=np.int32)
    with pytest.raises(ValueError, match="outside 9 rows"):
        plan_of(forest)


def test_empty_states_merge_without_nan() -> None:
    def empty(*shape: int) -> SoftmaxState:
        return SoftmaxState(torch.zeros(*shape, 4), torch.full(shape, float("-inf")), torch.zeros(shape))

    merged = merge(empty(3, 2), dim=0)
    assert torch.equal(merged.output(), torch.zeros(2, 4))
    assert bool((merged.peak == float("-inf")).all())
    assert not bool(merged.total.any())
    full = SoftmaxState(torch.ones(1, 2, 4), torch.zeros(1, 2), torch.full((1, 2), 2.0))
    both = merge(SoftmaxState(*map(torch.cat, zip(full, empty(2, 2), strict=True))), dim=0)
    assert torch.equal(both.output(), full.output()[0])
    # Peaks far apart: no overflow either way.
    far = SoftmaxState(torch.ones(2, 1, 4), torch.tensor([[-1e30], [1e30]]), torch.ones(2, 1))
    assert torch.equal(merge(far, dim=0).output(), torch.ones(1, 4))


def test_a_broken_row_does_not_touch_others() -> None:
    """NaN in one row's own keys stays in that row."""
    spec, rng = make_spec(), np.random.default_rng(2)
    forest = random_forest(rng, 8, CHUNK)
    pool = poisoned_pool(forest, spec, 2, CHUNK)
    pool[forest.rows[3].segments[-1][1]] = float("nan")
    q = torch.randn(8, 4, 8, dtype=torch.float64)
    out = torch.empty_like(q)
    ReferenceKernels().decode_attention(plan_of(forest), q, pool, 1, spec, out)
    assert out.isnan().any(dim=-1).any(dim=-1).tolist() == [row == 3 for row in range(8)]


def test_plan_items_are_what_native_kernels_expect() -> None:
    rng = np.random.default_rng(7)
    for _ in range(20):
        forest = random_forest(rng, int(rng.integers(1, 300)), CHUNK, shifts=True, holes=True)
        plan = plan_of(forest)
        widths = np.diff(plan.row_indptr)
        assert (widths[: plan.shared_items] > 1).all()
        assert (widths[plan.shared_items :] == 1).all()
        arrays = [plan.block, plan.first, plan.count, plan.base, plan.row_indptr, plan.rows, plan.shifts]
        assert all(array.dtype == np.int32 for array in [*arrays, plan.tail_item, plan.query_position])
        assert plan.rows[plan.row_indptr[plan.tail_item]].tolist() == list(range(plan.num_rows))
        assert len(plan.rows) == sum(len(row.segments) for row in forest.rows)


def test_unknown_kernels_are_named() -> None:
    assert load_kernels("auto", "cpu").name == "reference"
    with pytest.raises(KernelsUnavailableError, match=r"'fast'.*auto, reference"):
        load_kernels("fast", "cpu")
