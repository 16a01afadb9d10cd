"""The control socket: commands in, answers out, and whatever else may be sent there."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from deploy.controlled import control_server

from trunkline.deploy.supervisor.control import CLIENTS_MAX, ControlError, ControlServer, ask
from trunkline.deploy.supervisor.members import (
    LINE_BYTES_MAX,
    Command,
    CommandError,
    Lines,
    Reply,
    parse_command,
)
from trunkline.deploy.supervisor.run_folder import CONTROL_SOCKET


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"hello", "this is no command"),
        (b"[1]", "this is no command"),
        (b'{"command": 1}', "this is no command"),
        (b'{"command": "status", "unit": []}', "unknown field"),
        (b"[" * 10_000, "this is no command"),
        (b"\xff\xfe", "this is no command"),
        (b'{"command": "explode"}', "allowed are status, drain, undrain, restart, scale"),
        (b'{"command": "drain"}', "drain takes one group, not 0"),
        (b'{"command": "undrain", "units": ["0", "1"]}', "undrain takes one group, not 2"),
        (b'{"command": "status", "units": ["0"]}', "status takes no units"),
        (b'{"command": "scale", "units": ["0"], "groups": 1}', "scale takes no units"),
        (b'{"command": "scale"}', "groups is 0; scale takes 1 or more"),
        (b'{"command": "scale", "groups": -1}', "groups is -1; scale takes 1 or more"),
        (b'{"command": "status", "groups": 1}', "groups is 1; .* other commands none"),
        (json.dumps({"command": "restart", "units": ["0"] * 300}).encode(), "at most 256"),
    ],
)
def test_what_is_no_command(line: bytes, message: str) -> None:
    with pytest.raises(CommandError, match=message):
        parse_command(line)


def test_commands() -> None:
    assert parse_command(b'{"command": "restart"}') == Command("restart")
    assert parse_command(b'{"command": "drain", "units": ["c0"]}') == Command("drain", ["c0"])
    assert parse_command(b'{"command": "scale", "groups": 3}') == Command("scale", groups=3)


def test_lines_come_as_they_like() -> None:
    lines = Lines(10)
    assert [lines.feed(part) for part in (b"a", b"b\n\nc", b"d\ne\n", b"")] == [[], [b"ab"], [b"cd", b"e"], []]
    for long in (b"x" * 11, b"x" * 11 + b"\n"):
        with pytest.raises(CommandError, match="longer than 10 bytes"):
            Lines(10).feed(long)


class Desk:
    """Answers `status` at once, and a drain when another client says restart."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / CONTROL_SOCKET
        self.commands: list[Command] = []
        self.server: ControlServer
        self._waiting: list[int] = []

    def on_command(self, command: Command, ticket: int) -> None:
        self.commands.append(command)
        if command.command == "undrain":
            raise CommandError("not now")
        if command.command == "drain":
            self.server.reply(ticket, Reply("begun"))
            self._waiting.append(ticket)
            return
        if command.command == "restart":
            for waiting in self._waiting:
                self.server.reply(waiting, Reply("down", done=True))
        self.server.reply(ticket, Reply(done=True, status={"big": "x" * 200_000}))


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    with control_server(tmp_path, made.on_command) as made.server:
        yield made


def connect(desk: Desk) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(20)
    connection.connect(str(desk.path))
    return connection


def test_two_clients_of_this_user_and_one_that_waits_for_the_other(desk: Desk) -> None:
    assert desk.path.stat().st_mode & 0o777 == 0o600
    waiting = ask(desk.path, Command("drain", ["0"]))
    assert next(waiting) == Reply("begun")
    [answer] = ask(desk.path, Command("restart"))
    assert answer.status == {"big": "x" * 200_000}
    assert list(waiting) == [Reply("down", done=True)]
    assert list(ask(desk.path, Command("undrain", ["0"]))) == [Reply("not now", done=True, ok=False)]


def test_garbage_is_answered_and_the_next_line_counts(desk: Desk) -> None:
    with connect(desk) as connection, connection.makefile("rb") as lines:
        connection.sendall(b"nonsense\n")
        connection.sendall(b'{"command": "sta')
        assert "no command" in json.loads(lines.readline())["text"]
        connection.sendall(b'tus"}\n{"command": "status"}\n')
        for _ in range(2):
            assert "status" in json.loads(lines.readline())


def test_a_command_waits_for_the_one_before_it(desk: Desk) -> None:
    with connect(desk) as connection, connection.makefile("rb") as lines:
        connection.sendall(b'{"command": "drain", "units": ["0"]}\n{"command": "status"}\n')
        assert json.loads(lines.readline())["text"] == "begun"
        list(ask(desk.path, Command("restart")))
        assert json.loads(lines.readline())["text"] == "down"
        assert "status" in json.loads(lines.readline())
    assert [command.command for command in desk.commands] == ["drain", "restart", "status"]


@pytest.mark.parametrize("data", [b"x" * (LINE_BYTES_MAX + 1), b"x\n" * 100])
def test_too_much_is_refused_and_the_connection_closed(desk: Desk, data: bytes) -> None:
    with connect(desk) as connection, connection.makefile("rb") as lines:
        connection.sendall(data)
        answers = [json.loads(line) for line in lines]
    assert answers
    assert not any(answer.get("ok", True) for answer in answers)
    assert list(ask(desk.path, Command("status")))  # others do not mind


def test_connections_are_bounded(desk: Desk) -> None:
    connections = [connect(desk) for _ in range(CLIENTS_MAX)]
    [refused] = ask(desk.path, Command("status"))
    assert "connections already" in refused.text
    for connection in connections:
        connection.close()


def test_a_client_that_goes_away_takes_nothing_along(desk: Desk) -> None:
    waiting = ask(desk.path, Command("drain", ["0"]))
    next(waiting)
    waiting.close()  # type: ignore[attr-defined]
    assert list(ask(desk.path, Command("restart")))[-1].done


def test_a_missing_supervisor_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ControlError, match="does not answer"):
        list(ask(tmp_path / "control", Command("status")))
