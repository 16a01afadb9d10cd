"""Requests that come again with the same `Idempotency-Key` while routers die, or controllers are away."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from router.fake_controller import FakeController
from router.harness import DEMO_MODEL, RunningRouter, running, wait_until
from router.idempotency_calls import PATH, REPLAYED, ask, essence, name_of, one_router, record, seeds
from router.session_calls import create, error_of, get

from trunkline.controller.messages import RecordCall
from trunkline.router.config import RouterConfig
from trunkline.router.http import idempotency
from trunkline.router.http.idempotency import IdempotencyStore, RequestName, Result
from trunkline.router.request_context import RequestRandom
from trunkline.router.routing.policies import rendezvous
from trunkline.router.text.tokenizer import Tokenizer

# -- routers that die


def leave_unfinished(fake: FakeController, name: RequestName, lease_s: float) -> None:
    """What a router that died at work leaves behind."""
    value = msgspec.msgpack.encode(Result(name.request, 1234567890))
    assert record(fake, "create", name, value=value, ttl=600.0).status == "ok"
    assert record(fake, "acquire", name, lease="of the dead", lease_s=lease_s).status == "ok"


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_routers_request_is_taken_over(http: httpx.Client, fake: FakeController, stream: bool) -> None:
    key = f"dead {stream}"
    leave_unfinished(fake, name_of(key, stream=stream), lease_s=0.3)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: ask(http, key, stream=stream), range(4)))
    assert len(fake.behaviour.submits) == 1
    assert len({answer.content for answer in answers}) == 1
    assert '"created":1234567890' in answers[0].text, "the first try's"
    assert sum(REPLAYED not in answer.headers for answer in answers) == 1


def test_nobody_waits_for_ever(place: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trunkline.router.app.IdempotencyStore", partial(IdempotencyStore, wait_seconds=0.3))
    with one_router(place, tokenizer) as (_, http, fake):
        leave_unfinished(fake, name_of("slow"), lease_s=100.0)
        answer = ask(http, "slow")
        assert error_of(answer) == (409, "idempotency_key_in_use", "Idempotency-Key")
        assert int(answer.headers["retry-after"]) >= 1
        assert fake.behaviour.submits == []


@contextmanager
def two_routers(place: Path, tokenizer: Tokenizer, controllers: int = 1) -> Iterator[Any]:
    """Both with the same controllers: their urls, and the controllers."""
    with running(place, tokenizer, controllers=controllers) as (router, fakes):
        config = RouterConfig(
            model_path=str(DEMO_MODEL),
            controllers=[fake.endpoint for fake in fakes],
            port=0,
            served_model_name="demo",
        )
        other = RunningRouter(config, Tokenizer(DEMO_MODEL))
        other.start()
        try:
            wait_until(lambda: other.ready == controllers)
            with (
                httpx.Client(base_url=router.url, timeout=20, trust_env=False) as http,
                httpx.Client(base_url=other.url, timeout=20, trust_env=False) as other_http,
            ):
                yield router, http, other_http, fakes
        finally:
            other.stop()


@pytest.mark.processes
def test_another_router_has_the_answer(place: Path, tokenizer: Tokenizer) -> None:
    with two_routers(place, tokenizer) as (_, http, other, [fake]):
        fake.behaviour.hold = True
        with ThreadPoolExecutor(2) as pool:
            one = pool.submit(ask, http, "shared", stream=True)
            wait_until(lambda: bool(fake.behaviour.submits))
            two = pool.submit(ask, other, "shared", stream=True)
            time.sleep(0.2)
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
    with two_routers(place, tokenizer) as (router, http, other, [fake]):
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


def test_without_its_controller_a_key_still_gives_the_same_text(place: Path, tokenizer: Tokenizer) -> None:
    key = next(key for key in map(str, range(100)) if rendezvous(name_of(key).record, 2) == 1)
    with two_routers(place, tokenizer, controllers=2) as (router, http, other, [fake, home]):
        home.stop()
        wait_until(lambda: router.ready == 1)
        first, second = ask(http, key), ask(other, key)
        for answer in (first, second):
            assert answer.status_code == 200
            assert answer.headers["idempotency-status"] == "unavailable"
        assert first.json()["id"] == second.json()["id"]
        assert len(fake.behaviour.submits) == 2
        assert len(set(seeds(fake))) == 1


def test_keys_may_be_switched_off(place: Path, tokenizer: Tokenizer) -> None:
    with one_router(place, tokenizer, idempotency_ttl_seconds=0) as (_, http, fake):
        for _ in range(2):
            assert REPLAYED not in ask(http, "off").headers
        assert len(set(seeds(fake))) == 2
        assert fake.behaviour.calls == []


# -- sessions and schemas


def forget(fake: FakeController, name: RequestName) -> None:
    """As if the router had died before it could record its answer."""
    wait_until(lambda: record(fake, "delete", name).status == "ok")


def test_a_session_is_made_once(http: httpx.Client, fake: FakeController) -> None:
    fields: dict[str, Any] = {"metadata": {"who": "once"}}
    first = ask(http, "make", "/v1/sessions", **fields).json()
    forget(fake, name_of("make", "/v1/sessions", **fields))
    second = ask(http, "make", "/v1/sessions", **fields)
    assert REPLAYED not in second.headers
    assert second.json()["id"] == first["id"]
    path = f"/v1/sessions/{first['id']}/fork"
    fork = ask(http, "fork", path).json()
    forget(fake, name_of("fork", path))
    assert ask(http, "fork", path).json()["id"] == fork["id"] != first["id"]
    assert create(http)["id"] != create(http)["id"]


def test_a_schema_gets_one_version(http: httpx.Client, fake: FakeController) -> None:
    pml = '<schema name="once"><module name="m">Some text.</module></schema>'
    first = ask(http, "schema", "/v1/schemas", pml=pml)
    assert (first.status_code, first.json()["version"]) == (201, 1)
    forget(fake, name_of("schema", "/v1/schemas", pml=pml))
    second = ask(http, "schema", "/v1/schemas", pml=pml)
    assert REPLAYED not in second.headers
    assert (second.status_code, second.json()["version"]) == (201, 1)
    assert ask(http, "another schema", "/v1/schemas", pml=pml).json()["version"] == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [True, False])
def test_a_turn_counts_once(http: httpx.Client, fake: FakeController, chat: bool, stream: bool) -> None:
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
        forget(fake, name)
        # It also still holds the session.
        token = RequestRandom(name.bytes, 0).draw("lease", 8).hex()
        held = RecordCall(1, "acquire", "session", session, lease=token, lease_s=30.0)
        assert fake.behaviour.records.handle(held, 1, time.time())[0].status == "ok"
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
