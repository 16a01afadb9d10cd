"""`/livez`, `/readyz`, `/startupz` of a part of a cluster, over HTTP: plain text with the reason; 200, or 503.

Nothing else is served, and nothing is read but the request's line and headers. The answers hold no secrets, but
only operators need them: by default only this host may ask.
"""

from __future__ import annotations

import http.server
import io
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from trunkline.deploy.config.listening import open_listener
from trunkline.deploy.node.node_health import NodeHealth
from trunkline.deploy.node.node_probe import Verdict

_REQUEST_S_MAX: Final = 5.0
"""Until a request has come whole, in however small parts; likewise for its answer to be taken."""
_HEAD_BYTES_MAX: Final = 16 << 10
_REQUESTS_MAX: Final = 16
"""At once; more wait until they are accepted."""


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = _REQUEST_S_MAX
    server_version = "trunkline"
    sys_version = ""
    server: _Server

    def setup(self) -> None:
        """Take the whole request first: who sends it byte by byte has no more time than others."""
        super().setup()
        self.rfile.close()
        self.rfile = io.BytesIO(_head_of(self.connection))

    def do_GET(self) -> None:
        """The answer of a check."""
        check = self.server.checks.get(self.path.partition("?")[0])
        if check is None:
            self._send(404, f"there are {', '.join(self.server.checks)}")
            return
        verdict = check()
        self._send(200 if verdict.ok else 503, verdict.reason)

    def do_HEAD(self) -> None:
        """As GET, without the reason."""
        self.do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: probes come every few seconds."""

    def _send(self, code: int, text: str) -> None:
        body = f"{text}\n".encode()
        self.send_response(code)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _head_of(connection: socket.socket) -> bytes:
    """A request's line and headers, and perhaps some of what follows them.

    Raises:
        OSError: they are too long, or have not come in time.
    """
    head, deadline = b"", time.monotonic() + _REQUEST_S_MAX
    while b"\r\n\r\n" not in head and b"\n\n" not in head:
        left = deadline - time.monotonic()
        if left <= 0 or len(head) > _HEAD_BYTES_MAX:
            raise TimeoutError("no request has come")
        connection.settimeout(left)
        part = connection.recv(4096)
        if not part:
            raise ConnectionResetError("the client has gone")
        head += part
    connection.settimeout(_REQUEST_S_MAX)
    return head


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket, checks: Mapping[str, Callable[[], Verdict]]) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.checks = checks
        self._free = threading.BoundedSemaphore(_REQUESTS_MAX)

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own, when there are not too many."""
        self._free.acquire()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """As the base class does, and make room."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that has gone or sent nonsense."""


def open_health_port(host: str, port: int) -> socket.socket:
    """Open the socket on which `serving` answers health checks.

    Raises:
        UserError: The address cannot be listened on.
    """
    return open_listener(host, port, option="--health-port")


@contextmanager
def serving(listener: socket.socket, health: NodeHealth) -> Iterator[None]:
    """Answer health checks for as long as the context lasts."""
    checks = {"/livez": health.livez, "/readyz": health.readyz, "/startupz": health.startupz}
    server = _Server(listener, checks)
    thread = threading.Thread(target=server.serve_forever, name="health-server", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
