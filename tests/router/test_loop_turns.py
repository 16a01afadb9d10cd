"""No request keeps the event loop from others for more than 50 ms, whatever it is.

Turns of the loop are measured, and steps of threads that hold Python's lock (`loop_meter.py`).
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx
import pytest
from router.harness import JSON, RunningRouter, running, wait_until
from router.hostile_bodies import HOSTILE
from router.loop_meter import LoopMeter, metered

from trunkline.router.text.tokenizer import Tokenizer

TURN_S_MAX: Final = 0.05
ATTEMPTS: Final = 8
"""CPU time is longer where others share the caches: the shortest of some tries counts."""
_SETTLED_S: Final = 0.05
TOGETHER: Final = 64
TOGETHER_TURN_S_MAX: Final = 0.01
"""Longest turn while so many requests begin and end together; one after the other they take 20 ms and more."""
USUAL: Final = ("prompts streamed", "nesting in the loop", "messages in the loop", "tools", "a million ids")
"""A body for each place where work was split up; the others run when the area's files have changed."""
pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def measured(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer
) -> Iterator[tuple[RunningRouter, LoopMeter]]:
    """A router of its own, whose threads are seen from their start."""
    place: Path = tmp_path_factory.mktemp("t")
    with running(place, tokenizer) as (router, _), metered(router) as meter:
        httpx.post(f"{router.url}/v1/completions", json={"prompt": "x", "max_tokens": 2}).raise_for_status()
        yield router, meter


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in USUAL else pytest.mark.area("loop")) for name in HOSTILE]
)
def test_no_request_keeps_the_loop(measured: tuple[RunningRouter, LoopMeter], name: str) -> None:
    router, meter = measured
    hostile = HOSTILE[name]
    body = hostile.make()
    turn_s = step_s = float("inf")
    step = ""
    for attempt in range(ATTEMPTS):
        meter.reset()
        headers = {**JSON, **hostile.headers}
        response = httpx.post(router.url + hostile.path, content=body, headers=headers, timeout=120)
        assert response.status_code in hostile.statuses, response.text[:500]
        wait_until(lambda: router.inflight == 0 and router.service.large_requests.bytes_held == 0)
        time.sleep(_SETTLED_S)  # for what is let go of
        turn_s = min(turn_s, meter.turn_s)
        if meter.step_s < step_s:
            step_s, step = meter.step_s, meter.step
        if max(turn_s, step_s) <= TURN_S_MAX:
            break
        assert attempt < ATTEMPTS - 1, f"a turn of {turn_s * 1e3:.0f} ms, a step of {step_s * 1e3:.0f} ms: {step}"


def test_requests_that_come_together_keep_no_stream_waiting(measured: tuple[RunningRouter, LoopMeter]) -> None:
    router, meter = measured
    body = json.dumps({"prompt": [5, 6, 7], "max_tokens": 1, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\nConnection: close"
    request = f"{head}\r\nContent-Type: application/json\r\n\r\n{body}".encode()
    address = "127.0.0.1", httpx.URL(router.url).port or 80
    turns_s: list[float] = []
    while min(turns_s, default=1.0) > TOGETHER_TURN_S_MAX:
        assert len(turns_s) < ATTEMPTS, turns_s
        clients = [socket.create_connection(address) for _ in range(TOGETHER)]
        time.sleep(_SETTLED_S)
        meter.reset()
        for client in clients:
            client.sendall(request)
        for client in clients:
            with client, client.makefile("rb") as answer:
                assert answer.readline() == b"HTTP/1.1 200 OK\r\n"
                assert answer.read().endswith(b"\r\n0\r\n\r\n")
        turns_s.append(meter.turn_s)
