"""The client's side of sockets with wire keys: connects them.

libzmq gives up for good on a connection whose handshake was refused. So the owner of a socket reads its monitor,
and after one of `HANDSHAKE_FAILED` advances to the next keys and connects again, a little later.
"""

from __future__ import annotations

import errno
from typing import Final, TypedDict

import zmq

from trunkline.runtime.wire_keys import Generation, Role, WireKeysError, is_network, load

HANDSHAKE_FAILED: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
"""Events of a socket's monitor that `refusal_of` explains."""
HANDSHAKE_MS: Final = 5000
"""Longest time in milliseconds of a handshake, also of a peer that connects and sends nothing."""
_RETRY_MS: Final = 100
_RETRY_MS_MAX: Final = 1000


class MonitorEvent(TypedDict):
    """An event of a socket's monitor, as `zmq.utils.monitor` parses it."""

    event: int
    value: int
    endpoint: bytes


class WirePeer:
    """A peer of a process, and the generation of keys that is tried there. Without keys, sockets are plain."""

    def __init__(self, path: str = "", role: Role = Role.ROUTER, server: Role = Role.CONTROLLER) -> None:
        """
        Args:
            path: The file of keys, which is read at each connection, so it may be exchanged; "": none.
            role: The role whose key pair is shown.
            server: The role that the peer must have.
        """
        self.path = path
        self.attempts = 0
        """Number of changes to another generation of keys. When it grows, other sockets to the same peer should
        connect again."""
        self._role = role
        self._server = server
        self._generations: tuple[Generation, ...] = ()
        self.problem = ""
        """Why the file of keys could not be read the last time; "" if it could. The keys that were read before
        stay in use."""

    def connect(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        """Connect a socket, with keys if the endpoint is on the network and there are any.

        Raises:
            WireKeysError: The file could never be read.
        """
        if is_network(endpoint):
            socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
            socket.set(zmq.RECONNECT_IVL, _RETRY_MS)
            socket.set(zmq.RECONNECT_IVL_MAX, _RETRY_MS_MAX)
            if "[" in endpoint:
                socket.set(zmq.IPV6, 1)
            if self.path:
                keys = self._generation()
                pair = keys.of(self._role)
                socket.curve_serverkey = keys.of(self._server).public.encode()
                socket.curve_publickey = pair.public.encode()
                socket.curve_secretkey = pair.secret.encode()
        socket.connect(endpoint)

    def again(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        """Connect a socket again: a refused connection is dead, and new options count for the next one only.

        Raises:
            WireKeysError: The file could never be read.
        """
        try:
            socket.disconnect(endpoint)
        except zmq.ZMQError as error:
            if error.errno != errno.ENOENT:  # libzmq has forgotten it by itself
                raise
        self.connect(socket, endpoint)

    def _generation(self) -> Generation:
        try:
            generations = load(self.path).generations
            if not all(generation.of(self._role).secret for generation in generations):
                raise WireKeysError(f"{self.path} has no secret key for {self._role} any more")
            self._generations, self.problem = generations, ""
        except WireKeysError as error:
            if not self._generations:
                raise
            self.problem = str(error)
        return self._generations[self.attempts % len(self._generations)]

    def explain(self, event: MonitorEvent) -> str:
        """Return why a handshake failed, for people."""
        text = refusal_of(event, self.path)
        if self._generations:
            text += f" (keys tried: {self._generations[self.attempts % len(self._generations)].name})"
        return f"{text}; {self.problem}" if self.problem else text

    def advance(self) -> None:
        """Use the next generation of keys for the next connection."""
        self.attempts += 1


def refusal_of(event: MonitorEvent, path: str) -> str:
    """Return what a failed handshake means for the client that sees it.

    Args:
        event: An event of the socket's monitor, one of `HANDSHAKE_FAILED`.
        path: The file of the keys that were used; "": none.
    """
    if not is_network(event["endpoint"].decode(errors="replace")):  # keys are for the network only
        return "the process there has ended, or is just starting"
    own = f"the wire keys in {path}" if path else "no wire keys"
    kind, value = event["event"], event["value"]
    if kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return f"the controller does not let in who has {own}: is the file that of its cluster, and of this role?"
    if kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        if path:
            return f"the other side has no wire keys, but this one has {path}: give both the same file"
        return "the other side wants wire keys: name the cluster's file with --wire-keys FILE"
    if kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return f"the other side does not speak this protocol as this one does (error {int(value):#x})"
    if path:
        return (
            "the other side closed the connection during the handshake: if it stays so, it has other keys than "
            f"{path}, or none, or is no controller"
        )
    return (
        "the other side closed the connection during the handshake: if it stays so, it wants wire keys "
        "(--wire-keys FILE), or is no controller"
    )
