"""Build a step plan, and remember what is needed to understand its result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from trunkline.controller.cache.radix_tree import Node
from trunkline.controller.sequences.decode_rows import NO_ROWS, RowSet
from trunkline.controller.sequences.sequence import Sequence, SequenceGroup
from trunkline.kvstore.chunks import Int32Array, pack_int32
from trunkline.runtime.spans import StepTrace, pack_steps
from trunkline.worker.messages import Fork, Join, StepPlan


@dataclass(slots=True)
class PlanBuilder:
    """The plan of one step while it is being made. See `StepPlan` for the meaning and order of the fields."""

    step: int
    chunk_size: int
    now: float = 0.0
    """The time at which it is made, in seconds."""
    leaves: list[int] = field(default_factory=list)
    joins: list[Join] = field(default_factory=list)
    saves: list[tuple[int, int, int]] = field(default_factory=list)
    late_saves: list[tuple[int, int, int]] = field(default_factory=list)
    loads: list[tuple[int, int, int]] = field(default_factory=list)
    save_fence: int = 0
    load_fence: int = 0
    copies: list[tuple[int, int, int, int]] = field(default_factory=list)
    blocks: list[tuple[int, int, int]] = field(default_factory=list)
    prefill: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    rows: RowSet = NO_ROWS
    new_runs: Int32Array | None = None
    """Set if `rows` differs from the previous step's."""
    sampling: list[Sequence] = field(default_factory=list)
    """Sequences whose prompts this step completes, in the order of `prefill`."""
    forks: list[Fork] = field(default_factory=list)
    forked: list[Sequence] = field(default_factory=list)
    """The forked sequences, in the order of `forks`."""
    scored: dict[int, int] = field(default_factory=dict)
    """Prompts whose tokens this step scores: id in the batch → request."""
    traced: list[tuple[SequenceGroup, int, int]] = field(default_factory=list)
    """(group, id in the batch, tokens) of traced prompts that this step computes parts of."""
    copy_sources: list[Node] = field(default_factory=list)
    """Chunks held until the plan is complete, so that it does not reuse blocks that it copies from."""

    @property
    def is_empty(self) -> bool:
        """Whether the workers would have nothing to do."""
        told = self.joins or self.saves or self.loads or self.copies or self.blocks
        return not (self.prefill or len(self.rows) or told)

    def message(self, epoch: int) -> StepPlan:
        changed = self.new_runs is not None
        return StepPlan(
            step=self.step,
            epoch=epoch,
            leaves=pack_int32(self.leaves) if self.leaves else b"",
            joins=self.joins,
            saves=pack_int32([x for save in self.saves for x in save]) if self.saves else b"",
            loads=pack_int32([x for load in self.loads for x in load]) if self.loads else b"",
            copies=pack_int32([x for copy in self.copies for x in copy]) if self.copies else b"",
            blocks=pack_int32([x for block in self.blocks for x in block]) if self.blocks else b"",
            prefill=pack_int32([x for item in self.prefill for x in item]) if self.prefill else b"",
            rows=self.rows.batch_seq_ids.astype("<i4").tobytes() if changed else None,
            runs=pack_int32(self.new_runs) if self.new_runs is not None else None,
            forks=self.forks,
            late_saves=pack_int32([x for save in self.late_saves for x in save]) if self.late_saves else b"",
            save_fence=self.save_fence,
            load_fence=self.load_fence,
            traces=pack_steps(self._step_traces()) if self.traced else None,
        )

    def compute(self, sequence: Sequence, tokens: int, *, samples: bool, scored: bool) -> None:
        """Add the next tokens of a prompt to the step."""
        group, start = sequence.group, sequence.computed
        write_from, holes = max(start, sequence.resident), group.holes
        self.prefill.append((sequence.batch_seq_id, start - holes, tokens, write_from - holes, int(samples)))
        if scored:
            self.scored[sequence.batch_seq_id] = group.id
        if group.request.trace is not None:
            self.traced.append((group, sequence.batch_seq_id, tokens))

    def _step_traces(self) -> Iterator[StepTrace]:
        for group, batch_seq_id, tokens in self.traced:
            if (ids := group.request.trace) is not None:
                yield StepTrace(ids.context(ids.prefill), ids.decode, batch_seq_id, tokens)

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that the step computes."""
        return sum(count for _, _, count, _, _ in self.prefill)


@dataclass(slots=True)
class PendingChanges:
    """Changes that the next plan will tell the workers."""

    rows_changed: bool = False
    left: list[int] = field(default_factory=list)
    """Ids of sequences that have left the batch."""
    merged: list[tuple[int, int, int]] = field(default_factory=list)
    """(id in the batch, index, block) of block-table entries that were replaced."""


@dataclass(frozen=True, slots=True)
class InflightStep:
    """A step that the workers have not answered yet: what is needed to understand its result."""

    step: int
    rows: RowSet
    """Decode rows, then completed prompts, then forks: the order of `StepResult.tokens`."""
    decode_rows: int
    prefill_tokens: int
    scored: dict[int, int]
    """As in `PlanBuilder`."""
    traced_first: tuple[int, ...] = ()
    """Traced requests whose first token the step brings."""
