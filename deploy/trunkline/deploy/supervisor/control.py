"""Talk with a running supervisor: its control socket, from both sides, and the socket for status reports.

The server runs in the supervisor's selector loop and decides nothing: commands go to `on_command` with a ticket,
and the answer comes by `reply` with the same ticket, at once or later. The number of connections, the length of
lines, the commands under way for a connection (one) and the bytes that wait for a client are bounded.
"""

from __future__ import annotations

import itertools
import os
import selectors
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from trunkline.deploy.errors import DeployError
from trunkline.deploy.supervisor.members import (
    Command,
    CommandError,
    Lines,
    Reply,
    parse_command,
)
from trunkline.deploy.supervisor.run_folder import CONTROL_SOCKET, STATUS_SOCKET

CLIENTS_MAX: Final = 16
_WAITING_BYTES_MAX: Final = 1 << 20
_COMMANDS_AHEAD_MAX: Final = 64
"""Largest number of commands that a client may send before the one under way is answered."""


class _Client:
    """A connection to the control socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.lines = Lines()
        self.waiting: list[bytes] = []
        """Commands that have come while another command is under way."""
        self.ticket: int | None = None
        self.unsent = b""
        self.is_closing = False


class ControlServer:
    """Serves the control socket. All methods are for the thread of the selector."""

    def __init__(
        self, selector: selectors.BaseSelector, folder: Path, on_command: Callable[[Command, int], None]
    ) -> None:
        """
        Args:
            on_command: Takes a command and its ticket; an error of type `CommandError` becomes the reply.
        """
        path = folder / CONTROL_SOCKET
        self._selector = selector
        self._on_command = on_command
        self._clients: set[_Client] = set()
        self._tickets = itertools.count(1)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._listener.bind(os.fspath(path))
        os.chmod(path, 0o600)
        self._listener.listen(CLIENTS_MAX)
        selector.register(self._listener, selectors.EVENT_READ, lambda _: self._accept())

    def reply(self, ticket: int, reply: Reply) -> None:
        """Answer a command, unless its client has gone. After a reply that is `done`, take the client's next
        command."""
        client = next((client for client in self._clients if client.ticket == ticket), None)
        if client is None:
            return
        self._send(client, reply)
        if reply.done:
            client.ticket = None
            self._next(client)

    def close(self) -> None:
        """Disconnect all clients, after a last try to deliver what they have not read."""
        for client in list(self._clients):
            self._flush(client)
            self._drop(client)
        self._selector.unregister(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # the client has gone again, or there are no descriptors left
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            client = _Client(connection)
            self._clients.add(client)
            self._selector.register(connection, selectors.EVENT_READ, lambda events: self._serve(client, events))
            if len(self._clients) > CLIENTS_MAX:
                self._refuse(client, f"there are {CLIENTS_MAX} connections already; try again later")

    def _serve(self, client: _Client, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(client)
        if events & selectors.EVENT_READ and client in self._clients:
            self._read(client)

    def _read(self, client: _Client) -> None:
        try:
            data = client.connection.recv(65536)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._drop(client)  # what it has asked for goes on
            return
        if client.is_closing:
            return
        try:
            client.waiting += client.lines.feed(data)
        except CommandError as error:
            self._refuse(client, str(error))
            return
        if len(client.waiting) > _COMMANDS_AHEAD_MAX:
            self._refuse(client, f"more than {_COMMANDS_AHEAD_MAX} commands wait; read the answers first")
            return
        self._next(client)

    def _next(self, client: _Client) -> None:
        """Take the commands that wait, up to one that is not answered at once."""
        while client.ticket is None and client.waiting and client in self._clients:
            line = client.waiting.pop(0)
            try:
                command = parse_command(line)
                client.ticket = ticket = next(self._tickets)
                self._on_command(command, ticket)
            except CommandError as error:
                client.ticket = None
                self._send(client, Reply(str(error), done=True, ok=False))

    def _refuse(self, client: _Client, text: str) -> None:
        client.is_closing = True
        self._send(client, Reply(text, done=True, ok=False))

    def _send(self, client: _Client, reply: Reply) -> None:
        if len(client.unsent) <= _WAITING_BYTES_MAX:
            client.unsent += msgspec.json.encode(reply) + b"\n"
            self._flush(client)
        else:
            self._drop(client)  # it does not read

    def _flush(self, client: _Client) -> None:
        try:
            sent = client.connection.send(client.unsent) if client.unsent else 0
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self._drop(client)
            return
        client.unsent = client.unsent[sent:]
        if client.is_closing and not client.unsent:
            self._drop(client)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.unsent else 0)
        if client in self._clients:
            self._selector.modify(client.connection, events, lambda events: self._serve(client, events))

    def _drop(self, client: _Client) -> None:
        if client in self._clients:
            self._clients.discard(client)
            self._selector.unregister(client.connection)
            client.connection.close()


STATUSES: Final = ("starting", "ready", "draining", "failed")
_REPORT_BYTES_MAX: Final = 8 << 10
_REPORTS_MAX: Final = 256
"""Largest number of reports that are read at one wake-up. The rest is read at the next wake-up."""


class Report(msgspec.Struct, frozen=True):
    """A status report: one datagram."""

    pid: int
    status: str
    detail: str = ""
    epoch: int = 0


def parse_report(data: bytes) -> Report | None:
    """Return the report in a datagram; None if it holds something else."""
    try:
        report = msgspec.json.decode(data, type=Report)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return report if report.status in STATUSES else None


class StatusSocket:
    """The socket that receives reports. The permissions of its folder keep other users out."""

    def __init__(self, folder: Path) -> None:
        path = folder / STATUS_SOCKET
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(os.fspath(path))
        os.chmod(path, 0o600)

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._socket.fileno()

    def receive(self) -> Iterator[Report]:
        """Yield the reports that have arrived; never block."""
        for _ in range(_REPORTS_MAX):
            try:
                data = self._socket.recv(_REPORT_BYTES_MAX)
            except (BlockingIOError, InterruptedError):
                return
            report = parse_report(data)
            if report is not None:
                yield report

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class ControlError(DeployError):
    """The supervisor does not answer."""


def ask(path: Path, command: Command, timeout_s: float | None = None) -> Iterator[Reply]:
    """Send a command, and yield its replies as they come; the last one is `done`.

    Args:
        timeout_s: How long each reply may take; None: any time.

    Raises:
        ControlError: The supervisor does not answer, or not in its protocol.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(os.fspath(path))
            with suppress(BrokenPipeError):  # a server that refuses the connection has said why before
                connection.sendall(msgspec.json.encode(command) + b"\n")
            with connection.makefile("rb") as lines:
                for line in lines:
                    reply = msgspec.json.decode(line, type=Reply)
                    yield reply
                    if reply.done:
                        return
        except OSError as error:
            raise ControlError(f"the supervisor does not answer ({error.strerror or error})") from error
        except msgspec.MsgspecError as error:
            raise ControlError(f"the supervisor's answer makes no sense: {error}") from error
    raise ControlError("the supervisor ended before it had answered")
