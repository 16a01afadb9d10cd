"""A streamed completion, timed with as little work as possible in the client.

The client's processors are those that the server computes with, and a client library takes milliseconds of them
before the first byte is sent and behind the first that comes. Here a request is encoded before the clock starts,
bytes that come are only kept, and they are read when the last one is there.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, Final
from urllib.parse import urlsplit

from serving import StreamTimes, body_of

PATIENCE_S: Final = 600.0
_EVENT: Final = b"data: {"
_END: Final = b"\r\n0\r\n\r\n"
"""The last chunk of a body that is sent in chunks."""


class _Answer(asyncio.Protocol):
    """A connection for one request, and what has come through it."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.taken = bytearray()
        self.first = self.end = 0.0
        self.is_over = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self.taken += data
        if not self.first and _EVENT in self.taken:
            self.first = now
        if self.taken.endswith(_END):
            self._over(now)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc  # what has come says what is wrong
        self._over(time.perf_counter())

    def _over(self, now: float) -> None:
        if not self.is_over.done():
            self.end = now
            self.is_over.set_result(None)


def body_and_status(answer: bytes) -> tuple[bytes, int]:
    """Return the body of an HTTP answer, put together of its chunks, and the status.

    Raises:
        ValueError: it is no such answer.
    """
    head, separator, rest = answer.partition(b"\r\n\r\n")
    words = head.split(None, 2)
    if not separator or len(words) < 2 or not words[1].isdigit():
        raise ValueError(f"this is no answer of HTTP: {answer[:200]!r}")
    if b"transfer-encoding: chunked" not in head.lower():
        return rest, int(words[1])
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        count = int(size, 16)
        if not count:
            break
        body, rest = body + rest[:count], rest[count + 2 :]
    return body, int(words[1])


async def plain_stream(
    url: str, model: str, prompt: list[int] | str, max_tokens: int, *, ignore_eos: bool = True
) -> StreamTimes:
    """Send a completion of exactly `max_tokens` tokens over a new connection and time its stream: from before the
    connection is made.

    Args:
        url: Of the server, without a path.
        ignore_eos: As of `serving.stream`.

    Raises:
        SystemExit: The server refuses, or sends no usage.
        TimeoutError: The answer takes longer than `PATIENCE_S`.
    """
    content = json.dumps(body_of(model, prompt, max_tokens, ignore_eos=ignore_eos)).encode()
    host = urlsplit(url)
    place = host.hostname or "", host.port or 80
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host.netloc}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode() + content
    start = time.perf_counter()
    loop = asyncio.get_running_loop()
    transport, answer = await loop.create_connection(lambda: _Answer(request), *place)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await answer.is_over
    finally:
        transport.close()
    body, status = body_and_status(bytes(answer.taken))
    if status != 200:
        raise SystemExit(f"the server answered {status}: {body.decode(errors='replace')}")
    lines = [line for line in body.decode().splitlines() if line.startswith("data: {")]
    usage = next((found for line in reversed(lines) if (found := json.loads(line[6:]).get("usage"))), None)
    if usage is None:
        raise SystemExit("the server sent no usage; it must support stream_options.include_usage")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return StreamTimes(answer.first - start, answer.end - start, usage["completion_tokens"], cached, start)
