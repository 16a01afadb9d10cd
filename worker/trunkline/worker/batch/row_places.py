"""Which place of the device's table each decode row has, and which words there the host has to write. Pure.

In a step that runs as a graph the device knows by itself what each row computes next: the token that it drew last
(`trunkline.kernels.cuda_steps`). The host writes what it decides: which rows there are, how they draw, and the
tokens that no graph drew: those of rows that joined, and all behind a step that ran otherwise.

In steady decoding there is nothing to write: an output index is kept as what it was at step 0.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from trunkline.kernels.cuda_steps import (
    PLACE_FACTORS,
    PLACE_OUTPUT_INDEX,
    PLACE_SEED,
    PLACE_TOKEN,
    PLACE_TOP_K,
    PLACE_WORDS,
)
from trunkline.kvstore.chunks import Int32Array
from trunkline.worker.batch.draft_rows import NO_GUESS
from trunkline.worker.batch.sequences import PENDING, BatchSequence
from trunkline.worker.messages import Sampling

_NO_CHANGES: Final = np.zeros((0, 2), dtype=np.int32)


class RowPlaces:
    """The host's view of the table."""

    def __init__(self, places: int) -> None:
        """
        Args:
            places: The largest number of rows.
        """
        self._places = places
        self._free = list(reversed(range(places)))
        self._known: dict[tuple[int, int], tuple[int, BatchSequence]] = {}
        """Place of each row, by its sequence's id and its number among that sequence's rows."""
        self._table = np.full(places * (1 + PLACE_WORDS), 0, dtype=np.int32)
        """What the device has, but for the tokens that it drew."""
        self._table[:places] = -1
        self._is_stale = True

    def forget_tokens(self) -> None:
        """Note that rows got tokens which the device did not draw in a graph."""
        self._is_stale = True

    def changes(
        self, rows: list[BatchSequence], steps: int, guesses: Int32Array | None, *, changed: bool
    ) -> Int32Array:
        """Return the words to write before a step, int32 `[n, 2]`: index and value.

        Args:
            rows: The sequence of each row, at most as many as there are places; rows of one stand side by side.
            steps: The plan's step.
            guesses: The draft that stands at each row, `NO_GUESS` where there is none; None: no row has drafts.
            changed: Whether the rows are others than in the last call.
        """
        if not (changed or self._is_stale):
            return _NO_CHANGES
        fresh = self._take_places(rows)
        wanted, written = self._table.copy(), []
        wanted[: self._places] = -1
        number = 0
        for index, row in enumerate(rows):
            number = number + 1 if index and rows[index - 1] is row else 0
            place, _ = self._known[row.id, number]
            wanted[index] = place
            at = self._places + place * PLACE_WORDS
            if (row.id, number) in fresh:
                self._write_sampling(wanted[at : at + PLACE_WORDS], row.sampling)
            wanted[at + PLACE_OUTPUT_INDEX] = row.output_index + number - steps
            if self._is_stale or (row.id, number) in fresh:
                guess = NO_GUESS if guesses is None else int(guesses[index])
                token = row.tokens[-1] if guess == NO_GUESS else guess
                assert token != PENDING, "a token that the device has not drawn yet is to be written there"
                wanted[at + PLACE_TOKEN] = token
                written.append(at + PLACE_TOKEN)
        different = wanted != self._table
        different[written] = True
        self._table = wanted
        self._is_stale = False
        indices = np.flatnonzero(different).astype(np.int32)
        return np.stack([indices, wanted[indices]], axis=1)

    def _take_places(self, rows: list[BatchSequence]) -> set[tuple[int, int]]:
        """Give places to rows that have none, and take those of rows that left; return the keys of the former."""
        present: dict[tuple[int, int], BatchSequence] = {}
        number = 0
        for index, row in enumerate(rows):
            number = number + 1 if index and rows[index - 1] is row else 0
            present[row.id, number] = row
        for key, (place, row) in list(self._known.items()):
            if present.get(key) is not row:  # ids come again behind a restart of the controller
                del self._known[key]
                self._free.append(place)
        fresh = present.keys() - self._known.keys()
        for key, row in present.items():
            if key in fresh:
                self._known[key] = (self._free.pop(), row)
        return fresh

    @staticmethod
    def _write_sampling(words: Int32Array, sampling: Sampling) -> None:
        seed = np.array([sampling.seed & (1 << 64) - 1], dtype=np.uint64)
        # A greedy row's limits do not matter.
        draws = sampling.temperature != 0
        min_p = math.log(sampling.min_p) if draws and sampling.min_p > 0 else float("-inf")
        factors = [sampling.temperature, sampling.top_p if draws else 1.0, min_p]
        words[PLACE_TOP_K] = max(0, sampling.top_k) if draws else 0
        words[PLACE_SEED : PLACE_SEED + 2] = seed.view(np.int32)
        words[PLACE_FACTORS : PLACE_FACTORS + 3] = np.array(factors, dtype=np.float32).view(np.int32)
