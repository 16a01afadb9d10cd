"""Requests whose prompts have modules of several schemas."""

from __future__ import annotations

from typing import Any

import httpx
from router.fake_controller import FakeController, prompt_of, seen_tokens
from router.schema_calls import TRIP, post, runs_of, texts_of
from router.session_calls import chat, create, error_of, get

TOOLS = '<schema name="tools"><system>You may <module name="call">call a taxi</module>.</system></schema>'
HI: Any = [{"role": "user", "content": "Hi"}]
BOTH = '<prompt schema="tools trip"><call/><sea/></prompt>'


def test_the_texts_of_both_are_those_of_each(http: httpx.Client, fake: FakeController) -> None:
    """Sent to all three APIs, in both forms; what moves moves as a whole."""
    extent = post(http, TOOLS)["extent"]
    post(http)
    for pml in ('<prompt schema="tools"><call/></prompt>', '<prompt schema="trip"><sea/></prompt>', BOTH):
        answer = http.post("/v1/chat/completions", json={"pml": pml, "messages": HI})
        assert answer.status_code == 200, answer.text
    tools, trip, both = map(texts_of, fake.behaviour.submits)
    moved = [(tokens, position + extent, seen) for tokens, position, seen in trip]
    tokens, position, [[start, stop]] = moved[0]
    assert (tokens[0], start) == (tools[0][0][0], 0), "a BOS, which is seen once"
    moved[0] = tokens, position, [[1, stop]]
    assert both == [*tools, *moved]
    whole = fake.behaviour.submits[-1]
    assert whole.layout is not None
    assert not whole.layout.relocate
    [details] = [answer.json()["usage"]["prompt_tokens_details"]]
    assert details["module_tokens"] == seen_tokens(whole.layout)
    http.post("/v1/messages", json={"pml": BOTH, "messages": HI, "max_tokens": 5})
    http.post("/v1/responses", json={"pml": BOTH, "input": "Hi"})
    as_object = {"schema": "tools trip", "modules": ["call", "sea"]}
    http.post("/v1/chat/completions", json={"prompt": as_object, "messages": HI})
    for submit in fake.behaviour.submits[3:]:
        assert (submit.layout, submit.tokens) == (whole.layout, whole.tokens)
    assert len(fake.behaviour.submits) == 6


def test_a_session_behind_both(http: httpx.Client, fake: FakeController) -> None:
    post(http, TOOLS)
    post(http)
    session = create(http, pml=BOTH)
    assert session["schema"] == "tools trip"
    for _ in range(2):
        assert chat(http, session["id"]).status_code == 200
    first, second = fake.behaviour.submits
    assert texts_of(first) == texts_of(second)
    assert prompt_of(second)[: first.prompt_len] == prompt_of(first)
    assert runs_of(second)[-1][0] == runs_of(first)[-1][0]
    assert http.post(f"/v1/sessions/{session['id']}/prefetch").status_code == 200
    assert get(http, session["id"])["turns"] == 2


def test_what_is_missing_or_twice_there(http: httpx.Client) -> None:
    post(http, TOOLS)

    def told(pml: str) -> tuple[int, Any, Any]:
        return error_of(http.post("/v1/chat/completions", json={"pml": pml, "messages": HI}))

    assert told(BOTH) == (404, "E_SCHEMA_UNKNOWN", "pml")
    assert told('<prompt schema="tools tools"/>') == (400, "E_DUP_IMPORT", "pml")
    post(http, TRIP.replace("sea", "call"))
    assert told('<prompt schema="tools trip"/>') == (400, "E_DUP", "pml")
