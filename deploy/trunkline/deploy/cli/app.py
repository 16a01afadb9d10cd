"""The `trunkline` command. It imports little: the network stack and torch are for the processes that it starts."""

from __future__ import annotations

from dataclasses import fields
from importlib.metadata import version as package_version
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from trunkline.deploy.cli import chat as chat_client
from trunkline.deploy.cli import (
    cluster_cli,
    keys_cli,
    launch_cli,
    records_cli,
    schema_cli,
    sizing_cli,
    watch_cli,
)
from trunkline.deploy.cli.option_commands import HintingCommand, command, run
from trunkline.deploy.config.machine import DEFAULT_URL
from trunkline.deploy.config.node_settings import Kind, NodeSettings
from trunkline.deploy.config.options import OPTIONS_OF, SERVE_OPTIONS
from trunkline.deploy.config.settings import ServeSettings
from trunkline.deploy.node.node import run_node
from trunkline.deploy.supervisor.serve import serve as run_cluster

START: Final = "To begin with"
RUNNING: Final = "A cluster that runs on this machine"
FILES: Final = "Keys, sizes, prompt schemas"
HOSTS: Final = "A cluster on several hosts"
ORDER: Final = """serve chat ui
    status top doctor scale restart drain undrain flush
    key size schema records
    launch group workers router""".split()
"""Commands in the order in which a newcomer needs them."""


class OrderedGroup(TyperGroup):
    """The commands of `trunkline`, in the order of `ORDER`."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """Return the names in `ORDER`, then the others."""
        return sorted(super().list_commands(ctx), key=lambda name: (name not in ORDER, (*ORDER, name).index(name)))


app = typer.Typer(
    name="trunkline",
    cls=OrderedGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(keys_cli.app, name="key", rich_help_panel=FILES)
app.add_typer(schema_cli.app, name="schema", rich_help_panel=FILES)
app.add_typer(records_cli.app, name="records", rich_help_panel=FILES)
app.add_typer(launch_cli.app, name="launch", rich_help_panel=HOSTS)
app.command("size", rich_help_panel=FILES)(sizing_cli.size)
app.command("top", rich_help_panel=RUNNING)(watch_cli.top)
app.command("doctor", rich_help_panel=RUNNING)(watch_cli.doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trunkline {package_version('trunkline')}")
        raise typer.Exit


@app.callback()
def root(
    _version: Annotated[
        bool,
        typer.Option("--version", help="Print the installed version.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Serve large language models; never compute, store or move the same KV twice.

    [bold]Examples[/]

    trunkline serve [dim]# the demo model, on this machine[/]

    trunkline serve ./my-llama --tp 4 [dim]# a folder, split over four workers[/]

    trunkline chat [dim]# talk to the served model[/]
    """


@app.command(rich_help_panel=START, cls=HintingCommand)
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


@app.command(rich_help_panel=START)
def chat(
    url: Annotated[str, typer.Option(help="Address of the server.")] = DEFAULT_URL,
    model: Annotated[
        str | None, typer.Option(help="Name of the model. Default: the first that is served.")
    ] = None,
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 always takes the likeliest token.")] = None,
    api_key_file: Annotated[
        str, typer.Option(metavar="FILE", help="File with an API key. Default: TRUNKLINE_API_KEY, if set.")
    ] = "",
) -> None:
    """Talk to a running server in the terminal.

    In the chat, /reset forgets the conversation, /system TEXT sets the system
    prompt, /quit leaves, and Ctrl-C stops an answer. Input may also be piped:
    every line is a message.

    [bold]Examples[/]

    trunkline chat --system "You are terse."

    echo "What does os.path.join do?" | trunkline chat --temperature 0
    """
    options = chat_client.ChatOptions(
        url=url,
        model=model,
        system=system,
        max_tokens=max_tokens,
        temperature=temperature,
        api_key_file=api_key_file,
    )
    raise typer.Exit(run(lambda: chat_client.chat(options)))


app.command(rich_help_panel=START)(cluster_cli.ui)
for _of_a_cluster in (
    cluster_cli.flush,
    cluster_cli.status,
    cluster_cli.scale,
    cluster_cli.drain,
    cluster_cli.undrain,
    cluster_cli.restart,
):
    app.command(rich_help_panel=RUNNING)(_of_a_cluster)


@app.command(rich_help_panel="Other")
def version() -> None:
    """Print the installed version."""
    _print_version(True)


def _run(kind: Kind, given: dict[str, Any]) -> None:
    own = {field.name for field in fields(NodeSettings)}
    node = NodeSettings(**{name: value for name, value in given.items() if name in own})
    settings = ServeSettings(**{name: value for name, value in given.items() if name not in own})
    raise typer.Exit(run(lambda: run_node(kind, settings, node)))


@app.command(rich_help_panel=HOSTS, cls=HintingCommand)
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


@app.command(rich_help_panel=HOSTS, cls=HintingCommand)
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


@app.command(rich_help_panel=HOSTS, cls=HintingCommand)
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
    """The console script's entry point."""
    app(prog_name="trunkline")


if __name__ == "__main__":
    main()
