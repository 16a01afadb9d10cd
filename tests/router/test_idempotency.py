"""Requests that come again with the same `Idempotency-Key`, to the same router."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from router.batch_calls import chat_line, finished, form_of
from router.fake_controller import FakeController
from router.harness import MESSAGES, RunningRouter, asking, wait_until
from router.idempotency_calls import (
    CHAT,
    PATH,
    REPLAYED,
    ask,
    essence,
    forget,
    kept,
    key_of,
    name_of,
    one_router,
    patiently,
    seeds,
)
from router.session_calls import error_of

from trunkline.kvstore.records import BusyError
from trunkline.router.errors import ApiError
from trunkline.router.http.idempotency import name_request
from trunkline.router.http.replay import takes_key
from trunkline.router.request_context import RequestRandom, created_at, draw_hex, draw_seed, known, request_name
from trunkline.router.text.tokenizer import Tokenizer

# -- what is drawn


def test_draws_follow_from_the_request() -> None:
    def drawn(name: bytes) -> list[Any]:
        with known(random=RequestRandom(name, 123)):
            assert (request_name(), created_at()) == (name, 123)
            return [draw_seed(), draw_hex("id", 16), draw_seed(), draw_hex("id", 16)]

    first = drawn(b"a")
    assert first == drawn(b"a")
    assert len(set(first) | set(drawn(b"b"))) == 8
    with known(random=RequestRandom(b"a", 123)):
        ids = [draw_hex("id", 16), draw_hex("id", 16)]
        assert [draw_seed(), *ids, draw_seed()] == [first[0], first[1], first[3], first[2]], "one row each"
    assert request_name() == b""
    assert draw_seed() != draw_seed()


def test_names_tell_requests_apart() -> None:
    names = {
        name_request(*given)
        for given in (
            ("a", "b", b"c"),
            ("a", "bc", b""),
            ("ab", "c", b"c"),
            ("a", "b", b"c", b""),
            ("a", "b", b"", b"c"),
        )
    }
    assert len(names) == 5
    assert name_request("a", "b", b"c") == name_request("a", "b", b"c")
    for bad in ("", "x" * 256, "ü", "a\tb"):
        with pytest.raises(ApiError) as caught:
            name_request("a", bad, b"")
        assert (caught.value.status, caught.value.code) == (400, "invalid_idempotency_key")


def test_which_requests_may_have_a_key() -> None:
    assert takes_key("POST", PATH)
    assert takes_key("POST", "/v1/sessions/sess_1/fork")
    assert takes_key("POST", "/v1/batches")
    assert not takes_key("POST", "/v1/files")
    assert not takes_key("GET", "/v1/sessions")
    assert not takes_key("POST", "/v1/messages/count_tokens")
    assert not takes_key("POST", "/v1/sessions/sess_1/prefetch")


CALLS: list[tuple[str, dict[str, Any]]] = [
    (PATH, {}),
    (PATH, {"stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"prompt": ["one", "two"], "n": 2}),
    ("/v1/completions", {"prompt": "one", "stream": True}),
    ("/v1/responses", {"input": "hello"}),
    ("/v1/responses", {"input": "hello", "stream": True}),
    ("/v1/messages", {**CHAT, "max_tokens": 9}),
    ("/v1/messages", {**CHAT, "max_tokens": 9, "stream": True}),
    ("/v1/sessions", {"messages": MESSAGES}),
    ("/v1/schemas", {"pml": '<schema name="idem"><module name="m">Some text.</module></schema>'}),
]


@pytest.mark.parametrize(("path", "fields"), CALLS)
def test_an_answer_comes_again(
    http: httpx.Client, fake: FakeController, path: str, fields: dict[str, Any]
) -> None:
    key = f"again {path} {fields.get('stream')}"
    first = ask(http, key, path, **fields)
    assert first.status_code in (200, 201), first.text
    assert REPLAYED not in first.headers
    count = len(fake.behaviour.submits)
    again = ask(http, key, path, **fields)
    assert again.headers[REPLAYED] == "true"
    assert (again.status_code, again.content) == (first.status_code, first.content)
    for header in ("content-type", "cache-control"):
        assert again.headers.get(header) == first.headers.get(header)
    assert len(fake.behaviour.submits) == count


@pytest.mark.parametrize(
    ("path", "fields"), [call for call in CALLS if call[0] not in ("/v1/sessions", "/v1/schemas")]
)
def test_an_answer_that_is_made_again_is_the_same(
    router: RunningRouter, http: httpx.Client, fake: FakeController, path: str, fields: dict[str, Any]
) -> None:
    """The record is gone, but what was drawn was drawn from the key: seeds, ids and all."""
    key = f"anew {path} {fields.get('stream')}"
    first = ask(http, key, path, **fields)
    count = len(fake.behaviour.submits)
    result = kept(router, name_of(key, path, **fields))
    forget(router, name_of(key, path, **fields))
    second = ask(http, key, path, **fields)
    assert REPLAYED not in second.headers
    assert seeds(fake)[:count] == seeds(fake)[count:]
    assert result.body == first.content

    assert essence(second) == essence(first)
    assert ask(http, f"{key} another", path, **fields).status_code == 200
    assert seeds(fake)[-count:] != seeds(fake)[:count]


def test_keys_are_not_reused(http: httpx.Client, fake: FakeController) -> None:
    assert ask(http, "once").status_code == 200
    for path, fields in ((PATH, {"temperature": 0.5}), ("/v1/messages", {**CHAT, "max_tokens": 9})):
        refused = ask(http, "once", path, **fields)
        assert refused.status_code == 422
        assert "Idempotency-Key" in refused.json()["error"]["message"]
    assert error_of(ask(http, "once", n=2)) == (422, "idempotency_key_reused", "Idempotency-Key")
    assert ask(http, "once", tenant="somebody else", n=2).status_code == 200
    assert error_of(ask(http, "x" * 256)) == (400, "invalid_idempotency_key", "Idempotency-Key")
    assert ask(http, "").status_code == 400
    assert ask(http, "x" * 255).status_code == 200
    assert ask(http, "once").headers[REPLAYED] == "true", "what is refused changes nothing"
    models = http.get("/v1/models", headers={"Idempotency-Key": "x" * 300})
    assert models.status_code == 200
    metrics = http.get("/metrics").text
    assert 'trunkline_idempotent_requests_total{result="refused"}' in metrics
    assert 'trunkline_idempotent_requests_total{result="replayed"}' in metrics


@pytest.mark.parametrize("stream", [False, True])
def test_of_many_at_once_one_is_answered(http: httpx.Client, fake: FakeController, stream: bool) -> None:
    fake.behaviour.hold = True
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask, http, f"many {stream}", stream=stream) for _ in range(8)]
        wait_until(lambda: bool(fake.behaviour.submits))
        # A wrong one is told at once, although the right one still runs.
        assert ask(http, f"many {stream}", n=2).status_code == 422
        fake.behaviour.hold = False
        results = [answer.result() for answer in answers]
    assert len(fake.behaviour.submits) == 1
    assert {result.status_code for result in results} == {200}
    assert len({result.content for result in results}) == 1
    assert sum(REPLAYED not in result.headers for result in results) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_only_good_answers_are_kept(place: Path, tokenizer: Tokenizer, stream: bool) -> None:
    with one_router(place, tokenizer) as (router, http, fake):
        fake.behaviour.fail_after, fake.behaviour.fail_when = 3, router.has_begun
        failed = ask(http, "good", stream=stream)
        assert failed.status_code == (200 if stream else 503)
        assert "engine_failed" in failed.text
        fake.behaviour.fail_after = None
        answer = patiently(lambda: ask(http, "good", stream=stream))
        assert REPLAYED not in answer.headers
        assert "engine_failed" not in answer.text
        assert len(set(seeds(fake))) == 1
        assert ask(http, "good", stream=stream).headers[REPLAYED] == "true"


def test_refusals_are_not_kept(http: httpx.Client) -> None:
    for _ in range(2):
        answer = ask(http, "bad", temperature=-1)
        assert answer.status_code == 400
        assert REPLAYED not in answer.headers


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_lets_go_of_its_key(
    router: RunningRouter,
    http: httpx.Client,
    fake: FakeController,
    monkeypatch: pytest.MonkeyPatch,
    stream: bool,
) -> None:
    monkeypatch.setattr("trunkline.router.http.idempotency.LEASE_SECONDS", 600.0)  # it does not end by itself
    key = f"left {stream}"
    fake.behaviour.hold = True
    with asking(router, PATH, CHAT | {"stream": stream}, **{"Idempotency-Key": key}):
        wait_until(lambda: bool(fake.behaviour.submits))
    records, record = router.service.records, key_of(name_of(key, stream=stream))

    def is_free() -> bool:
        try:
            router.call(records.acquire(record, "test", 1.0))
        except BusyError:
            return False
        return True

    wait_until(is_free)
    router.call(records.release(record, "test"))
    fake.behaviour.hold = False
    answer = ask(http, key, stream=stream)
    assert answer.status_code == 200
    assert REPLAYED not in answer.headers
    assert len(set(seeds(fake))) == 1


def test_who_waits_may_leave(http: httpx.Client, fake: FakeController) -> None:
    fake.behaviour.hold = True
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, http, "waits")
        wait_until(lambda: bool(fake.behaviour.submits))
        with pytest.raises(httpx.ReadTimeout):
            http.post(PATH, content=json.dumps(CHAT), headers={"Idempotency-Key": "waits"}, timeout=0.3)
        fake.behaviour.hold = False
        assert answer.result().status_code == 200
    assert ask(http, "waits").headers[REPLAYED] == "true"


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_too_long_is_made_again(
    http: httpx.Client, fake: FakeController, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr("trunkline.router.http.replay.BODY_BYTES_MAX", 200)
    first, second = (ask(http, f"long {stream}", stream=stream) for _ in range(2))
    assert first.status_code == second.status_code == 200
    assert essence(first) == essence(second)
    assert first.text.count('"created":') > 0
    assert {*re.findall('"created":[0-9]+', first.text)} == {*re.findall('"created":[0-9]+', second.text)}
    assert REPLAYED not in second.headers
    assert len(fake.behaviour.submits) == 2
    assert len(set(seeds(fake))) == 1


def test_copies_share_a_bounded_room(place: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trunkline.router.http.replay.COPIES_BYTES_MAX", 3000)
    with one_router(place, tokenizer) as (router, http, fake):
        for number in range(10):  # each gives its room back …
            assert ask(http, f"short {number}").status_code == 200
            assert ask(http, f"short {number}").headers[REPLAYED] == "true"
        for number in range(3):  # … also if there was not enough
            for _ in range(2):
                answer = ask(http, f"long {number}", n=40)
                assert len(answer.content) > 3000
                assert REPLAYED not in answer.headers
        fake.behaviour.fail_after, fake.behaviour.fail_when = 3, router.has_begun
        assert "engine_failed" in ask(http, "failing", stream=True).text
        fake.behaviour.fail_after = None
        patiently(lambda: ask(http, "last"))
        assert ask(http, "last").headers[REPLAYED] == "true"


def test_a_session_by_header_is_a_part_of_the_request(http: httpx.Client) -> None:
    def ask_in(session: str) -> httpx.Response:
        headers = {"Idempotency-Key": "by header", **({"X-Session-ID": session} if session else {})}
        return http.post(PATH, content=json.dumps(CHAT), headers=headers)

    assert ask_in("a").status_code == 200
    assert REPLAYED in ask_in("a").headers
    for other in ("b", ""):
        assert error_of(ask_in(other)) == (422, "idempotency_key_reused", "Idempotency-Key")


def test_a_batch_is_made_once_and_files_say_that_they_are_not(http: httpx.Client) -> None:
    line = json.dumps(chat_line(1, "Hello")).encode()
    form = form_of(line, purpose="batch")
    form["headers"]["Idempotency-Key"] = "a file"
    stored = http.post("/v1/files", **form)
    assert (stored.status_code, stored.headers["idempotency-status"]) == (200, "unavailable")
    assert "idempotency-status" not in http.post("/v1/files", **form_of(line, purpose="batch")).headers
    wanted = {"input_file_id": stored.json()["id"], "endpoint": PATH, "completion_window": "24h"}
    first, again = (ask(http, "a batch", "/v1/batches", **wanted) for _ in range(2))
    assert (first.status_code, again.headers[REPLAYED]) == (200, "true")
    assert first.json()["id"] == again.json()["id"]
    assert finished(http, first.json()["id"])["status"] == "completed"
    assert len(http.get("/v1/batches").json()["data"]) == 1
