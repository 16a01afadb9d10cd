"""Bodies that go on as earlier ones are read as they are read alone."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from typing import Any

import httpx
import pytest
from router.harness import RunningRouter
from seeds import seeds

from trunkline.router.errors import ApiError
from trunkline.router.http import continued_bodies
from trunkline.router.http.body import parse_json_object
from trunkline.router.http.continued_bodies import parse_body
from trunkline.router.http.json_slices import LIGHT_MARKS
from trunkline.router.request_context import known
from trunkline.router.text.conversation_memory import LEAST, ConversationMemory

STEPS = 1500
TEXTS = ("", "hello", '"}]', "é\u2028", "\\", "\n", "[{", '{"messages": [1]}', "x" * 300)


def random_value(rng: random.Random) -> Any:
    return rng.choice(
        [1, -1.5, 12, True, None, [], {}, rng.choice(TEXTS), {"messages": [rng.choice(TEXTS)]}, [{"a": [1, {}]}]]
    )


def random_message(rng: random.Random) -> Any:
    if rng.random() < 0.05:
        return random_value(rng)
    if rng.random() < 0.05:
        return {"role": "user", "content": [{"text": rng.choice(TEXTS), "cache_control": {"type": "ephemeral"}}]}
    return {
        "role": rng.choice(["user", "assistant"]),
        "content": rng.choice([*TEXTS, [{"text": rng.choice(TEXTS)}]]),
    }


class Client:
    """Sends conversations that go on, go back, begin anew, and are no JSON now and then."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.name = rng.choice(["messages", "input"])
        self.messages: list[Any] = []
        self.options: Any = {"indent": rng.choice([None, None, 1]), "ensure_ascii": rng.random() < 0.5}
        self.before = {"model": "m"} if rng.random() < 0.5 else {}

    def body(self) -> bytes:
        rng = self.rng
        if rng.random() < 0.2 and self.messages:
            del self.messages[rng.randrange(len(self.messages)) :]
        if rng.random() < 0.05 and self.messages:
            self.messages[rng.randrange(len(self.messages))] = random_message(rng)
        self.messages += [random_message(rng) for _ in range(rng.randrange(6))]
        fields = {**self.before, self.name: self.messages}
        if rng.random() < 0.7:
            fields |= {rng.choice(["stop", "tools", "n"]): random_value(rng) for _ in range(rng.randrange(3))}
        text = json.dumps(fields, **self.options)
        if rng.random() < 0.1:  # the last one of a name counts
            other = json.dumps(
                {self.name: [random_message(rng) for _ in range(rng.choice([1, len(self.messages)]))]}
            )
            text = rng.choice([text[:-1] + ", " + other[1:], other[:-1] + ", " + text[1:]])
        body = text.encode()
        if rng.random() < 0.1:
            at = rng.randrange(len(body))
            body = (
                body[:at]
                + rng.choice([b"", b"}", b"]", b'"', b"\xff", b"NaN", b"5"])
                + body[at + rng.randrange(2) :]
            )
        return body


def outcome(read: Any, body: bytes) -> Any:
    try:
        return read(body)
    except ApiError as error:
        return error.status, error.code, error.message


@pytest.mark.parametrize("seed", seeds(2))
def test_a_body_is_read_as_without_memory(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continued_bodies, "BYTES_LEAST", 0)
    rng, memory = random.Random(seed), ConversationMemory(1 << 20)
    clients = [Client(rng) for _ in range(4)]
    parsed: list[int] = []

    def noted(body: bytes) -> dict[str, Any]:
        parsed.append(len(body))
        return parse_json_object(body)

    monkeypatch.setattr(continued_bodies, "parse_json_object", noted)
    saved = 0
    for _ in range(STEPS):
        if rng.random() < 0.02:
            clients[rng.randrange(4)] = Client(rng)
        body = rng.choice(clients).body()
        parsed.clear()
        with known(conversations=memory):
            found = outcome(parse_body, body)
        assert found == outcome(parse_json_object, body)
        if isinstance(found, dict):
            assert list(found) == list(parse_json_object(body))
        saved += len(parsed) == 1 and parsed[0] < len(body) // 2
        assert memory.bodies.bytes <= memory.bodies.bytes_max
    assert saved > STEPS // 20
    memory.forget(b"")
    assert memory.bodies.bytes == 0


def test_marks_of_caches_that_move_are_no_other_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last message and the last but two say where a cache is to end, in each request others."""
    parsed: list[int] = []

    def noted(body: bytes) -> dict[str, Any]:
        parsed.append(len(body))
        return parse_json_object(body)

    monkeypatch.setattr(continued_bodies, "parse_json_object", noted)
    memory = ConversationMemory(1 << 24)
    messages = [{"role": "user", "content": [{"type": "text", "text": f"{at} " + "x" * 2000}]} for at in range(40)]
    with known(conversations=memory):
        for number in range(20, 40):
            sent = deepcopy(messages[:number])
            for message in (sent[-1], sent[-3]):
                message["content"][0]["cache_control"] = {"type": "ephemeral"}  # type: ignore[index]
            body = json.dumps({"messages": sent}).encode()
            parsed.clear()
            assert parse_body(body) == {"messages": sent}
            assert number == 20 or parsed == [pytest.approx(4 * 2100, rel=0.1)], "what is marked now or was before"


def test_what_a_body_weighs_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small parts are parsed piece by piece, also if they come bit by bit."""
    memory, messages = ConversationMemory(1 << 28), [[0] * 2000 for _ in range(LEAST)]
    with known(conversations=memory):
        for _ in range(30):
            body = json.dumps({"messages": messages}).encode()
            assert parse_body(body) == {"messages": messages}
            messages.append([0] * 2000)
    entries = [entry for each in memory.bodies._entries.values() for entry in each]
    assert entries
    assert all(entry.weight <= LIGHT_MARKS for entry in entries)
    assert max(len(entry.messages) for entry in entries) < len(messages) - 1


def test_no_endpoint_changes_what_is_remembered(http: httpx.Client, router: RunningRouter) -> None:
    tool = {"name": "look", "description": "d", "input_schema": {"type": "object"}}
    said: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "x" * 20_000}]}]
    for turn in range(LEAST):
        used = {"type": "tool_use", "id": f"t{turn}", "name": "look", "input": {"a": 1}}
        result = {"type": "tool_result", "tool_use_id": f"t{turn}", "content": [{"type": "text", "text": "r"}]}
        said += [
            {"role": "assistant", "content": [{"type": "text", "text": "a"}, used]},
            {"role": "user", "content": [result, {"type": "text", "text": "b"}]},
        ]
    plain = [{"role": "user" if n % 2 == 0 else "assistant", "content": "y" * 2000} for n in range(2 * LEAST + 1)]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/messages": {"model": "demo", "max_tokens": 4, "tools": [tool], "messages": said},
        "/v1/messages/count_tokens": {"model": "demo", "tools": [tool], "messages": said},
        "/v1/chat/completions": {"model": "demo", "max_tokens": 4, "messages": plain},
        "/tokenize": {"model": "demo", "messages": plain},
        "/v1/responses": {"model": "demo", "max_output_tokens": 4, "store": False, "input": plain},
    }
    for path, fields in bodies.items():
        asked, name = deepcopy(fields), "input" if "input" in fields else "messages"
        answers = [http.post(path, content=json.dumps(asked), headers={"content-type": "application/json"})]
        for _ in range(2):
            asked[name] += [{"role": "assistant", "content": "so"}, {"role": "user", "content": "go on"}]
            answers.append(
                http.post(path, content=json.dumps(asked), headers={"content-type": "application/json"})
            )
        assert {answer.status_code for answer in answers} <= {200, 400}, [each.text for each in answers]
    entries = [
        each for entries in router.service.models.conversations.bodies._entries.values() for each in entries
    ]
    assert len(entries) >= 2
    assert {entry.name for entry in entries} == {"messages", "input"}
    for entry in entries:
        assert json.loads(entry.prefix + b"]}")[entry.name] == list(entry.messages)
