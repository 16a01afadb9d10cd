"""Steps in which nothing has to be decided. Pure.

Between arrivals and ends, a group spends most of its steps on rows that just go on: no request waits, no chunk has
to enter the tree, no row needs a block and none ends. When a step has been planned, `CalmSteps.begin` looks once
at everything that planning looks at, and for how many steps it stays so. For these *calm* steps a result is taken
in and the next plan is made by a handful of operations. Each that is left out counts: between two tokens the
processor's caches are filled by others, and then a function that takes a microsecond in a loop takes ten.

                    ┌─────────────────── results that are plain ──────────────────┐
    planned ─► begin ─► step ─► Ready: the next plan, and the tokens ─► step ─► … ─┴─► settle ─► `Engine.step`

What calm steps have changed comes into the rows when they end (`settle`). Any other event ends them before it is
taken in, and so do a token that may end its row, and time: what only time brings is looked at after `CALM_S`.
Drafts end them, too, but looking for them does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import inf
from typing import Final

import numpy as np

from trunkline.controller.engine.events import EngineOutputs, Event, Ready
from trunkline.controller.engine.requests import RequestTable
from trunkline.controller.reports import StepResult
from trunkline.controller.scheduling.row_blocks import slack_of
from trunkline.controller.scheduling.scheduler import Scheduler
from trunkline.controller.sequences.decode_rows import NO_ROWS
from trunkline.controller.sequences.plan_builder import InflightStep
from trunkline.kvstore.chunks import Int32Array, unpack_int32
from trunkline.worker.messages import StepPlan

CALM_S: Final = 1.0
"""Seconds after which calm steps end: time alone lets chunks expire, ends pauses of tiers, and the like."""
CALM_ROWS_MAX: Final = 32
"""Largest number of rows of a calm step whose chunks do not wait for each other
(`trunkline.controller.scheduling.row_blocks`): of more rows one fills its chunk in almost every step."""
FEW_ROWS: Final = 16
"""Largest number of rows whose tokens are looked at without an array."""
CALM_STEPS_MIN: Final = 4
"""Smallest number of calm steps for which it pays to look whether they are."""


class CalmSteps:
    """The calm steps of one engine, if some are under way."""

    def __init__(self, requests: RequestTable, inflight: deque[InflightStep]) -> None:
        self._requests = requests
        self._inflight = inflight
        self._scheduler: Scheduler | None = None
        """The scheduler whose rows go on; None: no calm steps are under way."""
        self._rows = NO_ROWS
        self._until = -inf
        self._plans_left = 0
        self._results_left = 0
        self._stops: frozenset[int] = frozenset()
        """All stop tokens of the rows."""
        self._taken: list[Int32Array] = []
        """The tokens of each result, `[rows]`, that are not in the rows yet."""
        self._told = 0
        """Number of these results that the source of drafts has."""
        self._look_in = inf
        """In how many results it is to look at them."""
        self._planned = 0
        """Number of plans that are not in the rows yet."""

    def begin(self, scheduler: Scheduler, ready: Ready, now: float) -> None:
        """Let calm steps follow a step that has been planned, if some can; earlier ones must be settled."""
        rows, inflight = scheduler.row_set, self._inflight
        slack = slack_of(scheduler.kv, len(rows))
        if ready.again or ready.wake_at < inf or not len(rows) or (len(rows) > CALM_ROWS_MAX and not slack):
            return
        if not (look_in := scheduler.drafting.calm_steps):
            return
        if self._requests.pending_outputs or not self._is_quiet(scheduler):
            return
        if any(step.rows is not rows or step.drafts or step.prefill_tokens for step in inflight):
            return
        plans, results = scheduler.rows.calm_steps(rows.slots, slack)
        if min(plans, results) < CALM_STEPS_MIN:
            return
        self._scheduler, self._rows, self._look_in = scheduler, rows, look_in
        self._plans_left, self._results_left, self._until = plans, results, now + CALM_S
        self._stops = scheduler.rows.stops.of(rows.slots)

    def _is_quiet(self, scheduler: Scheduler) -> bool:
        """Return whether nothing but the rows that decode may change a plan."""
        encoding, quarantine = scheduler.encoding, self._requests.quarantine
        waits = bool(len(scheduler.queue) or scheduler.prefilling or scheduler.parked)
        encodes = bool(encoding.is_working or encoding.finishing or encoding.jobs.held)
        decides = scheduler.forks.searches or quarantine.is_watching
        return not (waits or encodes or decides or scheduler.kv.tree.saves.waiting)

    def step(self, events: Iterable[Event], epoch: int, now: float) -> Ready | None:
        """Take in a result and make the next plan, if these are all events, and the step is calm; else nothing
        changes, and `settle` has to follow."""
        if self._scheduler is None or now >= self._until or not isinstance(events, list) or len(events) != 1:
            return None
        result = events[0]
        if not (isinstance(result, StepResult) and self._plans_left and self._results_left):
            return None
        answered, places = self._inflight[0], len(self._rows)
        if result.step != answered.step or result.epoch != epoch or len(result.tokens) != 4 * places:
            return None
        if result.waited_us or result.moved_blocks or result.forced:
            return None
        if result.logprobs or result.beams or result.prompt_logprobs:
            return None
        tokens = unpack_int32(result.tokens)
        ids = memoryview(result.tokens).cast("i")
        if (min(ids) if places <= FEW_ROWS else tokens.min()) < 0:
            return None
        if self._stops and not self._stops.isdisjoint(ids):
            return None
        return self._step(self._scheduler, result, tokens, epoch)

    def _step(self, scheduler: Scheduler, result: StepResult, tokens: Int32Array, epoch: int) -> Ready:
        counters, rows, places = self._requests.counters, self._rows, len(tokens)
        counters.plan_copies += result.plan_copies
        counters.replayed_steps += result.replayed
        counters.kv_bytes_read += result.kv_bytes_read
        counters.output_tokens += places
        counters.steps += 1
        scheduler.costs.observe_decode(result.step, rows=places, elapsed_us=result.elapsed_us)
        self._taken.append(tokens)
        self._results_left -= 1
        self._inflight.popleft()
        self._look_in -= 1
        waits = not self._look_in and self._look(scheduler)
        plan = None
        if not waits:
            step = self._inflight[-1].step + 1 if self._inflight else result.step + 1
            self._inflight.append(InflightStep(step, rows, places, 0, {}))
            plan = StepPlan(step, epoch)
            self._planned += 1
            self._plans_left -= 1
        return Ready(
            grammars=(),
            plan=plan,
            disk_changes=(),
            orders=(),
            outputs=EngineOutputs(
                requests=[rows.requests], samples=[rows.samples], tokens=[tokens], logprobs=[None]
            ),
            ended=(),
            again=waits and not self._inflight,
            wake_at=inf,
        )

    def _look(self, scheduler: Scheduler) -> bool:
        """Let the source of drafts look at the latest tokens; return whether the next step is to have drafts, and
        so is planned behind those in flight. Then these steps are no longer calm."""
        self._tell(scheduler)
        waits = scheduler.drafting.source_waits(self._rows.slots)
        self._look_in = scheduler.drafting.calm_steps
        if waits or not self._look_in:
            self._results_left = 0
        return waits

    def _tell(self, scheduler: Scheduler) -> None:
        """Tell the source of drafts what it has not got yet."""
        tokens = np.array(self._taken[self._told :], np.int32).reshape(-1, len(self._rows))
        scheduler.drafting.settle(self._rows.slots, tokens, [step.step for step in self._inflight])
        self._told = len(self._taken)

    def settle(self) -> None:
        """End the calm steps: enter what they have changed."""
        scheduler, self._scheduler = self._scheduler, None
        if scheduler is None or not self._taken:
            return
        scheduler.rows.accept_calm(self._rows.slots, np.stack(self._taken), self._planned)
        self._tell(scheduler)
        scheduler.queue.charge_rows(self._planned)
        self._taken, self._told, self._planned = [], 0, 0
