"""`trunkline top` and `trunkline doctor`: look at a cluster again and again, or check it once."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import asdict
from importlib.metadata import version
from typing import Annotated, Final

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trunkline.deploy.cli.option_commands import NUMBER, Port, Url, run
from trunkline.deploy.config.option_values import check_range
from trunkline.deploy.supervisor.run_folder import server_url
from trunkline.deploy.watch.checks import Finding, Level, examine
from trunkline.deploy.watch.facts import Look, Source, WatchError, gather
from trunkline.deploy.watch.screen import screen

KeyFile = Annotated[
    str,
    typer.Option(help="File with a key of role admin. Default: TRUNKLINE_API_KEY, or the key of a local cluster."),
]


def top(
    port: Port = None,
    url: Url = "",
    api_key_file: KeyFile = "",
    interval: Annotated[float, typer.Option(help="Seconds between two updates.", **NUMBER)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the figures once and exit.")] = False,
) -> None:
    """Watch groups, tiers, cache hits and sessions in the terminal; Ctrl-C leaves.

    [bold]Examples[/]

    trunkline top

    trunkline top --url https://llm.example.com --api-key-file admin.key

    trunkline top --once
    """
    run(lambda: _top(port, url, api_key_file, interval, once))


def _top(port: int | None, url: str, api_key_file: str, interval: float, once: bool) -> None:
    check_range("--interval", interval, 0.2, 3600)
    source = Source(server_url(port, url), api_key_file)
    console = Console(highlight=False)
    interrupt = _Interrupt()
    try:
        look = source.look()
        if once or not console.is_terminal:
            console.print(screen(look))
            return
        with Live(screen(look), console=console, screen=True, auto_refresh=False) as live:
            while not interrupt.came:
                time.sleep(interval)
                look, shown = _next(source, look)
                live.update(shown, refresh=True)
    except KeyboardInterrupt:
        return
    finally:
        source.close()


class _Interrupt:
    """Raise `KeyboardInterrupt` at Ctrl-C, and remember that it came.

    Python drops an exception that a signal raises while an object is being finalised, and the command would not
    end.
    """

    def __init__(self) -> None:
        self.came = False
        signal.signal(signal.SIGINT, self._note)

    def _note(self, _signal: int, _frame: object) -> None:
        self.came = True
        raise KeyboardInterrupt


def _next(source: Source, last: Look) -> tuple[Look, RenderableType]:
    """Return new figures and their screen; if the router does not answer, the last ones with the reason."""
    try:
        look = source.look()
    except WatchError as error:
        return last, Group(Text(f"{error}; trying again", style="bold red"), Text(), screen(last))
    return look, screen(look)


_MARKS: Final = {Level.OK: ("ok", "green"), Level.WARNING: ("warn", "yellow"), Level.FAILURE: ("FAIL", "bold red")}


def doctor(
    port: Port = None,
    url: Url = "",
    api_key_file: KeyFile = "",
    probe: Annotated[bool, typer.Option("--probe/--no-probe", help="Send a short request, twice.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Check a running cluster: say what is wrong, and what to do about it.

    Exit code 1: a check failed.

    [bold]Examples[/]

    trunkline doctor

    trunkline doctor --url https://llm.example.com --api-key-file admin.key --no-probe
    """
    findings = run(lambda: _examine(server_url(port, url), api_key_file, probe))
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print(findings)
    if any(finding.level is Level.FAILURE for finding in findings):
        raise typer.Exit(1)


def _examine(url: str, api_key_file: str, probe: bool) -> list[Finding]:
    source = Source(url, api_key_file)
    try:
        return examine(gather(source, version("trunkline"), probes=probe))
    finally:
        source.close()


def _print(findings: list[Finding]) -> None:
    console = Console(highlight=False)
    table = Table.grid(padding=(0, 2))
    for column in range(3):
        table.add_column(no_wrap=column < 2)
    for finding in findings:
        mark, style = _MARKS[finding.level]
        text = Text(finding.text)
        if finding.remedy:
            text.append(f"\n{finding.remedy}", style="dim")
        table.add_row(Text(mark, style=style), finding.about, text)
    console.print(table)
    count = {level: sum(finding.level is level for finding in findings) for level in Level}
    console.print(f"\nfailures: {count[Level.FAILURE]}, warnings: {count[Level.WARNING]}")
