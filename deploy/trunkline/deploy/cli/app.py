"""The `trunkline` command. Light on purpose: what needs the network stack or torch runs in child processes."""

from __future__ import annotations

from importlib.metadata import version as package_version
from typing import Annotated, Any

import typer

from trunkline.deploy.cli import chat as chat_client
from trunkline.deploy.cli import (
    cluster_cli,
    doctor_cli,
    keys_cli,
    launch_cli,
    local_cli,
    node_cli,
    schema_cli,
    sizing_cli,
    top_cli,
)
from trunkline.deploy.config.options import SERVE_OPTIONS, command
from trunkline.deploy.config.settings import ServeSettings
from trunkline.deploy.reporting import run
from trunkline.deploy.supervisor.serve import serve as run_cluster

app = typer.Typer(
    name="trunkline",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(schema_cli.app, name="schema", rich_help_panel="Commands")
app.add_typer(keys_cli.app, name="key", rich_help_panel="Commands")
app.add_typer(launch_cli.app, name="launch", rich_help_panel="Commands")
app.command("size", rich_help_panel="Commands")(sizing_cli.command)
app.command("top", rich_help_panel="Commands")(top_cli.command)
app.command("doctor", rich_help_panel="Commands")(doctor_cli.command)


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
    """A distributed LLM serving cluster that never computes, stores or moves the same KV twice.

    [bold]Examples[/]

    trunkline serve  [dim]# the embedded demo model[/]

    trunkline serve ./my-llama --tp 4  [dim]# a folder, over four workers[/]

    trunkline serve OWNER/NAME --groups 2  [dim]# a hub model, twice[/]

    trunkline chat  [dim]# talk to a running server[/]

    trunkline restart  [dim]# a running cluster, without losing a request[/]

    trunkline schema lint trip.pml  [dim]# prompts made of cached modules[/]
    """


@app.command(rich_help_panel="Commands")
@command(ServeSettings, SERVE_OPTIONS)
def serve(given: dict[str, Any]) -> None:
    """Serve a model over an OpenAI-compatible API: starts and supervises router, controllers and workers.

    Ctrl-C or SIGTERM stops it: running requests finish (see --drain-seconds), new ones get 503; a second
    Ctrl-C stops at once. A process that dies is started again; its streams go on. Exit code: 0 after a stop that
    was asked for, 1 if the cluster failed, 2 if what was asked for is impossible (nothing was started then).

    [bold]Examples[/]

    trunkline serve

    trunkline serve ./my-llama --tp 4 --dtype bfloat16 --kv-memory 4GiB

    trunkline serve --groups 2 --tp 1 --port 9000 --served-model-name mine
    """
    raise typer.Exit(run(lambda: run_cluster(ServeSettings(**given))))


@app.command(rich_help_panel="Commands")
def chat(
    url: Annotated[str, typer.Option(help="Where the server is.")] = chat_client.DEFAULT_URL,
    model: Annotated[str | None, typer.Option(help="Model name. Default: the first that is served.")] = None,
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 always takes the likeliest token.")] = None,
    api_key_file: Annotated[str, typer.Option(metavar="FILE", help="File with a key; or TRUNKLINE_API_KEY.")] = "",
) -> None:
    """Talk to a running server in the terminal.

    Commands inside: /reset forgets the conversation, /system TEXT sets the system prompt, /quit leaves.
    Ctrl-C stops the answer. Input may also be piped: every line is a message.

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


cluster_cli.add_to(app, "Commands")
local_cli.add_to(app, "Commands")
node_cli.add_to(app, "Parts of a cluster, on several hosts or in pods")


@app.command(rich_help_panel="Commands")
def version() -> None:
    """Print the installed version."""
    _print_version(True)


def main() -> None:
    """The console script's entry point."""
    app(prog_name="trunkline")


if __name__ == "__main__":
    main()
