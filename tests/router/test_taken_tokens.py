"""Tokens that are written while their reader waits: none is lost, doubled or overtaken, whatever arrives when."""

from __future__ import annotations

import asyncio
import random

import pytest
from router.harness import EOS, VOCAB_SIZE
from seeds import seeds

from trunkline.router.jobs.job import Job
from trunkline.router.messages import FinishReason, Started
from trunkline.router.streams.generation import Choices, Delta, Generation
from trunkline.router.streams.streams import Stream
from trunkline.router.streams.takers import Taker
from trunkline.router.telemetry.metrics import Metrics
from trunkline.router.text.tokenizer import Tokenizer
from trunkline.worker.messages import Sampling

ROUNDS = 60


class Outlet:
    """Collects what is written; opens and closes at random, as a connection whose client reads slowly."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.parts: list[bytes] = []
        self.direct = 0

    @property
    def is_open(self) -> bool:
        return self._rng.random() < 0.7

    def write(self, part: bytes) -> None:
        self.parts.append(part)
        self.direct += 1


def push(stream: Stream, token: int, rng: random.Random) -> None:
    """Push a token as a link does: the stream offers it at once, or with what comes until the loop's next turn."""

    def offer(offering: Stream) -> None:
        taken: list[Taker] = []
        offering.offer(taken)
        for taker in taken:
            taker.write()
            taker.count(0.0)

    if (offering := stream.push(token)) is None:
        return
    if rng.random() < 0.5:
        offer(offering)
    else:
        asyncio.get_running_loop().call_soon(offer, offering)


def encode(delta: Delta) -> bytes:
    return delta.text.encode()


async def one_stream(tokenizer: Tokenizer, rng: random.Random) -> int:
    """Let random tokens arrive at random times; return how many parts did not go through the reader."""
    ids = [rng.randrange(6, VOCAB_SIZE) for _ in range(rng.randrange(60))]
    ends = rng.random() < 0.5
    stops = (tokenizer.decode(ids[40:42]),) if len(ids) > 45 and rng.random() < 0.3 else ()
    job = Job([7], 100, Sampling(), frozenset({EOS}), stops=tuple(filter(None, stops)))
    plain = Choices(job, tokenizer.vocabulary)
    whole = [*ids, EOS] if ends else ids
    stream, metrics, outlet = Stream(1, lambda request, abort: None), Metrics(list), Outlet(rng)
    choices = Choices(job, tokenizer.vocabulary)
    generation = Generation(job, stream, choices, metrics, 0.0, lambda generation: None)

    written = 0

    def encode_counted(delta: Delta) -> bytes:
        nonlocal written
        written += len(delta.tokens)
        assert generation.output_tokens == written, "an event may say how many tokens there are with its own"
        return encode(delta)

    async def read() -> None:
        async for delta in generation.deltas():
            outlet.parts.append(encode_counted(delta))
            generation.write_to(outlet, encode_counted)
            while rng.random() < 0.3:
                await asyncio.sleep(0)

    reader = asyncio.create_task(read())
    stream.receive(Started(1, 0))
    expected = b""
    for token in whole:
        push(stream, token, rng)
        while rng.random() < 0.6:
            await asyncio.sleep(0)
    stream.finish(FinishReason.STOP if ends else FinishReason.LENGTH)
    await asyncio.wait_for(reader, 10)
    for start, token in enumerate(whole):
        is_last = start + 1 == len(whole)
        reason = (FinishReason.STOP if ends else FinishReason.LENGTH) if is_last else None
        text = plain._texts[0].feed([token], (), reason)
        expected += encode(text)
        if text.finish is not None:
            break
    assert b"".join(outlet.parts) == expected
    assert generation.output_tokens == metrics.per_token.tokens == plain._texts[0].output_tokens
    assert stream.outputs[0][: generation.output_tokens] == whole[: generation.output_tokens]
    return outlet.direct


@pytest.mark.parametrize("seed", seeds(3))
def test_what_is_written_beside_the_reader_is_in_its_place(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)

    async def scene() -> int:
        return sum([await one_stream(tokenizer, rng) for _ in range(ROUNDS)])

    assert asyncio.run(scene()) > ROUNDS, "most tokens need no reader"


class BrokenOutlet(Outlet):
    """Is open now and then, as others, but cannot be written to."""

    def write(self, part: bytes) -> None:
        raise ValueError("no such text")


@pytest.mark.parametrize("breaks", ["encoding", "writing"])
def test_what_a_taker_meets_is_raised_by_the_reader(tokenizer: Tokenizer, breaks: str) -> None:
    async def scene() -> None:
        rng = random.Random(0)
        stream, outlet = Stream(1, lambda request, abort: None), BrokenOutlet(rng)
        job = Job([7], 100, Sampling(), frozenset({EOS}))
        choices = Choices(job, tokenizer.vocabulary)
        generation = Generation(job, stream, choices, Metrics(list), 0.0, lambda generation: None)

        def encoded(delta: Delta) -> bytes:
            if breaks == "encoding":
                raise ValueError("no such text")
            return b"a text"

        async def read() -> None:
            async for _ in generation.deltas():
                generation.write_to(outlet, encoded)

        reader = asyncio.create_task(read())
        for _ in range(20):  # the outlet is closed now and then
            await asyncio.sleep(0)
            push(stream, 9, rng)
        with pytest.raises(ValueError, match="no such text"):
            await asyncio.wait_for(reader, 10)
        assert stream.ended

    asyncio.run(scene())
