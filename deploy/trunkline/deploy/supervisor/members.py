"""The types of the supervisor's decisions: members of a cluster, time limits, actions, and commands. Pure.

The decisions themselves are in `lifecycle.py`, `fleet.py` and `units.py`. Commands and their replies are lines of
JSON on the control socket (`control.py`):

    → {"command": "drain", "units": ["0"]}
    ← {"text": "group 0: finishing its streams", "done": false, "ok": true}
    ← {"text": "group 0 is down", "done": true, "ok": true}

A reply to `status` is one line with the field "status". After `done` the server takes the next command.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import msgspec

NEVER: Final = float("inf")

EXPECTED_EXITS: Final = (0, -signal.SIGTERM, -signal.SIGKILL)
"""The values of `Popen.returncode` of a process that ended because it was told to."""


EXIT_IMPOSSIBLE: Final = 2
"""The exit code of a process whose configuration can never work. Starting it again would change nothing."""
EXIT_LEFT: Final = 3
"""The exit code of a worker that left because its controller, or another rank of its group, was lost
(`trunkline.worker.service`)."""


class Role(StrEnum):
    """The kind of a child process. A stop reaches them in this order."""

    ROUTER = "router"
    CONTROLLER = "controller"
    WORKER = "worker"


@dataclass(frozen=True)
class Member:
    """A place in the cluster that a child process fills: its name, role and group."""

    name: str
    role: Role
    group: int = 0
    """The number of the member's group; -1 for routers."""


@dataclass(frozen=True)
class Limits:
    """Time limits of the steps of starting, serving and stopping, in seconds."""

    start_s: float = 1800.0
    """Time from the first spawn to a generated token, also for a group that is started again. Large checkpoints on
    slow disks need minutes, but a start that hangs must end."""
    replace_s: float = 60.0
    """Time for a router's replacement to become ready for requests."""
    pause_s: float = 1.5
    """Pause between two groups of a rolling restart, in which routers notice that the first group is ready
    again."""
    drain_s: float = 30.0
    """Time for running requests to finish. Routers and controllers use the same limit for themselves."""
    margin_s: float = 5.0
    """Time added to `drain_s`, so that routers and controllers notice by themselves that the time is over."""
    settle_s: float = 5.0
    """Time for controllers to end after SIGTERM, and then the same time for workers."""
    grace_s: float = 3.0
    """Time for which routers go on after a failure, so that clients read an error instead of a reset
    connection."""
    orphan_s: float = 1.0
    """Time after a failure until the other processes of the lost group are killed, which may wait in a collective
    that never ends."""
    leave_s: float = 3.0
    """Time for workers to end by themselves once their controller has died. After that they are killed, because
    they may be frozen."""
    quick_s: float = 2.0
    """Time for all processes together to end, if a start failed or a second stop was requested."""
    reap_s: float = 5.0
    """Longest time to wait for a process to end after SIGKILL. A process in an uninterruptible system call
    outlives the signal."""

    def validate(self) -> None:
        """Raise ValueError unless every duration is positive (`drain_s` and `pause_s` may be 0)."""
        for name, value in vars(self).items():
            if value < 0 or (value == 0 and name not in ("drain_s", "pause_s")):
                raise ValueError(f"{name} must be positive, not {value}")


@dataclass(frozen=True)
class Send:
    """Send signal `number` to the child `name`; harmless if it is gone."""

    name: str
    number: signal.Signals


@dataclass(frozen=True)
class Start:
    """Start a process for a member, as the child `name`."""

    name: str
    member: Member


@dataclass(frozen=True)
class Say:
    """Show a sentence to the person who watches."""

    text: str
    level: str = "info"
    """A logging level name; "error" also asks for the last lines of the child `about`."""
    about: str = ""


@dataclass(frozen=True)
class Tell:
    """Send an answer to the client whose command has this ticket."""

    ticket: int
    text: str
    done: bool = False
    """Whether this is the last answer."""
    ok: bool = True


@dataclass(frozen=True)
class Publish:
    """Tell routers which groups there are, by their numbers."""

    groups: tuple[int, ...]


Action = Send | Start | Say | Tell | Publish


def describe_exit(status: int, words: str = "") -> str:
    """Return how a process ended, from its `Popen.returncode`; a negative one is a signal.

    Args:
        words: The reason that the process gave, if any.
    """
    if status >= 0:
        return f"exited with code {status}" + (f": {words.rstrip('.')}" if words else "")
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # real-time signals have no names
        return f"was killed by signal {-status}"


DELAYS_S: Final = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
LASTING_S: Final = 60.0
"""Time in seconds after which a process counts as working that cannot be asked whether it works."""


class DeathRecord:
    """The deaths of one member since it last worked."""

    def __init__(self) -> None:
        self._count = 0

    def died(self, now: float) -> float:
        """Count a death; return when to start the member again, as a time like `now` (seconds)."""
        self._count += 1
        return now + DELAYS_S[min(self._count, len(DELAYS_S)) - 1]

    def works(self) -> None:
        """Note that the member works, and all that it needs: earlier deaths no longer count."""
        self._count = 0


COMMANDS: Final = ("status", "drain", "undrain", "restart", "scale")
LINE_BYTES_MAX: Final = 16 << 10
_UNITS_MAX: Final = 256


class CommandError(Exception):
    """A command that cannot be carried out, or not now. The text is for the person who gave it."""


class Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A command."""

    command: str
    """One of `COMMANDS`."""
    units: list[str] = []
    """Groups by number or by the name of a member, routers by name or all as "routers". For a restart, none means
    everything."""
    groups: int = 0
    """For `scale`: the number of groups that there are to be."""


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
    if command.command not in COMMANDS:
        raise CommandError(f"command is {command.command!r}; allowed are {', '.join(COMMANDS)}")
    if len(command.units) > _UNITS_MAX:
        raise CommandError(f"{len(command.units)} units are given; at most {_UNITS_MAX} are allowed")
    if command.command in ("drain", "undrain") and len(command.units) != 1:
        raise CommandError(f"{command.command} takes one group, not {len(command.units)}")
    if command.command in ("status", "scale") and command.units:
        raise CommandError(f"{command.command} takes no units")
    if (command.command == "scale") != (command.groups != 0) or command.groups < 0:
        raise CommandError(f"groups is {command.groups}; scale takes 1 or more, other commands none")
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
