"""How much is drafted: what is likely and cheap, nothing where it would cost more, nothing across tenants."""

from __future__ import annotations

import random
from collections.abc import Sequence as Items
from math import log

import numpy as np
import pytest
from controller.draft_harness import CONFIG, Replay, known_costs, sequence_of, stream_of
from seeds import seeds

from trunkline.controller.drafts import drafter as drafter_module
from trunkline.controller.drafts import tenant_texts as tenant_module
from trunkline.controller.drafts.acceptance import TOKEN_SLOTS, Acceptance, Fit, Others, Source
from trunkline.controller.drafts.drafter import Drafter
from trunkline.controller.drafts.length import BYSTANDER, MARGIN, ROW_LEAST, WORTH_GOAL, Bubble, Lengths
from trunkline.controller.drafts.text_index import MATCH_MAX, TextIndex
from trunkline.controller.messages import Submit
from trunkline.controller.sequences.sequence import Request, Sequence, SequenceGroup
from trunkline.controller.tiers.costs import StepCosts
from trunkline.kvstore.chunks import pack_int32
from trunkline.worker.messages import Sampling

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
