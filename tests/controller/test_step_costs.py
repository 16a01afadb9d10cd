"""Prefill beside running streams: the time between two tokens stays near its target."""

from __future__ import annotations

import random
from statistics import fmean, median

import pytest

from trunkline.controller.tiers.costs import StepCosts
from trunkline.controller.tiers.pacing import prefill_budget

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
    """Somebody else takes two thirds of the machine, then leaves."""
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
