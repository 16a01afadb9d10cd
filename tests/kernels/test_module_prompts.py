"""Attention over prompts with modules, of every implementation, against dense attention in float64.

Own tokens and modules interleave: in a prefill, keys of modules may act later than early queries of the same
entry, in any order of the items. In decode, rows share modules in any subsets, orders and shifts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from kernels.attention_cases import check_decode, check_prefill, decode, make_case
from kernels.forests import Forest
from kernels.implementations import CPU, NATIVE, make_kernels
from kernels.module_forest import KINDS, Prompts, module_case, module_forest
from kernels.oracle import make_spec
from kernels.pairwise import pairwise
from seeds import seeds


def check(implementation: str, seed: int, kind: str) -> None:
    check_prefill(make_kernels(implementation), module_case(seed, kind, True), seed)
    check_decode(make_kernels(implementation), module_case(seed, kind, False), seed)


@pairwise(variant=range(10), implementation=CPU, kind=KINDS)
def test_new_tokens_and_shared_modules(variant: int, implementation: str, kind: str) -> None:
    check(implementation, variant, kind)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 300))
def test_new_tokens_and_shared_modules_more(seed: int, implementation: str) -> None:
    check(implementation, seed, KINDS[seed // 4 % len(KINDS)])


def test_own_tokens_and_modules_interleave() -> None:
    """In the cases above: modules behind queries of the same entry, and queries behind modules."""
    behind = between = 0
    for seed in range(10):
        for row in module_case(seed, "rotary", True).forest.rows:
            modules = row.key_positions()[: row.tokens - len(row.own)]
            behind += int((modules > row.own[0]).any())
            between += int((modules > row.own[0]).any() and (modules < row.own[-1]).any())
    assert behind > 5
    assert between > 5


@pytest.mark.parametrize("seed", seeds(6))
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


@pairwise(level=NATIVE, threads=(1, 2))
def test_results_do_not_depend_on_the_batch_in_invariant_mode(level: str, threads: int) -> None:
    """Modules that a row reads twice included."""
    spec = make_spec(4, 2, 64)
    forest = module_forest(np.random.default_rng(1), Prompts(8, 16, shifts=True, module_tokens_max=300))
    case = make_case(forest, spec, torch.float32, 1)
    whole = decode(make_kernels(level, threads, invariant=True), case)
    case.assert_result(whole)
    for index, row in enumerate(forest.rows):
        runs = forest.runs[forest.runs[:, 0] == index] * np.int32(1)
        runs[:, :2] = 0, 1
        alone = replace(case, forest=Forest(16, [row], runs, forest.blocks), q=case.q[index : index + 1])
        one = decode(make_kernels(level, threads, invariant=True), alone)
        assert torch.equal(one, whole[index : index + 1])
