"""The chat client against a scripted server."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from trunkline.deploy.cli.chat import ChatError, ChatOptions, Session

CHUNKS: list[dict[str, Any]] = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"delta": {"content": "Joins"}}]},
    {"choices": [{"delta": {"content": " paths."}, "finish_reason": "stop"}]},
    {
        "choices": [],
        "usage": {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
    },
]


def streamed(text: str) -> httpx.Response:
    return httpx.Response(200, headers={"Content-Type": "text/event-stream"}, text=text)


def events(chunks: list[dict[str, Any]], *, end: bool = True) -> str:
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return ": a comment\n\n" + "".join(lines) + ("data: [DONE]\n\n" if end else "")


def session(reply: httpx.Response, sent: list[dict[str, Any]] | None = None) -> Session:
    def handle(request: httpx.Request) -> httpx.Response:
        if sent is not None:
            sent.append(json.loads(request.content))
        return reply

    client = httpx.Client(base_url="http://server", transport=httpx.MockTransport(handle))
    return Session(client, "m", ChatOptions(system="Be brief.", max_tokens=5, temperature=0.0))


def test_an_answer_grows_and_ends_with_its_summary() -> None:
    sent: list[dict[str, Any]] = []
    talk = session(streamed(events(CHUNKS)), sent)
    answers = list(talk.ask("What?"))
    assert answers[-1].text == "Joins paths."
    assert "3 tokens" in answers[-1].summary()
    assert "4 of 9 prompt tokens cached" in answers[-1].summary()
    assert sent[0]["max_tokens"] == 5
    assert sent[0]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What?"},
    ]


def test_the_conversation_is_kept_until_it_is_reset() -> None:
    sent: list[dict[str, Any]] = []
    talk = session(streamed(events(CHUNKS)), sent)
    list(talk.ask("One"))
    list(talk.ask("Two"))
    assert [m["content"] for m in sent[1]["messages"]] == ["Be brief.", "One", "Joins paths.", "Two"]
    talk.reset()
    list(talk.ask("Three"))
    assert [m["content"] for m in sent[2]["messages"]] == ["Be brief.", "Three"]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (httpx.Response(503, json={"error": {"message": "draining"}}), "answered 503: draining"),
        (httpx.Response(502, text="bad gateway"), "answered 502: bad gateway"),
        (streamed(events([{"error": {"message": "engine died"}}])), "engine died"),
        (streamed(events(CHUNKS[:1], end=False)), "ended the answer before its end"),
        (streamed("data: {nonsense\n\n"), "expected protocol"),
    ],
)
def test_failures_are_clear_and_not_part_of_the_conversation(reply: httpx.Response, message: str) -> None:
    sent: list[dict[str, Any]] = []
    talk = session(reply, sent)
    for _ in range(2):
        with pytest.raises(ChatError, match=message):
            list(talk.ask("What?"))
    assert len(sent[1]["messages"]) == 2


def test_stopping_an_answer_keeps_what_came() -> None:
    sent: list[dict[str, Any]] = []
    talk = session(streamed(events(CHUNKS)), sent)
    growing = talk.ask("One")
    next(growing)
    growing.close()
    list(talk.ask("Two"))
    assert [m["content"] for m in sent[1]["messages"]] == ["Be brief.", "One", "Joins", "Two"]
