"""The health of a part of a cluster, over HTTP: `/livez`, `/readyz`, `/startupz` answer 200, or 503 and why.

By these Kubernetes decides whether to restart the part or to send it requests:

    livez     the supervisor's loop turns, and nothing here was given up; or it is not there yet
    readyz    group: its controller is ready, and a token was generated
              workers: the ranks here are in the group's epoch
              router: `/health` says so
    startupz  has been ready once; a router: answers over HTTP

A fault elsewhere (a router without groups, ranks without their leader) makes a part not ready, but never dead:
restarting it would not help.

The port serves nothing else, and reads nothing but the request's line and headers. The answers hold no secrets,
but only operators need them: by default only this host may ask.
"""

from __future__ import annotations

import http.client
import http.server
import io
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import zmq

from trunkline.controller.messages import Abort, Ping, RouterRequest, Submit
from trunkline.deploy.config.node_settings import Kind
from trunkline.deploy.config.plans import local_endpoint
from trunkline.deploy.supervisor.control import ControlError, ask
from trunkline.deploy.supervisor.members import Command
from trunkline.deploy.supervisor.run_folder import CONTROL_SOCKET
from trunkline.router.messages import Outputs, RouterMessage, State
from trunkline.worker.messages import Sampling

TOKEN_FRESH_S: Final = 10.0
"""Time in seconds after a token was generated during which the token proves that the group works."""
_STATE_S_MAX: Final = 2.0
_TOKEN_S_MAX: Final = 5.0
_PROMPT: Final = np.array([1], "<i4").tobytes()
"""A prompt of one token that every vocabulary has."""
_REQUEST_S_MAX: Final = 5.0
"""Longest time in seconds until a request has come whole, and until its answer has been taken."""
_HEAD_BYTES_MAX: Final = 16 << 10
_REQUESTS_MAX: Final = 16
"""Largest number of requests that are answered at the same time. Further connections wait until they are
accepted."""
_LOOP_S_MAX: Final = 5.0
"""Time in seconds without an answer after which the supervisor's loop counts as hanging, because it never waits
for anything."""
_ROUTER_S_MAX: Final = 4.0
_VERDICT_S: Final = 1.0
"""Time in seconds for which an answer to a health check is given again without a new check."""
_PREPARES: Final = "it reads the model"


class Verdict(NamedTuple):
    """The answer to a question about health."""

    ok: bool
    reason: str
    """The reason of the answer, for people."""


class TokenProbe:
    """Asks for a token, unless the group has just generated some for clients. For one caller at a time."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(RouterMessage)
        self._tokens = 0
        """The controller's count of output tokens when the count was last read."""
        self._seen_at = float("-inf")
        self._token_at = float("-inf")
        """A time of the monotonic clock after which the last token was generated."""

    def check(self) -> Verdict:
        """Return whether a token was generated in the last seconds or now; take a few seconds at most."""
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.IMMEDIATE, 1)
        try:
            socket.connect(self._endpoint)
            return self._check(socket)
        except zmq.Again:
            return Verdict(False, "the controller does not answer")
        except (zmq.ZMQError, msgspec.MsgspecError) as error:
            return Verdict(False, f"the controller's answer cannot be read: {error}")
        finally:
            socket.close()

    def close(self) -> None:
        """Close its sockets."""
        self._context.term()

    def _check(self, socket: zmq.Socket[bytes]) -> Verdict:
        socket.set(zmq.SNDTIMEO, int(_STATE_S_MAX * 1000))
        self._send(socket, Ping(1))
        deadline = time.monotonic() + _STATE_S_MAX
        while not isinstance(state := self._receive(socket, deadline), State):
            pass
        if state.status != "ready":
            self._token_at = float("-inf")
            return Verdict(
                False, f"the controller is {state.status}" + (f": {state.detail}" if state.detail else "")
            )
        now = time.monotonic()
        if state.output_tokens > self._tokens:
            self._token_at = max(self._token_at, self._seen_at)
        elif state.output_tokens < self._tokens:  # another controller
            self._token_at = float("-inf")
        self._tokens, self._seen_at = state.output_tokens, now
        if now - self._token_at < TOKEN_FRESH_S:
            return Verdict(True, "a token was generated lately")
        return self._generate(socket)

    def _generate(self, socket: zmq.Socket[bytes]) -> Verdict:
        job = Submit(1, _PROMPT, prompt_len=1, max_tokens=1, sampling=Sampling(temperature=0.0))
        self._send(socket, job)
        deadline = time.monotonic() + _TOKEN_S_MAX
        try:
            while True:
                message = self._receive(socket, deadline)
                if not isinstance(message, Outputs):
                    continue
                if message.tokens:
                    self._token_at = time.monotonic()
                    self._tokens += 1  # this one
                    return Verdict(True, "a token was generated")
                if message.finished:
                    return Verdict(False, f"no token was generated: {message.finished[0].detail}")
        except zmq.Again:
            self._send(socket, Abort(1))
            return Verdict(False, f"no token within {_TOKEN_S_MAX:.0f} s")

    def _send(self, socket: zmq.Socket[bytes], message: RouterRequest) -> None:
        socket.send(self._encoder.encode(message))

    def _receive(self, socket: zmq.Socket[bytes], deadline: float) -> RouterMessage:
        """Return the next message.

        Raises:
            zmq.Again: No message came in time.
        """
        if not socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            raise zmq.Again
        message: RouterMessage = self._decoder.decode(socket.recv_multipart()[-1])
        return message


Probe = Callable[[], tuple[Verdict, Verdict]]
"""A function that asks a part of the cluster whether it has started, and whether it is ready."""


class NodeHealth:
    """Answers questions about health, from any thread."""

    def __init__(self) -> None:
        self._asked: tuple[Path, Probe] | None = None
        """The run folder and what to ask; None: there is no supervisor yet."""
        self._lock = threading.Lock()
        self._last: tuple[Verdict, Verdict] | None = None
        self._last_at = float("-inf")
        self._has_started = False

    def begin(self, folder: Path, probe: Probe) -> None:
        """Begin to ask the supervisor, which exists from now on.

        Before, weights may be read for minutes: the part lives, and has not started.

        Args:
            folder: The run folder, where the supervisor's control socket is.
            probe: Asks the part itself, beside its supervisor.
        """
        self._asked = folder, probe

    def livez(self) -> Verdict:
        """Return whether the part should be left running."""
        if self._asked is None:
            return Verdict(True, _PREPARES)
        status = self._status()
        return alive(status) if isinstance(status, dict) else status

    def startupz(self) -> Verdict:
        """Return whether the part has ever been ready."""
        if self._has_started:
            return Verdict(True, "it has started")
        return self._verdicts()[0]

    def readyz(self) -> Verdict:
        """Return whether the part is ready for requests now."""
        return self._verdicts()[1]

    def _verdicts(self) -> tuple[Verdict, Verdict]:
        if self._asked is None:
            return (unstarted := Verdict(False, _PREPARES)), unstarted
        _, probe = self._asked
        with self._lock:
            status = self._status()
            if not isinstance(status, dict):
                return status, status
            problem = unready(status)
            if problem is not None:  # at once, whatever was true a moment ago
                self._last = None
                return problem, problem
            if self._last is None or time.monotonic() - self._last_at >= _VERDICT_S:
                self._last = probe()
                self._last_at = time.monotonic()
            self._has_started = self._has_started or self._last[0].ok
            return self._last

    def _status(self) -> dict[str, Any] | Verdict:
        if self._asked is None:
            return Verdict(False, _PREPARES)
        try:
            for reply in ask(self._asked[0] / CONTROL_SOCKET, Command("status"), timeout_s=_LOOP_S_MAX):
                if reply.status is not None:
                    return reply.status
        except ControlError as error:
            return Verdict(False, str(error))
        return Verdict(False, "the supervisor does not say how it is")


def alive(status: Mapping[str, Any]) -> Verdict:
    """Return whether a part lives, by the supervisor's status."""
    rows = [(f"group {group['group']}", group) for group in status["groups"] if group["state"] == "lost"]
    rows += [(row["name"], row) for row in status["processes"] if row["state"] == "given up"]
    lost = [f"{name} ({row['why']})" if row.get("why") else name for name, row in rows]
    return Verdict(False, f"given up: {', '.join(lost)}") if lost else Verdict(True, "the supervisor answers")


def unready(status: Mapping[str, Any]) -> Verdict | None:
    """Return why the supervisor's status alone says that a part is not ready; None if it does not say so."""
    if status["phase"] != "serving":
        return Verdict(False, f"it is {status['phase']}")
    for group in status["groups"]:
        if group["state"] != "ready":
            waits = [f"{r['name']} {r['state']}" for r in status["processes"] if r["state"] != "ready"]
            return Verdict(False, f"the group is {group['state']}: {', '.join(waits)}")
    return None


def router_probe(host: str, port: int) -> tuple[Verdict, Verdict]:
    """Ask one of the routers here for `/health`; return whether it has started, and whether it is ready."""
    with closing(http.client.HTTPConnection(host, port, timeout=_ROUTER_S_MAX)) as connection:
        try:
            connection.request("GET", "/health")
            response = connection.getresponse()
            body = json.loads(response.read() or b"{}")
        except (OSError, ValueError, http.client.HTTPException) as error:
            return (verdict := Verdict(False, f"no router answers: {error}")), verdict
    reason = str(body.get("reason", "")) if isinstance(body, dict) else ""
    return Verdict(True, "a router answers"), Verdict(response.status == 200, reason or "ready")


def probe_of(kind: Kind, folder: Path, host: str, port: int) -> Probe:
    """Return the probe of a part of a cluster that runs here.

    Args:
        folder: The run folder.
        host, port: The address of its routers, if it has any.
    """
    if kind is Kind.ROUTER:
        return lambda: router_probe(host, port)
    if kind is Kind.WORKERS:  # the supervisor's status has said everything about them
        verdict = Verdict(True, "the ranks here are in the group's epoch")
        return lambda: (verdict, verdict)
    token = TokenProbe(local_endpoint(folder))
    return lambda: ((found := token.check()), found)


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = _REQUEST_S_MAX
    server_version = "trunkline"
    sys_version = ""
    server: _Server

    def setup(self) -> None:
        """Take the whole request first, so that one that comes byte by byte has no more time than others."""
        super().setup()
        self.rfile.close()
        self.rfile = io.BytesIO(_head_of(self.connection))

    def do_GET(self) -> None:
        """Answer with the verdict of a check."""
        check = self.server.checks.get(self.path.partition("?")[0])
        if check is None:
            self._send(404, f"there are {', '.join(self.server.checks)}")
            return
        verdict = check()
        self._send(200 if verdict.ok else 503, verdict.reason)

    def do_HEAD(self) -> None:
        """Answer as to GET, without the reason."""
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
    """Return a request's line and headers, and perhaps some bytes that follow them.

    Raises:
        OSError: They are too long, or have not come in time.
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
        """Answer a request in a thread of its own, as soon as there are not too many threads."""
        self._free.acquire()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a request as the base class does, then let the next one in."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that has gone or sent nonsense."""


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
