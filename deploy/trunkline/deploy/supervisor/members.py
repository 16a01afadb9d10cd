"""The types of the supervisor's decisions: members of a cluster, time limits, and actions.

The decisions themselves are in `lifecycle.py`, `fleet.py` and `units.py`.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

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
    """-1 for routers."""


@dataclass(frozen=True)
class Limits:
    """How long each step of starting, serving and stopping may take, in seconds."""

    start_s: float = 1800.0
    """From the first spawn to a generated token; likewise of a group that is started again. Large checkpoints on
    slow disks need minutes; a start that hangs must still end."""
    replace_s: float = 60.0
    """For a router's replacement to become ready for requests."""
    pause_s: float = 1.5
    """Between two groups of a rolling restart: routers must have noticed that the first is ready again."""
    drain_s: float = 30.0
    """For running requests to finish. Routers and controllers use the same limit for themselves."""
    margin_s: float = 5.0
    """Added to `drain_s`, so that they notice by themselves that the time is over."""
    settle_s: float = 5.0
    """For controllers, then for workers, to end after SIGTERM."""
    grace_s: float = 3.0
    """How long routers go on after a failure, so that clients read an error instead of a reset connection."""
    orphan_s: float = 1.0
    """After a failure, how long the other processes of the lost group may go on before they are killed: they may
    wait in a collective that never ends."""
    leave_s: float = 3.0
    """For workers to end by themselves once their controller has died. A frozen worker cannot, and is killed."""
    quick_s: float = 2.0
    """For all processes together, when a start failed or a second stop was requested."""
    reap_s: float = 5.0
    """How long to wait after SIGKILL: a process in an uninterruptible system call outlives it."""

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


Action = Send | Start | Say | Tell


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
