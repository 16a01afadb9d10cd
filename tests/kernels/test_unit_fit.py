"""What units take is fitted to measured times: the fit finds what made them, and the planner has what it found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gpu_attention import PARTS, UNITS
from gpu_cases import Cell
from gpu_unit_fit import (
    Record,
    errors,
    fitted,
    largest,
    loads_of,
    options_of,
    predicted,
    read_records,
    record_of,
    records_of,
)
from kernels.work_words import decode, piece_times
from seeds import seeds

from trunkline.kernels.cuda_decode import PARTIAL_BYTES_PER_NS, TILE_NS, UNIT_NS
from trunkline.kernels.plan import plan_decode_work

CELLS = (Cell(1024, 512, 32, 8), Cell(1024, 1024, 32, 32), Cell(2304, 2048, 32, 8, batch=8), Cell(256, 0, 32, 8))


@pytest.fixture(scope="module")
def measured() -> list[Record]:
    """Of an H200, KV in 16 bits."""
    return [record for record in read_records() if not record.in_bytes]


@pytest.mark.parametrize("seed", seeds(3))
def test_constants_are_found_again(measured: list[Record], seed: int) -> None:
    """Times that the model made, of the plans that were measured."""
    constants = np.array([4, 3.5, 1.5, 0.25, 0.4, 12, 1.7, 0.3, 0.3])
    constants *= np.random.default_rng(seed).uniform(0.5, 2, 9)
    times = predicted(constants, measured)
    records = [replace(record, us=us) for record, us in zip(measured, times.tolist(), strict=True)]
    assert errors(predicted(fitted(records), records), records)[1] < 0.01


def test_the_planner_has_what_the_fit_finds(measured: list[Record]) -> None:
    """And a wide unit's fixed part is what the times need: without it errors are almost twice as large."""
    constants = fitted(measured)
    launch, narrow_unit, *tile, wide_unit, wide_tile, merge, _ = constants
    assert [round(narrow_unit, 1), round(wide_unit)] == [time / 1000 for time in UNIT_NS[16]]
    assert [round(sum(tile), 1), round(wide_tile, 1)] == [time / 1000 for time in TILE_NS[16]]
    assert merge == pytest.approx(1000 / PARTIAL_BYTES_PER_NS, rel=0.2)
    before = np.array([launch, 3.5, 2.0, 0.0, 0.0, 3.5, 3.1, 0.25, 0.0])
    now = errors(predicted(constants, measured), measured)[1]
    assert 1.8 * now < errors(predicted(before, measured), measured)[1]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.kv_heads}-{cell.batch}-{cell.n_p}-{cell.n_s}")
@pytest.mark.parametrize("way", ["ours", "each row alone", "2 pieces of 256 tokens or more", "pieces in turns"])
def test_loads_are_those_of_the_plan(cell: Cell, way: str) -> None:
    options, in_turns = options_of(cell, way)
    words = plan_decode_work(cell.plan(), options).numpy()
    loads, work = loads_of(words, options, in_turns=in_turns), decode(words)
    lists = [[unit for each in both for unit in each] for both in work.lists]
    if in_turns:
        lists = [list(range(start, len(work.pieces) * cell.kv_heads, 264)) for start in range(264)]
    times = piece_times(work, options)
    for load, units in zip(loads.tolist(), lists, strict=True):
        expected = [0, 0, 0, 0]
        for unit in units:
            fixed, _, tiles = times[unit // cell.kv_heads]
            at = 2 * (fixed == options.wide_unit_ns)
            expected[at] += 1
            expected[at + 1] += tiles
        assert load == expected
    record = record_of(cell, way, 1.0)
    assert {tuple(load) for load in loads.tolist()} >= set(record.loads) == set(largest(loads))
    for seed in range(20):
        each = np.random.default_rng(seed).uniform(0, 10, 4)
        assert (np.array(record.loads) @ each).max() == pytest.approx((loads @ each).max())


@pytest.mark.parametrize("cell", UNITS, ids=lambda cell: str(cell.batch))
def test_shared_tokens_are_cut_as_the_visit_asks(cell: Cell) -> None:
    for parts in PARTS:
        options, _ = options_of(cell, f"shared tokens in {parts} pieces")
        work = decode(plan_decode_work(cell.plan(), options).numpy())
        sizes = [(len(piece.entries), piece.tokens) for piece in work.pieces]
        assert sizes == [(cell.batch, 2048 // parts)] * parts + [(1, 1)] * cell.batch


def test_ways_with_the_same_plan_are_one_record() -> None:
    case = '"case": {"heads": "GQA 32/8", "batch": 32, "n_p": 256, "n_s": 0'
    lines = [
        f'{{{case}}}, "metric": "ours", "value": 10}}',
        f'{{{case}}}, "metric": "each row alone", "value": 12}}',
        f'{{{case}}}, "metric": "floor here", "value": 1}}',
        f'{{{case}, "variant": "one layout"}}, "metric": "time", "value": 9}}',
        f'{{{case}, "variant": "merge alone"}}, "metric": "time", "value": 9}}',
        '{"note": "no time was left"}',
    ]
    records = records_of(lines)
    found = [(record.ways, record.us) for record in records]
    assert found == [(("ours", "each row alone"), 11), (("one layout",), 9)]
