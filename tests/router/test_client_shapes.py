"""Conversations in the shapes in which known clients send them: how much of each prompt is known already.

What the cache can find of a prompt is its common beginning with the prompt before and the tokens of that answer.
The ideal is all of these. The engine is scripted; a real one finds beginnings token by token, so they are counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from router.fake_controller import FakeController, prompt_of
from router.harness import EOS, RunningRouter, running, wait_until
from router.model_folders import write_family

from trunkline.router.text.conversation_memory import common_length
from trunkline.router.text.tokenizer import Tokenizer

Object = dict[str, Any]
CONTEXT: Final = 65_536
TURNS: Final = 10
RULES: Final = "\n".join(f"Rule {number}: keep the order of rule {number * 7 % 400}." for number in range(400))
"""Instructions of some thousand tokens, as coding agents have them."""
PATH_SCHEMA: Final = {"type": "object", "properties": {"path": {"type": "string"}, "limit": {"type": "integer"}}}


class Shape:
    """A client: the requests that it sends, and what it keeps of the answers."""

    path = "/v1/chat/completions"
    has_tools = True

    def __init__(self) -> None:
        self.kept: list[Object] = []

    def begin(self, http: httpx.Client) -> None:
        """Begin the conversation."""

    def body(self, turn: int) -> Object:
        raise NotImplementedError

    def ask(self, text: str) -> None:
        self.kept.append({"role": "user", "content": text})

    def take(self, reply: Object, result: str) -> bool:
        """Keep an answer and, if it calls a tool, the tool's result; tells whether it did."""
        raise NotImplementedError


class Chat(Shape):
    """LangGraph: arguments are parsed, and written anew; a text beside calls may be null."""

    def body(self, turn: int) -> Object:
        function = {"name": "read_file", "parameters": PATH_SCHEMA}
        tools = [{"type": "function", "function": function}] if self.has_tools else None
        return {"messages": [{"role": "system", "content": RULES}, *self.kept], "tools": tools}

    def returned(self, message: Object) -> Object:
        """The client's form of an answer."""
        calls = []
        for call in message.get("tool_calls") or ():
            arguments = json.dumps(json.loads(call["function"]["arguments"]), ensure_ascii=False)
            calls.append({**call, "function": {**call["function"], "arguments": arguments}})
        fields = {"role": "assistant", "content": message["content"] or None}
        return {**fields, "tool_calls": calls} if calls else fields

    def take(self, reply: Object, result: str) -> bool:
        message = reply["choices"][0]["message"]
        self.kept.append(self.returned(message))
        for call in message.get("tool_calls") or ():
            self.kept.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        return bool(message.get("tool_calls"))


class Aider(Chat):
    """No tools: edits are blocks in texts, which come back as they are."""

    has_tools = False

    def returned(self, message: Object) -> Object:
        return {"role": "assistant", "content": message["content"]}


class OpenWebUi(Chat):
    """No tools; texts come back trimmed, with fields of the page's own."""

    has_tools = False

    def returned(self, message: Object) -> Object:
        return {"role": "assistant", "content": message["content"].strip()}

    def body(self, turn: int) -> Object:
        return super().body(turn) | {"chat_id": "c", "session_id": "page", "id": f"m{turn}"}


class ClaudeCode(Shape):
    """A header that changes with every request, arguments as objects, marks that move to the last message."""

    path = "/v1/messages"

    def body(self, turn: int) -> Object:
        header = (
            f"x-anthropic-billing-header: cc_version=2.1.37.{turn:03x}; cc_entrypoint=cli; cch={turn * 7919:05x};"
        )
        mark = {"cache_control": {"type": "ephemeral"}}
        system = [{"type": "text", "text": header}, {"type": "text", "text": RULES, **mark}]
        last = self.kept[-1]
        content = last["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        marked = {**last, "content": [*blocks[:-1], {**blocks[-1], **mark}]}
        return {
            "max_tokens": 500,
            "system": system,
            "messages": [*self.kept[:-1], marked],
            "tools": [{"name": "read_file", "input_schema": PATH_SCHEMA, **mark}],
            "metadata": {"user_id": "user_a_account__session_" + "0" * 36},
        }

    def take(self, reply: Object, result: str) -> bool:
        self.kept.append({"role": "assistant", "content": reply["content"]})
        calls = [block["id"] for block in reply["content"] if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call, "content": result} for call in calls]
        if results:
            self.kept.append({"role": "user", "content": results})
        return bool(results)


class Codex(Shape):
    """Nothing is stored; items come back whole, the instructions as a message of the developer's."""

    path = "/v1/responses"
    store = False

    def body(self, turn: int) -> Object:
        rules = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": RULES}]}
        return {
            "input": [rules, *self.kept],
            "store": self.store,
            "tools": [
                {"type": "function", "name": "read_file", "parameters": PATH_SCHEMA, "strict": False},
                {"type": "namespace", "name": "agents", "tools": []},
                {"type": "web_search"},
            ],
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "thread",
        }

    def take(self, reply: Object, result: str) -> bool:
        calls = [item["call_id"] for item in reply["output"] if item["type"] == "function_call"]
        self.kept += reply["output"]
        self.kept += [{"type": "function_call_output", "call_id": call, "output": result} for call in calls]
        return bool(calls)


class AgentsSdk(Codex):
    """Each request has only what is new, behind the response before."""

    store = True

    def __init__(self) -> None:
        super().__init__()
        self.previous: str | None = None

    def body(self, turn: int) -> Object:
        body = super().body(turn) | {"instructions": RULES, "previous_response_id": self.previous}
        return body | {"input": self.kept}

    def take(self, reply: Object, result: str) -> bool:
        self.previous, self.kept = reply["id"], []
        called = super().take(reply, result)
        self.kept = self.kept[len(reply["output"]) :]
        return called


class StoredSession(Chat):
    """Each request has only what is new; the session has the rest."""

    def begin(self, http: httpx.Client) -> None:
        messages = [{"role": "system", "content": RULES}]
        self.session = http.post("/v1/sessions", json={"messages": messages}).json()["id"]

    def body(self, turn: int) -> Object:
        body = super().body(turn)
        return body | {"messages": body["messages"][1:], "session_id": self.session}

    def take(self, reply: Object, result: str) -> bool:
        self.kept = []
        called = super().take(reply, result)
        del self.kept[0]
        return called


SHAPES: Final = (ClaudeCode, Codex, AgentsSdk, Chat, Aider, OpenWebUi, StoredSession)
Says = Callable[[int], str]


def usual(turn: int) -> str:
    """Calls as most models write them, and texts."""
    if turn % 2:
        return f"There are {turn} files, and none of them is empty. " * 4 + "Anything else?"
    arguments = json.dumps({"path": f"src/part_{turn}.py", "limit": 20 + turn})
    return f'I read it.\n<tool_call>\n{{"name": "read_file", "arguments": {arguments}}}\n</tool_call>'


def unusual(turn: int) -> str:
    """Compact arguments, and texts with white space around them."""
    if turn % 2:
        return f"There are {turn} files, and none of them is empty. " * 4 + "\n\n"
    arguments = json.dumps({"path": f"src/part_{turn}.py", "limit": 20 + turn}, separators=(",", ":"))
    return f'I read it.\n<tool_call>\n{{"name": "read_file", "arguments": {arguments}}}\n</tool_call>'


@contextmanager
def serving(place: Path, tokenizer: Tokenizer, **options: Any) -> Iterator[tuple[RunningRouter, FakeController]]:
    """A router of a model with a context that holds the prompts of agents."""
    place.mkdir()
    with running(place, tokenizer, max_context=CONTEXT, wait=False, **options) as (router, [fake]):
        fake.behaviour.max_context = CONTEXT
        fake.start()
        wait_until(lambda: router.ready == 1)
        yield router, fake
        fake.stop()


@pytest.fixture(scope="module")
def served(folder: Path, tokenizer: Tokenizer) -> Iterator[tuple[RunningRouter, FakeController]]:
    with serving(folder / "shapes", tokenizer) as both:
        yield both


@pytest.fixture(scope="module")
def qwen3(folder: Path) -> Iterator[tuple[RunningRouter, FakeController, Tokenizer]]:
    """The same with a template that writes calls in its own way, for any tools."""
    (folder / "family").mkdir()
    tokenizer = Tokenizer(write_family(folder / "family", "qwen3"))
    with serving(folder / "calls", tokenizer, model_path=str(folder / "family")) as (router, fake):
        yield router, fake, tokenizer
    tokenizer.close()


def shares(
    http: httpx.Client, fake: FakeController, tokenizer: Tokenizer, shape: Shape, says: Says
) -> list[tuple[int, int, int]]:
    """Hold a conversation. For each turn but the first: tokens of the prompt before, of that answer, and how many
    of both together the next prompt begins with."""
    found: list[tuple[int, int, int]] = []
    known: list[int] = []
    prompt_tokens = 0
    asks = True
    shape.begin(http)
    for turn in range(TURNS):
        if asks:
            shape.ask(f"Look at part {turn}, please, in the {says.__name__} way.")
        said = [*tokenizer.encode(says(turn), add_special_tokens=False), EOS]
        fake.behaviour.script = lambda _, said=said: said  # type: ignore[misc]
        answer = http.post(shape.path, json={"model": "demo", **shape.body(turn)})
        assert answer.status_code == 200, answer.text
        prompt = prompt_of(fake.behaviour.submits[-1])
        if known:
            found.append((prompt_tokens, len(known) - prompt_tokens, common_length(known, prompt)))
        known, prompt_tokens = [*prompt, *said], len(prompt)
        asks = not shape.take(answer.json(), f"def part_{turn}():\n    return {turn}\n" * 8)
    return found


@pytest.mark.parametrize("says", [usual, unusual])
@pytest.mark.parametrize("shape", SHAPES)
def test_prompts_begin_with_what_is_known(
    served: tuple[RunningRouter, FakeController], tokenizer: Tokenizer, shape: type[Shape], says: Says
) -> None:
    router, fake = served
    with router.client() as http:
        found = shares(http, fake, tokenizer, shape(), says)
    assert len(found) == TURNS - 1
    for prompt, answer, known in found:
        assert prompt > 6_000
        assert known == prompt + answer


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.has_tools])
def test_answers_that_a_template_writes_anew(
    qwen3: tuple[RunningRouter, FakeController, Tokenizer], shape: type[Shape]
) -> None:
    router, fake, tokenizer = qwen3
    with router.client() as http:
        found = shares(http, fake, tokenizer, shape(), unusual)
        for prompt, answer, known in found:
            assert known == prompt + answer
        page = http.get("/metrics").text
    memory = router.service.models.memory
    assert memory.counts.answers > sum(answer for _, answer, _ in found) * 0.9
    assert f'trunkline_prompt_memory_tokens_total{{source="answer"}} {float(memory.counts.answers)}' in page
    assert memory.bytes
    assert "trunkline_prompt_memory_bytes 0.0" not in page
