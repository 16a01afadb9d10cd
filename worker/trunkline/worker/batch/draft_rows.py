"""Decode rows with drafts: a row for a sequence's own token, and one more for each draft behind it.

      sequence a, tokens … t, drafts d1 d2        sequence b, tokens … u

      row      0   1   2   3
      token    t   d1  d2  u
      sees     n   n+1 n+2 m          tokens, itself included
      guess    -1  d1  d2  -1         the draft that stands there

All keys of a layer are written before attention, so row 2 sees the keys of rows 0 and 1, which lie in the blocks
of the same table. For the kernels these are rows like any others; they share all blocks but the last one.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from trunkline.kvstore.chunks import Int32Array, unpack_int32
from trunkline.worker.batch.sequences import BatchSequence
from trunkline.worker.errors import PlanError

NO_GUESS: Final = -1
"""Value of `DraftRows.guesses` for a token that was drawn."""


class DraftRows(NamedTuple):
    """The rows of a step in which some sequences have drafts."""

    sequences: list[BatchSequence]
    """The sequence of each row."""
    lengths: Int32Array
    """Number of tokens of its sequence that each row sees, drafts included, `[rows]`."""
    ids: Int32Array
    """Token of each row, `[rows]`."""
    guesses: Int32Array
    """Draft that stands at each row, `[rows]`, or `NO_GUESS`."""
    starts: Int32Array
    """Index of each sequence's first row, and behind them the number of rows, `[sequences + 1]`."""

    @classmethod
    def of(cls, rows: list[BatchSequence], drafts: list[bytes]) -> DraftRows:
        """Return the rows of sequences with these drafts (`StepPlan.drafts`).

        Raises:
            PlanError: drafts that do not go with the rows, of a beam, or that are no token ids.
        """
        if len(drafts) != len(rows):
            raise PlanError(f"drafts for {len(drafts)} rows; {len(rows)} sequences decode")
        try:
            chains = [unpack_int32(chain) for chain in drafts]
        except ValueError as error:
            raise PlanError(f"drafts are no int32 tokens: {error}") from error
        for row, chain in zip(rows, chains, strict=True):
            if len(chain) and (row.beam_position is not None or chain.min() < 0):
                raise PlanError(
                    f"sequence {row.id} has drafts {chain.tolist()}: it is a beam, or they are no tokens"
                )
        counts = np.array([1 + len(chain) for chain in chains], dtype=np.int32)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        sequences = [row for row, count in zip(rows, counts.tolist(), strict=True) for _ in range(count)]
        own = np.repeat(np.array([row.known for row in rows], dtype=np.int32), counts)
        place = np.arange(len(sequences), dtype=np.int32) - np.repeat(starts[:-1], counts)
        guesses = np.concatenate([part for chain in chains for part in (_OWN, chain)])
        ids = guesses.copy()
        ids[starts[:-1]] = [row.tokens[-1] for row in rows]
        return cls(sequences, own + place, ids, guesses, starts)

    def runs(self, runs: Int32Array, blocks: int) -> Int32Array:
        """Return the runs of these rows.

        Args:
            runs: those of the sequences, int32 `[n, 4]` (`StepPlan.runs`).
            blocks: number of entries of the longest block table.
        """
        spread = runs.copy()
        try:
            spread[:, :2] = self.starts[runs[:, :2]]
        except IndexError as error:
            raise PlanError(f"a run lies outside {len(self.starts) - 1} rows: {error}") from error
        first, stop = self.starts[:-1], self.starts[1:]
        drafted = stop - first > 1
        own = np.zeros((int(drafted.sum()), 4), dtype=np.int32)
        own[:, 0], own[:, 1], own[:, 3] = first[drafted], stop[drafted], blocks
        return np.concatenate([spread, own])


_OWN: Final = np.full(1, NO_GUESS, dtype=np.int32)


def accepted(tokens: Int32Array, guesses: Int32Array) -> Int32Array:
    """Return tokens with -1 where none is drawn: behind a draft that is not what was drawn at its place, or behind
    one where none is drawn.

    Args:
        tokens: what would be drawn at each row, `[samples]`; those of the decode rows come first.
        guesses: `[rows]`, see `DraftRows.guesses`; at most as many as tokens.
    """
    kept = tokens.copy()
    for row in np.flatnonzero(guesses != NO_GUESS).tolist():
        if kept[row - 1] != guesses[row]:
            kept[row] = NO_GUESS
    return kept
