"""The end of a generation is counted behind its last piece, and once, wherever its reader leaves."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator
from typing import cast

import pytest
from router.harness import EOS, VOCAB_SIZE
from seeds import seeds

from trunkline.router.errors import ApiError
from trunkline.router.jobs.job import Job
from trunkline.router.messages import FinishReason
from trunkline.router.streams.generation import Choices, Delta, Generation
from trunkline.router.streams.streams import Stream
from trunkline.router.telemetry.metrics import Metrics
from trunkline.router.text.tokenizer import Tokenizer
from trunkline.worker.messages import Sampling

ROUNDS = 200


async def one_generation(tokenizer: Tokenizer, rng: random.Random) -> str:
    """Let a generation end in one of all ways while its reader leaves at one of all places; return its outcome."""
    ids = [rng.randrange(6, VOCAB_SIZE) for _ in range(rng.randrange(1, 6))]
    stops = tuple(filter(None, (tokenizer.decode(ids[1:2]),))) if rng.random() < 0.3 else ()
    job = Job([7], 100, Sampling(), frozenset({EOS}), stops=stops)
    released: list[bool] = []
    stream, metrics = Stream(1, lambda request, abort: released.append(abort)), Metrics(list)
    closed: list[Generation] = []
    generation = Generation(job, stream, Choices(job, tokenizer.vocabulary), metrics, 0.0, closed.append)
    end = rng.choice([FinishReason.STOP, FinishReason.LENGTH, FinishReason.ENGINE_FAILED])
    leaves_at = rng.randrange(8)
    is_cancelled = rng.random() < 0.5

    async def read() -> None:
        got = list[Delta]()
        async with contextlib.aclosing(cast("AsyncGenerator[Delta]", generation.deltas())) as pieces:
            async for delta in pieces:
                got.append(delta)
                if delta.finish is not None and delta.stop is None:
                    assert not closed, "counting makes the client wait"
                assert delta.stop is None or stream.ended, "the engine works on behind a stop string"
                if len(got) > leaves_at:
                    if is_cancelled:
                        await asyncio.sleep(10)
                    return

    reader = asyncio.create_task(read())
    for token in ids:
        stream.push(token)
        if rng.random() < 0.7:
            await asyncio.sleep(0)
    stream.finish(end)
    for _ in range(4):
        await asyncio.sleep(0)
    if not reader.done():
        reader.cancel()
    with contextlib.suppress(ApiError, asyncio.CancelledError):
        await reader
    generation.close()
    assert closed == [generation]
    assert len(released) == 1
    [family] = metrics.end_to_end.collect()
    [observed] = [sample.value for sample in family.samples if sample.name.endswith("_count")]
    assert observed == (generation.outcome in ("stop", "length"))
    return generation.outcome


@pytest.mark.parametrize("seed", seeds(3))
def test_an_end_is_counted_once_and_behind_the_last_piece(seed: int, tokenizer: Tokenizer) -> None:
    rng = random.Random(seed)

    async def scene() -> set[str]:
        return {await one_generation(tokenizer, rng) for _ in range(ROUNDS)}

    assert asyncio.run(scene()) == {"stop", "length", "failed", "client_left"}
