"""A server as the cases of `test_conformance*.py` see it, and how cases are declared."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import httpx
import openai
import pytest
from router.api_calls import payloads, say
from router.fake_controller import FakeController

from trunkline.router.service import RouterService
from trunkline.router.text.tokenizer import Tokenizer

CHAT: Final = "/v1/chat/completions"
TEXT: Final = "/v1/completions"
PROMPT: Final = "Hello, my name is"
TALK: Final[list[Any]] = [
    {"role": "system", "content": "Be helpful."},
    {"role": "user", "content": "What is 1+1?"},
]


class Server(NamedTuple):
    """What a case may use."""

    client: openai.OpenAI
    http: httpx.Client
    fake: FakeController
    tokenizer: Tokenizer
    service: RouterService
    patch: pytest.MonkeyPatch

    def say(self, *texts: str) -> None:
        """Have each choice of the next requests say its text."""
        say(self.fake, self.tokenizer, *texts)

    def answer(self, path: str, **fields: Any) -> Any:
        """The whole answer to a request."""
        body = {"prompt": PROMPT} if path == TEXT else {"messages": TALK}
        answer = self.http.post(path, json=body | fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def parts(self, path: str, **fields: Any) -> list[Any]:
        """The events of a stream."""
        body = {"prompt": PROMPT} if path == TEXT else {"messages": TALK}
        return payloads(self.http.post(path, json=body | fields | {"stream": True}))

    def refused(self, path: str, param: str | None = None, **fields: Any) -> None:
        """Check that a request is refused, naming its parameter."""
        body = {"prompt": PROMPT} if path == TEXT else {"messages": TALK}
        answer = self.http.post(path, json=body | fields)
        told = param or next(iter(fields))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, told), answer.text


Case = Callable[[Server], None]
CASES: Final[dict[str, list[Any]]] = {}
"""The cases by the modules that declare them."""


def case(check: Case) -> Case:
    """Declare a case."""
    CASES.setdefault(check.__module__, []).append(pytest.param(check, id=check.__name__))
    return check


def differs(why: str) -> Callable[[Case], Case]:
    """Declare a case that is answered otherwise on purpose; docs/api.md says the same."""

    def declare(check: Case) -> Case:
        marks = pytest.mark.xfail(reason=why, strict=True)
        CASES.setdefault(check.__module__, []).append(pytest.param(check, id=check.__name__, marks=marks))
        return check

    return declare


def text_of(choice: Any) -> str:
    """The text of a choice of a whole answer."""
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    assert isinstance(text, str)
    return text


def check_usage_options(server: Server, path: str) -> None:
    """Check what a stream tells of its usage, with each of the options."""
    options: dict[str, Any]
    for options in ({}, {"include_usage": False}, {"include_usage": False, "continuous_usage_stats": True}):
        assert not any(part.get("usage") for part in server.parts(path, max_tokens=5, stream_options=options))
    for along in (False, True):
        options = {"include_usage": True, "continuous_usage_stats": along}
        *before, last = server.parts(path, max_tokens=5, stream_options=options)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 5
        assert all((part["usage"] is not None) == along for part in before)
        if along:
            counts = [part["usage"]["completion_tokens"] for part in [*before, last] if "usage" in part]
            assert counts[:-1] == sorted(set(counts)), "each event has more tokens than the one before it"
        for usage in [part["usage"] for part in [*before, last] if part["usage"] is not None]:
            assert usage["prompt_tokens"] > 0
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    for options in ({"include_usage": True}, {"include_usage": None}, {"continuous_usage_stats": True}):
        server.refused(path, stream_options=options)


def check_matrix(server: Server, *, stream: bool) -> None:
    """Echo, log-probabilities, lists, samples and token ids in all combinations."""
    ids = server.tokenizer.encode(PROMPT, add_special_tokens=True)
    for echo, logprobs, several, n, as_ids in itertools.product(
        (False, True), (None, 5), (False, True), (1, 2), (False, True)
    ):
        one: Any = ids if as_ids else PROMPT
        prompts = 2 if several else 1
        fields: dict[str, Any] = {"prompt": [one] * 2 if several else one, "max_tokens": 8, "echo": echo, "n": n}
        if logprobs:
            fields["logprobs"] = logprobs
        if stream:
            *parts, last = server.parts(TEXT, **fields, stream_options={"include_usage": True})
            usage, texts = last["usage"], defaultdict[int, str](str)
            for part in parts:
                [choice] = part["choices"]
                texts[choice["index"]] += choice["text"]
                assert (choice["logprobs"] is not None) == bool(logprobs), part
            assert sorted(texts) == list(range(prompts * n))
            found = list(texts.values())
        else:
            answer = server.answer(TEXT, **fields)
            usage, found = answer["usage"], [choice["text"] for choice in answer["choices"]]
            assert all((choice["logprobs"] is not None) == bool(logprobs) for choice in answer["choices"])
        assert len(found) == prompts * n
        assert all(text.startswith(PROMPT) == echo for text in found)
        assert usage["prompt_tokens"] == len(ids) * prompts
        assert usage["completion_tokens"] == 8 * prompts * n
