"""Pauses for controllers that fail."""

from __future__ import annotations

import random

from trunkline.router.routing.controllers import PAUSE_SECONDS_MAX, TOLERATED, Breaker


def open_breaker(now: float) -> Breaker:
    """One that has just opened."""
    breaker = Breaker()
    for left in range(TOLERATED, -1, -1):
        assert breaker.is_closed
        breaker.failed(now - left - 0.5, now - left)
    return breaker


def test_pauses_double_up_to_a_limit() -> None:
    breaker, now = open_breaker(10.0), 10.0
    pauses = [breaker.wait_seconds(now)]
    for ticket in range(7):
        assert not breaker.allows(now + pauses[-1] - 0.01)
        now += pauses[-1]
        assert breaker.allows(now)
        breaker.sent(ticket)
        breaker.ended(ticket)
        breaker.failed(now, now + 0.5)
        now += 0.5
        pauses.append(breaker.wait_seconds(now))
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    now += 30
    breaker.sent(99)
    assert not breaker.allows(now), "one may try"
    assert breaker.wait_seconds(now) == float("inf")
    breaker.succeeded(now)
    assert breaker.is_closed
    assert breaker.allows(now)


def test_a_loss_of_many_counts_once() -> None:
    breaker = Breaker()
    for sent_at in (1.0, 2.0, 3.0, 4.0, 5.0):
        breaker.failed(sent_at, 5.0)
    assert breaker.failures == 1
    breaker.succeeded(4.5)
    assert breaker.failures == 1, "what was sent before says nothing of how it is now"
    breaker.succeeded(5.5)
    assert breaker.failures == 0


def test_failures_that_are_not_in_a_row_are_tolerated() -> None:
    breaker = Breaker()
    for second in range(20):
        breaker.failed(second + 0.1, second + 0.2)
        assert breaker.allows(second + 0.3)
        breaker.succeeded(second + 0.3)


def test_one_that_leaves_makes_room_for_the_next_try() -> None:
    breaker = open_breaker(1.0)
    assert not breaker.allows(1.05)
    breaker.back()
    assert breaker.allows(1.1), "it says that it is ready"
    breaker.sent(1)
    assert not breaker.allows(1.2)
    breaker.ended(1)
    assert breaker.allows(1.3)
    breaker.sent(2)
    breaker.failed(1.3, 1.4)
    assert breaker.wait_seconds(1.4) == 2.0


def test_it_never_stays_closed_to_all() -> None:
    """Whatever happens, it allows something within the longest pause once nobody tries."""
    rng = random.Random(3)
    breaker, now, live, ticket = Breaker(), 1.0, {}, 0
    for _ in range(5000):
        now += rng.choice((0.0, 0.1, 1.0, 10.0))
        if rng.random() < 0.5:
            if breaker.allows(now) or rng.random() < 0.1:
                breaker.sent(ticket)
                live[ticket] = now
                ticket += 1
        elif live:
            number = rng.choice([*live])
            sent_at = live.pop(number)
            fate = rng.randrange(3)
            if fate == 1:
                breaker.succeeded(sent_at)
            breaker.ended(number)
            if fate == 2:
                breaker.failed(sent_at, now)
        if rng.random() < 0.05:
            breaker.back()
        if not live:
            assert breaker.allows(now + PAUSE_SECONDS_MAX)
