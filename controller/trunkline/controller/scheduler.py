"""Who computes what in the next step: first come first served, decode first, prefill in chunks.

PagedAttention §4.5 with iteration-level batching: every running row decodes one token; what is left of the
token budget goes to prompts in order of arrival. Admission reserves all blocks of a prompt at once, so
nobody who holds blocks waits for blocks. When a growing row finds none, idle cache goes first, then the
newest sequence is preempted: it lets go of its path and later matches its own prefix like any newcomer.

Progress: the oldest sequence is never preempted and always fits (checked at submission), so it ends; then
the next is the oldest. Preempted sequences resume before new ones start.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trunkline.controller.block_pool import BlockPool
from trunkline.controller.config import EngineConfig
from trunkline.controller.draft import PlanDraft
from trunkline.controller.residence import Admission, Residence
from trunkline.controller.rows import NO_ROWS, DecodeRows
from trunkline.controller.sequence import Phase, Sequence
from trunkline.controller.tree import ChunkTree

MATCHED_TOKENS_MAX: Final = 1 << 19
"""Tokens of waiting prompts that are matched with the tree in one step; the other prompts' turn comes in the
next. 1,000 prompts of 32K tokens that wait for one prefix took 80 ms at once, and every stream waited for that."""


class Scheduler:
    """Queues and running sets of a group. Pure; `now` is used for eviction order only."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        pool = BlockPool(config.num_blocks)
        tree = ChunkTree(pool, config.chunk_size, config.model_fingerprint, config.dtype)
        self.residence = Residence(pool, tree, prefix_cache=config.prefix_cache)
        self.rows = DecodeRows(config.max_rows, config.chunk_size, config.max_blocks_per_sequence)
        self.waiting: dict[int, Sequence] = {}
        """By request, in order of arrival."""
        self.preempted: list[Sequence] = []
        """In order of arrival; before all of `waiting`."""
        self.prefilling: list[Sequence] = []
        """Admitted, prompt not wholly planned; in order of admission."""
        self.row_set = NO_ROWS
        self._rows_changed = False
        self._left: list[int] = []
        self._merged: list[tuple[int, int, int]] = []
        self._blocked: tuple[int, int] | None = None
        """(request, blocks available) of the last admission that failed for lack of blocks."""
        self.preemptions = 0

    @property
    def running_count(self) -> int:
        return self.config.max_rows - self.rows.free_count + len(self.prefilling)

    @property
    def waiting_count(self) -> int:
        return len(self.waiting) + len(self.preempted)

    def plan(self, step: int, now: float) -> PlanDraft | None:
        """The next step, or None if nothing can be computed."""
        draft = PlanDraft(step)
        self._grow(draft, now)
        if self._rows_changed:
            self.row_set, draft.new_runs = self.rows.arrange(self.rows.active_slots())
        draft.rows = self.row_set
        self._prefill(draft, now)
        for source in draft.copy_sources:
            self.residence.tree.release(source, now)
        if not draft.prefill and not len(draft.rows):
            # The workers have not heard of the empty row set: the next plan will tell them.
            return None
        self._rows_changed = False
        self._advance(draft)
        draft.leaves, self._left = self._left, []
        draft.blocks = self._merged + draft.blocks
        self._merged = []
        return draft

    def _advance(self, draft: PlanDraft) -> None:
        """Account for the tokens that this step computes."""
        slots = draft.rows.slots
        if len(slots):
            self.rows.planned[slots] += 1
            if (self.rows.planned[slots] + 1 >= self.rows.limit[slots]).any():
                self._rows_changed = True  # these rows have sampled their last token with this step
        if draft.sampling:
            self._rows_changed = True

    def _grow(self, draft: PlanDraft, now: float) -> None:
        """Give every row that begins a new chunk in this step its block, oldest first."""
        slots = self.rows.active_slots() if self._rows_changed else self.row_set.slots
        starting = slots[
            self.rows.planned[slots] == self.rows.block_counts[slots] * np.int64(self.config.chunk_size)
        ]
        if not len(starting):
            return
        for sequence in sorted(self._sequences(starting), key=lambda s: s.arrival):
            while sequence.slot >= 0 and not self.residence.make_room(1):
                self.preempt(self._newest(), now)
            if sequence.slot < 0:
                continue  # it was the newest itself
            block = self.residence.pool.allocate()
            index = int(self.rows.block_counts[sequence.slot])
            sequence.private.append(block)
            self.rows.set_block(sequence.slot, index, block)
            draft.blocks.append((sequence.stay, index, block))

    def _sequences(self, slots: NDArray[np.intp]) -> Iterator[Sequence]:
        for slot in slots.tolist():
            sequence = self.rows.sequences[slot]
            assert sequence is not None
            yield sequence

    def _newest(self) -> Sequence:
        running = [s for s in self.rows.sequences if s is not None] + self.prefilling
        return max(running, key=lambda s: s.arrival)

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Take a running sequence out whole; it resumes before anything new starts."""
        self.release(sequence, now)
        sequence.phase = Phase.WAITING
        insort(self.preempted, sequence, key=lambda s: s.arrival)
        self.preemptions += 1

    def release(self, sequence: Sequence, now: float) -> None:
        """Take a running sequence out of the batch; what it computed stays cached."""
        if sequence.slot >= 0:
            slot = sequence.slot
            kv_tokens = int(min(self.rows.planned[slot], self.rows.known[slot]))
            self.rows.remove(sequence)
            self._rows_changed = True
        else:
            kv_tokens = max(sequence.computed, sequence.resident)
            self.prefilling.remove(sequence)
        self._left.append(sequence.stay)
        self._merged = [change for change in self._merged if change[0] != sequence.stay]
        self.residence.leave(sequence, kv_tokens, now)
        sequence.stay = 0

    def seal(self, slot: int, kv_tokens: int, now: float) -> None:
        """A row's chunk is full: name it and share it."""
        sequence = self.rows.sequences[slot]
        assert sequence is not None
        self.rows.flush(slot)
        if not self.config.prefix_cache:
            return
        for index, block in self.residence.seal(sequence, kv_tokens, now):
            self.rows.set_block(slot, index, block)
            self._merged.append((sequence.stay, index, block))
            self._rows_changed = True

    def _prefill(self, draft: PlanDraft, now: float) -> None:
        budget = self.config.token_budget - len(draft.rows)
        for sequence in list(self.prefilling):
            if budget <= 0:
                return
            budget -= self._prefill_chunk(sequence, budget, draft)
        matched = 0
        for sequence in self._candidates():
            if budget <= 0 or matched >= MATCHED_TOKENS_MAX or len(self.prefilling) >= self.rows.free_count:
                return
            if sequence.waits_on is not None and self._still_pending(sequence, draft.step):
                continue
            sequence.waits_on = None
            matched += sequence.tokens.count
            outcome = self.residence.admit(sequence, self._spare_blocks(), now, draft)
            if outcome is Admission.NO_BLOCKS:
                self._blocked = (sequence.request, self.residence.available)
                return  # nobody overtakes: that would starve long prompts
            if outcome is Admission.ADMITTED:
                self._admitted(sequence)
                budget -= self._prefill_chunk(sequence, budget, draft)

    def _candidates(self) -> list[Sequence]:
        """Who may start now, in order; nobody while the first of them still lacks blocks."""
        if not self.preempted and not self.waiting:
            return []
        first = self.preempted[0] if self.preempted else next(iter(self.waiting.values()))
        if self._blocked == (first.request, self.residence.available) and self.running_count:
            return []
        return [*self.preempted, *self.waiting.values()]

    def _spare_blocks(self) -> int:
        """Headroom so that a newcomer is not preempted at once by the growth of those who run.

        A block for every fourth: with chunks of 64 tokens a row asks for one each 64 steps.
        """
        return -(-self.running_count // 4)

    def _still_pending(self, sequence: Sequence, step: int) -> bool:
        node = sequence.waits_on
        return node is not None and node.parent is not None and node.ready_step >= step

    def _admitted(self, sequence: Sequence) -> None:
        if sequence.request in self.waiting:
            del self.waiting[sequence.request]
        else:
            self.preempted.remove(sequence)
        if sequence.cached_tokens < 0:
            # Now, not when the prompt is done: after a preemption it would find what it computed itself.
            sequence.cached_tokens = min(sequence.resident, sequence.prompt_len - 1)
        sequence.phase = Phase.PREFILL
        self.prefilling.append(sequence)

    def _prefill_chunk(self, sequence: Sequence, budget: int, draft: PlanDraft) -> int:
        """Plan the next part of a prompt; returns its tokens."""
        start, total = sequence.computed, sequence.tokens.count
        tokens = min(budget, total - start)
        last = start + tokens == total
        draft.prefill.append((sequence.stay, start, tokens, max(start, sequence.resident), int(last)))
        sequence.computed = start + tokens
        if self.config.prefix_cache:
            self.residence.mark_ready(sequence, draft.step)
        if last:
            self.prefilling.remove(sequence)
            sequence.phase = Phase.DECODE
            self.rows.add(sequence)
            draft.sampling.append(sequence)
        return tokens
