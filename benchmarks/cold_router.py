"""A router process that counts the CPU time of each request's way through it, with cold caches.

    python benchmarks/cold_router.py CONFIG.json     (started by router_overhead.py --cold, with any tree's Python)

Before a request is parsed and before a controller's message is received, 48 MB are read, so that the CPU's caches
hold none of the router's code and objects, as beside a worker that reads weights. Marks are the event loop's
thread's CPU time:

    request  bytes of the request are there     sent     its message is with ZeroMQ
    message  the controller's message is there  written  the token's event is with the transport

At its end (SIGTERM) it prints a JSON list of requests: microseconds `to_controller` (request to sent) and
`to_client` (message to written), and `rest`, all other CPU time of the thread until the next request.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Final

import numpy as np

import trunkline.router.__main__ as router
from trunkline.controller.messages import Submit
from trunkline.router import server
from trunkline.router.streams.controller_socket import ControllerSocket

_OTHER: Final = np.zeros(6 << 20)
_requests: list[dict[str, float]] = []
_marks: dict[str, int] = {}
_emptying = {"ns": 0}
"""CPU time that emptying the caches has taken."""


def _empty_caches() -> None:
    before = time.thread_time_ns()
    _OTHER.sum()
    _emptying["ns"] += time.thread_time_ns() - before


def _now() -> int:
    """Return the thread's CPU time but for emptying caches, in nanoseconds."""
    return time.thread_time_ns() - _emptying["ns"]


class _Transport:
    """Passes all on to a connection's transport, and notes when the token's event is written."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.write_inner = transport.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write, and take the time of the first write with an event."""
        self.write_inner(data)
        if "message" in _marks and "written" not in _marks and b"data: " in data:
            _marks["written"] = _now()


class _Protocol(server.BoundedProtocol):  # type: ignore[name-defined, misc]  # that is where any tree has it
    def connection_made(self, transport: Any) -> None:
        super().connection_made(_Transport(transport))

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"POST /v1/completions"):
            note_request()
            _empty_caches()
            _marks["request"] = _now()
        super().data_received(data)


def note_request() -> None:
    """End the request before."""
    if "written" in _marks:
        ahead = _marks["sent"] - _marks["request"]
        behind = _marks["written"] - _marks["message"]
        rest = _now() - _marks["request"] - ahead - behind
        times = {"to_controller": ahead, "to_client": behind, "rest": rest}
        _requests.append({name: time / 1e3 for name, time in times.items()})
    _marks.clear()


def _patch() -> None:
    """Set the marks. They stand where a router meets the world, so any version has them."""
    receive, send = ControllerSocket._receive, ControllerSocket.send

    def received(self: ControllerSocket, frame: bytes, *more: Any) -> None:
        if "sent" in _marks and "written" not in _marks:
            _empty_caches()
            _marks["message"] = _now()
        receive(self, frame, *more)

    def sent(self: ControllerSocket, message: Any) -> bool:
        done = send(self, message)
        if isinstance(message, Submit):
            _marks["sent"] = _now()
        return done

    ControllerSocket._receive, ControllerSocket.send = received, sent  # type: ignore[method-assign, assignment]


def main() -> None:
    """Be a router until a signal, then print what was measured."""
    _patch()
    server.BoundedProtocol = _Protocol  # type: ignore[attr-defined]
    sys.argv[1:] = ["--config", sys.argv[1]]
    router.main()
    note_request()
    print(json.dumps(_requests), flush=True)


if __name__ == "__main__":
    main()
