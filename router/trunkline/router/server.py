"""The HTTP server of a router process: draining on a signal, handing over to a successor.

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
import os
import resource
import signal
import socket
import stat
from collections.abc import Coroutine, Iterator
from typing import Any, Final

import structlog
import uvicorn

from trunkline.router.app import create_app
from trunkline.router.config import RouterConfig
from trunkline.router.http.body import bound_heap
from trunkline.router.http.connections import BoundedProtocol, ConnectionLimits, ConnectionState
from trunkline.router.service import RouterService
from trunkline.router.stores.file_store import PART_BYTES
from trunkline.router.text.tokenizer import Tokenizer
from trunkline.runtime.process import report_status, spare_the_collector

_FILES_FOR_OTHERS: Final = 256
"""Number of file descriptors that are reserved for other uses than clients' connections."""
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
_IDLE_SECONDS: Final = 2.0
"""Time for which a connection may send another request after an answer, while the router hands over."""
_log = structlog.get_logger("trunkline.router")


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
        self._service.live.cut_all()
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
            self._service.live.cut_all()
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
