"""Groups (a controller and its workers) and routers, each stopped and started as one: pure state machines.

    group     UP ──stop──► STOPPING: the controller finishes its streams, then the workers ──► DOWN, or UP again
              │ a member dies: it alone is started again; the others leave by themselves and are, too
              └─ one says that its configuration can never work ──► STOPPING ──► LOST

    router    UP ──replace──► UP, with a successor; when that answers, it takes the place, and the old one is told
              │               to finish its streams
              └─ it says that its configuration can never work ──► LOST

`fleet.py` decides what to stop and when. Times are arguments, in seconds.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from trunkline.deploy.supervisor.members import (
    EXIT_IMPOSSIBLE,
    EXPECTED_EXITS,
    NEVER,
    Action,
    DeathRecord,
    Limits,
    Member,
    Role,
    Say,
    Send,
    Start,
    describe_exit,
)


class Mode(StrEnum):
    """The state of a unit."""

    UP = "up"
    """All its members run, or will be started again."""
    STOPPING = "stopping"
    DOWN = "down"
    """A command stopped it."""
    LOST = "lost"
    """The unit can never work as it is configured, or its processes survive SIGKILL."""


@dataclass
class Slot:
    """A member, and the process that fills its place."""

    member: Member
    since: float
    """Time at which the process was started or, if it is not running, ended."""
    running: bool = True
    restart_at: float = NEVER
    restarts: int = 0
    state: str = "starting"
    """The status that the process reported; workers report one only where their controller runs elsewhere."""
    record: DeathRecord = field(default_factory=DeathRecord)

    def begin(self, now: float) -> None:
        """Note that the member's process is started."""
        self.running, self.since, self.restart_at, self.state = True, now, NEVER, "starting"
        self.restarts += 1

    def end(self, now: float) -> None:
        """Note that the member's process ended."""
        self.running, self.since, self.state = False, now, "down"

    def describe(self, now: float) -> dict[str, object]:
        """Return the member's row of a status table, without the process id."""
        state = self.state
        if self.running and self.member.role is Role.WORKER and state == "starting":
            state = "running"
        elif not self.running and self.restart_at < NEVER:
            state = f"starts in {max(0.0, self.restart_at - now):.0f} s"
        return {
            "name": self.member.name,
            "role": self.member.role.value,
            "group": self.member.group,
            "state": state,
            "restarts": self.restarts,
            "up_s": round(now - self.since, 3) if self.running else 0.0,
        }


def after_death(slot: Slot, status: int, words: str, now: float) -> Say | None:
    """Note an unexpected death and when to start the member again; None if it can never work."""
    if status == EXIT_IMPOSSIBLE:
        return None
    slot.restart_at = at = slot.record.died(now)
    when = "" if at <= now else f" in {at - now:.0f} s"
    return Say(f"{slot.member.name} {describe_exit(status, words)}; it is started again{when}.", "warning")


def given_up(slot: Slot, status: int, words: str, what: str) -> Say:
    """Return the sentence that says why something is given up."""
    name = slot.member.name
    end = describe_exit(status, words)
    return Say(f"{name} {end}; that cannot work, so {what} is given up.", "error", about=name)


class Group:
    """A controller and its workers."""

    def __init__(
        self, number: int, members: Iterable[Member], limits: Limits, now: float, *, runs: bool = True
    ) -> None:
        """`runs`: whether its processes have been started; else `start` starts them."""
        self.title = f"group {number}"
        self.number = number
        self.mode = Mode.UP if runs else Mode.DOWN
        self.then = Mode.UP
        """The group's mode after it has stopped, if it is stopping."""
        self.is_ready = False
        """Whether the group's controller (or its workers, if the controller is elsewhere) reported that it is
        ready, and no member has died since."""
        self._limits = limits
        # Workers first, as at the cluster's start: they are the slowest.
        ordered = sorted(members, key=lambda member: member.role is not Role.WORKER)
        first = 0 if runs else -1  # its first start is no restart
        self.slots = {member.name: Slot(member, now, running=runs, restarts=first) for member in ordered}
        self._stages: list[tuple[list[str], float]] = []
        self._stage: list[str] = []
        self._stage_deadline = NEVER
        self._killing = False
        self._orphans: set[str] = set()
        """Workers whose controller has died, and that have not ended yet."""
        self._leave_by = NEVER
        self.why_lost = ""
        """Why the group was given up, if a process said why; else ""."""
        self._is_led_here = any(member.role is Role.CONTROLLER for member in ordered)

    @property
    def deadline(self) -> float:
        """The time at which `tick` has something to do."""
        if self.mode is Mode.STOPPING:
            return self._stage_deadline
        return min(self._leave_by, *(slot.restart_at for slot in self.slots.values()))

    @property
    def state(self) -> str:
        """The group's state in one word, for a status table."""
        if self.mode is Mode.UP:
            return "ready" if self.is_ready else "starting"
        return "draining" if self.mode is Mode.STOPPING else self.mode.value

    @property
    def has_ended(self) -> bool:
        """Whether it has been stopped, and none of its processes runs."""
        return self.mode in (Mode.DOWN, Mode.LOST) and not any(slot.running for slot in self.slots.values())

    @property
    def is_to_be_down(self) -> bool:
        """Whether the group is down, or will be once it has stopped."""
        return self.mode is Mode.DOWN or (self.mode is Mode.STOPPING and self.then is Mode.DOWN)

    def expects(self, name: str) -> bool:
        """Return whether the end of this process is expected: the group stops, or lost a member that the others
        need."""
        is_whole = all(slot.running for slot in self.slots.values()) and not self._orphans
        return name in self.slots and not (self.mode is Mode.UP and is_whole)

    def exited(self, name: str, status: int, now: float, words: str = "") -> list[Action]:
        """Take the end of one of its processes; `words` is the reason that it gave, if any."""
        slot = self.slots[name]
        slot.end(now)
        self.is_ready = False
        self._orphans.discard(name)
        if self.mode is Mode.UP:
            news = after_death(slot, status, words, now)
            if news is not None:
                self._expect_to_leave(slot.member, now)
                return [news, *self._start_due(now)]
            self.why_lost = f"{name} {describe_exit(status, words)}"
            return [given_up(slot, status, words, f"its group ({self.title})"), *self._give_up(now)]
        if self.mode is Mode.STOPPING:
            text = f"{name} {describe_exit(status, words)} while its group stopped."
            stumbled: list[Action] = [] if status in EXPECTED_EXITS else [Say(text, "warning")]
            return [*stumbled, *self._advance(now)]
        return []  # it had survived SIGKILL for a while

    def reported(self, name: str, status: str, _now: float) -> list[Action]:
        """Take a status that a process reported. A controller's is the group's; where the controller runs
        elsewhere, the group is ready when all workers are."""
        slot = self.slots[name]
        if not slot.running or (self._is_led_here and slot.member.role is not Role.CONTROLLER):
            return []
        slot.state = status
        said = [slot] if self._is_led_here else self.slots.values()
        self.is_ready = self.mode is Mode.UP and all(other.state == "ready" for other in said)
        if self.is_ready:
            for member in self.slots.values():
                member.record.works()
        return []

    def stop(self, then: Mode, now: float) -> list[Action]:
        """Let streams finish, then end all its processes; `then` is the mode afterwards."""
        self.then = then
        if self.mode is Mode.STOPPING:
            return []
        limits = self._limits
        self._stages = [
            (self._names(Role.CONTROLLER), limits.drain_s + limits.margin_s),
            (self._names(Role.WORKER), limits.settle_s),
        ]
        return self._begin_stop(now)

    def restart(self, now: float) -> list[Action]:
        """Stop the group, then start it again."""
        return self.stop(Mode.UP, now)

    def start(self, now: float) -> list[Action]:
        """Start all its processes that do not run, at once or after it has stopped."""
        self.then = Mode.UP
        if self.mode in (Mode.UP, Mode.STOPPING):
            return []
        return self._start_all(now)

    @property
    def outcome(self) -> str | None:
        """The result of a restart: "": the group is ready again; None: it is not ready yet; else why it never will
        be."""
        if self.is_to_be_down:
            return "was drained meanwhile"
        if self.mode is Mode.LOST:
            return f"was given up: {self.why_lost or 'its processes cannot be killed'}"
        return "" if self.mode is Mode.UP and self.is_ready else None

    def tick(self, now: float) -> list[Action]:
        """Do what is due at this time."""
        if now < self.deadline:
            return []
        if self.mode is Mode.UP:
            return [*self._kill_orphans(now), *self._start_due(now)]
        late = [name for name in self._stage if self.slots[name].running]
        if not self._killing:
            self._killing = True
            self._stage_deadline = now + self._limits.reap_s
            text = f"{', '.join(late)} did not stop in time; killing."
            return [Say(text, "warning"), *(Send(name, signal.SIGKILL) for name in late)]
        self.then = Mode.LOST
        self._stages, self._stage = [], []
        return [Say(f"Some processes survive SIGKILL: {', '.join(late)}.", "error"), *self._advance(now)]

    def _expect_to_leave(self, lost: Member, now: float) -> None:
        if lost.role is Role.CONTROLLER:
            self._orphans = {name for name in self._names(Role.WORKER) if self.slots[name].running}
            self._leave_by = now + self._limits.leave_s if self._orphans else NEVER

    def _kill_orphans(self, now: float) -> list[Action]:
        if now < self._leave_by:
            return []
        orphans, self._orphans, self._leave_by = sorted(self._orphans), set(), NEVER
        return [Send(name, signal.SIGKILL) for name in orphans]

    def _give_up(self, now: float) -> list[Action]:
        self.then = Mode.LOST
        self._stages = [(list(self.slots), self._limits.quick_s)]
        return self._begin_stop(now)

    def _begin_stop(self, now: float) -> list[Action]:
        self.mode, self.is_ready, self._stage = Mode.STOPPING, False, []
        self._orphans, self._leave_by = set(), NEVER
        for slot in self.slots.values():
            slot.restart_at = NEVER
        return self._advance(now)

    def _advance(self, now: float) -> list[Action]:
        """Enter the next stage once no process of the current one runs."""
        while not any(self.slots[name].running for name in self._stage):
            if not self._stages:
                self.mode, self._stage_deadline = self.then, NEVER
                return self._start_all(now) if self.mode is Mode.UP else []
            names, seconds = self._stages.pop(0)
            self._stage = [name for name in names if self.slots[name].running]
            self._killing, self._stage_deadline = False, now + seconds
            if self._stage:
                return [Send(name, signal.SIGTERM) for name in self._stage]
        return []

    def _start_all(self, now: float) -> list[Action]:
        self.mode, self.why_lost = Mode.UP, ""
        for slot in self.slots.values():
            slot.record.works()  # it was asked for: earlier deaths do not count
            if not slot.running:
                slot.restart_at = now
        return self._start_due(now)

    def _start_due(self, now: float) -> list[Action]:
        due = [slot for slot in self.slots.values() if not slot.running and slot.restart_at <= now]
        for slot in due:
            slot.begin(now)
        return [Start(slot.member.name, slot.member) for slot in due]

    def _names(self, role: Role) -> list[str]:
        return [name for name, slot in self.slots.items() if slot.member.role is role]


class Router:
    """A router's place on the shared socket."""

    def __init__(self, member: Member, limits: Limits, now: float) -> None:
        self.title = member.name
        self.mode = Mode.UP
        self.is_ready = False
        self.slot = Slot(member, now)
        self.current = member.name
        """The child that fills the place now."""
        self._limits = limits
        self._successor = ""
        self._successor_deadline = NEVER
        self._leaving: dict[str, float] = {}
        """Children that finish their streams, each with its deadline."""
        self._failure = ""
        self.why_lost = ""
        """Why the router was given up, if its process said why; else ""."""
        self._replacements = 0

    @property
    def deadline(self) -> float:
        """The time at which `tick` has something to do."""
        restart_at = self.slot.restart_at if self.mode is Mode.UP else NEVER
        return min(restart_at, self._successor_deadline, *self._leaving.values(), NEVER)

    @property
    def children(self) -> Sequence[str]:
        """The names of all processes that belong here now."""
        others = [*self._leaving, *([self._successor] if self._successor else [])]
        return [self.current, *others]

    def is_leaving(self, name: str) -> bool:
        """Return whether this process only finishes its streams."""
        return name in self._leaving

    def expects(self, name: str) -> bool:
        """Return whether this process may end without being counted as a failure: it is not the current router
        process, or its successor has been started."""
        return name != self.current or bool(self._successor)

    def exited(self, name: str, status: int, now: float, words: str = "") -> list[Action]:
        """Take the end of one of its processes; `words` is the reason that it gave, if any."""
        end = describe_exit(status, words)
        if name in self._leaving:
            del self._leaving[name]
            text = f"{name} {end} while it finished its streams."
            return [] if status in EXPECTED_EXITS else [Say(text, "warning")]
        if name == self._successor:
            self._successor, self._successor_deadline = "", NEVER
            self._failure = self._failure or f"could not be replaced: its replacement {end}"
            return [Say(f"{self.title} {self._failure}; the old one stays.", "warning")]
        self.slot.end(now)
        self.is_ready = False
        if self.mode is not Mode.UP:
            return []
        if self._successor:
            text = f"{name} {end}; its replacement starts already."
            self._promote(now)
            return [Say(text, "warning")]
        news = after_death(self.slot, status, words, now)
        if news is None:
            self.mode, self.why_lost = Mode.LOST, f"{name} {end}"
            return [given_up(self.slot, status, words, "it")]
        return [news, *self._start_due(now)]

    def reported(self, name: str, status: str, now: float) -> list[Action]:
        """Take a status that a process reported."""
        if name == self._successor and status == "ready":
            old = self.current
            self._promote(now)
            self._leaving[old] = now + self._limits.drain_s + self._limits.margin_s
            self._take(status)
            # Not SIGTERM, by which a router refuses new requests: others take those.
            return [Send(old, signal.SIGUSR1)]
        if name == self.current and self.slot.running:
            self._take(status)
        return []

    def restart(self, now: float) -> list[Action]:
        """Put another process in its place, without losing a request."""
        self._failure = ""
        if self.slot.running:
            self._replacements += 1
            self._successor = f"{self.title}/{self._replacements + 1}"
            self._successor_deadline = now + self._limits.replace_s
            return [Start(self._successor, self.slot.member)]
        self.mode, self.slot.restart_at, self.why_lost = Mode.UP, now, ""
        self.slot.record.works()
        return self._start_due(now)

    @property
    def outcome(self) -> str | None:
        """The result of a restart: "": the router is ready again; None: it is not ready yet; else why it never
        will be."""
        if self._failure or self.mode is Mode.LOST:
            return self._failure or f"was given up: {self.why_lost}"
        return "" if self.is_ready and not self._successor and not self._leaving else None

    def tick(self, now: float) -> list[Action]:
        """Do what is due at this time."""
        actions: list[Action] = []
        for name in [name for name, until in self._leaving.items() if now >= until]:
            self._leaving[name] = NEVER
            actions += [
                Say(f"{name} did not finish its streams in time; killing.", "warning"),
                Send(name, signal.SIGKILL),
            ]
        if now >= self._successor_deadline:
            self._successor_deadline = NEVER
            self._failure = (
                f"could not be replaced: its replacement was not ready after {self._limits.replace_s:.0f} s"
            )
            actions.append(Send(self._successor, signal.SIGKILL))
        return [*actions, *self._start_due(now)]

    def _promote(self, now: float) -> None:
        self.current, self._successor, self._successor_deadline = self._successor, "", NEVER
        self.slot.begin(now)

    def _take(self, status: str) -> None:
        self.slot.state = status
        self.is_ready = status == "ready"
        if self.is_ready:
            self.slot.record.works()

    def _start_due(self, now: float) -> list[Action]:
        if self.mode is not Mode.UP or self.slot.running or self.slot.restart_at > now:
            return []
        self.slot.begin(now)
        return [Start(self.current, self.slot.member)]


Unit = Group | Router
