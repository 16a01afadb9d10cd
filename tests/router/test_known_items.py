"""Items of `/v1/responses` that are translated as far as they are new, against those that are translated whole."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from seeds import seeds

from trunkline.router.api.known_turns import TurnMemory
from trunkline.router.api.response_input import to_messages
from trunkline.router.errors import ApiError
from trunkline.router.stores.seals import Seal
from trunkline.router.text.conversation_memory import LEAST, MESSAGE_BYTES

Item = dict[str, Any]
SEAL = Seal((b"key",), "owner")


def item(rng: random.Random, sealed: float = 0.01) -> Item:
    """Return any item; one in `1 / sealed` is a compaction."""
    if rng.random() < sealed:
        return {"type": "compaction", "encrypted_content": SEAL.seal("compaction", "what was said")}
    text = rng.choice(("a", "b", "", "long " * 9))
    role = rng.choice(("user", "user", "assistant", "developer"))
    part = {"type": "output_text" if role == "assistant" else "input_text", "text": text}
    number = f"call_{rng.randrange(9)}"
    return rng.choice(
        (
            {"role": role, "content": text},
            {"type": "message", "role": role, "content": [part, part]},
            {"type": "function_call", "call_id": number, "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": number, "name": "f", "arguments": '{"n": 1}'},
            {"type": "function_call_output", "call_id": number, "output": text},
            {"type": "reasoning", "encrypted_content": SEAL.seal("reasoning", text), "summary": []},
            {"type": "reasoning", "encrypted_content": "another server's", "summary": []},
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        )
    )


@pytest.mark.parametrize("seed", seeds(4))
def test_what_is_remembered_changes_nothing(seed: int) -> None:
    """Conversations that go on, part, lose items in the middle and come back, stored or sent whole, in a memory
    with room for some."""
    rng = random.Random(seed)
    memory = TurnMemory(rng.choice((60, 600)) * MESSAGE_BYTES)
    lists: list[list[Item]] = [[item(rng, 0.0) for _ in range(LEAST)] for _ in range(3)]
    told: list[tuple[Any, Any]] = []
    for _ in range(400):
        items = list(rng.choice(lists))
        change = rng.random()
        if change < 0.2:
            del items[rng.randrange(len(items)) :]
        elif change < 0.3:
            items[rng.randrange(len(items))] = item(rng)
        items += [item(rng) for _ in range(rng.randrange(1, 4))]
        if rng.random() < 0.5:
            items = copy.deepcopy(items)
        at = rng.choice((0, rng.randrange(len(items))))
        instructions, seal = rng.choice((None, "Be brief.")), rng.choice((SEAL, SEAL, Seal()))
        borders: list[int | None] = []
        bare: list[int | None] = []
        found = to_messages(items[at:], instructions, items[:at], seal, None, borders, memory, b"")
        whole = to_messages(items[at:], instructions, items[:at], seal, None, bare)
        assert (found, borders) == (whole, bare)
        told.append((found, copy.deepcopy(found)))
        lists[rng.randrange(3)] = items[:40]
        assert memory.bytes <= memory.bytes_max
    assert all(found == then for found, then in told), "what was used again was changed"


def test_only_what_is_new_is_looked_at() -> None:
    """What was translated is not read again: the same objects come back. Other tenants' are not found."""
    memory = TurnMemory(1 << 20)
    items: list[Item] = [{"role": ("user", "assistant")[at % 2], "content": f"{at}"} for at in range(LEAST)]

    def ask(more: list[Item], scope: bytes, instructions: str | None = None) -> list[Any]:
        return to_messages([*items, *more], instructions, (), SEAL, None, None, memory, scope)

    first, again = ask([], b"one"), ask([{"role": "user", "content": "and?"}], b"one")
    assert all(a is b for a, b in zip(first[:-1], again, strict=False))
    for other in (ask([], b"two"), ask([], b"one", "Be brief.")):
        assert not any(a is b for a in first for b in other)
    with pytest.raises(ApiError, match=r"input\[16\]\.role"):
        ask([{"role": "nobody", "content": ""}], b"one")
