"""Heads of streams that are made while the first token is on its way: what a client gets is what it got before."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from router.harness import running
from seeds import seeds
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from trunkline.router.errors import ApiError, overloaded
from trunkline.router.http.answers import BODY_OUTLET, EventStream, error_response
from trunkline.router.http.connections import _BodyOutlet
from trunkline.router.streams.generation import Generation
from trunkline.router.text.tokenizer import Tokenizer

ROUNDS = 300


class Transport:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        assert not self.is_closed
        self.writes.append(data)

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


@dataclass(frozen=True)
class Scene:
    """What happens to one stream."""

    parts: tuple[bytes, ...]
    waits: tuple[int, ...]
    """For how many turns of the loop the beginning is waited for, then each part, then the end."""
    refuses: bool
    fails: bool
    """Whether an error comes behind the parts."""
    hands_over: bool
    """Whether it turns out before the beginning that the connection is to be closed behind the answer."""
    leaves: bool
    """Whether the client leaves meanwhile."""
    is_paused: bool
    """Whether the client does not read at first."""

    @classmethod
    def drawn(cls, rng: random.Random) -> Scene:
        parts = tuple(b"data: %d\n\n" % rng.randrange(100) * rng.randrange(1, 4) for _ in range(rng.randrange(4)))
        waits = tuple(rng.choice([0, 0, 1, 3]) for _ in range(len(parts) + 2))
        return cls(parts, waits, *(rng.random() < 0.2 for _ in range(5)))


class Work:
    closed = 0

    def close(self) -> None:
        self.closed += 1


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def answered(scene: Scene, *, has_outlet: bool) -> Transport:
    """Return what a connection has got in the end."""
    transport, work = Transport(), Work()
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    logger = logging.getLogger()
    flow = FlowControl(cast("asyncio.Transport", transport))
    cycle = RequestResponseCycle(
        cast("Any", scope),
        cast("asyncio.Transport", transport),
        flow,
        logger,
        logger,
        access_log=False,
        default_headers=[(b"date", b"now")],
        message_event=asyncio.Event(),
        expect_100_continue=False,
        keep_alive=True,
        on_response=lambda: None,
    )
    if has_outlet:
        scope[BODY_OUTLET] = _BodyOutlet(cycle)
    if scene.is_paused:
        flow.pause_writing()
        asyncio.get_running_loop().call_later(0.001, flow.resume_writing)

    async def begin() -> None:
        await turns(scene.waits[0])
        if scene.hands_over:
            cycle.keep_alive = False
        if scene.leaves:
            cycle.disconnected = True
            cycle.message_event.set()
            await turns(4)
        if scene.refuses:
            raise overloaded("too many")

    async def events() -> AsyncIterator[bytes]:
        for part, wait in zip(scene.parts, scene.waits[1:], strict=False):
            await turns(wait)
            yield part
        await turns(scene.waits[-1])
        if scene.fails:
            raise overloaded("too many")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def named(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", b"7")]
            await send(message)

        try:
            await EventStream(work, events(), begin=begin)(scope, receive, named)
        except ApiError as error:
            await error_response("/v1/completions", error)(scope, receive, named)

    await cycle.run_asgi(cast("Any", app))
    await turns(2)
    assert work.closed
    return transport


@pytest.mark.parametrize("seed", seeds(3))
def test_a_head_that_was_made_ahead_is_as_any_other(seed: int) -> None:
    rng = random.Random(seed)

    async def run() -> int:
        saved = 0
        for _ in range(ROUNDS):
            scene = Scene.drawn(rng)
            plain, ahead = await answered(scene, has_outlet=False), await answered(scene, has_outlet=True)
            assert b"".join(ahead.writes) == b"".join(plain.writes), scene
            assert ahead.is_closed == plain.is_closed
            saved += len(plain.writes) - len(ahead.writes)
        return saved

    assert asyncio.run(run()) > ROUNDS / 10, "heads leave with the first part if it is there"


def test_a_failure_before_the_first_token_is_answered(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: Generation) -> None:
        await asyncio.sleep(0)
        raise RuntimeError("what should never happen")

    body = {"prompt": "x", "max_tokens": 2, "stream": True}
    with running(tmp_path, tokenizer) as (router, _), router.client() as client:
        monkeypatch.setattr(Generation, "begin", fail)
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 500
        assert answer.json()["error"]["type"]
        monkeypatch.undo()
        assert client.post("/v1/completions", json=body).status_code == 200
