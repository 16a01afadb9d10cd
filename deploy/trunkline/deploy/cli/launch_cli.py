"""`trunkline launch` on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from trunkline.deploy.launch import agent as host_agent
from trunkline.deploy.launch import commands
from trunkline.deploy.launch.fileformat import schema as file_schema
from trunkline.deploy.launch.loading import DEFAULT_FILE, is_file, launched, split
from trunkline.deploy.reporting import run

_File = Annotated[Path, typer.Argument(help="Describes the cluster (docs/launch.md).", metavar="FILE")]
_Words = Annotated[
    list[str] | None,
    typer.Argument(
        help="The file first, unless one cluster only was launched; then units, groups, or routers. Default: all.",
        metavar="[FILE] [UNIT]...",
    ),
]
_OptionalFile = Annotated[
    str | None, typer.Argument(help="Default: cluster.yaml, or what was launched.", metavar="[FILE]")
]
_Start = Annotated[float, typer.Option(help="How long units may take to be ready.")]


class _UpByDefault(TyperGroup):
    """`trunkline launch FILE` is `trunkline launch up FILE`."""

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
    help="""A cluster on several hosts, described by a file: start it, look at it, stop it.

    [bold]Examples[/]

    trunkline launch cluster.yaml  [dim]# start it, and stay; Ctrl-C stops it[/]

    trunkline launch up cluster.yaml --detach  [dim]# start it, or what has changed in the file[/]

    trunkline launch check cluster.yaml  [dim]# who would run what where[/]

    trunkline launch logs cluster.yaml group-0 -f

    trunkline launch stop cluster.yaml
    """,
)


@app.command()
def up(
    file: _File = DEFAULT_FILE,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Leave it alone once it is ready, instead of staying.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Restart what runs in another way than the file says.")
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="If it fails, leave what was started.")] = False,
    start_seconds: _Start = 1800.0,
) -> None:
    """Start a cluster, or what is missing of it, and wait until it is ready.

    What runs already as the file says stays as it is. Exit code: 0, 1 if it failed, 2 if what the file asks for
    is impossible, 130 after Ctrl-C while it started. Ctrl-C stops what this command has started.

    [bold]Examples[/]

    trunkline launch cluster.yaml

    trunkline launch up cluster.yaml --detach --yes
    """
    options = commands.UpOptions(detach=detach, yes=yes, keep=keep, start_s=start_seconds)
    raise typer.Exit(run(lambda: commands.up(file, options)))


@app.command()
def check(
    file: _File = DEFAULT_FILE,
    hosts: Annotated[
        bool, typer.Option("--hosts", help="Ask the hosts, too: whether they can be reached.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Read a file, and show who would run what where, with which command line. Nothing is started.

    [bold]Example[/]

    trunkline launch check cluster.yaml --hosts
    """
    raise typer.Exit(run(lambda: commands.check(file, with_hosts=hosts, as_json=as_json)))


@app.command()
def status(
    file: _OptionalFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show how the units of a cluster are. Exit code 0: all are ready.

    [bold]Example[/]

    trunkline launch status cluster.yaml --json | jq '.units[].state'
    """
    path = Path(file) if file else None
    raise typer.Exit(run(lambda: commands.status(path, as_json=as_json)))


@app.command()
def logs(
    words: _Words = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of each unit.")] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="And then new ones, until Ctrl-C.")] = False,
) -> None:
    """Print what units wrote last.

    [bold]Example[/]

    trunkline launch logs cluster.yaml group-0 --follow
    """
    path, units = split(words or [])
    raise typer.Exit(run(lambda: commands.logs(path, units, lines, follow=follow)))


@app.command()
def stop(
    words: _Words = None,
    seconds: Annotated[
        float | None, typer.Option(help="After which a unit is killed. Default: stop_seconds of the file.", min=0)
    ] = None,
) -> None:
    """Stop a cluster, or some units: running requests finish; routers stop first.

    [bold]Examples[/]

    trunkline launch stop cluster.yaml

    trunkline launch stop cluster.yaml group-1
    """
    path, units = split(words or [])
    raise typer.Exit(run(lambda: commands.stop(path, units, seconds)))


@app.command()
def restart(words: _Words = None, start_seconds: _Start = 1800.0) -> None:
    """Restart units as the file says: one group after the other, then routers.

    Each is ready before the next one stops. The first that does not come back ends it.

    [bold]Example[/]

    trunkline launch restart cluster.yaml group-0 routers
    """
    path, units = split(words or [])
    options = commands.UpOptions(detach=True, keep=True, start_s=start_seconds, restart=tuple(units))
    raise typer.Exit(run(lambda: commands.up(path or Path(launched(None).file), options)))


@app.command()
def schema() -> None:
    """Print the JSON schema of the file, for editors.

    [bold]Example[/]

    trunkline launch schema > cluster.schema.json
    """
    typer.echo(json.dumps(file_schema(), indent=2))


@app.command(hidden=True)
def agent() -> None:
    """What the launcher runs on each host."""
    raise typer.Exit(host_agent.main())
