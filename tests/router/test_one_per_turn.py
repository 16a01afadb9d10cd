"""`LoopTurns`: one coroutine per turn of the loop, ends first, each kind in order, whoever leaves. Probes wait for
no turn, and the time of a request counts from before its turn."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import uvloop
from seeds import seeds
from starlette.types import Receive, Scope, Send

from trunkline.router.http.middleware import RequestMiddleware
from trunkline.router.jobs.job import Job
from trunkline.router.routing.core import RoutingCore
from trunkline.router.routing.request import RouteRequest
from trunkline.router.streams.dispatch import Dispatcher
from trunkline.router.streams.links import Links
from trunkline.router.streams.loop_turns import LoopTurns
from trunkline.router.streams.streams import Stream
from trunkline.router.telemetry.metrics import Metrics
from trunkline.router.telemetry.request_record import arrival
from trunkline.worker.messages import Sampling

VISITORS = 60
TOGETHER = 20
CHAT = "/v1/chat/completions"


async def scene(rng: random.Random) -> None:
    turns, turn, loop = LoopTurns(), 0, asyncio.get_running_loop()
    came: list[int] = []
    came_in: dict[int, int] = {}
    passed: dict[int, int] = {}
    ends = {number for number in range(VISITORS) if rng.random() < 0.3}
    pause = rng.choice((0.2, 0.5, 0.6))  # with the longer ones there are turns in which none waits

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
        while rng.random() < pause:
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
@pytest.mark.parametrize("seed", seeds(10))
def test_one_per_turn_and_ends_first(seed: int, loop: type) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(scene(random.Random(seed)))


def test_the_end_of_a_stream_waits_for_no_beginning_that_came_before_it() -> None:
    passed: list[str] = []

    async def begin(turns: LoopTurns, name: str) -> None:
        await turns.enter()
        passed.append(name)
        asyncio.get_running_loop().call_soon(passed.append, "|")  # the next turn

    async def read(stream: Stream) -> None:
        assert (await stream.next()).end is not None
        passed.append("end")

    async def come_together() -> None:
        dispatcher = Dispatcher(Links(), RoutingCore(), resume_seconds=600.0, max_context=lambda model: 2048)
        dispatcher._served.add("")  # so that a request may wait for a controller
        job = Job(prompt=[7], max_tokens=1, sampling=Sampling(), eos_ids=frozenset({1}))
        stream = dispatcher.submit(job, RouteRequest(b""))
        stream.finish("stop")
        await asyncio.gather(*(begin(dispatcher.turns, name) for name in "abc"), read(stream))

    asyncio.run(come_together())
    assert passed[:4] == ["a", "|", "end", "b"]


def test_probes_wait_for_no_turn_and_requests_count_from_when_they_came() -> None:
    order: list[str] = []
    arrivals: list[float] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        order.append(scope["path"])
        arrivals.append(arrival())

    async def nothing(*_: object) -> Any:
        return None

    async def come_together() -> None:
        asyncio.get_running_loop().time = lambda: len(order)  # type: ignore[method-assign]
        middleware = RequestMiddleware(app, Metrics(list), frozenset({CHAT, "/health"}), turns=LoopTurns())
        paths = [*[CHAT] * TOGETHER, "/health"]
        scopes: list[Scope] = [{"type": "http", "method": "GET", "path": path, "headers": []} for path in paths]
        await asyncio.gather(*(middleware(scope, nothing, nothing) for scope in scopes))

    asyncio.run(come_together())
    assert "/health" in order[:2]
    assert sorted(arrivals) == [0, *[1] * TOGETHER], "the first one's work is done when the others come"
