"""Show a person what `trunkline launch` does: a line for each change, and tables."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trunkline.deploy.config.option_values import format_duration
from trunkline.deploy.launch.changes import Decision
from trunkline.deploy.launch.hosts import describe
from trunkline.deploy.launch.plan import Plan
from trunkline.deploy.launch.protocol import Place, UnitState

_STYLES: Final = {
    "ready": "green",
    "starting": "yellow",
    "unready": "yellow",
    "waiting": "yellow",
    "stopping": "yellow",
    "failed": "bold red",
    "gone": "bold red",
}
_DETAIL_S: Final = 10.0
"""Shortest time in seconds between two lines about why a unit is not ready."""


class ConsoleReporter:
    """Shows on a console what a launcher does."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: dict[Place, tuple[str, str, int]] = {}
        self._told_s: dict[Place, float] = {}

    def say(self, text: str, style: str = "") -> None:
        """Print a sentence, in a style of the theme, or in that of a `warning`."""
        self._console.print(Text(text, style="yellow" if style == "warning" else style), soft_wrap=True)

    def unit(self, place: Place, state: UnitState) -> None:
        """Take the state of a unit, and print a line if it is another one than before."""
        old, new = self._shown.get(place), (state.state, state.detail, state.restarts)
        now = time.monotonic()
        if old == new:
            return
        if old is not None and old[0] == new[0] and old[2] == new[2] and now - self._told_s[place] < _DETAIL_S:
            return
        self._shown[place] = new
        self._told_s[place] = now
        label, name = place
        line = Text.assemble(f"{name} on {label}: ", (state.state, _STYLES.get(state.state, "")))
        if state.detail:
            line.append(f" ({state.detail})", style="dim")
        if old is not None and state.restarts > old[2]:
            line.append(f", started again for the {state.restarts}. time", style="yellow")
        self._console.print(line, soft_wrap=True)

    def lines(self, unit: str, lines: Iterable[str]) -> None:
        """Print the end of a log."""
        found = list(lines)
        if found:
            self._console.print(Text(f"Its last lines ({unit}):", style="bold"))
        for line in found:
            self._console.print(Text(f"  {line}"), soft_wrap=True)


def states_table(states: Mapping[Place, UnitState], missing: Mapping[Place, str]) -> Table:
    """Return a table of units; `missing` has the words for units that no host knows."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("unit", "host", "state", "process", "restarts", "up", ""):
        table.add_column(title, justify="right" if title in ("process", "restarts", "up") else "left")
    for (label, name), state in states.items():
        exit_text = (
            f"exit code {state.exit_code}" if state.state == "failed" and state.exit_code is not None else ""
        )
        table.add_row(
            Text(name),
            Text(label),
            Text(state.state, style=_STYLES.get(state.state, "")),
            str(state.pid or ""),
            str(state.restarts),
            format_duration(state.up_s) if state.up_s is not None else "",
            Text(state.detail or exit_text, style="dim"),
        )
    for (label, name), word in missing.items():
        table.add_row(Text(name), Text(label), Text(word, style="bold red"), "", "", "", "")
    return table


def states_json(states: Mapping[Place, UnitState], missing: Mapping[Place, str]) -> list[dict[str, Any]]:
    """Return the states of units for programs."""
    rows = []
    for (label, _), state in states.items():
        row: dict[str, Any] = msgspec.to_builtins(state)
        row.pop("type")
        rows.append({"host": label, **row})
    return rows + [{"host": label, "name": name, "state": word} for (label, name), word in missing.items()]


def plan_lines(plan: Plan) -> Iterable[str]:
    """Return what runs where, with which command line. Values of variables are left out: they may be secrets."""
    yield f"{plan.name}: {plan.model}, {len(plan.groups)} group{'s' if len(plan.groups) > 1 else ''}"
    for label, host in plan.hosts.items():
        yield f"\n{label} ({describe(host)})"
        for unit in plan.units:
            if unit.host != label:
                continue
            ports = [*unit.ports, unit.health_port]
            yield f"  {unit.name}   ports {', '.join(map(str, ports))}"
            variables = "".join(
                f"{name}={value if name == 'CUDA_VISIBLE_DEVICES' else '…'} "
                for name, value in sorted(unit.environment.items())
            )
            yield f"    {variables}trunkline {shlex.join(unit.argv)}"
    for url in plan.urls:
        yield f"\nClients connect to {url}"


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the plan for programs, without values of variables."""
    units = [
        {
            "name": unit.name,
            "host": unit.host,
            "kind": unit.kind,
            "command": ["trunkline", *unit.argv],
            "ports": list(unit.ports),
            "health_port": unit.health_port,
            "ranks": list(unit.ranks),
            "variables": sorted(unit.environment),
        }
        for unit in plan.units
    ]
    return {"name": plan.name, "model": plan.model, "urls": list(plan.urls), "units": units}


def decision_lines(decision: Decision) -> Iterable[str]:
    """Return what `up` is going to change about running units."""
    for name, text in decision.change.items():
        yield f"  {name}: {text}"
    for label, name in decision.extra:
        yield f"  {name} on {label}: not in the file any more; it is stopped"
