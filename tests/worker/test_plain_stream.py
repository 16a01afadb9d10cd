"""Streams that benchmarks time (benchmarks/plain_stream.py): answers in any pieces, servers that refuse."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable

import pytest
from plain_stream import body_and_status, plain_stream
from seeds import seeds
from serving import StreamTimes

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = [b'data: {"choices": [{"text": "w%d"}]}\n\n' % number for number in range(20)]
USAGE = {"completion_tokens": 20, "prompt_tokens_details": {"cached_tokens": 7}}
END = [b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n", b"data: [DONE]\n\n"]
Write = Callable[[bytes], Awaitable[None]]


def chunk(part: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(part), part)


async def asked(answer: Callable[[bytes, Write], Awaitable[None]]) -> StreamTimes:
    """Send a request to a server that does this with it, and a way to write."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])

        async def write(part: bytes) -> None:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)

        await answer(await reader.readexactly(length), write)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        return await plain_stream(f"http://127.0.0.1:{port}", "m", [5, 6], 20)


@pytest.mark.parametrize("seed", seeds(4))
def test_a_stream_in_any_pieces_is_read_whole(seed: int) -> None:
    rng = random.Random(seed)
    sent = b"".join(map(chunk, [*EVENTS, *END])) + b"0\r\n\r\n"

    async def answer(body: bytes, write: Write) -> None:
        fields = json.loads(body)
        assert fields["prompt"] == [5, 6]
        assert fields["stream_options"] == {"include_usage": True}
        await write(HEAD[:30])
        rest = HEAD[30:] + sent
        while rest:
            count = rng.choice((1, 7, 60, 400))
            await write(rest[:count])
            rest = rest[count:]

    times = asyncio.run(asked(answer))
    assert (times.tokens, times.cached) == (20, 7)
    assert 0 < times.first <= times.end


def test_a_body_without_chunks_ends_with_its_connection() -> None:
    async def answer(body: bytes, write: Write) -> None:
        del body
        await write(b"HTTP/1.1 200 OK\r\n\r\n" + b"".join([*EVENTS, *END]))

    assert asyncio.run(asked(answer)).tokens == 20


def test_a_refusal_and_a_stream_without_usage_end_the_run() -> None:
    async def refuse(body: bytes, write: Write) -> None:
        del body
        await write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\nlate")

    async def be_silent(body: bytes, write: Write) -> None:
        del body
        await write(HEAD + chunk(EVENTS[0]) + b"0\r\n\r\n")

    with pytest.raises(SystemExit, match="503: late"):
        asyncio.run(asked(refuse))
    with pytest.raises(SystemExit, match="no usage"):
        asyncio.run(asked(be_silent))


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 200 OK\r\n"])
def test_what_is_no_http_is_named(answer: bytes) -> None:
    with pytest.raises(ValueError, match="no answer of HTTP"):
        body_and_status(answer)
