"""The engine of a group: requests in, step plans out; results in, tokens out. Pure and deterministic.

                        ┌────────┐   Ready: the next plan and orders ─► workers
    [event, …], now ─►  │ Engine │          tokens, starts, ends     ─► routers
                        └────────┘          disk changes, timelines  ─► files, log

`step` is the whole interface: events go in with the time (`events.py`), and a `Ready` comes out, which says what
the service has to do, and in which order. `begin` and `finish` are its halves: workers and clients wait for what
`begin` returns, and for nothing of the rest. The engine has no sockets, clocks, threads or randomness. Times are
seconds of any origin, so tests drive thousands of steps from a seed.

Up to two steps are in flight. Step k + 1 is planned as if every row of step k went on. What it computes for rows
that end in step k is discarded when its result arrives. Behind a step with drafts (`scheduling/drafting.py`) none
is planned before its result is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from math import inf

from trunkline.controller.engine.announced import expect_prompt, forget_prompt
from trunkline.controller.engine.calm import CalmSteps
from trunkline.controller.engine.disk_chunks import GoneTrees, StoredChunks
from trunkline.controller.engine.events import (
    AbortRequest,
    AnswerTold,
    CallTexts,
    DropCache,
    EndAdapter,
    EndAll,
    EndWaiting,
    EngineOutputs,
    Event,
    ExpectRequest,
    ForgetPrompt,
    GoesOnElsewhere,
    Ready,
    WorkerEvent,
    WorkersBack,
    WorkersLost,
)
from trunkline.controller.engine.grammar_book import GrammarBook
from trunkline.controller.engine.intake import Intake
from trunkline.controller.engine.recovery import RequestSnapshot, snapshots
from trunkline.controller.engine.requests import RequestTable
from trunkline.controller.engine.step_results import ProtocolError, apply_step_result, inflight_step
from trunkline.controller.engine.text_calls import call_texts
from trunkline.controller.engine.validation import problem_of_request
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.reports import GrammarReady, MovesDone, Probed, StepResult
from trunkline.controller.scheduling.admission import DEADLY
from trunkline.controller.scheduling.scheduler import Scheduler
from trunkline.controller.sequences.plan_builder import InflightStep, PlanBuilder, is_full
from trunkline.controller.sequences.sequence import Request, Sequence, SequenceGroup
from trunkline.controller.tiers.holders import Holders
from trunkline.controller.tiers.prefetch import Prefetcher
from trunkline.controller.tiers.tier_orders import TierOrders
from trunkline.controller.totals import Totals
from trunkline.router.messages import Finished, FinishReason, Flushed, Prefetched
from trunkline.worker.messages import CompileGrammar, ForgetGrammar, StepPlan, TierOrder


class Engine:
    """Decides what one group computes. Not thread-safe: the service calls it from one thread."""

    def __init__(
        self,
        config: EngineConfig,
        epoch: int = 1,
        first_disk_generation: int = 0,
        stored: StoredChunks | None = None,
        now: float = 0.0,
    ) -> None:
        """
        Args:
            epoch: the epoch of the first workers.
            first_disk_generation: generations of disk slots begin above it (`TierIndex.first_generation`).
            stored: the chunks that earlier workers left on the disks.

        Raises:
            ConfigError: the configuration cannot work.
        """
        self.epoch = epoch
        self.is_away = False
        """Whether the workers are lost and no new ones are ready; then nothing is planned."""
        self._requests = RequestTable()
        self._inflight: deque[InflightStep] = deque()
        self._calm = CalmSteps(self._requests, self._inflight)
        self._drops_cache = False
        """Whether to drop the cache when new workers are ready."""
        self._gone_trees = GoneTrees()
        self._unbooked: PlanBuilder | None = None
        """A plan that has been made, and is still to be entered in the books."""
        self._starting: list[Sequence] = []
        """Sequences whose prompts are computed with the step that has just been planned."""
        self._install(config, first_disk_generation)
        self._restore(stored, now)

    def _install(self, config: EngineConfig, first_disk_generation: int) -> None:
        """Make the parts of the engine anew, for workers that hold nothing."""
        config.validate()
        self.config = config
        self.scheduler = Scheduler(config, first_disk_generation, self._requests.quarantine, self.counters)
        tree, fetching = self.scheduler.kv.tree, self.scheduler.fetching
        self.traffic = TierOrders(tree, config.ranks)
        self.prefetcher = Prefetcher(tree, fetching, self.traffic, Holders(tree, self.scheduler.costs))
        self._requests.grammars = GrammarBook(self.grammars.next_id, foretell=config.speculation == "auto")
        self._intake = Intake(config, self._requests, self.scheduler, self.prefetcher)
        self._inflight.clear()
        self._step = 0

    def _restore(self, stored: StoredChunks | None, now: float) -> None:
        if stored is not None:
            self._gone_trees.restore(self.scheduler.kv.tree, stored, now)

    def step(self, events: Iterable[Event], now: float) -> Ready:
        """Take in what has happened, plan the next step if that is possible, and return what has to be done.

        If a report shows that the workers cannot be trusted (`Ready.problem`), their later reports are ignored.
        """
        begun = self.begin(events, now)
        return begun.followed_by(self.finish(begun, now)) if begun.has_rest else begun

    def begin(self, events: Iterable[Event], now: float) -> Ready:
        """Return what of a step workers and clients wait for; if it has a rest, `finish` must follow at once."""
        if (calm := self._calm.step(events, self.epoch, now)) is not None:
            self._step += calm.plan is not None
            return calm
        problem, grammars, plan = "", list[CompileGrammar | ForgetGrammar](), None
        for event in events:
            if problem and isinstance(event, WorkerEvent):
                continue
            try:
                self._take_in(event, now)
            except ProtocolError as error:
                problem = str(error)
        self._calm.settle()
        # If all requests have just got their last tokens, clients wait for these, and no worker for a plan. Nor
        # does one while it has another step to compute: then tokens behind prompts leave first.
        is_last = self._requests.only_end and not self.scheduler.encoding.is_working
        is_first = bool(self._inflight) and self._requests.has_answered_prompt
        if not (self.is_away or problem or is_last or is_first):
            self._requests.settle(self.scheduler)
            grammars, plan = self._requests.grammars.messages(), self._next_plan(now)
        outputs, pending = None, self._requests.pending_outputs
        if pending.is_due or pending or self.scheduler.encoding.calls.done:
            self._book()
            outputs = None if self.holds_starts else self.take_outputs()
        return Ready(grammars=grammars, plan=plan, outputs=outputs, problem=problem, has_rest=True)

    def finish(self, begun: Ready, now: float) -> Ready:
        """Return the rest of a step: the ends of requests that are told already, and what the tiers have to do."""
        grammars, plan = list[CompileGrammar | ForgetGrammar](), begun.plan
        can_plan = not (self.is_away or begun.problem)
        plans = can_plan and self._requests.is_unsettled  # what `begin` has left to this half
        self._book()
        self._requests.settle(self.scheduler)
        if plans:
            grammars, plan = self.grammars.messages(), self._next_plan(now)
            self._book()
        for sequence in self._starting:
            self._requests.started(sequence.group, now)
        self._starting.clear()
        orders = self._tier_orders(now) if can_plan else ()
        studies = self.scheduler.drafting.study(is_idle=self.is_idle)
        disk_changes = self._gone_trees.take_changes(self.scheduler.kv.tree)
        ready = Ready(
            grammars=grammars,
            plan=plan if plans else None,
            disk_changes=disk_changes,
            orders=orders,
            outputs=None if self.holds_starts else self.take_outputs(),
            ended=self._requests.timelines.take_done(),
            again=plan is not None and not self._is_full,
            wake_at=now if studies else self._wake_at(now),
        )
        if plan is not None:
            self._calm.begin(self.scheduler, ready, now)
        return ready

    def receive(self, event: Event, now: float) -> None:
        """Take in one event, without planning; `step` does the rest.

        Raises:
            ProtocolError: the workers sent a result that no correct worker sends.
        """
        try:
            self._take_in(event, now)
        finally:
            self._requests.settle(self.scheduler)

    def _take_in(self, event: Event, now: float) -> None:
        """Take in one event, without planning, and without the ends of requests that it brings."""
        self._calm.settle()
        self._requests.settle(self.scheduler)
        match event:
            case StepResult():
                self._step_done(event, now)
            case Request():
                self._intake.submit(event, self._step + 1, now)
            case AbortRequest(request, sample):
                self._requests.abort(self.scheduler, request, sample, now)
            case AnswerTold() | GoesOnElsewhere():
                event.tell(self.scheduler.kv.tree.tiers.next_use, now)
            case MovesDone() | Probed():
                self._tier_report(event, now)
            case GrammarReady():
                self._intake.grammar_ready(event, now)
            case CallTexts(call_id, call):
                call_texts(call_id, call, self.scheduler, self._step + 1, now, is_away=self.is_away)
            case ExpectRequest():
                self._expect_request(event, now)
            case ForgetPrompt(request):
                forget_prompt(request, self.traffic, self.scheduler.kv.tree, self.config, self._step + 1)
            case DropCache(caller):
                self._drops_cache |= self.is_away
                freed = self.scheduler.kv.tree.flush()
                self._requests.pending_outputs.replies.append((caller[0], Flushed(0, caller[1], freed)))
            case EndWaiting(reason, detail):
                self._requests.end_waiting(self.scheduler, reason, detail, now)
            case EndAll(detail, reason):
                self._requests.end_all(self.scheduler, reason, detail)
                self._renew(self.config)
            case EndAdapter(key, detail):
                self._requests.end_adapter(self.scheduler, key, detail, now)
            case WorkersLost(epoch):
                self._workers_lost(epoch, now)
            case WorkersBack(config, stored):
                self._workers_back(config, stored, now)

    def take_outputs(self) -> EngineOutputs | None:
        """Return the outputs that no `Ready` has had yet; None if there are none."""
        done = self.scheduler.encoding.calls.done
        if done:
            self._requests.pending_outputs.modules += done
            done.clear()
        return self._requests.take_outputs()

    def hurry_writes(self) -> None:
        """Write chunks to the tiers below without waiting for a pause: the group is about to stop."""
        self.scheduler.kv.tree.tiers.hurry_writes()

    # Questions

    @property
    def counters(self) -> Totals:
        """Totals since the start."""
        return self._requests.counters

    @property
    def grammars(self) -> GrammarBook:
        """The grammars that the workers know, or are about to compile."""
        return self._requests.grammars

    @property
    def is_idle(self) -> bool:
        """Whether no request runs or waits, and no step is in flight."""
        return not (self._inflight or self._requests.groups or self.scheduler.encoding.is_working)

    @property
    def is_written(self) -> bool:
        """Whether the engine is idle, and no chunk waits to be written to a lower tier."""
        tree = self.scheduler.kv.tree
        return self.is_idle and not (tree.saves.waiting or self.traffic.in_flight or tree.tiers.has_unwritten)

    @property
    def holds_starts(self) -> bool:
        """Whether routers hear which requests have started together with first tokens, which come soon."""
        return bool(self._inflight) and self._requests.pending_outputs.may_wait(self.predicted_step_s)

    @property
    def oldest_step(self) -> int:
        """The number of the step that the workers must answer next; 0: no step is in flight."""
        return self._inflight[0].step if self._inflight else 0

    @property
    def predicted_step_s(self) -> float:
        """Seconds that the oldest step in flight should take the workers."""
        oldest, costs = next(iter(self._inflight), None), self.scheduler.costs
        return 0.0 if oldest is None else costs.step_us(oldest.decode_rows, oldest.prefill_tokens) / 1e6

    def requests(self) -> Mapping[int, SequenceGroup]:
        """Return the requests that have not ended, by their ids."""
        return self._requests.groups

    def open_calls(self) -> list[int]:
        """Return the ids of the calls about texts that have not been answered."""
        return self.scheduler.encoding.calls.ids()

    @property
    def _is_full(self) -> bool:
        """Whether the steps in flight must be answered before the next one is planned."""
        full = is_full(self._inflight, self.config.max_inflight_steps)
        return full or (bool(self._inflight) and self.scheduler.drafting.waits())

    def _wake_at(self, now: float) -> float:
        if self.is_away:
            return inf
        if self.scheduler.encoding.calls.is_busy and not self._is_full:
            return now
        return min(self.scheduler.fetching.next_deadline(now), self.traffic.next_time(now))

    # Workers

    def _workers_lost(self, epoch: int, now: float) -> None:
        running = [group.id for group in self._requests.groups.values() if group.runs]
        deadly = set(self._requests.quarantine.lost(running))
        known = snapshots(self._requests.groups.values(), self._inflight, self.scheduler.rows)
        survivors = [survivor for survivor in known if survivor.request.id not in deadly]
        for request in sorted(deadly):
            self._requests.gone(Finished(request, FinishReason.ENGINE_FAILED, DEADLY))
        self._requests.timelines.lost(now)
        self.epoch, self.is_away = epoch, True
        self._requeue_survivors(self.config, survivors, None, now)

    def _workers_back(self, config: EngineConfig, stored: StoredChunks | None, now: float) -> None:
        self.is_away = False
        survivors = snapshots(self._requests.groups.values(), self._inflight, self.scheduler.rows)
        self._requeue_survivors(config, survivors, stored, now)
        if self._drops_cache:
            self._drops_cache = False
            self.scheduler.kv.tree.flush()

    def _requeue_survivors(
        self, config: EngineConfig, survivors: list[RequestSnapshot], stored: StoredChunks | None, now: float
    ) -> None:
        calls = self.scheduler.encoding.calls
        self._requests.pending_outputs.modules += calls.done
        wanted = calls.begin_again()
        self._requests.groups.clear()
        self._renew(config)
        self._restore(stored, now)
        for survivor in survivors:
            request = survivor.request
            problem, _ = problem_of_request(request, config)
            if problem:
                detail = f"the workers are new and hold less than those before: {problem}"
                self._requests.gone(Finished(request.id, FinishReason.ENGINE_FAILED, detail))
            else:
                self._intake.queue(request, survivor.arrival, self._step + 1, now, survivor)
        for call in wanted:
            self.scheduler.encoding.calls.postpone(call)

    def _renew(self, config: EngineConfig) -> None:
        """Forget everything that the workers held. Totals go on."""
        tree = self.scheduler.kv.tree
        self._gone_trees.add(tree)
        self._install(config, tree.tiers.highest_disk_generation)

    # Tiers

    def _tier_orders(self, now: float) -> list[TierOrder]:
        """Return the orders to the workers' tiers, which follow the plans made so far."""
        tree = self.scheduler.kv.tree
        self.scheduler.fetching.settle()
        self.prefetcher.settle(self._step + 1, now)
        tree.expire(now)
        self.prefetcher.forget_old(now)
        self.traffic.forget(self.scheduler.encoding.calls.take_forgotten())
        messages = self.traffic.messages(self._step, now, is_busy=not self.is_idle)
        tree.drop_lost()
        return messages

    def _tier_report(self, report: MovesDone | Probed, now: float) -> None:
        if report.epoch != self.epoch:
            return
        if isinstance(report, MovesDone):
            self.traffic.moved(report, now)
            self.scheduler.kv.tree.drop_lost()
        else:
            self.prefetcher.probed(report, self._step + 1, now)
        self.scheduler.end_found(self._step + 1, now, probed=isinstance(report, Probed))

    def _expect_request(self, event: ExpectRequest, now: float) -> None:
        tree, (router, ticket) = self.scheduler.kv.tree, event.caller
        known, coming = expect_prompt(event, self.prefetcher, tree, self.config, self._step + 1, now)
        self._requests.pending_outputs.replies.append((router, Prefetched(0, ticket, known, coming)))

    # Steps

    def _next_plan(self, now: float) -> StepPlan | None:
        """Return the next plan; None if there is nothing to compute, or steps must be answered first."""
        scheduler, step = self.scheduler, self._step + 1
        if self._is_full or (self.is_idle and not scheduler.kv.tree.saves.waiting):
            return None
        scheduler.encoding.calls.advance(step, self._requests.arrivals + 1, now)
        self._intake.expect_texts(step, now)
        while (plan := scheduler.plan(step, now)) is None:
            if not scheduler.encoding.calls.advance(step, self._requests.arrivals + 1, now):
                return None
            self._intake.expect_texts(step, now)  # encoding jobs that have just ended let others begin
        self._step = step
        self._unbooked = plan
        return plan.message(self.epoch)

    def _book(self) -> None:
        """Enter the plan that has just been made in the books: workers do not wait for that."""
        plan, self._unbooked = self._unbooked, None
        if plan is None:
            return
        self.scheduler.book(plan)
        self._inflight.append(inflight_step(self._requests, plan, self.scheduler.rows))
        self._starting += plan.sampling
        self.counters.steps += 1

    def _step_done(self, result: StepResult, now: float) -> None:
        """Take in the result of the oldest unanswered step.

        Raises:
            ProtocolError: the result is another step's, or does not fit the step.
        """
        if result.epoch != self.epoch:
            return  # a result of workers that are lost
        if not self._inflight or self._inflight[0].step != result.step:
            expected = self._inflight[0].step if self._inflight else "none"
            raise ProtocolError(f"the workers answered step {result.step}; expected was {expected}")
        for request in self._inflight[0].traced_first:  # before the result is applied, which may end the request
            self._requests.timelines.got_token(request, now)
        apply_step_result(self._requests, self.scheduler, self._inflight[0], result, now)
        self._inflight.popleft()
