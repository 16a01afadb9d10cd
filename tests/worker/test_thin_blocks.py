"""Models in which some layers have a window, through the real engine and a real runner, where few blocks have
memory for these layers: long texts equal those of `transformers`. What becomes thin is spoilt (`thin_driver.py`).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from worker.beam_driver import Case, check, expected_hypotheses
from worker.checkpoints import Models, assert_greedy, transformers_logits
from worker.driver import run_config
from worker.engine_driver import replay
from worker.ranks import run_ranks
from worker.thin_driver import (
    BLOCKS,
    FAMILIES,
    SHARE,
    WINDOW,
    random_tokens,
    runner_of,
    small,
    spoil,
    with_windows,
)

from trunkline.controller.messages import BeamSearch
from trunkline.controller.reports import StepResult
from trunkline.worker.errors import WorkerConfigError
from trunkline.worker.loading import load_runner
from trunkline.worker.messages import StepPlan


@pytest.fixture(scope="module", params=FAMILIES)
def mixed(models: Models, request: pytest.FixtureRequest) -> Path:
    return with_windows(models, request.param)


@pytest.fixture(scope="module")
def gemma(models: Models) -> Path:
    return models("gemma3", sliding_window=WINDOW, head_dim=32)


def test_turns_of_long_texts(mixed: Path) -> None:
    """Prompts with a common beginning, some of which are preempted, then the next turns."""
    rng = np.random.default_rng(1)
    head = random_tokens(rng, 70)
    prompts = [head + random_tokens(rng, int(rng.integers(20, 160))) for _ in range(3)]
    simulation = small(mixed)
    thinned = spoil(simulation)
    engine = simulation.engine
    assert (engine.config.part_window, engine.config.whole_blocks) == (WINDOW, 16)
    requests = [simulation.submit(prompt, 24, temperature=0.0) for prompt in prompts]
    for _ in range(3):
        for _ in range(8):
            simulation.step()
        if running := engine.scheduler.running():
            engine.scheduler.preempt(running[-1].group, simulation.now)
    simulation.run()
    first = [simulation.streams[request] for request in requests]
    following = [
        simulation.submit(s.prompt + s.output + random_tokens(rng, 9), 24, temperature=0.0) for s in first
    ]
    simulation.run()
    second = [simulation.streams[request] for request in following]
    for stream in first + second:
        assert len(stream.output) == 24
        assert_greedy(mixed, stream)
    assert any(stream.cached_tokens for stream in second)
    assert max(len(stream.prompt) for stream in second) > 16 * 8, "longer than all memory for layers with a window"
    assert engine.counters.preemptions > 0
    assert len(thinned) > 20


def test_the_next_turn_finds_all_before_it(gemma: Path) -> None:
    """Also where the memory for layers with a window holds a fraction of it; a request that leaves midway, where
    that memory was given back, computes from the start, and its own next turn finds it."""
    rng = np.random.default_rng(2)
    simulation = small(gemma)
    spoil(simulation)
    prompt = random_tokens(rng, 300)
    first = simulation.streams[simulation.submit(prompt, 30, temperature=0.0)]
    simulation.run()
    turn = simulation.submit(first.prompt + first.output + [1, 2, 3], 20, temperature=0.0)
    simulation.run()
    second = simulation.streams[turn]
    assert second.cached_tokens == 329
    assert_greedy(gemma, second)
    midway = simulation.streams[simulation.submit([*prompt[:150], 5, 6, 7], 20, temperature=0.0)]
    simulation.run()
    assert midway.cached_tokens == 0
    assert_greedy(gemma, midway)
    third = simulation.streams[simulation.submit(midway.prompt + midway.output + [1], 8, temperature=0.0)]
    simulation.run()
    assert third.cached_tokens == 172
    assert_greedy(gemma, third)
    again = simulation.streams[
        simulation.submit(second.prompt + second.output + [4], 8, temperature=0.0)
    ]  # below what was computed anew
    simulation.run()
    assert again.cached_tokens is not None
    assert_greedy(gemma, again)


def test_samples_beams_cuts_and_scores(gemma: Path) -> None:
    """What keeps KV of all layers is the same beside what does not."""
    rng = np.random.default_rng(3)
    prompt = random_tokens(rng, 130)
    found = []
    for share in (0.5, 1.0):
        simulation = small(gemma, 100, window_share=share)
        if share < 1:
            spoil(simulation)
        plain = simulation.submit(prompt, 30, seed=1)
        samples = simulation.submit(prompt, 30, seed=2, n=3)
        simulation.run()
        cut = simulation.submit(prompt, 30, seed=3, drops=((16, 64),))
        scored = simulation.submit(prompt[:80], 10, seed=4, prompt_logprobs=1)
        simulation.run()
        outputs = [simulation.streams[request].outputs for request in (plain, samples, scored)]
        found.append(outputs)
        assert len(simulation.streams[cut].output) == 30
    assert found[0] == found[1]
    expected = transformers_logits(gemma, prompt[:80]).log_softmax(dim=-1)
    for position, row in simulation.streams[scored].scored.items():
        assert abs(row[0] - float(expected[position - 1, prompt[position]])) < 1e-4


def test_searches_beside_long_texts(gemma: Path) -> None:
    """Beams read KV of all layers: also of a beginning that a plain request has left thin, and while another long
    text needs that memory."""
    rng = np.random.default_rng(6)
    simulation = small(gemma, 100, window_share=0.4)
    thinned = spoil(simulation)
    prompt = random_tokens(rng, 300)
    simulation.submit(prompt, 10, temperature=0.0)
    simulation.run()
    cases = []
    for length in (60, 45):
        case = Case(prompt[:length], BeamSearch(3, 1.0, None), limit=14)
        cases.append((simulation.submit(case.prompt, 14, beam=case.spec, n=3), case))
    other = simulation.streams[simulation.submit(random_tokens(rng, 280), 20, temperature=0.0)]
    simulation.run()
    assert len(thinned) > 20
    assert_greedy(gemma, other)
    for request, case in cases:
        check(simulation.streams[request].hypotheses or [], expected_hypotheses(gemma, case))


@pytest.mark.processes
def test_two_ranks_say_the_same(models: Models) -> None:
    """They are given the plans of a long prompt and its next turn, and give their memory back for real."""
    folder = models("gemma3", sliding_window=WINDOW, head_dim=64)  # a rank has one of two heads
    rng = np.random.default_rng(5)
    simulation = small(folder)
    runner = runner_of(simulation)
    execute, plans, tokens = runner.execute, list[StepPlan](), list[bytes]()

    def record(plan: StepPlan) -> StepResult | None:
        result = execute(plan)
        plans.append(plan)
        tokens.append(result.tokens if result is not None else b"")
        return result

    runner.execute = record  # type: ignore[method-assign]
    prompt = random_tokens(rng, 250)
    first = simulation.streams[simulation.submit(prompt, 30, temperature=0.0)]
    simulation.run()
    turn = simulation.submit(first.prompt + first.output + [1, 2, 3], 20, temperature=0.0)
    simulation.run()
    assert simulation.streams[turn].cached_tokens == 279
    assert any(plan.thinned for plan in plans)
    assert run_ranks(replay, 2, folder, BLOCKS, plans, SHARE)[0] == tokens


def test_a_share_is_refused_where_it_cannot_be(models: Models) -> None:
    for name, settings, reason in (
        ("gqa", {}, "others see all tokens"),
        ("mistral", {"sliding_window": WINDOW}, "others see all tokens"),
        ("gemma3", {}, "no whole page"),
    ):
        folder = models(name, **settings)
        with pytest.raises(WorkerConfigError, match=reason):
            load_runner(run_config(folder, window_share=0.5), lambda *_: None)
    for fields, reason in (
        ({"window_share": 0.0}, "more than 0"),
        ({"window_share": 0.5, "device": "cuda"}, "cpu"),
    ):
        with pytest.raises(WorkerConfigError, match=f"window_share is 0.*{reason}"):
            run_config(Path("model"), **fields).validate()
