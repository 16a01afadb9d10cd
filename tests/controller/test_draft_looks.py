"""What looking for drafts costs, and when it is done: as a credit admits, and not where nothing can pay."""

from __future__ import annotations

import random

import numpy as np
import pytest
from controller.draft_harness import CONFIG, Replay, known_costs, sequence_of, stream_of
from seeds import seeds

from trunkline.controller.drafts.allowance import FIRST, MOST, SHARE, Allowance
from trunkline.controller.drafts.drafter import HELD_MAX, Drafter
from trunkline.controller.drafts.follower import Follower
from trunkline.controller.tiers.costs import StepCosts
from trunkline.kvstore.chunks import Int32Array


@pytest.mark.parametrize("seed", seeds(12))
def test_drafts_never_cost_more_than_a_fiftieth(seed: int) -> None:
    rng = random.Random(seed)
    machine = rng.uniform(300, 20_000), rng.uniform(5, 1000), rng.uniform(50, 2000)
    rows = rng.choice([1, 2, 8, 24])
    copies = rng.choice([0.0, 0.05, 0.3, 1.0])
    streams = [stream_of(rng, copies, rng.randint(100, 500)) for _ in range(max(3, rows))]
    replay = Replay(machine)
    replay.run(streams, rows)
    assert replay.tokens == sum(len(answer) for _, answer in streams)
    learning = 40 * machine[2] + (FIRST + MOST) * (machine[0] + rows * machine[1])
    whole_us = replay.now_us + replay.looked_us
    assert whole_us <= 1.02 * replay.plain_us + learning, (machine, rows, copies)
    assert replay.accepted <= replay.drafted


@pytest.mark.parametrize("seed", seeds(5))
def test_looking_lives_on_its_share_and_on_what_was_saved(seed: int) -> None:
    allowance, rng, earned = Allowance(), random.Random(seed), 0.0
    for step in range(2000):
        plain_us, share = rng.uniform(300, 20_000), rng.choice([SHARE, SHARE / 3])
        allowance.step(plain_us, share)
        saved_us = 0.0 if allowance.is_broke else rng.choice([0.0, 0.0, 0.0, rng.uniform(-300, 300)])
        allowance.saved(saved_us)
        earned += share * plain_us + saved_us + (FIRST * plain_us if not step else 0.0)
        while not allowance.is_broke and rng.random() < 0.95:
            price = rng.uniform(1, 100)
            allowance.spend(price)
            earned -= price
        assert earned > -400, "a loss and a price"
        assert not (allowance.is_broke and allowance.is_rich)


def test_a_busy_batch_that_cannot_be_foreseen_is_rarely_looked_at() -> None:
    """Less than 1.5 us a token, beside 25 for every match: also where rows are taken to cost nothing."""
    rng = random.Random(8)
    texts = [[rng.randrange(5000) for _ in range(600)] for _ in range(32)]
    for row in (0.0, 250.0):
        replay = Replay((4000.0, row, 500.0))
        replay.run([(text[:100], text[100:]) for text in texts], 32)
        assert replay.drafted < 0.01 * replay.tokens
        assert replay.looked_us < 1.5 * replay.tokens + FIRST * (4000.0 + 32 * row)


def test_a_batch_in_which_no_draft_pays_is_considered_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of its rows copy their prompts, but rows are dear. With much credit, too."""
    rng, considered = random.Random(12), 0
    texts = [[rng.randrange(5000) for _ in range(400)] for _ in range(32)]
    draft = Follower.draft

    def counting(
        follower: Follower, count: int, least: float, *, thorough: bool
    ) -> tuple[Int32Array, list[float]]:
        nonlocal considered
        considered += 1
        return draft(follower, count, least, thorough=thorough)

    monkeypatch.setattr(Follower, "draft", counting)
    replay = Replay((2000.0, 200.0, 500.0))
    replay.run([(text, text[20:] if row % 2 else text[::-1][20:]) for row, text in enumerate(texts)], 32)
    assert replay.drafted < 0.01 * replay.tokens
    assert 20 < considered < replay.steps


def test_where_nothing_is_looked_at_no_credit_is_lost() -> None:
    """A row alone that comes after hours of a busy batch is looked at as at first."""
    drafter = Drafter(CONFIG, known_costs(400.0, 200.0))
    texts = [[row, *range(100)] for row in range(32)]
    sequences = [sequence_of(text, slot) for slot, text in enumerate(texts)]
    for sequence in sequences:
        drafter.add(sequence)
    slots = np.arange(32)
    for step in range(0, 60_000, 20):
        drafter.settle(slots, np.full((20, 32), step % 5000, np.int32), [step])
    assert drafter._lengths.share(32) == 0
    assert not drafter._allowance.is_broke


def test_what_is_waited_for_is_drafted_though_the_credit_is_gone() -> None:
    rng = random.Random(15)
    text = [rng.randrange(5000) for _ in range(300)]
    drafter = Drafter(CONFIG, known_costs(8000.0, 10.0))
    drafter.add(sequence_of(text, 0))
    slots = np.array([0])
    drafter.study(is_idle=False)
    for token in text[:20]:
        drafter.extend(slots, np.array([token], np.int32))
    drafter._rest = 20  # as when the credit was low
    assert drafter.waits(slots)
    drafter._allowance.spend(1e6)
    assert drafter._allowance.is_broke
    drafter.extend(slots, np.array([text[20]], np.int32))
    found = drafter.propose(slots, np.array([100]), 0)
    assert found is not None
    assert found[0].tolist() == text[21 : 21 + len(found[0])] != []


def test_rows_that_end_do_not_put_off_what_is_looked_at_of_others() -> None:
    """Nor are drafts paid for while no row can have one."""
    rng = random.Random(16)
    text = [rng.randrange(5000) for _ in range(300)]
    drafter, spent = Drafter(CONFIG, known_costs(8000.0, 10.0)), 0.0
    sequences = [sequence_of(text, slot) for slot in range(12)]
    for sequence in sequences:
        drafter.add(sequence)
    drafter.study(is_idle=False)
    drafter._allowance.step(8000.0, SHARE, 10_000)
    slots = np.arange(12)
    for token in text[:20]:
        drafter.extend(slots, np.full(12, token, np.int32))
    assert drafter._placed == 12
    drafter._rest = 6
    spend = drafter._allowance.spend

    def counting(price_us: float) -> None:
        nonlocal spent
        spent += price_us
        spend(price_us)

    drafter._allowance.spend = counting  # type: ignore[method-assign]
    for step, token in enumerate(text[20:23]):
        drafter.extend(slots, np.full(len(slots), token, np.int32))
        slots = slots[:-1]
        drafter.remove(sequences[len(slots)])
        drafter._waits = None
        assert not drafter.waits(slots)
        assert drafter._rest == 5 - step
    assert spent == 0


def test_losses_are_forgotten_by_steps_that_nobody_was_told_of_one_by_one() -> None:
    drafter, worth = Drafter(CONFIG, known_costs(8000.0, 10.0)), Drafter(CONFIG, StepCosts(0.0))._lengths.worth
    for each in (drafter._lengths.worth, worth):
        for _ in range(100):
            each.step(1, 1, 8000.0, 16_000.0)
        assert each.margin > 1.5
    drafter.add(sequence_of([1, 2, 3], 0))
    for step in range(0, 1000, 10):
        drafter.settle(np.array([0]), np.full((10, 1), 7, np.int32), [step])
    for _ in range(1000):
        worth.rest()
    assert drafter._lengths.worth.margin == pytest.approx(worth.margin)
    assert worth.margin < 1.2


def test_sequences_that_are_not_followed_do_not_keep_others_from_being_looked_at() -> None:
    rng = random.Random(14)
    text = [rng.randrange(5000) for _ in range(500)]
    looks, drafter = 0, Replay((2000.0, 100.0, 500.0)).drafter
    advance = drafter._advance

    def counting(follower: Follower) -> None:
        nonlocal looks
        looks += 1
        advance(follower)

    drafter._advance = counting  # type: ignore[method-assign]
    sequence = sequence_of(text, 0)
    drafter.add(sequence)
    drafter._rest = 8
    for step, token in enumerate(text[:200]):
        drafter.extend(np.array([0]), np.array([token], np.int32))
        if step % 5 == 0:
            drafter.remove(sequence_of(text, 1))
    assert looks > 10


def test_nothing_is_looked_at_where_even_right_drafts_bring_next_to_nothing() -> None:
    """Steps take as long as they have rows, so 32 rows that copy their prompts gain nothing. A row alone does."""
    rng = random.Random(13)
    texts = [[rng.randrange(5000) for _ in range(400)] for _ in range(32)]
    replay = Replay((400.0, 200.0, 300.0))
    lengths = replay.drafter._lengths
    replay.run([(text, text[20:]) for text in texts], 32)
    assert replay.drafted < 0.03 * replay.tokens, "one step, until rows are known to be dear"
    assert replay.looked_us < 2 * FIRST * (400.0 + 32 * 200.0)
    assert lengths.share(32) == 0
    assert 0 < lengths.share(12) < SHARE == lengths.share(1)
    drafted, steps = replay.drafted, replay.steps
    replay.run([(texts[0], texts[0][20:])], 1)
    assert replay.drafted > drafted + 200
    assert replay.steps < steps + 200


def test_a_stalled_step_does_not_end_drafts() -> None:
    """The machine stops for 60 ms while a step with right drafts runs, as if that had lost a hundred steps."""
    rng = random.Random(14)
    text = [rng.randrange(2000) for _ in range(1500)]
    replay, stalls = Replay((400.0, 100.0, 200.0)), 0
    answered = replay.drafter.answered

    def stalling(step: int, now: float, elapsed_us: int) -> None:
        nonlocal stalls
        if stalls == 0 and replay.drafted > 200:
            stalls, replay.now_us = 1, replay.now_us + 60_000
        answered(step, replay.now_us / 1e6, elapsed_us)

    replay.drafter.answered = stalling  # type: ignore[method-assign]
    replay.run([(text, text[20:])], 1)
    assert stalls == 1
    assert replay.steps < 90, "118 if all of it counted"


def test_where_rows_end_often_no_more_tokens_wait_than_may() -> None:
    """Each end gives what is held to all rows; those that go on may be looked at only much later. A place that was
    found before is lost then."""
    drafter, text, slots = Drafter(CONFIG, known_costs(400.0, 200.0)), list(range(300)), np.arange(32)
    drafter.add(sequence_of(text, 0))
    drafter.study(is_idle=False)
    for token in text[:30]:
        drafter.extend(slots[:1], np.array([token], np.int32))
    assert drafter._placed == 1
    for number in range(200):
        others = [sequence_of([number, slot], slot) for slot in range(1, 32)]
        for sequence in others:
            drafter.add(sequence)
        drafter.settle(slots, np.full((10, 32), number, np.int32), [number])
        for sequence in others:
            drafter.remove(sequence)
        assert drafter._followers[0].waiting_count < HELD_MAX
        assert drafter._placed == (drafter._followers[0].place is not None)
    assert drafter._placed == 0
