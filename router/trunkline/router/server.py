"""The process's life: listen, serve, drain on a signal, leave.

SIGTERM (or SIGINT, unsupervised): new requests get 503, running ones finish, exit 0. What still runs
after `drain_seconds` gets an error; the exit code stays 0, for that was agreed. A second signal cuts
everything off at once: exit 1.

On an inherited socket, from which other routers accept as well, the process accepts nothing before it has met a
controller that is ready (or waited for one a moment), and SIGUSR1 makes it hand over: it accepts nothing any more,
closes each connection after its answer, and leaves when all is finished. So a router can be replaced without
its clients noticing.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import stat
from collections.abc import Coroutine, Iterator
from typing import Any, Final

import structlog
import uvicorn

from trunkline.router.app import create_app
from trunkline.router.config import RouterConfig
from trunkline.router.http.answers import BODY_SEND
from trunkline.router.http.body import bound_heap
from trunkline.router.http.connections import BoundedProtocol, ConnectionLimits, ConnectionState, connections_max
from trunkline.router.service import RouterService
from trunkline.router.text.tokenizer import Tokenizer
from trunkline.runtime.process import report_status

_ALLOCATIONS_PER_COLLECTION: Final = 20_000
_BACKLOG: Final = 2048
_KEEP_ALIVE_SECONDS: Final = 75
"""More than proxies keep idle connections to a server, so that they are the ones that close."""
_CLOSE_SECONDS: Final = 2
"""After the last generation, for responses still being written."""
_MEET_SECONDS_MAX: Final = 3.0
"""A start of the whole cluster takes longer: then `/health` should say how far it is."""
_MEET_INTERVAL_S: Final = 0.02
_IDLE_SECONDS: Final = 2.0
"""How long a connection may still send another request after an answer, while a router hands over."""
_log = structlog.get_logger("trunkline.router")


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling, which can hand over to other processes on the same socket."""

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
        """Accept no connections any more and close idle ones. Requests that are on their way are still
        answered."""
        self.server_state.hands_over = True
        self._accept_no_more()
        idle = []
        for connection in self._connections():
            # Whoever has seen headers without "Connection: close" may send the next request at once: such a
            # connection gets the time that idle ones get, and is told with the answer to that request.
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
        for server in getattr(self, "servers", []):  # there are none before `startup`
            server.close()

    def _connections(self) -> list[Any]:
        return list(self.server_state.connections)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `serve`."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        OSError: the address is taken, not this machine's or not allowed; the text says which.
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
    service = RouterService(config, Tokenizer(config.model_path, config.tool_call_parser))
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
    app, config = create_app(service), service.config

    async def app_that_waits(scope: Any, receive: Any, send: Any) -> None:
        async def send_when_ready(message: Any) -> None:
            if message["type"] == "lifespan.startup.complete":
                await _meet(service, meet_seconds_max)
                report_status(service.config.status_path, "ready")
            await send(message)

        scope[BODY_SEND] = send
        await app(scope, receive, send_when_ready if scope["type"] == "lifespan" else send)

    return _Server(
        uvicorn.Config(
            app_that_waits,
            http=BoundedProtocol,
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
            idle_s=_KEEP_ALIVE_SECONDS,
        ),
    )


def spare_the_collector() -> None:
    """Spare the garbage collector work: objects of the start stay, so it need not look at them again. And streams
    make many small objects that die at once, of which it need not hear so often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_ALLOCATIONS_PER_COLLECTION, *gc.get_threshold()[1:])


async def _meet(service: RouterService, seconds_max: float) -> None:
    """Wait until a controller is ready: a client that connects before would get an error."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds_max):
            while not any(link.ready for link in service.links):
                await asyncio.sleep(_MEET_INTERVAL_S)


class _Signals:
    """Handles the process's signals."""

    def __init__(
        self, config: RouterConfig, service: RouterService, server: _Server, drained: asyncio.Future[bool]
    ) -> None:
        self._config = config
        self._service = service
        self._server = server
        self._drained = drained
        self._tasks: list[asyncio.Task[None]] = []
        self._is_told = False
        """To leave, and to refuse what comes."""

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
        # Not `force_exit`: that leaves the service open and its lifespan in a traceback.
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
