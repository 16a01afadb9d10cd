"""What tests of several endpoints say, send and read."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

import httpx
from router.fake_controller import FakeController, prompt_of
from router.harness import EOS

from trunkline.router.text.tokenizer import Tokenizer

Say = Callable[[str], object]
"""Sets what the model answers next."""
CITY: Final[dict[str, Any]] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TWO_CALLS: Final = (
    'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
)
"""A text and two calls of `get_weather`, as a model writes them."""
BROKEN_CALL: Final = '<tool_call>\n{"name": "get_weather", "arguments": {"city": oops'


def payloads(response: httpx.Response) -> list[Any]:
    """What a complete stream brought, without its `[DONE]`."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def named_events(response: httpx.Response) -> list[dict[str, Any]]:
    """The payloads of a stream whose events have names, which must be their types."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for part in response.text.strip().split("\n\n"):
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def without_repeats(kinds: list[str]) -> list[str]:
    """The kinds of events in their order, runs of one kind told once."""
    return [kind for at, kind in enumerate(kinds) if at == 0 or kinds[at - 1] != kind]


def say(fake: FakeController, tokenizer: Tokenizer, *texts: str) -> list[list[int]]:
    """Have each sample of the next requests say its text; returns the tokens."""
    ids = [[*tokenizer.encode(text, add_special_tokens=False), EOS] for text in texts]
    fake.behaviour.sample_script = lambda _, index: ids[index]
    return ids


def last_prompt(fake: FakeController, tokenizer: Tokenizer) -> str:
    """The text of the last request's own tokens."""
    return tokenizer.decode(prompt_of(fake.behaviour.submits[-1]), skip_special_tokens=False)
