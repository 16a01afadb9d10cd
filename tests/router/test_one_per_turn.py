"""`LoopTurns`: one coroutine per turn of the loop, ends first, each kind in order, whoever leaves. Probes wait for
no turn, and the time of a request counts from before its turn."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest
import uvloop
from seeds import seeds
from starlette.types import Receive, Scope, Send

from trunkline.router.http.middleware import RequestMiddleware
from trunkline.router.streams.loop_turns import LoopTurns
from trunkline.router.telemetry.metrics import Metrics
from trunkline.router.telemetry.request_record import arrival

VISITORS = 60
TOGETHER = 20
WORK_S = 0.002
CHAT = "/v1/chat/completions"


async def scene(rng: random.Random) -> None:
    turns, turn, loop = LoopTurns(), 0, asyncio.get_running_loop()
    came: list[int] = []
    came_in: dict[int, int] = {}
    passed: dict[int, int] = {}
    ends = {number for number in range(VISITORS) if rng.random() < 0.3}

    def count() -> None:
        nonlocal turn
        turn += 1
        loop.call_soon(count)

    async def visit(number: int) -> None:
        came.append(number)
        came_in[number] = turn
        await turns.enter(is_end=number in ends)
        passed[number] = turn

    loop.call_soon(count)
    visits: list[asyncio.Task[None]] = []
    for number in range(VISITORS):
        visits.append(asyncio.create_task(visit(number)))
        if rng.random() < 0.2:
            rng.choice(visits).cancel()
        while rng.random() < 0.3:
            await asyncio.sleep(0)
    await asyncio.wait_for(asyncio.wait(visits), 10)
    assert all(task.cancelled() or number in passed for number, task in enumerate(visits)), "one waits for ever"
    for kind in (ends, set(range(VISITORS)) - ends):
        order = [number for number in came if number in passed and number in kind]
        assert [number for number in passed if number in kind] == order, "in the order in which they came"
    for begin in passed.keys() - ends:
        waited = [
            end for end in passed.keys() & ends if came_in[end] < passed[begin] - 1 and passed[end] > passed[begin]
        ]
        assert not waited, "who is woken for a turn is an end, if one waits"
    assert len(set(passed.values())) == len(passed), "two in one turn"
    for _ in range(3):
        await asyncio.sleep(0)
    alone = turn
    await turns.enter()
    assert turn == alone, "a single one waits"


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("seed", seeds(5))
def test_one_per_turn_and_ends_first(seed: int, loop: type) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(scene(random.Random(seed)))


def test_probes_wait_for_no_turn_and_requests_count_from_when_they_came() -> None:
    order: list[str] = []
    arrivals_s: list[float] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        order.append(scope["path"])
        arrivals_s.append(arrival())
        time.sleep(WORK_S)

    async def nothing(*_: object) -> Any:
        return None

    async def come_together() -> None:
        middleware = RequestMiddleware(app, Metrics(list), frozenset({CHAT, "/health"}), turns=LoopTurns())
        paths = [*[CHAT] * TOGETHER, "/health"]
        scopes: list[Scope] = [{"type": "http", "method": "GET", "path": path, "headers": []} for path in paths]
        await asyncio.gather(*(middleware(scope, nothing, nothing) for scope in scopes))

    asyncio.run(come_together())
    assert "/health" in order[:2]
    assert max(arrivals_s) - min(arrivals_s) < TOGETHER * WORK_S / 2
