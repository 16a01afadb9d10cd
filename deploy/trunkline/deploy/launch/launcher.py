"""Put a plan into effect, or take it back, by the agents on its hosts (`hosts.py`), in the right order.

up     keys are copied, what is missing is started at once, and waited for; then what runs in another way is
       restarted, group by group and then router by router, each ready before the next one stops
stop   routers first, so that their streams end with their groups still there; then the rest
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from trunkline.deploy.errors import DeployError
from trunkline.deploy.launch.changes import ENDED, Decision, decide
from trunkline.deploy.launch.hosts import HostError, Hosts
from trunkline.deploy.launch.plan import Plan, Unit
from trunkline.deploy.launch.protocol import (
    Begin,
    CheckPorts,
    LogLine,
    Logs,
    Place,
    TakenPorts,
    UnitRecord,
    UnitState,
)
from trunkline.deploy.launch.view import ConsoleReporter
from trunkline.deploy.supervisor.members import EXIT_IMPOSSIBLE

POLL_S: Final = 0.5
_KILL_S: Final = 20.0
"""Longest time in seconds until a killed unit has ended."""
_LAST_LINES: Final = 25
_UNREACHED_S: Final = 60.0
"""Longest time in seconds that a host may be out of reach while its units start."""


class LaunchError(DeployError):
    """The cluster could not be started or stopped; the reasons were shown before."""


class ImpossibleError(LaunchError):
    """A unit reported that what the file asks for can never work."""

    exit_code = EXIT_IMPOSSIBLE


@dataclass
class Launcher:
    """A plan, its hosts, and what shows the progress."""

    plan: Plan
    hosts: Hosts
    reporter: ConsoleReporter
    contents: Mapping[str, bytes]
    """Contents of the files that units need, by name."""
    start_s: float
    """Longest time in seconds until a unit is ready."""
    started: list[str] = field(default_factory=list)
    """Units that did not run before this launcher started them."""
    begun: set[str] = field(default_factory=set)
    """Units that this launcher started or restarted."""

    def decision(self) -> Decision:
        """Return what has to be done to put the plan into effect.

        Raises:
            HostError: A host does not answer.
        """
        states, failed = self.hosts.states(probe=False)
        for label, error in failed.items():
            if label in self.plan.hosts:
                raise error
        ending = [place for place, state in states.items() if state.state == "stopping"]
        if ending:
            names = ", ".join(name for _, name in ending)
            self.reporter.say(f"Waiting until {names} {'has' if len(ending) == 1 else 'have'} stopped")
            end_units(self.hosts, self.reporter, ending, self.plan.stop_s)
            states, _ = self.hosts.states(probe=False)
        versions = {label: connection.facts.version for label, connection in self.hosts.connections.items()}
        digests = {unit.name: unit.digest(self.contents) for unit in self.plan.units}
        return decide(self.plan, digests, versions, states)

    def bring_up(self, decision: Decision) -> None:
        """Do what was decided.

        Raises:
            HostError, LaunchError: A unit could not be started.
        """
        units = self.plan.by_name
        self._copy_files()
        for place in decision.forget:
            self.hosts.forget(place)
        # First: their ports and GPUs may be wanted.
        if decision.extra:
            self.reporter.say(
                f"Stopping {', '.join(name for _, name in decision.extra)}: not in the file any more"
            )
            end_units(self.hosts, self.reporter, decision.extra, self.plan.stop_s)
            for place in decision.extra:
                self.hosts.forget(place)
        self._begin([units[name] for name in decision.start], self.started)
        self.wait([units[name] for name in (*decision.start, *decision.keep)])
        for stage in self.plan.stages():
            changed = [units[name] for name in stage if name in decision.change]
            if changed:
                self.replace([units[name] for name in stage])

    def replace(self, stage: list[Unit]) -> None:
        """Stop units, start them, and wait until they are ready.

        Raises:
            HostError, LaunchError: A unit does not come back.
        """
        self.reporter.say(f"Restarting {', '.join(unit.name for unit in stage)}")
        end_units(self.hosts, self.reporter, [(unit.host, unit.name) for unit in stage], self.plan.stop_s)
        self._begin(stage, [])
        self.wait(stage)

    def wait(self, units: list[Unit]) -> None:
        """Wait until all units are ready.

        Raises:
            LaunchError: A unit ended, or takes too long.
        """
        places = [(unit.host, unit.name) for unit in units]
        deadline = time.monotonic() + self.start_s
        before: dict[Place, int] = {}
        unreached: dict[str, float] = {}
        while True:
            states, failed = self.hosts.states()
            self._note_unreached(failed, unreached)
            pending = []
            for place in places:
                state = states.get(place)
                if state is None:
                    pending.append(place)
                    continue
                self.reporter.unit(place, state)
                # What ran before may have died before.
                first = before.setdefault(place, 0 if place[1] in self.begun else state.restarts)
                died = state.restarts > first
                if state.state in ENDED or died:
                    self._fail(place, _ending(state), state.exit_code)
                if state.state != "ready":
                    pending.append(place)
            if not pending:
                return
            if time.monotonic() >= deadline:
                self._fail(pending[0], f"is not ready after {self.start_s:g} s")
            time.sleep(POLL_S)

    def _note_unreached(self, failed: Mapping[str, HostError], since: dict[str, float]) -> None:
        """Note a broken connection, which may happen while large models load; it is made again for a while."""
        now = time.monotonic()
        for label, error in {**failed, **self.hosts.connect()}.items():
            if label not in since:
                self.reporter.say(f"{error}; trying again", "warning")
            if now - since.setdefault(label, now) > _UNREACHED_S:
                raise error
        for label in self.hosts.connections:
            since.pop(label, None)

    def _copy_files(self) -> None:
        files: dict[str, dict[str, bytes]] = {}
        for unit in self.plan.units:
            files.setdefault(unit.host, {}).update({name: self.contents[name] for name in unit.files})
        self.hosts.put(files)

    def _begin(self, units: list[Unit], noted: list[str]) -> None:
        self._check_ports(units)
        for label in dict.fromkeys(unit.host for unit in units):
            for unit in (unit for unit in units if unit.host == label):
                self.hosts.connections[label].ask(Begin(unit=self._record(unit)))
                noted.append(unit.name)
                self.begun.add(unit.name)
                self.reporter.say(f"{unit.name} started on {label}")

    def _record(self, unit: Unit) -> UnitRecord:
        return UnitRecord(
            name=unit.name,
            kind=unit.kind,
            argv=list(unit.argv),
            environment=dict(unit.environment),
            digest=unit.digest(self.contents),
            health_port=unit.health_port,
        )

    def _check_ports(self, units: list[Unit]) -> None:
        for label in dict.fromkeys(unit.host for unit in units):
            here = [unit for unit in units if unit.host == label]
            wanted = {port: unit for unit in here for port in (*unit.ports, unit.health_port)}
            for reply in self.hosts.connections[label].ask(CheckPorts(ports=list(wanted))):
                if isinstance(reply, TakenPorts) and reply.ports:
                    port = reply.ports[0]
                    raise HostError(
                        label,
                        f"port {port} is in use there, which {wanted[port].name} needs; stop what has it, or say "
                        "other ports in the file (ports:, groups[].port, routers[].port)",
                    )

    def _fail(self, place: Place, text: str, exit_code: int | None = None) -> None:
        label, name = place
        if label in self.hosts.connections:
            replies = self.hosts.connections[label].ask(Logs(units=[name], lines=_LAST_LINES))
            self.reporter.lines(name, [reply.text for reply in replies if isinstance(reply, LogLine)])
        kind = ImpossibleError if exit_code == EXIT_IMPOSSIBLE else LaunchError
        raise kind(f"{name} on {label} {text}")


def end_units(hosts: Hosts, reporter: ConsoleReporter, places: Iterable[Place], stop_s: float) -> None:
    """Stop units, and kill those that have not ended in time.

    Raises:
        HostError, LaunchError: A unit could not be told, or does not end.
    """
    places = [place for place in places if place[0] in hosts.connections]
    hosts.signal(places, "term")
    left = _wait_for_ends(hosts, reporter, places, stop_s)
    if left:
        for _, name in left:
            reporter.say(f"{name} has not stopped within {stop_s:g} s; killing it", "warning")
        hosts.signal(left, "kill")
        left = _wait_for_ends(hosts, reporter, left, _KILL_S)
    if left:
        raise LaunchError(f"{', '.join(name for _, name in left)} cannot be killed; look at the machine")


def _wait_for_ends(hosts: Hosts, reporter: ConsoleReporter, places: list[Place], seconds: float) -> list[Place]:
    deadline = time.monotonic() + seconds
    while True:
        states, failed = hosts.states(probe=False)
        for error in failed.values():
            raise error
        left = [place for place in places if place in states and states[place].state not in ENDED]
        for place in places:
            if place in states:
                reporter.unit(place, states[place])
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(POLL_S)


def stop_all(
    hosts: Hosts, reporter: ConsoleReporter, places: Iterable[Place], routers: Iterable[str], stop_s: float
) -> None:
    """Stop units, routers first.

    Raises:
        HostError, LaunchError: As `end_units`.
    """
    first, rest = set(routers), list(places)
    for part in (
        [place for place in rest if place[1] in first],
        [place for place in rest if place[1] not in first],
    ):
        if part:
            end_units(hosts, reporter, part, stop_s)


def _ending(state: UnitState) -> str:
    code = state.exit_code
    if state.state == "gone" or code is None:
        return "was killed"
    return f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code}"
