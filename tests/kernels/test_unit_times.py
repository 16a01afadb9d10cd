"""Plans for GPUs by what units take: no thread block has much more than even the best plan would leave it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pytest
from gpu_cases import TABLE_3, Cell
from gpu_host_deal import GPU
from kernels.forests import Shape, random_forest, separate_rows
from kernels.work_words import Work, check_lists, check_loads, decode, piece_times, unit_ns
from seeds import seeds

from trunkline.kernels.cuda_decode import TILE_NS, UNIT_NS, unit_times
from trunkline.kernels.plan import DecodePlan, WorkOptions, plan_decode_work

pytestmark = pytest.mark.sanitized

(NARROW_UNIT_NS, WIDE_UNIT_NS), (NARROW_TILE_NS, WIDE_TILE_NS) = UNIT_NS[16], TILE_NS[16]
BATCHES: Final = tuple(Cell(2304, 2048, 32, 8, batch=batch) for batch in (1, 2, 4, 8, 16, 32, 64, 96))
CELLS: Final = TABLE_3 + BATCHES


def options_of(kv_heads: int, group: int) -> WorkOptions:
    return replace(GPU, kv_heads=kv_heads, group=group)


def by_vectors(options: WorkOptions) -> WorkOptions:
    """Costs without a fixed part, as they were on GPUs."""
    return replace(
        options, narrow_unit_ns=0, tile_tokens=0, pieces_per_worker=2, piece_tokens_min=256, vectors_per_read=128
    )


def planned(plan: DecodePlan, options: WorkOptions) -> Work:
    work = decode(plan_decode_work(plan, options).numpy())
    check_lists(work, options)
    return work


def time_of(work: Work, timed: WorkOptions) -> float:
    """In µs: the busiest worker."""
    costs = unit_ns(work, timed)
    return max(sum(costs[unit // timed.kv_heads] for each in lists for unit in each) for lists in work.lists) / 1e3


def bound(uncut: Work, timed: WorkOptions) -> float:
    """In µs, of any cut of these pieces: the mean, the longest of the shortest parts, and two units or more
    for some workers where there are more than workers."""
    costs = unit_ns(uncut, timed)
    parts = [max(1, piece.tokens // timed.piece_tokens_min) for piece in uncut.pieces]
    shortest = [
        unit + -(-tiles // part) * tile
        for (unit, tile, tiles), part in zip(piece_times(uncut, timed), parts, strict=True)
    ]
    crowd = -(-len(costs) * timed.kv_heads // timed.workers) * min(shortest)
    return max(sum(costs) * timed.kv_heads / timed.workers, *shortest, crowd) / 1e3


@dataclass(frozen=True)
class Times:
    """In µs."""

    now: float
    before: float
    """By costs without a fixed part."""
    least: float
    """Of any cut (`bound`)."""

    @property
    def limit(self) -> float:
        """What is left to chance: a half, or one short unit where there are hardly more units than workers."""
        return max(1.5 * self.least, self.least + (WIDE_UNIT_NS + 2 * WIDE_TILE_NS) / 1e3)


def times_of(plan: DecodePlan, options: WorkOptions) -> Times:
    work = planned(plan, options)
    check_loads(work, options)
    least = bound(planned(plan, replace(options, piece_tokens_min=1 << 30)), options)
    return Times(time_of(work, options), time_of(planned(plan, by_vectors(options)), options), least)


def of_cell(cell: Cell) -> Times:
    return times_of(cell.plan(), options_of(cell.kv_heads, cell.heads // cell.kv_heads))


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.kv_heads}-{cell.batch}-{cell.n_p}-{cell.n_s}")
def test_the_busiest_worker_has_little_more_than_any_plan_leaves_it(cell: Cell) -> None:
    times = of_cell(cell)
    assert times.least <= times.now <= times.limit
    assert times.now <= times.before


def test_costs_without_a_fixed_part_take_longer() -> None:
    """128 units of one token, each as cheap as 1/256 of another unit, went to each of eight workers."""
    found = {cell: of_cell(cell) for cell in CELLS}
    all_shared = found[Cell(2048, 2048, 32, 32)]
    assert all_shared.before > 15 * all_shared.now
    assert sum(times.before > 1.25 * times.now for times in found.values()) >= len(CELLS) // 4


def test_whole_tiles_are_counted() -> None:
    """65 tokens take as long as 128, so a row of 65 is dealt as one of 128."""
    options = replace(options_of(1, 1), workers=2)
    lists = []
    for lengths in ([64, 65, 128, 64], [64, 128, 128, 64]):
        work = planned(separate_rows(64, lengths).decode_plan(), options)
        assert unit_ns(work, options) == [NARROW_UNIT_NS + tiles * NARROW_TILE_NS for tiles in (1, 2, 2, 1)]
        lists.append(work.lists)
    assert lists[0] == lists[1]


def of_forest(seed: int) -> Times:
    rng = np.random.default_rng(seed)
    shape = Shape(
        int(rng.choice([7, 40, 200])),
        64,
        holes=seed % 2 == 1,
        modules=seed % 3,
        private_max=int(rng.choice([4, 20, 80])),
    )
    kv_heads, group = ((1, 4), (2, 4), (8, 4), (32, 1))[int(rng.integers(4))]
    return times_of(random_forest(rng, shape).decode_plan(), options_of(kv_heads, group))


@pytest.mark.parametrize("seed", seeds(12))
def test_random_forests(seed: int) -> None:
    times = of_forest(seed)
    # Trees of few rows are cut less evenly than the cells: two short units.
    assert times.now <= times.limit + (WIDE_UNIT_NS + 2 * WIDE_TILE_NS) / 1e3


@pytest.mark.parametrize("seed", seeds(1))
def test_forests_take_less_than_by_costs_without_a_fixed_part(seed: int) -> None:
    """On the whole: what merging takes counts, too, so that the busiest worker of one may have more."""
    found = [of_forest(seed + number) for number in range(200)]
    assert sum(times.now for times in found) <= sum(times.before for times in found)


def test_small_blocks_are_small_tiles() -> None:
    assert unit_times(16, 128)["narrow_tile_ns"] == NARROW_TILE_NS // 4
    in_bytes = unit_times(64, 128, in_bytes=True)
    assert (in_bytes["narrow_tile_ns"], in_bytes["wide_tile_ns"]) == TILE_NS[8]
    assert unit_times(32, 256) == {**unit_times(64, 128), "tile_tokens": 32}


def test_pieces_of_16_bits_are_cut_less_finely() -> None:
    """2,048 shared tokens of one row, which any cut leaves far from even: as many parts as the minimum allows."""
    cell = Cell(2048, 0, 32, 8, batch=1)
    for in_bytes, shortest in ((False, 256), (True, 128)):
        options = replace(options_of(8, 4), **unit_times(64, 128, in_bytes=in_bytes))
        assert {piece.tokens for piece in planned(cell.plan(), options).pieces} == {shortest}
