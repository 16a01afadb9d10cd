"""Who computes what in the next step: first come first served, decode first, prefill in chunks.

PagedAttention §4.5 with iteration-level batching: every running row decodes one token; what is left of the
token budget goes to prompts in order of priority, then arrival. Admission reserves all blocks of a prompt at once,
so nobody who holds blocks waits for blocks. When a growing row finds none, idle cache goes first, then the newest
group is preempted whole: it lets go of its paths and later matches its own prefixes like any newcomer.

Progress: the oldest group (of the best priority) is never preempted and always fits (checked at submission), so it
ends; then the next is the oldest. Preempted groups resume before new ones of their priority start.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from trunkline.controller.allocation.cuts import keep_or_compact
from trunkline.controller.allocation.kv_manager import Admission, KVCacheManager
from trunkline.controller.cache.block_pool import BlockPool
from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.config import EngineConfig
from trunkline.controller.scheduling.cache_report import explain
from trunkline.controller.scheduling.encoding import ModuleEncoding
from trunkline.controller.scheduling.forks import Forks, move_beams, restore_output
from trunkline.controller.scheduling.queue import AdmissionOrder, RequestQueue
from trunkline.controller.sequences.decode_rows import NO_ROWS, DecodeRows
from trunkline.controller.sequences.plan_builder import PendingChanges, PlanBuilder
from trunkline.controller.sequences.sequence import Phase, Sequence, SequenceGroup
from trunkline.controller.tiers.costs import StepCosts, prefill_budget
from trunkline.controller.tiers.fetching import Fetching
from trunkline.controller.tiers.preload import Preloads, load_entries
from trunkline.kvstore.extents import BlockId

MATCHED_TOKENS_MAX: Final = 1 << 19
"""Tokens of waiting prompts that are matched with the tree in one step; the other prompts' turn comes in the
next. 1,000 prompts of 32K tokens that wait for one prefix took 80 ms at once, and every stream waited for that."""
SCORED_TOKENS_MAX: Final = 256
"""Tokens in one step of a prompt whose tokens are scored: each needs a row of logits as wide as the vocabulary."""


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start."""

    preemptions: int = 0
    """Groups taken out, …"""
    swapped: int = 0
    """… of them with a claim on the host pool."""


class Scheduler:
    """Queue and running sets of a group of workers. Pure; `now` is used for eviction order only."""

    def __init__(self, config: EngineConfig, first_disk_generation: int = 0) -> None:
        """
        Args:
            first_disk_generation: generations of disk slots begin above it.
        """
        self.config = config
        pool = BlockPool(config.num_blocks)
        tiers = config.tiers(first_disk_generation)
        tree = RadixCache(pool, config.chunk_size, config.model_fingerprint, config.dtype, tiers)
        self.kv = KVCacheManager(pool, tree, prefix_cache=config.prefix_cache, ttl=config.session_ttl_s)
        self.costs = StepCosts(config.swap_us_per_block)
        self.preloads = Preloads()
        self.fetching = Fetching(tree.tiers, self.costs, config.chunk_size)
        self.rows = DecodeRows(config.max_rows, config.chunk_size, config.max_table_blocks)
        self.queue = RequestQueue()
        self.admission = AdmissionOrder(self.queue)
        self.encoding = ModuleEncoding(self.kv, self.queue, self.fetching)
        self.prefilling: list[Sequence] = []
        """Admitted, prompt not wholly planned; in order of admission."""
        self.parked: list[Sequence] = []
        """Sequences that have come back and wait for the others of their group."""
        self.forks = Forks()
        self.counters = SchedulerCounters()
        self.row_set = NO_ROWS
        self._pending = PendingChanges()

    @property
    def running_count(self) -> int:
        """Sequences that hold blocks."""
        decoding = self.config.max_rows - self.rows.free_count
        return decoding + len(self.prefilling) + len(self.parked) + len(self.encoding.finishing)

    @property
    def waiting_count(self) -> int:
        """Requests of which a sequence waits."""
        return len(self.queue) - sum(group.queued for group in self.encoding.jobs.groups())

    def plan(self, step: int, now: float) -> PlanBuilder | None:
        """The next step, or None if nothing can be computed."""
        draft = PlanBuilder(step, self.config.chunk_size, now)
        kv, tree = self.kv, self.kv.tree
        kv.pool.taken.clear()
        self._end_encoded(step, now)
        self._grow(draft, now)
        copied = self.forks.copy_tails(draft)
        self._unpark(draft)
        if self._pending.rows_changed:
            self.row_set, draft.new_runs = self.rows.arrange(self.rows.active_slots())
        draft.rows = self.row_set
        self._prefill(draft, now)
        tree.save_waiting(draft)
        for source in draft.copy_sources:
            tree.release(source, now)
        for block in copied:
            kv.pool.release(block)
        if draft.is_empty:
            # The workers have not heard of the empty row set: the next plan will tell them.
            return None
        moved = [BlockId(block) for source, target, _, _ in draft.copies for block in (source, target)]
        draft.save_fence, draft.load_fence = tree.fences.close(step, kv.pool.taken, moved)
        self._pending.rows_changed = False
        self._advance(draft)
        draft.leaves, self._pending.left = self._pending.left, []
        draft.blocks = self._pending.merged + draft.blocks
        self._pending.merged = []
        return draft

    def _advance(self, draft: PlanBuilder) -> None:
        """Account for the tokens that this step computes."""
        slots = draft.rows.slots
        if len(slots):
            self.rows.planned[slots] += 1
            if (self.rows.planned[slots] + 1 >= self.rows.limit[slots]).any():
                self._pending.rows_changed = True  # these rows have sampled their last token with this step
        if draft.sampling:
            self._pending.rows_changed = True

    def _end_encoded(self, step: int, now: float) -> None:
        for sequence in self.encoding.finishing.copy():
            self.end(sequence, now)
            computed = sequence.resident < sequence.tokens.count
            self.encoding.jobs.done(sequence.group, step, computed=computed)

    def end_found(self, step: int, now: float) -> None:
        """Texts that were to be encoded may have turned up in the remote tier."""
        for group in self.encoding.jobs.found(step):
            if not group.members:
                continue  # it was there for one of the others only, and has ended with that
            for member in group.members.copy():
                self.end(member, now)
            self.encoding.jobs.done(group, step, computed=False)

    # Growth and preemption

    def _grow(self, draft: PlanBuilder, now: float) -> None:
        """Give every row that begins a new chunk in this step its block, oldest group first."""
        slots = self.rows.active_slots() if self._pending.rows_changed else self.row_set.slots
        starting = slots[
            self.rows.planned[slots] == self.rows.block_counts[slots] * np.int64(self.config.chunk_size)
        ]
        if not len(starting):
            return
        groups: dict[int, list[Sequence]] = {}
        for sequence in sorted(self._sequences(starting), key=lambda s: (s.group.rank, s.sample)):
            groups.setdefault(sequence.request, []).append(sequence)
        for members in groups.values():
            group = members[0].group
            while members[0].slot >= 0 and not self.kv.make_room(len(members), draft):
                newest = self._newest()
                going = any(sequence.group is not newest for sequence in self.running())
                if not self.encoding.make_way(newest, now, going=going):
                    self.preempt(newest, now)
            if members[0].slot < 0:
                continue  # it was the newest itself
            for sequence in members:
                self._append_block(sequence, draft)
            if group.search is not None:
                self.rows.read_alike(members[0], members[1:], int(self.rows.block_counts[members[0].slot]) - 1)
                self._pending.rows_changed = True

    def _append_block(self, sequence: Sequence, draft: PlanBuilder) -> None:
        block = self.kv.pool.allocate()
        index = int(self.rows.block_counts[sequence.slot])
        sequence.private.append(block)
        self.rows.set_block(sequence.slot, index, block)
        draft.blocks.append((sequence.batch_seq_id, index, block))

    def _sequences(self, slots: NDArray[np.intp]) -> Iterator[Sequence]:
        for slot in slots.tolist():
            sequence = self.rows.sequences[slot]
            assert sequence is not None
            yield sequence

    def running(self) -> list[Sequence]:
        """Everyone who holds blocks."""
        entering = self.prefilling + self.parked + self.encoding.finishing
        return [s for s in self.rows.sequences if s is not None] + entering

    def _newest(self) -> SequenceGroup:
        return max((s.group for s in self.running()), key=lambda group: group.rank)

    def preempt(self, group: SequenceGroup, now: float) -> None:
        """Take a group out whole; it resumes before anything new of its priority starts."""
        claim = self._swaps(group)
        for sequence in reversed(group.members):  # children first: a tail that they still share is not cached
            if sequence.batch_seq_id:
                self.release(sequence, now, claim=claim)
            sequence.phase = Phase.WAITING
        self.admission.left(group)
        whole = len(group.members) == group.request.width > 1
        if whole and group.members[0].tokens.count == group.prompt_len:
            # Nothing tells the samples apart yet: they will fork again. Not if one was
            # aborted: it would return.
            for sequence in group.members[1:]:
                self.kv.drop_claim(sequence)
            del group.members[1:]
            group.forked = False
        if not group.queued:
            group.preempted = True
            self.queue.add(group)
        self.counters.preemptions += 1
        self.counters.swapped += claim

    def _swaps(self, group: SequenceGroup) -> bool:
        """Whether the group's chunks should go to the host pool when their blocks are needed."""
        if self.config.preemption == "recompute" or not (self.config.host_slots and self.config.prefix_cache):
            return False
        if self.config.preemption == "swap":
            return True
        running = [s for s in group.members if s.batch_seq_id]
        blocks = len({block for s in running for block in s.block_table()})
        return self.costs.prefers_swap(blocks * self.config.chunk_size, blocks)

    def release(self, sequence: Sequence, now: float, *, claim: bool = False, ends: bool = False) -> None:
        """Take a running sequence out of the batch; what it computed stays cached.

        Args:
            claim: it comes back and wants to find its chunks, in the host pool if need be.
            ends: it does not come back.

        A tail counts only if it is known what is in it. A child's is empty until the plan after its fork. A beam's
        is what the last result says once the next step is planned, in which the workers copy tails about, and
        only until the step after that, which may be on its way when a search is aborted.
        """
        if sequence.slot >= 0:
            planned, known = int(self.rows.planned[sequence.slot]), int(self.rows.known[sequence.slot])
            kv_tokens = min(planned, known)
            self.rows.remove(sequence)
            self._pending.rows_changed = True
            settled = not sequence.tails
            if sequence.beam_position is not None:
                output_tokens = restore_output(sequence)
                goes_on = planned + 1 < sequence.group.limit  # else later steps may be on their way without it
                settled = not ends and planned == known and goes_on and output_tokens > 0
            if not settled:
                kv_tokens -= kv_tokens % self.config.chunk_size
        elif sequence.phase is Phase.PARKED:
            kv_tokens = sequence.computed
            self.parked.remove(sequence)
        elif sequence in self.encoding.finishing:
            kv_tokens = sequence.computed
            self.encoding.finishing.remove(sequence)
        else:
            kv_tokens = max(sequence.computed, sequence.resident)
            self.prefilling.remove(sequence)
        self._pending.left.append(sequence.batch_seq_id)
        self.preloads.left(sequence.batch_seq_id)
        self._pending.merged = [change for change in self._pending.merged if change[0] != sequence.batch_seq_id]
        self.kv.leave(sequence, kv_tokens, now, claim=claim)
        self.forks.leave_batch(sequence)

    def end(self, sequence: Sequence, now: float) -> None:
        """A sequence has ended, wherever it is; the group, if it was the last one, too."""
        group = sequence.group
        if sequence.batch_seq_id:
            self.release(sequence, now, ends=True)
        self.kv.drop_claim(sequence)
        sequence.phase = Phase.ENDED
        group.members.remove(sequence)
        if not group.members:
            self.fetching.done(group)
            self.leave_jobs(group, now)
        self.admission.note(group)

    def leave_jobs(self, waiter: Hashable, now: float) -> None:
        """Somebody does not wait for texts any more; what nobody waits for is not encoded."""
        for orphan in self.encoding.jobs.left(waiter):
            for member in orphan.members.copy():
                self.end(member, now)

    def seal(self, slot: int, kv_tokens: int, now: float) -> None:
        """A row's chunk is full: name it and share it."""
        sequence = self.rows.sequences[slot]
        assert sequence is not None
        self.rows.flush(slot)
        if not self.config.prefix_cache:
            return
        fences = self.kv.tree.fences
        for index, block in self.kv.seal(sequence, kv_tokens, now):
            fences.reads(fences.ready_after([block]))  # the equal chunk may still be on its way from the host
            self.rows.set_block(slot, index, block)
            self._pending.merged.append((sequence.batch_seq_id, index, block))
            self._pending.rows_changed = True

    def move_beams(self, group: SequenceGroup, parents: list[int], now: float) -> None:
        """The workers moved the beams of a search at the end of the step whose result came last."""
        stored = int(self.rows.known[group.members[0].slot]) - 1
        move_beams(group.members, parents, stored, self.kv, now)

    # Prefill and admission

    def _prefill(self, draft: PlanBuilder, now: float) -> None:
        budget = prefill_budget(
            self.costs,
            len(draft.rows),
            1000.0 * self.config.target_itl_ms,
            self.config.token_budget - len(draft.rows),
            self.config.chunk_size,
        )
        for sequence in list(self.prefilling):
            if budget <= 0:
                return
            budget -= self._prefill_chunk(sequence, budget, draft, now)
        started = -1
        while started < self.encoding.jobs.started_texts:  # who finds a text gone has it encoded, maybe at once
            started = self.encoding.jobs.started_texts
            budget = self._start_waiting(budget, draft, now)

    def _start_waiting(self, budget: int, draft: PlanBuilder, now: float) -> int:
        """Admit who waits, in order; returns what is left of the budget, 0 if nobody else may start."""
        matched, jobs = 0, self.encoding.jobs
        first = next((group for group in self.queue if not group.encodes), None)
        if len(jobs) or jobs.held:
            jobs.hold_for(first, draft.step)
        for group in self.admission.candidates(self.kv.available, self.running_count, going=self._is_going):
            if budget <= 0 or matched >= MATCHED_TOKENS_MAX:
                return 0
            if group.waits_for_grammar or self.fetching.is_probing(group, now):
                continue
            if self.admission.quarantine.must_wait(group.id):
                return 0
            if not jobs.encode_missing_texts(group, draft.step, is_first=group is first):
                continue
            while not self._may_start(group, draft.step):
                if not self.encoding.make_way(group, now, going=self._is_going):
                    return 0  # nobody overtakes: that would starve large requests
            for sequence in list(group.members):
                if sequence.phase is not Phase.WAITING or sequence.is_pending(draft.step):
                    continue
                sequence.waits_on = None
                matched += sequence.tokens.count
                outcome = self._admit(sequence, now, draft)
                while outcome is Admission.NO_BLOCKS and self.encoding.make_way(group, now, going=self._is_going):
                    outcome = self._admit(sequence, now, draft)
                if outcome is Admission.LACKING:
                    jobs.too_far(group, draft.step)
                if outcome is Admission.NO_BLOCKS:
                    self.admission.blocked(group, self.kv.available, self.running_count)
                    return 0
                if outcome is Admission.ADMITTED:
                    budget -= self._prefill_chunk(sequence, budget, draft, now)
                if budget <= 0:
                    break
            if self.admission.is_entering(group):
                return 0  # see `AdmissionOrder.candidates`
        return budget

    @property
    def _is_going(self) -> bool:
        """Whether anything is going to change by itself: parked sequences compute nothing."""
        return self.running_count > len(self.parked)

    def _may_start(self, group: SequenceGroup, step: int) -> bool:
        """Whether all of a group fits the rows and, if several sequences come back at once, the pool."""
        if any(sequence.batch_seq_id for sequence in group.members):
            return True  # the others of it were let in together with those that run
        if self.rows.free_count - self._rows_promised() < group.rows_needed:
            return False
        if len(group.members) == 1:
            return True
        return self.kv.fits_group(group.members, self._spare_blocks(group), step)

    def _rows_promised(self) -> int:
        """Rows that those who hold blocks, and the rest of their groups, will need beyond those they have."""
        groups = {s.group.id: s.group for s in (*self.prefilling, *self.parked)}
        groups |= self.admission.entering()
        return sum(g.rows_needed - sum(s.slot >= 0 for s in g.members) for g in groups.values())

    def _spare_blocks(self, group: SequenceGroup) -> int:
        """Headroom so that a newcomer is not preempted at once by the growth of others who run.

        A block for every fourth: with chunks of 64 tokens a row asks for one each 64 steps. Those of its own group
        do not count: what the group needs at its longest fits, but perhaps nothing beyond that.
        """
        others = self.running_count - sum(sequence.batch_seq_id > 0 for sequence in group.members)
        return -(-others // 4)

    def _admit(self, sequence: Sequence, now: float, draft: PlanBuilder) -> Admission:
        group, tree = sequence.group, self.kv.tree
        if not any(s.batch_seq_id for s in group.members):
            if group.request.beam is not None:
                self.forks.place_beams(group)
            if self.config.prefix_cache:
                keep_or_compact(tree, sequence, draft.step)
        loads = len(draft.loads)
        outcome = self.kv.admit(
            sequence,
            self._spare_blocks(group),
            now,
            draft,
            tails=0 if group.forked else group.request.width - 1,
            wait_for=lambda far: self.fetching.worth_waiting(group, far, now),
            load_entries=load_entries(group, self.config, self.costs),
        )
        if outcome is not Admission.ADMITTED:
            if not any(member.batch_seq_id for member in group.members):
                for member in group.members:
                    self.forks.leave_batch(member)  # its search has not come in, after all
            return outcome
        if group.modules is not None:
            self.leave_jobs(group, now)
        if group.found is None:
            group.found = explain(self.kv, self.fetching, sequence, draft)
            group.found.entries = sequence.resident // self.config.chunk_size
        self.fetching.done(group)
        self.preloads.ordered(len(draft.loads) - loads, now, self.costs.move_us)
        if step := tree.fences.ready_after(sequence.block_table()):
            self.preloads.wait(sequence.batch_seq_id, step)
        sequence.phase = Phase.PREFILL
        self.prefilling.append(sequence)
        self.admission.note(group)
        self.admission.unblock()
        return outcome

    def _prefill_chunk(self, sequence: Sequence, budget: int, draft: PlanBuilder, now: float) -> int:
        """Plan the next part of a prompt, unless the KV before it is better waited for; returns its tokens."""
        group = sequence.group
        start, stop = sequence.computed, sequence.prefill_stop
        scored = sequence.recompute_from_start
        tokens = min(budget, stop - start, SCORED_TOKENS_MAX if scored else budget)
        step_us = self.costs.step_us(len(draft.rows), tokens)
        if not self.preloads.is_due(sequence.batch_seq_id, now, step_us, not (draft.prefill or len(draft.rows))):
            return 0
        self.kv.tree.fences.reads(self.preloads.begin(sequence.batch_seq_id))
        last = start + tokens == stop
        samples = last and stop == sequence.tokens.count and not group.encodes
        if tokens:
            draft.compute(sequence, tokens, samples=samples, scored=scored)
        sequence.computed = start + tokens
        if self.config.prefix_cache:
            self.kv.mark_ready(sequence, draft)
        if not last:
            return tokens
        self.prefilling.remove(sequence)
        group.prompt_scored = True
        if scored:
            # Not again after a preemption: the workers score what is computed of such a prompt.
            sequence.sampling = msgspec.structs.replace(sequence.sampling, prompt_logprobs=-1)
        if group.encodes:
            self.encoding.finishing.append(sequence)
            return tokens
        if not samples:
            sequence.phase = Phase.PARKED
            self.parked.append(sequence)
            return tokens
        sequence.phase = Phase.DECODE
        self.rows.add(sequence)
        draft.sampling.append(sequence)
        if not group.forked:
            self.forks.fork(sequence, draft, self.kv, self.rows)
        return tokens

    def _unpark(self, draft: PlanBuilder) -> None:
        """Let the groups go on whose sequences have all come back."""
        if not self.parked:
            return
        for group in {s.group.id: s.group for s in self.parked}.values():
            if any(member.phase is not Phase.PARKED for member in group.members):
                continue
            for sequence in group.members:
                self.parked.remove(sequence)
                sequence.phase = Phase.DECODE
                self.rows.add(sequence)
                # The last token's KV is stored in this step: with it its chunk may be full.
                sequence.computed = sequence.tokens.count
                if self.config.prefix_cache:
                    self.kv.mark_ready(sequence, draft)
            if group.search is not None:
                full = (group.members[0].tokens.count - 1) // self.config.chunk_size
                self.rows.read_alike(group.members[0], group.members[1:], full)
            self._pending.rows_changed = True
