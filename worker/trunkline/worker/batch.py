"""From a step plan's delta to the flat arrays of one forward pass.

In the steady state of decoding nothing but counters move: positions and slots grow by one and the decode plan
advances. The plan is rebuilt only when rows, runs or blocks change, or when a row has filled its block (the
lazy copy of ChunkAttention §3.3).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trunkline.kernels.plan import DecodePlan, PrefillPlan, WritePlan, build_decode_plan
from trunkline.kvstore.layout import NO_BLOCK, Int32Array, unpack_int32
from trunkline.worker.errors import PlanError
from trunkline.worker.messages import StepPlan
from trunkline.worker.sequences import Sequence, SequenceTable, join_segments, plain_segments

_NO_RUNS = np.zeros((0, 4), dtype=np.int32)


@dataclass(frozen=True)
class Batch:
    """One forward pass: the decode rows' tokens, then the prefill entries' tokens."""

    ids: Tensor
    """int64 `[tokens]`."""
    positions: Tensor
    """int64 `[tokens]`, for rotation (see `sequences`)."""
    num_rows: int
    """Decode rows."""
    write: WritePlan
    decode: DecodePlan | None
    prefill: PrefillPlan | None
    samples: list[Sequence]
    """Whose next token is drawn, in the order of `StepResult.tokens`."""
    samples_changed: bool
    """False if `samples` are those of the step before."""
    logit_rows: Tensor | None
    """int64 `[samples]`: indices of the tokens whose logits are needed; None: all, in order."""


class BatchBuilder:
    """Keeps the decode rows between steps."""

    def __init__(self, sequences: SequenceTable, chunk_size: int, device: torch.device) -> None:
        self._sequences = sequences
        self._chunk_size = chunk_size
        self._device = device
        self._rows: list[Sequence] = []
        self._runs: Int32Array = _NO_RUNS
        self._plan: DecodePlan | None = None
        self._positions = np.zeros(0, dtype=np.int32)
        self._slots = np.zeros(0, dtype=np.int32)
        self._had_prefill_samples = False

    def build(self, plan: StepPlan) -> Batch:
        """The batch of a plan whose leaves, joins and blocks have been applied.

        Raises:
            PlanError: rows, runs or prefill entries that do not fit the sequences.
        """
        rebuilt = self._update_rows(plan)
        entries = unpack_int32(plan.prefill, columns=5)
        prefill = _Prefill(entries, self._sequences, self._chunk_size) if len(entries) else None
        row_ids = np.fromiter((row.tokens[-1] for row in self._rows), dtype=np.int32, count=len(self._rows))
        ids, positions, slots = row_ids, self._positions, self._slots
        samples, logit_rows = self._rows, None
        prefill_samples = False
        if prefill is not None:
            ids = np.concatenate([ids, *prefill.ids])
            positions = np.concatenate([positions, *prefill.positions])
            slots = np.concatenate([slots, *prefill.slots])
            samples = self._rows + prefill.samples
            prefill_samples = bool(prefill.samples)
            rows = np.arange(len(self._rows))
            logit_rows = np.concatenate([rows, np.array(prefill.last_tokens, dtype=np.int64) + len(rows)])
        changed = rebuilt or prefill_samples or self._had_prefill_samples
        self._had_prefill_samples = prefill_samples
        return Batch(
            ids=self._tensor(ids),
            positions=self._tensor(positions),
            num_rows=len(self._rows),
            write=WritePlan(self._chunk_size, slots),
            decode=self._plan,
            prefill=prefill.plan(self._chunk_size) if prefill is not None else None,
            samples=samples,
            samples_changed=changed,
            logit_rows=None if logit_rows is None else self._tensor(logit_rows),
        )

    def _tensor(self, values: np.ndarray[tuple[int], np.dtype[np.signedinteger]]) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device)

    def _update_rows(self, plan: StepPlan) -> bool:
        """Move the decode rows on by one token; returns whether they are other rows than before."""
        if plan.rows is not None:
            self._rows = [self._sequences[sequence] for sequence in unpack_int32(plan.rows).tolist()]
            self._runs = _NO_RUNS
        elif plan.leaves:
            gone = set(unpack_int32(plan.leaves).tolist())
            stale = [row.id for row in self._rows if row.id in gone]
            if stale:
                raise PlanError(f"sequences {stale} leave, but the plan keeps their rows")
        if plan.runs is not None:
            self._runs = unpack_int32(plan.runs, columns=4)
        changed = plan.rows is not None
        stale_plan = changed or plan.runs is not None
        if plan.blocks:  # only then can an entry of a table have been replaced
            for row in self._rows:
                stale_plan |= row.rewritten
                row.rewritten = False
        if not self._rows:
            self._plan = None
            self._positions = self._slots = np.zeros(0, dtype=np.int32)
        elif stale_plan or self._plan is None or self._plan.steps == self._plan.steps_left:
            self._rebuild()
        else:
            self._plan.advance()
            self._positions = self._positions + np.int32(1)
            self._slots = self._slots + np.int32(1)
        return changed

    def _rebuild(self) -> None:
        rows, chunk_size = self._rows, self._chunk_size
        positions = np.array([row.known - 1 for row in rows], dtype=np.int32)
        if all(row.is_plain for row in rows):
            segments = plain_segments(rows, positions, chunk_size)
            frame = positions
        else:
            segments = join_segments(
                [row.segments(index, row.known, chunk_size) for index, row in enumerate(rows)]
            )
            frame = np.array([row.frame_position(row.known - 1) for row in rows], dtype=np.int32)
        try:
            self._plan = build_decode_plan(segments, frame, self._runs, chunk_size)
        except ValueError as error:
            raise PlanError(str(error)) from error
        self._positions = frame
        tails = self._plan.tail_item
        last = self._plan.first[tails] + self._plan.count[tails] - 1
        self._slots = self._plan.block[tails] * np.int32(chunk_size) + last


class _Prefill:
    """The prefill entries of one step."""

    def __init__(self, entries: Int32Array, sequences: SequenceTable, chunk_size: int) -> None:
        self.ids: list[Int32Array] = []
        self.positions: list[Int32Array] = []
        self.slots: list[Int32Array] = []
        self.samples: list[Sequence] = []
        self.last_tokens: list[int] = []
        """Index, among all prefill tokens, of the last token of each entry that samples."""
        self._segments = []
        total = 0
        for row, (sequence_id, start, count, write_from, sample) in enumerate(entries.tolist()):
            sequence, stop = sequences[sequence_id], start + count
            self.ids.append(sequence.token_slice(start, stop))
            first = sequence.frame_position(start)
            self.positions.append(np.arange(first, first + count, dtype=np.int32))
            slots = sequence.slots(start, stop, chunk_size)
            slots[: max(0, min(count, write_from - start))] = NO_BLOCK
            self.slots.append(slots)
            if sequence.is_plain:
                segments = plain_segments([sequence], np.array([stop - 1], dtype=np.int32), chunk_size)
                segments.row += np.int32(row)
            else:
                segments = sequence.segments(row, stop, chunk_size)
            self._segments.append(segments)
            total += count
            if sample:
                if stop != sequence.known:
                    raise PlanError(
                        f"sequence {sequence_id}: to sample after position {stop - 1}, "
                        f"while {sequence.known} tokens are known"
                    )
                self.samples.append(sequence)
                self.last_tokens.append(total - 1)

    def plan(self, chunk_size: int) -> PrefillPlan:
        segments = join_segments(self._segments)
        items = [len(part.row) for part in self._segments]
        return PrefillPlan(
            chunk_size=chunk_size,
            query_indptr=np.cumsum([0, *map(len, self.ids)], dtype=np.int32),
            query_position=np.concatenate(self.positions),
            item_indptr=np.cumsum([0, *items], dtype=np.int32),
            block=segments.block,
            first=segments.first,
            count=segments.count,
            base=segments.base,
            shift=segments.shift,
        )
