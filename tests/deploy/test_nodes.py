"""Parts of a cluster: what is planned, what the supervisor makes of them, and what they say of their health."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import selectors
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest
import zmq

from trunkline.controller.config import ControllerConfig
from trunkline.controller.messages import Ping, RouterRequest, Submit, WorkerHello
from trunkline.controller.service.terms import disagreement
from trunkline.deploy.cli.node_cli import group, router, workers
from trunkline.deploy.cli.options import SERVE_OPTIONS
from trunkline.deploy.config.disk_folders import DiskFolders
from trunkline.deploy.config.member_configs import Config, configs_of
from trunkline.deploy.config.node_settings import Kind, NodeSettings
from trunkline.deploy.config.settings import ServeSettings
from trunkline.deploy.errors import UserError
from trunkline.deploy.node import health_server, node, node_probe
from trunkline.deploy.node.health_server import serving
from trunkline.deploy.node.node_health import NodeHealth
from trunkline.deploy.node.node_probe import Verdict
from trunkline.deploy.supervisor.control_commands import Command, Reply
from trunkline.deploy.supervisor.control_server import ControlServer
from trunkline.deploy.supervisor.lifecycle import Lifecycle, Phase
from trunkline.deploy.supervisor.members import (
    EXIT_IMPOSSIBLE,
    EXIT_LEFT,
    Action,
    Limits,
    Member,
    Role,
    Send,
    Start,
)
from trunkline.deploy.supervisor.serve import plan_cluster
from trunkline.router.config import RouterConfig
from trunkline.router.messages import Outputs, State
from trunkline.worker.config import WorkerConfig
from trunkline.worker.service import EXIT_CONFIG as WORKERS_EXIT_CONFIG
from trunkline.worker.service import EXIT_LEFT as WORKERS_EXIT_LEFT

SETTINGS = ServeSettings(tp=2, dtype="float32", device="cpu", port=0)


def configs(kind: Kind, **given: Any) -> dict[str, Config]:
    """Of the processes that run in such a part, by name."""
    settings, node = NodeSettings(plain_tcp=True, **given).plan(kind, SETTINGS)
    plan = plan_cluster(settings, node=node)
    return {member.name: config for member, config in configs_of(plan, Path("/run/x"), DiskFolders()).items()}


def worker_of(found: dict[str, Config], name: str) -> WorkerConfig:
    config = found[name]
    assert isinstance(config, WorkerConfig)
    return config


def test_a_whole_group_opens_two_ports_and_keeps_its_ranks_to_itself() -> None:
    found = configs(Kind.GROUP, listen="127.0.0.1:7400")
    assert set(found) == {"controller", "worker-0", "worker-1"}
    controller, worker = found["controller"], worker_of(found, "worker-1")
    assert isinstance(controller, ControllerConfig)
    assert (controller.router_endpoint, controller.events_endpoint) == (
        "tcp://127.0.0.1:7400",
        "tcp://127.0.0.1:7401",
    )
    assert controller.plan_endpoint == worker.plan_endpoint == "ipc:///run/x/g0-plan"
    assert not worker.is_spread
    assert worker.collectives == "auto"


def test_ranks_of_two_hosts_meet_at_the_leaders_ports() -> None:
    here = configs(Kind.GROUP, listen="0.0.0.0:7400", ranks="0")
    there = configs(Kind.WORKERS, leader="h:7400", ranks="1")
    assert set(here) == {"controller", "worker-0"}
    assert set(there) == {"worker-1"}
    controller, near, far = here["controller"], worker_of(here, "worker-0"), worker_of(there, "worker-1")
    assert isinstance(controller, ControllerConfig)
    assert (controller.plan_endpoint, controller.report_endpoint) == ("tcp://0.0.0.0:7402", "tcp://0.0.0.0:7403")
    assert (near.plan_endpoint, near.rendezvous) == ("tcp://127.0.0.1:7402", "tcp://0.0.0.0:7404")
    assert (far.plan_endpoint, far.report_endpoint) == ("tcp://h:7402", "tcp://h:7403")
    assert far.rendezvous == "tcp://h:7404"
    assert near.is_spread
    assert far.is_spread
    assert near.collectives == far.collectives == "gloo"
    assert near.terms == far.terms
    assert near.terms == {name: value for name, value in controller.terms.items() if name in near.terms}
    assert len(near.terms["model"]) == 32


def test_a_router_knows_requests_and_events_of_each_group(tmp_path: Path) -> None:
    settings, node = NodeSettings(plain_tcp=True, controllers="g-{0..1}.g:7400").plan(Kind.ROUTER, SETTINGS)
    plan = dataclasses.replace(plan_cluster(SETTINGS), settings=settings, node=node)
    (config,) = configs_of(plan, tmp_path, DiskFolders()).values()
    assert isinstance(config, RouterConfig)
    assert config.controllers == ["tcp://g-0.g:7400", "tcp://g-1.g:7400"]
    assert config.events == ["tcp://g-0.g:7401", "tcp://g-1.g:7401"]


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (Kind.ROUTER, {}, "--controllers is missing"),
        (Kind.WORKERS, {"ranks": "1"}, "--leader is missing"),
        (Kind.GROUP, {"health_port": 65536}, "--health-port is 65536"),
        (Kind.GROUP, {"health_host": "a b"}, "--health-host is 'a b'"),
        (Kind.GROUP, {"wire_keys": "f", "plain_tcp": True}, "exclude each other"),
        (Kind.GROUP, {"listen": "no-such-host.invalid"}, "cannot be resolved"),
    ],
)
def test_what_cannot_be_a_part(kind: Kind, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        NodeSettings(**given).plan(kind, SETTINGS)


def test_a_part_without_keys_is_refused() -> None:
    settings, node = NodeSettings(listen="127.0.0.1:7400").plan(Kind.GROUP, SETTINGS)
    with pytest.raises(UserError, match="wire keys"):
        plan_cluster(settings, node=node)


def test_a_rank_of_another_model_is_told_what_differs() -> None:
    terms = {"tp": "2", "dtype": "float32", "model": "aa"}
    hello = WorkerHello(1, 1, "", bytes(16), {"tp": "2", "model": "bb", "dtype": "float32"})
    assert disagreement(terms, hello) == "rank 1 has another checkpoint or quantization (bb) than the group (aa)"
    assert disagreement({**terms, "model": "bb"}, hello) == ""
    assert "another tp (2) than the group (4)" in disagreement({**terms, "tp": "4"}, hello)
    assert disagreement(terms, WorkerHello(1, 1, "", bytes(16))) == ""


def test_every_option_of_serve_is_in_some_part() -> None:
    known = {name for made in (group, workers, router) for name in vars(made)["__signature__"].parameters}
    assert {option.field for option in SERVE_OPTIONS if option.parameter not in known} == {"groups"}
    fields = {field.name for field in dataclasses.fields(ServeSettings)}
    assert fields - {option.field for option in SERVE_OPTIONS} == {"ranks_here"}


# What the supervisor makes of it

LIMITS = Limits(drain_s=30.0)


def life_of(*members: Member) -> Lifecycle:
    life = Lifecycle(members, LIMITS, 0.0)
    life.healthy(0.0)
    return life


def started(actions: list[Action]) -> list[str]:
    return [action.name for action in actions if isinstance(action, Start)]


def test_ranks_are_started_again_for_ever_unless_they_can_never_work() -> None:
    assert (EXIT_LEFT, EXIT_IMPOSSIBLE) == (WORKERS_EXIT_LEFT, WORKERS_EXIT_CONFIG)
    life, now = life_of(Member("worker-1", Role.WORKER, 0)), 0.0
    for _ in range(20):
        again = started(life.exited("worker-1", EXIT_LEFT, now))
        while not again:
            assert life.deadline <= now + 30.0
            now = life.deadline
            again = started(life.tick(now))
        assert again == ["worker-1"]
    assert life.phase is Phase.SERVING
    life.exited("worker-1", 2, now)
    assert (life.phase, life.exit_code) == (Phase.FAILED, 2)


def test_workers_without_a_controller_are_ready_when_all_are() -> None:
    life = life_of(Member("worker-2", Role.WORKER, 0), Member("worker-3", Role.WORKER, 0))

    def state() -> str:
        return str(life.status(1.0)["groups"][0]["state"])

    life.reported("worker-2", "ready", 1.0)
    assert state() == "starting"
    life.reported("worker-3", "ready", 1.0)
    assert state() == "ready"
    life.exited("worker-2", EXIT_LEFT, 1.0)
    assert state() == "starting"


def test_a_group_without_routers_here_gets_the_time_to_drain() -> None:
    life = life_of(Member("controller", Role.CONTROLLER, 0), Member("worker-0", Role.WORKER, 0))
    assert [a.name for a in life.stop_requested(1.0) if isinstance(a, Send)] == ["controller"]
    assert life.deadline == 1.0 + LIMITS.drain_s + LIMITS.margin_s
    assert [a.name for a in life.exited("controller", 0, 20.0) if isinstance(a, Send)] == ["worker-0"]
    life.exited("worker-0", 0, 20.0)
    assert (life.phase, life.exit_code) == (Phase.STOPPED, 0)


def test_a_router_alone_serves_without_groups() -> None:
    life = life_of(Member("router", Role.ROUTER, -1))
    assert started(life.exited("router", 1, 1.0)) == ["router"]
    assert life.phase is Phase.SERVING


# What it says of its health


class Status:
    """What the supervisor answers, over a real control socket, as its loop does."""

    def __init__(self, folder: Path) -> None:
        self.status: dict[str, Any] = {"phase": "serving", "groups": [], "processes": []}
        self._selector = selectors.DefaultSelector()
        self._server = ControlServer(self._selector, folder, self._answer)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._turn, daemon=True)
        self._thread.start()

    def _answer(self, command: Command, ticket: int) -> None:
        assert command.command == "status"
        self._server.reply(ticket, Reply(done=True, status=self.status))

    def _turn(self) -> None:
        while not self._ended.is_set():
            for key, events in self._selector.select(0.02):
                key.data(events)

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()
        self._server.close()
        self._selector.close()


@pytest.fixture
def status() -> Iterator[tuple[Status, Path]]:
    with tempfile.TemporaryDirectory(prefix="tl-") as folder:  # pytest's are too long for sockets
        found = Status(Path(folder))
        yield found, Path(folder)
        found.stop()


def health_at(folder: Path, probe: Callable[[], tuple[Verdict, Verdict]]) -> NodeHealth:
    """Of a part whose supervisor answers in this folder."""
    health = NodeHealth()
    health.begin(folder, probe)
    return health


@contextmanager
def asked(health: NodeHealth) -> Iterator[http.client.HTTPConnection]:
    """A health server, and a connection to it."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        serving(listener, health),
    ):
        host, port = listener.getsockname()
        connection = http.client.HTTPConnection(host, port, timeout=10)
        yield connection
        connection.close()


def get(connection: http.client.HTTPConnection, path: str, method: str = "GET") -> tuple[int, str]:
    connection.request(method, path)
    response = connection.getresponse()
    return response.status, response.read().decode()


def test_health_over_http(status: tuple[Status, Path]) -> None:
    said, folder = status
    verdicts = [Verdict(False, "no token within 5 s")]

    def probe() -> tuple[Verdict, Verdict]:
        return verdicts[-1], verdicts[-1]

    health = health_at(folder, probe)
    with asked(health) as connection:
        assert get(connection, "/livez") == (200, "the supervisor answers\n")
        assert get(connection, "/readyz") == (503, "no token within 5 s\n")
        assert get(connection, "/startupz") == (503, "no token within 5 s\n")
        assert get(connection, "/") == (404, "there are /livez, /readyz, /startupz\n")
        assert get(connection, "/readyz", "HEAD") == (503, "")
        assert get(connection, "/livez", "POST")[0] == 501
    verdicts.append(Verdict(True, "a token was generated"))
    with asked(health_at(folder, probe)) as connection:
        assert get(connection, "/readyz?x=1") == (200, "a token was generated\n")
        said.status = {**said.status, "phase": "stopping"}
        assert get(connection, "/readyz") == (503, "it is stopping\n")  # although that answer is fresh
        assert get(connection, "/startupz") == (200, "it has started\n")
        assert get(connection, "/livez")[0] == 200


def test_what_was_given_up_is_dead(status: tuple[Status, Path]) -> None:
    said, folder = status
    health = health_at(folder, lambda: (Verdict(True, ""), Verdict(True, "")))
    said.status = {**said.status, "groups": [{"group": 0, "state": "lost"}]}
    assert health.livez() == Verdict(False, "given up: group 0")
    said.status = {**said.status, "groups": [{"group": 0, "state": "lost", "why": "worker-0 exited with code 2"}]}
    assert health.livez() == Verdict(False, "given up: group 0 (worker-0 exited with code 2)")
    said.status = {**said.status, "groups": [{"group": 0, "state": "lost"}]}
    row = {"name": "router", "state": "given up"}
    said.status = {"phase": "serving", "groups": [], "processes": [row]}
    assert health.livez() == Verdict(False, "given up: router")


def test_a_group_that_starts_is_not_ready(status: tuple[Status, Path]) -> None:
    said, folder = status
    health = health_at(folder, lambda: (Verdict(True, ""), Verdict(True, "")))
    rows = [{"name": "controller", "state": "starting"}, {"name": "worker-0", "state": "ready"}]
    said.status = {"phase": "serving", "groups": [{"group": 0, "state": "starting"}], "processes": rows}
    assert health.readyz() == Verdict(False, "the group is starting: controller starting")
    assert not health.startupz().ok
    assert health.livez().ok


def test_a_supervisor_that_is_gone_is_dead(tmp_path: Path) -> None:
    health = health_at(tmp_path, lambda: (Verdict(True, ""), Verdict(True, "")))
    for verdict in (health.livez(), health.readyz(), health.startupz()):
        assert not verdict.ok
        assert "does not answer" in verdict.reason


def test_strangers_do_not_keep_others_from_asking(status: tuple[Status, Path]) -> None:
    _, folder = status
    health = health_at(folder, lambda: (Verdict(True, ""), Verdict(True, "fine")))
    with asked(health) as connection:
        silent = [socket.create_connection((connection.host, connection.port)) for _ in range(8)]
        with socket.create_connection((connection.host, connection.port)) as rude:
            rude.sendall(b"\x16\x03\x01" + bytes(200) + b"\r\n\r\n")
            assert get(connection, "/readyz") == (200, "fine\n")
        for other in silent:
            other.close()


def test_who_sends_byte_by_byte_does_not_keep_others_from_asking(
    status: tuple[Status, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = status
    monkeypatch.setattr(health_server, "_REQUEST_S_MAX", 0.5)
    health = health_at(folder, lambda: (Verdict(True, ""), Verdict(True, "")))
    ended = threading.Event()
    with asked(health) as connection, ExitStack() as stack:
        address = connection.host, connection.port
        # More than are served at once, and each byte comes within the time that a byte may take.
        slow = [stack.enter_context(socket.create_connection(address)) for _ in range(20)]

        def drip() -> None:
            while not ended.wait(0.1):
                for other in slow:
                    with contextlib.suppress(OSError):
                        other.sendall(b"x")

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            assert get(connection, "/livez")[0] == 200
        finally:
            ended.set()
            thread.join()


def test_a_part_that_reads_its_model_lives_and_has_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    told: list[int] = []

    def read_for_minutes(*_: object, **__: object) -> NoReturn:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        told.extend(get(connection, path)[0] for path in ("/livez", "/startupz", "/readyz"))
        connection.close()
        raise UserError("enough")

    monkeypatch.setattr(node, "plan_cluster", read_for_minutes)
    asked_for = NodeSettings(leader="127.0.0.1:7400", ranks="1", plain_tcp=True, health_port=port)
    with pytest.raises(UserError, match="enough"):
        node.run_node(Kind.WORKERS, SETTINGS, asked_for)
    assert told == [200, 503, 503]


class FakeController:
    """Counts tokens as it is told to; generates one for who asks, if it can."""

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


@pytest.mark.parametrize(("fresh_s", "verdict"), [(0.2, False), (3600.0, True)])
def test_tokens_for_others_prove_only_as_much_as_they_are_young(
    fresh_s: float, verdict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_probe, "FRESH_S", fresh_s)
    monkeypatch.setattr(node_probe, "_TOKEN_S_MAX", 0.3)
    with tempfile.TemporaryDirectory(prefix="tl-") as folder:
        controller = FakeController(Path(folder))
        probe = node_probe.TokenProbe(controller.endpoint)
        try:
            controller.tokens = 7  # of nobody knows when
            assert probe.check() == Verdict(True, "a token was generated")
            controller.tokens += 5
            controller.works = False
            time.sleep(2 * 0.2)  # they may be as old as the last look
            assert probe.check().ok is verdict
        finally:
            probe.close()
            controller.stop()
