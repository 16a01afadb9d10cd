"""Several router processes that accept from one socket, which belongs to somebody else."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from router.fake_controller import FakeController
from router.harness import DEMO_MODEL, MESSAGES, make_answer, wait_until

from trunkline.deploy.config.machine import open_listener
from trunkline.deploy.supervisor.control import StatusSocket
from trunkline.deploy.supervisor.run_folder import STATUS_SOCKET
from trunkline.router.server import inherited
from trunkline.router.text.tokenizer import Tokenizer

pytestmark = pytest.mark.processes
CHAT: dict[str, Any] = {"messages": MESSAGES}


class Site:
    """A socket, a controller, and routers."""

    def __init__(self, place: Path, fake: FakeController, listener: socket.socket, statuses: StatusSocket) -> None:
        self.fake = fake
        self.listener = listener
        self.port: int = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.statuses = statuses
        self.told: list[tuple[int, str]] = []
        self._config = place / "router.json"
        fields = {
            "model_path": str(DEMO_MODEL),
            "controllers": [fake.endpoint],
            "port": self.port,
            "listen_fd": listener.fileno(),
            "status_path": str(place / STATUS_SOCKET),
            "drain_seconds": 20.0,
        }
        self._config.write_bytes(msgspec.json.encode(fields))

    def has_told(self, process: subprocess.Popen[bytes], status: str) -> bool:
        """Whether this process has said so by now."""
        self.told += [(report.pid, report.status) for report in self.statuses.receive()]
        return (process.pid, status) in self.told

    @contextmanager
    def router(self, *, wait: bool = True) -> Iterator[subprocess.Popen[bytes]]:
        """A router process."""
        command = [sys.executable, "-m", "trunkline.router", "--config", str(self._config)]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL, pass_fds=(self.listener.fileno(),)) as process:
            try:
                if wait:
                    wait_until(lambda: self.has_told(process, "ready"))
                yield process
            finally:
                process.kill()


@pytest.fixture
def site(place: Path, tokenizer: Tokenizer) -> Iterator[Site]:
    fake = FakeController(f"ipc://{place}/c", make_answer(tokenizer)).start()
    statuses = StatusSocket(place)
    with open_listener("127.0.0.1", 0) as listener:
        yield Site(place, fake, listener, statuses)
    statuses.close()
    fake.stop()


def ask(client: httpx.Client, url: str) -> str:
    answer = client.post(f"{url}/v1/chat/completions", json=CHAT)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_connections_in_the_backlog_survive_all_routers(site: Site) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(site.router())
        first.send_signal(signal.SIGSTOP)
        connections = []
        for _ in range(20):  # nobody accepts them now
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", site.port), timeout=60))
            connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            connections.append(connection)
        first.kill()
        first.wait()
        stack.enter_context(site.router(wait=False))
        for connection in connections:
            assert connection.recv(100).startswith(b"HTTP/1.1 200 OK")


def test_a_router_that_hands_over_can_still_be_stopped(site: Site) -> None:
    site.fake.behaviour.hold = True
    with site.router() as process:
        results: list[int] = []

        def post() -> None:
            with contextlib.suppress(httpx.TransportError):
                results.append(httpx.post(f"{site.url}/v1/chat/completions", json=CHAT, timeout=60).status_code)

        thread = threading.Thread(target=post)
        thread.start()
        wait_until(lambda: site.fake.live == 1)
        process.send_signal(signal.SIGUSR1)
        wait_until(lambda: site.has_told(process, "draining"))
        process.send_signal(signal.SIGTERM)  # the cluster stops: a first request to, not a second
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        assert site.fake.live == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 1
        thread.join()
    assert results in ([], [503])


def test_what_is_no_listening_socket_is_refused(place: Path) -> None:
    closed = os.open(place, os.O_RDONLY)
    os.close(closed)
    folder = os.open(place, os.O_RDONLY)
    for descriptor in (
        socket.socket().detach(),
        folder,
        closed,
    ):  # a socket that does not listen is closed with it
        with pytest.raises(OSError, match=f"listen_fd: .*{descriptor}"):
            inherited(descriptor)
    os.close(folder)
