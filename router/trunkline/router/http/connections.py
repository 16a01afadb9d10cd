"""One connection of a client: uvicorn's HTTP protocol with limits on what a connection may cost.

uvicorn's parser has none, so `BoundedProtocol` sets them:

    accepted ─► first byte ─► headers complete ─► body complete ─► answer ─► idle, or the next request
       └ idle_s     └ headers_s        └ body_s (a little more than `read_body` waits, whose answer says why)

A client that is slower, or sends more, gets an error and is disconnected. The error comes behind the answers to
the requests before it, as a client takes what comes first for the answer to what it sent first. A connection costs
a few kilobytes until its headers are complete, and the server keeps at most `connections` of them: unknown clients
can cost no more memory.
"""

from __future__ import annotations

import asyncio
import functools
import re
import sys
from collections import deque
from http import HTTPStatus
from itertools import chain
from typing import Any, Final

import httptools
import msgspec
from starlette.types import Message, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from trunkline.router.http.answers import BODY_OUTLET
from trunkline.router.http.body import TAKE_BODY

_UPLOADS: Final = b"/v1/files"
_BODY_MARGIN: Final = 1.1
_AUTHORITY_END: Final = re.compile(rb"[/?#]")
_READ_AHEAD: Final = 1
"""Largest number of requests behind the one that is being answered with which a connection is still read."""
_CHUNKED: Final = b"transfer-encoding: chunked\r\n"
_AS_IT_IS: Final = -1.0
"""Stands for the seconds of a timer that goes on."""


class ConnectionLimits(msgspec.Struct, frozen=True):
    """Limits of one connection: sizes in bytes, times in seconds. The fields of `RouterConfig` give the
    reasons."""

    connections: int
    header_bytes: int
    headers: int
    url_bytes: int
    headers_s: float
    body_s: float
    file_s: float
    """As `body_s`, for a request that uploads a file; the endpoint limits the time of each part of it."""
    idle_s: float


class ConnectionState(ServerState):
    """The state that all connections of a process share."""

    limits: ConnectionLimits
    hands_over = False
    """Whether connections are closed after their next answer."""


class _Held:
    """Takes what is written to a connection's transport."""

    __slots__ = ("written",)

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data


class _BodyOutlet:
    """Writes the head and parts of an answer as `RequestResponseCycle.send` does, but parts at once or not at all
    (a `StreamOutlet`)."""

    __slots__ = ("_cycle", "_head", "_keeps_alive")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._head = b""
        """The head that was made, until it is written."""
        self._keeps_alive = True
        """Whether it says that the connection stays open."""

    async def make_head(self, send: Send, start: Message) -> None:
        """Have `send` make the head of an answer from its `start`, but write nothing."""
        cycle, held = self._cycle, _Held()
        if cycle.flow.write_paused or cycle.disconnected:
            return  # `send` would wait
        transport, self._keeps_alive = cycle.transport, cycle.keep_alive
        cycle.transport = held  # type: ignore[assignment]
        try:
            await send(start)
        finally:
            cycle.transport = transport
            cycle.response_started, cycle.chunked_encoding = False, None
        self._head = held.written

    def begin(self) -> bool:
        """Begin the answer with the head that was made; return False if there is none that still holds. It leaves
        with the first part, or in the loop's next turn."""
        cycle = self._cycle
        if not self._head or cycle.disconnected or cycle.keep_alive != self._keeps_alive:
            self._head = b""
            return False
        cycle.response_started = cycle.chunked_encoding = True
        asyncio.get_running_loop().call_soon(self.flush)
        return True

    @property
    def has_begun(self) -> bool:
        """Whether the answer has begun, so that it can be no other one."""
        return self._cycle.response_started

    def flush(self) -> None:
        """Write the head, if it has begun and is not written."""
        head, self._head = self._head, b""
        if head and self.has_begun and not self._cycle.disconnected:
            self._cycle.transport.write(head)

    @property
    def is_open(self) -> bool:
        """Whether parts can be written: the headers are out, the client is there and reads fast enough."""
        cycle = self._cycle
        return bool(cycle.chunked_encoding) and not (
            cycle.flow.write_paused or cycle.disconnected or cycle.response_complete
        )

    def write(self, part: bytes) -> None:
        """Write a part; call it only while `is_open`."""
        head, self._head = self._head, b""
        self._cycle.transport.write(b"%b%x\r\n%b\r\n" % (head, len(part), part))


class _UnchunkedAnswer:
    """Sends an answer to a client of HTTP/1.0, which knows no chunks: the connection's end is the answer's end."""

    __slots__ = ("_cycle", "_is_open_ended", "_send")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._send = cycle, cycle.send
        self._is_open_ended = False
        """Whether the head does not say how long the answer is."""

    async def send(self, message: Message) -> None:
        """Send the head or a part of the answer."""
        cycle = self._cycle
        if not cycle.response_started:
            await self._send_head(message)
            return
        if self._is_open_ended and not cycle.response_complete and (body := message.get("body", b"")):
            if cycle.flow.write_paused:
                await cycle.flow.drain()
            if not cycle.disconnected:
                cycle.transport.write(body)
            message = {**message, "body": b""}
        await self._send(message)  # type: ignore[arg-type]

    async def _send_head(self, start: Message) -> None:
        cycle, held = self._cycle, _Held()
        transport, cycle.transport = cycle.transport, held  # type: ignore[assignment]
        try:
            await self._send(start)  # type: ignore[arg-type]
        finally:
            cycle.transport = transport
        if cycle.chunked_encoding:
            cycle.chunked_encoding, self._is_open_ended = False, True
            held.written = held.written.replace(_CHUNKED, b"", 1)
        if held.written:
            transport.write(held.written)


def _take_body(cycle: RequestResponseCycle) -> bytes:
    """Return what has arrived of a request's body and was not received yet, once."""
    body, cycle.body = bytes(cycle.body), bytearray()
    return body


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits."""

    server_state: ConnectionState
    _in_headers = False
    _header_bytes = 0
    _is_refused = False
    _refusal = b""
    """The error that is written behind the answers to earlier requests."""
    _is_parsing = False
    _timer: asyncio.TimerHandle | None = None
    _seconds: float | None = _AS_IT_IS
    """What the timer is to be set to."""
    _earlier: deque[RequestResponseCycle] | None = None
    """Requests that had no whole answer when another one came behind them; the first ones may have one by now."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the client's first request, or refuse the connection if there are too many."""
        super().connection_made(transport)
        limits = self.server_state.limits
        if len(self.connections) > limits.connections:
            self._refuse(503, "too many connections; try again later", b"retry-after: 1\r\n")
            return
        self._wait(limits.idle_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer of a connection that has ended, and tell its requests. uvicorn tells only the last one;
        an earlier one would be computed to its end, and written to a closed connection."""
        self._wait(None)
        super().connection_lost(exc)
        for cycle in self._earlier or ():
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()

    def on_message_begin(self) -> None:
        """Begin to count the bytes and the time of a request's headers."""
        if self._is_refused:
            return
        self._in_headers = True
        self._header_bytes = 0
        self._wait(self.server_state.limits.headers_s)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Add a part of the request's address, up to the limit."""
        if self._is_refused:
            return
        super().on_url(url)
        if len(self.url) > self.server_state.limits.url_bytes:
            self._refuse(414, f"the address has more than {self.server_state.limits.url_bytes} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header, up to the limit. Ignore trailers, which arrive here, too, after a body."""
        if self._in_headers and not self._is_refused:
            super().on_header(name, value)
            if len(self.headers) > self.server_state.limits.headers:
                self._refuse(431, f"the request has more than {self.server_state.limits.headers} headers")

    def on_headers_complete(self) -> None:
        """Check the headers as a whole, and let the request begin."""
        if self._is_refused:
            return
        # Headers that arrive in one piece of data, of up to 256 KiB, are counted nowhere else.
        size = len(self.url) + sum(map(len, chain.from_iterable(self.headers))) + 4 * len(self.headers)
        self._limit_headers(size)
        if self._is_refused:
            return
        self._in_headers = False
        if not self.url.startswith(b"/") and b"://" in self.url:
            self._take_authority()
        self._wait_for_body()
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is None:
            return
        if before is not None and not before.response_complete:
            self._add_earlier(before)
            if len(self.pipeline) <= _READ_AHEAD:
                self.flow.resume_reading()  # the end of a connection that is not read goes unnoticed
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _UnchunkedAnswer(self.cycle).send  # type: ignore[method-assign, assignment]
        else:
            self.scope[BODY_OUTLET] = _BodyOutlet(self.cycle)  # type: ignore[typeddict-unknown-key]
        if self.server_state.hands_over:
            self.cycle.keep_alive = False

    def _add_earlier(self, cycle: RequestResponseCycle) -> None:
        if self._earlier is None:
            self._earlier = deque()
        while self._earlier and self._earlier[0].response_complete:  # they are answered in turn
            self._earlier.popleft()
        self._earlier.append(cycle)

    def _take_authority(self) -> None:
        """Replace the `Host` header by the host of a whole URL (`GET http://host/path`): that one counts (RFC 9112
        §3.2.2), and later code reads the header only."""
        given = b"host", _AUTHORITY_END.split(self.url.partition(b"://")[2], maxsplit=1)[0]
        self.headers[:] = [given if name == b"host" else (name, value) for name, value in self.headers]
        if given not in self.headers:
            self.headers.append(given)

    def on_body(self, body: bytes) -> None:
        """Pass a part of the request's body on."""
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Stop the timer: the request is complete."""
        if not self._is_refused:
            self._wait(None)
            self.scope[TAKE_BODY] = functools.partial(_take_body, self.cycle)  # type: ignore[typeddict-unknown-key]
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Let the next request begin. Behind the last answer, write the error for what came after its request."""
        was_waiting = bool(self.pipeline)
        super().on_response_complete()
        if self._refusal and not was_waiting and not self.transport.is_closing():
            self.transport.write(self._refusal)
            self.transport.close()
        elif was_waiting and self._timer is not None and not (self.pipeline or self._in_headers):
            self._wait_for_body()

    def data_received(self, data: bytes) -> None:
        """Parse bytes, and count those of headers."""
        if self._is_refused:
            return
        self._is_parsing = True
        try:
            super().data_received(data)
        finally:
            self._is_parsing = False
            self._set_timer()
        if self._in_headers and not self._is_refused:
            self._header_bytes += len(data)
            self._limit_headers(self._header_bytes)
        if self._timer is None and not self._in_headers and (self.cycle is None or self.cycle.response_complete):
            self._wait(self.server_state.limits.idle_s)  # empty lines, which begin no request

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP, and say what the parser has found wrong."""
        error = sys.exception()
        if isinstance(error, httptools.HttpParserCallbackError):
            error = error.__context__
        if isinstance(error, httptools.HttpParserInvalidURLError):
            msg = f"the request's address is malformed: {error}; percent-encode what is not ASCII"
        elif isinstance(error, httptools.HttpParserError):
            msg = f"what was sent is not an HTTP request: {error}"
        self._refuse(400, msg)

    def _limit_headers(self, size: int) -> None:
        """Refuse the request if `size` bytes of headers are too many."""
        limit = self.server_state.limits.header_bytes
        if size > limit and not self._is_refused and not self.transport.is_closing():
            self._refuse(431, f"the headers have more than {limit} bytes")

    def _wait_for_body(self) -> None:
        """Start the timer for the body of the request at hand. As long as its turn has not come, the time begins
        again: a large body is read only then."""
        limits = self.server_state.limits
        is_file = self.url.partition(b"?")[0] == _UPLOADS
        self._wait((limits.file_s if is_file else limits.body_s) * _BODY_MARGIN)

    def _wait(self, seconds: float | None) -> None:
        """Start the timer that disconnects after `seconds`; None: stop the timer. While data is parsed, only the
        last call counts: most requests arrive whole, and need no timer."""
        self._seconds = seconds
        if not self._is_parsing:
            self._set_timer()

    def _set_timer(self) -> None:
        seconds, self._seconds = self._seconds, _AS_IT_IS
        if seconds == _AS_IT_IS:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._too_slow)

    def _too_slow(self) -> None:
        self._timer = None
        if self._in_headers:
            self._refuse(408, f"the headers did not arrive within {self.server_state.limits.headers_s:g} s")
        elif self.pipeline:
            self._wait_for_body()
        elif not self.transport.is_closing():
            self.transport.close()

    def _refuse(self, status: int, message: str, more: bytes = b"") -> None:
        """Answer with an error, behind the answers to earlier requests, and disconnect. Ignore what comes then."""
        if self._is_refused:
            return
        self._is_refused = True
        if self.transport.is_closing():
            return
        cycle, open_ = self.cycle, [each for each in self._earlier or () if not each.response_complete]
        if cycle is not None and not self._in_headers and cycle.more_body:  # its own body is refused
            if cycle.response_started:
                self.transport.close()  # the client would take the error for a part of the answer
                return
            if self.pipeline:
                self.pipeline.popleft()
        elif cycle is not None and not cycle.response_complete:
            open_.append(cycle)
        error: dict[str, Any] = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        body = msgspec.json.encode({"error": error})
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n"
        )
        refusal = head.encode() + more + b"\r\n" + body
        if open_:
            self._refusal = refusal
            self._wait(None)
            self.flow.resume_reading()  # the end of a connection that is not read goes unnoticed
        else:
            self.transport.write(refusal)
            self.transport.close()
