"""Step and move costs learned from noisy machines."""

from __future__ import annotations

import random

import pytest

from trunkline.controller.tiers.costs import PRIOR_US, StepCosts


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
