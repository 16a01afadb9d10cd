"""The process's life: listen, serve, drain on a signal, leave.

SIGTERM (or SIGINT, unsupervised): new requests get 503, running ones finish, exit 0. What still runs
after `drain_seconds` gets an error; the exit code stays 0, for that was agreed. A second signal cuts
everything off at once: exit 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator
from typing import Final

import structlog
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from trunkline.router.app import create_app
from trunkline.router.config import RouterConfig
from trunkline.router.service import RouterService
from trunkline.router.tokenizer import Tokenizer

_HEADER_BYTES_MAX: Final = 64 << 10
_BACKLOG: Final = 2048
_CLOSE_SECONDS: Final = 2
"""After the last generation, for responses still being written."""
_log = structlog.get_logger("trunkline.router")


class _BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with a limit on headers, of which its parser has none."""

    _in_headers = False
    _header_bytes = 0

    def on_message_begin(self) -> None:
        self._in_headers = True
        self._header_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        super().on_headers_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # else a trailer, which nobody reads
            super().on_header(name, value)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_headers:
            self._header_bytes += len(data)
            if self._header_bytes > _HEADER_BYTES_MAX and not self.transport.is_closing():
                self.send_400_response("Request headers are too large.")


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `serve`."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """A listening socket.

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


async def serve(config: RouterConfig, listener: socket.socket) -> int:
    """Serve until a signal; the process's exit code."""
    service = RouterService(config, Tokenizer(config.model_path, config.tool_call_parser))
    server = make_server(service)
    drained = asyncio.get_running_loop().create_future()
    _handle_signals(config, service, server, drained)
    host, port = listener.getsockname()[:2]
    _log.info("listening", host=host, port=port, model=config.model_name)
    await server.serve(sockets=[listener])
    return 0 if drained.done() and drained.result() else 1


def make_server(service: RouterService) -> uvicorn.Server:
    """A uvicorn server for a service; set its `should_exit` to stop it."""
    return _Server(
        uvicorn.Config(
            create_app(service),
            http=_BoundedProtocol,
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="error",  # its warnings are about what clients send
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=_CLOSE_SECONDS,
        )
    )


def _handle_signals(
    config: RouterConfig, service: RouterService, server: uvicorn.Server, drained: asyncio.Future[bool]
) -> None:
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[None]] = []

    async def leave() -> None:
        _log.info("draining", seconds_max=config.drain_seconds)
        if not await service.drain(config.drain_seconds):
            _log.warning("drain_timed_out", seconds=config.drain_seconds)
        if not drained.done():
            drained.set_result(True)
        server.should_exit = True

    def on_signal() -> None:
        if not tasks:
            tasks.append(loop.create_task(leave()))
            return
        _log.warning("second_signal")
        if not drained.done():
            drained.set_result(False)
        service.cut_all()
        server.should_exit = True  # not `force_exit`: that leaves the service open and its lifespan in a traceback

    loop.add_signal_handler(signal.SIGTERM, on_signal)
    # A terminal's Ctrl-C reaches every process of the group; supervised ones wait for the supervisor.
    loop.add_signal_handler(signal.SIGINT, (lambda: None) if config.parent_pid else on_signal)
