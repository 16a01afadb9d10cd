"""The memory of conversations: what is found is what was put in, for those who may see it, within its bound."""

from __future__ import annotations

import random
from typing import Any

import httpx
import pytest
from router.fake_controller import FakeController, prompt_of
from router.harness import RunningRouter
from seeds import seeds

from trunkline.kvstore.adapters import KEY_BYTES, adapter_salt
from trunkline.router.api.known_turns import TurnMemory
from trunkline.router.api.response_input import to_messages
from trunkline.router.errors import ApiError
from trunkline.router.http.body import validate
from trunkline.router.jobs.request_models import ChatRequest
from trunkline.router.request_context import known
from trunkline.router.text.conversation_memory import LEAST, MESSAGE_BYTES, Beginnings, ConversationMemory, size_of
from trunkline.router.text.tokenizer import Tokenizer


@pytest.mark.parametrize("seed", seeds(2))
def test_random_lists(seed: int) -> None:
    rng = random.Random(seed)
    memory: Beginnings[tuple[bytes, tuple[int, ...]]] = Beginnings(3000)
    found = 0
    lists: list[tuple[bytes, list[int]]] = [(b"", [0])]
    for _ in range(3000):
        scope, old = rng.choice(lists[-20:])
        if rng.random() < 0.2:
            scope = rng.choice([b"", b"a", b"ab", b"b"])
        items = [*old[: rng.randrange(len(old) + 1)], *(rng.randrange(3) for _ in range(rng.randrange(1, 6)))]
        got = memory.find(scope, items[0], items)
        if got is not None:
            found += 1
            assert got.value == (scope, tuple(got.items))
            assert got.items[: got.agreed] == items[: got.agreed]
            assert got.agreed == min(len(got.items), len(items)) or got.items[got.agreed] != items[got.agreed]
        lists.append((scope, items))
        memory.put(scope, items[0], items, (scope, tuple(items)), rng.randrange(200))
        assert memory.bytes <= memory.bytes_max
        if rng.random() < 0.02:
            memory.forget(b"a")
            assert memory.find(b"ab", items[0], items) is None or scope not in (b"a", b"ab")
            assert all(memory.find(each, first, [first]) is None for each in (b"a", b"ab") for first in range(3))
    assert found > 0
    memory.forget(b"")
    assert memory.bytes == 0


def test_lists_of_an_adapter_are_forgotten_with_their_tenants() -> None:
    memory: Beginnings[str] = Beginnings(1000)
    scopes = [adapter_salt(bytes(KEY_BYTES), salt) for salt in (b"a", b"ab", b"b")]
    for scope in scopes:
        memory.put(scope, 1, [1, 2], "text", 10)
    memory.forget(b"a")
    assert [memory.find(scope, 1, [1, 2]) is None for scope in scopes] == [True, True, False]


def test_the_longest_is_found_and_replaced() -> None:
    memory: Beginnings[str] = Beginnings(1000)
    memory.put(b"", 1, [1, 2], "short", 10)
    memory.put(b"", 1, [1, 2, 3], "long", 20)
    assert memory.bytes == 20
    memory.put(b"", 1, [1, 5], "other", 10)
    got = memory.find(b"", 1, [1, 2, 3, 4])
    assert got is not None
    assert (got.agreed, got.value) == (3, "long")
    assert memory.find(b"", 1, [2]) is None
    memory.put(b"", 1, [1, 2, 3, 4], "too large", 1001)
    assert memory.bytes == 30


def random_message(rng: random.Random) -> dict[str, Any]:
    text = rng.choice(["a", "", [{"type": "text", "text": "b"}], "c" * 100])
    kind = rng.randrange(12)
    if kind == 0:
        return {"role": "user", "content": 5}
    if kind == 1:
        return {"role": "assistant", "content": None, "reasoning": "hm", "refusal": "no"}
    if kind == 2:
        call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}, "index": 0}
        return {"role": "assistant", "content": text, "tool_calls": [call]}
    return {"role": rng.choice(["user", "assistant", "system"]), "content": text, "extra": rng.choice([1, True])}


def called(arguments: str) -> list[dict[str, Any]]:
    """A conversation in which the model calls a tool with large arguments."""
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [{"role": "user", "content": "a"}, *[called] * (LEAST - 1)]


def test_texts_in_calls_count_as_much_as_others_and_once() -> None:
    memory, characters = ConversationMemory(64 << 20), 10_000
    for _ in range(5):
        with known(conversations=memory):
            validate(ChatRequest, {"messages": called("x" * characters)})
        texts = (LEAST - 1) * characters
        assert texts < memory.checked.bytes < texts + 2 * LEAST * MESSAGE_BYTES


@pytest.mark.parametrize("kind", ["function_call", "reasoning"])
def test_texts_of_items_count_whether_or_not_they_are_shown(kind: str) -> None:
    memory, text = TurnMemory(64 << 20), "x" * 10_000
    item = {"type": kind, "call_id": "x", "name": "f", "arguments": text, "encrypted_content": text}
    for _ in range(3):
        to_messages([dict(item) for _ in range(LEAST)], None, memory=memory)
        assert memory.bytes == size_of([item] * LEAST) > 2 * LEAST * len(text)


NOTHING: dict[str, Any] = {"type": "object", "properties": {}}


def checked(fields: dict[str, Any]) -> ChatRequest | tuple[str | None, str]:
    """The request, or what is wrong with it."""
    try:
        return validate(ChatRequest, fields)
    except ApiError as error:
        return error.param, error.message


@pytest.mark.parametrize("seed", seeds(2))
def test_messages_are_checked_as_without_memory(seed: int) -> None:
    rng = random.Random(seed)
    memory = ConversationMemory(8 << 20)
    messages: list[dict[str, Any]] = []
    reused = refused = 0
    for _ in range(300):
        messages = (
            messages[: rng.randrange(len(messages) // 2, len(messages) + 1)] if rng.random() < 0.3 else messages
        )
        messages = [*messages, *(random_message(rng) for _ in range(rng.randrange(1, 3)))]
        fields = {"messages": [dict(message) for message in messages], "cache_salt": rng.choice(["x", "y"])}
        wanted = checked(fields)
        if isinstance(wanted, tuple):
            with known(conversations=memory):
                assert checked(fields) == wanted
            refused += 1
            messages = [message for message in messages if message["content"] != 5]
            continue
        with known(conversations=memory):
            found = validate(ChatRequest, fields)
            again = validate(ChatRequest, fields)
        assert found == wanted
        if len(messages) >= LEAST:
            assert all(one is other for one, other in zip(found.messages, again.messages, strict=True))
            assert found.messages is not again.messages
            reused += 1
    assert reused > 0
    assert refused > 0


def test_long_conversations_have_the_prompts_of_their_texts(
    http: httpx.Client, fake: FakeController, tokenizer: Tokenizer, router: RunningRouter
) -> None:
    """Chats, sessions and counts of conversations that are remembered as messages."""
    function = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": NOTHING}}
    session = http.post("/v1/sessions", json={}).json()["id"]
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be kind."}]
    stored: list[dict[str, Any]] = []
    for turn in range(3 * LEAST):
        call = {"id": f"c{turn}", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
        if turn % 3 == 1:
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": f"c{turn}", "content": f"seen {turn}"})
        else:
            messages.append({"role": ("user", "assistant")[turn % 2], "content": f"text {turn}"})
        if turn == 2 * LEAST:
            messages[5] = {**messages[5], "content": "edited"}
        if turn < LEAST - 3 or turn % 4:
            continue
        for tools in ([function], None):
            body = {"messages": messages, "tools": tools, "max_tokens": 3}
            assert http.post("/v1/chat/completions", json=body).status_code == 200
            text = tokenizer.render_chat(messages, tools=tools)
            assert tokenizer.decode(prompt_of(fake.behaviour.submits[-1]), skip_special_tokens=False) == text
            told = http.post("/tokenize", json={"messages": messages, "tools": tools}).json()
            assert told["tokens"] == prompt_of(fake.behaviour.submits[-1])
        new = [{"role": "user", "content": f"stored {turn}"}, {"role": "user", "content": f"again {turn}"}]
        stored += new
        body = {"session_id": session, "messages": new, "max_tokens": 3}
        [choice] = http.post("/v1/chat/completions", json=body).json()["choices"]
        text = tokenizer.render_chat(stored)
        assert tokenizer.decode(prompt_of(fake.behaviour.submits[-1]), skip_special_tokens=False) == text
        stored.append({"role": "assistant", "content": choice["message"]["content"]})
    memory = router.service.models.conversations
    assert memory.rendered.bytes > 0
    assert memory.checked.bytes > 0
