"""The engine of a group: requests in, step plans out; results in, tokens out. Pure and deterministic.

    submit, abort ─►┌────────┐─► next_step() ─► StepPlan ─► workers
    grammar_ready ─►│ Engine │─► grammar_messages()       ─► workers
    step_done ─────►└────────┘─► outputs() ─► routers
    workers_lost, workers_back

No sockets, clocks, threads or randomness: time comes as `now` (seconds, any origin), so that tests drive
thousands of steps from a seed. Up to two steps are in flight: step k + 1 is planned as if every row went
on, and what it computed for rows that ended in step k is discarded when its result arrives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf

import msgspec
import numpy as np

from trunkline.controller.cache.radix_cache import ChunkTree
from trunkline.controller.config import EngineConfig
from trunkline.controller.engine.grammars import GrammarBook
from trunkline.controller.engine.intake import from_its_start, group_of, limit_of, moves_of
from trunkline.controller.engine.limits import is_expectable, problem_of_request, problem_of_texts
from trunkline.controller.engine.outcomes import EngineCounters, EngineOutputs
from trunkline.controller.engine.recovery import Survivor, carry_totals, keep, revive
from trunkline.controller.engine.requests import LiveRequests
from trunkline.controller.engine.step_results import Answers, ProtocolError
from trunkline.controller.engine.timeline import Journey
from trunkline.controller.messages import (
    GrammarReady,
    ModulesCall,
    MovesDone,
    Probed,
    StepResult,
)
from trunkline.controller.scheduling.module_calls import CallDone, TextsCall
from trunkline.controller.scheduling.quarantine import DEADLY
from trunkline.controller.scheduling.scheduler import Scheduler
from trunkline.controller.sequences.decode_rows import RowSet
from trunkline.controller.sequences.plan_builder import InflightStep, PlanDraft
from trunkline.controller.sequences.sequence import Request, SequenceGroup
from trunkline.controller.tiers.prefetch import Expectations
from trunkline.controller.tiers.tier_orders import TierTraffic
from trunkline.router.messages import Finished, FinishReason
from trunkline.worker.messages import CompileGrammar, ForgetGrammar, Probe, StepPlan, TierMoves


class Engine:
    """One group's brain. Not thread-safe; the shell calls it from one thread."""

    def __init__(self, config: EngineConfig, epoch: int = 1, first_disk_generation: int = 0) -> None:
        """
        Args:
            first_disk_generation: generations of disk slots begin above it (`TierIndex.first_generation`).
        """
        self.epoch = epoch
        self.is_away = False
        """The workers are gone, and others have not come yet: nothing is planned."""
        self._live = LiveRequests()
        self._answers = Answers(self._live)
        self._inflight: deque[InflightStep] = deque()
        self._arrivals = 0
        self._flushes = False
        """The cache was to be dropped while the workers were away."""
        self._install(config, first_disk_generation)

    def _install(self, config: EngineConfig, first_disk_generation: int) -> None:
        """Begin with workers that hold nothing."""
        config.validate()
        self.config = config
        self.scheduler = Scheduler(config, first_disk_generation)
        self.scheduler.entries.suspects = self._live.suspects
        tree, fetching = self.scheduler.residence.tree, self.scheduler.fetching
        self.traffic = TierTraffic(tree, config.ranks)
        self.expectations = Expectations(tree, fetching, self.traffic)
        self._live.grammars = GrammarBook(self.grammars.next_id)
        self._inflight.clear()
        self._step = 0

    # Requests

    @property
    def counters(self) -> EngineCounters:
        """Totals since the start."""
        return self._live.counters

    @property
    def grammars(self) -> GrammarBook:
        """Those that the workers know, or are to know."""
        return self._live.grammars

    @property
    def is_idle(self) -> bool:
        """Nothing runs, waits or is in flight."""
        return not (self._has_work or self._inflight)

    @property
    def _has_work(self) -> bool:
        return bool(self._live.groups) or self.scheduler.encoding.is_working

    @property
    def is_settled(self) -> bool:
        """Idle, and all that was to be written to lower tiers is there, or cannot be."""
        tree = self.scheduler.residence.tree
        return self.is_idle and not (tree.has_unsaved or self.traffic.in_flight or tree.tiers.mover.has_unwritten)

    def request_ids(self) -> list[int]:
        """Requests that have not ended."""
        return list(self._live.groups)

    def submit(self, request: Request, now: float) -> None:
        """Queue a request. One that cannot run gets its `Finished` at once, with the reason."""
        refusal = self._refusal(request)
        if refusal is not None:
            self._live.said.finished.append(refusal)
            return
        self._arrivals += 1
        self._live.journeys.came(request, now)
        request = from_its_start(request)
        self._queue(request, self._arrivals, now, None)

    def _queue(self, request: Request, arrival: int, now: float, survivor: Survivor | None) -> None:
        """Let a request wait for its turn.

        Args:
            survivor: it has been computed by other workers before.
        """
        sampling, entry = request.sampling, None
        if request.grammar is not None:
            entry = self.grammars.use(request.grammar, request.id)
            sampling = msgspec.structs.replace(sampling, grammar=entry.id)
        limit, tree = limit_of(request, self.config), self.scheduler.residence.tree
        group = group_of(request, arrival, limit, sampling, tree, self.config)
        self._live.groups[request.id] = group
        if survivor is not None and not revive(survivor, group, sampling):
            detail = f"the workers are new and hold {self.config.longest_sequence} tokens, fewer than it has"
            self._live.end(self.scheduler, group, Finished(group.id, FinishReason.ENGINE_FAILED, detail), now)
            return
        self.scheduler.queue.add(group)
        self.scheduler.encoding.jobs.is_ready(
            group, self._step + 1
        )  # texts that are nowhere: begin with the next plan
        if self.config.prefix_cache and self.config.host_slots:
            known = self.expectations.came(group, self._step + 1, now)
            self.scheduler.queue.found(group, known)
        elif self.config.prefix_cache:  # there is nothing to fetch from, or to keep
            self.scheduler.queue.found(group, self.expectations.known_tokens(group, self._step + 1))
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

    def _refusal(self, request: Request) -> Finished | None:
        if request.id in self._live.groups:
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
        group = self._live.groups.get(request_id)
        if group is None:
            return
        if sample >= 0 and group.request.beam is None:
            chosen = next((member for member in group.members if member.sample == sample), None)
            if chosen is None or not group.forked:
                return
            if len(group.members) > 1:
                self.scheduler.end(chosen, now)
                return
        self._live.end(self.scheduler, group, Finished(request_id, FinishReason.ABORT), now)

    def flush_cache(self) -> int:
        """Drop every chunk that no running sequence holds; blocks freed."""
        self._flushes |= self.is_away
        return self.scheduler.residence.tree.flush()

    def end_waiting(self, reason: FinishReason, detail: str, now: float) -> None:
        """End the requests that have not begun and hold nothing."""
        for group in list(self._live.groups.values()):
            if not (group.started or any(member.stay for member in group.members)):
                self._live.end(self.scheduler, group, Finished(group.id, reason, detail), now)

    def fail_all(self, detail: str, reason: FinishReason = FinishReason.ENGINE_FAILED) -> None:
        """Nobody computes any more: every request ends, all KV is forgotten."""
        for group in self._live.groups.values():
            self._live.gone(Finished(group.id, reason, detail))
        calls = self.scheduler.encoding.calls
        self._live.said.modules += calls.done
        self._live.said.modules += [CallDone(call, "failed", detail) for call in calls.ids() if call >= 0]
        self._live.groups.clear()
        self._renew(self.config)

    # Workers

    def workers_lost(self, epoch: int, now: float) -> None:
        """The workers are gone, with all that was in their memory. Whoever was running waits, with the tokens
        known so far, until others come; only who seems to be what kills them ends (`quarantine.py`).

        Args:
            epoch: of those; results of another one are not listened to.
        """
        running = [group.id for group in self._live.groups.values() if group.runs]
        deadly = set(self._live.suspects.lost(running))
        survivors = [survivor for survivor in self._survivors() if survivor.request.id not in deadly]
        for request in sorted(deadly):
            self._live.gone(Finished(request, FinishReason.ENGINE_FAILED, DEADLY))
        self._live.journeys.lost(now)
        self.epoch, self.is_away = epoch, True
        self._begin_again(self.config, survivors, None, now)

    def workers_back(self, config: EngineConfig, restore: Callable[[ChunkTree], object], now: float) -> None:
        """Other workers have come: all requests go on.

        Args:
            config: with what they hold.
            restore: puts the chunks that are on their disks into the empty tree.

        Raises:
            ConfigError: with so little nobody can work.
        """
        config.validate()
        survivors = self._survivors()
        self.is_away = False
        self._begin_again(config, survivors, restore, now)
        if self._flushes:
            self._flushes = False
            self.flush_cache()

    def _survivors(self) -> list[Survivor]:
        lost = {request for step in self._inflight for request in step.scored.values()}
        rows = self.scheduler.rows
        return [keep(group, rows, scores_lost=group.id in lost) for group in self._live.groups.values()]

    def _begin_again(
        self,
        config: EngineConfig,
        survivors: list[Survivor],
        restore: Callable[[ChunkTree], object] | None,
        now: float,
    ) -> None:
        calls = self.scheduler.encoding.calls
        self._live.said.modules += calls.done
        wanted = calls.begin_again()
        self._live.groups.clear()
        self._renew(config)
        if restore is not None:
            restore(self.scheduler.residence.tree)
        for survivor in survivors:
            request = survivor.request
            problem, _ = problem_of_request(request, config)
            if problem:
                detail = f"the workers are new and hold less than those before: {problem}"
                self._live.gone(Finished(request.id, FinishReason.ENGINE_FAILED, detail))
            else:
                self._queue(request, survivor.arrival, now, survivor)
        for call in wanted:
            self.scheduler.encoding.calls.postpone(call)

    def _renew(self, config: EngineConfig) -> None:
        """Forget all that workers held; totals go on."""
        old, lost_chunks = self.scheduler, self.traffic.lost_chunks
        self._install(config, old.residence.tree.tiers.copies.disk.highest_generation)
        carry_totals(old, self.scheduler)
        self.traffic.lost_chunks = lost_chunks

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
        moves = moves_of(self.config, relocate=call.relocate)
        if call.op == "encode":
            wanted = TextsCall(call_id, call.texts, call.salt, moves, True, call.holder, call.ttl)
        else:
            wanted = TextsCall(call_id, call.texts, call.salt, moves, False)
        if self.is_away and not wanted.encodes:
            calls.postpone(wanted)  # what is on disk is not known now
        else:
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
        return [] if self.is_away else self.grammars.messages()

    def grammar_ready(self, message: GrammarReady, now: float) -> None:
        """The workers have compiled a grammar, or cannot: those who waited for it go on, or end."""
        entry = self.grammars.ready(message)
        if entry is None:
            return
        for request in sorted(entry.users):
            group = self._live.groups[request]
            group.waits_for_grammar = False
            if entry.problem:
                self._refuse_grammar(group, entry.problem, now)

    def _refuse_grammar(self, group: SequenceGroup, problem: str, now: float) -> None:
        grammar = group.request.grammar
        assert grammar is not None
        self._live.end(
            self.scheduler, group, Finished(group.id, FinishReason.INVALID, problem, param=grammar.param), now
        )

    # Tiers

    def tier_messages(self, now: float) -> list[TierMoves | Probe]:
        """What the workers must be told, after the plans made so far."""
        if self.is_away:
            return []
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
        tree = self.scheduler.residence.tree
        group = group_of(request, self._arrivals, 0, request.sampling, tree, self.config)
        return self.expectations.announce(group, self._step + 1, now)

    def next_deadline(self, now: float) -> float:
        """When `next_step` should be asked again although nothing has happened; may be infinite."""
        if self.is_away:
            return inf
        if self.scheduler.encoding.calls.is_busy and len(self._inflight) < self.config.max_inflight_steps:
            return now
        return self.scheduler.fetching.next_deadline(now)

    # Steps

    def next_step(self, now: float) -> StepPlan | None:
        """The next plan to broadcast, or None: nothing to do, or two steps are unanswered."""
        scheduler = self.scheduler
        idle = self.is_away or not (self._has_work or scheduler.residence.tree.has_unsaved)
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
                traced_first=self._live.journeys.planned(draft) if draft.traced else (),
            )
        )
        for sequence in draft.sampling:
            self._live.started(sequence.group, now)
        self.counters.steps += 1
        self.counters.row_set_changes += draft.new_runs is not None
        return draft.message(self.epoch)

    @property
    def oldest_step(self) -> int:
        """The step that the workers must answer next; 0: none."""
        return self._inflight[0].step if self._inflight else 0

    @property
    def predicted_step_s(self) -> float:
        """How long it should take them."""
        if not self._inflight:
            return 0.0
        step = self._inflight[0]
        return self.scheduler.costs.step_us(step.decode_rows, step.prefill_tokens) / 1e6

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
        for request in self._inflight[0].traced_first:  # it may be the last one, too
            self._live.journeys.got_token(request, now)
        self._answers.take(self.scheduler, self._inflight[0], result, now)
        self._inflight.popleft()

    def journeys(self) -> list[Journey]:
        """Requests that have ended since the last call."""
        return self._live.journeys.take_done()

    def outputs(self) -> EngineOutputs | None:
        """What happened since the last call, or None."""
        done = self.scheduler.encoding.calls.done
        if done:
            self._live.said.modules += done
            done.clear()
        return self._live.take_said()
