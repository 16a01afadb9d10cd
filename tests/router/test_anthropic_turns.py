"""Turns of `/v1/messages` that are translated as far as they are new, against those that are translated whole."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from seeds import seeds

from trunkline.router.api.anthropic_turns import behind_system, translated
from trunkline.router.api.known_turns import TurnMemory, Turns
from trunkline.router.errors import ApiError
from trunkline.router.text.conversation_memory import LEAST, MESSAGE_BYTES

Turn = dict[str, Any]


def block(rng: random.Random, role: str) -> dict[str, Any]:
    text: dict[str, Any] = {"type": "text", "text": rng.choice(("a", "b", "", "long " * 9))}
    if role == "assistant":
        call = {"type": "tool_use", "id": f"t{rng.randrange(9)}", "name": "f", "input": {"n": rng.randrange(3)}}
        found = rng.choice((text, call, {"type": "thinking", "thinking": "hm"}, {"type": "redacted_thinking"}))
    elif role == "user":
        result = {"type": "tool_result", "tool_use_id": "t1", "content": [text], "is_error": rng.random() < 0.2}
        found = rng.choice((text, result, {"type": "server_tool_use"}))
    else:
        found = text
    kept = {"cache_control": {"type": "ephemeral", "ttl": rng.choice(("5m", "1h"))}}
    return found | (kept if rng.random() < 0.1 else {})


def turn(rng: random.Random) -> Turn:
    role = rng.choice(("user", "user", "assistant", "assistant", "system"))
    if rng.random() < 0.4:
        return {"role": role, "content": rng.choice(("x", "y", ""))}
    return {"role": role, "content": [block(rng, role) for _ in range(rng.randrange(4))]}


@pytest.mark.parametrize("seed", seeds(4))
def test_what_is_remembered_changes_nothing(seed: int) -> None:
    """Conversations that go on, part, lose turns in the middle and come back, in a memory with room for some."""
    rng = random.Random(seed)
    memory = TurnMemory(rng.choice((60, 600)) * MESSAGE_BYTES)
    lists: list[list[Turn]] = [[turn(rng) for _ in range(LEAST)] for _ in range(3)]
    told: list[tuple[Turns, Turns]] = []
    for _ in range(500):
        turns = list(rng.choice(lists))
        change = rng.random()
        if change < 0.2:
            del turns[rng.randrange(len(turns)) :]
        elif change < 0.3:
            turns[rng.randrange(len(turns))] = turn(rng)
        turns += [turn(rng) for _ in range(rng.randrange(1, 4))]
        if rng.random() < 0.5:
            turns = copy.deepcopy(turns)
        found, whole = translated(turns, memory, b""), translated(turns, None, b"")
        assert found == whole
        told.append((found, copy.deepcopy(found)))
        lists[rng.randrange(3)] = turns[:40]
        assert memory.bytes <= memory.bytes_max
    assert all(found == then for found, then in told), "what was used again was changed"


@pytest.mark.parametrize("seed", seeds(1))
def test_a_system_message_is_as_a_first_turn(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        turns = [turn(rng) for _ in range(rng.randrange(1, 9))]
        found = translated(turns, None, b"")
        before = copy.deepcopy(found)
        whole = translated([{"role": "system", "content": "Be brief."}, *turns], None, b"")
        assert behind_system("Be brief.", found) == (whole.messages, whole.borders[1:])
        assert behind_system("", found) == (found.messages, found.borders)
        assert found == before


def test_only_what_is_new_is_looked_at() -> None:
    """What was translated is not read again: the same objects come back. Other tenants' are not found."""
    memory = TurnMemory(1 << 20)
    turns: list[Turn] = [{"role": ("user", "assistant")[at % 2], "content": f"{at}"} for at in range(LEAST)]
    first = translated(turns, memory, b"one")
    again = translated([*turns, {"role": "user", "content": "and?"}], memory, b"one")
    assert all(a is b for a, b in zip(first.messages[:-1], again.messages, strict=False))
    other = translated(turns, memory, b"two")
    assert not any(a is b for a, b in zip(first.messages, other.messages, strict=True))
    with pytest.raises(ApiError, match=r"messages\[16\]\.role"):
        translated([*turns, {"role": "tool", "content": ""}], memory, b"one")
    with pytest.raises(ApiError, match="must not be empty"):
        translated([], memory, b"one")


def test_a_mark_that_moves_with_each_turn_leaves_one_entry() -> None:
    """Coding agents mark their newest turns with `cache_control`: the last turns differ from those sent before."""

    def sent(count: int) -> list[Turn]:
        turns: list[Turn] = [
            {"role": ("user", "assistant")[at % 2], "content": [{"type": "text", "text": f"{at} " * 9}]}
            for at in range(count)
        ]
        for newest in turns[-1:-4:-2]:
            newest["content"][0]["cache_control"] = {"type": "ephemeral"}
        return turns

    memory, once = TurnMemory(1 << 20), TurnMemory(1 << 20)
    for count in range(LEAST + 1, LEAST + 60, 2):
        assert translated(sent(count), memory, b"") == translated(sent(count), None, b"")
    translated(sent(count), once, b"")
    assert memory.bytes == once.bytes > 0
