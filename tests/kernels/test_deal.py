"""Units of work are dealt to workers longest first: never worse than in turns, and within a bound of the best."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from kernels.forests import Forest, Range, Row, Shape, beam_forest, random_forest, separate_rows
from kernels.work_words import (
    Work,
    check_lists,
    check_loads,
    decode,
    loads_in_turns,
    random_times,
    unit_costs,
)
from seeds import seeds

from trunkline.kernels.plan import WorkOptions, plan_decode_work

pytestmark = pytest.mark.sanitized


def longest_first(costs: Sequence[int], workers: int) -> int:
    """The most that a worker has if units are dealt one by one."""
    loads = [0] * workers
    for cost in sorted(costs, reverse=True):
        heapq.heapreplace(loads, loads[0] + cost)
    return max(loads)


def least(costs: Sequence[int], workers: int) -> int:
    """The most that a worker has in the best of all dealings."""
    return min(
        max(sum(cost for cost, at in zip(costs, places, strict=True) if at == worker) for worker in range(workers))
        for places in product(range(workers), repeat=len(costs))
    )


def rows_of(lengths: Sequence[int]) -> Forest:
    """Rows of a block each."""
    return separate_rows(max(lengths), lengths)


def options_of(kv_heads: int, workers: int, vectors_per_read: int = 16) -> WorkOptions:
    """One row is a piece."""
    return WorkOptions(
        kv_heads, 1, 1, 1, workers=workers, piece_tokens_min=1 << 20, vectors_per_read=vectors_per_read, dealt=True
    )


def dealt(forest: Forest, options: WorkOptions) -> Work:
    work = decode(plan_decode_work(forest.decode_plan(), options).numpy())
    check_lists(work, options)
    return work


@pytest.mark.parametrize("seed", seeds(40))
def test_the_busiest_worker_has_what_dealing_one_by_one_gives(seed: int) -> None:
    """Or less, where turns happen to be better."""
    rng = np.random.default_rng(seed)
    if seed % 4 == 0:
        forest = beam_forest(rng, int(rng.integers(2, 7)), int(rng.integers(1, 20)), 3, chunk_size=16)
    else:
        shape = Shape(
            int(rng.choice([1, 7, 40, 200])), int(rng.choice([4, 16, 64])), holes=seed % 2 == 1, modules=1
        )
        forest = random_forest(rng, shape)
    options = WorkOptions(
        kv_heads=int(rng.choice([1, 2, 3, 8, 32])),
        group=int(rng.integers(1, 9)),
        kv_token_bytes=512,
        partial_bytes=int(rng.integers(1, 2000)),
        tile_rows=int(rng.choice([16, 64])),
        workers=int(rng.choice([1, 2, 6, 132, 264])),
        piece_tokens_min=int(rng.choice([16, 64, 256])),
        invariant_tokens=int(rng.choice([0, 0, 64])),
        dealt=True,
        narrow_vectors=int(rng.choice([0, 16])),
        **random_times(rng),
    )
    work = dealt(forest, options)
    units = [cost for cost in unit_costs(work, options) for _ in range(options.kv_heads)]
    in_turns = max(loads_in_turns(work, options))
    assert check_loads(work, options) == min(longest_first(units, options.workers), in_turns)


@pytest.mark.parametrize("seed", seeds(20))
def test_within_a_third_of_the_best_dealing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kv_heads, workers = ((1, 3), (2, 3), (3, 2), (1, 2))[seed % 4]
    forest = rows_of(rng.integers(1, 30, size=8 // kv_heads).tolist())
    options = options_of(kv_heads, workers)
    work = dealt(forest, options)
    units = [cost for cost in unit_costs(work, options) for _ in range(kv_heads)]
    assert 3 * workers * check_loads(work, options) <= (4 * workers - 1) * least(units, workers)


def test_long_units_get_workers_of_their_own() -> None:
    """Where turns would give them more."""
    forest, options = rows_of([10, 10, 10, *[100] * 2, *[10] * 7]), options_of(1, 3, vectors_per_read=0)
    work = dealt(forest, options)
    assert work.lists[0] == ([3], [])
    assert work.lists[1] == ([4], [])
    assert work.lists[2] == ([0, 1, 2, *range(5, 12)], [])
    assert max(loads_in_turns(work, options)) == 104 + 3 * 11


def test_turns_are_kept_where_they_are_better() -> None:
    """3, 3, 2, 2, 2 for two workers is the known case in which longest first is not best."""
    forest, options = rows_of([30, 20, 30, 20, 1, 20]), options_of(1, 2, vectors_per_read=0)
    work = dealt(forest, options)
    assert work.lists == [([0, 2, 4], []), ([1, 3, 5], [])]
    assert check_loads(work, options) < longest_first(unit_costs(work, options), 2)


def test_wide_units_come_first() -> None:
    """A worker's wide and narrow units are lists apart, but share its load."""
    prefix = [Range(index, index, 0, 64, index * 64, 0) for index in range(8)]
    batch = [Row([*prefix, Range(8, 8 + n, 0, 64, 512, 0)], 575) for n in range(6)]
    forest = Forest(64, batch, np.array([(0, 6, 0, 8)], dtype=np.int32), 14)
    options = WorkOptions(
        2, 4, 512, 64, tile_rows=64, workers=4, piece_tokens_min=512, dealt=True, narrow_vectors=16
    )
    work = dealt(forest, options)
    assert [len(piece.entries) for piece in work.pieces] == [6, *[1] * 6]
    assert [wide for wide, _ in work.lists] == [[0], [1], [], []]
    assert [len(narrow) for _, narrow in work.lists] == [0, 0, 6, 6]
    assert work.lists == dealt(forest, options).lists
