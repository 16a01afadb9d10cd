"""The words of the supervisor's decisions: who there is, how long things may take, what can be asked for.

Nothing here does or decides anything; `lifecycle.py`, `fleet.py` and `units.py` do.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

NEVER: Final = float("inf")

EXPECTED_EXITS: Final = (0, -signal.SIGTERM, -signal.SIGKILL)
"""How a process ends that was asked to, by its `Popen.returncode`."""


EXIT_IMPOSSIBLE: Final = 2
"""How a process ends whose configuration can never work. To start it again would change nothing."""
EXIT_LEFT: Final = 3
"""How a worker ends that had to leave because its controller, or another rank of its group, was lost
(`trunkline.worker.service`)."""


class Role(StrEnum):
    """What a child process is. In the order in which a stop reaches them."""

    ROUTER = "router"
    CONTROLLER = "controller"
    WORKER = "worker"


@dataclass(frozen=True)
class Member:
    """A place in the cluster that a child process fills, as far as decisions need to know it."""

    name: str
    role: Role
    group: int = 0
    """-1 for routers."""


@dataclass(frozen=True)
class Limits:
    """How long each part of a life may take, in seconds."""

    start_s: float = 1800.0
    """From the first spawn to a generated token; likewise of a group that is started again. Large checkpoints on
    slow disks need minutes; a start that hangs must still end."""
    replace_s: float = 60.0
    """For a router's replacement, until it takes requests."""
    pause_s: float = 1.5
    """Between a group that is ready again and the next one that goes down: routers must have seen the first."""
    drain_s: float = 30.0
    """What running requests get to finish in; routers and controllers bound themselves by the same number."""
    margin_s: float = 5.0
    """What they get on top of `drain_s` to notice by themselves that the time is over."""
    settle_s: float = 5.0
    """For controllers, then for workers, to end after SIGTERM."""
    grace_s: float = 3.0
    """How long a router outlives a failure, so that clients read an error instead of a reset connection."""
    orphan_s: float = 1.0
    """After a failure, what the other processes of the lost group get before they are killed: they may sit
    in a collective that never ends."""
    leave_s: float = 3.0
    """What workers get to leave by themselves once their controller has died; who is frozen cannot."""
    quick_s: float = 2.0
    """For everyone at once, when a start failed or somebody asked twice."""
    reap_s: float = 5.0
    """How long SIGKILL may take (a process in an uninterruptible call outlives it) before we give up."""

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
    """Start a process for a member. It is the child `name` from now on."""

    name: str
    member: Member


@dataclass(frozen=True)
class Say:
    """Tell the person who watches."""

    text: str
    level: str = "info"
    """A logging level name; "error" also asks for the last lines of the child `about`."""
    about: str = ""


@dataclass(frozen=True)
class Tell:
    """Tell whoever gave the command with this ticket how it goes."""

    ticket: int
    text: str
    done: bool = False
    """Nothing more comes."""
    ok: bool = True


Action = Send | Start | Say | Tell


def describe_exit(status: int, words: str = "") -> str:
    """How a process ended, from its `Popen.returncode`: negative is a signal.

    Args:
        words: its own reason, if it gave one.
    """
    if status >= 0:
        return f"exited with code {status}" + (f": {words.rstrip('.')}" if words else "")
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # real-time signals have no names
        return f"was killed by signal {-status}"
