"""The server's side of sockets with wire keys: lets peers in.

    socket.bind ──► libzmq: CURVE handshake ──► "inproc://zeromq.zap.01" ──► Gate: is the client's key in the file?
                    monitor: accepted, refused, closed ────────────────────► Gate: counts, rare log lines

libzmq asks before a connection exists for the socket; if it gets no answer, it refuses the peer
(`ZAP_ENFORCE_DOMAIN`), so there is no moment without a guard. A thread answers: not the controller's loop, whose
steps would wait for strangers. What an unknown peer can hold is a connection, for `HANDSHAKE_MS`; while there are
too many the kernel drops requests for new ones (a filter on the listening socket, because `unbind` would close
those that are there).
"""

from __future__ import annotations

import ctypes
import os
import resource
import socket as sockets
import struct
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Final

import structlog
import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from trunkline.runtime.process import RareLog
from trunkline.runtime.wire_keys import Role, WireKeys, WireKeysError, is_network, load
from trunkline.runtime.wire_peer import HANDSHAKE_FAILED, HANDSHAKE_MS, MonitorEvent

_ZAP: Final = "inproc://zeromq.zap.01"
_EVENTS: Final = (
    HANDSHAKE_FAILED
    | zmq.EVENT_LISTENING
    | zmq.EVENT_ACCEPTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_ACCEPT_FAILED
    | zmq.EVENT_MONITOR_STOPPED
)
_DOMAINS: Final = {role.encode(): role for role in (Role.ROUTER, Role.WORKER)}
_KEY_BYTES: Final = 32
_SO_ATTACH_FILTER: Final = 26  # from <asm/socket.h>
_SO_DETACH_FILTER: Final = 27
_BPF_RETURN: Final = 0x06  # from <linux/filter.h>
MESSAGE_BYTES_MAX: Final = 128 << 20
"""Largest number of bytes in a message of a router or worker. A prompt of 16 million tokens takes half of that."""
SUBSCRIPTION_BYTES_MAX: Final = 4096
"""Largest number of bytes in a message of a peer that only subscribes."""
_LOOK_SECONDS: Final = 1.0
"""Shortest time in seconds between two checks whether the file of keys has changed."""
_CONNECTIONS_MIN: Final = 64
_CONNECTIONS_MAX: Final = 1024
_DESCRIPTORS_SHARE: Final = 8
"""Each port may use this fraction (1 / 8) of the process's file descriptors: there are four ports, and files."""

log = structlog.get_logger("trunkline.wire")


def connections_max() -> int:
    """Return the number of connections that one port may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(max(soft // _DESCRIPTORS_SHARE, _CONNECTIONS_MIN), _CONNECTIONS_MAX)


@dataclass(slots=True)
class Port:
    """A socket that listens on the network, and counts of its connections. Only the gate's thread changes them."""

    socket: zmq.Socket[bytes]
    endpoint: str
    listener: int = -1
    """File descriptor of the listening socket; -1: not known yet."""
    is_open: bool = True
    """Whether new connections are let through."""
    accepted: int = 0
    closed: int = 0
    refused: int = 0
    """Connections that were closed because of their handshake."""
    strangers: dict[int, str] = field(default_factory=dict)
    """Addresses of connections whose handshake is certainly not finished, by descriptor."""
    failure: MonitorEvent | None = None
    """The event of a failed handshake, until the next event reports the end of the same connection."""

    @property
    def connections(self) -> int:
        """The number of connections at present."""
        return self.accepted - self.closed

    def take(self, event: MonitorEvent) -> tuple[str, dict[str, Any]] | None:
        """Count an event of the socket's monitor; return a line for the log and its details, if there is one."""
        kind, value = event["event"], int(event["value"])
        if kind == zmq.EVENT_LISTENING:
            self.listener = value
        elif kind == zmq.EVENT_ACCEPTED:
            self.accepted += 1
            self.strangers[value] = _address_of(value)
        elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            # libzmq does not say whose: from now on no connection is certainly a stranger's.
            self.strangers.clear()
        elif kind & HANDSHAKE_FAILED:
            self.failure = event
        elif kind == zmq.EVENT_ACCEPT_FAILED:
            return "a connection could not be accepted", {"reason": os.strerror(value)}
        elif kind == zmq.EVENT_DISCONNECTED:
            self.closed += 1
            address = self.strangers.pop(value, "")
            failure, self.failure = self.failure, None
            if failure is not None or address:
                self.refused += 1
                return _kind_of(failure), {"peer": address}
        return None


def _kind_of(failure: MonitorEvent | None) -> str:
    """Return why a connection was refused, as far as that is known."""
    if failure is None:
        return "refused a connection that does not speak this protocol"
    if failure["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "refused a peer whose wire key is not in the file"
    if failure["event"] == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        return "refused a connection that did not end its handshake"
    if failure["value"] == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return "refused a peer without wire keys, or with some where there are none"
    if failure["value"] == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
        return "refused a peer that has another cluster's wire keys"
    return "refused a peer whose handshake makes no sense"


def _address_of(descriptor: int) -> str:
    """Return the address of a connection's other end; "" if it has gone already.

    The descriptor belongs to libzmq. Not even a copy of it may be made: it may be another file's by now, and
    closing a copy would drop that file's locks.
    """
    try:
        borrowed = sockets.socket(fileno=descriptor)
    except OSError:
        return ""
    try:
        return str(borrowed.getpeername()[0])
    except (OSError, IndexError):
        return ""
    finally:
        borrowed.detach()


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Bind a socket to an endpoint of the network, which may have a range of ports.

    Raises:
        zmq.ZMQError: It cannot be bound, or all ports of the range are taken.
    """
    place, _, ports = endpoint.rpartition(":")
    first, dash, last = ports.partition("-")
    if not dash:
        socket.bind(endpoint)
        return
    for port in range(int(first), int(last) + 1):
        try:
            socket.bind(f"{place}:{port}")
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or port == int(last):
                raise
        else:
            return


def _let_through(listener: int, whether: bool) -> None:
    """Have the kernel accept new connections to a listening socket, or drop them if `whether` is false. Existing
    connections go on.

    Raises:
        OSError: This kernel cannot do that.
    """
    nothing = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RETURN, 0, 0, 0))  # of a packet, keep 0 bytes
    borrowed = sockets.socket(fileno=listener)
    try:
        if whether:
            borrowed.setsockopt(sockets.SOL_SOCKET, _SO_DETACH_FILTER, 0)
        else:
            program = struct.pack("HP", 1, ctypes.addressof(nothing))
            borrowed.setsockopt(sockets.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    finally:
        borrowed.detach()


class Gate:
    """Lets the sockets of a context listen. All calls must come from the thread that owns them."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], path: str = "", identity: Role = Role.CONTROLLER
    ) -> None:
        """
        Args:
            path: The file of keys; "" if there are none, and ports on the network are open to all.
            identity: The role whose key pair the sockets show: that of the process.

        Raises:
            WireKeysError: The file cannot be used.
        """
        self.context = context
        """The context of all sockets that listen."""
        self.ports: list[Port] = []
        self.log = RareLog("trunkline.wire")
        self._path = path
        self._identity = identity
        self._keys: WireKeys | None = load(path) if path else None
        self._seen = _stamp(path)
        self._looked_at = float("-inf")
        self._zap: zmq.Socket[bytes] | None = None
        self._monitors: dict[zmq.Socket[bytes], Port] = {}
        self._wake: zmq.Socket[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._connections_max = connections_max()

    def bind(self, socket: zmq.Socket[bytes], endpoint: str, role: Role, bytes_max: int) -> None:
        """Have a socket listen. On the network it accepts only peers with a key of `role`, once the gate is open.

        Args:
            endpoint: `tcp://ADDRESS:FIRST-LAST` takes the first of these ports that is free, `tcp://ADDRESS:*` any
                free one.
            bytes_max: Bytes of the longest message; a peer that sends a longer one is disconnected. It also bounds
                the memory that a stranger can take.

        Raises:
            zmq.ZMQError: The socket cannot listen there.
        """
        if not is_network(endpoint):
            socket.bind(endpoint)
            return
        socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.set(zmq.MAXMSGSIZE, bytes_max)
        if "[" in endpoint:
            socket.set(zmq.IPV6, 1)
        if self._keys is not None:
            self._guard()
            own = self._keys.generations[0].of(self._identity)
            socket.curve_server = True
            socket.curve_publickey = own.public.encode()
            socket.curve_secretkey = own.secret.encode()
            socket.set(zmq.ZAP_DOMAIN, role.encode())
            socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        monitor = self._monitor(socket)
        try:
            _bind(socket, endpoint)
        except zmq.ZMQError:
            socket.disable_monitor()
            monitor.close(linger=0)
            raise
        port = Port(socket, socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self.ports.append(port)
        self._monitors[monitor] = port

    def _monitor(self, socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
        """Return the socket on which another one's events come. Its queue has no limit: at one, libzmq's I/O
        thread, on which all traffic depends, would wait for the reader, and there is none before the gate is
        open."""
        address = f"inproc://monitor-{len(self.ports)}-{id(self):x}"
        socket.monitor(address, _EVENTS)
        monitor = self.context.socket(zmq.PAIR)
        monitor.set(zmq.RCVHWM, 0)
        monitor.connect(address)
        return monitor

    def _guard(self) -> None:
        """Open the socket on which libzmq asks about peers."""
        if self._zap is None:
            self._zap = self.context.socket(zmq.ROUTER)
            self._zap.bind(_ZAP)

    def open(self) -> None:
        """Let peers in. Call this when all sockets are bound."""
        if not self.ports:
            return
        address = f"inproc://gate-{id(self):x}"
        self._wake, woken = self.context.socket(zmq.PAIR), self.context.socket(zmq.PAIR)
        woken.bind(address)
        self._wake.connect(address)
        self._thread = threading.Thread(target=self._run, args=(woken,), name="gate", daemon=True)
        self._thread.start()
        if self._keys is not None:
            log.info("wire keys are on", keys=self._keys.names, ports=[port.endpoint for port in self.ports])

    def close(self) -> None:
        """Let no more peers in; connections stay. Call this before the sockets are closed."""
        for port in self.ports:
            port.socket.disable_monitor()
        if self._thread is not None and self._wake is not None:
            self._wake.send(b"")
            self._thread.join()
        for socket in filter(None, (self._wake, self._zap, *self._monitors)):
            socket.close(linger=0)

    # -- in the thread

    def _run(self, woken: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        for socket in filter(None, (woken, self._zap, *self._monitors)):
            poller.register(socket, zmq.POLLIN)
        while not woken.poll(0):
            for socket, _ in poller.poll():
                try:
                    if socket is not woken and not self._serve(socket):
                        poller.unregister(socket)
                except Exception as error:  # whatever it is, all other peers wait for this thread
                    log.error("a peer could not be looked at", error=str(error), exc_info=True)
        woken.close(linger=0)

    def _serve(self, socket: zmq.Socket[bytes]) -> bool:
        """Answer a question, or take the events of a monitor; return False if no more will come."""
        if socket is not self._zap:
            return self._observe(socket, time.monotonic())
        if (answer := self._answer(socket.recv_multipart())) is not None:
            socket.send_multipart(answer, zmq.NOBLOCK)
        return True

    def _observe(self, monitor: zmq.Socket[bytes], now: float) -> bool:
        """Take the events of a monitor; return False if there will be no more."""
        port = self._monitors[monitor]
        while monitor.poll(0):
            event = parse_monitor_message(monitor.recv_multipart())
            if event["event"] == zmq.EVENT_MONITOR_STOPPED:
                return False
            if (line := port.take(event)) is not None:
                self.log.warning(line[0], now, endpoint=port.endpoint, refused=port.refused, **line[1])
            self._limit(port, now)
        return True

    def _limit(self, port: Port, now: float) -> None:
        """Let no new connections through while there are too many."""
        most = self._connections_max
        if port.listener < 0 or (port.connections < most if port.is_open else port.connections > most * 3 // 4):
            return
        try:
            _let_through(port.listener, not port.is_open)
        except OSError as error:
            self.log.warning("connections cannot be limited here", now, error=str(error))
            return
        if port.is_open:
            self.log.warning(
                "no more connections for now", now, endpoint=port.endpoint, connections=port.connections
            )
        port.is_open = not port.is_open

    def _answer(self, frames: list[bytes]) -> list[bytes] | None:
        """Return the answer to a question of libzmq (ZAP, RFC 27): may this key enter that domain?"""
        at = frames.index(b"") + 1 if b"" in frames else len(frames)
        if len(frames) < at + 6:
            return None
        version, number, domain, _address, _identity, mechanism, *credentials = frames[at:]
        key = z85.encode(credentials[0]).decode() if credentials and len(credentials[0]) == _KEY_BYTES else ""
        known: frozenset[str] = frozenset()
        if mechanism == b"CURVE" and domain in _DOMAINS:
            known = self._current().lets_in(_DOMAINS[domain])
        verdict = (b"200", b"OK", domain) if key in known else (b"400", b"this key is not known here", b"")
        return [*frames[:at], version, number, *verdict, b""]

    def _current(self) -> WireKeys:
        """Return the keys in the file of keys. If the file cannot be used, return the keys that were read
        before."""
        assert self._keys is not None
        now = time.monotonic()
        if now - self._looked_at < _LOOK_SECONDS:
            return self._keys
        self._looked_at = now
        stamp = _stamp(self._path)
        if stamp != self._seen:
            try:
                self._keys = load(self._path)
                self._seen = stamp
                log.info("the wire keys were exchanged", keys=self._keys.names)
            except WireKeysError as error:
                self.log.warning("the wire keys cannot be read; those from before count", now, error=str(error))
        return self._keys


def _stamp(path: str) -> tuple[int, ...]:
    """Return a value that changes when the file at `path` changes."""
    if not path:
        return ()
    try:
        status = os.stat(path)
    except OSError:
        return (-1,)
    return status.st_mtime_ns, status.st_size, status.st_ino
