"""The commands that serve: `serve`, `group`, `workers` and `router`, and the `trunkline` command with only these.

The less its command imports, the sooner a server is ready: what the other commands need stays in `app.py`.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final

import typer
from typer.core import TyperGroup

import trunkline.runtime.light_imports  # noqa: F401 (before what imports structlog)
from trunkline.deploy.cli.option_commands import HintingCommand, command, run
from trunkline.deploy.config.node_settings import Kind, NodeSettings
from trunkline.deploy.config.options import OPTIONS_OF, SERVE_OPTIONS
from trunkline.deploy.config.settings import ServeSettings
from trunkline.deploy.node.node import run_node
from trunkline.deploy.supervisor.serve import serve as run_cluster

START: Final = "To begin with"
HOSTS: Final = "A cluster on several hosts"


def new_app(cls: type[TyperGroup] = TyperGroup) -> typer.Typer:
    """Return the `trunkline` command with the commands of this file."""
    app = typer.Typer(
        name="trunkline",
        cls=cls,
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.command(rich_help_panel=START, cls=HintingCommand)(serve)
    for each in (group, workers, router):
        app.command(rich_help_panel=HOSTS, cls=HintingCommand)(each)
    return app


@command(SERVE_OPTIONS, has_config=True)
def serve(given: dict[str, Any]) -> None:
    """Serve a model over an OpenAI-compatible HTTP API.

    Starts a router, and a controller with workers for each copy of the model. A
    process that dies is started again, and its requests go on. Ctrl-C or
    SIGTERM stops the cluster: running requests finish within --drain-seconds,
    new ones get HTTP 503; a second Ctrl-C stops at once.

    Exit code: 0 after such a stop, 1 if the cluster failed, 2 if it cannot work
    as asked (nothing was started).

    [bold]Examples[/]

    trunkline serve [dim]# the demo model[/]

    trunkline serve ./my-llama --tp 4 --dtype bfloat16 --kv-memory 4GiB

    trunkline serve OWNER/NAME --groups 2 --tp 1 --port 9000
    """
    raise typer.Exit(run(lambda: run_cluster(ServeSettings(**given))))


def _run(kind: Kind, given: dict[str, Any]) -> None:
    own = {field.name for field in fields(NodeSettings)}
    node = NodeSettings(**{name: value for name, value in given.items() if name in own})
    settings = ServeSettings(**{name: value for name, value in given.items() if name not in own})
    raise typer.Exit(run(lambda: run_node(kind, settings, node)))


@command(OPTIONS_OF[Kind.GROUP])
def group(given: dict[str, Any]) -> None:
    """Run a copy of the model on this host: a group of a controller and workers.

    Routers on other hosts connect to --listen. With --tp 4 --ranks 0-1, ranks 2
    and 3 run on another host, by `trunkline workers`. A process that dies is
    started again. SIGTERM stops the group: running requests finish, and those
    that need longer than --drain-seconds go on in another group.

    [bold]Examples[/]

    trunkline group ./my-llama --tp 2 --listen 10.0.0.1:7400 --wire-keys wire.key

    trunkline group ./my-llama --tp 4 --ranks 0-1 --listen 10.0.0.1:7400 --wire-keys wire.key
    """
    _run(Kind.GROUP, given)


@command(OPTIONS_OF[Kind.WORKERS])
def workers(given: dict[str, Any]) -> None:
    """Run further ranks of a group whose controller and rank 0 run on another
    host.

    They connect to the leader as soon as it is up, and again after each loss.
    Model, number format and sizes must be the leader's; otherwise it refuses
    them.

    [bold]Example[/]

    trunkline workers ./my-llama --tp 4 --ranks 2-3 --leader 10.0.0.1:7400 --wire-keys wire.key
    """
    _run(Kind.WORKERS, given)


@command(OPTIONS_OF[Kind.ROUTER])
def router(given: dict[str, Any]) -> None:
    """Serve the API for groups that run on other hosts, or on this one.

    MODEL is needed for its tokenizer and chat template, not for its weights.
    Groups may start later, stop and come back. SIGTERM stops the router: new
    requests get 503, running ones finish within --drain-seconds.

    [bold]Example[/]

    trunkline router ./my-llama --controllers 10.0.0.1:7400,10.0.0.2:7400 --wire-keys wire.key
    """
    _run(Kind.ROUTER, given)


def main() -> None:
    """Run the command."""
    new_app()(prog_name="trunkline")
