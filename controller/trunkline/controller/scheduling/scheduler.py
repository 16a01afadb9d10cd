"""Decide what the next step computes: tenants take turns, decode first, prefill in chunks.

      plan ─► grow_rows        give a block to each row that begins a new chunk; preempt the newest groups if
                               there are too few blocks
           ─► extend_prompts   give blocks to prompts that were admitted without all of them
           ─► _unpark          let a preempted group decode again once all of its sequences are back in the batch
           ─► _prefill         spend the rest of the token budget on admitted prompts, then admit waiting groups
           ─► drafting.plan    let rows try drafts with what is still left
           ─► _close           add fences, and the changes that the workers do not know yet
      book                     enter in the books what the plan has decided, which the workers need not wait for

This is PagedAttention §4.5 with iteration-level batching: every running row decodes one token, and what is left of
the token budget goes to prompts, in the order of `FairQueue`. Admission reserves all blocks of a prompt at once,
so no prompt holds blocks while it waits for blocks. When a row needs a block and none is free, idle cache is
evicted first. Then the last group in the same order is preempted as a whole: it gives up its blocks, and later
matches its own prefix again, before new groups of its tenant start.

Progress: a group is preempted only for one that goes on with at least one more token. Each fits alone (checked
when it comes), so the last one that runs is not preempted: with one tenant, the oldest of the best priority.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from trunkline.controller.allocation.group_fit import fits_group
from trunkline.controller.allocation.kv_manager import Admission, KVCacheManager
from trunkline.controller.allocation.prefix_match import keep_or_compact
from trunkline.controller.cache.window_cache import make_cache, make_pool
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.scheduling.admission import AdmissionOrder, Quarantine, found_tokens, report
from trunkline.controller.scheduling.drafting import Drafting
from trunkline.controller.scheduling.fair_queue import FairQueue
from trunkline.controller.scheduling.forks import Forks, move_beams, restore_output
from trunkline.controller.scheduling.module_calls import ModuleEncoding
from trunkline.controller.scheduling.prompt_blocks import extend_prompts
from trunkline.controller.scheduling.row_blocks import enter_filled, grow_rows
from trunkline.controller.sequences.decode_rows import NO_ROWS, DecodeRows
from trunkline.controller.sequences.plan_builder import PendingChanges, PlanBuilder
from trunkline.controller.sequences.sequence import Phase, Sequence, SequenceGroup
from trunkline.controller.tiers.costs import Preloads, StepCosts, load_entries, prefill_budget, swaps
from trunkline.controller.tiers.fetching import Fetching
from trunkline.controller.totals import Totals

MATCHED_TOKENS_MAX: Final = 1 << 19
"""Largest number of tokens of waiting prompts that are matched with the tree in one step; further prompts wait for
the next step. Matching 1,000 prompts of 32K tokens at once took 80 ms, and every stream waited for it."""
SCORED_TOKENS_MAX: Final = 256
"""Largest number of tokens of a scored prompt in one step: each needs a row of logits as wide as the
vocabulary."""


class Scheduler:
    """Decides which sequences compute what in each step. Pure: step numbers and times are arguments."""

    def __init__(
        self,
        config: EngineConfig,
        first_disk_generation: int = 0,
        quarantine: Quarantine | None = None,
        counters: Totals | None = None,
    ) -> None:
        """
        Args:
            first_disk_generation: generations of disk slots begin above this number.
            quarantine: requests that may have killed earlier workers; it outlives the scheduler.
            counters: totals from which to count on; they outlive the scheduler, too.
        """
        self.config = config
        pool = make_pool(config)
        tree = make_cache(pool, config, first_disk_generation, counters)
        self.kv = KVCacheManager(pool, tree, prefix_cache=config.prefix_cache, ttl=config.session_ttl_s)
        self.costs = StepCosts(config.swap_us_per_block)
        self.preloads = Preloads()
        self.fetching = Fetching(tree.tiers, self.costs, config.chunk_size, tree.totals)
        self.rows = DecodeRows(config.max_rows, config.chunk_size, config.max_table_blocks)
        self.queue = FairQueue(config.token_budget)
        self.admission = AdmissionOrder(self.queue, quarantine or Quarantine())
        self.encoding = ModuleEncoding(self.kv, self.queue, self.fetching)
        self.prefilling: list[Sequence] = []
        """Admitted sequences whose prompts are not wholly planned, in order of admission."""
        self.parked: list[Sequence] = []
        """Sequences that are back in the batch after a preemption, and compute nothing until their whole group is
        back."""
        self.forks = Forks()
        self.drafting = Drafting(config, self.kv, self.rows, self.queue, self.costs)
        self.row_set = NO_ROWS
        self._pending = PendingChanges()

    @property
    def counters(self) -> Totals:
        """Totals since the start."""
        return self.kv.tree.totals

    @property
    def running_count(self) -> int:
        """Number of sequences that hold blocks."""
        decoding = self.config.max_rows - self.rows.free_count
        return decoding + len(self.prefilling) + len(self.parked) + len(self.encoding.finishing)

    @property
    def waiting_count(self) -> int:
        """Number of requests in the queue; encoding jobs do not count."""
        return len(self.queue) - sum(group.queued for group in self.encoding.jobs.groups())

    def plan(self, step: int, now: float) -> PlanBuilder | None:
        """Plan the next step; None if nothing can be computed."""
        plan = PlanBuilder(step, self.config.chunk_size, now)
        self.kv.pool.taken.clear()
        if self.encoding.finishing:
            self._end_encoded(step, now)
        slots = self.rows.active_slots() if self._pending.rows_changed else self.row_set.slots
        has_beams = bool(self.forks.searches)
        grow_rows(self.kv, self.rows, slots, self._pending, plan, self.queue, self._preempt_until_room, has_beams)
        if self.prefilling:
            extend_prompts(self.kv, self.prefilling, self.config.token_budget, self._preempt_until_room, plan)
        if plan.blocks:
            plan.leave_out_blocks(self._pending.left)
        plan.copied_blocks = self.forks.copy_tails(plan)
        if self.parked:
            self._unpark(plan)
        if self._pending.rows_changed:
            before = self.row_set.batch_seq_ids
            self.row_set, plan.new_runs = self.rows.arrange(self.rows.active_slots())
            if self.row_set.batch_seq_ids.tobytes() != before.tobytes():  # most changes are those of block tables
                self.queue.set_decoding(self.row_set, self.rows.sequences)
        plan.rows = self.row_set
        unfinished = len(self.prefilling)
        self._prefill(plan)
        if len(plan.rows):
            self.drafting.plan(plan)
        self.kv.tree.saves.add_waiting(plan)
        if plan.is_empty:
            # The workers do not know yet that no row decodes: the next plan says so. Prompts may have ended with
            # nothing to compute, since all was loaded. What waited for them goes on now: no result would make the
            # engine plan again.
            return self.plan(step, now) if len(self.prefilling) < unfinished else None
        self._close(plan)
        return plan

    def _close(self, plan: PlanBuilder) -> None:
        """Add to a plan what it must wait for, and the changes that the workers do not know yet."""
        plan.save_fence, plan.load_fence = self.kv.tree.fences.close(plan.step, self.kv.pool.taken, plan.copies)
        self._pending.hand_over(plan)
        plan.thinned = self.kv.pool.take_thinned()

    def book(self, plan: PlanBuilder) -> None:
        """Enter a plan in the books, once it has been sent and before anything else happens."""
        for source in plan.copy_sources:
            self.kv.tree.release(source, plan.now, 1)
        for block in plan.copied_blocks:
            self.kv.pool.release(block)
        for sequence, found in plan.admitted:
            if found is not None and sequence.group.found is None:
                sequence.group.found = report(self.fetching, sequence, found, plan)
            self.fetching.done(sequence.group)
        for sequence in plan.sampling:
            if not self.rows.batch_seq_ids[sequence.slot]:
                self.rows.fill(sequence)
        sampled_last = self.rows.count_planned(plan.rows)
        self.queue.charge_rows()
        self.drafting.planned(plan)
        self._pending.rows_changed = bool(plan.sampling) or sampled_last

    def _end_encoded(self, step: int, now: float) -> None:
        for sequence in self.encoding.finishing.copy():
            self.end(sequence, now)
            computed = sequence.cached_tokens < sequence.tokens.count
            self.encoding.jobs.done(sequence.group, step, computed=computed)

    def end_found(self, step: int, now: float, *, probed: bool) -> None:
        """End the encoding jobs whose texts have come from peers or, if `probed`, turned up in any tier."""
        for group in self.encoding.jobs.found(step, probed=probed):
            if not group.members:
                continue  # only another of these jobs needed it, and it has ended with that job
            for member in group.members.copy():
                self.end(member, now)
            self.encoding.jobs.done(group, step, computed=False)

    # Preemption

    def _preempt_until_room(self, members: list[Sequence], blocks: int, plan: PlanBuilder, whole: int) -> None:
        """Preempt the newest groups until `KVCacheManager.make_room` can, or these sequences are preempted."""
        while members[0].batch_seq_id and not self.kv.make_room(blocks, plan, whole):
            newest = max((s.group for s in self.running()), key=self.queue.rank)
            going = any(sequence.group is not newest for sequence in self.running())
            if not self.encoding.make_way(newest, plan.now, going=going):
                self.preempt(newest, plan.now)

    def running(self) -> list[Sequence]:
        """Return all sequences that hold blocks."""
        entering = self.prefilling + self.parked + self.encoding.finishing
        return [s for s in self.rows.sequences if s is not None] + entering

    def preempt(self, group: SequenceGroup, now: float) -> None:
        """Take a whole group out of the batch; it resumes before new groups of its priority start."""
        claim = swaps(group, self.config, self.costs)
        for sequence in reversed(group.members):  # children first: a tail that they still share is not cached
            if sequence.batch_seq_id:
                self.release(sequence, now, claim=claim)
            sequence.phase = Phase.WAITING
        self.admission.left(group)
        whole = len(group.members) == group.request.width > 1
        if whole and group.members[0].tokens.count == group.prompt_len:
            # The samples do not differ yet, so they fork again; but not if one was aborted: a fork would make it
            # anew.
            for sequence in group.members[1:]:
                self.kv.drop_claim(sequence)
            del group.members[1:]
            group.forked = False
        if not group.queued:
            group.preempted = True
            self.queue.add(group)
        self.counters.preemptions += 1
        self.counters.swapped += claim

    def release(self, sequence: Sequence, now: float, *, claim: bool = False, ends: bool = False) -> None:
        """Take a running sequence out of the batch; what it computed stays cached.

        Args:
            claim: whether its chunks are saved to the host when their blocks are needed, because it will resume.
            ends: whether it ends, and does not resume.

        Its tail is cached only if the content is known. A child's tail is empty until the plan after its fork. A
        beam's tail is known only while exactly one step after its last result is planned: that step copies tails,
        and the step after it may be in flight when a search is aborted.
        """
        if sequence.slot >= 0:
            planned, known = int(self.rows.planned[sequence.slot]), int(self.rows.known[sequence.slot])
            kv_tokens = min(planned, known)
            self.rows.remove(sequence)
            self._pending.rows_changed = True
            settled = not sequence.tails
            if sequence.beam_position is not None:
                output_tokens = restore_output(sequence)
                goes_on = planned + 1 < sequence.group.limit  # else later steps may be in flight without it
                settled = not ends and planned == known and goes_on and output_tokens > 0
            if not settled:
                kv_tokens -= kv_tokens % self.config.chunk_size
        elif sequence.phase is Phase.PARKED or sequence in self.encoding.finishing:
            kv_tokens = sequence.computed
            (self.parked if sequence.phase is Phase.PARKED else self.encoding.finishing).remove(sequence)
        else:
            kv_tokens = max(sequence.computed, sequence.cached_tokens)
            self.prefilling.remove(sequence)
        self._pending.left.append(sequence.batch_seq_id)
        self.preloads.left(sequence.batch_seq_id)
        self._pending.merged = [change for change in self._pending.merged if change[0] != sequence.batch_seq_id]
        self.kv.leave(sequence, kv_tokens, now, claim=claim, ends=ends)
        self.forks.leave_batch(sequence)

    def end(self, sequence: Sequence, now: float) -> None:
        """End a sequence, whether it runs or waits; the group ends with its last sequence."""
        group = sequence.group
        if sequence.batch_seq_id:
            self.release(sequence, now, ends=True)
        self.kv.drop_claim(sequence)
        sequence.phase = Phase.ENDED
        group.remove(sequence)
        if not group.members:
            self.fetching.done(group)
            self.leave_jobs(group, now)
        self.admission.note(group)

    def leave_jobs(self, waiter: Hashable, now: float) -> None:
        """Note that a request or call no longer waits for texts; end the jobs for which nothing waits now."""
        for orphan in self.encoding.jobs.left(waiter):
            for member in orphan.members.copy():
                self.end(member, now)

    def enter_filled(self, slots: NDArray[np.intp], now: float) -> None:
        """Put the chunks that rows have filled into the radix tree, to be shared."""
        enter_filled(self.kv, self.rows, slots, self._pending, now)

    def move_beams(self, group: SequenceGroup, parents: list[int], now: float) -> None:
        """Move a search's beams as the workers did at the end of the step whose result came last."""
        stored = int(self.rows.known[group.members[0].slot]) - 1
        move_beams(group.members, parents, stored, self.kv, now)

    # Prefill and admission

    def _prefill(self, plan: PlanBuilder) -> None:
        """Spend the rest of the token budget: first on admitted prompts, then on waiting groups."""
        rows, config = len(plan.rows), self.config
        budget = prefill_budget(
            self.costs, rows, 1000.0 * config.target_itl_ms, config.token_budget - rows, config.chunk_size
        )
        for sequence in list(self.prefilling):
            if budget <= 0:
                return
            budget -= self._prefill_chunk(sequence, budget, plan)
        started = -1
        while started < self.encoding.jobs.started_texts:  # a job for a missing text may begin in this plan
            started = self.encoding.jobs.started_texts
            budget = self._start_waiting(budget, plan)

    def _start_waiting(self, budget: int, plan: PlanBuilder) -> int:
        """Admit waiting groups in order; return what is left of the budget, 0 if no other group may start."""
        matched, first = 0, self.encoding.hold_for_first(plan.step)
        for group in self.admission.candidates(self.kv.available, self.running_count, going=self._is_going):
            if budget <= 0 or matched >= MATCHED_TOKENS_MAX:
                return 0
            if group.waits_for_grammar or self.fetching.is_probing(group, plan.now):
                continue
            if self.admission.quarantine.must_wait(group.id):
                return 0
            if not self.encoding.jobs.encode_missing_texts(group, plan.step, plan.now, is_first=group is first):
                continue
            while not self._may_start(group, plan.step):
                if not self.encoding.make_way(group, plan.now, going=self._is_going):
                    return 0  # later groups must not overtake this one: that would starve large requests
            for sequence in list(group.members):
                if sequence.phase is not Phase.WAITING or (sequence.waits_on and sequence.is_pending(plan.step)):
                    continue
                sequence.waits_on = None
                matched += sequence.tokens.count
                outcome = self._admit_or_make_way(sequence, plan)
                if outcome is Admission.NO_BLOCKS:
                    if group.in_batch and not (self._is_going or plan.prefill):
                        # A resumed group was to fit, as its sequences share what they have in common. But one that
                        # begins behind a chunk whose KV is gone computes what the tree has below that anew, in
                        # blocks of its own. Now the tree has all of it, so that next time it is shared.
                        self.preempt(group, plan.now)
                    else:
                        self.admission.blocked(group, self.kv.available, self.running_count)
                    return 0
                if outcome is Admission.ADMITTED:
                    budget -= self._prefill_chunk(sequence, budget, plan)
                if budget <= 0:
                    break
            if group.id in self.admission.entering:
                return 0  # see `AdmissionOrder.candidates`
        return budget

    def _admit_or_make_way(self, sequence: Sequence, plan: PlanBuilder) -> Admission:
        """Admit a sequence; if it lacks blocks, release held texts first."""
        outcome, group = self._admit(sequence, plan), sequence.group
        while outcome is Admission.NO_BLOCKS and self.encoding.make_way(group, plan.now, going=self._is_going):
            outcome = self._admit(sequence, plan)
        if outcome is Admission.LACKING:
            self.encoding.jobs.encode_far_texts(group, plan.step)
        return outcome

    @property
    def _is_going(self) -> bool:
        """Whether the running sequences will make progress: those in `parked` compute nothing."""
        return self.running_count > len(self.parked)

    def _may_start(self, group: SequenceGroup, step: int) -> bool:
        """Return whether a whole group fits into the rows and, if several sequences resume at once, into the
        pool."""
        if group.in_batch:
            return True  # the whole group was checked when its first sequence entered
        if self.rows.free_count - self._rows_promised() < group.rows_needed:
            return False
        return len(group.members) == 1 or fits_group(self.kv, group.members, self._spare_blocks(group), step)

    def _rows_promised(self) -> int:
        """Return how many more rows the groups that hold blocks will need."""
        if not (self.prefilling or self.parked or self.admission.entering):
            return 0
        groups = {s.group.id: s.group for s in (*self.prefilling, *self.parked)}
        groups |= self.admission.entering
        return sum(g.rows_needed - sum(s.slot >= 0 for s in g.members) for g in groups.values())

    def _spare_blocks(self, group: SequenceGroup) -> int:
        """Return how many blocks to leave free, so that running rows do not preempt a new group at once.

        One for every fourth running sequence: with chunks of 64 tokens, a row needs a block every 64 steps. The
        group's own sequences do not count: it fits at its full length, but perhaps with nothing to spare.
        """
        own = sum(sequence.batch_seq_id > 0 for sequence in group.members) if group.in_batch else 0
        return (self.running_count - own + 3) // 4

    def _admit(self, sequence: Sequence, plan: PlanBuilder) -> Admission:
        """Try to give a waiting sequence its blocks."""
        group = sequence.group
        if not group.in_batch:
            if group.request.submit.beam is not None:
                self.forks.place_beams(group)
            if self.config.prefix_cache and group.cut is not None:
                keep_or_compact(self.kv.tree, sequence, plan.step)
        loads = len(plan.loads)
        outcome = self.kv.admit(
            sequence,
            self._spare_blocks(group),
            plan,
            tails=0 if group.forked else group.request.width - 1,
            wait_for=lambda far, saved: self.fetching.worth_waiting(group, far, plan.now, saved),
            load_entries=load_entries(group, self.config, self.costs),
        )
        if outcome is Admission.ADMITTED:
            self._admitted(sequence, len(plan.loads) - loads, plan)
        elif not group.in_batch:
            for member in group.members:
                self.forks.leave_batch(member)  # undo `place_beams`: the search has not entered the batch
        return outcome

    def _admitted(self, sequence: Sequence, loads: int, plan: PlanBuilder) -> None:
        """Note that a sequence has its blocks, of which `loads` are loaded from the host."""
        group = sequence.group
        if group.modules is not None:
            self.leave_jobs(group, plan.now)
        found = found_tokens(self.kv, self.fetching, sequence) if group.found is None else None
        plan.admitted.append((sequence, found))
        self.preloads.ordered(loads, plan.now, self.costs.move_us)
        if step := self.kv.tree.fences.ready_after(sequence.block_table()):
            self.preloads.wait(sequence.batch_seq_id, step)
        sequence.phase = Phase.PREFILL
        self.prefilling.append(sequence)
        self.queue.started(group, sequence.prefill_stop - sequence.computed)
        self.admission.note(group)
        self.admission.unblock()

    def _prefill_chunk(self, sequence: Sequence, budget: int, plan: PlanBuilder) -> int:
        """Plan the next part of a prompt, unless the KV before it should arrive first; return how many tokens were
        planned."""
        group = sequence.group
        start, stop = sequence.computed, sequence.prefill_stop
        scored = sequence.scores_prompt
        tokens = min(budget, stop - start, SCORED_TOKENS_MAX if scored else budget)
        step_us = self.costs.step_us(len(plan.rows), tokens)
        alone = not (plan.prefill or len(plan.rows))
        if not self.preloads.is_due(sequence.batch_seq_id, plan.now, step_us, alone):
            return 0
        self.kv.tree.fences.reads(self.preloads.begin(sequence.batch_seq_id))
        last = start + tokens == stop
        samples = last and stop == sequence.tokens.count and not group.encodes
        if tokens:
            if not (plan.joins and plan.joins[-1].sequence == sequence.batch_seq_id):  # its loads are in this plan
                self.kv.move_window(sequence, start)
            plan.compute(sequence, tokens, samples=samples, scored=scored)
        sequence.computed = start + tokens
        if self.config.prefix_cache:
            self.kv.mark_ready(sequence, plan)
        if last:
            self._end_prefill(sequence, plan, samples=samples, scored=scored)
        return tokens

    def _end_prefill(self, sequence: Sequence, plan: PlanBuilder, *, samples: bool, scored: bool) -> None:
        """Move a sequence whose whole prompt is planned to the decoding rows, or to `parked` if it waits for its
        group."""
        group = sequence.group
        self.prefilling.remove(sequence)
        group.prompt_scored = not sequence.sampling.pools_all
        if scored:
            # After a preemption the prompt must not be scored again: workers score all that they compute of it.
            sequence.sampling = msgspec.structs.replace(sequence.sampling, prompt_logprobs=-1)
        if group.encodes:
            self.encoding.finishing.append(sequence)
        elif not samples:
            sequence.phase = Phase.PARKED
            self.parked.append(sequence)
        else:
            sequence.phase = Phase.DECODE
            self.rows.enter(sequence)
            plan.sampling.append(sequence)
            if not group.forked:
                self.rows.fill(sequence)
                self.forks.fork(sequence, plan, self.kv, self.rows)

    def _unpark(self, plan: PlanBuilder) -> None:
        """Let those groups decode whose sequences in `parked` are all back in the batch."""
        for group in {s.group.id: s.group for s in self.parked}.values():
            if any(member.phase is not Phase.PARKED for member in group.members):
                continue
            for sequence in group.members:
                self.parked.remove(sequence)
                sequence.phase = Phase.DECODE
                self.rows.add(sequence)
                # This step stores the last token's KV, which may fill the chunk.
                sequence.computed = sequence.tokens.count
                if self.config.prefix_cache:
                    self.kv.mark_ready(sequence, plan)
            if group.search is not None:
                full = (group.members[0].tokens.count - 1) // self.config.chunk_size
                self.rows.read_alike(group.members[0], group.members[1:], full)
            self._pending.rows_changed = True
