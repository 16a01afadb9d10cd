"""Limits of tenants over HTTP."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from router.fake_controller import FakeController
from router.harness import (
    ADMIN,
    MESSAGES,
    STORES,
    RunningRouter,
    asking,
    make_answer,
    running,
    shared_records,
    wait_until,
)
from router.process_calls import router_process

from trunkline.router.messages import FinishReason
from trunkline.router.tenancy.auth import hash_key
from trunkline.router.text.tokenizer import Tokenizer

CHAT: dict[str, Any] = {"messages": MESSAGES}


@contextmanager
def limited(
    place: Path, tokenizer: Tokenizer, rules: dict[str, Any], **options: Any
) -> Iterator[tuple[RunningRouter, FakeController, httpx.Client]]:
    path = place / "tenants.json"
    path.write_text(json.dumps(rules))
    with (
        running(place, tokenizer, tenants=str(path), **options) as (router, [fake]),
        httpx.Client(base_url=router.url, timeout=60, trust_env=False) as http,
    ):
        yield router, fake, http


def ask(http: httpx.Client, key: str = "k", **fields: Any) -> httpx.Response:
    return http.post("/v1/chat/completions", json=CHAT | fields, headers={"Authorization": f"Bearer {key}"})


def test_requests_per_minute(place: Path, tokenizer: Tokenizer) -> None:
    rules = {"tenants": {"team": {"keys": [hash_key("k")], "requests_per_minute": 3}}}
    rules["tenants"]["other"] = {"keys": [hash_key("another")]}
    with limited(place, tokenizer, rules) as (_, fake, http):
        for left in (2, 1, 0):
            answer = ask(http)
            assert answer.status_code == 200
            assert answer.headers["x-ratelimit-limit-requests"] == "3"
            assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
        answer = ask(http)
        assert answer.status_code == 429
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert error["limit"] == "requests_per_minute"
        assert "3 requests per minute" in error["message"]
        assert 1 <= int(answer.headers["retry-after"]) <= 20
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"
        assert "x-request-id" in answer.headers
        assert len(fake.behaviour.submits) == 3
        assert ask(http, key="another").status_code == 200, "another tenant"
        assert ask(http, key="unknown").status_code == 401
        headers = {"x-api-key": "k"}
        answer = http.post("/v1/messages", json={**CHAT, "max_tokens": 4}, headers=headers)
        assert answer.status_code == 429
        assert answer.json()["error"]["type"] == "rate_limit_error"
        for path in ("/health", "/version", "/v1/models"):
            assert http.get(path, headers=headers).status_code == 200
        metrics = http.get("/metrics", headers=ADMIN).text
        assert 'trunkline_rate_limited_total{limit="requests_per_minute"} 2.0' in metrics


def test_requests_at_once_are_released_on_every_path(place: Path, tokenizer: Tokenizer) -> None:
    with limited(place, tokenizer, {"default": {"requests": 1}}) as (router, fake, http):
        tenants = router.service.tenants

        def idle() -> bool:
            return tenants.running("key-" + hash_key("k")[:32]) == 0

        for stream in (False, True):
            fake.behaviour.hold = True
            before = len(fake.behaviour.submits)
            answers: list[httpx.Response] = []
            thread = threading.Thread(
                target=lambda stream=stream, answers=answers: answers.append(ask(http, stream=stream))
            )
            thread.start()
            wait_until(lambda before=before: len(fake.behaviour.submits) > before)  # type: ignore[misc]
            refused = ask(http)
            assert refused.status_code == 429
            assert refused.json()["error"]["limit"] == "requests"
            assert ask(http, key="other", max_tokens=0).status_code == 400, "another tenant's turn"
            fake.behaviour.hold = False
            thread.join(60)
            assert answers[0].status_code == 200
            wait_until(idle)
        assert ask(http, temperature=-1).status_code == 400
        wait_until(idle)
        fake.behaviour.hold = True
        for stream in (False, True):
            before, body = len(fake.behaviour.submits), CHAT | {"stream": stream}
            with asking(router, "/v1/chat/completions", body, Authorization="Bearer k"):
                wait_until(lambda before=before: len(fake.behaviour.submits) > before)  # type: ignore[misc]
            wait_until(idle)
        fake.behaviour.hold = False
        fake.behaviour.fail_after = 2
        assert "engine_failed" in ask(http, stream=True).text
        wait_until(idle)


def test_tokens_per_minute(place: Path, tokenizer: Tokenizer) -> None:
    with limited(place, tokenizer, {"default": {"tokens_per_minute": 40}}) as (_, fake, http):
        began = time.monotonic()
        answer = ask(http)
        usage = answer.json()["usage"]
        assert usage["total_tokens"] > 10
        assert answer.headers["x-ratelimit-limit-tokens"] == "40"
        sent = 1
        while answer.status_code == 200:
            answer = ask(http)
            sent += 1
            assert sent < 10
        assert answer.json()["error"]["limit"] == "tokens_per_minute"
        flowed = (time.monotonic() - began) * 40 / 60
        spent = (sent - 1) * usage["total_tokens"]
        assert spent - usage["total_tokens"] < 40 + flowed
        assert spent >= 40 - 1
        assert int(answer.headers["retry-after"]) >= int((spent - 40 - flowed) * 1.5) - 5
        assert len(fake.behaviour.submits) == sent - 1


def test_priorities_and_the_trusted_header_reach_the_engine(place: Path, tokenizer: Tokenizer) -> None:
    rules = {"tenants": {"batch": {"priority": 7}, "vip": {"priority": -7}}}
    with limited(place, tokenizer, rules, tenant_header="X-Tenant") as (_, fake, http):
        for tenant, wanted in (("batch", None), ("batch", 0), ("vip", None), ("vip", 2), ("else", None)):
            body = CHAT | ({} if wanted is None else {"priority": wanted})
            answer = http.post("/v1/chat/completions", json=body, headers={"X-Tenant": tenant})
            assert answer.status_code == 200
        http.post("/v1/completions", json={"prompt": ["a", "b"]}, headers={"X-Tenant": "batch"})
        assert [submit.priority for submit in fake.behaviour.submits] == [7, 7, -7, 2, 0, 7, 7]
        tenants = ["batch", "batch", "vip", "vip", "else", "batch", "batch"]
        assert [submit.tenant for submit in fake.behaviour.submits] == tenants
        answer = http.post("/v1/chat/completions", json=CHAT, headers={"X-Tenant": "no name"})
        assert answer.status_code == 400


@contextmanager
def two_routers(
    place: Path, tokenizer: Tokenizer, rules: dict[str, Any], store: str
) -> Iterator[tuple[list[httpx.Client], list[FakeController]]]:
    """Clients of two routers that share a store, and their controllers."""
    with contextlib.ExitStack() as work:
        records = work.enter_context(shared_records(store))
        clients, fakes = [], []
        for number in range(2):
            (folder := place / str(number)).mkdir()
            options = {"records": records, "routers": 2, "number": number}
            _, fake, http = work.enter_context(limited(folder, tokenizer, rules, **options))
            clients.append(http)
            fakes.append(fake)
        yield clients, fakes


@pytest.mark.parametrize("store", STORES)
def test_two_routers_share_the_limits(place: Path, tokenizer: Tokenizer, store: str) -> None:
    rules = {"default": {"requests_per_minute": 8}}
    with two_routers(place, tokenizer, rules, store) as (clients, fakes):
        alone = [ask(clients[0]) for _ in range(6)]
        assert [answer.status_code for answer in alone] == [200] * 6, "more than an equal part"
        assert alone[-1].headers["x-ratelimit-limit-requests"] == "8"
        assert alone[-1].headers["x-ratelimit-remaining-requests"] == "2"
        began = time.monotonic()
        others = [ask(client) for client in clients * 4]
        flowed = (time.monotonic() - began + 1) * 8 / 60
        admitted = sum(answer.status_code == 200 for answer in others)
        assert admitted <= 2 + flowed
        assert sum(len(fake.behaviour.submits) for fake in fakes) == 6 + admitted
        refused = next(answer for answer in others if answer.status_code == 429)
        assert refused.json()["error"]["limit"] == "requests_per_minute"


def test_two_routers_share_the_places(place: Path, tokenizer: Tokenizer) -> None:
    with (
        two_routers(place, tokenizer, {"default": {"requests": 2}}, "sqlite") as (clients, fakes),
        ThreadPoolExecutor(2) as pool,
    ):
        fakes[0].behaviour.hold = True
        held = [pool.submit(ask, clients[0]) for _ in range(2)]
        wait_until(lambda: len(fakes[0].behaviour.submits) == 2)
        refused = ask(clients[1])
        assert refused.status_code == 429
        assert refused.json()["error"]["limit"] == "requests"
        fakes[0].behaviour.hold = False
        assert [each.result().status_code for each in held] == [200, 200]
        wait_until(lambda: ask(clients[1]).status_code == 200)


@pytest.mark.processes
def test_a_signal_has_the_file_read(place: Path, tokenizer: Tokenizer) -> None:
    path = place / "tenants.json"
    path.write_text("{}")
    fake = FakeController(f"ipc://{place}/c", make_answer(tokenizer)).start()
    try:
        with (
            router_process(place, fake, tenants=str(path)) as (process, url),
            httpx.Client(base_url=url, timeout=60, trust_env=False) as http,
        ):
            assert ask(http).status_code == 200
            path.write_text(json.dumps({"default": {"requests_per_minute": 5000}}))
            process.send_signal(signal.SIGHUP)
            assert ask(http).status_code == 200
            wait_until(lambda: ask(http).headers.get("x-ratelimit-limit-requests") == "5000")
            assert process.poll() is None
    finally:
        fake.stop()


def test_a_prompt_that_no_controller_computes_costs_nothing(place: Path, tokenizer: Tokenizer) -> None:
    with limited(place, tokenizer, {"default": {"tokens_per_minute": 1000}}) as (router, fake, http):
        book = router.service.tenants._book
        now = book.clock()
        book.clock = lambda: now  # nothing flows in

        def left(answer: httpx.Response) -> int:
            return int(answer.headers["x-ratelimit-remaining-tokens"])

        first = ask(http)
        usage = left(ask(http, key="other")) - left(ask(http, key="other"))
        assert usage == first.json()["usage"]["total_tokens"]
        [link] = router.service.links
        link._send = lambda message: False  # type: ignore[method-assign]
        answer = ask(http)
        assert answer.status_code == 503
        assert left(answer) == 1000 - usage
        del link._send
        for reason, status in ((FinishReason.ENGINE_FAILED, 503), (FinishReason.QUEUE_FULL, 429)):
            fake.behaviour.refuse = reason
            for stream in (False, True):
                router.forgive()
                assert ask(http, stream=stream).status_code == status
        fake.behaviour.refuse = None
        router.forgive()
        fake.behaviour.fail_after = 2
        assert "engine_failed" in ask(http, stream=True).text  # two tokens were computed: the prompt is paid
        spent = 1000 - usage - left(ask(http, max_tokens=0))
        assert first.json()["usage"]["prompt_tokens"] < spent < usage
