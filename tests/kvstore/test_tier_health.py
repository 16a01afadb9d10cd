"""A tier that fails is left alone, for longer each time, and never for more than a minute."""

from __future__ import annotations

import pytest

from trunkline.kvstore.tier import TierTotals
from trunkline.kvstore.tier_health import (
    FAILURES_IN_A_ROW,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    SURPRISE_MAX,
    TierHealth,
)


def pauses(health: TierHealth, count: int) -> list[float]:
    """How long the tier is left alone after each of `count` relapses."""
    now = 0.0
    found: list[float] = []
    while len(found) < count:
        health.ordered(is_write=False)
        health.failed(is_write=False, now=now, detail="no answer")
        if health.is_paused:
            began = now
            while not health.look(now):
                now += FIRST_PAUSE_S / 2
            found.append(now - began)
    return found


def test_pauses_double_up_to_a_minute_and_begin_anew_after_a_success() -> None:
    health = TierHealth(100.0, 4, 4, TierTotals())
    assert pauses(health, 9) == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    assert health.totals.failures == FAILURES_IN_A_ROW + 8, "one move on trial after each pause"
    health.ordered(is_write=True)
    health.succeeded(is_write=True, ordered=0.0, now=1.0, elapsed_us=10.0)
    assert health.problem == ""
    assert pauses(health, 1) == [FIRST_PAUSE_S]


def batches(health: TierHealth, count: int, size: int, read_us: float, start: float = 0.0) -> float:
    """Let batches of reads end, each batch at one time; return when the last one ended.

    Args:
        read_us: what one read costs while `size` of them are in flight.
    """
    now = start
    for _ in range(count):
        ordered, now = now, now + size * read_us / 1e6
        for _ in range(size):
            health.ordered(is_write=False)
        for _ in range(size):
            health.succeeded(is_write=False, ordered=ordered, now=now, elapsed_us=size * read_us)
    return now


@pytest.mark.parametrize("size", [1, 2, 16])
@pytest.mark.parametrize("is_guess", [True, False])
@pytest.mark.parametrize("start", [0.0, 1000.0])
def test_reads_whose_ends_become_known_at_once_share_the_time(size: int, is_guess: bool, start: float) -> None:
    health = TierHealth(300.0, 16, 4, TierTotals(), is_guess=is_guess)
    now = batches(health, 1, size, 500.0, start)
    assert health.read_us == pytest.approx(500.0 if is_guess else 500.0 - 200.0 * 0.9**size)
    batches(health, 200 // size, size, 500.0, now)
    assert health.read_us == pytest.approx(500.0, rel=1e-3)


def test_one_batch_does_not_raise_the_estimate_by_more_than_a_surprise() -> None:
    health = TierHealth(100.0, 16, 4, TierTotals())
    batches(health, 1, 16, 1e6)
    assert health.read_us == pytest.approx(100.0 * (1 + (SURPRISE_MAX - 1) * (1 - 0.9**16)))


def test_what_waits_for_a_long_step_to_be_known_is_not_slower_for_it() -> None:
    health = TierHealth(100.0, 16, 4, TierTotals())
    for _ in range(16):
        health.ordered(is_write=False)
    for _ in range(16):
        health.succeeded(is_write=False, ordered=0.0, now=0.5, elapsed_us=100.0)
    assert health.read_us == pytest.approx(100.0)
