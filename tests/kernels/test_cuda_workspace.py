"""Memory for partial results of prefill attention on GPUs: bounded, whatever the prompt, with the same results."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from kernels.attention_cases import Case, own_tokens, prefill
from kernels.cuda_emulated import CXX, H200, configure, emulated_library
from kernels.forests import Shape, random_forest
from kernels.module_forest import module_case
from kernels.plain_prefill import PlainPrefillWork
from seeds import seeds
from torch import Tensor

from trunkline.kernels.cuda import CudaKernels
from trunkline.kernels.cuda_work import (
    WORKSPACE_BYTES,
    PrefillCut,
    PrefillWork,
    PrefillWorks,
    partial_floats,
)
from trunkline.kernels.plan import PrefillPlan

CASES = [
    (17, "rotary"),
    (27, "alibi"),
    *(pytest.param(seed, kind, marks=pytest.mark.area("cuda")) for seed, kind in ((19, "rotary"), (7, "alibi"))),
]
"""Prompts between shifted modules, whose rows have several partial results each."""


class CountingKernels(CudaKernels):
    """Emulated, with little memory; counts launches of attention."""

    def __init__(self, workspace_bytes: int) -> None:
        configure(H200, 0)
        self.launches = 0
        self.most_partials = 0
        super().__init__(emulated_library(), self._count, workspace_bytes=workspace_bytes)

    def _count(self) -> int:
        self.launches += 1
        return 0

    @property
    def bytes_taken(self) -> int:
        return 0 if self._workspace is None else 4 * len(self._workspace._memory)


def run(case: Case, workspace_bytes: int) -> tuple[Tensor, CountingKernels]:
    kernels = CountingKernels(workspace_bytes)
    plan = case.forest.prefill_plan(case.counts)
    out = prefill(kernels, case, plan=plan)
    assert isinstance(plan.state, PrefillWorks)
    (work,) = plan.state.values()
    kernels.most_partials = max(part.partials for part, _ in work.parts)
    return out, kernels


@pytest.mark.skipif(CXX is None, reason="no C++ compiler for the emulation")
@pytest.mark.parametrize(("seed", "kind"), CASES)
def test_results_do_not_depend_on_the_memory(seed: int, kind: str) -> None:
    """Bit by bit, down to so little memory that each tile of queries is a launch of its own."""
    case = module_case(seed, kind, True)
    whole, unbounded = run(case, 1 << 30)
    case.assert_result(whole)
    assert unbounded.launches == 1
    each = 4 * partial_floats(case.spec.heads, case.spec.head_dim)
    again, tile_by_tile = run(case, each)
    assert torch.equal(again, whole)
    launches = [tile_by_tile.launches]
    for times in (1, 2):
        most = times * tile_by_tile.most_partials
        again, kernels = run(case, most * each)
        assert torch.equal(again, whole)
        assert kernels.bytes_taken == most * each
        launches.append(kernels.launches)
    assert launches[0] >= launches[1] >= launches[2]
    assert launches[1] > 1


def long_plan(tokens: int, modules: int, module_tokens: int, chunk_size: int) -> PrefillPlan:
    """A prompt's own tokens behind shifted modules; blocks in order."""
    blocks_each = module_tokens // chunk_size
    own = -(-tokens // chunk_size)
    count = np.full(modules * blocks_each + own, chunk_size)
    shift = np.concatenate([np.repeat(np.arange(modules) * 10 + 5, blocks_each), np.zeros(own)])
    base = np.concatenate(
        [np.tile(np.arange(blocks_each), modules) * chunk_size, 100_000 + np.arange(own) * chunk_size]
    )
    return PrefillPlan(
        chunk_size=chunk_size,
        query_indptr=np.array([0, tokens], dtype=np.int32),
        query_position=100_000 + np.arange(tokens, dtype=np.int32),
        item_indptr=np.array([0, len(count)], dtype=np.int32),
        block=np.arange(len(count), dtype=np.int32),
        first=np.zeros(len(count), dtype=np.int32),
        count=count.astype(np.int32),
        base=base.astype(np.int32),
        shift=shift.astype(np.int32),
    )


@pytest.mark.parametrize("heads", [(32, 8), (64, 8), (28, 4)])
def test_many_shifted_modules_take_bounded_memory(heads: tuple[int, int]) -> None:
    """8,192 new tokens behind 20 of them: gigabytes at once; every row is computed once, with all its pieces."""
    plan, head_dim = long_plan(8192, 20, 512, 64), 128
    each = 4 * partial_floats(heads[0], head_dim)
    cut = functools.partial(
        PrefillCut, rows_per_tile=64 * heads[1] // heads[0], units_wanted=66, piece_tokens_min=256
    )
    at_once = PrefillWork(plan, cut())
    (whole,) = at_once.parts
    assert whole.partials * each > 2 << 30
    work = PrefillWork(plan, cut(partials_max=WORKSPACE_BYTES // each))
    assert len(work.parts) >= whole.partials * each // WORKSPACE_BYTES
    assert all(part.partials * each <= WORKSPACE_BYTES for part in work.parts)
    assert sum(part.partials for part in work.parts) == whole.partials
    rows = [row for part in work.parts for row in range(part.row_start, part.row_stop)]
    assert rows == list(range(8192))
    pieces = [piece for part in work.parts for piece in range(part.piece_start, part.piece_stop)]
    assert pieces == list(range(whole.piece_start, whole.piece_stop))


def test_without_anything_to_merge_nothing_is_split() -> None:
    """An ordinary prompt needs no memory for partial results, however long it is."""
    plan = long_plan(8192, 0, 64, 64)
    work = PrefillWork(plan, PrefillCut(rows_per_tile=16, units_wanted=66, piece_tokens_min=256, partials_max=100))
    assert len(work.parts) == 1
    assert not work.parts[0].needs_merge


@pytest.mark.skipif(CXX is None, reason="no C++ compiler for the emulation")
def test_sums_are_float32() -> None:
    """Also those of cuBLAS, which by default may round them on the way."""
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = True
    CountingKernels(1 << 20)
    assert not matmul.allow_bf16_reduced_precision_reduction
    assert not matmul.allow_fp16_reduced_precision_reduction


@pytest.mark.parametrize("seed", seeds(12))
def test_words_are_those_of_plain_python(seed: int) -> None:
    """Of random prompts, whole and in parts."""
    rng = np.random.default_rng(seed)
    shape = Shape(int(rng.integers(1, 12)), int(rng.choice([1, 4, 16])), shifts=seed % 2 == 1, modules=seed % 3)
    forest = random_forest(rng, shape)
    counts = [int(rng.integers(1, own_tokens(row) + 1)) for row in forest.rows]
    plan = forest.prefill_plan(counts)
    cut = PrefillCut(
        rows_per_tile=int(rng.integers(1, 20)),
        units_wanted=int(rng.integers(1, 100)),
        piece_tokens_min=int(rng.choice([1, 8, 64])),
        piece_tokens=int(rng.choice([0, 0, 32])),
        partials_max=int(rng.choice([1, 50, 1 << 62])),
    )
    work, plain = PrefillWork(plan, cut), PlainPrefillWork(plan, cut)
    words, starts = plain.words()
    assert [(*part[:5], part.needs_merge) for part in work.parts] == [tuple(part) for part in plain.parts]
    assert [part.word for part in work.parts] == starts
    assert torch.equal(work.words, words)


def test_contradictory_prefill_plans_are_refused() -> None:
    for start, stop, sentence in ((1, 100, "query_indptr is wrong"), (0, 99, "query_indptr is wrong")):
        plan = long_plan(100, 1, 64, 16)
        plan.query_indptr[:] = start, stop
        with pytest.raises(ValueError, match=sentence):
            PrefillWork(plan, PrefillCut(rows_per_tile=16, units_wanted=66, piece_tokens_min=256))
