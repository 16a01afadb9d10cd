"""The words of work plans (`work_plan.h`), decoded independently of `WorkView`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trunkline.kernels.cuda_decode import UnitTimes
from trunkline.kernels.plan import WorkOptions

HEADER = (
    "magic words pieces items entries rows partials tokens widest piece_items piece_entries item_block item_first "
    "item_count item_base item_tail entry_row entry_shift entry_ordinal row_partials query_position shifted "
    "last_block made row_tail workers unit_bounds units"
).split()
MAGIC = 0x54504157


@dataclass
class Piece:
    """One piece, decoded."""

    items: list[tuple[int, int, int, int, int]]
    """Block, first, count, base, tail."""
    entries: list[tuple[int, int, int]]
    """Row, shift, ordinal."""

    @property
    def tokens(self) -> int:
        return sum(item[2] for item in self.items)


@dataclass
class Work:
    """A planner's buffer, decoded."""

    pieces: list[Piece]
    tokens: int
    row_partials: list[int]
    query_position: list[int]
    lists: list[tuple[list[int], list[int]]]
    """The wide and the narrow units of each worker; none if the plan is not dealt."""


def decode(words: NDArray[np.int32], steps: int = 0) -> Work:
    """What the words say at a step."""
    head = dict(zip(HEADER, words[: len(HEADER)].tolist(), strict=True))
    assert head["magic"] == MAGIC
    assert head["words"] == len(words)

    def array(name: str, length: int) -> list[int]:
        return [int(x) for x in words[head[name] : head[name] + length]]

    def items(start: int, stop: int) -> list[tuple[int, int, int, int, int]]:
        columns = (
            words[head[f"item_{name}"] + start : head[f"item_{name}"] + stop].tolist()
            for name in ("block", "first", "count", "base", "tail")
        )
        return [
            (block, first, min(max(count + steps, 0), tail) if tail else count, base, tail)
            for block, first, count, base, tail in zip(*columns, strict=True)
        ]

    pieces, entries, rows = (head[name] for name in ("pieces", "entries", "rows"))
    bounds, entry_start = array("piece_items", 2 * pieces), array("piece_entries", pieces + 1)
    entry_names = ("entry_row", "entry_shift", "entry_ordinal")
    entry_rows = list(zip(*(array(name, entries) for name in entry_names), strict=True))
    decoded = [
        Piece(items(*bounds[2 * i : 2 * i + 2]), entry_rows[entry_start[i] : entry_start[i + 1]])
        for i in range(pieces)
    ]
    if not head["made"]:  # pieces of a plan that goes on have grown since
        assert head["items"] == sum(len(piece.items) for piece in decoded)
    assert head["widest"] == max((len(piece.entries) for piece in decoded), default=0)
    assert head["partials"] == len(entry_rows)
    partials = array("row_partials", rows + 1)
    positions = [position + steps for position in array("query_position", rows)]
    return Work(decoded, head["tokens"] + steps * rows, partials, positions, _lists(words, head))


def _lists(words: NDArray[np.int32], head: dict[str, int]) -> list[tuple[list[int], list[int]]]:
    workers = head["workers"]
    if not workers:
        return []
    bounds = words[head["unit_bounds"] : head["unit_bounds"] + 2 * workers + 1].tolist()
    units = words[head["units"] : head["units"] + bounds[-1]].tolist()
    assert bounds[0] == 0
    assert bounds == sorted(bounds)
    parts = [units[start:stop] for start, stop in pairwise(bounds)]
    return list(zip(parts[::2], parts[1::2], strict=True))


def unit_costs(work: Work, options: WorkOptions) -> list[int]:
    """What a unit of each piece counts as, in query vectors or ns, rounded up to five binary digits."""
    if options.narrow_unit_ns:
        costs = unit_ns(work, options)
    else:
        vectors = [options.vectors_per_read + len(piece.entries) * options.group for piece in work.pieces]
        costs = [piece.tokens * each + 1 for piece, each in zip(work.pieces, vectors, strict=True)]
    steps = [1 << max(0, cost.bit_length() - 5) for cost in costs]
    return [-(-cost // step) * step for cost, step in zip(costs, steps, strict=True)]


def random_times(rng: np.random.Generator) -> UnitTimes:
    """What units take on some GPU, or nothing, as on CPUs."""
    if rng.random() < 0.5:
        return {}
    return {
        "narrow_unit_ns": int(rng.choice([1, 1000, 4000])),
        "wide_unit_ns": int(rng.choice([1, 4000, 12000])),
        "tile_tokens": int(rng.choice([4, 16, 64])),
        "narrow_tile_ns": int(rng.integers(1, 3000)),
        "wide_tile_ns": int(rng.integers(1, 3000)),
        "partial_bytes_per_ns": int(rng.choice([1, 4000])),
    }


def piece_times(work: Work, options: WorkOptions) -> list[tuple[int, int, int]]:
    """Of each piece: the fixed part of its units, what a tile takes, and the tiles."""
    wide, narrow = (options.wide_unit_ns, options.wide_tile_ns), (options.narrow_unit_ns, options.narrow_tile_ns)
    return [
        (
            *(narrow if len(piece.entries) * options.group <= options.narrow_vectors else wide),
            -(-piece.tokens // options.tile_tokens),
        )
        for piece in work.pieces
    ]


def unit_ns(work: Work, options: WorkOptions) -> list[int]:
    """What a unit of each piece takes: a fixed part and whole tiles."""
    return [unit + tiles * tile for unit, tile, tiles in piece_times(work, options)]


def check_lists(work: Work, options: WorkOptions) -> None:
    """Each unit is in one list, of its kind."""
    assert len(work.lists) == (options.workers if options.dealt else 0)
    if not options.dealt:
        return
    units = [unit for lists in work.lists for each in lists for unit in each]
    assert sorted(units) == list(range(len(work.pieces) * options.kv_heads))
    for lists in work.lists:
        for each, is_narrow in zip(lists, (False, True), strict=True):
            rows = [len(work.pieces[unit // options.kv_heads].entries) for unit in each]
            assert all((n * options.group <= options.narrow_vectors) == is_narrow for n in rows)


def check_loads(work: Work, options: WorkOptions) -> int:
    """No worker has more than what `deal.h` promises; return how much the one with the most has."""
    costs, workers = unit_costs(work, options), options.workers
    loads = [sum(costs[unit // options.kv_heads] for each in lists for unit in each) for lists in work.lists]
    total = options.kv_heads * sum(costs)
    assert sum(loads) == total
    assert workers * max(loads) <= total + (workers - 1) * max(costs, default=0)
    assert max(loads) <= max(loads_in_turns(work, options))
    return max(loads)


def loads_in_turns(work: Work, options: WorkOptions) -> list[int]:
    """What each worker has if they take turns."""
    loads = [0] * options.workers
    for piece, cost in enumerate(unit_costs(work, options)):
        for unit in range(piece * options.kv_heads, (piece + 1) * options.kv_heads):
            loads[unit % options.workers] += cost
    return loads
