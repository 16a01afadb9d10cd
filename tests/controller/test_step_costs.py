"""Prefill beside running streams: the time between two tokens stays near its target."""

from __future__ import annotations

import random
from statistics import fmean, median

import pytest

from trunkline.controller.engine.engine import Engine
from trunkline.controller.engine.events import Event
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import Submit
from trunkline.controller.reports import StepResult
from trunkline.controller.sequences.sequence import Request
from trunkline.controller.tiers.costs import DECODE_STEPS_PER_OBSERVATION, PRIOR_US, StepCosts, prefill_budget
from trunkline.kvstore.chunks import pack_int32
from trunkline.worker.messages import Sampling

LEAST = 64
MOST = 1024


def run(
    machine: tuple[float, float, float], target_us: float, steps: int, rows: int, seed: int = 0
) -> tuple[list[float], list[int]]:
    """(time of each step without noise, its prompt tokens) of a noisy machine that always has prompts."""
    base, row, token = machine
    rng = random.Random(seed)
    costs = StepCosts(0.0)
    times, budgets = [], []
    for _ in range(steps):
        budget = prefill_budget(costs, rows, target_us, MOST, LEAST)
        time = base + row * rows + token * budget
        stall = 10.0 if rng.random() < 0.03 else 1.0
        elapsed = time * rng.lognormvariate(0.0, 0.1) * stall
        costs.observe(rows=rows, prefill_tokens=budget, elapsed_us=elapsed)
        times.append(time)
        budgets.append(budget)
    return times, budgets


@pytest.mark.parametrize(
    ("machine", "target_us"),
    [((200.0, 10.0, 3.0), 1500.0), ((20_000.0, 300.0, 900.0), 100_000.0), ((8000.0, 30.0, 25.0), 20_000.0)],
)
@pytest.mark.parametrize("rows", [4, 32])
def test_steps_converge_to_the_target(machine: tuple[float, float, float], target_us: float, rows: int) -> None:
    times, budgets = run(machine, target_us, 300, rows)
    settled = times[50:]
    assert median(settled) == pytest.approx(target_us, rel=0.1)
    assert max(settled) < 1.35 * target_us
    assert min(budgets) >= LEAST
    room = (target_us - machine[0] - machine[1] * rows) / machine[2]
    assert fmean(budgets[50:]) > 0.75 * min(room, MOST), "what fits is used"


def test_prompts_get_on_even_if_no_target_can_be_kept() -> None:
    times, budgets = run((20_000.0, 300.0, 900.0), 5000.0, 200, 32)
    assert budgets[20:] == [LEAST] * 180
    assert min(times) > 5000.0


def test_a_target_that_nothing_reaches_takes_nothing_away() -> None:
    _, budgets = run((200.0, 10.0, 3.0), 1e6, 100, 8)
    assert budgets == [MOST] * 100


def test_without_rows_or_target_there_is_nobody_to_wait() -> None:
    costs = StepCosts(0.0)
    assert prefill_budget(costs, 0, 100.0, MOST, LEAST) == MOST
    assert prefill_budget(costs, 8, 0.0, MOST, LEAST) == MOST


def test_the_budget_is_never_more_than_the_step_can_take() -> None:
    costs = StepCosts(0.0)
    assert prefill_budget(costs, 8, 1.0, 10, LEAST) == 10
    assert prefill_budget(costs, 8, 1e9, 10, LEAST) == 10
    for _ in range(100):
        costs.observe(rows=8, prefill_tokens=512, elapsed_us=0.0)
    assert prefill_budget(costs, 8, 1.0, MOST, LEAST) in range(LEAST, MOST + 1)


def test_the_budget_follows_the_machine() -> None:
    """Another program takes two thirds of the machine, then leaves."""
    costs = StepCosts(0.0)
    rng = random.Random(7)
    times: list[float] = []
    for step in range(400):
        slower = 3.0 if 150 <= step < 280 else 1.0
        rows = rng.randrange(8, 33)
        budget = prefill_budget(costs, rows, 120_000.0, MOST, LEAST)
        times.append(slower * (10_000.0 + 200.0 * rows + 200.0 * budget))
        costs.observe(rows=rows, prefill_tokens=budget, elapsed_us=times[-1] * rng.lognormvariate(0.0, 0.1))
    for quiet in (times[50:150], times[190:280], times[320:]):
        assert median(quiet) == pytest.approx(120_000.0, rel=0.15)


def noisy(rng: random.Random) -> float:
    """A factor of a shared machine: a tenth up or down, and a tenfold stall now and then."""
    return rng.lognormvariate(0.0, 0.1) * (10.0 if rng.random() < 0.03 else 1.0)


def test_before_anything_is_measured_the_priors_count() -> None:
    costs = StepCosts(swap_us_per_block=80.0)
    base, row, token = PRIOR_US
    assert costs.step_us(10, 100) == base + 10 * row + 100 * token
    assert costs.move_us == 40.0


@pytest.mark.parametrize("machine", [(200.0, 10.0, 3.0), (20_000.0, 300.0, 900.0), (8000.0, 30.0, 25.0)])
def test_costs_are_learned_from_a_noisy_machine(machine: tuple[float, float, float]) -> None:
    base, row, token = machine
    rng = random.Random(1)
    costs = StepCosts(0.0)
    for _ in range(300):
        rows, tokens = rng.randrange(1, 64), rng.choice((0, 0, 64, 256, 1024))
        elapsed = (base + row * rows + token * tokens) * noisy(rng)
        costs.observe(rows=rows, prefill_tokens=tokens, elapsed_us=elapsed)
    for rows, tokens in ((1, 0), (64, 0), (8, 100), (32, 1024)):
        assert costs.step_us(rows, tokens) == pytest.approx(base + row * rows + token * tokens, rel=0.35)
    assert costs.token_us == pytest.approx(token, rel=0.3)


def test_a_stall_hardly_matters_and_a_lasting_change_is_followed() -> None:
    costs = StepCosts(0.0)

    def steps(count: int, elapsed_us: float) -> float:
        for _ in range(count):
            costs.observe(rows=8, prefill_tokens=0, elapsed_us=elapsed_us)
        return costs.step_us(8, 0)

    assert steps(100, 5000.0) == pytest.approx(5000.0, rel=0.02)
    assert steps(1, 1e9) < 7000.0
    assert steps(20, 5000.0) == pytest.approx(5000.0, rel=0.05)
    assert steps(60, 20_000.0) == pytest.approx(20_000.0, rel=0.1)


def test_what_is_not_seen_is_not_forgotten() -> None:
    rng = random.Random(2)
    costs = StepCosts(0.0)
    for _ in range(200):
        rows, tokens = rng.randrange(1, 32), rng.randrange(512)
        costs.observe(rows=rows, prefill_tokens=tokens, elapsed_us=1000.0 + 20 * rows + 7 * tokens)
    for _ in range(3000):
        costs.observe(rows=16, prefill_tokens=0, elapsed_us=1320.0 * rng.lognormvariate(0.0, 0.1))
    assert costs.token_us == pytest.approx(7.0, rel=0.3)
    assert costs.step_us(16, 0) == pytest.approx(1320.0, rel=0.1)


def test_costs_are_never_negative() -> None:
    rng = random.Random(3)
    costs = StepCosts(0.0)
    for _ in range(500):
        costs.observe(rows=rng.randrange(9), prefill_tokens=rng.randrange(99), elapsed_us=rng.random() * 1e6)
        assert costs.token_us >= 0.0
        assert costs.step_us(0, 0) >= 0.0
        assert costs.step_us(1, 0) >= costs.step_us(0, 0)


def test_moves_are_no_part_of_the_step_and_are_learned_by_themselves() -> None:
    costs = StepCosts(swap_us_per_block=200.0)
    for _ in range(50):
        costs.observe(rows=4, prefill_tokens=0, elapsed_us=3000.0)
        costs.observe_moves(8, 8 * 500.0)
    assert costs.step_us(4, 0) == pytest.approx(3000.0, rel=0.05)
    assert costs.move_us == pytest.approx(500.0, rel=0.01)
    costs.observe_moves(1, 1e8)
    assert costs.move_us < 600.0, "one stall"


def test_swapping_is_preferred_where_moving_is_faster_than_computing() -> None:
    """PagedAttention §7.3: small blocks move slowly, large ones fast; recomputation does not care."""

    def learned(us_per_block: float) -> StepCosts:
        costs = StepCosts(us_per_block * 2)
        for tokens in [0, 100, 200, 400] * 20:
            costs.observe(rows=4, prefill_tokens=tokens, elapsed_us=2000.0 + 30.0 * tokens)
        return costs

    assert learned(100.0).prefers_swap(tokens=640, blocks=10)
    assert not learned(100.0).prefers_swap(tokens=40, blocks=10)
    assert not learned(2000.0).prefers_swap(tokens=640, blocks=10)


@pytest.mark.parametrize("elapsed_us", [400.0, 950.0, 1300.0])
def test_the_first_decode_step_says_what_others_take(elapsed_us: float) -> None:
    costs = StepCosts(0.0)
    costs.observe(rows=0, prefill_tokens=512, elapsed_us=20_000.0)
    assert costs.step_us(1, 0) > 1.5 * elapsed_us
    costs.observe_decode(1, rows=1, elapsed_us=elapsed_us)
    assert costs.step_us(1, 0) == pytest.approx(elapsed_us, rel=0.1)


def test_one_of_several_decode_steps_is_learnt_from() -> None:
    """A stall is one of them as often as others are, and noise moves the estimate by less than itself."""
    costs, rng = StepCosts(0.0), random.Random(1)
    costs.observe_decode(0, rows=4, elapsed_us=1000.0)
    before = costs.step_us(4, 0)
    for step in range(1, DECODE_STEPS_PER_OBSERVATION):
        costs.observe_decode(step, rows=4, elapsed_us=20.0 * before)
    assert costs.step_us(4, 0) == before
    for step in range(DECODE_STEPS_PER_OBSERVATION, 4000):
        costs.observe_decode(step, rows=4, elapsed_us=1000.0 * rng.lognormvariate(0.0, 0.15))
    assert costs.step_us(4, 0) == pytest.approx(1000.0, rel=0.12)


def test_the_time_that_steps_wait_for_copies_is_no_time_of_theirs() -> None:
    def learned(waited_us: int) -> float:
        engine = Engine(EngineConfig(num_blocks=16, chunk_size=16, max_context=96, token_budget=24, max_rows=8))
        events: list[Event] = [Request.of(1, Submit(1, pack_int32([1, 2, 3]), 3, 60, Sampling()))]
        for number in range(1, 20):
            while engine.step(events, 0.0).again:
                events = []
            events = [StepResult(number, 1, pack_int32([7]), 1000 + waited_us, waited_us=waited_us)]
        return engine.scheduler.costs.step_us(1, 0)

    assert learned(1) == learned(20_000) == pytest.approx(1000.0, rel=0.2)
