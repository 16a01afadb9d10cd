"""A tier that fails is left alone, for longer each time, and never for more than a minute."""

from __future__ import annotations

from trunkline.kvstore.tier import TierTotals
from trunkline.kvstore.tier_health import FAILURES_IN_A_ROW, FIRST_PAUSE_S, LONGEST_PAUSE_S, TierHealth


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
