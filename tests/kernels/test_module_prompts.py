"""Attention over prompts with modules, of every implementation, against dense attention in float64.

Own tokens and modules interleave: in a prefill, keys of modules may act later than early queries of the same
entry, in any order of the items. In decode, rows share modules in any subsets, orders and shifts.
"""

from __future__ import annotations

import functools
from collections import Counter

import numpy as np
import pytest
import torch
from kernels import test_decode, test_prefill
from kernels.forests import Forest
from kernels.implementations import DTYPES, NATIVE, make_kernels
from kernels.module_forest import Prompts, module_forest
from kernels.oracle import HEAD_DIMS, HEADS, alibi_slopes, assert_as_exact_as, has_positions, make_spec

from trunkline.kernels.ops import AttentionSpec, Kernels, KvPool

CHUNKS = (1, 3, 8, 16, 32, 64, 100)
KINDS = ("rotary", "alibi", "learned")


def spec_of(seed: int, kind: str) -> AttentionSpec:
    """Learned positions are in the hidden states already: attention knows only where each token acts."""
    heads, kv_heads = HEADS[seed % len(HEADS)]
    return make_spec(
        heads,
        kv_heads,
        HEAD_DIMS[seed * 3 % len(HEAD_DIMS)],
        rotary_dim=None if kind == "rotary" else 0,
        alibi_slopes=alibi_slopes(heads) if kind == "alibi" else None,
        window=(0, 0, 7, 40)[seed % 4],
        soft_cap=(0.0, 0.0, 5.0)[seed % 3],
    )


def forest_of(seed: int, spec: AttentionSpec, rows: int) -> Forest:
    rng = np.random.default_rng(seed)
    shifts = has_positions(spec) and seed % 2 == 1
    return module_forest(rng, Prompts(rows, CHUNKS[seed % len(CHUNKS)], shifts=shifts))


@functools.lru_cache(maxsize=8)
def prefill_case(seed: int, kind: str) -> test_prefill.Case:
    spec = spec_of(seed, kind)
    forest = forest_of(seed, spec, 1 + seed % 4)
    rng = np.random.default_rng(seed)
    counts = [len(row.own) if seed % 3 else int(rng.integers(1, len(row.own) + 1)) for row in forest.rows]
    return test_prefill.make_case(forest, counts, spec, DTYPES[seed % len(DTYPES)], seed)


@functools.lru_cache(maxsize=8)
def decode_case(seed: int, kind: str) -> test_decode.Case:
    spec = spec_of(seed, kind)
    return test_decode.make_case(forest_of(seed, spec, 2 + seed % 7), spec, DTYPES[seed % len(DTYPES)], seed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(10))
def test_new_tokens_stand_between_modules(seed: int, kind: str, kernels: Kernels) -> None:
    test_prefill.check(kernels, prefill_case(seed, kind), seed)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(100, 300))
def test_new_tokens_stand_between_modules_more(seed: int, kind: str, kernels: Kernels) -> None:
    test_prefill.check(kernels, prefill_case(seed, kind), seed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(10))
def test_rows_share_modules_in_any_subset(seed: int, kind: str, kernels: Kernels) -> None:
    test_decode.check(kernels, decode_case(seed, kind), seed)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(100, 300))
def test_rows_share_modules_in_any_subset_more(seed: int, kind: str, kernels: Kernels) -> None:
    test_decode.check(kernels, decode_case(seed, kind), seed)


def test_own_tokens_and_modules_interleave() -> None:
    """In the cases above: modules behind queries of the same entry, and queries behind modules."""
    behind = between = 0
    for seed in range(10):
        for row in prefill_case(seed, "rotary").forest.rows:
            modules = row.key_positions()[: row.tokens - len(row.own)]
            behind += int((modules > row.own[0]).any())
            between += int((modules > row.own[0]).any() and (modules < row.own[-1]).any())
    assert behind > 5
    assert between > 5


@pytest.mark.parametrize("seed", range(20))
def test_each_range_is_read_once(seed: int) -> None:
    """By whatever rows; more often only where one row reads it at several places."""
    rng = np.random.default_rng(seed)
    forest = module_forest(rng, Prompts(int(rng.integers(2, 40)), 8, shifts=seed % 2 == 1))
    plan = forest.decode_plan()
    readings: Counter[tuple[int, ...]] = Counter()
    for row in forest.rows:
        readings |= Counter(tuple(r[1:4]) for r in row.ranges)
    assert plan.tokens_read == sum(place[2] * times for place, times in readings.items())
    widths = np.diff(plan.row_indptr)
    assert widths.max() > 1
    for start, stop in zip(plan.row_indptr[:-1], plan.row_indptr[1:], strict=True):
        assert (np.diff(plan.rows[start:stop]) > 0).all(), "rows ascend within an item"


@pytest.mark.parametrize("level", NATIVE)
@pytest.mark.parametrize("threads", [1, 2])
def test_results_do_not_depend_on_the_batch_in_invariant_mode(threads: int, level: str) -> None:
    """Modules that a row reads twice included."""
    spec = make_spec(4, 2, 64)
    forest = module_forest(np.random.default_rng(1), Prompts(8, 16, shifts=True, module_tokens_max=300))
    case = test_decode.make_case(forest, spec, torch.float32, 1)
    whole = test_decode.decode(make_kernels(level, threads, invariant=True), case, KvPool.wrap(case.data.clone()))
    assert_as_exact_as(whole, case.exact, case.plain, sum_terms=case.sum_terms)
    for index, row in enumerate(forest.rows):
        runs = forest.runs[forest.runs[:, 0] == index] * np.int32(1)
        runs[:, :2] = 0, 1
        alone = Forest(16, [row], runs, forest.blocks)
        one = test_decode.Case(alone, spec, case.data, case.q[index : index + 1], whole[:0], whole[:0])
        kernels = make_kernels(level, threads, invariant=True)
        assert torch.equal(
            test_decode.decode(kernels, one, KvPool.wrap(case.data.clone())), whole[index : index + 1]
        )
