"""The actions behind the commands of `trunkline launch`."""

from __future__ import annotations

import json
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import typer
from msgspec import structs
from rich.console import Console

from trunkline.deploy.errors import DeployError, UserError
from trunkline.deploy.launch import cluster_files
from trunkline.deploy.launch.changes import ENDED, Decision
from trunkline.deploy.launch.cluster_files import Launched, Loaded, launched, launched_from
from trunkline.deploy.launch.fileformat import Host
from trunkline.deploy.launch.hosts import Connection, HostError, Hosts, describe
from trunkline.deploy.launch.launcher import Launcher, stop_all
from trunkline.deploy.launch.plan import MEMBERS, Plan
from trunkline.deploy.launch.protocol import HostFacts, LogLine, Logs, Place, UnitState
from trunkline.deploy.launch.resources import Facts
from trunkline.deploy.launch.view import (
    ConsoleReporter,
    decision_lines,
    plan_json,
    plan_lines,
    states_json,
    states_table,
)
from trunkline.router.membership.static_source import encode_members

INTERRUPTED: Final = 130
_WATCH_S: Final = 2.0


@dataclass(frozen=True)
class UpOptions:
    """The options of `up`."""

    detach: bool = False
    yes: bool = False
    keep: bool = False
    start_s: float = 1800.0
    restart: tuple[str, ...] | None = None
    """Units that are restarted even if nothing has changed. An empty tuple: all units; None: no unit."""


def up(path: Path, options: UpOptions) -> int:
    """Put a file into effect; return the exit code.

    Raises:
        DeployError: This is not possible.
    """
    console = Console(stderr=True, highlight=False)
    reporter = ConsoleReporter(console)
    loaded = Loaded(path)
    wanted = loaded.plan().hosts  # what is wrong is said before hosts are troubled
    left = _left_hosts(cluster_files.load_record(loaded.name), wanted, reporter)
    with _interruptible(), Hosts(loaded.name, {**left, **wanted}) as hosts:
        with cluster_files.alone(loaded.name):
            launcher = _prepare(loaded, hosts, reporter, options)
            try:
                _apply(launcher, options, console)
            except (KeyboardInterrupt, DeployError) as error:
                return _undo(launcher, reporter, error, keep=options.keep)
            cluster_files.save_record(launched_from(launcher.plan, loaded.path))
        _announce(launcher.plan, console, path, detached=options.detach)
        return 0 if options.detach else _watch(launcher, reporter)


def _left_hosts(before: Launched | None, wanted: Mapping[str, Host], reporter: ConsoleReporter) -> dict[str, Host]:
    """Return the hosts that the file no longer has, where units may still run."""
    left = {}
    for label, host in (before.hosts if before is not None else {}).items():
        if label not in wanted:
            left[label] = host
        elif (host.ssh, host.command, host.state) != (
            wanted[label].ssh,
            wanted[label].command,
            wanted[label].state,
        ):
            reporter.say(
                f"host {label} is another place than before ({describe(host)}); what may run there is left alone",
                "warning",
            )
    return left


def _prepare(loaded: Loaded, hosts: Hosts, reporter: ConsoleReporter, options: UpOptions) -> Launcher:
    wanted = loaded.plan().hosts
    for label, error in hosts.connect().items():
        if label in wanted:
            raise error
        reporter.say(f"{error}; it is not in the file any more, but units may run there still", "warning")
    facts = {label: found.facts for label, found in hosts.connections.items() if label in wanted}
    if problem := _differing_versions(facts):
        raise UserError(f"{problem}; install the same one on all")
    plan = loaded.plan(_facts_of(facts))
    for warning in plan.warnings:
        reporter.say(warning, "warning")
    contents = cluster_files.key_contents(plan.security, plan.name, loaded.path.parent, reporter.say)
    contents[MEMBERS] = encode_members(plan.members)
    return Launcher(plan, hosts, reporter, contents, options.start_s)


def _facts_of(found: Mapping[str, HostFacts]) -> dict[str, Facts]:
    """Return the facts about hosts that the plan needs."""
    return {label: Facts(facts.cores, facts.memory_bytes, tuple(facts.gpus)) for label, facts in found.items()}


def _differing_versions(facts: Mapping[str, HostFacts]) -> str:
    """Return a sentence with the versions of hosts if they differ; "" if they do not."""
    if len({found.version for found in facts.values()}) < 2:
        return ""
    said = ", ".join(f"{label} {found.version}" for label, found in facts.items())
    return f"the hosts have different versions of trunkline ({said})"


def _apply(launcher: Launcher, options: UpOptions, console: Console) -> None:
    decision = launcher.decision()
    if options.restart is not None:
        for name in _named(launched_from(launcher.plan, Path(launcher.plan.source)), options.restart):
            if name in decision.keep:
                decision.keep.remove(name)
                decision.change[name] = "asked for"
    kept = f", {len(decision.keep)} run already" if decision.keep else ""
    count = len(launcher.plan.units)
    launcher.reporter.say(f"{launcher.plan.name}: {count} unit{'s' if count > 1 else ''}{kept}")
    if decision.is_disruptive and options.restart is None and not options.yes:
        _confirm(decision, console)
    # From now on it is known where something may run.
    cluster_files.save_record(launched_from(launcher.plan, Path(launcher.plan.source)))
    launcher.bring_up(decision)


def _confirm(decision: Decision, console: Console) -> None:
    console.print("This would restart or stop what runs:")
    for line in decision_lines(decision):
        console.print(line, markup=False, soft_wrap=True)
    if not (sys.stdin.isatty() and console.is_terminal and typer.confirm("Go on?", err=True)):
        raise UserError("nothing was changed; --yes restarts them, one group after the other")


def _undo(launcher: Launcher, reporter: ConsoleReporter, error: BaseException, *, keep: bool) -> int:
    """After a failure or Ctrl-C, stop what this command has started, and nothing else."""
    if isinstance(error, DeployError):
        reporter.say(f"Error: {error}", "bold red")
    code = error.exit_code if isinstance(error, DeployError) else INTERRUPTED
    if launcher.started and not keep:
        _stop_started(launcher, reporter)
    elif launcher.started:
        reporter.say("What was started goes on (--keep); `trunkline launch status` shows it")
    return code


def _stop_started(launcher: Launcher, reporter: ConsoleReporter) -> None:
    plan = launcher.plan
    if not launcher.started:
        reporter.say("What ran before goes on; `trunkline launch stop` stops it")
        return
    reporter.say(f"Stopping what was started ({', '.join(dict.fromkeys(launcher.started))})")
    places = [(unit.host, unit.name) for unit in plan.units if unit.name in launcher.started]
    routers = [unit.name for unit in plan.units if unit.kind == "router"]
    try:
        # Connections of its own: an interruption may have left others in the middle of an answer.
        with Hosts(plan.name, plan.hosts) as hosts:
            failed = hosts.connect()
            stop_all(hosts, reporter, places, routers, plan.stop_s)
            for error in failed.values():
                raise error
    except KeyboardInterrupt:
        reporter.say("No longer waiting; units that were told to stop go on stopping", "warning")
    except DeployError as error:
        reporter.say(f"Error: {error}; `trunkline launch stop` tries again", "bold red")
    else:
        if len(set(launcher.started)) == len(plan.units):
            _mark_stopped(plan.name)
        reporter.say("Stopped.")


def _mark_stopped(name: str) -> None:
    known = cluster_files.load_record(name)
    if known is not None:
        cluster_files.save_record(structs.replace(known, stopped=True))


def _announce(plan: Plan, console: Console, path: Path, *, detached: bool) -> None:
    for url in plan.urls:
        console.print(f"Ready: [bold]{url}[/]", soft_wrap=True)
    if detached:
        console.print(f"Look at it:  trunkline launch status {path}", markup=False, soft_wrap=True)
        console.print(f"Stop it:     trunkline launch stop {path}", markup=False, soft_wrap=True)
    else:
        console.print("Stop it:     Ctrl-C  (or close the terminal, and it goes on)")


def _watch(launcher: Launcher, reporter: ConsoleReporter) -> int:
    """Show changes of the units' states until Ctrl-C, or until no group or no router is left."""
    plan, told = launcher.plan, set[str]()
    try:
        while True:
            time.sleep(_WATCH_S)
            states, failed = launcher.hosts.states()
            for label, error in {**failed, **launcher.hosts.connect()}.items():
                if label not in told:
                    reporter.say(f"{error}; trying again", "warning")
                    told.add(label)
            for label in told & set(launcher.hosts.connections):
                reporter.say(f"host {label} answers again")
                told.discard(label)
            for unit in plan.units:
                state = states.get((unit.host, unit.name))
                if state is not None:
                    reporter.unit((unit.host, unit.name), state)
            if reason := _is_over(plan, states):
                reporter.say(f"{reason}: the cluster cannot go on", "bold red")
                _stop_started(launcher, reporter)
                return 1
    except KeyboardInterrupt:
        _stop_started(launcher, reporter)
        return 0


def _is_over(plan: Plan, states: dict[Place, UnitState]) -> str:
    """Return why the cluster cannot serve any more; "" if it can, or if that is not known."""

    def has_ended(name: str) -> bool:
        unit = plan.by_name[name]
        state = states.get((unit.host, name))
        return state is not None and state.state in ENDED

    if all(has_ended(unit.name) for unit in plan.units if unit.kind == "router"):
        return "no router is left"
    if all(any(has_ended(name) for name in units) for units in plan.groups.values()):
        return "no group is left"
    return ""


def check(path: Path, *, with_hosts: bool, as_json: bool) -> int:
    """Show the plan and, if asked for, whether its hosts can be reached; return the exit code.

    Raises:
        DeployError: The plan cannot work.
    """
    loaded = Loaded(path)
    plan = loaded.plan()
    problems: list[str] = []
    if with_hosts:
        with Hosts(plan.name, plan.hosts) as hosts:
            problems = [str(error) for error in hosts.connect().values()]
            facts = {label: connection.facts for label, connection in hosts.connections.items()}
            plan = loaded.plan(_facts_of(facts))
            if problem := _differing_versions(facts):
                problems.append(problem)
    if as_json:
        typer.echo(json.dumps(plan_json(plan), indent=2))
    else:
        for line in plan_lines(plan):
            typer.echo(line)
    for text in (*plan.warnings, *problems):
        typer.echo(text, err=True)
    if with_hosts and not problems:
        typer.echo("All hosts can be reached.", err=True)
    return 1 if problems else 0


def status(path: Path | None, *, as_json: bool) -> int:
    """Show the units of a cluster; return 0 if all are ready.

    Raises:
        DeployError: It is not clear which cluster is meant.
    """
    cluster = launched(path)
    console = Console(highlight=False)
    with Hosts(cluster.name, cluster.hosts) as hosts:
        failed = hosts.connect()
        states, lost = hosts.states()
    failed.update(lost)
    missing = {
        (label, name): "unknown" if label in failed else "absent"
        for name, label in cluster.units.items()
        if (label, name) not in states
    }
    if as_json:
        rows = {"name": cluster.name, "urls": cluster.urls, "units": states_json(states, missing)}
        typer.echo(json.dumps(rows, indent=2))
    else:
        console.print(f"{cluster.name} · {' · '.join(cluster.urls)}", markup=False, soft_wrap=True)
        console.print(states_table(states, missing))
        for error in failed.values():
            console.print(f"{error}", style="yellow", markup=False, soft_wrap=True)
    expected = [(label, name) for name, label in cluster.units.items()]
    return 0 if all(place in states and states[place].state == "ready" for place in expected) else 1


def stop(path: Path | None, words: list[str], seconds: float | None) -> int:
    """Stop a cluster, or some of its units; return the exit code.

    Raises:
        DeployError: A unit could not be stopped.
    """
    cluster = launched(path)
    reporter = ConsoleReporter(Console(stderr=True, highlight=False))
    with _interruptible(), cluster_files.alone(cluster.name), Hosts(cluster.name, cluster.hosts) as hosts:
        failed = hosts.connect()
        for error in failed.values():
            reporter.say(str(error), "warning")
        states, _ = hosts.states(probe=False)
        known = {name: (label, name) for label, name in states}
        names = _named(cluster, words, list(known))
        running = [known[name] for name in names if name in known and states[known[name]].state not in ENDED]
        if not running and not failed:
            reporter.say("Nothing runs.")
        try:
            stop_all(hosts, reporter, running, cluster.routers, cluster.stop_s if seconds is None else seconds)
        except KeyboardInterrupt:
            reporter.say("No longer waiting; units that were told to stop go on stopping", "warning")
            return INTERRUPTED
        if not words and not failed:
            _mark_stopped(cluster.name)
    return 1 if failed else 0


def logs(path: Path | None, words: list[str], lines: int, *, follow: bool) -> int:
    """Print what units wrote; return the exit code.

    Raises:
        DeployError: There is no such unit, or no host answers.
    """
    cluster = launched(path)
    names = _named(cluster, words)
    with Hosts(
        cluster.name, {label: cluster.hosts[label] for label in {cluster.units[n] for n in names}}
    ) as hosts:
        failed = hosts.connect()
        for error in failed.values():
            typer.echo(f"{error}", err=True)
        found: queue.Queue[LogLine | HostError | None] = queue.Queue(maxsize=1000)
        for label, connection in hosts.connections.items():
            request = Logs(units=[n for n in names if cluster.units[n] == label], lines=lines, follow=follow)
            threading.Thread(target=_read_logs, args=(connection, request, found), daemon=True).start()
        left = len(hosts.connections)
        try:
            while left:
                line = found.get()
                if isinstance(line, LogLine):
                    typer.echo(f"{line.unit + ' | ' if len(names) > 1 else ''}{line.text}")
                else:
                    left -= 1
                    if line is not None:
                        typer.echo(f"{line}", err=True)
        except KeyboardInterrupt:
            return INTERRUPTED if not follow else 0
    return 1 if failed else 0


def _read_logs(connection: Connection, request: Logs, found: queue.Queue[LogLine | HostError | None]) -> None:
    try:
        for reply in connection.stream(request, None):
            if isinstance(reply, LogLine):
                found.put(reply)
        found.put(None)
    except HostError as error:
        found.put(error)


def _named(cluster: Launched, words: Sequence[str], known: Sequence[str] = ()) -> list[str]:
    """Return the units that words name: by their own name, by their group, or all routers as `routers`.

    Args:
        words: The words; none: all units.
        known: Units that hosts know, of which some may not be in the cluster's record any more.

    Raises:
        UserError: There is no such unit.
    """
    found: list[str] = []
    for word in words or known or cluster.units:
        if word == "routers":
            found += cluster.routers
        elif word in cluster.groups:
            found += cluster.groups[word]
        elif word in known or word in cluster.units:
            found.append(word)
        else:
            raise UserError(f"there is no unit {word!r}; there are {', '.join(cluster.units)}")
    return list(dict.fromkeys(found))


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
