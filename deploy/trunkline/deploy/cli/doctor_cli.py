"""`trunkline doctor`: gather facts, check them, and print what is wrong."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.metadata import version
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trunkline.deploy.cli.top_cli import KeyFile, Url
from trunkline.deploy.reporting import run
from trunkline.deploy.watch.checks import Finding, Level, examine
from trunkline.deploy.watch.facts import gather
from trunkline.deploy.watch.source import Source

_MARKS: Final = {Level.OK: ("ok", "green"), Level.WARNING: ("warn", "yellow"), Level.FAILURE: ("FAIL", "bold red")}


def command(
    url: Url = None,
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
    findings = run(lambda: _examine(url, api_key_file, probe))
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print(findings)
    if any(finding.level is Level.FAILURE for finding in findings):
        raise typer.Exit(1)


def _examine(url: str | None, api_key_file: str, probe: bool) -> list[Finding]:
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
