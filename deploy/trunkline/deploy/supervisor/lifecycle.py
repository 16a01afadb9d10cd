"""Decide when to start, signal and give up processes of a cluster: a state machine without I/O.

    STARTING ──healthy──► SERVING ──stop──► STOPPING ──all gone──► STOPPED
        │                    │                  ▲
        │ stop, or a         └─ all is lost ──► FAILED (routers stay a moment, so that waiting
        │ child dies                            clients get their errors and /health says 503)
        └───────────────────────────────────────┘

While the cluster serves, `fleet.py` decides: what dies is started again, and all is lost only when every group, or
every router, was given up. Without restarts, all is lost with the first process. A cluster whose processes say
that it can never work as it is configured (`EXIT_IMPOSSIBLE`) ends with that exit code.

Events go in (a child exited or reported its status, the cluster is healthy, a command came, time passed), always
with the time; actions come out (signals to send, processes to start, sentences to show). The shell
(`supervisor.py`) does them, in order, before the next event. Nothing here reads a clock, so a test can drive it
through any sequence of deaths.

A graceful stop goes by stages: routers first (they finish what runs and refuse what comes), then
controllers (they dismiss their workers), then workers. Every stage is bounded: a process that still runs at its
deadline is killed, so a stop always ends.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from trunkline.deploy.supervisor.fleet import Fleet
from trunkline.deploy.supervisor.members import (
    EXIT_IMPOSSIBLE,
    EXIT_LEFT,
    EXPECTED_EXITS,
    NEVER,
    Action,
    Command,
    CommandError,
    Limits,
    Member,
    Role,
    Say,
    Send,
    Start,
    describe_exit,
)
from trunkline.deploy.supervisor.scaling import Further, no_further


class Phase(StrEnum):
    """The state of the whole cluster."""

    STARTING = "starting"
    SERVING = "serving"
    FAILED = "failed"
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass
class _Failure:
    """The work that is left after the loss of a process without which the cluster cannot go on."""

    orphans: list[str]
    """Workers of the lost group, to be killed: they may sit in a collective that never ends."""
    grace_until: float
    """Time until which routers may go on, to answer their clients."""


class Lifecycle:
    """The state machine. Feed it events in the order in which they happened."""

    def __init__(
        self,
        members: Sequence[Member],
        limits: Limits,
        now: float,
        *,
        restart: bool = True,
        further: Further = no_further,
    ) -> None:
        """
        Args:
            restart: whether a process that dies while the cluster serves is started again.
            further: returns the members of further groups.
        """
        limits.validate()
        if len({member.name for member in members}) != len(members):
            raise ValueError("two members have the same name")
        self.phase = Phase.STARTING
        self.exit_code = 0
        """The supervisor's exit code once STOPPED: 0 after a requested stop that needed no force,
        `EXIT_IMPOSSIBLE` if the configuration can never work, else 1."""
        self._restart = restart
        self._fleet = Fleet(members, limits, now, further)
        self._deadline = now + limits.start_s
        self._limits = limits
        self._alive = {member.name: member for member in members}
        """The member of each child that has not exited, by the child's name. A router's replacement is another
        child of the same member."""
        self._asked: set[str] = set()
        """Children that were sent a signal: their end is expected."""
        self._excused: set[str] = set()
        """Children that would have ended anyway when the stop began."""
        self._stages: list[tuple[list[str], float]] = []
        """Stages of the stop that are still to come: the names of each stage's children, and its duration in
        seconds."""
        self._stage: list[str] = []
        self._graceful = False
        self._killing = False
        """Whether the children of the current stage have been sent SIGKILL."""
        self._failure = _Failure([], NEVER)
        self._left: Say | None = None
        """The sentence about a worker that left while the cluster started, because of another process. The exit of
        that process says more, so it is waited for until the deadline."""

    @property
    def deadline(self) -> float:
        """The time at which `tick` has something to do; infinity if only events can change anything."""
        return self._fleet.deadline if self.phase is Phase.SERVING else self._deadline

    @property
    def alive(self) -> tuple[str, ...]:
        """Names of the children that have not exited."""
        return tuple(self._alive)

    def healthy(self) -> None:
        """Take the news that the cluster generated a token."""
        if self.phase is Phase.STARTING and self._left is None:
            self.phase = Phase.SERVING
            self._deadline = NEVER

    def exited(self, name: str, status: int, now: float, words: str = "") -> list[Action]:
        """Take the end of a child.

        Args:
            status: Its `Popen.returncode`.
            words: The reason that it gave, if any.
        """
        member = self._alive.pop(name, None)
        if member is None:
            return []
        match self.phase:
            case Phase.STARTING if status == EXIT_LEFT and member.role is Role.WORKER:
                if self._left is None:
                    [self._left] = self._blame(member, status, words)
                    self._deadline = min(self._deadline, now + self._limits.orphan_s)
                return []
            case Phase.STARTING:
                return [*self._blame(member, status, words), *self._stop_quickly(now)]
            case Phase.SERVING if self._restart or self._fleet.expects(name):
                return self._serve(self._fleet.exited(name, status, now, words), now)
            case Phase.SERVING:
                return [*self._blame(member, status, words), *self._fail(member, now)]
            case Phase.FAILED:
                news = [] if name in self._asked else self._blame(member, status, words)
                return [*news, *self._stop_quickly(now)] if member.role is Role.ROUTER else [*news]
            case Phase.STOPPING:
                actions = self._judge(name, member, status, words, now)
                return [*actions, *self._advance(now)]
            case Phase.STOPPED:
                return []

    def reported(self, name: str, status: str, now: float) -> list[Action]:
        """Take the status that a child reported: starting, ready, draining or failed."""
        if self.phase not in (Phase.STARTING, Phase.SERVING):
            return []
        return self._serve(self._fleet.reported(name, status, now), now)

    def command(self, command: Command, ticket: int, now: float) -> list[Action]:
        """Take a command other than `status`; actions of type `Tell` answer it, by its ticket.

        Raises:
            CommandError: It is not possible, or not now; nothing has changed.
        """
        if self.phase is not Phase.SERVING:
            raise CommandError(f"the cluster is {self.phase}; try again when it serves")
        return self._serve(self._fleet.command(command, ticket, now), now)

    def status(self, now: float) -> dict[str, Any]:
        """Return what a status table shows, without process ids."""
        return {"phase": self.phase.value, "restarts": self._restart, **self._fleet.describe(now)}

    def stop_requested(self, now: float) -> list[Action]:
        """Take a request to stop, such as SIGTERM. The second one hurries; the third one kills."""
        match self.phase:
            case Phase.STARTING | Phase.FAILED:
                return self._stop_quickly(now)
            case Phase.SERVING:
                return self._stop_gracefully(now)
            case Phase.STOPPING if self._graceful and self._stages:
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
            case Phase.SERVING:
                return self._serve(self._fleet.tick(now), now)
            case Phase.STARTING:
                self.exit_code = 1
                if self._left is not None:
                    return [self._left, *self._stop_quickly(now)]
                text = f"The cluster was not ready after {self._limits.start_s:.0f} s; giving up."
                return [Say(text, "error"), *self._stop_quickly(now)]
            case Phase.FAILED:
                actions: list[Action] = self._kill(self._failure.orphans)
                self._failure.orphans = []
                self._deadline = self._failure.grace_until
                return [*actions, *self._stop_quickly(now)] if now >= self._deadline else actions
            case Phase.STOPPING if not self._killing:
                if not self._graceful and self._stages and self._serves_still():
                    return self._hurry(now)
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

    def _serve(self, actions: list[Action], now: float) -> list[Action]:
        """Return what the fleet decided, and how the cluster ends if all its groups or routers were given up."""
        if self.phase is Phase.SERVING and (self._fleet.is_without_routers or self._fleet.is_without_groups):
            # The end of one unit may have started the next round of a rolling restart, for which it is too late.
            actions = [action for action in actions if not isinstance(action, Start)]
        for action in actions:
            if isinstance(action, Start):
                self._alive[action.name] = action.member
        if self.phase is Phase.SERVING and self._fleet.is_without_routers:
            self.exit_code = self._lost_code
            return [*actions, Say("No router is left; stopping.", "error"), *self._stop_quickly(now)]
        if self.phase is Phase.SERVING and self._fleet.is_without_groups:
            self.exit_code = self._lost_code
            return [*actions, *self._enter_failed([m for m in self._alive.values() if m.role is Role.WORKER], now)]
        return actions

    @property
    def _lost_code(self) -> int:
        """The exit code of a cluster whose groups or routers were given up."""
        return EXIT_IMPOSSIBLE if self._fleet.is_impossible else 1

    def _blame(self, member: Member, status: int, words: str) -> list[Say]:
        self.exit_code = max(self.exit_code, EXIT_IMPOSSIBLE if status == EXIT_IMPOSSIBLE else 1)
        return [Say(f"{member.name} {describe_exit(status, words)}.", "error", about=member.name)]

    def _fail(self, lost: Member, now: float) -> list[Action]:
        """Begin to give up a cluster that lost a process. Without its router no client is left to wait for."""
        if lost.role is Role.ROUTER:
            return self._stop_quickly(now)
        orphans = [m for m in self._alive.values() if m.group == lost.group and m.role is Role.WORKER]
        return self._enter_failed(orphans, now)

    def _enter_failed(self, orphans: Sequence[Member], now: float) -> list[Action]:
        self.phase = Phase.FAILED
        names = [name for name, member in self._alive.items() if member in orphans]
        self._failure = _Failure(names, now + self._limits.grace_s)
        self._deadline = min(self._failure.grace_until, now + self._limits.orphan_s)
        return self._fleet.close("the cluster has failed and stops")

    def _judge(self, name: str, member: Member, status: int, words: str, now: float) -> Sequence[Action]:
        """Return the sentences about a child that ended during a stop.

        The end of a child that was told to stop is expected, and that of a worker that its controller dismissed.
        """
        if name in self._asked:
            # A child that is interrupted while it drains may say so with its exit code: that is expected, too.
            expected = not self._graceful or name in self._excused or status in EXPECTED_EXITS
        else:
            expected = status == 0 and not self._serves_still()
        if expected:
            return []
        if member.role is not Role.ROUTER and not self._serves_still():
            # All answers are delivered: how the other processes end harms no request, but is worth a warning.
            return [Say(f"{name} {describe_exit(status, words)} while stopping.", "warning")]
        if not self._others_serve(member):
            # What still runs cannot finish any more: the drain ends early.
            self._deadline = min(self._deadline, now + self._limits.grace_s)
        return self._blame(member, status, words)

    def _others_serve(self, lost: Member) -> bool:
        """Return whether another group can take over the streams of this one."""
        return any(m.role is Role.CONTROLLER and m.group != lost.group for m in self._alive.values())

    def _serves_still(self) -> bool:
        """Return whether a router runs that may have answers to deliver."""
        return any(member.role is Role.ROUTER for member in self._alive.values())

    def _stop_gracefully(self, now: float) -> list[Action]:
        limits = self._limits
        drain_s = limits.drain_s + limits.margin_s
        seconds = {
            Role.ROUTER: drain_s,
            # Without routers here, there are some elsewhere, whose streams a controller has to finish.
            Role.CONTROLLER: limits.settle_s if self._serves_still() else drain_s,
            Role.WORKER: limits.settle_s,
        }
        self._graceful = True
        self._stages = [(self._names(role), seconds[role]) for role in Role]
        return self._enter_stopping(now)

    def _stop_quickly(self, now: float) -> list[Action]:
        quick_s = self._limits.quick_s
        is_first = not self._graceful  # else routers are told for the second time already
        self._graceful = False
        self._stages = [(list(self._alive), quick_s), *([(self._names(Role.ROUTER), quick_s)] if is_first else [])]
        return self._enter_stopping(now)

    def _hurry(self, now: float) -> list[Action]:
        """Tell routers a second time. At the first signal they drain, and clients that wait for a group go on
        waiting; at the second they send these clients an error."""
        names, seconds = self._stages.pop(0)
        self._deadline = now + seconds
        return [Send(name, signal.SIGTERM) for name in names if name in self._alive]

    def _enter_stopping(self, now: float) -> list[Action]:
        if self.phase is Phase.SERVING:
            # Children that were leaving anyway, or have lost their group, are expected to end.
            self._excused = {name for name in self._alive if self._fleet.expects(name)}
            self._asked |= self._excused
        self.phase = Phase.STOPPING
        self._stage = []
        return [*self._fleet.close("the cluster stops"), *self._advance(now)]

    def _advance(self, now: float) -> list[Action]:
        """Enter the next stage once no process of the current one is left."""
        while not any(name in self._alive for name in self._stage):
            if not self._stages:
                self._finish()
                return []
            names, seconds = self._stages.pop(0)
            self._stage = [name for name in names if name in self._alive]
            self._killing = False
            self._deadline = now + seconds
            if self._stage:
                self._asked.update(self._stage)
                return [Send(name, signal.SIGTERM) for name in self._stage]
        return []

    def _kill_stage(self, now: float) -> list[Action]:
        late = [name for name in self._stage if name in self._alive]
        self._killing = True
        self._deadline = now + self._limits.reap_s
        text = f"{', '.join(late)} did not stop in time; killing."
        return [Say(text, "warning"), *self._kill(late)]

    def _kill(self, names: Sequence[str]) -> list[Action]:
        self._asked.update(names)
        return [Send(name, signal.SIGKILL) for name in names if name in self._alive]

    def _finish(self) -> None:
        self.phase = Phase.STOPPED
        self._deadline = NEVER

    def _names(self, role: Role) -> list[str]:
        return [name for name, member in self._alive.items() if member.role is role]
