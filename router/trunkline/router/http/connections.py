"""uvicorn's HTTP protocol with limits on what one connection may cost, which its parser does not have.

    accepted ─► first byte ─► headers complete ─► body complete ─► answer ─► idle, or the next request
       └ idle_s     └ headers_s        └ body_s (a little more than `read_body` waits, whose answer says why)

A client that is slower, or sends more, gets an error and is disconnected. A connection costs a few kilobytes until
its headers are complete, so `connections` of them are all that unknown clients can make the process keep.
"""

from __future__ import annotations

import asyncio
import re
import resource
from http import HTTPStatus
from typing import Any, Final

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

_FILES_FOR_OTHERS: Final = 256
"""File descriptors that are kept for other uses than clients' connections."""
_BODY_MARGIN: Final = 1.1
_AUTHORITY_END: Final = re.compile(rb"[/?#]")


class ConnectionLimits(msgspec.Struct, frozen=True):
    """Sizes in bytes, times in seconds; the fields of `RouterConfig` say why they are what they are."""

    connections: int
    header_bytes: int
    headers: int
    url_bytes: int
    headers_s: float
    body_s: float
    idle_s: float


class ConnectionState(ServerState):
    """State that the connections of a process share."""

    limits: ConnectionLimits
    hands_over = False
    """Connections are closed after the answer."""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits."""

    server_state: ConnectionState
    _in_headers = False
    _header_bytes = 0
    _is_refused = False
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a client's first request, or refuse one connection too many."""
        super().connection_made(transport)
        limits = self.server_state.limits
        if len(self.connections) > limits.connections:
            self._refuse(503, "too many connections; try again later", b"retry-after: 1\r\n")
            return
        self._wait(limits.idle_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer of a connection that has ended."""
        self._wait(None)
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Begin to count a request's headers, and the time that they take."""
        self._in_headers = True
        self._header_bytes = 0
        self._wait(self.server_state.limits.headers_s)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Take a part of the request's address."""
        super().on_url(url)
        if len(self.url) > self.server_state.limits.url_bytes:
            self._refuse(414, f"the address has more than {self.server_state.limits.url_bytes} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header. Trailers behind a body come here, too, and are ignored."""
        if self._in_headers and not self._is_refused:
            super().on_header(name, value)
            if len(self.headers) > self.server_state.limits.headers:
                self._refuse(431, f"the request has more than {self.server_state.limits.headers} headers")

    def on_headers_complete(self) -> None:
        """Check the headers as a whole, and let the request begin."""
        self._in_headers = False
        # What comes in one piece is counted nowhere else, and a piece may have 256 KiB.
        self._limit_headers(len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers))
        if self._is_refused:
            return
        self._take_authority()
        self._wait(self.server_state.limits.body_s * _BODY_MARGIN)
        super().on_headers_complete()
        if self.server_state.hands_over and self.cycle is not None:
            self.cycle.keep_alive = False

    def _take_authority(self) -> None:
        """Put the host of a whole URL (`GET http://host/path`) in the place of the `Host` header: that is what
        counts (RFC 9112 §3.2.2), and later code reads the header."""
        _, is_whole, rest = self.url.partition(b"://")
        if self.url.startswith(b"/") or not is_whole:
            return
        given = b"host", _AUTHORITY_END.split(rest, maxsplit=1)[0]
        self.headers[:] = [given if name == b"host" else (name, value) for name, value in self.headers]
        if given not in self.headers:
            self.headers.append(given)

    def on_body(self, body: bytes) -> None:
        """Take a part of the request's body."""
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Stop the timer: the request is complete."""
        self._wait(None)
        if not self._is_refused:
            super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        """Take bytes, and count them while they are headers."""
        if self._is_refused:
            return
        super().data_received(data)
        if self._in_headers and not self._is_refused:
            self._header_bytes += len(data)
            self._limit_headers(self._header_bytes)
        if self._timer is None and not self._in_headers and (self.cycle is None or self.cycle.response_complete):
            self._wait(self.server_state.limits.idle_s)  # empty lines, which begin nothing

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no HTTP."""
        self._refuse(400, msg)

    def _limit_headers(self, size: int) -> None:
        """Refuse a request whose headers have so many bytes, if that is too many."""
        limit = self.server_state.limits.header_bytes
        if size > limit and not self._is_refused and not self.transport.is_closing():
            self._refuse(431, f"the headers have more than {limit} bytes")

    def _wait(self, seconds: float | None) -> None:
        """Disconnect after `seconds`; None: do not."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._too_slow)

    def _too_slow(self) -> None:
        self._timer = None
        if self._in_headers:
            self._refuse(408, f"the headers did not arrive within {self.server_state.limits.headers_s:g} s")
        elif not self.transport.is_closing():
            self.transport.close()

    def _refuse(self, status: int, message: str, more: bytes = b"") -> None:
        """Answer with an error, and disconnect. Later bytes are ignored."""
        if self._is_refused:
            return
        self._is_refused = True
        if self.transport.is_closing():
            return
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.close()  # what is written now would be taken for a part of that answer
            return
        error: dict[str, Any] = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        body = msgspec.json.encode({"error": error})
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n"
        )
        self.transport.write(head.encode() + more + b"\r\n" + body)
        self.transport.close()


def connections_max(wanted: int) -> int:
    """Return how many connections this process can have: `wanted`, or fewer if the system limits open files.

    Raises the process's own limit of open files as far as it may.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = max(soft, wanted + _FILES_FOR_OTHERS)
    if soft < wanted + _FILES_FOR_OTHERS:
        soft = min(hard, wanted + _FILES_FOR_OTHERS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(wanted, soft - _FILES_FOR_OTHERS))
