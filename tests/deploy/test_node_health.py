"""What a part of a cluster says of its health, over HTTP and from its supervisor's status."""

from __future__ import annotations

import contextlib
import http.client
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest
import zmq
from deploy.controlled import control_server
from deploy.waiting import free_ports

from trunkline.controller.messages import Ping, RouterRequest, Submit
from trunkline.deploy.config.node_settings import Kind, NodeSettings
from trunkline.deploy.config.settings import ServeSettings
from trunkline.deploy.errors import UserError
from trunkline.deploy.node import health, node
from trunkline.deploy.node.health import NodeHealth, Verdict, serving
from trunkline.deploy.supervisor.control import ControlServer
from trunkline.deploy.supervisor.members import Command, Reply
from trunkline.router.messages import Outputs, State

SERVING = {"phase": "serving", "groups": [], "processes": []}


class Status:
    """A supervisor that answers `status` with what a test wants, over a real control socket."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.status: dict[str, Any] = dict(SERVING)
        self.server: ControlServer

    def answer(self, command: Command, ticket: int) -> None:
        assert command.command == "status"
        self.server.reply(ticket, Reply(done=True, status=self.status))


@pytest.fixture
def status() -> Iterator[Status]:
    with tempfile.TemporaryDirectory(prefix="tl-") as folder:  # pytest's are too long for sockets
        made = Status(Path(folder))
        with control_server(made.folder, made.answer) as made.server:
            yield made


def health_at(
    folder: Path, *, reason: str = "", probe: Callable[[], tuple[Verdict, Verdict]] | None = None
) -> NodeHealth:
    """The health of a part whose supervisor answers in this folder; it works, unless a probe says otherwise."""
    health = NodeHealth()
    health.begin(folder, probe or (lambda: (Verdict(True, reason), Verdict(True, reason))))
    return health


@contextmanager
def asked(health: NodeHealth) -> Iterator[http.client.HTTPConnection]:
    """A health server, and a connection to it."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        serving(listener, health),
    ):
        host, port = listener.getsockname()
        connection = http.client.HTTPConnection(host, port, timeout=60)
        yield connection
        connection.close()


def get(connection: http.client.HTTPConnection, path: str, method: str = "GET") -> tuple[int, str]:
    connection.request(method, path)
    response = connection.getresponse()
    return response.status, response.read().decode()


def test_health_over_http(status: Status) -> None:
    verdicts = [Verdict(False, "no token within 5 s")]

    def probe() -> tuple[Verdict, Verdict]:
        return verdicts[-1], verdicts[-1]

    with asked(health_at(status.folder, probe=probe)) as connection:
        assert get(connection, "/livez") == (200, "the supervisor answers\n")
        assert get(connection, "/readyz") == (503, "no token within 5 s\n")
        assert get(connection, "/startupz") == (503, "no token within 5 s\n")
        assert get(connection, "/") == (404, "there are /livez, /readyz, /startupz\n")
        assert get(connection, "/readyz", "HEAD") == (503, "")
        assert get(connection, "/livez", "POST")[0] == 501
    verdicts.append(Verdict(True, "a token was generated"))
    with asked(health_at(status.folder, probe=probe)) as connection:
        assert get(connection, "/readyz?x=1") == (200, "a token was generated\n")
        status.status = {**SERVING, "phase": "stopping"}
        assert get(connection, "/readyz") == (503, "it is stopping\n")  # although that answer is fresh
        assert get(connection, "/startupz") == (200, "it has started\n")
        assert get(connection, "/livez")[0] == 200


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"groups": [{"group": 0, "state": "lost"}]}, "group 0"),
        (
            {"groups": [{"group": 0, "state": "lost", "why": "w exited with code 2"}]},
            "group 0 (w exited with code 2)",
        ),
        ({"processes": [{"name": "router", "state": "given up"}]}, "router"),
    ],
)
def test_what_was_given_up_is_dead(change: dict[str, Any], reason: str, status: Status) -> None:
    status.status = {**SERVING, **change}
    assert health_at(status.folder).livez() == Verdict(False, f"given up: {reason}")


def test_a_group_that_starts_is_not_ready(status: Status) -> None:
    health = health_at(status.folder)
    rows = [{"name": "controller", "state": "starting"}, {"name": "worker-0", "state": "ready"}]
    status.status = {"phase": "serving", "groups": [{"group": 0, "state": "starting"}], "processes": rows}
    assert health.readyz() == Verdict(False, "the group is starting: controller starting")
    assert not health.startupz().ok
    assert health.livez().ok


def test_a_supervisor_that_is_gone_is_dead(tmp_path: Path) -> None:
    health = health_at(tmp_path)
    for verdict in (health.livez(), health.readyz(), health.startupz()):
        assert not verdict.ok
        assert "does not answer" in verdict.reason


def test_strangers_do_not_keep_others_from_asking(status: Status, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither silent ones nor those that speak another protocol, nor those that send byte by byte."""
    monkeypatch.setattr(health, "_REQUEST_S_MAX", 0.5)
    ended = threading.Event()
    with asked(health_at(status.folder, reason="fine")) as connection, ExitStack() as stack:
        address = connection.host, connection.port
        rude = stack.enter_context(socket.create_connection(address))
        rude.sendall(b"\x16\x03\x01" + bytes(200) + b"\r\n\r\n")
        # More than are served at once, and each byte comes within the time that a byte may take.
        slow = [stack.enter_context(socket.create_connection(address)) for _ in range(20)]

        def drip() -> None:
            while not ended.wait(0.1):
                for other in slow[8:]:
                    with contextlib.suppress(OSError):
                        other.sendall(b"x")

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            assert get(connection, "/readyz") == (200, "fine\n")
        finally:
            ended.set()
            thread.join()


def test_a_part_that_reads_its_model_lives_and_has_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_ports()
    told: list[int] = []

    def read_for_minutes(*_: object, **__: object) -> NoReturn:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        told.extend(get(connection, path)[0] for path in ("/livez", "/startupz", "/readyz"))
        connection.close()
        raise UserError("enough")

    monkeypatch.setattr(node, "plan_cluster", read_for_minutes)
    asked_for = NodeSettings(leader="127.0.0.1:7400", ranks="1", plain_tcp=True, health_port=port)
    with pytest.raises(UserError, match="enough"):
        node.run_node(Kind.WORKERS, ServeSettings(tp=2, dtype="float32", device="cpu", port=0), asked_for)
    assert told == [200, 503, 503]


class FakeController:
    """Counts tokens as it is told to, and generates one when asked, if it `works`."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/router"
        self.tokens = 0
        self.works = True
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(self.endpoint)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._turn, daemon=True)
        self._thread.start()

    def _turn(self) -> None:
        decoder = msgspec.msgpack.Decoder(RouterRequest)
        while not self._ended.is_set():
            if self._socket.poll(20):
                *who, content = self._socket.recv_multipart()
                request = decoder.decode(content)
                if isinstance(request, Ping):
                    counters = [*[0] * 7, self.tokens, *[0] * 6]
                    state = msgspec.convert(["state", 1, "ready", "", *counters], State)
                    self._socket.send_multipart([*who, msgspec.msgpack.encode(state)])
                elif isinstance(request, Submit) and self.works:
                    self.tokens += 1
                    self._socket.send_multipart([*who, msgspec.msgpack.encode(Outputs(2, tokens=bytes(4)))])

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()
        self._context.destroy(linger=0)


@pytest.mark.parametrize(("fresh_s", "verdict"), [(0.0, False), (3600.0, True)])
def test_tokens_for_others_prove_only_as_much_as_they_are_young(
    fresh_s: float, verdict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "TOKEN_FRESH_S", fresh_s)
    monkeypatch.setattr(health, "_STATE_S_MAX", 60.0)
    monkeypatch.setattr(health, "_TOKEN_S_MAX", 60.0)
    with tempfile.TemporaryDirectory(prefix="tl-") as folder:
        controller = FakeController(Path(folder))
        probe = health.TokenProbe(controller.endpoint)
        try:
            controller.tokens = 7  # generated at an unknown time
            assert probe.check() == Verdict(True, "a token was generated")
            controller.tokens += 5
            controller.works = False
            monkeypatch.setattr(health, "_TOKEN_S_MAX", 0.2)
            assert probe.check().ok is verdict
        finally:
            probe.close()
            controller.stop()
