"""The commands of `trunkline launch`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from trunkline.deploy.cli.option_commands import NUMBER, WHOLE, run
from trunkline.deploy.config.option_values import check_range
from trunkline.deploy.launch import agent as host_agent
from trunkline.deploy.launch import commands
from trunkline.deploy.launch.cluster_files import DEFAULT_FILE, is_file, launched, split
from trunkline.deploy.launch.fileformat import schema as file_schema

_File = Annotated[
    Path, typer.Argument(help="The file that describes the cluster (docs/launch.md).", metavar="FILE")
]
_Words = Annotated[
    list[str] | None,
    typer.Argument(
        help="The file, unless only one cluster was launched; then units, groups or 'routers'. Default: all.",
        metavar="[FILE] [UNIT]...",
    ),
]
_OptionalFile = Annotated[
    str | None, typer.Argument(help="Default: cluster.yaml, or what was launched.", metavar="[FILE]")
]
_SECONDS_MAX = 86_400
_Start = Annotated[float, typer.Option(help="Seconds in which units must become ready.", **NUMBER)]


class _UpByDefault(TyperGroup):
    """Commands, of which `up` is meant if only a file is given."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        if any(is_file(word) for word in args[:1]) or (
            args and args[0].startswith("-") and args[0] not in ("-h", "--help")
        ):
            args = ["up", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_UpByDefault,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""Start, watch and stop a cluster that a file describes.

    [bold]Examples[/]

    trunkline launch cluster.yaml  [dim]# start it, and stay; Ctrl-C stops it[/]

    trunkline launch up cluster.yaml --detach  [dim]# start it, or what has changed in the file[/]

    trunkline launch check cluster.yaml  [dim]# show the units, their hosts and command lines[/]

    trunkline launch logs cluster.yaml group-0 -f

    trunkline launch stop cluster.yaml
    """,
)


@app.command()
def up(
    file: _File = DEFAULT_FILE,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Exit once the cluster is ready, instead of watching it.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Restart units whose part of the file has changed, without asking.")
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="After a failure, leave the units running that were started.")
    ] = False,
    start_seconds: _Start = 1800.0,
) -> None:
    """Start a cluster, or the units that do not run, and wait until it is ready.

    Units that run as the file says are left alone. Ctrl-C stops the units that
    this command has started.

    Exit code: 0, 1 if it failed, 2 if the file asks for the impossible, 130
    after Ctrl-C while it started.

    [bold]Examples[/]

    trunkline launch cluster.yaml

    trunkline launch up cluster.yaml --detach --yes
    """
    options = commands.UpOptions(detach=detach, yes=yes, keep=keep, start_s=start_seconds)
    raise typer.Exit(run(lambda: _up(file, options)))


def _up(file: Path, options: commands.UpOptions) -> int:
    check_range("--start-seconds", options.start_s, 1, _SECONDS_MAX)
    return commands.up(file, options)


@app.command()
def check(
    file: _File = DEFAULT_FILE,
    hosts: Annotated[bool, typer.Option("--hosts", help="Check also whether the hosts can be reached.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Show the units of a file with their hosts and command lines. Nothing is
    started.

    [bold]Example[/]

    trunkline launch check cluster.yaml --hosts
    """
    raise typer.Exit(run(lambda: commands.check(file, with_hosts=hosts, as_json=as_json)))


@app.command()
def status(
    file: _OptionalFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Show the states of a cluster's units. Exit code 0: all are ready.

    [bold]Example[/]

    trunkline launch status cluster.yaml --json | jq '.units[].state'
    """
    path = Path(file) if file else None
    raise typer.Exit(run(lambda: commands.status(path, as_json=as_json)))


@app.command()
def logs(
    words: _Words = None,
    lines: Annotated[int, typer.Option("--lines", "-n", help="Number of lines of each unit.", **WHOLE)] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Then print new lines, until Ctrl-C.")] = False,
) -> None:
    """Print the last lines of units' logs.

    [bold]Example[/]

    trunkline launch logs cluster.yaml group-0 --follow
    """
    path, units = split(words or [])

    def action() -> int:
        check_range("--lines", lines, 0, 1_000_000)
        return commands.logs(path, units, lines, follow=follow)

    raise typer.Exit(run(action))


@app.command()
def stop(
    words: _Words = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="Seconds after which a unit is killed. Default: stop_seconds in the file.", **NUMBER),
    ] = None,
) -> None:
    """Stop a cluster, or some units: running requests finish; routers stop first.

    [bold]Examples[/]

    trunkline launch stop cluster.yaml

    trunkline launch stop cluster.yaml group-1
    """
    path, units = split(words or [])

    def action() -> int:
        check_range("--seconds", seconds, 0, _SECONDS_MAX)
        return commands.stop(path, units, seconds)

    raise typer.Exit(run(action))


@app.command()
def restart(words: _Words = None, start_seconds: _Start = 1800.0) -> None:
    """Restart units as the file says: one group after the other, then routers.

    Each is ready before the next one stops. If one does not come back, the
    others are left as they are.

    [bold]Example[/]

    trunkline launch restart cluster.yaml group-0 routers
    """
    path, units = split(words or [])
    options = commands.UpOptions(detach=True, keep=True, start_s=start_seconds, restart=tuple(units))
    raise typer.Exit(run(lambda: _up(path or Path(launched(None).file), options)))


@app.command()
def schema() -> None:
    """Print the JSON schema of the file, for editors.

    [bold]Example[/]

    trunkline launch schema > cluster.schema.json
    """
    typer.echo(json.dumps(file_schema(), indent=2))


@app.command(hidden=True)
def agent() -> None:
    """Run the agent of a host, for the launcher."""
    raise typer.Exit(host_agent.main())
