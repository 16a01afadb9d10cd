"""Streams of events with as little as possible at both ends: a client that notes when bytes came, and a source
that writes events without a router. `router_overhead.py` measures the router between them.

Linux stamps bytes when they reach a socket (`SO_TIMESTAMPNS`), so it is known when an event was with the client
even if the client read it late: the client shares its cores with what is measured. All times are seconds of
CLOCK_REALTIME, the clock of these stamps.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

_SO_TIMESTAMPNS: Final = 35
"""As in Linux's `asm-generic/socket.h`; Python has no name for it."""
_STAMP: Final = struct.Struct("qq")
_READ_BYTES: Final = 4096
_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Piece(NamedTuple):
    """Bytes of an answer, and when they came."""

    arrived: float
    """When the last of them was at the socket."""
    noted: float
    """When the client had read them."""
    data: bytes


def read_streams(requests: Sequence[tuple[int, bytes]]) -> list[list[Piece]]:
    """Send requests, each (port, bytes) over a connection of its own, and return what came back until the server
    closed the connection. Nothing is looked at before all is over: what this process does with an event would
    delay those that wait behind it.

    Raises:
        RuntimeError: a request was refused.
    """
    streams: dict[int, tuple[socket.socket, list[Piece]]] = {}
    with select.epoll() as ready:
        for port, request in requests:
            connection = socket.create_connection(("127.0.0.1", port))
            connection.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
            connection.sendall(request)
            streams[connection.fileno()] = connection, []
            ready.register(connection, select.EPOLLIN)
        left, space = len(streams), socket.CMSG_SPACE(_STAMP.size)
        while left:
            for descriptor, _ in ready.poll():
                connection, pieces = streams[descriptor]
                data, stamps, _, _ = connection.recvmsg(_READ_BYTES, space)
                noted = time.time()
                if data:
                    seconds, nanoseconds = _STAMP.unpack(stamps[0][2])
                    pieces.append(Piece(seconds + nanoseconds * 1e-9, noted, data))
                else:
                    ready.unregister(descriptor)
                    left -= 1
    for connection, pieces in streams.values():
        connection.close()
        answer = b"".join(piece.data for piece in pieces)
        if not answer.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(f"a request was refused: {answer[:600]!r}")
    return [pieces for _, pieces in streams.values()]


class BareSource:
    """A server that writes the same event to all its clients when it is told to."""

    def __init__(self, listener: socket.socket, event: bytes) -> None:
        self._listener = listener
        self._part = b"%x\r\n%b\r\n" % (len(event), event)
        self._clients: list[socket.socket] = []

    def accept(self, clients: int) -> None:
        """Take so many clients, whatever they ask for."""
        for _ in range(clients):
            client, _ = self._listener.accept()
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.recv(_READ_BYTES)
            client.sendall(_HEAD)
            self._clients.append(client)

    def write(self) -> None:
        """Write an event to each client."""
        for client in self._clients:
            client.send(self._part)

    def close(self) -> None:
        """End all answers."""
        for client in self._clients:
            client.close()
        self._clients.clear()
