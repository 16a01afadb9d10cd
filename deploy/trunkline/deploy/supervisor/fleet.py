"""All groups and routers of a cluster that serves: start again what dies, and carry out commands. Pure.

Each command has a *ticket*, by which `Tell` answers it. A restart is rolling: unit by unit, the next only when the
one before works again, and none after one that does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from trunkline.deploy.supervisor.members import NEVER, Action, Command, CommandError, Limits, Member, Role, Tell
from trunkline.deploy.supervisor.scaling import Further, Scaling, no_further
from trunkline.deploy.supervisor.units import Group, Mode, Router, Unit

_ROUTERS: Final = "routers"


@dataclass(frozen=True)
class _Round:
    """A unit that is to be restarted by a rolling restart."""

    ticket: int
    unit: Unit


@dataclass(frozen=True)
class _Wait:
    """A command that waits for a group."""

    group: Group
    is_drain: bool


class Fleet:
    """The groups and routers. Feed it events in the order in which they happened; each method returns actions."""

    def __init__(
        self, members: Iterable[Member], limits: Limits, now: float, further: Further = no_further
    ) -> None:
        """`further`: returns the members of further groups."""
        members = list(members)
        self._limits = limits
        numbers = sorted({member.group for member in members if member.role is not Role.ROUTER})
        self.groups = [
            Group(number, [m for m in members if m.group == number and m.role is not Role.ROUTER], limits, now)
            for number in numbers
        ]
        self.routers = [Router(member, limits, now) for member in members if member.role is Role.ROUTER]
        self._scaling = Scaling(self.groups, limits, further)
        self._queue: deque[_Round] = deque()
        self._round: _Round | None = None
        self._round_deadline = NEVER
        self._pause_until = 0.0
        self._waits: dict[int, _Wait] = {}

    @property
    def units(self) -> Sequence[Unit]:
        """Routers, then groups: the order of a restart. Routers know what groups of earlier versions report, but
        not always what those of later versions do."""
        return [*self.routers, *self.groups]

    @property
    def deadline(self) -> float:
        """The time at which `tick` has something to do."""
        own = self._round_deadline if self._round else self._pause_until if self._queue else NEVER
        return min([own, *(unit.deadline for unit in self.units)])

    @property
    def is_without_groups(self) -> bool:
        """Whether all groups were given up; False where there never were any."""
        return bool(self.groups) and all(group.mode is Mode.LOST for group in self.groups)

    @property
    def is_without_routers(self) -> bool:
        """Whether all routers were given up; False where there never were any."""
        return bool(self.routers) and all(router.mode is Mode.LOST for router in self.routers)

    @property
    def is_impossible(self) -> bool:
        """Whether a group or router was given up because its configuration can never work."""
        return any(unit.why_lost for unit in self.units)

    def expects(self, name: str) -> bool:
        """Return whether the end of this process is expected."""
        unit = self._unit_of(name)
        return unit is not None and unit.expects(name)

    def exited(self, name: str, status: int, now: float, words: str = "") -> list[Action]:
        """Take the end of a child: its `Popen.returncode`, and the reason that it gave, if any."""
        unit = self._unit_of(name)
        return [] if unit is None else [*unit.exited(name, status, now, words), *self._go_on(now)]

    def reported(self, name: str, status: str, now: float) -> list[Action]:
        """Take the status that a child reported: starting, ready, draining or failed."""
        unit = self._unit_of(name)
        return [] if unit is None else [*unit.reported(name, status, now), *self._go_on(now)]

    def tick(self, now: float) -> list[Action]:
        """Do what is due at this time."""
        actions = [action for unit in self.units for action in unit.tick(now)]
        return [*actions, *self._go_on(now)]

    def command(self, command: Command, ticket: int, now: float) -> list[Action]:
        """Take a command other than `status`.

        Raises:
            CommandError: It is not possible; nothing has changed.
        """
        if command.command == "restart":
            actions = self._restart(command.units, ticket)
        elif command.command == "scale":
            busy = [unit for unit in self._waiting() if isinstance(unit, Group)]
            actions = self._scaling.begin(command.groups, ticket, now, busy)
        else:
            group = self._group(command.units[0])
            change = self._drain if command.command == "drain" else self._undrain
            actions = change(group, ticket, now)
        return [*actions, *self._go_on(now)]

    def close(self, why: str) -> list[Action]:
        """End all commands that wait, with the reason `why`."""
        tickets = {round_.ticket for round_ in [*self._queue, *([self._round] if self._round else [])]}
        self._queue.clear()
        self._round = None
        waiting = [*self._waits, *tickets, *self._scaling.close()]
        self._waits.clear()
        return [Tell(ticket, why, done=True, ok=False) for ticket in waiting]

    def describe(self, now: float) -> dict[str, Any]:
        """Return what a status table shows: groups and processes, without process ids."""
        rows: list[dict[str, Any]] = []
        for router in self.routers:
            row = {**router.slot.describe(now), "child": router.current}
            rows.append({**row, "state": "given up", "why": router.why_lost} if router.mode is Mode.LOST else row)
            for child in router.children[1:]:
                state = "draining" if router.is_leaving(child) else "starting"
                rows.append({**row, "name": child, "child": child, "state": state, "restarts": 0, "up_s": None})
        for group in self.groups:
            rows += [{**slot.describe(now), "child": name} for name, slot in group.slots.items()]
        groups = [{"group": group.number, "state": group.state, "why": group.why_lost} for group in self.groups]
        return {"groups": groups, "processes": rows}

    def _unit_of(self, name: str) -> Unit | None:
        for router in self.routers:
            if name in router.children:
                return router
        return next((group for group in self.groups if name in group.slots), None)

    def _group(self, text: str) -> Group:
        """Return the group with this number or with a member of this name."""
        for group in self.groups:
            if text in (str(group.number), f"group-{group.number}", *group.slots):
                return group
        numbers = ", ".join(str(group.number) for group in self.groups) or "none here"
        raise CommandError(f"there is no group {text!r}; there are {numbers}")

    def _drain(self, group: Group, ticket: int, now: float) -> list[Action]:
        self._waits[ticket] = _Wait(group, is_drain=True)
        started = Tell(ticket, f"{group.title} finishes its streams, then stops")
        return [started, *group.stop(Mode.DOWN, now)]

    def _undrain(self, group: Group, ticket: int, now: float) -> list[Action]:
        if self._scaling.is_leaving(group):
            raise CommandError(f"{group.title} leaves the cluster; `trunkline scale` can keep it")
        self._waits[ticket] = _Wait(group, is_drain=False)
        return [Tell(ticket, f"{group.title} starts"), *group.start(now)]

    def _restart(self, names: Sequence[str], ticket: int) -> list[Action]:
        units: list[Unit] = []
        for name in names:
            units += [unit for unit in self._named(name) if unit not in units]
        if not names:
            units = [unit for unit in self.units if not (isinstance(unit, Group) and unit.is_to_be_down)]
        waiting = self._waiting()
        for unit in units:
            if unit in waiting:
                raise CommandError(f"{unit.title} is being restarted already")
            if isinstance(unit, Group) and unit.is_to_be_down:
                raise CommandError(f"{unit.title} is drained; `trunkline undrain {unit.number}` starts it")
        if not units:
            raise CommandError("there is nothing to restart: all groups are drained")
        self._queue += [_Round(ticket, unit) for unit in units]
        return [Tell(ticket, f"to be restarted, one after the other: {', '.join(unit.title for unit in units)}")]

    def _waiting(self) -> Sequence[Unit]:
        """Return the units that a rolling restart is to restart or is restarting."""
        return [round_.unit for round_ in [*self._queue, *([self._round] if self._round else [])]]

    def _named(self, name: str) -> Sequence[Unit]:
        if name == _ROUTERS:
            return self.routers
        routers = [router for router in self.routers if router.title == name]
        return routers or [self._group(name)]

    def _go_on(self, now: float) -> list[Action]:
        """Answer commands that are done, and go on with rolling restarts."""
        actions: list[Action] = []
        for ticket, wait in list(self._waits.items()):
            answer = _answer(ticket, wait)
            if answer is not None:
                del self._waits[ticket]
                actions.append(answer)
        actions += self._scaling.go_on()
        while self._round is not None or (self._queue and now >= self._pause_until):
            if self._round is None:
                self._round = self._queue.popleft()
                self._round_deadline = now + self._round_seconds()
                actions += [
                    Tell(self._round.ticket, f"{self._round.unit.title}: restarting"),
                    *self._round.unit.restart(now),
                ]
            outcome = self._round.unit.outcome
            if outcome is None and now >= self._round_deadline:
                outcome = f"was not ready after {self._round_seconds():.0f} s"
            if outcome is None:
                break
            actions += self._end_round(self._round, outcome, now)
        return actions

    def _end_round(self, round_: _Round, problem: str, now: float) -> list[Action]:
        self._round = None
        title, ticket = round_.unit.title, round_.ticket
        rest = [other for other in self._queue if other.ticket == ticket]
        if problem:
            # The others may have the same fault, so they are left as they are.
            self._queue = deque(other for other in self._queue if other.ticket != ticket)
            left = f"; left as they are: {', '.join(other.unit.title for other in rest)}" if rest else ""
            return [Tell(ticket, f"{title} {problem}{left}", done=True, ok=False)]
        self._pause_until = now + self._limits.pause_s
        return [Tell(ticket, f"{title}: ready again"), *([] if rest else [Tell(ticket, "restarted", done=True)])]

    def _round_seconds(self) -> float:
        """Return how long the restart of one unit may take: the sum of all its stages."""
        limits = self._limits
        stopping = limits.drain_s + limits.margin_s + limits.settle_s + 2 * limits.reap_s
        return stopping + max(limits.start_s, limits.replace_s)


def _answer(ticket: int, wait: _Wait) -> Tell | None:
    """Return the answer to a command that waits for a group; None if it has to wait longer."""
    group = wait.group
    if wait.is_drain:
        if group.mode in (Mode.DOWN, Mode.LOST):
            return Tell(ticket, f"{group.title} is down", done=True)
        return None if group.is_to_be_down else Tell(ticket, f"{group.title} was started again", True, False)
    problem = group.outcome
    if problem is None:
        return None
    if problem:
        return Tell(ticket, f"{group.title} {problem}", done=True, ok=False)
    return Tell(ticket, f"{group.title} is ready", done=True)
