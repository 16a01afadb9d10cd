"""How much is drafted: what is likely and cheap, nothing where it would cost more, nothing across tenants."""

from __future__ import annotations

import random
from collections.abc import Sequence as Items
from math import log

import numpy as np
import pytest
from seeds import seeds

from trunkline.controller.drafts import drafter as drafter_module
from trunkline.controller.drafts import tenant_texts as tenant_module
from trunkline.controller.drafts.acceptance import TOKEN_SLOTS, Acceptance, Fit, Others, Source
from trunkline.controller.drafts.allowance import FIRST, MOST, SHARE, Allowance
from trunkline.controller.drafts.drafter import Drafter
from trunkline.controller.drafts.follower import Follower
from trunkline.controller.drafts.length import BYSTANDER, MARGIN, ROW_LEAST, WORTH_GOAL, Bubble, Lengths
from trunkline.controller.drafts.text_index import MATCH_MAX, TextIndex
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import Submit
from trunkline.controller.sequences.sequence import Request, Sequence, SequenceGroup
from trunkline.controller.tiers.costs import StepCosts
from trunkline.kvstore.chunks import Int32Array, pack_int32
from trunkline.worker.messages import Sampling

CONFIG = EngineConfig(num_blocks=100, prefix_cache=False)
Machine = tuple[float, float, float]
"""Microseconds of a step, of each row of it, and of the pause behind a step that is waited for."""


def sequence_of(prompt: Items[int], slot: int, salt: bytes = b"") -> Sequence:
    submit = Submit(slot, pack_int32(list(prompt)), len(prompt), 10_000, Sampling(), salt=salt)
    sequence = SequenceGroup(Request.of(slot, submit), slot, 100_000, submit.sampling).members[0]
    sequence.slot = slot
    return sequence


def known_costs(base: float, row: float) -> StepCosts:
    costs = StepCosts(0.0)
    rng = random.Random(0)
    for _ in range(200):
        rows = rng.randint(1, 64)
        costs.observe(rows=rows, prefill_tokens=0, elapsed_us=base + rows * row)
    return costs


# Lengths


@pytest.mark.parametrize("seed", seeds(30))
def test_no_other_lengths_bring_much_more(seed: int) -> None:
    rng = random.Random(seed)
    base = rng.uniform(500, 20_000)
    row = base * rng.uniform(2 * ROW_LEAST, 0.2)
    costs = known_costs(base, row)
    lengths = Lengths(costs)
    rows = rng.randint(1, 6)
    chances = [
        [rate**ahead for ahead in range(1, rng.randint(1, 6))]
        for rate in (rng.uniform(0.05, 0.98) for _ in range(rng.randint(0, min(rows, 3))))
    ]

    def value(counts: Items[int]) -> float:
        """Return the logarithm of the product of all sequences' speeds, compared with those without drafts. The
        loss of those that have none counts more."""
        if not sum(counts):
            return 0.0
        gains = [sum(chain[:count]) for chain, count in zip(chances, counts, strict=True)]
        longer = (costs.step_us(rows + sum(counts), 0) + lengths.bubble.us) / costs.step_us(rows, 0)
        without = rows - sum(count > 0 for count in counts)
        return sum(log(1 + gain) for gain in gains) - (rows + BYSTANDER * without) * log(longer)

    choices: list[list[int]] = [[]]
    for chain in chances:
        choices = [[*counts, count] for counts in choices for count in range(len(chain) + 1)]
    best, nearly = max(map(value, choices)), 0.15  # a row's first draft helps it twice, which is not looked ahead
    chosen = lengths.choose(rows, 0, chances)
    if chosen is None:
        assert best <= len(chances) * log(MARGIN * WORTH_GOAL) + nearly
    else:
        assert best - nearly <= value(chosen) <= best + 1e-3


@pytest.mark.parametrize("seed", seeds(20))
def test_the_bound_refuses_nothing_that_would_be_chosen(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    refused = 0
    for _ in range(40):
        base = rng.uniform(300, 20_000)
        lengths = Lengths(known_costs(base, base * rng.uniform(0.0, 0.3)))
        lengths.worth._saved = rng.uniform(0.3, 2.0)
        rows = rng.choice([1, 2, 5, 12, 32])
        chains = [
            [rate**ahead for ahead in range(1, rng.randint(1, 25))] if rng.random() < 0.7 else []
            for rate in (rng.choice([0.98, rng.uniform(0.05, 0.98)]) for _ in range(rows))
        ]
        bounded = lengths.choose(rows, 0, chains)
        with monkeypatch.context() as patched:
            patched.setattr(Lengths, "may_pay", lambda _self, _rows, _tokens, gains: bool(gains))
            assert lengths.choose(rows, 0, chains) == bounded
        refused += bounded is None
    assert 0 < refused < 40


def test_a_busier_batch_drafts_less() -> None:
    costs = known_costs(4000.0, 200.0)
    lengths = Lengths(costs)
    chances = [0.8**ahead for ahead in range(1, 25)]
    drafted = [(lengths.choose(rows, 0, [chances] * rows) or [0])[0] for rows in (1, 4, 16, 64)]
    assert drafted == sorted(drafted, reverse=True)
    assert drafted[0] > 5
    assert drafted[-1] < 3


def test_the_pause_of_waiting_is_learnt() -> None:
    bubble, now = Bubble(), 0.0
    for step in range(1, 200):
        bubble.planned(step, now)
        now += 0.0123
        bubble.answered(step, now, 10_000)
    assert bubble.us == pytest.approx(2300, rel=0.01)
    for step in range(200, 400):  # two in flight: the next one begins when this one ends
        bubble.planned(step, now)
        if step > 200:
            now += 0.0101
            bubble.answered(step - 1, now, 10_000)
    assert bubble.us == pytest.approx(1980, rel=0.01), "what steps lose in any case is no part of it"
    bubble.answered(399, now + 100.0, 10_000)
    assert bubble.us > 1700, "a stall is not the usual pause"


# Acceptance


def test_chances_follow_what_happened() -> None:
    acceptance, fit, rng = Acceptance(), Fit(), random.Random(5)
    for _ in range(3000):
        match = rng.randint(2, MATCH_MAX)
        acceptance.learn(Source.CONTEXT, match, Others.NONE, is_right=rng.random() < (0.3 if match < 8 else 0.9))
    assert acceptance.chance(Source.CONTEXT, 4, Others.NONE) == pytest.approx(0.3, abs=0.1)
    assert acceptance.chance(Source.CONTEXT, 20, Others.NONE) == pytest.approx(0.9, abs=0.1)
    chances = acceptance.chances(Source.CONTEXT, 20, 10, 1.0, 0.0)
    assert len(chances) == 10
    assert chances[4] == pytest.approx(0.9**5, abs=0.15)
    for _ in range(50):
        fit.learn(0.9, is_right=False)
    assert fit.ratio < 0.2, "this sequence is not like the others"


# Streams


class Replay:
    """Streams whose tokens are known, decoded on a modelled machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.costs = StepCosts(0.0)
        self.drafter = Drafter(CONFIG, self.costs)
        self.now_us = 0.0
        self.plain_us = 0.0
        """Time that the same tokens would have taken without drafts, with as many rows at once."""
        self.tokens = self.drafted = self.accepted = self.steps = 0
        self.looked_us = 0.0
        """Price of what was looked at."""
        allowance = self.drafter._allowance
        spend = allowance.spend

        def counting(price_us: float) -> None:
            self.looked_us += price_us
            spend(price_us)

        allowance.spend = counting  # type: ignore[method-assign]

    def run(self, streams: list[tuple[list[int], list[int]]], rows: int, salts: Items[bytes] = (b"",)) -> None:
        """Decode streams of (prompt, answer), so many at once."""
        waiting = [(number, *stream) for number, stream in enumerate(streams)]
        running: dict[int, tuple[Sequence, list[int]]] = {}
        free, waits = list(range(rows)), False
        while waiting or running:
            while waiting and free:
                number, prompt, answer = waiting.pop(0)
                sequence = sequence_of(prompt, free.pop(), salts[number % len(salts)])
                running[sequence.slot] = sequence, list(answer)
                self.drafter.add(sequence)
            slots = np.array(sorted(running), np.intp)
            waits = self.step(slots, running, waits=waits)
            for slot in [slot for slot, (_, left) in running.items() if not left]:
                sequence, _ = running.pop(slot)
                self.drafter.remove(sequence)
                free.append(slot)

    def step(self, slots: np.ndarray, running: dict[int, tuple[Sequence, list[int]]], *, waits: bool) -> bool:
        """Compute a step; return whether the next one waits for its result."""
        base, row, pause = self.machine
        before = self.tokens
        drafts: Items[np.ndarray] = [np.empty(0, np.int32)] * len(slots)
        if waits:
            room = np.array([len(running[slot][1]) - 1 for slot in slots])
            found = self.drafter.propose(slots, room, 0)
            assert found is None or all(len(chain) <= most for chain, most in zip(found, room, strict=True))
            drafts = found or drafts
        drafted = sum(map(len, drafts))
        elapsed = base + row * (len(slots) + drafted)
        self.steps += 1
        self.drafted += drafted
        self.drafter.planned(self.steps, self.now_us / 1e6, drafted)
        self.drafter.study(is_idle=False)
        self.now_us += elapsed + pause * waits
        self.costs.observe(rows=len(slots) + drafted, prefill_tokens=0, elapsed_us=elapsed)
        self.drafter.answered(self.steps, self.now_us / 1e6, int(elapsed))
        waits = drafted > 0 or self.drafter.waits(slots)
        went_on = {slot: chain.tolist() for slot, chain in zip(slots.tolist(), drafts, strict=True)}
        while went_on:
            drawn = {slot: running[slot][1].pop(0) for slot in went_on}
            self.tokens += len(drawn)
            self.drafter.extend(np.array(list(drawn), np.intp), np.array(list(drawn.values()), np.int32))
            went_on = {
                slot: went_on[slot][1:]
                for slot, token in drawn.items()
                if went_on[slot] and went_on[slot][0] == token and running[slot][1]
            }
            self.accepted += len(went_on)
        self.plain_us += (self.tokens - before) * (base + row * len(slots)) / len(slots)
        return waits


def stream_of(rng: random.Random, copies: float, length: int) -> tuple[list[int], list[int]]:
    """Return a prompt and an answer that copies a part of it, with faults; the rest is of few words."""
    words = [[rng.randrange(2000) for _ in range(rng.randint(1, 6))] for _ in range(100)]
    prompt = [token for _ in range(length) for token in rng.choice(words)]
    answer: list[int] = []
    fault = rng.choice([0.01, 0.1, 0.4])
    while len(answer) < length:
        if rng.random() < copies:
            start = rng.randrange(len(prompt))
            for token in prompt[start : start + rng.randint(5, 80)]:
                answer.append(rng.randrange(2000) if rng.random() < fault else token)
        else:
            answer += [rng.randrange(2000), *rng.choice(words)]
    return prompt, answer


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


def test_an_answer_like_its_prompt_takes_few_steps() -> None:
    rng = random.Random(3)
    text = [rng.randrange(2000) for _ in range(600)]
    replay = Replay((10_000.0, 100.0, 500.0))
    replay.run([(text, text[20:])], 1)
    assert replay.steps < 80
    assert replay.accepted > 500


def test_a_text_that_cannot_be_foreseen_is_not_drafted() -> None:
    rng = random.Random(4)
    replay = Replay((10_000.0, 100.0, 500.0))
    replay.run([([rng.randrange(50) for _ in range(500)], [rng.randrange(50) for _ in range(2000)])], 1)
    assert replay.drafted < 0.05 * replay.tokens


@pytest.mark.parametrize(("prediction", "foreseen"), [([5, 6, 7, 8], [5, 6, 7, 8]), ([], []), (None, [])])
def test_a_request_says_what_it_expects_or_that_it_wants_no_drafts(
    prediction: list[int] | None, foreseen: list[int]
) -> None:
    drafter = Drafter(CONFIG, known_costs(1e6, 1.0))
    packed = None if prediction is None else pack_int32(prediction)
    submit = Submit(1, pack_int32([5, 6, 5]), 3, 100, Sampling(), prediction=packed)
    sequence = SequenceGroup(Request.of(1, submit), 1, 1000, submit.sampling).members[0]
    sequence.slot = 0
    drafter.add(sequence)
    assert not drafter.study(is_idle=False)
    found = drafter.propose(np.array([0]), np.array([10]), 0)
    assert (found[0].tolist() if found else []) == foreseen
    assert drafter.is_prediction(0) == bool(foreseen)
    for token in (6, 5):  # as in the prompt
        drafter.extend(np.array([0]), np.array([token], np.int32))
    found = drafter.propose(np.array([0]), np.array([10]), 0)
    assert (found is None) == (prediction is None)
    drafter.remove(sequence)
    while drafter.study(is_idle=True):
        assert prediction is not None
    assert drafter.nbytes == (
        0 if prediction is None else TextIndex.bytes_for(tenant_module.FIRST_TOKENS) + Acceptance.nbytes
    )


def test_short_matches_are_as_sure_as_the_tokens_around_them() -> None:
    """Behind a 1 stands a 7 always; behind a 2 and in place of an 8 anything. Sequences that follow know it."""
    rng, acceptance = random.Random(9), Acceptance()
    for _ in range(60):
        for last, token, is_right in ((1, 7, True), (2, 8, rng.random() < 0.1), (3, 9, rng.random() < 0.5)):
            chance = 0.5 * acceptance.behind.ratio(last) * acceptance.of.ratio(token)
            acceptance.behind.learn(last, chance, is_right=is_right)
            acceptance.of.learn(token, chance, is_right=is_right)
    for last, token, low, high in ((1, 7, 0.72, 1.0), (2, 8, 0.0, 0.3), (3, 9, 0.35, 0.65), (4, 5, 0.5, 0.5)):
        assert low <= 0.5 * acceptance.behind.ratio(last) * acceptance.of.ratio(token) <= high
    shared = acceptance.of.ratio(7 + TOKEN_SLOTS)
    assert shared == acceptance.of.ratio(7) > 1.2 > 1.0 == acceptance.of.ratio(100)


# Tenants, memory


def test_tenants_have_no_drafts_of_each_other() -> None:
    rng = random.Random(6)
    answers = [[rng.randrange(100_000) for _ in range(200)] for _ in range(4)]
    streams = [([number], answer) for number, answer in enumerate(answers * 2)]
    alone = Replay((10_000.0, 100.0, 500.0))
    alone.run(streams, 1)
    assert alone.accepted > 600, "of a tenant's own outputs"
    apart = Replay((10_000.0, 100.0, 500.0))
    apart.run(streams, 1, [b"a", b"a", b"a", b"a", b"b", b"b", b"b", b"b"])
    assert apart.drafted == 0


def test_how_often_a_tenant_is_drafted_does_not_depend_on_others() -> None:
    """Nor on whether their drafts are right: what is learnt of a tenant's drafts counts for its own only."""
    rng = random.Random(11)
    foreseen, unforeseen = ([stream_of(rng, copies, 300) for _ in range(6)] for copies in (1.0, 0.0))
    mine = stream_of(rng, 0.7, 400)
    proposed = []
    for others in (foreseen, unforeseen, []):
        drafter = Drafter(CONFIG, known_costs(20_000.0, 100.0))
        for prompt, answer in others:
            draft_along(drafter, sequence_of(prompt, 0, b"other"), answer)
        proposed.append(draft_along(drafter, sequence_of(mine[0], 0, b"mine"), mine[1]))
    assert proposed[0] == proposed[1] == proposed[2]
    assert sum(map(len, proposed[0])) > 200
    shared = Drafter(CONFIG, known_costs(20_000.0, 100.0))
    for prompt, answer in unforeseen:
        draft_along(shared, sequence_of(prompt, 0, b"mine"), answer)
    assert draft_along(shared, sequence_of(mine[0], 0, b"mine"), mine[1]) != proposed[0], "of its own it does"


def draft_along(drafter: Drafter, sequence: Sequence, answer: list[int]) -> list[list[int]]:
    """Follow a sequence with enough credit; return what would be drafted behind each of its tokens."""
    slots, found = np.array([0]), []
    drafter.add(sequence)
    drafter.study(is_idle=False)
    for token in answer:
        drafter._allowance.saved(1e6)
        drafter.extend(slots, np.array([token], np.int32))
        proposed = drafter.propose(slots, np.array([24]), 0)
        found.append(proposed[0].tolist() if proposed else [])
    drafter.remove(sequence)
    while drafter.study(is_idle=True):
        pass
    return found


def test_what_a_request_of_the_tenant_has_asked_is_drafted_to_others() -> None:
    """Prompts, too: one session has read what another one writes."""
    rng = random.Random(8)
    files = [[rng.randrange(100_000) for _ in range(400)] for _ in range(4)]
    streams = [(file, [1, 2, 3]) for file in files] + [([number], file[100:]) for number, file in enumerate(files)]
    alone = Replay((10_000.0, 100.0, 500.0))
    alone.run(streams, 1)
    assert alone.accepted > 1000
    apart = Replay((10_000.0, 100.0, 500.0))
    apart.run(streams, 1, [b"a"] * 4 + [b"b"] * 4)
    assert apart.drafted == 0


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_module, "TENANTS_MAX", 3)
    monkeypatch.setattr(drafter_module, "INDEX_BYTES_MAX", 5 * TextIndex.bytes_for(5000))
    monkeypatch.setattr(drafter_module, "FOLLOWED_MAX", 20)
    drafter = Drafter(CONFIG, StepCosts(0.0))
    most = 5 * TextIndex.bytes_for(5000) + 3 * (
        TextIndex.bytes_for(tenant_module.FIRST_TOKENS) + Acceptance.nbytes
    )
    rng = random.Random(7)
    running: dict[int, Sequence] = {}
    for _ in range(800):
        slot = rng.randrange(40)
        if slot in running and rng.random() < 0.3:
            drafter.remove(running.pop(slot))
        elif slot not in running:
            running[slot] = sequence_of([1, 2, 3] * rng.randint(1, 300), slot, bytes([rng.randrange(10)]))
            drafter.add(running[slot])
        slots = np.array(sorted(running), np.intp)
        drafter.extend(slots, np.array([rng.randrange(5) for _ in slots], np.int32))
        drafter.study(is_idle=rng.random() < 0.1)
        assert drafter.nbytes <= most
    assert drafter.nbytes > 0
    for sequence in running.values():
        drafter.remove(sequence)
    while drafter.study(is_idle=True):
        pass
    assert drafter.nbytes == 3 * (TextIndex.bytes_for(tenant_module.FIRST_TOKENS) + Acceptance.nbytes)
