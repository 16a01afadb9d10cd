"""The HTTP server of a router process: limits on connections, draining on a signal, handing over to a successor.

uvicorn's parser does not limit what one connection may cost, so `BoundedProtocol` does:

    accepted ─► first byte ─► headers complete ─► body complete ─► answer ─► idle, or the next request
       └ idle_s     └ headers_s        └ body_s (a little more than `read_body` waits, whose answer says why)

A client that is slower, or sends more, gets an error and is disconnected. A connection costs a few kilobytes until
its headers are complete, and the server keeps at most `connections` of them: unknown clients can cost no more
memory.

After SIGTERM (or SIGINT without a supervisor) new requests get 503, running ones finish, and the process exits
with 0. Requests that still run after `drain_seconds` get an error; the exit code is 0 all the same, since the
limit was agreed. A second signal cuts everything off at once: exit 1.

On an inherited socket, from which other routers accept as well, the process accepts nothing before a controller is
ready (or a short time has passed). SIGUSR1 makes it hand over: it accepts no more connections, closes each one
after its answer, and exits when all are closed. So a router can be replaced without its clients noticing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import resource
import signal
import socket
import stat
from collections import deque
from collections.abc import Coroutine, Iterator
from http import HTTPStatus
from itertools import chain
from typing import Any, Final

import msgspec
import structlog
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from trunkline.router.app import create_app
from trunkline.router.config import RouterConfig
from trunkline.router.http.answers import BODY_OUTLET
from trunkline.router.http.body import TAKE_BODY, bound_heap
from trunkline.router.service import RouterService
from trunkline.router.stores.file_store import PART_BYTES
from trunkline.router.text.tokenizer import Tokenizer
from trunkline.runtime.process import report_status, spare_the_collector

_FILES_FOR_OTHERS: Final = 256
"""Number of file descriptors that are reserved for other uses than clients' connections."""
_UPLOADS: Final = b"/v1/files"
_BODY_MARGIN: Final = 1.1
_AUTHORITY_END: Final = re.compile(rb"[/?#]")
_BACKLOG: Final = 2048
_KEEP_ALIVE_SECONDS: Final = 75
"""Time after which an idle connection is closed. Proxies keep idle connections for less, so that they close them
themselves."""
_CLOSE_SECONDS: Final = 2
"""Time that answers still get to be written after the last generation has ended."""
_MEET_SECONDS_MAX: Final = 3.0
"""Longest wait for a controller before connections are accepted. When a whole cluster starts, which takes longer,
`/health` should answer and show how far the start is."""
_MEET_INTERVAL_S: Final = 0.02
_AS_IT_IS: Final = -1.0
"""Stands for the seconds of a timer that goes on."""
_IDLE_SECONDS: Final = 2.0
"""Time for which a connection may send another request after an answer, while the router hands over."""
_log = structlog.get_logger("trunkline.router")


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


class _BodyOutlet:
    """Writes parts of an answer as `RequestResponseCycle.send` does, but at once or not at all."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def is_open(self) -> bool:
        """Whether parts can be written: the headers are out, the client is there and reads fast enough."""
        cycle = self._cycle
        return bool(cycle.chunked_encoding) and not (
            cycle.flow.write_paused or cycle.disconnected or cycle.response_complete
        )

    def write(self, part: bytes) -> None:
        """Write a part; call it only while `is_open`."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))


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
        self._in_headers = True
        self._header_bytes = 0
        self._wait(self.server_state.limits.headers_s)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Add a part of the request's address, up to the limit."""
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
        self._in_headers = False
        # Headers that arrive in one piece of data, of up to 256 KiB, are counted nowhere else.
        size = len(self.url) + sum(map(len, chain.from_iterable(self.headers))) + 4 * len(self.headers)
        self._limit_headers(size)
        if self._is_refused:
            return
        if not self.url.startswith(b"/") and b"://" in self.url:
            self._take_authority()
        limits = self.server_state.limits
        is_file = self.url.partition(b"?")[0] == _UPLOADS
        self._wait((limits.file_s if is_file else limits.body_s) * _BODY_MARGIN)
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is None:
            return
        if before is not None and not before.response_complete:
            self._add_earlier(before)
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
        self._wait(None)
        if not self._is_refused:
            self.scope[TAKE_BODY] = functools.partial(_take_body, self.cycle)  # type: ignore[typeddict-unknown-key]
            super().on_message_complete()

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
        """Refuse bytes that are not HTTP."""
        self._refuse(400, msg)

    def _limit_headers(self, size: int) -> None:
        """Refuse the request if `size` bytes of headers are too many."""
        limit = self.server_state.limits.header_bytes
        if size > limit and not self._is_refused and not self.transport.is_closing():
            self._refuse(431, f"the headers have more than {limit} bytes")

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
        elif not self.transport.is_closing():
            self.transport.close()

    def _refuse(self, status: int, message: str, more: bytes = b"") -> None:
        """Answer with an error and disconnect. Bytes that still arrive are ignored."""
        if self._is_refused:
            return
        self._is_refused = True
        if self.transport.is_closing():
            return
        cycles = (*(self._earlier or ()), self.cycle) if self.cycle is not None else ()
        if any(cycle.response_started and not cycle.response_complete for cycle in cycles):
            self.transport.close()  # the client would take the error for a part of the answer that it is reading
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

    Raise the process's limit of open files as far as the system allows.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = max(soft, wanted + _FILES_FOR_OTHERS)
    if soft < wanted + _FILES_FOR_OTHERS:
        soft = min(hard, wanted + _FILES_FOR_OTHERS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(wanted, soft - _FILES_FOR_OTHERS))


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handling. It can hand over to other processes on the same socket."""

    def __init__(self, config: uvicorn.Config, limits: ConnectionLimits) -> None:
        super().__init__(config)
        self.server_state: ConnectionState = ConnectionState()
        self.server_state.limits = limits

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections, unless the server hands over already."""
        await super().startup(sockets)
        if self.server_state.hands_over:
            self._accept_no_more()

    async def hand_over(self) -> None:
        """Stop accepting connections and close idle ones. Requests that are on their way are still answered."""
        self.server_state.hands_over = True
        self._accept_no_more()
        idle = []
        connections: list[Any] = list(self.server_state.connections)
        for connection in connections:
            # A client whose last answer had no "Connection: close" may be about to send its next request. Such a
            # connection gets the same time as idle ones, and the answer to that request closes it.
            connection.timeout_keep_alive = _IDLE_SECONDS
            cycle = connection.cycle
            if cycle is None or cycle.response_complete:
                idle.append((connection, cycle))
            elif not cycle.response_started:
                cycle.keep_alive = False
        await asyncio.sleep(_IDLE_SECONDS)
        for connection, cycle in idle:
            if connection.cycle is cycle:  # no request since
                connection.shutdown()

    def _accept_no_more(self) -> None:
        for server in getattr(self, "servers", []):  # not set before `startup`
            server.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `serve`."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        OSError: the address is in use, not this machine's or not allowed; the text says which.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise OSError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another port or address, "
            "or stop the process that uses it"
        ) from error


def inherited(descriptor: int) -> socket.socket:
    """Return the listening socket that this process was started with.

    Raises:
        OSError: the descriptor is not a listening socket.
    """
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            raise OSError(f"listen_fd: descriptor {descriptor} is no socket")
        listener = socket.socket(fileno=descriptor)
        is_listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise OSError(f"listen_fd: descriptor {descriptor}: {error.strerror or error}") from error
    if not is_listening:
        listener.close()
        raise OSError(f"listen_fd: the socket of descriptor {descriptor} does not listen")
    return listener


async def serve(config: RouterConfig, listener: socket.socket) -> int:
    """Serve until a signal; return the process's exit code."""
    bound_heap()
    tokenizer = Tokenizer(config.model_path, config.tool_call_parser, config.reasoning_parser)
    service = RouterService(config, tokenizer)
    spare_the_collector()
    server = make_server(service, _MEET_SECONDS_MAX if config.listen_fd else 0.0)
    drained = asyncio.get_running_loop().create_future()
    _Signals(config, service, server, drained).handle()
    host, port = listener.getsockname()[:2]
    _log.info("listening", host=host, port=port, model=config.model_name)
    await server.serve(sockets=[listener])
    return 0 if drained.done() and drained.result() else 1


def make_server(service: RouterService, meet_seconds_max: float = 0.0) -> _Server:
    """Return a uvicorn server for a service; set its `should_exit` to stop it.

    Args:
        meet_seconds_max: how long to wait for a controller that is ready before connections are accepted.
    """
    config = service.config

    async def opened() -> None:
        await _meet(service, meet_seconds_max)
        report_status(config.status_path, "ready")

    return _Server(
        uvicorn.Config(
            create_app(service, opened),
            interface="asgi3",
            http=BoundedProtocol,
            proxy_headers=False,  # nothing reads the client's address or the scheme
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="error",  # its warnings are about what clients send
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_CLOSE_SECONDS,
        ),
        ConnectionLimits(
            connections=connections_max(config.max_connections),
            header_bytes=config.max_header_bytes,
            headers=config.max_headers,
            url_bytes=config.max_url_bytes,
            headers_s=config.header_seconds,
            body_s=config.body_seconds,
            file_s=config.body_seconds * max(1, config.file_bytes_max // PART_BYTES),
            idle_s=_KEEP_ALIVE_SECONDS,
        ),
    )


async def _meet(service: RouterService, seconds_max: float) -> None:
    """Wait until a controller is ready: a client that connects before would get an error."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds_max):
            while not any(link.ready for link in service.links):
                await asyncio.sleep(_MEET_INTERVAL_S)


class _Signals:
    """The reaction to the process's signals: drain, hand over, or cut everything off (see the module)."""

    def __init__(
        self, config: RouterConfig, service: RouterService, server: _Server, drained: asyncio.Future[bool]
    ) -> None:
        self._config = config
        self._service = service
        self._server = server
        self._drained = drained
        self._tasks: list[asyncio.Task[None]] = []
        self._is_told = False
        """Whether the process was told to exit and refuses new requests."""

    def handle(self) -> None:
        """Install the signal handlers."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop)
        if self._config.tenants:
            loop.add_signal_handler(signal.SIGHUP, self._service.tenants.reload)
        # A terminal's Ctrl-C reaches every process of the group; supervised ones wait for the supervisor.
        loop.add_signal_handler(signal.SIGINT, (lambda: None) if self._config.parent_pid else self._stop)
        if self._config.listen_fd:
            loop.add_signal_handler(signal.SIGUSR1, self._hand_over)

    def _stop(self) -> None:
        if not self._is_told:
            self._is_told = True
            self._begin(self._leave())
            return
        _log.warning("second_signal")
        if not self._drained.done():
            self._drained.set_result(False)
        self._service.cut_all()
        # `force_exit` would leave the service open, and end its lifespan with a traceback.
        self._server.should_exit = True

    def _hand_over(self) -> None:
        if not self._tasks:
            self._begin(self._leave_to_others())

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work))
        report_status(self._config.status_path, "draining")

    async def _leave_to_others(self) -> None:
        _log.info("handing over", seconds_max=self._config.drain_seconds)
        try:
            async with asyncio.timeout(self._config.drain_seconds):
                await self._server.hand_over()
                while self._server.server_state.connections and not self._is_told:
                    await asyncio.sleep(_MEET_INTERVAL_S)
        except TimeoutError:
            _log.warning("drain_timed_out", seconds=self._config.drain_seconds)
            self._service.cut_all()
        if not self._is_told:  # else `_leave` does the rest
            self._drained.set_result(True)
            self._server.should_exit = True

    async def _leave(self) -> None:
        _log.info("draining", seconds_max=self._config.drain_seconds)
        if not await self._service.drain(self._config.drain_seconds):
            _log.warning("drain_timed_out", seconds=self._config.drain_seconds)
        if not self._drained.done():
            self._drained.set_result(True)
        self._server.should_exit = True
