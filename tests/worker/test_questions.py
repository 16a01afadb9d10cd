"""What a puller asks a rank of a peer, without sockets or a clock."""

from __future__ import annotations

import random

import pytest
from seeds import seeds

from trunkline.worker.tiers.questions import AWAY_S, LOOKS_WITHIN_S, QUESTION_S, SILENT_S, Questions


@pytest.mark.parametrize("seed", seeds(30))
def test_every_part_is_answered_once(seed: int) -> None:
    """Random additions, answers and silences: nothing is lost, nothing comes twice, silence ends in time."""
    chance = random.Random(seed)
    questions: Questions[int] = Questions(chance.choice([10_000, 3_000_000, 30_000_000]))
    questions.needs_payload = chance.random() < 0.5
    now, last, wanted, ended = 0.0, 0, set(), set()
    asked: list[tuple[int, int, int]] = []
    for _ in range(400):
        now += chance.random()
        for _ in range(chance.randrange(20)):
            last += 1
            wanted.add(last)
            questions.add(last, now)
        while (question := questions.next(now)) is not None:
            asked += [(question.id, index, part) for index, part in enumerate(question.parts)]
        chance.shuffle(asked)
        while asked and chance.random() < 0.7:
            number, index, part = asked.pop()
            got = questions.take(number, index, now)
            assert got == (part if part in wanted else None)
            assert questions.take(number, index, now) is None
            wanted.discard(part)
            ended.add(part)
        if now >= questions.deadline():
            given_up = questions.fail(now)
            assert len(given_up) == len(set(given_up))
            assert set(given_up) == wanted
            ended |= wanted
            wanted.clear()
            assert questions.is_away(now + AWAY_S / 2)
        assert questions.is_idle == (not wanted) or not wanted
    assert wanted | ended == set(range(1, last + 1))


def test_a_trickle_is_not_an_answer() -> None:
    """A peer that sends one chunk of a question now and then fails, as one that is silent."""
    questions: Questions[int] = Questions(1)
    questions.needs_payload = False
    for part in range(60):
        questions.add(part, 0.0)
    question = questions.next(0.0)
    assert question is not None
    now = 0.0
    for index in range(50):
        if now >= questions.deadline():
            break
        questions.take(question.id, index, now)
        now += 1.0
    assert now <= QUESTION_S + 1.0


def test_a_time_in_which_the_puller_stood_still_is_no_silence() -> None:
    questions: Questions[int] = Questions(1)
    questions.needs_payload = False
    questions.add(1, 0.0)
    assert questions.next(0.0) is not None
    now = 0.0
    while now < questions.deadline():
        questions.look(now)
        now += LOOKS_WITHIN_S
    assert now <= SILENT_S + LOOKS_WITHIN_S, "it is silent though it was looked at in time"
    questions.fail(now)
    questions.add(2, now)
    question = questions.next(now)
    assert question is not None
    for _ in range(2):
        now += 1000.0
        questions.look(now)
        assert now < questions.deadline()
    assert questions.take(question.id, 0, now) == 2
