"""Requests that come again with the same `Idempotency-Key` while routers die, or their record store is away."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from router.fake_controller import FakeController
from router.harness import DEMO_MODEL, STORES, RunningRouter, free_port, running, shared_records, wait_until
from router.idempotency_calls import (
    PATH,
    REPLAYED,
    ask,
    essence,
    forget,
    leave_unfinished,
    name_of,
    one_router,
    seeds,
)
from router.session_calls import create, error_of, get

from trunkline.kvstore.records import RecordKey
from trunkline.router.config import RouterConfig
from trunkline.router.http import idempotency
from trunkline.router.http.idempotency import IdempotencyStore, RequestName
from trunkline.router.request_context import RequestRandom
from trunkline.router.text.tokenizer import Tokenizer

WAITS = 'trunkline_record_failures_total{operation="acquire",reason="busy"}'
"""In the metrics of a router with a request that waits for another router's answer."""

# -- routers that die


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_routers_request_is_taken_over(
    router: RunningRouter, http: httpx.Client, fake: FakeController, stream: bool
) -> None:
    key = f"dead {stream}"
    leave_unfinished(router, name_of(key, stream=stream), lease_s=0.3)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: ask(http, key, stream=stream), range(4)))
    assert len(fake.behaviour.submits) == 1
    assert len({answer.content for answer in answers}) == 1
    assert '"created":1234567890' in answers[0].text, "the first try's"
    assert sum(REPLAYED not in answer.headers for answer in answers) == 1


def test_nobody_waits_for_ever(place: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trunkline.router.app.IdempotencyStore", partial(IdempotencyStore, wait_seconds=0.3))
    with one_router(place, tokenizer) as (router, http, fake):
        leave_unfinished(router, name_of("slow"), lease_s=100.0)
        answer = ask(http, "slow")
        assert error_of(answer) == (409, "idempotency_key_in_use", "Idempotency-Key")
        assert int(answer.headers["retry-after"]) >= 1
        assert fake.behaviour.submits == []


@contextmanager
def two_routers(place: Path, tokenizer: Tokenizer, store: str = "sqlite") -> Iterator[Any]:
    """Both with the same controller and record store: the first, clients of both, and the controller."""
    with shared_records(store) as records, running(place, tokenizer, records=records) as (router, [fake]):
        config = RouterConfig(
            model_path=str(DEMO_MODEL),
            controllers=[fake.endpoint],
            port=0,
            served_model_name="demo",
            records=records,
        )
        other = RunningRouter(config, Tokenizer(DEMO_MODEL))
        other.start()
        try:
            wait_until(lambda: other.ready == 1)
            with (
                httpx.Client(base_url=router.url, timeout=20, trust_env=False) as http,
                httpx.Client(base_url=other.url, timeout=20, trust_env=False) as other_http,
            ):
                yield router, http, other_http, fake
        finally:
            other.stop()


@pytest.mark.parametrize("store", STORES)
def test_another_router_has_the_answer(place: Path, tokenizer: Tokenizer, store: str) -> None:
    with two_routers(place, tokenizer, store) as (_, http, other, fake):
        fake.behaviour.hold = True
        with ThreadPoolExecutor(2) as pool:
            one = pool.submit(ask, http, "shared", stream=True)
            wait_until(lambda: bool(fake.behaviour.submits))
            two = pool.submit(ask, other, "shared", stream=True)
            wait_until(lambda: WAITS in other.get("/metrics").text)
            fake.behaviour.hold = False
            first, second = one.result(), two.result()
        assert first.content == second.content
        assert REPLAYED not in first.headers
        assert second.headers[REPLAYED] == "true"
        assert len(fake.behaviour.submits) == 1
        assert ask(other, "shared", stream=True).content == first.content


def test_a_router_that_leaves_hands_its_request_on(
    place: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "LEASE_SECONDS", 1.0)
    monkeypatch.setattr(idempotency, "_RENEW_SECONDS", 0.2)
    with two_routers(place, tokenizer) as (router, http, other, fake):
        fake.behaviour.hold = True
        with ThreadPoolExecutor(2) as pool:
            lost = pool.submit(ask, http, "handed on", stream=True)
            wait_until(lambda: bool(fake.behaviour.submits))
            waiting = pool.submit(ask, other, "handed on", stream=True)
            router.stop()
            wait_until(lambda: len(fake.behaviour.submits) == 2)
            fake.behaviour.hold = False
            assert "[DONE]" in waiting.result().text
            assert lost.exception() is not None or "[DONE]" not in lost.result().text
        assert len(set(seeds(fake))) == 1


def test_without_the_store_a_key_still_gives_the_same_text(
    place: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "_CALL_SECONDS", 0.05)
    with one_router(place, tokenizer, records=f"redis://127.0.0.1:{free_port()}") as (_, http, fake):
        first, second = ask(http, "same"), ask(http, "same")
        for answer in (first, second):
            assert answer.status_code == 200
            assert answer.headers["idempotency-status"] == "unavailable"
        assert first.json()["id"] == second.json()["id"]
        assert len(fake.behaviour.submits) == 2
        assert len(set(seeds(fake))) == 1


def test_answers_are_not_kept_beyond_the_quota(place: Path, tokenizer: Tokenizer) -> None:
    with one_router(place, tokenizer, records_tenant_bytes=1) as (_, http, _):
        assert "idempotency-status" not in ask(http, "first").headers
        assert ask(http, "second").headers["idempotency-status"] == "unavailable"
        assert ask(http, "first").headers[REPLAYED] == "true"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_whose_record_was_deleted_is_kept_all_the_same(
    router: RunningRouter, http: httpx.Client, fake: FakeController, stream: bool
) -> None:
    """As it is when the store lacks room while the answer is made."""
    key = f"no room {stream}"
    fake.behaviour.hold = True
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, http, key, stream=stream)
        wait_until(lambda: bool(fake.behaviour.submits))
        router.forget_records()
        fake.behaviour.hold = False
        assert answer.result().status_code == 200
    assert ask(http, key, stream=stream).headers[REPLAYED] == "true"


def test_keys_may_be_switched_off(place: Path, tokenizer: Tokenizer) -> None:
    with one_router(place, tokenizer, idempotency_ttl_seconds=0) as (router, http, fake):
        for _ in range(2):
            assert REPLAYED not in ask(http, "off").headers
        assert len(set(seeds(fake))) == 2
        assert router.call(router.service.records.usage()).records == 0


# -- sessions and schemas


def test_a_session_is_made_once(router: RunningRouter, http: httpx.Client) -> None:
    fields: dict[str, Any] = {"metadata": {"who": "once"}}
    first = ask(http, "make", "/v1/sessions", **fields).json()
    forget(router, name_of("make", "/v1/sessions", **fields))
    second = ask(http, "make", "/v1/sessions", **fields)
    assert REPLAYED not in second.headers
    assert second.json()["id"] == first["id"]
    path = f"/v1/sessions/{first['id']}/fork"
    fork = ask(http, "fork", path).json()
    forget(router, name_of("fork", path))
    assert ask(http, "fork", path).json()["id"] == fork["id"] != first["id"]
    assert create(http)["id"] != create(http)["id"]


def test_a_schema_gets_one_version(router: RunningRouter, http: httpx.Client, fake: FakeController) -> None:
    pml = '<schema name="once"><module name="m">Some text.</module></schema>'
    first = ask(http, "schema", "/v1/schemas", pml=pml)
    assert (first.status_code, first.json()["version"]) == (201, 1)
    forget(router, name_of("schema", "/v1/schemas", pml=pml))
    second = ask(http, "schema", "/v1/schemas", pml=pml)
    assert REPLAYED not in second.headers
    assert (second.status_code, second.json()["version"]) == (201, 1)
    assert ask(http, "another schema", "/v1/schemas", pml=pml).json()["version"] == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [True, False])
def test_a_turn_counts_once(
    router: RunningRouter, http: httpx.Client, fake: FakeController, chat: bool, stream: bool
) -> None:
    """The router died between storing the turn and recording the answer: the turn is made again in its place."""
    session = create(http)["id"]
    path = PATH if chat else "/v1/completions"
    label = f"{chat} {stream}"

    def turn(key: str, text: str) -> tuple[httpx.Response, RequestName]:
        given: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        fields = {"session_id": session, "stream": stream, **given}
        return ask(http, f"{key} {label}", path, **fields), name_of(f"{key} {label}", path, **fields)

    assert turn("first", "one")[0].status_code == 200
    before = get(http, session)
    answer, name = turn("second", "two")
    after = get(http, session, include="messages")
    assert (before["turns"], after["turns"]) == (1, 2)
    for _ in range(2):
        forget(router, name)
        # It also still holds the session.
        token = RequestRandom(name.bytes, 0).draw("lease", 8).hex()
        router.call(router.service.records.acquire(RecordKey("session", "", session), token, 30.0))
        again, _ = turn("second", "two")
        assert again.status_code == 200, again.text
        assert REPLAYED not in again.headers
        assert essence(again) == essence(answer)
        now = get(http, session, include="messages")
        assert {**now, "last_used_at": 0, "expires_at": 0} == {**after, "last_used_at": 0, "expires_at": 0}
    *_, one, two, three = fake.behaviour.submits
    assert one.tokens == two.tokens == three.tokens, "the same prompt each time"
    assert turn("third", "three")[0].status_code == 200
    assert get(http, session)["turns"] == 3
    assert answer.status_code == 200
