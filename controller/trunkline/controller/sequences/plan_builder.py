"""Build a step plan, and keep what is needed to understand its result when it comes, one or two steps later."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from trunkline.controller.cache.host_saves import TierCopyPlan
from trunkline.controller.cache.radix_tree import Node
from trunkline.controller.sequences.decode_rows import NO_ROWS, DecodeRows, RowSet
from trunkline.controller.sequences.sequence import Sequence, SequenceGroup
from trunkline.kvstore.chunks import BlockId, Int32Array, pack_int32
from trunkline.runtime.spans import StepTrace, pack_steps
from trunkline.worker.messages import Fork, Join, StepPlan


@dataclass(slots=True)
class PlanBuilder(TierCopyPlan):
    """The plan of one step while it is being made. See `StepPlan` for the meaning and order of the fields."""

    chunk_size: int
    now: float = 0.0
    """The time at which the plan is made, in seconds."""
    leaves: list[int] = field(default_factory=list)
    joins: list[Join] = field(default_factory=list)
    save_fence: int = 0
    load_fence: int = 0
    copies: list[tuple[int, int, int, int]] = field(default_factory=list)
    blocks: list[tuple[int, int, int]] = field(default_factory=list)
    prefill: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    rows: RowSet = NO_ROWS
    new_runs: Int32Array | None = None
    """The runs, if `rows` differs from the previous step's; else None."""
    sampling: list[Sequence] = field(default_factory=list)
    """Sequences whose prompts this step completes, in the order of `prefill`."""
    forks: list[Fork] = field(default_factory=list)
    forked: list[Sequence] = field(default_factory=list)
    """The forked sequences, in the order of `forks`."""
    scored: dict[int, int] = field(default_factory=dict)
    """Prompts whose tokens this step scores: id in the batch → request."""
    traced: list[tuple[SequenceGroup, int, int]] = field(default_factory=list)
    """(group, id in the batch, tokens) of each part of a traced prompt that this step computes."""
    admitted: list[tuple[Sequence, tuple[int, str] | None]] = field(default_factory=list)
    """Sequences that enter the batch with this plan, and how much of their prompts was cached, in tokens, and why
    the rest was not; None: that has been reported."""
    copied_blocks: list[BlockId] = field(default_factory=list)
    """Blocks held as `copy_sources` are."""
    copy_sources: list[Node] = field(default_factory=list)
    """Chunks held until the plan is complete, so that it does not reuse blocks that it copies from."""
    drafts: list[Int32Array] = field(default_factory=list)
    """Drafts of each of `rows`; empty: no row has any."""
    thinned: list[BlockId] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether the plan leaves the workers nothing to do."""
        told = self.joins or self.saves or self.loads or self.copies or self.blocks
        return not (self.prefill or len(self.rows) or told)

    def message(self, epoch: int) -> StepPlan:
        changed = self.new_runs is not None
        return StepPlan(
            step=self.step,
            epoch=epoch,
            leaves=pack_int32(self.leaves) if self.leaves else b"",
            joins=self.joins,
            saves=pack_int32(self.saves) if self.saves else b"",
            loads=pack_int32(self.loads) if self.loads else b"",
            copies=pack_int32(self.copies) if self.copies else b"",
            blocks=pack_int32(self.blocks) if self.blocks else b"",
            prefill=pack_int32(self.prefill) if self.prefill else b"",
            rows=self.rows.batch_seq_ids.astype("<i4").tobytes() if changed else None,
            runs=pack_int32(self.new_runs) if self.new_runs is not None else None,
            forks=self.forks,
            late_saves=pack_int32(self.late_saves) if self.late_saves else b"",
            save_fence=self.save_fence,
            load_fence=self.load_fence,
            save_names=b"".join(self.save_names + self.late_names),
            traces=pack_steps(self._step_traces()) if self.traced else None,
            drafts=[pack_int32(tokens) for tokens in self.drafts],
            thinned=pack_int32(self.thinned) if self.thinned else b"",
            load_layers=bytes(self.load_layers) if any(self.load_layers) else b"",
        )

    def compute(self, sequence: Sequence, tokens: int, *, samples: bool, scored: bool) -> None:
        """Add the next tokens of a prompt to the step."""
        group, start = sequence.group, sequence.computed
        write_from, holes = max(start, sequence.cached_tokens), group.holes
        self.prefill.append((sequence.batch_seq_id, start - holes, tokens, write_from - holes, int(samples)))
        if scored:
            self.scored[sequence.batch_seq_id] = group.id
        if group.request.trace is not None:
            self.traced.append((group, sequence.batch_seq_id, tokens))

    def leave_out_blocks(self, left: Collection[int]) -> None:
        """Leave out blocks of sequences, by ids in the batch, that were preempted after they got them: a row, say,
        for an older prompt."""
        if left:
            self.blocks = [entry for entry in self.blocks if entry[0] not in left]

    def append_block(self, rows: DecodeRows, sequence: Sequence, block: BlockId) -> None:
        """Give a row one more block."""
        slot = sequence.slot
        index = int(rows.block_counts[slot])
        sequence.private.append(block)
        rows.tables[slot, index] = block
        rows.block_counts[slot] = index + 1
        self.blocks.append((sequence.batch_seq_id, index, block))

    def append_blocks(self, rows: DecodeRows, slots: NDArray[np.intp], blocks: list[BlockId]) -> None:
        """Give each of some rows one more block."""
        indices = rows.block_counts[slots]
        rows.tables[slots, indices] = blocks
        rows.block_counts[slots] = indices + 1
        for slot, index, block in zip(slots.tolist(), indices.tolist(), blocks, strict=True):
            sequence = rows.sequences[slot]
            assert sequence is not None
            sequence.private.append(block)
            self.blocks.append((sequence.batch_seq_id, index, block))

    def _step_traces(self) -> Iterator[StepTrace]:
        for group, batch_seq_id, tokens in self.traced:
            if (ids := group.request.trace) is not None:
                yield StepTrace(ids.context(ids.prefill), ids.decode, batch_seq_id, tokens)

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that the step computes."""
        return sum(count for _, _, count, _, _ in self.prefill)

    @property
    def drafted(self) -> int:
        """Number of drafts that the step computes."""
        return sum(map(len, self.drafts))


@dataclass(slots=True)
class PendingChanges:
    """Changes since the last plan, which the next plan tells the workers."""

    rows_changed: bool = False
    left: list[int] = field(default_factory=list)
    """Ids of sequences that have left the batch."""
    merged: list[tuple[int, int, int]] = field(default_factory=list)
    """(id in the batch, index, block) of block-table entries that were replaced."""

    def hand_over(self, plan: PlanBuilder) -> None:
        """Move what sequences have left, and what entries have changed, to a plan that is otherwise complete."""
        plan.leaves, self.left = self.left, []
        plan.blocks = self.merged + plan.blocks
        self.merged = []


class InflightStep(msgspec.Struct, frozen=True):
    """A step that the workers have not answered yet, with what is needed to understand its result."""

    step: int
    rows: RowSet
    """The decode rows, then completed prompts, then forks: the order of `StepResult.tokens`."""
    decode_rows: int
    """Tokens that the step computes for rows that decode, drafts included."""
    prefill_tokens: int
    scored: dict[int, int]
    """Prompts whose tokens the step scores: id in the batch → request."""
    traced_first: tuple[int, ...] = ()
    """Traced requests whose first token the step brings."""
    drafts: tuple[Int32Array, ...] = ()
    """Drafts of each decode row; empty: no row has any."""
    searches: frozenset[int] = frozenset()
    """Beam searches that the step advances, by their ids in the batch."""

    @property
    def places(self) -> int:
        """Number of places for tokens in the step's result."""
        return len(self.rows) + sum(map(len, self.drafts))


def is_full(inflight: deque[InflightStep], steps_max: int) -> bool:
    """Return whether no step may be planned behind those in flight: there are too many, or the last one has
    drafts, so that it is not known how far its rows will come."""
    return len(inflight) >= steps_max or bool(inflight and inflight[-1].drafts)
