"""Controllers that refuse, die, fall silent or lose messages; clients that leave; routers that drain."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from router.fake_controller import FakeController
from router.harness import ADMIN, MESSAGES, RunningRouter, asking, held_request, running, wait_until

from trunkline.router.messages import FinishReason
from trunkline.router.streams import health
from trunkline.router.text.tokenizer import Tokenizer

CHAT: dict[str, Any] = {"messages": MESSAGES}
LONG: dict[str, Any] = {"prompt": [50, 51], "max_tokens": 1500, "ignore_eos": True}


def last_event(text: str) -> Any:
    """Payload of a stream's last event."""
    return json.loads([part for part in text.split("\n\n") if part][-1].removeprefix("data: "))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        (FinishReason.QUEUE_FULL, 429, "queue_full"),
        (FinishReason.DRAINING, 503, "draining"),
        (FinishReason.ENGINE_FAILED, 503, "engine_failed"),
        (FinishReason.ABORT, 503, "aborted"),
        (FinishReason.INVALID, 400, "invalid_request"),
    ],
)
def test_refusals(
    http: httpx.Client, fake: FakeController, stream: bool, reason: FinishReason, status: int, code: str
) -> None:
    fake.behaviour.refuse = reason
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", LONG)):
        response = http.post(path, json=body | {"stream": stream})
        assert response.status_code == status
        assert response.json()["error"]["code"] == code
        assert ("retry-after" in response.headers) == (status != 400)


def test_engine_fails_mid_stream(router: RunningRouter, http: httpx.Client, fake: FakeController) -> None:
    fake.behaviour.fail_after, fake.behaviour.fail_when = 3, router.has_begun
    streamed = http.post("/v1/chat/completions", json=CHAT | {"stream": True})
    assert streamed.status_code == 200
    assert "[DONE]" not in streamed.text
    error = last_event(streamed.text)["error"]
    assert error["code"] == "engine_failed"
    assert "worker 1 died" in error["message"]
    assert "Hello" in streamed.text, "tokens before the failure are shown"
    whole = http.post("/v1/chat/completions", json=CHAT)
    assert whole.status_code == 503
    assert whole.json()["error"]["code"] == "engine_failed"


def test_a_lost_message_fails_the_streams_and_only_them(
    router: RunningRouter, http: httpx.Client, fake: FakeController
) -> None:
    fake.behaviour.gap_after = 3
    fake.behaviour.seconds_per_token = 0.005
    streamed = http.post("/v1/completions", json=LONG | {"stream": True})
    assert "messages were lost" in last_event(streamed.text)["error"]["message"]
    wait_until(lambda: router.ready == 1)
    assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
    wait_until(lambda: len(fake.behaviour.aborts) == 1)  # it was told to stop


def test_a_lost_connection_fails_its_streams_whatever_else_fails(
    router: RunningRouter, http: httpx.Client, fake: FakeController, monkeypatch: pytest.MonkeyPatch
) -> None:
    [link] = router.service.links
    fake.behaviour.hold = True
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(http.post, "/v1/chat/completions", json=CHAT)
        wait_until(lambda: link.inflight == 1)

        async def lose() -> None:
            with monkeypatch.context() as patch:
                patch.setattr(link, "on_change", lambda _: 1 // 0)
                with pytest.raises(ZeroDivisionError):
                    link.lost("it was")

        router.call(lose())
        lost = answer.result(30)
    assert (lost.status_code, lost.json()["error"]["code"]) == (503, "engine_failed")
    fake.behaviour.hold = False
    wait_until(lambda: router.ready == 1)
    assert http.post("/v1/chat/completions", json=CHAT).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold", [False, True])
def test_a_client_that_leaves_aborts_its_request(
    router: RunningRouter, fake: FakeController, http: httpx.Client, stream: bool, hold: bool
) -> None:
    fake.behaviour.seconds_per_token = 0.005
    fake.behaviour.hold = hold
    with httpx.Client(base_url=router.url, timeout=60, trust_env=False) as leaving:
        if stream:
            with leaving.stream("POST", "/v1/completions", json=LONG | {"stream": True}, timeout=60) as response:
                chunks = response.iter_bytes()  # if it were let go of, so would be the connection
                if not hold:
                    next(chunks)
                wait_until(lambda: fake.live == 1)
        else:
            with asking(router, "/v1/completions", LONG):
                wait_until(lambda: fake.live == 1)
    wait_until(lambda: len(fake.behaviour.aborts) == 1 and fake.live == 0 and router.inflight == 0)
    wait_until(lambda: 'status="499"' in http.get("/metrics").text)


def test_a_client_that_leaves_behind_a_further_request_is_noticed(
    router: RunningRouter, fake: FakeController
) -> None:
    fake.behaviour.hold = True
    url, text = httpx.URL(router.url), json.dumps(LONG)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.netloc.decode()}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(text)}\r\n\r\n{text}".encode()
    with socket.create_connection((url.host, url.port or 80)) as connection:
        connection.sendall(request)
        wait_until(lambda: fake.live == 1)
        connection.sendall(request)
    wait_until(lambda: len(fake.behaviour.aborts) == 1 and fake.live == 0 and router.inflight == 0, 10)
    assert len(fake.behaviour.submits) == 1


def test_health_needs_a_token(http: httpx.Client, fake: FakeController, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_FRESH_SECONDS", 0.0)  # what was proved is over
    monkeypatch.setattr(health, "_PROBE_SECONDS_MAX", 60.0)
    fake.behaviour.hold = True
    callers, check = [0], health.HealthProbe.check

    async def counted(probe: health.HealthProbe) -> health.Health:
        callers[0] += 1
        return await check(probe)

    with monkeypatch.context() as patch, ThreadPoolExecutor(4) as pool:
        patch.setattr(health.HealthProbe, "check", counted)
        answers = [pool.submit(http.get, "/health") for _ in range(4)]
        wait_until(lambda: callers[0] == 4 and fake.live > 0)
        fake.behaviour.hold = False
        assert {answer.result().status_code for answer in answers} == {200}
    assert len(fake.behaviour.submits) == 1, "callers share a probe"
    fake.behaviour.hold = True
    with monkeypatch.context() as patch:
        patch.setattr(health, "_PROBE_SECONDS_MAX", 0.3)
        answer = http.get("/health")
    assert (answer.status_code, "no token" in answer.json()["reason"]) == (503, True)
    fake.behaviour.hold = False
    assert http.get("/health").status_code == 200


def test_a_failed_or_starting_engine(router: RunningRouter, http: httpx.Client, fake: FakeController) -> None:
    for status in ("starting", "failed", "draining"):
        fake.behaviour.status, fake.behaviour.detail = status, "rank 1: loading"
        wait_until(lambda: router.ready == 0)
        response = http.post("/v1/chat/completions", json=CHAT)
        assert response.status_code == 503
        assert "rank 1: loading" in response.json()["error"]["message"]
        assert http.get("/health").status_code == 503
        assert status in http.get("/health").json()["reason"]
        fake.behaviour.status = "ready"
        wait_until(lambda: router.ready == 1)


def test_a_late_and_then_frozen_controller(place: Path, tokenizer: Tokenizer) -> None:
    with (
        running(place, tokenizer, wait=False) as (router, [fake]),
        httpx.Client(base_url=router.url, timeout=60) as http,
    ):
        assert http.get("/health").status_code == 503
        assert "not connected" in http.get("/health").json()["reason"]
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 503
        assert http.post("/flush_cache", headers=ADMIN).status_code == 503
        fake.start()
        wait_until(lambda: router.ready == 1)
        fake.behaviour.mute = True
        router.service.links[0]._silence_seconds = 0.5
        response = http.post("/v1/chat/completions", json=CHAT, timeout=60)
        assert response.status_code == 503
        assert "no answer" in response.json()["error"]["message"]
        router.service.links[0]._silence_seconds = 60.0  # a fake that gets no turn for long is not frozen
        fake.behaviour.mute = False
        wait_until(lambda: router.ready == 1)
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_a_router_that_stood_still_does_not_take_its_controller_for_dead(
    place: Path, tokenizer: Tokenizer
) -> None:
    with running(place, tokenizer) as (router, [fake]), httpx.Client(base_url=router.url, timeout=60) as http:
        link = router.service.links[0]
        fake.behaviour.hold = True
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(http.post("/v1/chat/completions", json=CHAT)))
        thread.start()
        wait_until(lambda: fake.live == 1)
        stood = threading.Event()

        async def stand_still() -> None:
            link._silence_seconds = 0.5
            threading.Event().wait(1.0)
            await asyncio.sleep(0.02)  # the look at the connection that is overdue comes first
            link._silence_seconds = 60.0  # the fake may get its turns late, too
            stood.set()

        router.spawn(stand_still())
        assert stood.wait(60)
        wait_until(lambda: router.ready == 1)
        fake.behaviour.hold = False
        thread.join(60)
        assert answers[0].status_code == 200
        assert link.connections == 1


def test_limits_of_the_router_itself(place: Path, tokenizer: Tokenizer) -> None:
    options: dict[str, Any] = {"max_inflight": 1, "max_context": 100}
    with running(place, tokenizer, **options) as (router, [fake]), router.client() as http:
        with held_request(fake, lambda: http.post("/v1/chat/completions", json=CHAT)):
            busy = http.post("/v1/chat/completions", json=CHAT)
            assert (busy.status_code, busy.headers["retry-after"]) == (429, "1")
        fake.behaviour.hold = True
        router.service.config = msgspec.structs.replace(router.service.config, request_timeout_seconds=0.5)
        late = http.post("/v1/chat/completions", json=CHAT)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
        wait_until(lambda: fake.live == 0)
        assert http.post("/v1/completions", json={"prompt": [5] * 100}).status_code == 400


@pytest.mark.processes
def test_a_slow_reader_loses_nothing(router: RunningRouter, fake: FakeController, tokenizer: Tokenizer) -> None:
    """Tokens queue up behind a client that does not read; the text stays whole and others go on."""
    body = json.dumps(LONG | {"stream": True}).encode()
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", int(router.url.rsplit(":", 1)[1])))
        slow.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        slow.sendall(body)
        time.sleep(0.5)
        assert httpx.post(f"{router.url}/v1/chat/completions", json=CHAT, timeout=60).status_code == 200
        data = b""
        while part := slow.recv(65536):
            data += part
    events = [line for line in data.decode().splitlines() if line.startswith("data: {")]
    text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in events)
    assert text == tokenizer.decode([51] * 1500)
