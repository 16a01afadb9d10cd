"""The words of work plans (`work_plan.h`), decoded independently of `WorkView`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HEADER = (
    "magic words pieces items entries rows partials tokens widest piece_items piece_entries item_block item_first "
    "item_count item_base item_tail entry_row entry_shift entry_ordinal row_partials query_position shifted "
    "last_block made row_tail unused_1 unused_2 unused_3"
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
    return Work(decoded, head["tokens"] + steps * rows, partials, positions)
