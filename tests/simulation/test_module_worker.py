"""The simulated workers and the oracle of prompts with modules: a prompt planned by hand, and how wrong layouts
are noticed."""

from __future__ import annotations

import pytest
from simulation.layout import Layout
from simulation.model import MODULES, extend_seen, next_token, text_token
from simulation.module_oracle import expected_module_output, prompt_tokens, reaches, stored_texts
from simulation.module_prompts import layout, text
from simulation.worker import SimulatedWorkers

from trunkline.kvstore.chunks import OPEN_COUNT, Extent, pack_int32, unpack_int32
from trunkline.worker.messages import Join, Sampling, StepPlan

CHUNK = 4
ROOT = [1, 2, 3]
CITY = [4, 5, 6, 7, 8]
OWN = [9, 10]
PROMPT = layout([text(ROOT, 0), text(CITY, 6, parent=0, seen=[(0, 1), (3, 5)])], [(4, 1), (12, 1)])


def packed(*extents: tuple[int, int, int, int, int]) -> bytes:
    return pack_int32([value for extent in extents for value in extent])


def join(batch_seq_id: int, tokens: list[int], first: int, blocks: list[int], extents: bytes) -> Join:
    return Join(
        batch_seq_id, pack_int32(tokens), first, first + len(tokens), pack_int32(blocks), Sampling(), extents
    )


def encoded(city_base: int = 6) -> SimulatedWorkers:
    """Root in block 0, the city in blocks 1 and 2, as two sequences computed them one after the other."""
    group = SimulatedWorkers(8, CHUNK)
    first = join(1, ROOT, 0, [0], packed((0, 0, OPEN_COUNT, 0, 0)))
    group.execute(StepPlan(1, 1, joins=[first], prefill=pack_int32([1, 0, 3, 0, 0])), {1: {}})
    shift = 6 - city_base
    second = join(2, CITY, 3, [0, 1, 2], packed((0, 0, 3, 0, 0), (1, 0, OPEN_COUNT, city_base, shift)))
    plan = StepPlan(2, 1, leaves=pack_int32([1]), joins=[second], prefill=pack_int32([2, 3, 5, 3, 0]))
    group.execute(plan, {2: {}})
    return group


EXTENTS = [(0, 0, 3, 0, 0), (1, 0, 1, 6, 0), (1, 3, 2, 9, 0), (3, 0, 1, 4, 0), (3, 1, OPEN_COUNT, 12, 0)]


def ask(group: SimulatedWorkers, extents: list[tuple[int, int, int, int, int]]) -> list[int]:
    """The prompt, and two more tokens."""
    joined = join(3, OWN, 6, [0, 1, 2, 3], packed(*extents))
    plan = StepPlan(3, 1, leaves=pack_int32([2]), joins=[joined], prefill=pack_int32([3, 6, 2, 6, 1]))
    output = list(unpack_int32(group.execute(plan, {3: {}}).tokens))
    for step in (4, 5):
        rows = {"rows": pack_int32([3]), "runs": b""} if step == 4 else {}
        output += list(unpack_int32(group.execute(StepPlan(step, 1, **rows)).tokens))  # type: ignore[arg-type]
    return [int(token) for token in output]


@pytest.mark.parametrize("city_base", [6, 2, 30])
def test_a_prompt_by_hand_leads_to_what_the_oracle_says(city_base: int) -> None:
    """Wherever the city was computed: its order counts, not its distance."""
    extents = [(*e[:3], city_base + e[3] - 6, 6 - city_base) if e[0] in (1, 2) else e for e in EXTENTS]
    assert ask(encoded(city_base), extents) == expected_module_output(PROMPT, OWN, 0, 3)


def test_the_order_of_extents_changes_nothing() -> None:
    assert ask(encoded(), [EXTENTS[i] for i in (2, 0, 1, 3, 4)]) == expected_module_output(PROMPT, OWN, 0, 3)


def test_the_oracle_token_by_token() -> None:
    root = [text_token(MODULES, 1)]
    seen = extend_seen(MODULES, root[0])
    root.append(text_token(seen, 2))
    stored = stored_texts([text([1, 2], 0), text([3], 7, parent=0)])
    city = text_token(extend_seen(seen, root[1]), 3)
    assert stored == [root, [city]]
    prompt = layout([text([1, 2], 0, seen=[(0, 1)]), text([3], 7, parent=0)], [(2, 1), (9, 1)])
    assert prompt_tokens(prompt, [30, 31]) == [1, 30, 3, 31]
    seen = extend_seen(MODULES, root[0])
    seen = extend_seen(seen, text_token(seen, 30))
    seen = extend_seen(seen, city)
    seen = extend_seen(seen, text_token(seen, 31))
    assert expected_module_output(prompt, [30, 31], 5, 1) == [next_token(seen, 5)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([EXTENTS[0], (1, 0, 1, 6, -4), *EXTENTS[2:]], "two tokens act"),
        ([*EXTENTS[:4], (3, 1, OPEN_COUNT, 10, 0)], "two tokens act"),
        ([*EXTENTS[:4], (3, 1, OPEN_COUNT, 7, 0)], "two tokens act"),
        ([EXTENTS[0], (1, 0, 1, 7, -1), *EXTENTS[2:]], "another position than is assumed"),
        ([EXTENTS[0], (1, 0, 1, 6, 0), (2, 1, 2, 9, 0), *EXTENTS[3:]], "nobody computed"),
    ],
)
def test_wrong_layouts_are_noticed(wrong: list[tuple[int, int, int, int, int]], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        ask(encoded(), wrong)


def test_text_that_saw_something_else_is_noticed() -> None:
    """The city is computed without its root: everything else is as it should be."""
    group = SimulatedWorkers(8, CHUNK)
    first = join(1, ROOT, 0, [0], packed((0, 0, OPEN_COUNT, 0, 0)))
    second = join(2, CITY, 0, [1, 2], packed((0, 0, OPEN_COUNT, 6, 0)))
    group.execute(StepPlan(1, 1, joins=[first], prefill=pack_int32([1, 0, 3, 0, 0])), {1: {}})
    plan = StepPlan(2, 1, leaves=pack_int32([1]), joins=[second], prefill=pack_int32([2, 0, 5, 0, 0]))
    group.execute(plan, {2: {}})
    assert ask(group, EXTENTS) != expected_module_output(PROMPT, OWN, 0, 3)


def test_text_that_was_computed_farther_from_its_root_is_noticed_if_that_counts() -> None:
    """Where it may relocate, it is as good as any other."""
    moved = [(*e[:4], 3) if e[0] in (1, 2) else e for e in EXTENTS[:3]] + [
        (3, 0, 1, 4, 0),
        (3, 1, OPEN_COUNT, 15, 0),
    ]
    there = layout([text(ROOT, 0), text(CITY, 9, parent=0, seen=[(0, 1), (3, 5)])], [(4, 1), (15, 1)])
    assert ask(encoded(), moved) == expected_module_output(there, OWN, 0, 3)
    joined = join(3, OWN, 6, [0, 1, 2, 3], packed(*moved))
    plan = StepPlan(3, 1, leaves=pack_int32([2]), joins=[joined], prefill=pack_int32([3, 6, 2, 6, 1]))
    with pytest.raises(AssertionError, match="farther from"):
        encoded().execute(plan, {3: reaches(there)})


def test_rows_that_do_not_share_a_text_are_noticed() -> None:
    group = encoded()
    own = [
        join(3 + i, [20 + i], 3, [0, 4 + i], packed((0, 0, 3, 0, 0), (1, 0, OPEN_COUNT, 5, 0))) for i in range(2)
    ]
    plan = StepPlan(3, 1, leaves=pack_int32([2]), joins=own, prefill=pack_int32([3, 3, 1, 3, 1, 4, 3, 1, 3, 1]))
    group.execute(plan, {3: {}, 4: {}})
    alone = StepPlan(4, 1, rows=pack_int32([3, 4]), runs=b"")
    with pytest.raises(AssertionError, match="each for itself"):
        group.execute(alone)


def test_a_cut_still_has_to_act_without_gaps() -> None:
    extents = [Extent(0, 0, 4, 0, 0), Extent(2, 0, OPEN_COUNT, 8, -3)]
    with pytest.raises(AssertionError, match="where the one before ends"):
        Layout(packed(*extents), CHUNK)
    assert Layout(packed(*extents), CHUNK, modules=True).cell(4).acting == 5
