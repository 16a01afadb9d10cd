"""The `trunkline` command. Light on purpose: what needs the network stack or torch runs in child processes."""

from __future__ import annotations

from dataclasses import fields
from importlib.metadata import version as package_version
from typing import Annotated, Any

import typer

from trunkline.deploy import chat as chat_client
from trunkline.deploy import cluster_cli, schema_cli
from trunkline.deploy.reporting import run
from trunkline.deploy.serve import serve as run_cluster
from trunkline.deploy.settings import POLICIES, ServeSettings
from trunkline.deploy.sizes import parse_bytes
from trunkline.deploy.tenant_options import parse_tenant_limits
from trunkline.deploy.tier_options import parse_disk_tier

app = typer.Typer(
    name="trunkline",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(schema_cli.app, name="schema", rich_help_panel="Commands")

_MODEL = "Model"
_CLUSTER = "Cluster"
_MEMORY = "Memory and batching"
_SERVER = "Server"


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
def serve(
    model: Annotated[
        str,
        typer.Argument(help="'demo', a local Hugging Face folder, or a hub name OWNER/NAME.", metavar="MODEL"),
    ] = ServeSettings.model,
    groups: Annotated[
        int,
        typer.Option(help="Independent copies of the model, each with a controller.", rich_help_panel=_CLUSTER),
    ] = ServeSettings.groups,
    tp: Annotated[
        int, typer.Option(help="Tensor-parallel workers per group.", rich_help_panel=_CLUSTER)
    ] = ServeSettings.tp,
    routers: Annotated[
        int, typer.Option(help="Router processes that share the port.", rich_help_panel=_CLUSTER)
    ] = ServeSettings.routers,
    policy: Annotated[
        str,
        typer.Option(help=f"How a group is chosen: {', '.join(POLICIES)}.", rich_help_panel=_CLUSTER),
    ] = ServeSettings.policy,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart/--no-restart",
            help="Start processes again that die; else the cluster stops with the first.",
            rich_help_panel=_CLUSTER,
        ),
    ] = ServeSettings.restart,
    resume_seconds: Annotated[
        float,
        typer.Option(
            help="How long requests and streams wait for a group when there is none; 0: they fail.",
            rich_help_panel=_CLUSTER,
        ),
    ] = ServeSettings.resume_seconds,
    device: Annotated[
        str, typer.Option(help="auto, cpu or cuda.", rich_help_panel=_CLUSTER)
    ] = ServeSettings.device,
    threads: Annotated[
        int | None,
        typer.Option(help="CPU threads per worker. Default: the cores, shared equally.", rich_help_panel=_CLUSTER),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16.", rich_help_panel=_MODEL),
    ] = ServeSettings.dtype,
    max_context: Annotated[
        int | None,
        typer.Option(
            help="Longest prompt + answer, in tokens. Default: what the model allows.", rich_help_panel=_MODEL
        ),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="The name that clients use for the model.", rich_help_panel=_MODEL)
    ] = None,
    kernels: Annotated[
        str, typer.Option(help="auto (the fastest that runs), cpu, cuda or reference.", rich_help_panel=_MODEL)
    ] = ServeSettings.kernels,
    quantization: Annotated[
        str, typer.Option(help="none, or int8 weights (activations stay as they are).", rich_help_panel=_MODEL)
    ] = ServeSettings.quantization,
    tool_call_parser: Annotated[
        str,
        typer.Option(
            help="How the model writes tool calls: auto, hermes, llama3_json, mistral.", rich_help_panel=_MODEL
        ),
    ] = ServeSettings.tool_call_parser,
    chunk_size: Annotated[
        int, typer.Option(help="Tokens per KV chunk.", rich_help_panel=_MEMORY)
    ] = ServeSettings.chunk_size,
    kv_memory: Annotated[
        str | None, typer.Option(help="KV memory per worker, such as 512MiB or 1GiB.", rich_help_panel=_MEMORY)
    ] = None,
    host_tier: Annotated[
        str | None,
        typer.Option(
            help="Host memory per worker for KV that is not on the device, such as 1GiB; 0: none.",
            rich_help_panel=_MEMORY,
        ),
    ] = None,
    disk_tier: Annotated[
        str | None,
        typer.Option(
            metavar="PATH:SIZE|SIZE|0",
            help="Disk space of all workers together for KV that survives restarts, such as /data/kv:50GiB; 0: "
            "none. Default: a tenth of what is free, 10 GiB at most, in the user's cache folder.",
            rich_help_panel=_MEMORY,
        ),
    ] = None,
    remote_tier: Annotated[
        str,
        typer.Option(
            metavar="redis://HOST:PORT/DB",
            help="Redis or Valkey server for KV that several clusters share (rediss: with TLS).",
            rich_help_panel=_MEMORY,
        ),
    ] = ServeSettings.remote_tier,
    tier_policy: Annotated[
        str,
        typer.Option(
            help="What leaves host and disk first: look-ahead (goes by the queue), lru or fifo.",
            rich_help_panel=_MEMORY,
        ),
    ] = ServeSettings.tier_policy,
    session_ttl: Annotated[
        float,
        typer.Option(
            help="Seconds without use after which KV is forgotten; 0: no limit.", rich_help_panel=_MEMORY
        ),
    ] = ServeSettings.session_ttl,
    preemption: Annotated[
        str,
        typer.Option(
            help="How preempted requests come back: auto (what is faster), swap or recompute.",
            rich_help_panel=_MEMORY,
        ),
    ] = ServeSettings.preemption,
    target_itl_ms: Annotated[
        float,
        typer.Option(
            help="Time between tokens that prompts should not push streams beyond; 0: no target.",
            rich_help_panel=_MEMORY,
        ),
    ] = ServeSettings.target_itl_ms,
    max_batch: Annotated[
        int, typer.Option(help="Sequences that decode in one step at most.", rich_help_panel=_MEMORY)
    ] = ServeSettings.max_batch,
    token_budget: Annotated[
        int, typer.Option(help="Tokens computed in one step at most.", rich_help_panel=_MEMORY)
    ] = ServeSettings.token_budget,
    max_waiting: Annotated[
        int,
        typer.Option(help="Requests that may wait per group; more get HTTP 429.", rich_help_panel=_MEMORY),
    ] = ServeSettings.max_waiting,
    prefix_cache: Annotated[
        bool,
        typer.Option(
            "--prefix-cache/--no-prefix-cache", help="Reuse KV of equal prefixes.", rich_help_panel=_MEMORY
        ),
    ] = ServeSettings.prefix_cache,
    host: Annotated[
        str,
        typer.Option(help="Address to listen on; 0.0.0.0 lets other machines connect.", rich_help_panel=_SERVER),
    ] = ServeSettings.host,
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 takes any free one.", rich_help_panel=_SERVER)
    ] = ServeSettings.port,
    tenants: Annotated[
        str,
        typer.Option(metavar="FILE", help="JSON file with limits of single tenants.", rich_help_panel=_SERVER),
    ] = ServeSettings.tenants,
    tenant_limits: Annotated[
        str,
        typer.Option(
            metavar="NAME=N,…",
            help="Limits of other tenants: requests (at once), requests_per_minute, tokens_per_minute, priority.",
            rich_help_panel=_SERVER,
        ),
    ] = "",
    tenant_header: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Header in which a gateway names the tenant. Default: keys tell tenants apart.",
            rich_help_panel=_SERVER,
        ),
    ] = ServeSettings.tenant_header,
    idempotency_ttl: Annotated[
        float,
        typer.Option(
            help="Seconds for which answers are kept for retries with an Idempotency-Key; 0: none are.",
            rich_help_panel=_SERVER,
        ),
    ] = ServeSettings.idempotency_ttl,
    drain_seconds: Annotated[
        float,
        typer.Option(help="How long running requests may finish after a stop or drain.", rich_help_panel=_SERVER),
    ] = ServeSettings.drain_seconds,
    log_level: Annotated[
        str, typer.Option(help="debug, info, warning or error.", rich_help_panel=_SERVER)
    ] = ServeSettings.log_level,
) -> None:
    """Serve a model over an OpenAI-compatible API: starts and supervises router, controllers and workers.

    Ctrl-C or SIGTERM stops it: running requests finish (see --drain-seconds), new ones get 503; a second
    Ctrl-C stops at once. A process that dies is started again; its streams go on. Exit code: 0 after a stop that
    was asked for, 1 if the cluster failed, 2 if what was asked for is impossible (nothing was started then).

    [bold]Examples[/]

    trunkline serve

    trunkline serve ./my-llama --tp 4 --dtype bfloat16 --kv-memory 4GiB

    trunkline serve --groups 2 --tp 1 --port 9000 --served-model-name mine
    """
    given: dict[str, Any] = dict(locals())
    given["kv_memory_bytes"] = run(lambda: None if kv_memory is None else parse_bytes(kv_memory, "--kv-memory"))
    given["disk_tier"] = run(lambda: None if disk_tier is None else parse_disk_tier(disk_tier))
    given["tenant_limits"] = run(lambda: parse_tenant_limits(tenant_limits))
    given["host_tier_bytes"] = run(lambda: None if host_tier is None else _size_or_none(host_tier))
    settings = ServeSettings(**{field.name: given[field.name] for field in fields(ServeSettings)})
    raise typer.Exit(run(lambda: run_cluster(settings)))


@app.command(rich_help_panel="Commands")
def chat(
    url: Annotated[str, typer.Option(help="Where the server is.")] = chat_client.DEFAULT_URL,
    model: Annotated[str | None, typer.Option(help="Model name. Default: the first that is served.")] = None,
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 always takes the likeliest token.")] = None,
) -> None:
    """Talk to a running server in the terminal.

    Commands inside: /reset forgets the conversation, /system TEXT sets the system prompt, /quit leaves.
    Ctrl-C stops the answer. Input may also be piped: every line is a message.

    [bold]Examples[/]

    trunkline chat --system "You are terse."

    echo "What does os.path.join do?" | trunkline chat --temperature 0
    """
    options = chat_client.ChatOptions(
        url=url, model=model, system=system, max_tokens=max_tokens, temperature=temperature
    )
    raise typer.Exit(run(lambda: chat_client.chat(options)))


cluster_cli.add_to(app, "Commands")


@app.command(rich_help_panel="Commands")
def version() -> None:
    """Print the installed version."""
    _print_version(True)


def _size_or_none(host_tier: str) -> int:
    return 0 if host_tier.strip() == "0" else parse_bytes(host_tier, "--host-tier")


def main() -> None:
    """The console script's entry point."""
    app(prog_name="trunkline")


if __name__ == "__main__":
    main()
