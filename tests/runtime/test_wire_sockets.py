"""Who gets in at a controller's sockets on the network, over real connections, and what all others cost."""

from __future__ import annotations

import contextlib
import os
import random
import socket as sockets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from deploy.waiting import wait_for
from zmq.utils.monitor import parse_monitor_message

from trunkline.runtime import wire_gate
from trunkline.runtime.wire_gate import MESSAGE_BYTES_MAX, SUBSCRIPTION_BYTES_MAX, Gate, Port, connections_max
from trunkline.runtime.wire_keys import Role, WireKeysError, generate, load, write
from trunkline.runtime.wire_peer import HANDSHAKE_FAILED, WirePeer

Context = zmq.Context[zmq.Socket[bytes]]
HANDSHAKE_MS = 1000
"""Longest time of a handshake where a test waits for the end of it; elsewhere it is the product's."""
TRIES = 20
ANY = "tcp://127.0.0.1:*"
pytestmark = pytest.mark.processes


class Server:
    """A ROUTER for routers and a PULL for workers behind one gate."""

    def __init__(self, path: str) -> None:
        self.context: Context = zmq.Context()
        self.gate = Gate(self.context, path)
        self.router, self.pull = self.context.socket(zmq.ROUTER), self.context.socket(zmq.PULL)
        self.gate.bind(self.router, ANY, Role.ROUTER, MESSAGE_BYTES_MAX)
        self.gate.bind(self.pull, ANY, Role.WORKER, MESSAGE_BYTES_MAX)
        self.gate.open()

    def endpoint(self, role: Role = Role.ROUTER) -> str:
        return (self.router if role is Role.ROUTER else self.pull).getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.endpoint().removeprefix("tcp://").split(":")
        return host, int(port)

    def hears(self, socket: zmq.Socket[bytes], payload: bytes) -> bool:
        return bool(socket.poll(20_000)) and socket.recv_multipart()[-1] == payload

    def counts(self, text: str) -> int:
        return sum(count for kind, count in self.gate.log.counts.items() if text in kind)

    def close(self) -> None:
        self.gate.close()
        self.router.close(linger=0)
        self.pull.close(linger=0)
        self.context.term()


class Client:
    """A socket as routers and workers make them, with its monitor."""

    def __init__(self, context: Context, peer: WirePeer, endpoint: str, kind: int = zmq.DEALER) -> None:
        self.peer, self.endpoint = peer, endpoint
        self.socket = context.socket(kind)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.IMMEDIATE, 1)
        self.monitor = self.socket.get_monitor_socket(HANDSHAKE_FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            peer.connect(self.socket, endpoint)
        except WireKeysError:
            self.close()
            raise

    def verdict(self) -> str:
        """Return "" if it was let in; else what its log would say."""
        assert self.monitor.poll(20_000), "no end of the handshake"
        event = parse_monitor_message(self.monitor.recv_multipart())
        return "" if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED else self.peer.explain(event)

    def enters(self) -> bool:
        """Return whether it is let in, if not at the first try: handshakes may be late."""
        return any(self.verdict() == "" for _ in range(TRIES))

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close()


@pytest.fixture
def keys(tmp_path: Path) -> str:
    write(generate(), tmp_path / "cluster.keys")
    return str(tmp_path / "cluster.keys")


@pytest.fixture
def server(keys: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(wire_gate, "_LOOK_SECONDS", 0.0)
    server = Server(keys)
    yield server
    server.close()


@pytest.fixture
def hurried(keys: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server that does not wait long for the end of a handshake."""
    monkeypatch.setattr(wire_gate, "HANDSHAKE_MS", HANDSHAKE_MS)
    server = Server(keys)
    yield server
    server.close()


@pytest.fixture
def connect() -> Iterator[Callable[..., Client]]:
    context: Context = zmq.Context()
    clients: list[Client] = []

    def make(peer: WirePeer, endpoint: str, kind: int = zmq.DEALER) -> Client:
        clients.append(Client(context, peer, endpoint, kind))
        return clients[-1]

    yield make
    for client in clients:
        client.close()
    context.term()


@contextlib.contextmanager
def listening(
    keys: str | None, bytes_max: int = MESSAGE_BYTES_MAX
) -> Iterator[tuple[list[Gate], zmq.Socket[bytes], str]]:
    """The gate of a ROUTER, which is not open yet, in a list of those that are to be closed; none without keys."""
    context: Context = zmq.Context()
    gates = [Gate(context, keys)] if keys is not None else []
    router = context.socket(zmq.ROUTER)
    try:
        for gate in gates:
            gate.bind(router, ANY, Role.ROUTER, bytes_max)
        if not gates:
            router.bind(ANY)
        yield gates, router, router.getsockopt_string(zmq.LAST_ENDPOINT)
    finally:
        for gate in gates:
            gate.close()
        router.close(linger=0)
        context.term()


@pytest.fixture
def strangers() -> Iterator[list[sockets.socket]]:
    found: list[sockets.socket] = []
    yield found
    for stranger in found:
        stranger.close()


Connect = Callable[..., Client]


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("door", [Role.ROUTER, Role.WORKER])
def test_each_role_enters_by_its_own_door(
    server: Server, connect: Connect, tmp_path: Path, keys: str, role: Role, door: Role
) -> None:
    """A router's key does not open what workers talk through, nor theirs the other; the controller's both."""
    part = tmp_path / "part"
    write(load(keys).part([role]), part)
    client = connect(
        WirePeer(str(part), role), server.endpoint(door), zmq.DEALER if door is Role.ROUTER else zmq.PUSH
    )
    heard_at = server.router if door is Role.ROUTER else server.pull
    if role in (door, Role.CONTROLLER):
        assert client.verdict() == ""
        client.socket.send(b"hello")
        assert server.hears(heard_at, b"hello")
        return
    assert "does not let in" in client.verdict()
    with pytest.raises(zmq.Again):
        client.socket.send(b"hello", zmq.NOBLOCK)
    wait_for(lambda: server.counts("wire key is not in the file"))
    assert not heard_at.poll(100)


def test_strangers_are_told_and_change_nothing(
    server: Server, connect: Connect, tmp_path: Path, keys: str
) -> None:
    write(generate(), tmp_path / "other.keys")
    friend = connect(WirePeer(keys), server.endpoint())
    assert friend.verdict() == ""
    other = connect(WirePeer(str(tmp_path / "other.keys")), server.endpoint())
    assert f"has other keys than {tmp_path}/other.keys" in other.verdict()
    plain = connect(WirePeer(), server.endpoint())
    assert "wants wire keys" in plain.verdict()
    wait_for(lambda: server.counts("another cluster's wire keys"))
    # Which of the two depends on whether libzmq sees the end of the connection first.
    wait_for(lambda: server.counts("without wire keys") or server.counts("did not end its handshake"))
    for client in (other, plain):
        with pytest.raises(zmq.Again):
            client.socket.send(b"hello", zmq.NOBLOCK)
    friend.socket.send(b"still here")
    assert server.hears(server.router, b"still here")


@pytest.mark.parametrize(
    ("mechanism", "text"),
    [(b"NULL", "the other side has no wire keys"), (b"CURVE", "the other side wants wire keys: name")],
)
def test_that_only_one_side_has_keys_is_said(connect: Connect, keys: str, mechanism: bytes, text: str) -> None:
    """If the greeting of the other side comes: libzmq may close the connection before it has sent all of it."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)
    with sockets.create_server(("127.0.0.1", 0)) as listener:
        client = connect(
            WirePeer(keys if mechanism == b"NULL" else ""), f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        )
        with listener.accept()[0] as server:
            server.sendall(greeting)
            assert client.verdict().startswith(text)


def test_a_client_with_keys_tells_nothing_to_a_server_without(connect: Connect, keys: str) -> None:
    with listening(None) as (_, plain, endpoint):
        client = connect(WirePeer(keys), endpoint)
        assert client.verdict().startswith("the other side ")
        with pytest.raises(zmq.Again):
            client.socket.send(b"secret", zmq.NOBLOCK)
        assert not plain.poll(50)


def test_nobody_gets_in_before_the_gate_is_open(connect: Connect, keys: str) -> None:
    with listening(keys) as (gates, router, endpoint):
        gate = gates.pop()
        client = connect(WirePeer(keys), endpoint)
        assert not client.monitor.poll(100)
        gate.open()
        assert client.verdict() == ""
        gate.close()
        assert connect(WirePeer(keys), endpoint).verdict() != ""
        client.socket.send(b"who is in stays in")
        assert router.poll(20_000)


def test_strangers_before_the_gate_is_open_neither_stop_the_traffic_nor_its_closing() -> None:
    """Nobody reads their events then, and of a monitor's events libzmq keeps only 2,000 by itself."""
    context: Context = zmq.Context()
    gate, router = Gate(context), context.socket(zmq.ROUTER)
    gate.bind(router, ANY, Role.ROUTER, MESSAGE_BYTES_MAX)
    host, port = gate.ports[0].endpoint.removeprefix("tcp://").split(":")
    for _ in range(700):  # each comes, fails and goes
        sockets.create_connection((host, int(port)), timeout=20).close()
    friend = context.socket(zmq.DEALER)
    friend.connect(gate.ports[0].endpoint)
    friend.send(b"hello")
    try:
        assert router.poll(20_000)
    finally:  # what waits for ever would also keep the test's process
        closing = threading.Thread(target=gate.close, daemon=True)
        closing.start()
        closing.join(20)
        assert not closing.is_alive()
    for socket in (friend, router):
        socket.close(linger=0)
    context.term()


def test_keys_change_while_all_runs(server: Server, connect: Connect, keys: str, tmp_path: Path) -> None:
    """New files first, then the controller: at no time is somebody out who tries twice."""
    old = tmp_path / "old.keys"
    write(load(keys), old)
    write(load(keys).rotated(), keys, overwrite=True)
    assert connect(WirePeer(str(old)), server.endpoint()).verdict() == ""
    early = WirePeer(keys)  # with the new keys, at a controller that still has the old ones
    client = connect(early, server.endpoint())
    assert "keys tried" in client.verdict()
    early.advance()
    early.again(client.socket, server.endpoint())
    assert client.verdict() == ""
    successor = Server(keys)
    try:
        assert connect(WirePeer(keys), successor.endpoint()).verdict() == ""
        assert connect(WirePeer(str(old)), successor.endpoint()).verdict() != ""
    finally:
        successor.close()


def test_a_client_is_let_in_again_after_its_key_was_retired_and_back(
    server: Server, connect: Connect, keys: str, tmp_path: Path
) -> None:
    kept = Path(keys).read_bytes()
    changed = generate().generations[0]
    own = load(keys).generations[0]
    write(type(load(keys))((type(own)(own.controller, changed.router, own.worker),)), keys, overwrite=True)
    old = tmp_path / "old.keys"
    old.write_bytes(kept)
    old.chmod(0o600)
    peer = WirePeer(str(old))
    client = connect(peer, server.endpoint())
    assert "does not let in" in client.verdict()
    assert not client.monitor.poll(500), "libzmq tries again by itself: whoever refuses need not be asked again"
    old.replace(keys)
    peer.path = keys
    peer.again(client.socket, server.endpoint())
    assert client.verdict() == ""


def test_a_damaged_file_changes_nothing(server: Server, connect: Connect, keys: str) -> None:
    peer = WirePeer(keys)
    assert connect(peer, server.endpoint()).verdict() == ""
    good = Path(keys).read_bytes()
    Path(keys).write_bytes(good[:100])
    with pytest.raises(WireKeysError):
        connect(WirePeer(keys), server.endpoint())
    assert connect(peer, server.endpoint()).verdict() == ""
    assert "no file of wire keys" in peer.problem
    assert server.counts("cannot be read")
    Path(keys).write_bytes(good)
    assert connect(WirePeer(keys), server.endpoint()).verdict() == ""


def garbage(seed: int) -> bytes:
    """What scanners send, and what is nearly ZMTP."""
    chosen = random.Random(seed)
    greeting = b"\xff" + bytes(8) + b"\x7f" + bytes([chosen.choice([0, 1, 3, 255]), chosen.randrange(256)])
    mechanism = chosen.choice([b"NULL", b"PLAIN", b"CURVE", b"GSSAPI", chosen.randbytes(20)]).ljust(20, b"\0")
    hello = chosen.choice([b"\x05HELLO", b"\x08INITIATE", b"\x05READY", b"\x05ERROR", b"\xff"])
    frames = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chosen.randbytes(400),
        chosen.randbytes(chosen.randrange(1, 2000)),
        greeting + mechanism + bytes(32) + b"\x04" + bytes([200]) + hello.ljust(200, b"\1"),
        greeting + mechanism + bytes(32) + b"\x06" + (1 << 62).to_bytes(8, "big") + chosen.randbytes(5000),
        greeting + mechanism + bytes(32) + b"\x02" + (MESSAGE_BYTES_MAX + 1).to_bytes(8, "big") + bytes(9000),
        b"\x01\x00\x05hello",
        b"",
    ]
    return frames[seed % len(frames)]


def test_garbage_is_closed_within_the_time_of_a_handshake(
    hurried: Server, keys: str, connect: Connect, strangers: list[sockets.socket]
) -> None:
    friend = connect(WirePeer(keys), hurried.endpoint())
    assert friend.enters()
    memory = _memory_bytes()
    strangers += [sockets.create_connection(hurried.address) for _ in range(64)]
    for seed, stranger in enumerate(strangers):
        with contextlib.suppress(OSError):
            stranger.sendall(garbage(seed))
    port = hurried.gate.ports[0]
    wait_for(lambda: port.accepted >= 65)
    wait_for(lambda: port.connections == 1)
    assert _memory_bytes() - memory < 32 << 20
    friend.socket.send(b"unharmed")
    assert hurried.hears(hurried.router, b"unharmed")
    assert hurried.counts("refused") >= 8
    assert len(hurried.gate.log.counts) < 10


def _memory_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_an_error_at_one_peer_keeps_no_other_out(
    hurried: Server, connect: Connect, keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one thread for which all handshakes wait goes on, whatever it is."""
    failed = []

    def failing_once(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if work not in failed:
                failed.append(work)
                raise ValueError("surprise")
            return work(*arguments)

        return call

    monkeypatch.setattr(Gate, "_answer", failing_once(Gate._answer))
    monkeypatch.setattr(Port, "take", failing_once(Port.take))
    client = connect(WirePeer(keys), hurried.endpoint())
    assert client.enters()
    client.socket.send(b"hello")
    assert hurried.hears(hurried.router, b"hello")
    assert len(failed) == 2


def test_a_message_that_is_too_long_ends_its_connection_only(keys: str, connect: Connect) -> None:
    with listening(keys, SUBSCRIPTION_BYTES_MAX) as ([gate], router, endpoint):
        gate.open()
        clients = [connect(WirePeer(keys), endpoint) for _ in range(2)]
        assert [client.verdict() for client in clients] == ["", ""]
        clients[0].socket.send(bytes(SUBSCRIPTION_BYTES_MAX + 1))
        wait_for(lambda: gate.ports[0].closed)
        clients[1].socket.send(b"unharmed")
        assert router.poll(20_000)
        assert router.recv_multipart()[-1] == b"unharmed"


def test_too_many_connections_close_the_port_for_a_while(
    keys: str, connect: Connect, monkeypatch: pytest.MonkeyPatch, strangers: list[sockets.socket]
) -> None:
    monkeypatch.setattr(wire_gate, "HANDSHAKE_MS", 60_000)  # the strangers stay until the test closes them
    monkeypatch.setattr(wire_gate, "connections_max", lambda: 20)
    server = Server(keys)
    try:
        friend = connect(WirePeer(keys), server.endpoint())
        assert friend.verdict() == ""
        port = server.gate.ports[0]
        for _ in range(25):  # the last ones do not get in if the port is closed by then
            with contextlib.suppress(TimeoutError):
                strangers.append(sockets.create_connection(server.address, timeout=0.2))
        wait_for(lambda: not port.is_open)
        with pytest.raises(TimeoutError):
            sockets.create_connection(server.address, timeout=0.2)
        friend.socket.send(b"unharmed")
        assert server.hears(server.router, b"unharmed")
        for stranger in strangers:
            stranger.close()
        wait_for(lambda: port.is_open)
        assert connect(WirePeer(keys), server.endpoint()).verdict() == ""
        assert server.counts("no more connections") == 1
    finally:
        server.close()


def test_one_port_cannot_use_up_the_descriptors() -> None:
    assert 64 <= connections_max() <= 1024


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"x", b""],
        [b"x", b"", b"1.0", b"1"],
        [b"x", b"", b"1.0", b"1", b"router", b"", b"", b"CURVE"],
        [b"x", b"", b"1.0", b"1", b"router", b"", b"", b"CURVE", b"short"],
        [b"x", b"", b"1.0", b"1", b"cook", b"", b"", b"CURVE", bytes(32)],
        [b"x", b"", b"1.0", b"1", b"router", b"", b"", b"NULL"],
        [b"x", b"", b"1.0", b"1", b"\xff\xfe", b"", b"", b"PLAIN", b"a", b"b"],
    ],
)
def test_no_other_question_is_answered_with_yes(server: Server, frames: list[bytes]) -> None:
    answer = server.gate._answer(frames)
    assert answer is None or answer[-4] == b"400"


def test_on_one_host_nothing_is_said_of_keys(tmp_path: Path, connect: Callable[..., Client]) -> None:
    """There a connection ends in the middle of its handshake because a process does."""
    address = str(tmp_path / "controller")
    with sockets.socket(sockets.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        client = connect(WirePeer(), f"ipc://{address}")
        listener.accept()[0].close()
        verdict = client.verdict()
    assert "key" not in verdict
    assert "has ended, or is just starting" in verdict
