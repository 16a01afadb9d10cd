"""Prefill work as plain Python: what the native planner (`prefill_plan.h`) is compared with."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trunkline.kernels.cuda_work import PrefillCut
from trunkline.kernels.plan import PrefillPlan

MAGIC: Final = 0x54504157
HEADER_WORDS: Final = 28
WORDS_ALIGNED: Final = 4


class Part(NamedTuple):
    """Rows of a prefill plan that are computed at once."""

    row_start: int
    row_stop: int
    piece_start: int
    piece_stop: int
    partials: int
    needs_merge: bool


class PlainPrefillWork:
    """The words of a prefill plan, part by part."""

    def __init__(self, plan: PrefillPlan, cut: PrefillCut) -> None:
        self._plan = plan
        self._items: list[NDArray[np.int64]] = []
        """For each piece, the indices of its items in the plan."""
        self._rows: list[tuple[int, int]] = []
        """For each piece, the range of its queries: start and stop."""
        self._shifts: list[int] = []
        self._ordinals: list[int] = []
        queries = len(plan.query_position)
        self._row_counts = np.zeros(queries, dtype=np.int64)
        tiles = [
            (entry, start, min(start + cut.rows_per_tile, int(plan.query_indptr[entry + 1])))
            for entry in range(plan.num_entries)
            for start in range(int(plan.query_indptr[entry]), int(plan.query_indptr[entry + 1]), cut.rows_per_tile)
        ]
        pieces_per_tile = -(-cut.units_wanted // max(1, len(tiles)))
        piece_ends: list[int] = []
        for entry, start, stop in tiles:
            self._add_tile(entry, (start, stop), cut, pieces_per_tile)
            piece_ends.append(len(self._items))
        self._tokens = int(plan.count.sum())
        self.parts = self._split([(start, stop) for _, start, stop in tiles], piece_ends, cut.partials_max)

    def _split(self, tiles: list[tuple[int, int]], piece_ends: list[int], partials_max: int) -> tuple[Part, ...]:
        """Cut the work into parts of consecutive tiles; return the parts.

        A part has at most `partials_max` partial results, unless a single tile has more. If every row has only one
        partial result, nothing is merged, and there is one part.

        Args:
            tiles: The rows of each tile.
            piece_ends: For each tile, the index behind its last piece.
        """
        ends = np.concatenate([[0], np.cumsum(self._row_counts)])
        if int(ends[-1]) == len(self._row_counts):
            partials_max = int(ends[-1])
        parts: list[Part] = []
        row, piece = 0, 0
        for index, (_, stop) in enumerate(tiles):
            following = tiles[index + 1][1] if index + 1 < len(tiles) else stop
            is_last = index + 1 == len(tiles)
            if not is_last and int(ends[following] - ends[row]) <= partials_max:
                continue
            partials = int(ends[stop] - ends[row])
            parts.append(Part(row, stop, piece, piece_ends[index], partials, partials > stop - row))
            row, piece = stop, piece_ends[index]
        return tuple(parts)

    def _add_tile(self, entry: int, rows: tuple[int, int], cut: PrefillCut, pieces: int) -> None:
        plan = self._plan
        items = np.arange(int(plan.item_indptr[entry]), int(plan.item_indptr[entry + 1]))
        last = int(plan.query_position[rows[0] : rows[1]].max())
        items = items[plan.base[items].astype(np.int64) + plan.shift[items] <= last]
        tokens = int(plan.count[items].sum())
        length = cut.piece_tokens or max(cut.piece_tokens_min, -(-tokens // pieces))
        ordinal = 0
        # Runs of equal shift, each cut where its tokens pass a multiple of the length.
        shifts = plan.shift[items]
        breaks = np.flatnonzero(np.diff(shifts)) + 1
        for run in np.split(items, breaks) if len(items) else [items]:
            before = np.cumsum(plan.count[run]) - plan.count[run]
            for part in np.split(run, np.flatnonzero(np.diff(before // length)) + 1):
                self._items.append(part)
                self._rows.append(rows)
                self._shifts.append(int(plan.shift[part[0]]) if len(part) else 0)
                self._ordinals.append(ordinal)
                ordinal += 1
        self._row_counts[rows[0] : rows[1]] = ordinal

    def words(self) -> tuple[Tensor, list[int]]:
        """Return the int32 words of all parts, on the host, and the index at which each part begins."""
        parts = [self._words(part) for part in self.parts]
        lengths = [-(-len(words) // WORDS_ALIGNED) * WORDS_ALIGNED for words in parts]
        starts = np.cumsum([0, *lengths]).tolist()
        joined = np.zeros(starts[-1], dtype=np.int32)
        for start, words in zip(starts, parts, strict=False):
            joined[start : start + len(words)] = words
        return torch.from_numpy(joined), starts[:-1]

    def _words(self, part: Part) -> NDArray[np.int32]:
        """Return the words of one part, whose rows count from 0."""
        plan, pieces = self._plan, slice(part.piece_start, part.piece_stop)
        rows = self._rows[pieces]
        sizes = [len(items) for items in self._items[pieces]]
        widths = [stop - start for start, stop in rows]
        items = np.concatenate([*self._items[pieces], np.zeros(0, dtype=np.int64)]).astype(np.int64)
        entry_rows = [np.arange(start, stop) - part.row_start for start, stop in rows]
        arrays = (
            np.stack((np.cumsum([0, *sizes])[:-1], np.cumsum([0, *sizes])[1:]), axis=1).ravel(),
            np.cumsum([0, *widths]),
            plan.block[items],
            plan.first[items],
            plan.count[items],
            plan.base[items],
            np.zeros(len(items)),  # tails do not grow
            np.concatenate([*entry_rows, np.zeros(0, dtype=np.int64)]),
            np.repeat(self._shifts[pieces], widths),
            np.repeat(self._ordinals[pieces], widths),
            np.cumsum([0, *self._row_counts[part.row_start : part.row_stop].tolist()]),
            plan.query_position[part.row_start : part.row_stop],
        )
        offsets = np.cumsum([HEADER_WORDS, *map(len, arrays)])
        header = np.zeros(HEADER_WORDS, dtype=np.int32)
        row_count = part.row_stop - part.row_start
        counts = (len(sizes), len(items), sum(widths), row_count, part.partials, self._tokens)
        header[: len(counts) + 3] = [MAGIC, offsets[-1], *counts, max(widths, default=0)]
        header[len(counts) + 3 : len(counts) + 3 + len(arrays)] = offsets[:-1]
        return np.concatenate([header, *(array.astype(np.int32) for array in arrays)])
