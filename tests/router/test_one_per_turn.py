"""`LoopTurns`: one coroutine per turn of the loop, in order, whoever leaves."""

from __future__ import annotations

import asyncio
import random

import pytest
import uvloop
from seeds import seeds

from trunkline.router.streams.loop_turns import LoopTurns

VISITORS = 60


async def scene(rng: random.Random) -> None:
    turns, turn, loop = LoopTurns(), 0, asyncio.get_running_loop()
    came: list[int] = []
    passed: dict[int, int] = {}

    def count() -> None:
        nonlocal turn
        turn += 1
        loop.call_soon(count)

    async def visit(number: int) -> None:
        came.append(number)
        await turns.enter()
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
    assert list(passed) == [number for number in came if number in passed], "in the order in which they came"
    assert len(set(passed.values())) == len(passed), "two in one turn"
    for _ in range(3):
        await asyncio.sleep(0)
    alone = turn
    await turns.enter()
    assert turn == alone, "a single one waits"


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("seed", seeds(5))
def test_one_per_turn_in_order(seed: int, loop: type) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(scene(random.Random(seed)))
