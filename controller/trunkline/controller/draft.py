"""A step plan while it is being made, and the record kept of it until its result arrives."""

from __future__ import annotations

from dataclasses import dataclass, field

from trunkline.controller.rows import NO_ROWS, RowSet
from trunkline.controller.sequence import Sequence
from trunkline.controller.tree import Node
from trunkline.kvstore.layout import Int32Array, pack_int32
from trunkline.worker.messages import Join, StepPlan


@dataclass(slots=True)
class PlanDraft:
    """What step `step` will tell the workers. See `StepPlan` for the meaning and order of the fields."""

    step: int
    leaves: list[int] = field(default_factory=list)
    joins: list[Join] = field(default_factory=list)
    copies: list[tuple[int, int, int, int]] = field(default_factory=list)
    blocks: list[tuple[int, int, int]] = field(default_factory=list)
    prefill: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    rows: RowSet = NO_ROWS
    new_runs: Int32Array | None = None
    """Set if `rows` differs from the previous step's."""
    sampling: list[Sequence] = field(default_factory=list)
    """Sequences whose last prefill chunk this is, in the order of `prefill`."""
    copy_sources: list[Node] = field(default_factory=list)
    """Held until the plan is complete, so that no block of this plan is both a copy's source and reused."""

    def message(self, epoch: int) -> StepPlan:
        changed = self.new_runs is not None
        return StepPlan(
            step=self.step,
            epoch=epoch,
            leaves=pack_int32(self.leaves) if self.leaves else b"",
            joins=self.joins,
            copies=pack_int32([x for copy in self.copies for x in copy]) if self.copies else b"",
            blocks=pack_int32([x for block in self.blocks for x in block]) if self.blocks else b"",
            prefill=pack_int32([x for item in self.prefill for x in item]) if self.prefill else b"",
            rows=self.rows.stays.astype("<i4").tobytes() if changed else None,
            runs=pack_int32(self.new_runs) if self.new_runs is not None else None,
        )


@dataclass(frozen=True, slots=True)
class InflightStep:
    """What the engine must remember to understand a step's result."""

    step: int
    rows: RowSet
    """Decode rows, then the sequences whose prefill ended: the order of `StepResult.tokens`."""
