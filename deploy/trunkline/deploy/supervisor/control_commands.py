"""Commands to a running cluster and their replies, as lines of JSON on the control socket. Pure.

    → {"command": "drain", "units": ["0"]}
    ← {"text": "group 0: finishing its streams", "done": false, "ok": true}
    ← {"text": "group 0 is down", "done": true, "ok": true}

A reply to `status` is one line with the field "status". After `done` the server takes the next command.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

KINDS: Final = ("status", "drain", "undrain", "restart")
LINE_BYTES_MAX: Final = 16 << 10
_UNITS_MAX: Final = 256


class CommandError(Exception):
    """A command that cannot be carried out, or not now. The text is for the person who gave it."""


class Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A command."""

    command: str
    """One of `KINDS`."""
    units: list[str] = []
    """Groups by number or by the name of a member, routers by name or all as "routers". For a restart, none means
    everything."""


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """An answer, or a part of it."""

    text: str = ""
    done: bool = False
    ok: bool = True
    status: dict[str, Any] | None = None


def parse_command(line: bytes) -> Command:
    """Return the command in a line.

    Raises:
        CommandError: It holds none; the text says why.
    """
    try:
        command = msgspec.json.decode(line, type=Command)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CommandError(f"this is no command: {error}") from error
    if command.command not in KINDS:
        raise CommandError(f"command is {command.command!r}; allowed are {', '.join(KINDS)}")
    if len(command.units) > _UNITS_MAX:
        raise CommandError(f"{len(command.units)} units are given; at most {_UNITS_MAX} are allowed")
    if command.command in ("drain", "undrain") and len(command.units) != 1:
        raise CommandError(f"{command.command} takes one group, not {len(command.units)}")
    if command.command == "status" and command.units:
        raise CommandError("status takes no units")
    return command


class Lines:
    """Cuts the bytes of a connection into lines."""

    def __init__(self, bytes_max: int = LINE_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that these bytes complete, without empty ones.

        Raises:
            CommandError: A line is too long; nothing more can be read from this connection.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if max(map(len, [*lines, self._rest])) > self._bytes_max:
            raise CommandError(f"a line is longer than {self._bytes_max} bytes")
        return [line for line in lines if line.strip()]


def encode_reply(reply: Reply) -> bytes:
    """Return a reply as a line."""
    return msgspec.json.encode(reply) + b"\n"
