"""Prefill attention of every implementation against dense attention in float64."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from kernels.attention_cases import (
    CHUNKS,
    Case,
    check_prefill,
    make_case,
    own_tokens,
    prefill,
    random_prefill_case,
)
from kernels.forests import Forest, Range, Row, Shape, fill_pool, no_runs, one_row, pool_data, random_forest
from kernels.implementations import CPU, CUDA, DTYPES, NATIVE, REFERENCE, make_kernels
from kernels.oracle import HEAD_DIMS, alibi_slopes, has_positions, make_spec, random_spec
from kernels.pairwise import pairwise
from seeds import seeds

from trunkline.kernels.ops import Kernels, KvPool
from trunkline.kvstore.chunk_format import KV_DTYPES

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 130, 257)

everywhere = pairwise(implementation=(*CPU, *CUDA))


@pairwise(
    seeded=True,
    chunk_size=CHUNKS,
    implementation=CPU,
    head_dim=(32, *HEAD_DIMS),
    dtype=DTYPES,
    kv_dtype=KV_DTYPES,
)
def test_random_sequences(
    chunk_size: int, implementation: str, head_dim: int, dtype: torch.dtype, kv_dtype: str, seed: int
) -> None:
    case = random_prefill_case(seed, chunk_size, head_dim, dtype, kv_dtype)
    check_prefill(make_kernels(implementation), case, seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 1000))
def test_more_random_sequences(seed: int) -> None:
    """Odd strides: neighbouring seeds differ in everything."""
    chunk_size, implementation = CHUNKS[seed * 7 % len(CHUNKS)], CPU[seed // 30 % len(CPU)]
    case = random_prefill_case(seed, chunk_size, HEAD_DIMS[seed % len(HEAD_DIMS)], DTYPES[seed % len(DTYPES)])
    check_prefill(make_kernels(implementation), case, seed)


@functools.lru_cache(maxsize=15)
def prompts_case(dtype: torch.dtype, head_dim: int, lengths: tuple[int, ...] = LENGTHS) -> Case:
    """Whole prompts of many lengths in one call, the blocks of each in descending order."""
    forest = Forest(16, [], no_runs())
    for length in lengths:
        row = one_row(16, length)
        last = forest.blocks + len(row.ranges) - 1
        row.ranges = [r._replace(block=last - r.table_index) for r in row.ranges]
        forest.rows.append(row)
        forest.blocks = last + 1
    return make_case(forest, make_spec(4, 2, head_dim), dtype, 1, [*lengths])


@pairwise(implementation=CPU, head_dim=(32, *HEAD_DIMS), dtype=DTYPES)
def test_whole_prompts_are_causal(implementation: str, head_dim: int, dtype: torch.dtype) -> None:
    check_prefill(make_kernels(implementation), prompts_case(dtype, head_dim), 2)


@functools.lru_cache(maxsize=3)
def long_case(dtype: torch.dtype) -> Case:
    forest = Forest(64, [one_row(64, 1500), one_row(64, 900, 24)], no_runs(), 39)
    return make_case(forest, make_spec(8, 2, 64), dtype, 7, [150, 3])


@pairwise(implementation=CPU, dtype=DTYPES)
def test_new_tokens_after_a_long_context(implementation: str, dtype: torch.dtype) -> None:
    """Chunked prefill: the tokens of a step see all that earlier steps stored; any number of workers."""
    for threads in (1, 3):
        check_prefill(make_kernels(implementation, threads), long_case(dtype), 7)


@everywhere
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
        case = make_case(forest, spec, torch.float32, 3, counts)
        case.assert_result(prefill(kernels, case, pool, plan))


@pairwise(seeded=True, implementation=CPU, dtype=DTYPES, kv_dtype=KV_DTYPES)
def test_sinks_and_spans(implementation: str, dtype: torch.dtype, kv_dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    spec = random_spec(rng, 64)
    sinks = torch.from_numpy(rng.choice([-40.0, -1.0, 0.5, 3.0, 60.0], size=spec.heads)).float()
    forest = random_forest(rng, Shape(3, 16, private_max=6, shifts=has_positions(spec), holes=True, modules=1))
    counts = [own_tokens(row) for row in forest.rows]
    for own in (replace(spec, sinks=sinks), replace(spec, window=0, span=int(rng.integers(1, 90)))):
        check_prefill(make_kernels(implementation), make_case(forest, own, dtype, seed, counts, kv_dtype), seed)


@everywhere
@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
def test_queries_that_see_nothing_give_zeros(soft_cap: float, kernels: Kernels) -> None:
    """The first two of three queries lie before all keys; the next sequence's window has moved past its own."""
    late = Row([Range(0, 0, 0, 5, 20, 0), Range(1, 1, 0, 2, 25, 0)], 20)
    gone = one_row(8, 9, 2)
    gone.position += 50
    forest = Forest(8, [late, gone, one_row(8, 30, 4)], no_runs(), 8)
    spec = make_spec(4, 2, 64, window=12, soft_cap=soft_cap)
    case = make_case(forest, spec, torch.float32, 1, [3, 2, 30])
    out = prefill(kernels, case)
    assert not bool(out[[0, 1, 3, 4]].any())
    case.assert_result(out)


@everywhere
def test_a_sequence_does_not_depend_on_its_neighbours(kernels: Kernels) -> None:
    """NaN in one sequence's keys stays there."""
    case = prompts_case(torch.float32, 64, LENGTHS[:6])
    data = case.data.clone()
    data[case.forest.rows[4].ranges[0].block] = float("nan")
    out = prefill(kernels, case, KvPool.wrap(data))
    broken = [bool(part.isnan().any()) for part in torch.split(out, case.counts)]
    assert broken == [index == 4 for index in range(len(case.counts))]


@pytest.mark.parametrize("seed", seeds(6))
def test_float64_of_the_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    spec = random_spec(rng, 16)
    shape = Shape(4, 8, shifts=has_positions(spec), holes=seed % 2 == 0, modules=1, private_max=5)
    forest = random_forest(rng, shape)
    counts = [int(rng.integers(1, own_tokens(row) + 1)) for row in forest.rows]
    case = make_case(forest, spec, torch.float64, seed, counts)
    torch.testing.assert_close(prefill(make_kernels(REFERENCE), case), case.exact, rtol=1e-10, atol=1e-10)


@pytest.mark.skipif(not NATIVE, reason="the compiled kernels are not installed")
@pytest.mark.parametrize("field", ["query_indptr", "item_indptr"])
@pytest.mark.parametrize("change", ["short", "late", "falls"])
def test_broken_offsets_are_refused(change: str, field: str) -> None:
    forest = Forest(8, [one_row(8, 12), one_row(8, 20, 2)], no_runs(), 5)
    case = make_case(forest, make_spec(4, 2, 64), torch.float32, 0, [2, 3])
    plan = forest.prefill_plan(case.counts)
    end = int(getattr(plan, field)[-1])
    changed = {"short": [0, 1, end - 1], "late": [1, 1, end], "falls": [0, end + 5, end]}[change]
    setattr(plan, field, np.array(changed, dtype=np.int32))
    with pytest.raises(ValueError, match=f"{field} must ascend from 0 to {end}"):
        prefill(make_kernels(NATIVE[0]), case, plan=plan)


@everywhere
def test_shifts_need_positions(kernels: Kernels) -> None:
    forest = Forest(8, [one_row(8, 12)], no_runs(), 2)
    forest.rows[0].ranges[0] = forest.rows[0].ranges[0]._replace(shift=-3)
    case = make_case(forest, make_spec(4, 2, 64), torch.float32, 0, [2])
    with pytest.raises(ValueError, match="shift needs rotary positions or ALiBi"):
        prefill(kernels, replace(case, spec=make_spec(4, 2, 64, rotary_dim=0)))
