"""Keep the attention plan of the decode rows up to date from step to step.

There are two planners. Both remember the rows of the last step and the slot that each row's token is written to.

      LivePlanner        sends only changes to a `LiveDecodePlan`: rows that joined, left, got blocks, or advanced
                         by other than one token. For kernels with a native planner.
      RebuildingPlanner  makes a new `DecodePlan` whenever rows, runs or tables change, or a row has filled its
                         block. The reference, which needs no native library.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trunkline.kernels.live_plan import BLOCKS, LENGTH, LIKE, ROW, ROWS, LiveDecodePlan
from trunkline.kernels.plan import DecodePlan, build_decode_plan
from trunkline.kvstore.chunks import Int32Array
from trunkline.kvstore.windows import chunks_behind
from trunkline.worker.batch.draft_rows import DraftRows
from trunkline.worker.batch.sequences import BatchSequence, entries_behind, segments_of
from trunkline.worker.errors import PlanError

BoolArray = NDArray[np.bool_]

_NONE = np.zeros(0, dtype=np.int32)


class DecodePlanner(Protocol):
    """Keeps the decode rows of a batch, and the plan by which attention reads their KV."""

    positions: Int32Array
    """int32 `[rows]`: the position at which each row's token is rotated."""
    slots: Int32Array
    """int32 `[rows]`: where the KV of each row's token is written, `block * chunk_size + offset`."""

    @property
    def plan(self) -> DecodePlan | LiveDecodePlan: ...

    def rows_changed(self) -> None:
        """Note that other rows decode from now on, or the same rows with other runs."""

    def tables_changed(self, sequences: Iterable[int]) -> None:
        """Note that entries of these sequences' block tables were set or appended."""

    def beams_changed(self) -> None:
        """Note that beams have exchanged their block tables."""

    def step(self, rows: list[BatchSequence], runs: Int32Array, drafted: DraftRows | None) -> None:
        """Advance the plan to the next step, which decodes `rows` (at least one).

        Args:
            runs: `StepPlan.runs`, of `rows`.
            drafted: The rows that take the place of `rows` in a step with drafts.

        Raises:
            PlanError: A block table is too short, or a run lies outside the rows.
        """


class RebuildingPlanner:
    """Makes a new plan whenever the last one cannot just grow by a token per row.

    A row that has filled its block causes a new plan, too. So chunks leave the plan soon after the window has
    passed them.
    """

    def __init__(self, chunk_size: int, window: int = 0) -> None:
        """
        Args:
            window: `ModelConfig.window`.
        """
        self._window = window
        self.positions = self.slots = _NONE
        self._chunk_size = chunk_size
        self._plan: DecodePlan | None = None
        self._rows: list[BatchSequence] = []
        self._had_drafts = False

    @property
    def plan(self) -> DecodePlan:
        assert self._plan is not None
        return self._plan

    def rows_changed(self) -> None:
        self._plan = None

    def tables_changed(self, sequences: Iterable[int]) -> None:
        del sequences
        for row in self._rows:
            if row.rewritten:
                self._plan = None
            row.rewritten = False

    def beams_changed(self) -> None:
        self._plan = None

    def step(self, rows: list[BatchSequence], runs: Int32Array, drafted: DraftRows | None) -> None:
        self._rows, had_drafts = rows, self._had_drafts
        self._had_drafts = drafted is not None
        if drafted is not None:
            blocks = max(len(row.blocks) for row in rows)
            self._rebuild(drafted.sequences, drafted.lengths, drafted.runs(runs, blocks))
        elif had_drafts or self._plan is None or self._plan.steps == self._plan.steps_left:
            # Behind drafts the rows have come further by different numbers of tokens.
            known = np.array([row.known for row in rows], dtype=np.int32)
            self._rebuild(rows, known, runs)
        else:
            self._plan.advance()
            self.positions = self.positions + np.int32(1)
            self.slots = self.slots + np.int32(1)

    def _rebuild(self, rows: list[BatchSequence], lengths: Int32Array, runs: Int32Array) -> None:
        """Plan rows that see the first `lengths` tokens of their sequences; the last of these is computed."""
        chunk_size = self._chunk_size
        behind = entries_behind(rows, lengths - np.int32(1), self._window, chunk_size)
        segments = segments_of(rows, lengths, chunk_size, behind)
        if all(row.layout.is_plain for row in rows):
            frame = lengths - np.int32(1)
        else:
            frame = np.concatenate(
                [row.layout.frame_positions(n - 1, n) for row, n in zip(rows, lengths.tolist(), strict=True)]
            )
        try:
            self._plan = build_decode_plan(segments, frame, runs, chunk_size)
        except ValueError as error:
            raise PlanError(str(error)) from error
        self.positions = frame
        tails = self._plan.tail_item
        last = self._plan.first[tails] + self._plan.count[tails] - 1
        self.slots = self._plan.block[tails] * np.int32(chunk_size) + last


class LivePlanner:
    """Sends changes of the rows to a live plan, as words that the native planner reads (`kernels.live_plan`).

    Chunks behind a plain row's window are left out, as if its context began at the first chunk that it sees. When
    the row gets a block, and more chunks have come to lie behind the window, the whole row is sent again."""

    def __init__(self, chunk_size: int, window: int = 0) -> None:
        """
        Args:
            window: `ModelConfig.window`.
        """
        self._window = window
        self.plan = LiveDecodePlan(chunk_size, self._whole, self._rebuilt)
        self.positions = self.slots = _NONE
        self._chunk_size = chunk_size
        self._rows: list[BatchSequence] = []
        self._lengths = _NONE
        """Number of tokens of each row's sequence up to the one that is computed."""
        self._behind = _NONE
        """Number of chunks of each row that the plan does not have, because they are behind the window."""
        self._keys: dict[int, int] = {}
        """The index of each row by its key: `sequence id << 32`, plus the row's place among the sequence's rows (a
        sequence with drafts has several)."""
        self._told: dict[int, int] = {}
        """Number of blocks that the plan has of each sequence."""
        self._touched: set[int] = set()
        """Sequences whose tables have changed since the last step."""
        self._fresh: list[int] = []
        """Indices of the rows that were sent whole in this step."""
        self._same_rows = False
        self._exchanged = False

    def rows_changed(self) -> None:
        self._same_rows = False

    def tables_changed(self, sequences: Iterable[int]) -> None:
        self._touched.update(sequences)

    def beams_changed(self) -> None:
        self._exchanged = True

    def step(self, rows: list[BatchSequence], runs: Int32Array, drafted: DraftRows | None) -> None:
        del runs  # follow from the tables
        if self._exchanged:
            self._touched.update(row.id for row in rows if row.beam_position is not None)
        if drafted is not None:
            changes = self._arrange(drafted.sequences, drafted.lengths)
        elif self._same_rows:
            self._lengths = self._lengths + np.int32(1)
            changes = []
            self._tell_tables(changes)
            self.positions = self.positions + np.int32(1)
            self.slots = self.slots + np.int32(1)
            self._find_slots(self.slots % self._chunk_size == 0)
        else:
            changes = self._arrange(rows, np.array([row.known for row in rows], dtype=np.int32))
        self._same_rows = drafted is None
        self._exchanged = False
        self._touched.clear()
        self._fresh.clear()
        self.plan.go_on(changes, len(self._rows))

    @property
    def calm_steps(self) -> int:
        """Number of steps of the same rows that can follow before a row begins a block."""
        return self._chunk_size - 1 - int((self.slots % self._chunk_size).max()) if self._same_rows else 0

    def went_on(self, steps: int) -> None:
        """Note that so many steps of the same rows were made without `step`, within their blocks. The plan has
        followed."""
        for counts in (self._lengths, self.positions, self.slots):
            counts += np.int32(steps)

    def _arrange(self, rows: list[BatchSequence], lengths: Int32Array) -> list[int]:
        """Take these rows instead of the present ones, and return what that changes. Rows of one sequence stand
        side by side, the shortest first."""
        before_lengths, keys = self._lengths, {}
        places = [0] * len(rows)
        for index, row in enumerate(rows):
            if index and rows[index - 1] is row:
                places[index] = places[index - 1] + 1
            keys[(row.id << 32) + places[index]] = index
        known, before = self._keys, self._rows
        self._rows, self._keys, self._lengths = rows, keys, lengths
        mapping = [known.get(key, -1) for key in keys]
        # Ids come again behind a restart of the controller, which gives them.
        mapping = [old if old >= 0 and before[old] is row else -1 for old, row in zip(mapping, rows, strict=True)]
        if max(mapping) < 0:
            return self._begin(places)
        changes: list[int] = []
        if len(rows) != len(known) or mapping != list(range(len(rows))):
            changes += (ROWS, len(rows), *mapping)
        came_from, place = np.array(mapping), np.array(places)
        expected = np.where(came_from >= 0, (before_lengths + np.int32(1))[came_from], 0)
        kept = came_from >= 0
        self._behind, before_behind = np.zeros(len(rows), dtype=np.int32), self._behind
        self._behind[kept] = before_behind[came_from[kept]]
        for index in ((came_from < 0) & (place == 0)).nonzero()[0].tolist():
            self._tell_whole(index, changes)
        for key in known.keys() - keys.keys():
            if not key & 0xFFFFFFFF:
                del self._told[key >> 32]
        self._tell_tables(changes)
        for index in (kept & (place == 0) & (expected != lengths)).nonzero()[0].tolist():
            changes += (LENGTH, index, self._seen(index))
        for index in place.nonzero()[0].tolist():
            self._tell_like(index, places[index], changes)
        self.positions = self.positions[came_from] + np.int32(1)
        self.slots = self.slots[came_from] + np.int32(1)
        self._find_slots((came_from < 0) | (expected != lengths) | (self.slots % self._chunk_size == 0))
        return changes

    def _begin(self, places: list[int]) -> list[int]:
        """Return the changes that tell rows of which none was there before, each with its place among those of
        its sequence."""
        count = len(places)
        self._told.clear()
        self._behind, self.positions, self.slots = np.zeros((3, count), dtype=np.int32)
        changes = [ROWS, count, *[-1] * count]
        for index, place in enumerate(places):
            if place:
                self._tell_like(index, place, changes)
            else:
                self._tell_whole(index, changes)
        self._find_slots(np.ones(count, dtype=np.bool_))
        return changes

    def _find_slots(self, moved: BoolArray) -> None:
        """Set positions and slots of the rows of which they have not just grown by one.

        Raises:
            PlanError: A block table is too short.
        """
        moved[self._fresh] = True
        chunk_size = self._chunk_size
        for index in moved.nonzero()[0].tolist():
            row, last = self._rows[index], int(self._lengths[index]) - 1
            table_start, first, base, start = row.layout.opening
            entry, offset = divmod(first + last - start, chunk_size)
            if table_start + entry >= len(row.blocks):
                raise PlanError(
                    f"sequence {row.id} needs block-table entry {table_start + entry} for index {last}; "
                    f"it has {len(row.blocks)}"
                )
            self.positions[index] = base + last - start
            self.slots[index] = row.blocks[table_start + entry] * chunk_size + offset

    def _tell_tables(self, changes: list[int]) -> None:
        """Add what changed in the tables of rows that were there before."""
        for sequence in self._touched:
            index = self._keys.get(sequence << 32)
            if index is None:
                continue
            row, told = self._rows[index], self._told[sequence]
            is_narrower = self._window > 0 and self._behind_now(index) > self._behind[index]
            if row.rewritten or is_narrower or (self._exchanged and row.beam_position is not None):
                self._tell_whole(index, changes)
            elif len(row.blocks) > told:
                changes += (BLOCKS, index, len(row.blocks) - told, *row.blocks[told:])
                self._told[sequence] = len(row.blocks)

    def _tell_whole(self, index: int, changes: list[int]) -> None:
        row = self._rows[index]
        row.rewritten = False
        self._told[row.id] = len(row.blocks)
        self._fresh.append(index)
        self._behind[index] = self._behind_now(index)
        changes += self._row(index)

    def _tell_like(self, index: int, place: int, changes: list[int]) -> None:
        """Tell a row that reads what another row of its sequence reads, `place` rows before it."""
        self._behind[index] = self._behind[index - place]
        changes += (LIKE, index, index - place, self._seen(index))

    def _behind_now(self, index: int) -> int:
        """Return how many chunks of a row are behind its window now."""
        last = int(self._lengths[index]) - 1
        return chunks_behind(last, self._window, self._chunk_size) if self._rows[index].layout.is_plain else 0

    def _seen(self, index: int) -> int:
        """Return how many tokens of a row the plan knows."""
        return int(self._lengths[index]) - int(self._behind[index]) * self._chunk_size

    def _row(self, index: int) -> list[int]:
        """Return the change that tells a row whole."""
        row, behind = self._rows[index], int(self._behind[index])
        spans = row.layout.spans.T.ravel().tolist()
        if behind:
            spans[0], spans[2] = behind, behind * self._chunk_size  # table entry and position of the first token
        return [ROW, index, self._seen(index), len(spans) // 6, *spans, len(row.blocks), *row.blocks]

    def _whole(self) -> Int32Array:
        """Return the changes that make a new plan this one."""
        count = len(self._rows)
        changes = [self.plan.steps, ROWS, count, *[-1] * count]
        for index, row in enumerate(self._rows):
            if index and self._rows[index - 1] is row:
                changes += (LIKE, index, index - 1, self._seen(index))
            else:
                changes += self._row(index)
        return np.array(changes, dtype=np.int32)

    def _rebuilt(self) -> DecodePlan:
        """Return the plan of these rows made from nothing, whichever of them share blocks."""
        segments = segments_of(self._rows, self._lengths, self._chunk_size, self._behind)
        everything = [[0, len(self._rows), 0, int(segments.table_index.max()) + 1]]
        return build_decode_plan(segments, self.positions, np.array(everything, dtype=np.int32), self._chunk_size)
