"""The `trunkline` command with all its commands; those that serve are in `serving.py`. It imports little: the
network stack and torch are for the processes that it starts."""

from __future__ import annotations

from importlib.metadata import version as package_version
from typing import Annotated, Final

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
from trunkline.deploy.cli.option_commands import NUMBER, WHOLE, Port, Url, run
from trunkline.deploy.cli.serving import HOSTS, START, new_app

RUNNING: Final = "A cluster that runs on this machine"
FILES: Final = "Keys, sizes, prompt schemas"
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


app = new_app(OrderedGroup)
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


@app.command(rich_help_panel=START)
def chat(
    port: Port = None,
    url: Url = "",
    model: Annotated[
        str | None, typer.Option(help="Name of the model. Default: the first that is served.")
    ] = None,
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.", **WHOLE)] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 always takes the likeliest token.", **NUMBER)
    ] = None,
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
        port=port,
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


def main() -> None:
    """The console script's entry point."""
    app(prog_name="trunkline")


if __name__ == "__main__":
    main()
