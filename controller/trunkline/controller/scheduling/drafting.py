"""Plan drafts: guesses of the tokens that rows will draw next, which one step computes together (speculative
decoding; the guesses come from a `DraftSource`, not from a second model).

      known tokens   … t            a row's input is t; without drafts the step draws one token
      step           t d1 d2 d3     with three drafts it draws a1 behind t, and a2 behind d1 if d1 = a1, …
      result         a1 a2 -1 -1    here d1 = a1, d2 ≠ a2: two tokens in one step

Each token is drawn as it would be without drafts, so texts do not depend on them. Rules:

1. Drafts stand behind known tokens only: none while a step with the row is in flight. A step with drafts is waited
   for before the next one is planned, as how far its rows will come is not known before (`is_full`).
2. Drafts take what nothing else wants in this step: rows and drafts together are at most `max_rows`, and with the
   prompt tokens at most `token_budget`.
3. A row takes blocks early for its drafts only while each row could still have one more block; no sequence is
   preempted for drafts. If the drafts are refused, the row keeps the blocks, which it needs a few tokens later.
   For such a block an idle chunk may leave the cache a few tokens early; a row that meets a stop token before it
   needs the block has had it evicted in vain.
4. No draft stands where the request would have ended: at its largest length.
5. KV of refused drafts lies behind the row's tokens, in blocks that only this row has, and is overwritten by the
   next steps. A chunk is named and shared only when all of its tokens have been drawn.

Beams have no drafts: which of them go on is known only when the step is done.
"""

from __future__ import annotations

from math import inf

import numpy as np
from numpy.typing import NDArray

from trunkline.controller.allocation.kv_manager import KVCacheManager
from trunkline.controller.drafts.drafter import Drafter
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.reports import StepResult
from trunkline.controller.scheduling.fair_queue import FairQueue
from trunkline.controller.sequences.decode_rows import BEAM, DecodeRows, RowSet
from trunkline.controller.sequences.draft_source import DraftSource, Slots
from trunkline.controller.sequences.plan_builder import InflightStep, PlanBuilder
from trunkline.controller.tiers.costs import StepCosts
from trunkline.kvstore.chunks import Int32Array, unpack_int32


class Drafting:
    """Adds drafts to plans. Without a source it does nothing."""

    def __init__(
        self, config: EngineConfig, kv: KVCacheManager, rows: DecodeRows, queue: FairQueue, costs: StepCosts
    ) -> None:
        self._config = config
        self._kv = kv
        self._rows = rows
        self._queue = queue
        self._totals = kv.tree.totals
        if config.speculation == "auto":
            self.source = Drafter(config, costs)

    @property
    def source(self) -> DraftSource | None:
        """Where drafts come from; None: there are none. Set before the first sequence decodes."""
        return self._rows.drafts

    @source.setter
    def source(self, source: DraftSource | None) -> None:
        self._rows.drafts = source

    @property
    def calm_steps(self) -> float:
        """For how many steps more the source need not be told of tokens; 0: it has to be told step by step."""
        return inf if self.source is None else self.source.calm_steps

    def study(self, *, is_idle: bool) -> bool:
        """Let the source look at texts, while workers compute; return whether to call this again at once."""
        return self.source is not None and self.source.study(is_idle=is_idle)

    def settle(self, slots: Slots, tokens: Int32Array, steps: list[int]) -> None:
        """Tell the source of steps that it was not told of: none had drafts, and each drew a token for each row.

        Args:
            tokens: `[steps, rows]`.
            steps: numbers of the steps that are in flight now.
        """
        if self.source is not None:
            self.source.settle(slots, tokens, steps)

    def foretold(self, forced: dict[int, bytes]) -> None:
        """Tell the source what grammars demand next.

        Args:
            forced: packed int32 ids by the sequence's id in the batch. Sequences may have ended meanwhile.
        """
        for batch_seq_id, packed in forced.items():
            slots = np.flatnonzero(self._rows.batch_seq_ids == batch_seq_id)
            if self.source is not None and len(slots):
                self.source.foretold(int(slots[0]), unpack_int32(packed))

    def waits(self) -> bool:
        """Return whether to wait for the step in flight, which has no drafts, so that the next one can have
        some."""
        if self.source is None:
            return False
        slots = self._rows.active_slots()
        return bool(len(slots)) and self.source.waits(slots)

    def source_waits(self, slots: Slots) -> bool:
        """Return what `waits` does, if these are the sequences that have a token to compute then."""
        return self.source is not None and self.source.waits(slots)

    def plan(self, plan: PlanBuilder) -> None:
        """Add drafts to a plan whose rows and prompt tokens are decided."""
        source, slots = self.source, plan.rows.slots
        if source is None or not len(slots):
            return
        if not (self._rows.known[slots] > self._rows.planned[slots]).any():  # rule 1
            return
        budget = min(self._config.max_rows, self._config.token_budget - plan.prefill_tokens) - len(slots)
        room = self._room(plan.rows, budget)
        if not room.any():
            return
        found = source.propose(slots, room, plan.prefill_tokens)
        if found is None:
            return
        drafts = []
        for slot, tokens, most in zip(slots.tolist(), found, room.tolist(), strict=True):
            tokens = tokens[: max(0, min(most, budget))]
            if len(tokens):
                tokens = tokens[: self._reach(slot, len(tokens), plan)]
            drafts.append(tokens)
            budget -= len(tokens)
        if any(map(len, drafts)):
            plan.drafts = drafts
            self._totals.drafted_tokens += plan.drafted

    def planned(self, plan: PlanBuilder) -> None:
        """Tell the source of a plan that is complete."""
        if self.source is not None:
            self.source.planned(plan.step, plan.now, plan.drafted)

    def answered(self, step: InflightStep, result: StepResult, now: float) -> None:
        """Tell the source of the answer to a step, before its tokens are taken in."""
        if self.source is not None:
            self.source.answered(step.step, now, result.elapsed_us - result.waited_us)

    def predicted(self, step: InflightStep) -> frozenset[int]:
        """Return the slots whose drafts in a step are from their client's prediction. To be called before the
        tokens of the step are taken in."""
        source = self.source
        if source is None:
            return frozenset()
        drafted = zip(step.rows.slots.tolist(), step.drafts, strict=False)  # prompts that end have none
        return frozenset(slot for slot, draft in drafted if len(draft) and source.is_prediction(slot))

    def extend(self, slots: Slots, tokens: Int32Array, *, drafted: int) -> None:
        """Take note of tokens that rows have drawn.

        Args:
            tokens: `[rows]`, or `[positions, rows]`.
            drafted: number of positions behind drafts that are accepted.
        """
        if drafted:
            self._totals.accepted_drafts += drafted * len(slots)
            for slot in slots.tolist():
                sequence = self._rows.sequences[slot]
                assert sequence is not None
                self._queue.charge(sequence.group, drafted)  # the row itself was charged with the step
        if self.source is not None:
            self.source.extend(slots, tokens)

    def _room(self, rows: RowSet, budget: int) -> NDArray[np.int64]:
        """Return how many drafts each row may have: rules 1, 3 and 4, and no more than `budget`."""
        state, slots, chunk_size = self._rows, rows.slots, self._config.chunk_size
        planned = state.planned[slots]
        room = np.minimum(state.limit[slots] - planned - 2, budget)
        in_blocks = (state.block_counts[slots] + self._spare_blocks(len(slots))) * np.int64(chunk_size)
        room = np.minimum(room, in_blocks - planned - 1)
        may = (state.known[slots] == planned + 1) & (rows.samples != BEAM)
        return np.where(may, np.maximum(room, 0), 0)

    def _spare_blocks(self, rows: int) -> int:
        """Return how many blocks may be taken early."""
        return max(0, self._kv.available - rows)

    def _reach(self, slot: int, drafts: int, plan: PlanBuilder) -> int:
        """Give a row the blocks for its drafts; return how many of them have room."""
        rows, chunk_size = self._rows, self._config.chunk_size
        sequence = rows.sequences[slot]
        assert sequence is not None
        first = int(rows.planned[slot]) + 1
        while (room := int(rows.block_counts[slot]) * chunk_size - first) < drafts:
            if not (self._spare_blocks(len(plan.rows)) and self._kv.make_room(1, plan)):
                return room
            plan.append_block(rows, sequence, self._kv.pool.allocate())
        return drafts
