"""Calm steps change nothing but the time that they take: an engine that never has any says the same."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import msgspec
import pytest
from seeds import seeds

from trunkline.controller.engine.calm import CALM_S
from trunkline.controller.engine.engine import Engine
from trunkline.controller.engine.events import AbortRequest, DropCache, Event, Ready
from trunkline.controller.engine.integrity import check_integrity
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import Submit
from trunkline.controller.reports import StepResult, TopLogprobs
from trunkline.controller.scheduling.row_blocks import SLACK_ROWS_MIN
from trunkline.controller.sequences.sequence import Request
from trunkline.kvstore.chunks import pack_int32, unpack_int32
from trunkline.worker.messages import Sampling


def told(ready: Ready) -> list[Any]:
    """What a step of an engine says, in a form that can be compared."""
    outputs = ready.outputs
    parts: list[Any] = [
        list(ready.grammars),
        ready.plan,
        list(ready.disk_changes),
        list(ready.orders),
        ready.wake_at,
    ]
    parts += [ready.problem, ready.again, [timeline.request.id for timeline in ready.ended]]
    if outputs is not None:
        arrays = (outputs.requests, outputs.samples, outputs.tokens)
        parts += [[array.tolist() for array in part] for part in arrays]
        parts += [outputs.logprobs, outputs.started, outputs.finished, outputs.drafts]
    return parts


class Twins:
    """Two engines that get the same: one step by step, as a service calls it, and one that is told of each event
    before its step, so that it has no calm steps."""

    def __init__(self, rng: random.Random, rows: int) -> None:
        """
        Args:
            rows: largest number of rows. With many, requests come together, and are so long that chunks wait for
                each other.
        """
        self.rng = rng
        self.many = many = rows >= SLACK_ROWS_MIN
        self.tokens = 5000 if many else 40
        self.odds = 0.2 if many else 1.0
        """How often something happens that ends calm steps."""
        config = EngineConfig(
            num_blocks=rng.choice([110, 160] if many else [24, 80]),
            chunk_size=64 if many else 16,
            max_context=500 if many else 120,
            token_budget=640 if many else 64,
            max_rows=rows,
            max_inflight_steps=rng.choice([1, 2, 2]),
            prefix_cache=rng.random() < 0.9,
            host_slots=rng.choice([0, 0, 12]),
        )
        self.engines = Engine(config), Engine(config)
        self.results: deque[StepResult] = deque()
        self.rows_max, self.rows = rows, 0
        self.now = 0.0
        self.next_id = 1
        self.calm = 0
        """Number of calm steps that the first engine took. With many rows, those count whose chunks wait."""

    def step(self, events: list[Event]) -> Ready:
        first, second = self.engines
        scheduler = first._calm._scheduler
        before = first._calm._planned
        ready = first.step(events, self.now)
        was_calm = scheduler is not None and first._calm._planned == before + 1
        self.calm += was_calm and (not self.many or self.rows >= SLACK_ROWS_MIN)
        for event in events:
            second.receive(event, self.now)
        other = second.step((), self.now)
        assert told(ready) == told(other)
        for name in ("is_idle", "oldest_step", "predicted_step_s", "counters"):
            assert getattr(first, name) == getattr(second, name), name
        if ready.plan is not None:
            self.carry_out(ready)
        return ready

    def carry_out(self, ready: Ready) -> None:
        plan = ready.plan
        assert plan is not None
        self.rows = self.rows if plan.rows is None else len(plan.rows) // 4
        samples = int(unpack_int32(plan.prefill, 5)[:, 4].sum()) if plan.prefill else 0
        count, rng = self.rows + samples + len(plan.forks), self.rng
        tokens = [rng.randrange(self.tokens) for _ in range(count)]
        result = StepResult(plan.step, plan.epoch, pack_int32(tokens), rng.randrange(2000), plan_copies=1)
        if count and rng.random() < 0.03 * self.odds:
            tops = {rng.randrange(count): TopLogprobs(-0.5, b"", b"")}
            result = msgspec.structs.replace(result, logprobs=tops)
        if rng.random() < 0.03 * self.odds:
            result = msgspec.structs.replace(result, waited_us=5, moved_blocks=1, moved_us=3)
        self.results.append(result)

    def submit(self) -> Request:
        rng, size = self.rng, self.rng.randrange(1, 40)
        prompt = [rng.randrange(3) for _ in range(size)]
        request, self.next_id = self.next_id, self.next_id + 1
        stops = rng.sample(range(self.tokens), rng.choice([0, 0, 1, 12]))
        submit = Submit(
            request,
            pack_int32(prompt),
            size,
            rng.choice([300, rng.randrange(300)]) + 1 if self.many else rng.randrange(1, 70),
            Sampling(seed=request),
            stops,
            n=rng.choice([1, 1, 1, 2]),
            tenant=rng.choice(["", "other"]),
            priority=rng.choice([0, 0, 1]),
        )
        return Request.of(request, submit)

    def turn(self) -> None:
        """Events as they come together, mostly one result, then steps until no more can be planned."""
        rng = self.rng
        self.now += CALM_S if rng.random() < 0.25 * self.odds else rng.choice([0.0, 0.002, 0.01])
        events: list[Event] = [self.results.popleft()] if self.results else []
        few = len(self.engines[0].requests()) < (4 if self.many else 1)
        if rng.random() < (0.5 if few else 0.06 * self.odds):
            for _ in range(3 * self.rows_max // 4 if few and self.many else 1):
                events.insert(rng.randrange(len(events) + 1), self.submit())
        if rng.random() < 0.02 * self.odds:
            events.append(AbortRequest(rng.randrange(1, self.next_id + 1), rng.choice([-1, 0])))
        if rng.random() < 0.01 * self.odds:
            events.append(DropCache((1, self.next_id)))
        if rng.random() < 0.02 * self.odds:
            events.append(StepResult(0, 7, b"", 1))  # of workers that are lost
        while self.step(events).again:
            events = []


@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.parametrize("rows", [8, 24])
def test_calm_steps_are_as_others(rows: int, seed: int) -> None:
    twins = Twins(random.Random(seed), rows)
    for turn in range(600):
        twins.turn()
        if turn % 40 == 0:
            check_integrity(twins.engines[0].scheduler)
    assert twins.calm > 20, "hardly any step was calm"


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": b"\x01\x00\x00\x00\x02\x00\x00\x00"},
        {"tokens": b""},
        {"tokens": b"\xff\xff\xff\xff"},
        {"logprobs": {1: TopLogprobs(0.0, b"", b"")}},
        {"step": 99},
    ],
)
def test_impossible_results_are_refused_in_calm_steps_too(change: dict[str, Any]) -> None:
    config = EngineConfig(num_blocks=16, chunk_size=16, max_context=96, token_budget=24, max_rows=8)
    engine, number = Engine(config), 0
    events: list[Event] = [Request.of(1, Submit(1, pack_int32([1, 2, 3]), 3, 60, Sampling()))]
    for number in range(1, 8):
        while engine.step(events, 0.0).again:
            events = []
        events = [StepResult(number, 1, pack_int32([7]), 1)]
    assert engine._calm._planned, "the last step was calm"
    wrong = msgspec.structs.replace(StepResult(number, 1, pack_int32([7]), 1), **change)
    ready = engine.step([wrong], 0.0)
    assert ready.problem
    assert ready.plan is None
    assert int(engine.scheduler.rows.known[0]) == 3 + number - 1, "what was drawn before counts"
