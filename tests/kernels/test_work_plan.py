"""The planner that CPU and CUDA kernels share, over random forests: whatever it decides, no token is lost."""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kernels.forests import Forest, Range, Row, Shape, beam_forest, random_forest
from kernels.work_words import Work, check_lists, decode, random_times
from seeds import seeds

from trunkline.kernels.plan import DecodePlan, WorkOptions, plan_decode_work

pytestmark = pytest.mark.sanitized

OPTIONS = WorkOptions(kv_heads=2, group=2, kv_token_bytes=512, partial_bytes=1024)


def work_of(plan: DecodePlan, options: WorkOptions = OPTIONS) -> Work:
    return decode(plan_decode_work(plan, options).numpy())


def check(work: Work, forest: Forest) -> None:
    """Every row reads each of its ranges exactly once, and its partials are numbered in the order of pieces."""
    read: list[Counter[tuple[int, ...]]] = [Counter() for _ in forest.rows]
    ordinals: list[list[int]] = [[] for _ in forest.rows]
    for piece in work.pieces:
        rows = [row for row, _, _ in piece.entries]
        assert rows == sorted(set(rows))
        assert piece.items
        for row, shift, ordinal in piece.entries:
            ordinals[row].append(ordinal)
            read[row].update((*item[:4], shift) for item in piece.items)
            tails = [item for item in piece.items if item[4]]
            assert all(item[:3] == forest.rows[row].ranges[-1][1:4] for item in tails)
            assert not tails or len(rows) == 1
    for index, context in enumerate(forest.rows):
        assert read[index] == Counter(tuple(r[1:]) for r in context.ranges)
        assert ordinals[index] == list(range(len(ordinals[index])))
    assert np.diff(work.row_partials).tolist() == [len(numbers) for numbers in ordinals]
    assert work.tokens == sum(piece.tokens for piece in work.pieces)
    assert work.query_position == [row.position for row in forest.rows]


@pytest.mark.parametrize("seed", seeds(24))
def test_nothing_is_lost_or_read_twice(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = Shape(
        rows=int(rng.choice([1, 2, 7, 40, 300])),
        chunk_size=int(rng.choice([1, 4, 16, 64])),
        shifts=seed % 2 == 1,
        holes=seed % 3 == 1,
        modules=seed % 4,
    )
    forest = random_forest(rng, shape)
    plan = forest.decode_plan()
    options = WorkOptions(
        kv_heads=int(rng.integers(1, 9)),
        group=int(rng.integers(1, 9)),
        kv_token_bytes=int(rng.integers(1, 1000)),
        partial_bytes=int(rng.integers(1, 3000)),
        tile_rows=int(rng.choice([0, 8, 16, 64])),
        workers=int(rng.choice([1, 2, 132])),
        piece_tokens_min=int(rng.choice([1, 64, 256])),
        invariant_tokens=int(rng.choice([0, 0, 64])),
        share=bool(rng.random() < 0.8),
        unit_vectors=int(rng.choice([0, 48])),
        dealt=bool(rng.random() < 0.5),
        narrow_vectors=int(rng.choice([0, 16])),
        **random_times(rng),
    )
    work = work_of(plan, options)
    check(work, forest)
    check_lists(work, options)
    alone = sum(row.tokens for row in forest.rows)
    assert work.tokens <= alone * (1 if not options.tile_rows else 2)
    if not options.share:
        assert work.tokens == alone
        assert all(len(piece.entries) == 1 for piece in work.pieces)
    if options.tile_rows:
        assert all(len(piece.entries) * options.group <= options.tile_rows for piece in work.pieces)


def test_shared_tokens_are_read_once_when_that_pays() -> None:
    forest = random_forest(np.random.default_rng(1), Shape(rows=40, chunk_size=16))
    plan = forest.decode_plan()
    work = work_of(plan, replace(OPTIONS, partial_bytes=1))
    check(work, forest)
    assert work.tokens == plan.tokens_read
    assert work_of(plan, replace(OPTIONS, share=False)).tokens > plan.tokens_read


@pytest.mark.parametrize("seed", seeds(8))
def test_only_runs_that_pay_are_packed(seed: int) -> None:
    """Of the runs that stay packed, each saves more than it adds (no cuts: one worker)."""
    forest = random_forest(np.random.default_rng(seed), Shape(rows=60, chunk_size=16, holes=True, modules=2))
    plan = forest.decode_plan()
    options = replace(OPTIONS, partial_bytes=4096)
    work = work_of(plan, options)
    check(work, forest)
    packed = [piece for piece in work.pieces if len(piece.entries) > 1]
    for piece in packed:
        rows = len(piece.entries)
        assert (rows - 1) * piece.tokens * options.kv_token_bytes > rows * options.group * options.partial_bytes
    none = work_of(plan, replace(OPTIONS, partial_bytes=1 << 24))
    check(none, forest)
    assert all(len(piece.entries) == 1 for piece in none.pieces)


def two_level(short: int, long: int, chunk: int) -> Forest:
    """Four rows share `short` blocks; each pair of them then shares `long` more; then a tail each."""
    rows, blocks = [Row() for _ in range(4)], 0
    for index in range(short + long):
        for members in [(0, 1, 2, 3)] if index < short else [(0, 1), (2, 3)]:
            for member in members:
                rows[member].ranges.append(Range(index, blocks, 0, chunk, index * chunk, 0))
            blocks += 1
    for row in rows:
        row.ranges.append(Range(short + long, blocks, 0, 3, (short + long) * chunk, 0))
        row.position = (short + long) * chunk + 2
        blocks += 1
    total = short + long
    runs = [(0, 4, 0, short), (0, 2, short, total), (2, 4, short, total)]
    return Forest(chunk, rows, np.array(runs, dtype=np.int32), blocks)


def test_a_short_run_is_pushed_down_to_its_children_not_to_rows() -> None:
    forest = two_level(1, 8, 16)
    # 3 * 16 * 512 bytes saved against 4 * 2 * 4096 added: not worth a partial of its own.
    work = work_of(forest.decode_plan(), replace(OPTIONS, partial_bytes=4096))
    check(work, forest)
    assert [(len(piece.entries), piece.tokens) for piece in work.pieces] == [(2, 144), (2, 144), *[(1, 3)] * 4]


def test_long_runs_are_cut_to_equal_cost() -> None:
    forest = two_level(64, 2, 64)
    work = work_of(forest.decode_plan(), replace(OPTIONS, workers=16, piece_tokens_min=256))
    check(work, forest)
    shared = [piece for piece in work.pieces if len(piece.entries) == 4]
    assert len(shared) > 8
    assert max(piece.tokens for piece in shared) <= 2 * min(piece.tokens for piece in shared)
    assert min(piece.tokens for piece in shared) >= 256


@pytest.mark.parametrize("rows", [2, 32, 128])
def test_partial_results_are_charged_to_cuts(rows: int) -> None:
    """Parts of a run read at least twice the bytes of their partial results; tiles of rows count as units."""
    blocks, chunk = 64, 64
    shared = [Range(index, index, 0, chunk, index * chunk, 0) for index in range(blocks)]
    batch = [Row(position=blocks * chunk) for _ in range(rows)]
    for number, row in enumerate(batch):
        row.ranges = [*shared, Range(blocks, blocks + number, 0, 1, blocks * chunk, 0)]
    forest = Forest(chunk, batch, np.array([(0, rows, 0, blocks)], dtype=np.int32), blocks + rows)
    options = replace(OPTIONS, kv_heads=8, group=4, partial_bytes=1040, workers=264, tile_rows=64)
    work = work_of(forest.decode_plan(), replace(options, pieces_per_worker=2, piece_tokens_min=256))
    check(work, forest)
    tiles = [piece for piece in work.pieces if len(piece.entries) > 1]
    parts = len(tiles) / -(-rows * 4 // 64)
    added = parts * rows * options.group * options.partial_bytes
    assert added <= max(rows * 4 * 1040, blocks * chunk * options.kv_token_bytes / 2)
    assert parts == {2: 16, 32: 7, 128: 1}[rows]


@pytest.mark.parametrize(
    ("seed", "crc"), list(enumerate((2068507655, 3062273305, 1487254355, 2644846970, 2036359521, 2733734767)))
)
def test_plans_for_cpus_stay_as_they_were(seed: int, crc: int) -> None:
    """Words of the plans that were made before units of GPUs were timed."""
    shape = Shape((1, 7, 40, 200)[seed % 4], (16, 64)[seed % 2], holes=seed % 3 == 1, modules=seed % 3)
    options = WorkOptions(
        kv_heads=8,
        group=4,
        kv_token_bytes=512,
        partial_bytes=1040,
        tile_rows=64,
        workers=(1, 2, 16)[seed % 3],
        vectors_per_read=8,
        unit_vectors=48,
        invariant_tokens=64 if seed == 5 else 0,
    )
    words = plan_decode_work(random_forest(np.random.default_rng(seed), shape).decode_plan(), options).numpy()
    assert zlib.crc32(words.tobytes()) == crc


def test_a_row_is_cut_along_its_tokens_where_a_worker_takes_several_heads() -> None:
    """Units stay as many: the more heads are taken at once, the more pieces."""
    row = Row(position=1026)
    row.ranges = [Range(index, index, 0, 64 if index < 16 else 3, index * 64, 0) for index in range(17)]
    forest = Forest(64, [row], np.empty((0, 4), dtype=np.int32), 17)
    options, pieces = replace(OPTIONS, kv_heads=4, workers=2), []
    for vectors in (0, 4, 48):
        work = work_of(forest.decode_plan(), replace(options, unit_vectors=vectors))
        check(work, forest)
        pieces.append(len(work.pieces))
    assert all(more >= units for more, units in zip(pieces, (2, 4, 8), strict=True))
    assert pieces[0] < pieces[1] < pieces[2] <= 9


def partition(work: Work, row: int) -> list[list[tuple[int, ...]]]:
    """How a row's context is cut into partials, in the order in which they are merged."""
    parts: dict[int, list[tuple[int, ...]]] = {}
    for piece in work.pieces:
        for entry, shift, ordinal in piece.entries:
            if entry == row:
                parts[ordinal] = [(*item, shift) for item in piece.items]
    return [parts[ordinal] for ordinal in sorted(parts)]


@pytest.mark.parametrize("seed", seeds(12))
def test_invariant_mode_cuts_a_row_alike_in_any_company(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = Shape(rows=40, chunk_size=16, shifts=seed % 2 == 1, holes=seed % 3 == 1, modules=seed % 4)
    forest = random_forest(rng, shape)
    options = replace(OPTIONS, invariant_tokens=64, workers=int(rng.integers(1, 200)), tile_rows=16)
    together = work_of(forest.decode_plan(), options)
    check(together, forest)
    for row in rng.choice(40, size=8, replace=False).tolist():
        single = Forest(16, [forest.rows[row]], np.zeros((0, 4), dtype=np.int32), forest.blocks)
        alone = work_of(single.decode_plan(), replace(options, workers=1))
        assert partition(together, row) == partition(alone, 0)


@pytest.mark.parametrize("seed", seeds(16))
def test_beams_share_what_they_have_in_common(seed: int) -> None:
    """Blocks of any subset of rows: read once where that costs nothing, and by no one twice where it does."""
    rng = np.random.default_rng(seed)
    sizes = (int(rng.integers(2, 7)), int(rng.integers(1, 20)), int(rng.integers(0, 6)))
    forest = beam_forest(rng, *sizes, chunk_size=16)
    plan = forest.decode_plan()
    free = work_of(plan, replace(OPTIONS, partial_bytes=0))
    check(free, forest)
    assert free.tokens == forest.distinct_tokens()
    for options in (
        replace(OPTIONS, partial_bytes=int(rng.integers(1, 30000)), workers=int(rng.integers(1, 4))),
        replace(OPTIONS, tile_rows=4, workers=2, piece_tokens_min=16),
        replace(OPTIONS, invariant_tokens=64),
    ):
        check(work_of(plan, options), forest)


def test_an_empty_batch_is_an_empty_plan() -> None:
    empty = np.zeros(0, dtype=np.int32)
    zero = np.zeros(1, dtype=np.int32)
    plan = DecodePlan(16, empty, empty, empty, empty, zero, empty, empty, 0, empty, empty, 0)
    assert work_of(plan).pieces == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rows": [0, 9]}, "names row 9; there are 2"),
        ({"rows": [0, -1]}, "names row -1"),
        ({"row_indptr": [0, 0, 2]}, "item 0 has no rows"),
        ({"row_indptr": [1, 1, 2]}, "row_indptr must start at 0"),
        ({"row_indptr": [0, 5, 2]}, "row_indptr must ascend"),
        ({"count": [1, -3]}, "item 1 has a negative"),
        ({"tail_item": [0, 5]}, "the tail of row 1"),
        ({"tail_item": [1, 1]}, "the tail of row 0"),
        ({"count": [1]}, "equally long"),
        ({"shifts": [0]}, "as long as row_indptr says"),
    ],
)
def test_contradictions_are_named(change: dict[str, list[int]], sentence: str) -> None:
    arrays = {
        "block": [3, 4],
        "first": [0, 0],
        "count": [1, 2],
        "base": [0, 0],
        "row_indptr": [0, 1, 2],
        "rows": [0, 1],
        "shifts": [0, 0],
        "tail_item": [0, 1],
        "query_position": [0, 1],
    } | change
    columns: dict[str, Any] = {name: np.array(values, dtype=np.int32) for name, values in arrays.items()}
    plan = DecodePlan(chunk_size=16, shared_items=0, steps_left=1, **columns)
    with pytest.raises(ValueError, match=sentence):
        plan_decode_work(plan, OPTIONS)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (replace(OPTIONS, kv_heads=0), "kv_heads and group"),
        (replace(OPTIONS, workers=0), "workers"),
        (replace(OPTIONS, tile_rows=1), "tile_rows"),
        (replace(OPTIONS, unit_vectors=-1), "unit_vectors"),
        (replace(OPTIONS, narrow_vectors=-1), "narrow_vectors"),
        (replace(OPTIONS, narrow_unit_ns=-1), "narrow_unit_ns"),
        (replace(OPTIONS, narrow_unit_ns=1, tile_tokens=64, narrow_tile_ns=1, wide_tile_ns=1), "wide_unit_ns"),
    ],
)
def test_options_are_checked(options: WorkOptions, sentence: str) -> None:
    plan = random_forest(np.random.default_rng(0), Shape(rows=3, chunk_size=16)).decode_plan()
    with pytest.raises(ValueError, match=sentence):
        plan_decode_work(plan, options)
