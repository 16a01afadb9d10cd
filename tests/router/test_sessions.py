"""Stored sessions: each verb of `/v1/sessions`, and completions that go on with them."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from router.api_calls import last_prompt, say
from router.fake_controller import FakeController, prompt_of
from router.harness import (
    ANSWER,
    EOS,
    MESSAGES,
    STORES,
    RunningRouter,
    asking,
    held_request,
    running,
    shared_records,
    two_routers,
    wait_until,
)
from router.session_calls import chat, create, error_of, get, is_free, key_of, reading_of

from trunkline.kvstore.records import Change, StoreAwayError
from trunkline.kvstore.records.sqlite_store import SqliteRecords
from trunkline.router.api import session_routes, turn
from trunkline.router.messages import FinishReason, Started
from trunkline.router.stores import session_lease
from trunkline.router.stores.session_state import SessionState, pack_header
from trunkline.router.text.tokenizer import Tokenizer

FIRST = "<|bos|><|user|>What does os.path.join do?<|end|><|assistant|>"


def test_create_and_get(http: httpx.Client, tokenizer: Tokenizer) -> None:
    made = create(http)
    assert made["id"].startswith("sess_")
    assert made["object"] == "session"
    assert made["model"] == "demo"
    assert (made["turns"], made["tokens"], made["message_count"]) == (0, 0, 0)
    assert made["truncation"] == {
        "type": "retention_ratio",
        "retention_ratio": 0.5,
        "keep": {"instructions": True, "sink_tokens": 4},
    }
    assert made["expires_at"] - made["last_used_at"] == made["ttl"] == 24 * 3600
    assert get(http, made["id"])["id"] == made["id"]
    fields = {"ttl": 60, "truncation": "disabled", "metadata": {"a": "b"}}
    full = create(http, model="org/demo-alias", messages=MESSAGES, **fields)
    assert full["model"] == "org/demo-alias"
    assert full.items() >= fields.items()
    text = FIRST.removesuffix("<|assistant|>")
    assert full["tokens"] == len(tokenizer.encode(text, add_special_tokens=False))
    assert "messages" not in full
    assert get(http, full["id"], include="messages")["messages"] == MESSAGES


def test_a_conversation(
    client: openai.OpenAI, http: httpx.Client, fake: FakeController, tokenizer: Tokenizer
) -> None:
    session = create(http, metadata={"user": "u"})["id"]
    fake.behaviour.found = lambda submit: Started(submit.request, 9, [9], "diverged", 9)
    answer = client.chat.completions.create(model="demo", messages=MESSAGES, extra_body={"session_id": session})
    assert answer.choices[0].message.content == ANSWER
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.model_extra == {"session_tokens": 0, "module_tokens": 0}
    [first] = fake.behaviour.submits
    assert prompt_of(first) == tokenizer.encode(FIRST, add_special_tokens=False)
    told = get(http, session, include="messages")
    assert (told["turns"], told["message_count"]) == (1, 2)
    assert told["messages"] == [*MESSAGES, {"role": "assistant", "content": ANSWER}]
    history = prompt_of(first) + tokenizer.encode(ANSWER, add_special_tokens=False) + [EOS]
    assert told["tokens"] == len(history)
    again = chat(http, session).json()
    second = prompt_of(fake.behaviour.submits[1])
    assert second[: len(history)] == history
    rest = tokenizer.decode(second[len(history) :], skip_special_tokens=False)
    assert rest == "<|user|>And then?<|end|><|assistant|>"
    details = {"cached_tokens": 9, "session_tokens": len(history), "module_tokens": 0}
    assert again["usage"]["prompt_tokens_details"] == details
    assert get(http, session)["turns"] == 2
    assert get(http, session)["metadata"] == {"user": "u"}


def test_a_conversation_in_streams(
    client: openai.OpenAI, http: httpx.Client, fake: FakeController, tokenizer: Tokenizer
) -> None:
    session = create(http)["id"]
    letters = [token for letter in "Hello" for token in tokenizer.encode(letter, add_special_tokens=False)]
    fake.behaviour.script = lambda submit: [*letters, EOS]
    fake.behaviour.seconds_per_token = 0.001
    for turns in (1, 2, 3):
        extra = {"session_id": session, "stream_options": {"include_usage": turns > 1}}
        stream = client.chat.completions.create(model="demo", messages=MESSAGES, stream=True, extra_body=extra)
        for chunk in stream:
            if chunk.choices and chunk.choices[0].finish_reason:
                assert get(http, session)["turns"] == turns, "stored before the end is told"
    one, two, three = map(prompt_of, fake.behaviour.submits)
    assert two[: len(one) + 6] == [*one, *letters, EOS], "not as a tokenizer would write it"
    assert three[: len(two) + 6] == [*two, *letters, EOS]
    told = get(http, session, include="messages")
    assert [message["content"] for message in told["messages"][1::2]] == ["Hello"] * 3


def test_what_the_next_turn_goes_on_from(http: httpx.Client, fake: FakeController, tokenizer: Tokenizer) -> None:
    session = create(http, messages=[{"role": "system", "content": "Be kind."}])["id"]
    answer = chat(http, session, stop=" STOP").json()
    assert answer["choices"][0]["message"]["content"] == "Hello, wörld 😀!"
    assert chat(http, session).status_code == 200
    assert last_prompt(fake, tokenizer) == (
        "<|bos|><|system|>Be kind.<|end|><|user|>And then?<|end|><|assistant|>Hello, wörld 😀!<|end|>"
        "<|user|>And then?<|end|><|assistant|>"
    ), "a stop string is no part of the history"
    assert get(http, session)["message_count"] == 5


@pytest.mark.parametrize("stream", [False, True])
def test_plain_completions(http: httpx.Client, fake: FakeController, tokenizer: Tokenizer, stream: bool) -> None:
    session = create(http)["id"]
    say(fake, tokenizer, " two")
    body: dict[str, Any] = {"session_id": session, "stream": stream}
    assert http.post("/v1/completions", json=body | {"prompt": "one"}).status_code == 200
    assert http.post("/v1/completions", json=body | {"prompt": " three"}).status_code == 200
    ids = tokenizer.encode(" four", add_special_tokens=False)
    assert http.post("/v1/completions", json=body | {"prompt": [ids]}).status_code == 200
    one, two, three = map(prompt_of, fake.behaviour.submits)
    assert tokenizer.decode(two, skip_special_tokens=False) == "one two three"
    assert two[: len(one)] == one
    assert three[: len(two)] == two
    assert tokenizer.decode(three, skip_special_tokens=False) == "one two three two four"
    told = get(http, session, include="messages")
    assert (told["turns"], told["message_count"], told["messages"]) == (3, 0, [])
    assert error_of(chat(http, session)) == (400, None, "session_id"), "it is no conversation"


def test_tool_calls_are_remembered(http: httpx.Client, fake: FakeController, tokenizer: Tokenizer) -> None:
    session = create(http)["id"]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    [ids] = say(fake, tokenizer, call)
    answer = chat(http, session, tools=tools).json()
    [made] = answer["choices"][0]["message"]["tool_calls"]
    result = {"role": "tool", "tool_call_id": made["id"], "content": "17 it is"}
    body = {"session_id": session, "messages": [result], "tools": tools, "stream": True}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    one, two = map(prompt_of, fake.behaviour.submits)
    assert two[: len(one) + len(ids)] == one + ids
    assert "17 it is" in tokenizer.decode(two)
    messages = get(http, session, include="messages")["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["tool_calls"] == [made]
    assert messages[3]["tool_calls"][0]["function"] == made["function"]


def test_busy(http: httpx.Client, fake: FakeController, monkeypatch: pytest.MonkeyPatch) -> None:
    session = create(http)["id"]
    path = f"/v1/sessions/{session}"
    busy = (409, "session_busy", "session_id")
    with held_request(fake, lambda: chat(http, session)):
        assert error_of(chat(http, session)) == busy
        assert error_of(chat(http, session, stream=True)) == busy
        assert error_of(http.delete(path)) == busy
        assert error_of(http.patch(path, json={"ttl": 5})) == busy
        assert error_of(http.post(f"{path}/discard", json={"messages": [0]})) == busy
        assert get(http, session)["turns"] == 0
        assert error_of(http.post(f"{path}/fork", json={"while_busy": "refuse"})) == busy
        before = http.post(f"{path}/fork", json={"while_busy": "before"}).json()
        monkeypatch.setattr(session_routes, "FORK_PATIENCE_S", 0.05)
        assert error_of(http.post(f"{path}/fork")) == busy, "it has waited"
        monkeypatch.undo()
        forks: list[dict[str, Any]] = []
        waiting = threading.Thread(target=lambda: forks.append(http.post(f"{path}/fork").json()))
        waiting.start()
        waiting.join(0.05)
        assert not forks
    waiting.join(10)
    assert get(http, session)["turns"] == 1
    assert get(http, before["id"])["turns"] == 0, "its history is the one before the turn"
    assert forks[0]["turns"] == 1
    assert error_of(http.post(f"{path}/fork", json={"while_busy": "never"}))[0] == 400
    assert http.delete(path).json() == {"id": session, "object": "session.deleted", "deleted": True}


def test_a_lease_is_renewed_while_an_answer_is_made(
    router: RunningRouter, http: httpx.Client, fake: FakeController, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the store goes on by a lease and a half, each time by less than one."""
    now = [1e9]
    store = SqliteRecords(":memory:", clock=lambda: now[0], steady=lambda: now[0])
    renewed: list[bool] = []

    async def counted(*asked: Any) -> bool:
        renewed.append(await store.renew(*asked))
        return renewed[-1]

    with monkeypatch.context() as patch:
        patch.setattr(session_lease, "_RENEWALS", 100)
        patch.setattr(router.service.records, "_store", store)
        patch.setattr(router.service.records, "renew", counted)
        session = create(http)["id"]
        with held_request(fake, lambda: chat(http, session)):
            for _ in range(2):
                now[0] += 0.75 * session_lease.LEASE_SECONDS
                seen = len(renewed)
                wait_until(lambda seen=seen: len(renewed) > seen + 1)  # type: ignore[misc]
            assert error_of(chat(http, session))[1] == "session_busy"
        assert all(renewed)
        assert get(http, session)["turns"] == 1
    router.call(store.close())


@pytest.fixture
def long_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """No lease ends by itself while a test waits for its end."""
    monkeypatch.setattr("trunkline.router.stores.session_store.LEASE_SECONDS", 600.0)


def test_what_cannot_be_stored_is_an_error(
    router: RunningRouter, http: httpx.Client, long_leases: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream has its text first."""

    async def away(*asked: Any, **also: Any) -> None:
        raise StoreAwayError("it is gone")

    def events(session: str, path: str) -> list[dict[str, Any]]:
        asked = {"messages": MESSAGES} if "chat" in path else {"prompt": "And then"}
        answer = http.post(path, json={"session_id": session, "stream": True, "max_tokens": 12, **asked})
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    def text(said: list[dict[str, Any]]) -> str:
        choices = [event["choices"][0] for event in said if "choices" in event]
        return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)

    for path in ("/v1/chat/completions", "/v1/completions"):
        expected = events(create(http)["id"], path)
        session = create(http)["id"]
        with monkeypatch.context() as patch:
            patch.setattr(router.service.records, "put", away)
            said = events(session, path)
        assert text(said) == text(expected) != ""
        assert all(event["choices"][0]["finish_reason"] is None for event in said[:-1])
        assert said[-1]["error"]["code"] == "session_not_stored"
        assert get(http, session)["turns"] == 0
    with monkeypatch.context() as patch:
        patch.setattr(router.service.records, "put", away)
        session = create(http)["id"]
        assert error_of(chat(http, session))[:2] == (503, "session_not_stored")
    assert get(http, session)["turns"] == 0
    wait_until(lambda: is_free(http, session))


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_turn_leaves_the_session(
    router: RunningRouter, http: httpx.Client, fake: FakeController, stream: bool
) -> None:
    session = create(http)["id"]
    assert chat(http, session).status_code == 200
    before = reading_of(router, session)
    fake.behaviour.fail_after = 3
    failed = chat(http, session, stream=stream)
    assert "engine_failed" in failed.text
    fake.behaviour.fail_after = None
    fake.behaviour.refuse = FinishReason.QUEUE_FULL
    assert chat(http, session, stream=stream).status_code == 429
    fake.behaviour.refuse = None
    assert chat(http, session, temperature=5).status_code == 400
    assert chat(http, session, max_tokens=5000).status_code == 400
    after = reading_of(router, session)
    assert (after.record.version, after.segments) == (before.record.version, before.segments)
    assert chat(http, session, stream=stream).status_code == 200, "it is free again"
    assert get(http, session)["turns"] == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_leaves_the_session(
    router: RunningRouter, http: httpx.Client, fake: FakeController, long_leases: None, stream: bool
) -> None:
    session = create(http)["id"]
    fake.behaviour.seconds_per_token = 0.02
    fake.behaviour.script = lambda submit: [7] * 1000
    body = {"session_id": session, "messages": MESSAGES, "stream": stream, "max_tokens": 1000}
    if stream:
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            assert next(response.iter_lines())
    else:
        with asking(router, "/v1/chat/completions", body):
            wait_until(lambda: fake.live == 1)
    wait_until(lambda: bool(fake.behaviour.aborts) and is_free(http, session))
    told = get(http, session)
    assert (told["turns"], told["tokens"]) == (0, 0)
    fake.behaviour.script = lambda submit: [7, EOS]
    assert chat(http, session).status_code == 200


def test_unknown_sessions(http: httpx.Client, fake: FakeController) -> None:
    missing = (404, "session_not_found", "session_id")
    for session in ("sess_" + "0" * 32, "other"):
        path = f"/v1/sessions/{session}"
        assert error_of(http.get(path)) == missing
        assert error_of(http.delete(path)) == missing
        assert error_of(http.patch(path, json={})) == missing
        for verb, body in (("fork", {}), ("prefetch", {}), ("discard", {"messages": [0]})):
            assert error_of(http.post(f"{path}/{verb}", json=body)) == missing
    for stream in (False, True):
        assert error_of(chat(http, "sess_none", stream=stream)) == missing
    completion = http.post("/v1/completions", json={"session_id": "sess_none", "prompt": "x"})
    assert error_of(completion) == missing
    assert not fake.behaviour.submits


def test_what_sessions_cannot_do(http: httpx.Client, fake: FakeController) -> None:
    session = create(http)["id"]
    for path, fields, param in (
        ("chat/completions", {"n": 2}, "n"),
        ("chat/completions", {"use_beam_search": True, "beam_width": 2}, "use_beam_search"),
        ("chat/completions", {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ("completions", {"best_of": 2}, "best_of"),
        ("completions", {"echo": True}, "echo"),
        ("completions", {"prompt": ["x", "y"]}, "session_id"),
    ):
        asked = {"messages": MESSAGES} if "chat" in path else {"prompt": "x"}
        answer = http.post(f"/v1/{path}", json={"session_id": session, **asked, **fields})
        assert error_of(answer)[::2] == (400, param)
    assert not fake.behaviour.submits
    assert http.delete(f"/v1/sessions/{session}").status_code == 200, "it is not held"


def test_what_is_no_parameter_is_refused(http: httpx.Client) -> None:
    session = create(http)["id"]
    for path, body, name in (
        ("/v1/sessions", {"ttl_seconds": 60}, "ttl_seconds"),
        (f"/v1/sessions/{session}/fork", {"ttl": 60, "meta\ndata": {}}, "meta\\ndata"),
        (f"/v1/sessions/{session}/discard", {"messages": [0], "token": [[0, 1]]}, "token"),
        ("/v1/schemas", {"pml": '<schema name="s"/>', "pinned": True}, "pinned"),
    ):
        answer = http.post(path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "unknown_parameter", name)
        assert error["message"] == f"`{name}` is not a known parameter here"
    for path in (f"/v1/sessions/{session}", "/v1/schemas/s"):
        assert http.patch(path, json={"ttl_seconds": 60}).json()["error"]["code"] == "unknown_parameter"


def test_a_message_that_is_too_long(
    http: httpx.Client, fake: FakeController, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = create(http)["id"]
    monkeypatch.setattr(turn, "MESSAGE_BYTES_MAX", 1000)
    refused = (400, "session_too_long", "messages")
    assert error_of(chat(http, session, "x" * 1000)) == refused
    long = [{"role": "user", "content": "x" * 1000}]
    assert error_of(http.post("/v1/sessions", json={"messages": long})) == refused
    assert not fake.behaviour.submits
    for _ in range(3):
        assert chat(http, session, "x" * 900).status_code == 200, "the history may be longer"


def test_update(http: httpx.Client, fake: FakeController) -> None:
    session = create(http, metadata={"a": "1", "b": "2"}, ttl=50)["id"]
    path = f"/v1/sessions/{session}"
    told = http.patch(path, json={"metadata": {"c": "3"}}).json()
    assert (told["metadata"], told["ttl"]) == ({"c": "3"}, 50)
    told = http.patch(path, json={"ttl": 90, "truncation": "disabled", "metadata": None}).json()
    assert (told["metadata"], told["ttl"], told["truncation"]) == ({"c": "3"}, 90, "disabled")
    times = dict.fromkeys(("last_used_at", "expires_at"))
    assert get(http, session) | times == told | times
    assert http.patch(path, json={"ttl": -1}).json()["error"]["param"] == "ttl"
    assert chat(http, session).status_code == 200
    assert fake.behaviour.submits[0].ttl == 90, "its KV lives as long"
    assert chat(http, create(http)["id"]).status_code == 200
    assert fake.behaviour.submits[1].ttl == 0


def test_list(http: httpx.Client) -> None:
    made = sorted(create(http)["id"] for _ in range(5))
    page = http.get("/v1/sessions", params={"limit": 2}).json()
    found = [item["id"] for item in page["data"]]
    assert (page["object"], page["has_more"]) == ("list", True)
    assert (page["first_id"], page["last_id"]) == (found[0], found[-1])
    while page["has_more"]:
        page = http.get("/v1/sessions", params={"limit": 2, "after": page["last_id"]}).json()
        found += [item["id"] for item in page["data"]]
    assert found == made
    assert {item["object"] for item in page["data"]} == {"session"}
    assert page["data"][0]["expires_at"] > page["data"][0]["created_at"] > 0
    for limit in ("0", "101", "x", "-1", "²"):
        assert http.get("/v1/sessions", params={"limit": limit}).json()["error"]["param"] == "limit"


def test_fork(http: httpx.Client, fake: FakeController) -> None:
    source = create(http, metadata={"a": "b"})["id"]
    assert chat(http, source, "one").status_code == 200
    fork = http.post(f"/v1/sessions/{source}/fork", json={"metadata": {"c": "d"}, "ttl": 70}).json()
    assert fork["id"] != source
    assert (fork["parent"], fork["turns"], fork["ttl"]) == (source, 1, 70)
    assert fork["metadata"] == {"c": "d"}
    assert chat(http, fork["id"], "two").status_code == 200
    assert chat(http, source, "three").status_code == 200
    one, two, three = map(prompt_of, fake.behaviour.submits)
    assert two[: len(one) + 5] == three[: len(one) + 5], "they share what was before"
    assert two != three
    assert get(http, source)["metadata"] == {"a": "b"}
    assert http.post(f"/v1/sessions/{source}/fork", json={"ttl": 0}).status_code == 400


@pytest.mark.parametrize(
    "change", [Change(b"\xc1"), Change(pack_header(SessionState(model="demo")), segments=[b"\xc1"])]
)
def test_a_record_that_nobody_can_read(router: RunningRouter, http: httpx.Client, change: Change) -> None:
    router.call(router.service.records.create(key_of("sess_broken"), change))
    try:
        assert http.get("/v1/sessions/sess_broken").json()["error"]["code"] == "session_unreadable"
        assert chat(http, "sess_broken").status_code == 503
        wait_until(
            lambda: chat(http, "sess_broken").json()["error"]["code"] == "session_unreadable"
        )  # it is not held
        assert "sess_broken" in [each["id"] for each in http.get("/v1/sessions?limit=100").json()["data"]]
    finally:
        wait_until(lambda: http.delete("/v1/sessions/sess_broken").status_code == 200)


def test_what_is_deleted_is_forgotten_by_the_controllers(http: httpx.Client, fake: FakeController) -> None:
    session = create(http)["id"]
    assert chat(http, session).status_code == 200
    assert chat(http, session).status_code == 200
    last = prompt_of(fake.behaviour.submits[-1])
    assert http.delete(f"/v1/sessions/{session}").status_code == 200
    wait_until(lambda: bool(fake.behaviour.forgets))
    [message] = fake.behaviour.forgets
    assert prompt_of(message)[: len(last)] == last
    assert message.salt == fake.behaviour.submits[-1].salt
    assert http.delete(f"/v1/sessions/{session}").status_code == 404
    assert len(fake.behaviour.forgets) == 1


@pytest.mark.parametrize("kind", STORES)
def test_routers_share_sessions(place: Path, tokenizer: Tokenizer, kind: str) -> None:
    """Two routers on one store work on a session in turn; each sees what the other has stored."""
    with two_routers(place, tokenizer, kind) as routers:
        (here, fake), (there, other) = routers
        session = create(here, metadata={"a": "b"})["id"]
        for turns, (http, _) in enumerate(routers * 2, 1):
            assert get(http, session)["turns"] == turns - 1
            assert chat(http, session, f"turn {turns}").status_code == 200
        pairs = zip(fake.behaviour.submits, other.behaviour.submits, strict=True)
        prompts = [prompt_of(submit) for pair in pairs for submit in pair]
        for one, two in itertools.pairwise(prompts):
            assert two[: len(one)] == one
        assert get(here, session, include="messages") == get(there, session, include="messages")
        with held_request(fake, lambda: chat(here, session)):
            assert error_of(chat(there, session)) == (409, "session_busy", "session_id")
            fork = there.post(f"/v1/sessions/{session}/fork", json={"while_busy": "before"}).json()
        assert (fork["turns"], fork["metadata"]) == (4, {"a": "b"})
        assert there.post(f"/v1/sessions/{session}/prefetch").json()["tokens"] == get(there, session)["tokens"]
        assert {each["id"] for each in here.get("/v1/sessions").json()["data"]} == {session, fork["id"]}
        assert there.delete(f"/v1/sessions/{session}").status_code == 200
        assert error_of(chat(here, session))[1] == "session_not_found"
        assert chat(here, fork["id"]).status_code == 200


@pytest.mark.parametrize("kind", STORES)
def test_a_tenant_with_too_many_records(place: Path, tokenizer: Tokenizer, kind: str) -> None:
    with (
        shared_records(kind) as url,
        running(place, tokenizer, records=url, records_tenant_bytes=600) as (router, [fake]),
        router.client() as http,
    ):
        session = create(http)["id"]
        for stream in (False, True):
            assert error_of(chat(http, session, stream=stream))[:2] == (429, "records_quota")
        refused = http.post("/v1/sessions", json={})
        assert error_of(refused)[:2] == (429, "records_quota")
        said = refused.json()["error"]
        assert (said["limit"], said["limit_bytes"]) == ("records_bytes", 600)
        assert said["used_bytes"] >= 600
        assert f"take {said['used_bytes']:,} bytes and may take 600 " in said["message"]
        assert not fake.behaviour.submits, "no token was generated"
        assert http.post("/v1/chat/completions", json={"messages": MESSAGES}).status_code == 200
        wait_until(lambda: is_free(http, session))
        assert http.delete(f"/v1/sessions/{session}").status_code == 200
        assert create(http)["turns"] == 0
