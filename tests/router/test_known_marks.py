"""Edits of conversations that go on: what was marked, read and found before changes nothing."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import pytest
from router.edited_calls import TOOLS, report, step
from router.fake_controller import FakeController, drops_of, prompt_of
from seeds import seeds

from trunkline.router.api.marked_turns import KnownMarks, mark_conversation, part_spans
from trunkline.router.text.conversation_memory import LEAST
from trunkline.router.text.marked_text import Marks, PartPlace, PlacedText
from trunkline.router.text.token_ids import TokenIds
from trunkline.router.text.token_places import TokenPlaces
from trunkline.router.text.truncation import TokenSpan

MOST = 36
"""Messages that fit into the context, whatever they are."""


def ask(http: httpx.Client, messages: list[Any], salt: str, edit: dict[str, Any]) -> dict[str, Any]:
    body = {
        "model": "demo", "max_tokens": 9, "messages": messages, "tools": TOOLS, "cache_salt": salt,
        "context_management": {"edits": [edit]},
    }  # fmt: skip
    answer = http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["context_management"])


@pytest.mark.parametrize("seed", seeds(3))
def test_a_conversation_that_goes_on_is_edited_as_one_that_is_new(
    http: httpx.Client, fake: FakeController, seed: int
) -> None:
    rng = random.Random(seed)
    messages: list[Any] = [{"role": "user", "content": "How is the weather everywhere?"}]
    number = 0
    for turn in range(25):
        change = rng.random()
        if change < 0.15 and len(messages) > 5:  # the client goes back
            del messages[1 + 2 * rng.randrange(len(messages) // 2) :]
        elif change < 0.3 and len(messages) > 5:  # or changes what it had sent
            messages = copy.deepcopy(messages)
            result = next(each["content"] for each in reversed(messages) if isinstance(each["content"], list))
            result[0]["content" if result[0]["type"] == "tool_result" else "text"] = (
                report(rng.randrange(9)) + " °C"
            )
        elif change < 0.4:  # or says something that could be a mark
            messages += [{"role": "assistant", "content": "a"}, {"role": "user", "content": chr(0xFDD0 + turn)}]
        while len(messages) < LEAST or (len(messages) < MOST and rng.random() < 0.5):
            messages += step(number, rng.choice(["get_tides", "get_weather"]))
            number += 1
        edit = {
            "type": "clear_tool_uses_20250919",
            "trigger": {"type": "tool_uses", "value": 1},
            "keep": {"type": "tool_uses", "value": rng.randrange(2)},
            "clear_tool_inputs": rng.random() < 0.5,
        }
        known = ask(http, messages, "one", edit)
        submit = fake.behaviour.submits[-1]
        assert ask(http, messages, f"other {turn}", edit) == known
        assert drops_of(fake.behaviour.submits[-1]) == drops_of(submit)
        assert prompt_of(fake.behaviour.submits[-1]) == prompt_of(submit)
        del messages[1 : max(1, len(messages) - MOST) // 2 * 2 + 1]


@pytest.mark.parametrize(("differs", "known_parts"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2)])
def test_tokens_are_known_up_to_the_first_that_differs(differs: int, known_parts: int) -> None:
    """A token per character; the one behind a part counts, too. What is known is told from what is found by places
    that begin elsewhere."""
    ids = np.arange(6, dtype=np.int32)
    before = ids.copy()
    before[differs] = 9
    placed = PlacedText("abcdef", [PartPlace(0, 1, 2), PartPlace(1, 3, 4)])
    wrong = [TokenSpan(0, 2), TokenSpan(0, 4)]
    marking = mark_conversation([])
    assert marking is not None
    known = KnownMarks(marking, "", placed, before, wrong)

    def places(text: str, tokens: Sequence[int]) -> TokenPlaces:
        starts = np.arange(len(tokens))
        return TokenPlaces(starts, starts + 1)

    found = part_spans("abcdef", TokenIds(ids), placed, known, np.array([[0, 0], [3, 3]]), places)
    assert found == [*wrong[:known_parts], *[TokenSpan(1, 2), TokenSpan(3, 4)][known_parts:]]


@pytest.mark.parametrize("seed", seeds(3))
def test_a_text_with_marks_is_read_on_from_one_that_it_begins_like(seed: int) -> None:
    rng = random.Random(seed)
    marks = Marks.unused([])
    assert marks is not None
    pieces: list[str] = []
    known = None
    for _ in range(200):
        if rng.random() < 0.2:
            del pieces[rng.randrange(len(pieces) + 1) :]
        for _ in range(rng.randrange(4)):
            text = rng.choice(["", "a", "é b", " c\n", marks.opening]) if rng.random() < 0.3 else "a b"
            pieces.append(text if rng.random() < 0.4 else marks.around(len(pieces), text.strip(marks.opening)))
        marked = "".join(pieces)
        found = marks.read(marked, known)
        assert found == marks.read(marked)
        known = None if found is None else (marked, found)
