"""When to signal which process: the supervisor's decisions as a state machine without I/O.

    STARTING ──healthy──► SERVING ──stop──► STOPPING ──all gone──► STOPPED
        │                    │                  ▲
        │ stop, or a         └─ a child dies ─► FAILED (the router stays a moment, so that waiting
        │ child dies                            clients get their errors and /health says 503)
        └───────────────────────────────────────┘

Events go in (a child exited, the cluster is healthy, somebody wants it stopped, time passed), always with
the time; actions come out (signals to send, things to say). The shell (`supervisor.py`) does them, in order,
before the next event. Nothing here reads a clock, so a test can drive it through any sequence of deaths.

A graceful stop goes by stages: routers first (they finish what runs and refuse what comes), then
controllers (they dismiss their workers), then workers. Every stage is bounded: who is not gone by its
deadline is killed, so a stop always ends.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Role(StrEnum):
    """What a child process is. In the order in which a stop reaches them."""

    ROUTER = "router"
    CONTROLLER = "controller"
    WORKER = "worker"


class Phase(StrEnum):
    """Where the cluster stands."""

    STARTING = "starting"
    SERVING = "serving"
    FAILED = "failed"
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Member:
    """A child process, as far as decisions need to know it."""

    name: str
    role: Role
    group: int = 0


@dataclass(frozen=True)
class Limits:
    """How long each part of a life may take, in seconds."""

    start_s: float = 1800.0
    """From the first spawn to a generated token. Large checkpoints on slow disks need minutes; a start that
    hangs must still end."""
    drain_s: float = 30.0
    """What running requests get to finish in; the router bounds itself by the same number."""
    margin_s: float = 5.0
    """What a router gets on top of `drain_s` to notice by itself that the time is over."""
    settle_s: float = 5.0
    """For controllers, then for workers, to end after SIGTERM."""
    grace_s: float = 3.0
    """How long a router outlives a failure, so that clients read an error instead of a reset connection."""
    orphan_s: float = 1.0
    """After a failure, what the other processes of the lost group get before they are killed: they may sit
    in a collective that never ends."""
    quick_s: float = 2.0
    """For everyone at once, when a start failed or somebody asked twice."""
    reap_s: float = 5.0
    """How long SIGKILL may take (a process in an uninterruptible call outlives it) before we give up."""

    def validate(self) -> None:
        """Raise ValueError unless every duration is positive (`drain_s` may be 0: no drain)."""
        for name, value in vars(self).items():
            if value < 0 or (value == 0 and name != "drain_s"):
                raise ValueError(f"{name} must be positive, not {value}")


@dataclass(frozen=True)
class Send:
    """Send signal `number` to the child `name`; harmless if it is gone."""

    name: str
    number: signal.Signals


@dataclass(frozen=True)
class Say:
    """Tell the person who watches."""

    text: str
    level: str = "info"
    """A logging level name; "error" also asks for the last lines of the child `about`."""
    about: str = ""


Action = Send | Say

_NEVER: Final = float("inf")


def describe_exit(status: int) -> str:
    """How a process ended, from its `Popen.returncode`: negative is a signal."""
    if status >= 0:
        return f"exited with code {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # real-time signals have no names
        return f"was killed by signal {-status}"


class Lifecycle:
    """The state machine. Feed it events in the order in which they happened."""

    def __init__(self, members: Sequence[Member], limits: Limits, now: float) -> None:
        limits.validate()
        if len({member.name for member in members}) != len(members):
            raise ValueError("two members have the same name")
        self.phase = Phase.STARTING
        self.exit_code = 0
        """What the supervisor should exit with once STOPPED: 0 after a stop that somebody asked for and that
        needed no force, else 1."""
        self.deadline = now + limits.start_s
        """When `tick` has something to do; infinity: only events can change anything."""
        self._limits = limits
        self._alive = {member.name: member for member in members}
        self._asked: set[str] = set()
        """Who got a signal from us: their end is no news."""
        self._stages: list[tuple[list[str], float]] = []
        """Stages still to come: names and seconds."""
        self._stage: list[str] = []
        self._graceful = False
        self._killing = False
        """The current stage has been sent SIGKILL."""
        self._orphans: list[str] = []
        self._grace_until = _NEVER

    @property
    def alive(self) -> tuple[str, ...]:
        """Names of the children that have not exited."""
        return tuple(self._alive)

    def healthy(self, now: float) -> list[Action]:
        """The cluster generated a token."""
        del now
        if self.phase is Phase.STARTING:
            self.phase = Phase.SERVING
            self.deadline = _NEVER
        return []

    def exited(self, name: str, status: int, now: float) -> list[Action]:
        """A child ended; `status` as in `Popen.returncode`."""
        member = self._alive.pop(name, None)
        if member is None:
            return []
        match self.phase:
            case Phase.STARTING:
                return [*self._blame(member, status), *self._stop_quickly(now)]
            case Phase.SERVING:
                return [*self._blame(member, status), *self._fail(member, now)]
            case Phase.FAILED:
                news = [] if name in self._asked else self._blame(member, status)
                return [*news, *self._stop_quickly(now)] if member.role is Role.ROUTER else news
            case Phase.STOPPING:
                actions = self._judge(member, status, now)
                return [*actions, *self._advance(now)]
            case Phase.STOPPED:
                return []

    def stop_requested(self, now: float) -> list[Action]:
        """SIGTERM or SIGINT. The second time: hurry. The third time: kill."""
        match self.phase:
            case Phase.STARTING | Phase.FAILED:
                return self._stop_quickly(now)
            case Phase.SERVING:
                return self._stop_gracefully(now)
            case Phase.STOPPING if self._stages:
                return [Say("Stopping at once."), *self._stop_quickly(now)]
            case Phase.STOPPING:
                return self._kill_stage(now)
            case Phase.STOPPED:
                return []

    def tick(self, now: float) -> list[Action]:
        """Time passed. Does nothing before `deadline`."""
        if now < self.deadline:
            return []
        match self.phase:
            case Phase.STARTING:
                self.exit_code = 1
                text = f"The cluster was not ready after {self._limits.start_s:.0f} s; giving up."
                return [Say(text, "error"), *self._stop_quickly(now)]
            case Phase.FAILED:
                actions: list[Action] = self._kill(self._orphans)
                self._orphans = []
                self.deadline = self._grace_until
                return [*actions, *self._stop_quickly(now)] if now >= self._grace_until else actions
            case Phase.STOPPING if not self._killing:
                if self._graceful:  # a stop that was to be gentle and needed force was not clean
                    self.exit_code = 1
                return self._kill_stage(now)
            case Phase.STOPPING:
                stuck = ", ".join(self._alive)
                self.exit_code = 1
                self._finish()
                return [Say(f"Some processes survive SIGKILL: {stuck}.", "error")]
            case _:
                return []

    def _blame(self, member: Member, status: int) -> list[Action]:
        self.exit_code = 1
        return [Say(f"{member.name} {describe_exit(status)}.", "error", about=member.name)]

    def _fail(self, lost: Member, now: float) -> list[Action]:
        """A running cluster lost a process. Without its router there is nobody to wait for."""
        if lost.role is Role.ROUTER:
            return self._stop_quickly(now)
        self.phase = Phase.FAILED
        self._grace_until = now + self._limits.grace_s
        self._orphans = [m.name for m in self._alive.values() if m.group == lost.group and m.role is Role.WORKER]
        self.deadline = min(self._grace_until, now + self._limits.orphan_s)
        return []

    def _judge(self, member: Member, status: int, now: float) -> list[Action]:
        """Someone ended during a stop: expected of those we asked and of a dismissed worker, else a failure."""
        if member.name in self._asked:
            # Who is interrupted while it drains may well say so with its exit code: no news either.
            expected = not self._graceful or status in (0, -signal.SIGTERM, -signal.SIGKILL)
        else:
            expected = status == 0 and not self._serves_still()
        if expected:
            return []
        if member.role is not Role.ROUTER and not self._serves_still():
            # All answers are delivered; how the rest goes down harms nobody, but should be known.
            return [Say(f"{member.name} {describe_exit(status)} while stopping.", "warning")]
        # What still runs cannot finish any more: the drain ends early.
        self.deadline = min(self.deadline, now + self._limits.grace_s)
        return self._blame(member, status)

    def _serves_still(self) -> bool:
        """Whether a router is there that may have answers to deliver."""
        return any(member.role is Role.ROUTER for member in self._alive.values())

    def _stop_gracefully(self, now: float) -> list[Action]:
        limits = self._limits
        seconds = {
            Role.ROUTER: limits.drain_s + limits.margin_s,
            Role.CONTROLLER: limits.settle_s,
            Role.WORKER: limits.settle_s,
        }
        self._graceful = True
        self._stages = [(self._names(role), seconds[role]) for role in Role]
        return self._enter_stopping(now)

    def _stop_quickly(self, now: float) -> list[Action]:
        self._graceful = False
        self._stages = [(list(self._alive), self._limits.quick_s)]
        return self._enter_stopping(now)

    def _enter_stopping(self, now: float) -> list[Action]:
        self.phase = Phase.STOPPING
        self._stage = []
        return self._advance(now)

    def _advance(self, now: float) -> list[Action]:
        """Enter the next stage once nobody of the current one is left."""
        while not any(name in self._alive for name in self._stage):
            if not self._stages:
                self._finish()
                return []
            names, seconds = self._stages.pop(0)
            self._stage = [name for name in names if name in self._alive]
            self._killing = False
            self.deadline = now + seconds
            if self._stage:
                self._asked.update(self._stage)
                return [Send(name, signal.SIGTERM) for name in self._stage]
        return []

    def _kill_stage(self, now: float) -> list[Action]:
        late = [name for name in self._stage if name in self._alive]
        self._killing = True
        self.deadline = now + self._limits.reap_s
        text = f"{', '.join(late)} did not stop in time; killing."
        return [Say(text, "warning"), *self._kill(late)]

    def _kill(self, names: Sequence[str]) -> list[Action]:
        self._asked.update(names)
        return [Send(name, signal.SIGKILL) for name in names if name in self._alive]

    def _finish(self) -> None:
        self.phase = Phase.STOPPED
        self.deadline = _NEVER

    def _names(self, role: Role) -> list[str]:
        return [member.name for member in self._alive.values() if member.role is role]
