"""Prefill attention of every implementation against dense attention in float64."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from kernels.forests import FILLINGS, Forest, Range, Row, Shape, fill_pool, one_row, pool_data, random_forest
from kernels.implementations import DTYPES, NATIVE, REFERENCE, make_kernels
from kernels.oracle import (
    HEAD_DIMS,
    alibi_slopes,
    assert_as_exact_as,
    has_positions,
    make_spec,
    prefill_oracle,
    random_spec,
)
from torch import Tensor

from trunkline.kernels.ops import AttentionSpec, Kernels, KvPool
from trunkline.kernels.plan import PrefillPlan

CHUNKS = (1, 2, 3, 7, 8, 16, 32, 64, 100, 128, 256)


@dataclass(frozen=True)
class Case:
    """Sequences, how many of each one's last tokens are queries, and what should come out."""

    forest: Forest
    counts: list[int]
    spec: AttentionSpec
    data: Tensor
    q: Tensor
    exact: Tensor
    plain: Tensor

    @property
    def sum_terms(self) -> int:
        return max(row.tokens for row in self.forest.rows)


def make_case(forest: Forest, counts: list[int], spec: AttentionSpec, dtype: torch.dtype, seed: int) -> Case:
    data = pool_data(forest, spec, dtype, seed)
    generator = torch.Generator().manual_seed(seed)
    size = (0.3, 1.0, 3.0)[seed % 3]
    q = (size * torch.randn(sum(counts), spec.heads, spec.head_dim, generator=generator)).to(dtype)
    exact, plain = prefill_oracle(forest, counts, q, data, 1, spec)
    return Case(forest, counts, spec, data, q, exact, plain)


def own_tokens(row: Row) -> int:
    """Tokens at the row's end that lie at consecutive positions."""
    positions = row.key_positions()[::-1]
    return int((positions == row.position - np.arange(len(positions))).cumprod().sum())


@functools.lru_cache(maxsize=8)
def random_case(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    spec = random_spec(rng, HEAD_DIMS[seed % len(HEAD_DIMS)])
    size = CHUNKS[seed * 7 % len(CHUNKS)]
    longest = 700 // size
    shape = Shape(
        int(rng.integers(1, 5)),
        size,
        depth_max=min(6, longest),
        private_max=min(8, longest),
        shifts=has_positions(spec) and bool(rng.random() < 0.5),
        holes=bool(rng.random() < 0.5),
        modules=int(rng.choice([0, 1])),
    )
    forest = random_forest(rng, shape)
    counts = [int(rng.integers(1, own_tokens(row) + 1)) for row in forest.rows]
    return make_case(forest, counts, spec, DTYPES[seed % len(DTYPES)], seed)


def prefill(kernels: Kernels, case: Case, pool: KvPool, plan: PrefillPlan, *, strided: bool = False) -> Tensor:
    """Run the op with everything around its operands poisoned."""
    queries, heads, head_dim = case.q.shape
    width = heads + 2 * case.spec.kv_heads if strided else heads
    around = torch.full((queries + 4, width, head_dim), float("nan"), dtype=case.q.dtype)
    q = around[2:-2, :heads]
    q.copy_(case.q)
    results = torch.full((queries + 4, heads, head_dim), float("nan"), dtype=case.q.dtype)
    kernels.prefill_attention(plan, q, pool, 1, case.spec, results[2:-2])
    assert bool(results[:2].isnan().all() & results[-2:].isnan().all()), "written outside of its rows"
    return results[2:-2]


def check(kernels: Kernels, case: Case, seed: int) -> None:
    pool = fill_pool(kernels, case.data, case.spec, np.random.default_rng(seed), FILLINGS[seed % 5 % 3])
    out = prefill(kernels, case, pool, case.forest.prefill_plan(case.counts), strided=seed % 2 == 0)
    assert_as_exact_as(out, case.exact, case.plain, sum_terms=case.sum_terms)
    assert kernels.counters.calls["prefill_attention"] == 1
    most = sum(row.tokens for row in case.forest.rows)
    assert kernels.counters.prefill_tokens_read == most or case.spec.window


@pytest.mark.parametrize("seed", range(30))
def test_random_sequences(seed: int, kernels: Kernels) -> None:
    check(kernels, random_case(seed), seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 1000))
def test_more_random_sequences(seed: int, kernels: Kernels) -> None:
    check(kernels, random_case(seed), seed)


@functools.lru_cache(maxsize=2)
def prompts_case(dtype: torch.dtype, head_dim: int) -> Case:
    """Whole prompts of many lengths in one call, the blocks of each in descending order."""
    lengths = [1, 2, 15, 16, 17, 63, 64, 65, 130, 257]
    forest = Forest(16, [], np.zeros((0, 4), dtype=np.int32))
    for length in lengths:
        row = one_row(16, length)
        last = forest.blocks + len(row.ranges) - 1
        row.ranges = [r._replace(block=last - r.table_index) for r in row.ranges]
        forest.rows.append(row)
        forest.blocks = last + 1
    return make_case(forest, lengths, make_spec(4, 2, head_dim), dtype, 1)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_prompts_are_causal(dtype: torch.dtype, head_dim: int, kernels: Kernels) -> None:
    check(kernels, prompts_case(dtype, head_dim), 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_new_tokens_after_a_long_context(dtype: torch.dtype, implementation: str) -> None:
    """Chunked prefill: the tokens of a step see all that earlier steps stored; any number of workers."""
    forest = Forest(64, [one_row(64, 1500), one_row(64, 900, 24)], np.zeros((0, 4), dtype=np.int32), 39)
    case = make_case(forest, [150, 3], make_spec(8, 2, 64), dtype, 7)
    for threads in (1, 2, 3):
        check(make_kernels(implementation, threads), case, 7)


def test_layers_of_one_plan_may_differ(kernels: Kernels) -> None:
    rng, base = np.random.default_rng(3), make_spec(4, 2, 64)
    assert base.inverse_frequencies is not None
    forest = random_forest(rng, Shape(3, 16, private_max=4, shifts=True, holes=True, modules=1))
    counts = [own_tokens(row) for row in forest.rows]
    plan, data = forest.prefill_plan(counts), pool_data(forest, base, torch.float32, 3)
    pool = fill_pool(kernels, data, base, rng, "written")
    for spec in (
        base,
        replace(base, window=11),
        replace(base, window=30, inverse_frequencies=base.inverse_frequencies / 3),
        replace(base, alibi_slopes=alibi_slopes(4), inverse_frequencies=None, soft_cap=3.0),
        base,
    ):
        case = make_case(forest, counts, spec, torch.float32, 3)
        assert_as_exact_as(prefill(kernels, case, pool, plan), case.exact, case.plain, sum_terms=case.sum_terms)


@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
def test_queries_that_see_nothing_give_zeros(soft_cap: float, kernels: Kernels) -> None:
    """The first two of three queries lie before all keys; the next sequence's window has moved past its own."""
    late = Row([Range(0, 0, 0, 5, 20, 0), Range(1, 1, 0, 2, 25, 0)], 20)
    gone = one_row(8, 9, 2)
    gone.position += 50
    forest = Forest(8, [late, gone, one_row(8, 30, 4)], np.zeros((0, 4), dtype=np.int32), 8)
    case = make_case(forest, [3, 2, 30], make_spec(4, 2, 64, window=12, soft_cap=soft_cap), torch.float32, 1)
    out = prefill(kernels, case, KvPool.wrap(case.data), forest.prefill_plan(case.counts))
    assert not bool(out[[0, 1, 3, 4]].any())
    assert_as_exact_as(out, case.exact, case.plain, sum_terms=case.sum_terms)


def test_a_sequence_does_not_depend_on_its_neighbours(kernels: Kernels) -> None:
    """NaN in one sequence's keys stays there."""
    case = prompts_case(torch.float32, 64)
    data = case.data.clone()
    data[case.forest.rows[6].ranges[0].block] = float("nan")
    out = prefill(kernels, case, KvPool.wrap(data), case.forest.prefill_plan(case.counts))
    broken = [bool(part.isnan().any()) for part in torch.split(out, case.counts)]
    assert broken == [index == 6 for index in range(len(case.counts))]


@pytest.mark.parametrize("seed", range(6))
def test_float64_of_the_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    spec = random_spec(rng, 16)
    shape = Shape(4, 8, shifts=has_positions(spec), holes=seed % 2 == 0, modules=1, private_max=5)
    forest = random_forest(rng, shape)
    counts = [int(rng.integers(1, own_tokens(row) + 1)) for row in forest.rows]
    case = make_case(forest, counts, spec, torch.float64, seed)
    out = prefill(make_kernels(REFERENCE), case, KvPool.wrap(case.data), forest.prefill_plan(counts))
    torch.testing.assert_close(out, case.exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("level", NATIVE)
@pytest.mark.parametrize("field", ["query_indptr", "item_indptr"])
@pytest.mark.parametrize("change", ["short", "late", "falls"])
def test_broken_offsets_are_refused(change: str, field: str, level: str) -> None:
    forest = Forest(8, [one_row(8, 12), one_row(8, 20, 2)], np.zeros((0, 4), dtype=np.int32), 5)
    case = make_case(forest, [2, 3], make_spec(4, 2, 64), torch.float32, 0)
    plan = forest.prefill_plan(case.counts)
    end = int(getattr(plan, field)[-1])
    changed = {"short": [0, 1, end - 1], "late": [1, 1, end], "falls": [0, end + 5, end]}[change]
    setattr(plan, field, np.array(changed, dtype=np.int32))
    with pytest.raises(ValueError, match=f"{field} must ascend from 0 to {end}"):
        prefill(make_kernels(level), case, KvPool.wrap(case.data), plan)


def test_shifts_need_positions(kernels: Kernels) -> None:
    forest = Forest(8, [one_row(8, 12)], np.zeros((0, 4), dtype=np.int32), 2)
    forest.rows[0].ranges[0] = forest.rows[0].ranges[0]._replace(shift=-3)
    case = make_case(forest, [2], make_spec(4, 2, 64), torch.float32, 0)
    bare = replace(case, spec=make_spec(4, 2, 64, rotary_dim=0))
    with pytest.raises(ValueError, match="shift needs rotary positions or ALiBi"):
        prefill(kernels, bare, KvPool.wrap(case.data), forest.prefill_plan(case.counts))
