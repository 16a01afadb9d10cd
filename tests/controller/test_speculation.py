"""Drafts from what is there (`--speculation auto`) in the engine: texts are what they are without."""

from __future__ import annotations

import random
from collections import deque

import pytest
from msgspec.structs import replace
from seeds import seeds
from simulation.drafts import draft_from, found_drafts
from simulation.driver import Simulation
from simulation.engines import ENGINES, TINY
from simulation.streams import verify

from trunkline.controller.drafts import drafter as drafter_module
from trunkline.controller.drafts.drafter import Drafter
from trunkline.controller.engine.engine import Engine
from trunkline.controller.engine.events import Event
from trunkline.controller.engine_config import ConfigError, EngineConfig
from trunkline.controller.messages import Submit
from trunkline.controller.reports import StepResult
from trunkline.controller.sequences.sequence import Request
from trunkline.kvstore.chunks import pack_int32, unpack_int32
from trunkline.worker.messages import Sampling, StepPlan

ROOMY = replace(TINY, num_blocks=400, max_context=400, token_budget=128, max_rows=64, speculation="auto")
FAST_S = 1e-6
"""Pause between two steps of a simulation, so that waiting for a result costs little."""


@pytest.mark.parametrize("name", ["tiny, swapping", "one token a chunk", "without a cache", "many waiting"])
@pytest.mark.parametrize("seed", seeds(1, always=(676, 712952000)))
def test_requests_that_come_again_and_again_have_the_same_texts(name: str, seed: int) -> None:
    """The same requests in any order and company, aborted, preempted, and with workers lost."""
    rng = random.Random(seed)
    simulation = simulate(replace(ENGINES[name], speculation="auto"))
    kinds = [
        (
            [rng.randrange(50) for _ in range(rng.randint(1, 12))],
            rng.randint(8, 40),
            rng.randrange(3),
            rng.choice([1, 1, 3]),
        )
        for _ in range(5)
    ]
    for number in range(60):
        prompt, length, sampling_seed, samples = rng.choice(kinds)
        stop_ids = tuple(rng.sample(range(50), 2))
        request = simulation.submit(
            prompt, length, seed=sampling_seed, n=samples, stop_ids=stop_ids, salt=rng.choice([b"", b"", b"a"])
        )
        for _ in range(rng.randrange(12)):
            simulation.step()
        if rng.random() < 0.1:
            simulation.abort(request)
        if number % 25 == 20:
            simulation.lose_workers()
            simulation.replace_workers()
    simulation.run()
    counters = simulation.engine.counters  # with some seeds nearly all answers end after a few tokens
    assert counters.accepted_drafts > counters.output_tokens / 50
    for stream in simulation.streams.values():
        verify(stream, simulation.engine.config.longest_sequence)


def simulate(config: EngineConfig = ROOMY) -> Simulation:
    simulation = Simulation(config)
    simulation.pace_s = FAST_S
    if config.speculation == "auto":
        draft_from(simulation, found_drafts)
    return simulation


def steps_of(simulation: Simulation, prompt: list[int], **options: object) -> int:
    """Return how many steps a request takes alone."""
    before = simulation.engine.counters.steps
    simulation.submit(prompt, 100, **options)  # type: ignore[arg-type]
    simulation.run()
    return simulation.engine.counters.steps - before


def test_an_answer_that_is_given_again_comes_from_the_tree() -> None:
    simulation = simulate()
    first = steps_of(simulation, [1, 2, 3])
    again = steps_of(simulation, [1, 2, 3])
    assert first > 90
    assert again < first / 2
    assert simulation.engine.counters.accepted_drafts > 50


def test_another_tenant_has_no_drafts_of_it() -> None:
    simulation = simulate()
    first = steps_of(simulation, [1, 2, 3], salt=b"a")
    assert steps_of(simulation, [1, 2, 3], salt=b"b") > first - 10
    assert steps_of(simulation, [1, 2, 3], salt=b"b") < first / 2


def test_texts_are_indexed_while_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts, and the engine is called again until all are."""
    monkeypatch.setattr(drafter_module, "TENANT_TOKENS_PER_STEP", 300)
    rng = random.Random(7)
    alone = Alone([rng.randrange(50_000) for _ in range(1500)], [rng.randrange(50_000) for _ in range(80)], 1000)
    source, calls = alone.engine.scheduler.drafting.source, 0
    assert isinstance(source, Drafter)
    tenants = source._tenants
    assert tenants.waits
    while alone.engine.step((), 9.0).wake_at == 9.0:
        calls += 1
    assert calls >= 3
    assert not tenants.waits
    index = tenants.of(b"").index
    assert index is not None
    assert index.count > 1580


def test_off_is_off() -> None:
    simulation = simulate(replace(ROOMY, speculation="off"))
    assert steps_of(simulation, [1, 2, 3]) == steps_of(simulation, [1, 2, 3])
    assert simulation.engine.counters.drafted_tokens == 0
    with pytest.raises(ConfigError, match="speculation is 'on'; allowed are auto, off"):
        replace(ROOMY, speculation="on").validate()


class Alone:
    """A request alone on an engine, whose answer is known."""

    def __init__(self, prompt: list[int], answer: list[int], step_us: int, demanded: int = 0) -> None:
        """
        Args:
            demanded: behind every 20 tokens from the 600th on the workers foretell so many.
        """
        self.calm = 0
        self.drafted: list[tuple[int, int]] = []
        """Of each step: tokens of the answer so far, and drafts."""
        self.engine = Engine(replace(ROOMY, chunk_size=64, max_context=1600))
        submit = Submit(1, pack_int32(prompt), len(prompt), len(answer), Sampling(), prediction=b"")
        events: list[Event] = [Request.of(1, submit)]
        plans: deque[StepPlan] = deque()
        now, self.drawn, self.answer = 0.0, 0, answer
        while not self.engine.is_idle or events:
            before = self.engine._calm._planned
            ready = self.engine.step(events, now)
            assert not ready.problem
            self.calm += self.engine._calm._planned == before + 1
            if ready.plan is not None:
                plans.append(ready.plan)
            events = []
            if ready.again or not plans:
                continue
            now += step_us / 1e6
            before = self.drawn // 20
            tokens = self._carry_out(plan := plans.popleft())
            forced = {}
            if demanded and self.drawn > 600 and self.drawn // 20 != before:
                forced = {1: pack_int32(answer[self.drawn : self.drawn + demanded]), 7: pack_int32([5])}
            events = [StepResult(plan.step, plan.epoch, pack_int32(tokens), step_us - 100, forced=forced)]

    def _carry_out(self, plan: StepPlan) -> list[int]:
        guesses = unpack_int32(plan.drafts[0]).tolist() if plan.drafts else []
        draws = self.drawn or not plan.prefill or unpack_int32(plan.prefill, 5)[0, 4]
        tokens = [-1] * (1 + len(guesses)) if draws else []
        for place in range(len(tokens)):
            tokens[place] = self.answer[min(self.drawn, len(self.answer) - 1)]
            self.drawn += 1
            if place == len(guesses) or guesses[place] != tokens[place]:
                break
        self.drafted.append((self.drawn, len(guesses)))
        return tokens


def test_steps_are_calm_until_something_is_foreseen() -> None:
    """A text that cannot be foreseen, then a copy of the prompt: drafts begin, though steps were calm before."""
    rng = random.Random(5)
    prompt, new = [rng.randrange(50_000) for _ in range(300)], [rng.randrange(50_000) for _ in range(900)]
    alone = Alone(prompt, [*new, *prompt], 1000)
    assert alone.calm > 0.9 * len(new), "looking for drafts does not end calm steps"
    assert sum(count for at, count in alone.drafted if at <= len(new)) < 20
    assert sum(count for _, count in alone.drafted) > 100
    source = alone.engine.scheduler.drafting.source
    assert isinstance(source, Drafter)
    assert not source._lengths.bubble._planned, "all steps are answered"


@pytest.mark.parametrize("step_us", [1000, 10_000])
def test_what_a_grammar_demands_is_drafted(step_us: int) -> None:
    """Of every 20 tokens twelve: also behind calm steps, and though nothing else can be foreseen."""
    rng = random.Random(6)
    answer = [rng.randrange(50_000) for _ in range(1200)]
    plain, told = Alone([1, 2, 3], answer, step_us), Alone([1, 2, 3], answer, step_us, demanded=12)
    assert told.engine.counters.accepted_drafts > 200
    assert len(told.drafted) < len(plain.drafted) - 200
    assert told.engine.counters.output_tokens == plain.engine.counters.output_tokens


def test_what_is_foretold_must_be_ids() -> None:
    alone = Alone([1, 2, 3], [4, 5], 1000)
    engine = alone.engine
    submit = Submit(2, pack_int32([1, 2]), 2, 9, Sampling(), prediction=b"")
    plan = engine.step([Request.of(2, submit)], 1.0).plan
    assert plan is not None
    ready = engine.step([StepResult(plan.step, plan.epoch, pack_int32([4]), 9, forced={2: b"abc"})], 1.1)
    assert "no int32" in ready.problem
