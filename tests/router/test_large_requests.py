"""Memory of large requests: bounded by their bytes, given back when they are over."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
import pytest
from router.fake_controller import FakeController
from router.harness import JSON, MESSAGES, RunningRouter, make_answer, wait_until
from router.hostile_bodies import HOSTILE
from router.process_calls import router_process

from trunkline.router.errors import ApiError
from trunkline.router.http.body import BODIES_AT_ONCE, SMALL_BYTES, LargeRequests
from trunkline.router.http.json_slices import PIECE_BYTES, VALUES_MAX
from trunkline.router.jobs.request_models import MESSAGES_MAX
from trunkline.router.text.tokenizer import TEXT_BYTES_MAX, TOKENS_MAX, Tokenizer

LEFT_BYTES_MAX: Final = 128 << 20
"""What hostile requests may leave behind in a router."""
_AT_ONCE: Final = 4


async def _count_bytes() -> None:
    large = LargeRequests(1 << 20)
    one: dict[str, Any] = {}
    other: dict[str, Any] = {}
    large.hold(one, SMALL_BYTES)
    assert (large.bytes_held, large.holds(one)) == (0, False)
    for size in (100_000, 100_000, 200_000, 150_000):  # as it arrives, and as it is read again
        large.hold(one, size)
    assert (large.bytes_held, large.holds(one)) == (200_000, True)
    large.hold(other, BODIES_AT_ONCE * (1 << 20) - 200_000)
    with pytest.raises(ApiError) as refused:
        large.hold(one, 200_001)
    assert (refused.value.status, refused.value.code) == (503, "too_many_large_requests")
    assert refused.value.headers() == {"Retry-After": "1"}
    large.release(other)
    large.hold(one, 200_001)
    large.release(one)
    large.release(one)
    assert large.bytes_held == 0
    large.close()


def test_bytes_are_counted_once_and_given_back() -> None:
    asyncio.run(_count_bytes())  # memory is given back by a timer of the loop


def test_too_many_large_requests(
    router: RunningRouter, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = router.service.large_requests
    body = {"prompt": "x" * 100_000, "truncate_prompt_tokens": 5, "max_tokens": 1}
    monkeypatch.setattr(large, "bytes_max", 50_000)
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "too_many_large_requests"
    assert "50000 is the limit" in response.json()["error"]["message"]
    assert response.headers["Retry-After"] == "1"
    assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
    monkeypatch.undo()
    for headers in ({}, {"Idempotency-Key": "large"}):  # with a key the body is read twice
        assert http.post("/v1/completions", json=body, headers=headers).status_code == 200
        wait_until(lambda: large.bytes_held == 0)


def test_a_client_that_leaves_holds_nothing(router: RunningRouter, http: httpx.Client) -> None:
    large = router.service.large_requests

    def parts() -> Any:
        yield b'{"prompt":"' + b"x" * 200_000
        wait_until(lambda: large.bytes_held >= 200_000)
        raise ConnectionAbortedError

    with pytest.raises(ConnectionAbortedError):
        http.post("/v1/completions", content=parts())
    wait_until(lambda: large.bytes_held == 0)


@pytest.mark.parametrize(
    ("path", "fields", "limit"),
    [
        ("/v1/chat/completions", {"messages": [MESSAGES[0]] * (MESSAGES_MAX + 1)}, MESSAGES_MAX),
        ("/tokenize", {"prompt": "\U0001f600" * (TEXT_BYTES_MAX // 4 + 1)}, TEXT_BYTES_MAX),
        ("/tokenize", {"prompt": "\U0001f600" * (TOKENS_MAX // 4 + 1)}, TOKENS_MAX),
    ],
    ids=["messages", "bytes", "tokens"],
)
def test_limits_are_named(http: httpx.Client, path: str, fields: dict[str, Any], limit: int) -> None:
    response = http.post(path, json=fields)
    assert response.status_code == 400
    assert str(limit) in response.json()["error"]["message"]


def test_limits_of_large_bodies_are_named(http: httpx.Client) -> None:
    response = http.post("/detokenize", json={"tokens": [5] * (VALUES_MAX + 9)})
    assert response.status_code == 413
    assert response.json()["error"]["message"] == (
        f"the request body has more than {VALUES_MAX} values, the most that a body of more than {PIECE_BYTES} "
        "bytes may have; please send less at once"
    )


@pytest.mark.area("loop")
@pytest.mark.processes
def test_memory_is_given_back(place: Path, tokenizer: Tokenizer) -> None:
    fake = FakeController(f"ipc://{place}/controller", make_answer(tokenizer))
    fake.start()
    try:
        with router_process(place, fake, resume_seconds=0.0) as (process, url):
            memory = psutil.Process(process.pid)
            for _ in range(3):
                httpx.post(
                    f"{url}/v1/chat/completions", json={"messages": MESSAGES}, timeout=60
                ).raise_for_status()
            before = memory.memory_info().rss
            for name in ("metadata", "a million ids", "prose", "emoji that fit", "300,000 messages"):
                hostile = HOSTILE[name]
                body = hostile.make()

                def send(_: int, path: str = hostile.path, body: bytes = body) -> int:
                    return httpx.post(url + path, content=body, headers=JSON, timeout=120).status_code

                with ThreadPoolExecutor(_AT_ONCE) as clients:
                    assert set(clients.map(send, range(2 if hostile.statuses == (200,) else _AT_ONCE))) <= {
                        *hostile.statuses,
                        503,
                    }
            end = time.monotonic() + 30
            while (left := memory.memory_info().rss - before) > LEFT_BYTES_MAX and time.monotonic() < end:
                time.sleep(0.2)
            assert left <= LEFT_BYTES_MAX
    finally:
        fake.stop()
