"""The engine of a group: requests in, step plans out; results in, tokens out. Pure and deterministic.

    submit, abort ─►┌────────┐─► next_step() ─► StepPlan ─► workers
    grammar_ready ─►│ Engine │─► grammar_messages()       ─► workers
    step_done ─────►└────────┘─► outputs() ─► routers

No sockets, clocks, threads or randomness: time comes as `now` (seconds, any origin), so that tests drive
thousands of steps from a seed. Up to two steps are in flight: step k + 1 is planned as if every row went
on, and what it computed for rows that ended in step k is discarded when its result arrives.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Final

import msgspec
import numpy as np

from trunkline.controller.config import EngineConfig
from trunkline.controller.cutting import cut_group
from trunkline.controller.draft import InflightStep, PlanDraft
from trunkline.controller.expectations import Expectations
from trunkline.controller.grammars import GrammarBook
from trunkline.controller.limits import is_expectable, problem_of_request, problem_of_texts
from trunkline.controller.messages import (
    BeamStep,
    GrammarReady,
    ModulesCall,
    MovesDone,
    Probed,
    PromptLogprobs,
    StepResult,
    TopLogprobs,
)
from trunkline.controller.module_calls import CallDone, TextsCall
from trunkline.controller.modules import Moves, lay_out, prompt_of
from trunkline.controller.outcomes import EngineCounters, EngineOutputs
from trunkline.controller.rows import BEAM, RowSet
from trunkline.controller.scheduler import Scheduler
from trunkline.controller.sequence import Request, Sequence, SequenceGroup
from trunkline.controller.tier_traffic import TierTraffic
from trunkline.kvstore.layout import Int32Array, unpack_int32
from trunkline.router.messages import BeamsFound, Finished, FinishReason, PromptScored, Started
from trunkline.worker.messages import CompileGrammar, ForgetGrammar, Probe, Sampling, StepPlan, TierMoves

PLAIN_STEPS_PER_OBSERVATION: Final = 8
"""Of the steps that only decode, one in so many teaches what steps cost: they are alike, and learning costs."""


class ProtocolError(RuntimeError):
    """The workers answered something that no correct worker answers; the group cannot be trusted."""


class Engine:
    """One group's brain. Not thread-safe; the shell calls it from one thread."""

    def __init__(self, config: EngineConfig, epoch: int = 1, first_disk_generation: int = 0) -> None:
        """
        Args:
            first_disk_generation: generations of disk slots begin above it (`TierIndex.first_generation`).
        """
        config.validate()
        self.config = config
        self.epoch = epoch
        self.scheduler = Scheduler(config, first_disk_generation)
        tree, fetching = self.scheduler.residence.tree, self.scheduler.fetching
        self.traffic = TierTraffic(tree, config.ranks)
        self.expectations = Expectations(tree, fetching, self.traffic)
        self.counters = EngineCounters()
        self.grammars = GrammarBook()
        self._groups: dict[int, SequenceGroup] = {}
        self._inflight: deque[InflightStep] = deque()
        self._step = 0
        self._arrivals = 0
        self._outputs = EngineOutputs()

    # Requests

    @property
    def is_idle(self) -> bool:
        """Nothing runs, waits or is in flight."""
        return not (self._has_work or self._inflight)

    @property
    def _has_work(self) -> bool:
        return bool(self._groups) or self.scheduler.encoding.is_working

    @property
    def is_settled(self) -> bool:
        """Idle, and all that was to be written to lower tiers is there, or cannot be."""
        tree = self.scheduler.residence.tree
        return self.is_idle and not (tree.has_unsaved or self.traffic.in_flight or tree.tiers.mover.has_unwritten)

    def request_ids(self) -> list[int]:
        """Requests that have not ended."""
        return list(self._groups)

    def submit(self, request: Request, now: float) -> None:
        """Queue a request. One that cannot run gets its `Finished` at once, with the reason."""
        refusal = self._refusal(request)
        if refusal is not None:
            self._outputs.finished.append(refusal)
            return
        self._arrivals += 1
        prompt_len = request.prompt_len if request.prompt_len >= 0 else len(request.tokens)
        if request.beam is not None and len(request.tokens) > prompt_len:
            # A search that comes from elsewhere starts again: only its own beams could say what came of it.
            request = replace(request, tokens=request.tokens[:prompt_len])
        dropped = sum(stop - start for start, stop in request.drops)
        limit = min(prompt_len - dropped + request.max_tokens, self.config.longest_sequence)
        sampling = request.sampling
        entry = None
        if request.grammar is not None:
            entry = self.grammars.use(request.grammar, request.id)
            sampling = msgspec.structs.replace(sampling, grammar=entry.id)
        group = self._group(request, limit, sampling)
        self._groups[request.id] = group
        self.scheduler.queue.add(group)
        self.scheduler.encoding.jobs.is_ready(
            group, self._step + 1
        )  # texts that are nowhere: begin with the next plan
        if self.config.prefix_cache and self.config.host_slots:  # else there is nothing to fetch from, or to keep
            self.expectations.came(group, self._step + 1, now)
        self._expect_texts(now)
        if entry is not None:
            group.waits_for_grammar = not entry.ready
            if entry.problem:
                self._refuse_grammar(group, entry.problem, now)

    def _expect_texts(self, now: float) -> None:
        """Texts are to be encoded: other controllers may have put them into the remote tier."""
        for job in self.scheduler.encoding.jobs.take_new():
            if self.config.host_slots and job.members:
                self.expectations.came(job, self._step + 1, now)

    def _group(self, request: Request, limit: int, sampling: Sampling) -> SequenceGroup:
        tree, config = self.scheduler.residence.tree, self.config
        group = SequenceGroup(request, self._arrivals, limit, sampling)
        if request.drops:
            cut_group(group, tree, config)
        if request.layout is not None:
            moves = self._moves(request.layout.relocate)
            lay_out(group, prompt_of(tree, request.salt, request.layout, moves), config.max_context)
        return group

    def _moves(self, relocate: bool) -> Moves:
        """Where texts of modules may act, if their client lets them `relocate`."""
        if not self.config.positions_shift:
            return Moves.NOWHERE
        return Moves.ANYWHERE if relocate else Moves.WITH_ITS_PARENT

    def _refusal(self, request: Request) -> Finished | None:
        if request.id in self._groups:
            return Finished(request.id, FinishReason.INVALID, f"request id {request.id} is in use")
        problem, param = problem_of_request(request, self.config)
        if problem:
            return Finished(request.id, FinishReason.INVALID, problem, param=param)
        if self.scheduler.waiting_count >= self.config.max_waiting:
            return Finished(
                request.id, FinishReason.QUEUE_FULL, f"{self.config.max_waiting} requests are waiting already"
            )
        return None

    def abort(self, request_id: int, now: float, sample: int = -1) -> None:
        """End a request, or one of its samples; its computed KV stays cached. An unknown one (just ended) is fine.

        Nothing more is said of a sample that ends so, while others of the request go on.
        """
        group = self._groups.get(request_id)
        if group is None:
            return
        if sample >= 0 and group.request.beam is None:
            chosen = next((member for member in group.members if member.sample == sample), None)
            if chosen is None or not group.forked:
                return
            if len(group.members) > 1:
                self.scheduler.end(chosen, now)
                return
        self._end_group(group, Finished(request_id, FinishReason.ABORT), now)

    def flush_cache(self) -> int:
        """Drop every chunk that no running sequence holds; blocks freed."""
        return self.scheduler.residence.tree.flush()

    def fail_all(self, detail: str) -> None:
        """The workers are gone: every request ends with `ENGINE_FAILED`, all KV is lost."""
        for group in self._groups.values():
            self._outputs.finished.append(Finished(group.id, FinishReason.ENGINE_FAILED, detail))
        self._outputs.modules += self.scheduler.encoding.calls.done
        for call in self.scheduler.encoding.calls.ids():
            self._outputs.modules.append(CallDone(call, "failed", detail))
        self._groups.clear()
        self._inflight.clear()
        self.scheduler = Scheduler(self.config)
        self.grammars = GrammarBook()

    # Texts of modules

    def modules_call(self, call_id: int, call: ModulesCall, now: float) -> None:
        """What a router wants of the texts of a schema; `EngineOutputs.modules` has the answer, perhaps later.

        Args:
            call_id: unique among the calls that are not answered.
        """
        calls = self.scheduler.encoding.calls
        if call.op == "cancel":
            if (cancelled := calls.cancel(call_id)) is not None:
                self.scheduler.leave_jobs(cancelled, now)
            return
        if call.op == "unpin":
            calls.unpin(call.holder, now)
            calls.done.append(CallDone(call_id, "ok"))
            return
        if problem := problem_of_texts(call.texts, self.config):
            calls.done.append(CallDone(call_id, "failed", problem))
            return
        moves = self._moves(call.relocate)
        if call.op == "encode":
            wanted = TextsCall(call_id, call.texts, call.salt, moves, True, call.holder, call.ttl)
        else:
            wanted = TextsCall(call_id, call.texts, call.salt, moves, False)
        calls.begin(wanted, self._step + 1, now)

    def unpin(self, holder: str, now: float) -> None:
        """What was pinned under a name is not any more. An unknown one is fine."""
        self.scheduler.encoding.calls.unpin(holder, now)

    def modules_calls(self) -> list[int]:
        """Calls that have not been answered."""
        return self.scheduler.encoding.calls.ids()

    # Grammars

    def grammar_messages(self) -> list[CompileGrammar | ForgetGrammar]:
        """What the workers must be told, in order and before the next plan."""
        return self.grammars.messages()

    def grammar_ready(self, message: GrammarReady, now: float) -> None:
        """The workers have compiled a grammar, or cannot: those who waited for it go on, or end."""
        entry = self.grammars.ready(message)
        if entry is None:
            return
        for request in sorted(entry.users):
            group = self._groups[request]
            group.waits_for_grammar = False
            if entry.problem:
                self._refuse_grammar(group, entry.problem, now)

    def _refuse_grammar(self, group: SequenceGroup, problem: str, now: float) -> None:
        grammar = group.request.grammar
        assert grammar is not None
        self._end_group(group, Finished(group.id, FinishReason.INVALID, problem, param=grammar.param), now)

    # Tiers

    def tier_messages(self, now: float) -> list[TierMoves | Probe]:
        """What the workers must be told, after the plans made so far."""
        tree = self.scheduler.residence.tree
        tree.expire(now)
        self.expectations.forget_old(now)
        messages = self.traffic.messages(self._step, now)
        tree.drop_lost()
        return messages

    def tier_report(self, report: MovesDone | Probed, now: float) -> None:
        """A rank has moved chunks, or says what its remote tier has."""
        if report.epoch != self.epoch:
            return
        if isinstance(report, MovesDone):
            self.traffic.moved(report, now)
            self.scheduler.residence.tree.drop_lost()
        else:
            self.expectations.probed(report, self._step + 1, now)
            self.scheduler.end_found(self._step + 1, now)

    def prefetch(self, request: Request, now: float) -> tuple[int, int]:
        """A request like this one is expected (it is not queued): see `Expectations.announce`."""
        if not is_expectable(request, self.config):
            return 0, 0
        group = self._group(request, 0, request.sampling)
        return self.expectations.announce(group, self._step + 1, now)

    def next_deadline(self, now: float) -> float:
        """When `next_step` should be asked again although nothing has happened; may be infinite."""
        if self.scheduler.encoding.calls.is_busy and len(self._inflight) < self.config.max_inflight_steps:
            return now
        return self.scheduler.fetching.next_deadline(now)

    # Steps

    def next_step(self, now: float) -> StepPlan | None:
        """The next plan to broadcast, or None: nothing to do, or two steps are unanswered."""
        scheduler = self.scheduler
        idle = not (self._has_work or scheduler.residence.tree.has_unsaved)
        if idle or len(self._inflight) >= self.config.max_inflight_steps:
            return None
        scheduler.encoding.calls.advance(self._step + 1, self._arrivals + 1, now)
        self._expect_texts(now)
        draft = scheduler.plan(self._step + 1, now)
        while draft is None and scheduler.encoding.calls.advance(self._step + 1, self._arrivals + 1, now):
            self._expect_texts(now)
            draft = scheduler.plan(self._step + 1, now)  # texts that have just ended let others begin
        if draft is None:
            return None
        self._step += 1
        self._inflight.append(
            InflightStep(
                step=draft.step,
                rows=self._result_rows(draft),
                decode_rows=len(draft.rows),
                prefill_tokens=draft.prefill_tokens,
                scored=draft.scored,
            )
        )
        for sequence in draft.sampling:
            self._note_started(sequence.group)
        self.counters.steps += 1
        self.counters.row_set_changes += draft.new_runs is not None
        return draft.message(self.epoch)

    def _result_rows(self, draft: PlanDraft) -> RowSet:
        if not draft.sampling:
            return draft.rows
        new = [sequence.slot for sequence in draft.sampling + draft.forked]
        added = self.scheduler.rows.row_set(np.array(new, np.intp))
        old = draft.rows
        return RowSet(
            np.append(old.slots, added.slots),
            np.append(old.stays, added.stays),
            np.append(old.requests, added.requests),
            np.append(old.samples, added.samples),
        )

    def _note_started(self, group: SequenceGroup) -> None:
        if group.started:
            return  # it comes back from a preemption
        group.started = True
        self.counters.prompt_tokens += group.prompt_len - group.holes
        found = group.found
        assert found is not None
        self.counters.found(found)
        cut = "" if not group.request.drops else "kept" if group.cut is not None else "recomputed"
        self._outputs.started.append(
            Started(
                group.id,
                found.tokens,
                found.tier_tokens,
                found.miss,
                found.miss_token,
                found.exact,
                cut,
                found.module_tokens,
            )
        )

    def step_done(self, result: StepResult, now: float) -> None:
        """Take in the tokens of the oldest unanswered step.

        Raises:
            ProtocolError: it answers another step, or what it brings does not fit the step.
        """
        if result.epoch != self.epoch:
            return  # from a group that was given up
        if not self._inflight or self._inflight[0].step != result.step:
            expected = self._inflight[0].step if self._inflight else "none"
            raise ProtocolError(f"the workers answered step {result.step}; expected was {expected}")
        step = self._inflight.popleft()
        rows = step.rows
        self.counters.plan_copies += result.plan_copies
        self.counters.kv_bytes_read += result.kv_bytes_read
        costs = self.scheduler.costs
        if step.prefill_tokens or result.waited_us or step.step % PLAIN_STEPS_PER_OBSERVATION == 0:
            elapsed_us = result.elapsed_us - result.waited_us
            costs.observe(rows=step.decode_rows, prefill_tokens=step.prefill_tokens, elapsed_us=elapsed_us)
        if result.moved_blocks:
            costs.observe_moves(result.moved_blocks, result.moved_us)
        if len(result.tokens) != 4 * len(rows):
            raise ProtocolError(
                f"step {result.step} samples {len(rows)} int32 tokens; {len(result.tokens)} bytes came back"
            )
        if result.logprobs and not all(0 <= index < len(rows) for index in result.logprobs):
            raise ProtocolError(f"step {result.step} has log-probabilities beyond its {len(rows)} tokens")
        self._score(step, result.prompt_logprobs or {})
        if len(rows):
            self._accept(rows, unpack_int32(result.tokens), result.logprobs, now)
        if result.beams:
            self._advance_searches(result.beams, now)

    def _score(self, step: InflightStep, scores: dict[int, PromptLogprobs]) -> None:
        for stay, logprobs in scores.items():
            request = step.scored.get(stay)
            if request is None:
                raise ProtocolError(
                    f"step {step.step} scores a prompt of sequence {stay}, which asked for nothing"
                )
            if request in self._groups:
                self._outputs.prompt_logprobs.append(PromptScored(request, logprobs))

    def _accept(
        self, rows: RowSet, tokens: Int32Array, logprobs: dict[int, TopLogprobs] | None, now: float
    ) -> None:
        state = self.scheduler.rows
        valid, slots, stopped = state.accept(rows, tokens)
        counts = valid
        if (rows.samples == BEAM).any():
            counts = valid & (rows.samples != BEAM)
            own = rows.samples[valid] != BEAM
            slots, stopped = slots[own], stopped[own]
        requests, samples = rows.requests, rows.samples
        if len(slots) != len(rows):
            if logprobs:
                position = np.cumsum(counts) - 1
                logprobs = {int(position[i]): value for i, value in logprobs.items() if counts[i]}
            requests, samples, tokens = requests[counts], samples[counts], tokens[counts]
        if not len(slots):
            return
        self._outputs.requests.append(requests)
        self._outputs.samples.append(samples)
        self._outputs.tokens.append(tokens)
        self._outputs.logprobs.append(logprobs)
        self.counters.output_tokens += len(slots)
        known = state.known[slots]
        ended = stopped | (known >= state.limit[slots])
        for index in np.flatnonzero(((known - 1) % self.config.chunk_size == 0) & ~ended).tolist():
            self.scheduler.seal(int(slots[index]), int(known[index]) - 1, now)
        for index in np.flatnonzero(ended).tolist():
            sequence = state.sequences[slots[index]]
            assert sequence is not None
            self._end_sequence(sequence, FinishReason.STOP if stopped[index] else FinishReason.LENGTH, now)

    def _advance_searches(self, steps: dict[int, BeamStep], now: float) -> None:
        for search_id, step in steps.items():
            group = self.scheduler.forks.searches.get(search_id)
            if group is None or group.search is None:
                continue  # it has left meanwhile
            try:
                parents = group.search.advance(step)
            except ValueError as error:
                raise ProtocolError(f"search {search_id}: {error}") from error
            self.counters.output_tokens += group.search.width
            if parents:
                self.scheduler.move_beams(group, parents, now)
            if not group.search.done:
                continue
            hypotheses = group.search.hypotheses()
            self._outputs.beams.append(BeamsFound(group.id, hypotheses))
            self._end_group(group, Finished(group.id, hypotheses[0].reason), now)

    def _end_sequence(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """A sample has ended by itself; the request with its last one."""
        group = sequence.group
        if len(group.members) == 1:
            sample = -1 if group.request.n == 1 else sequence.sample
            self._end_group(group, Finished(group.id, reason, sample=sample), now)
            return
        self.scheduler.end(sequence, now)
        self._outputs.finished.append(Finished(group.id, reason, sample=sequence.sample))

    def _end_group(self, group: SequenceGroup, finished: Finished, now: float) -> None:
        """The one place where a request ends: everything it holds is released exactly once."""
        del self._groups[group.id]
        for sequence in reversed(group.members.copy()):
            self.scheduler.end(sequence, now)
        if group.request.grammar is not None:
            self.grammars.leave(group.request.grammar, group.id)
        self._outputs.finished.append(finished)

    def outputs(self) -> EngineOutputs | None:
        """What happened since the last call, or None."""
        done = self.scheduler.encoding.calls.done
        if done:
            self._outputs.modules += done
            done.clear()
        if not self._outputs:
            return None
        outputs, self._outputs = self._outputs, EngineOutputs()
        return outputs
