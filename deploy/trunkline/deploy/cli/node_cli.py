"""`trunkline group`, `workers` and `router` on the command line."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final

import typer

from trunkline.deploy.config.node_settings import Kind, NodeSettings
from trunkline.deploy.config.options import NODE, SERVE_OPTIONS, CliOption, command
from trunkline.deploy.config.settings import ServeSettings
from trunkline.deploy.node.node import run_node
from trunkline.deploy.reporting import run

_CLUSTER_ONLY: Final = frozenset({"groups", "ranks_here"})
"""What only `serve` makes use of."""
_ROUTER_ONLY: Final = frozenset(
    """served_model_name tool_call_parser routers policy resume_seconds host port tenants tenant_limits
    tenant_header idempotency_ttl api_key_file allow_anonymous allowed_hosts cors_origins""".split()
)
_ENGINE_ONLY: Final = frozenset(
    """tp dtype device threads kernels quantization chunk_size kv_memory_bytes gpu_memory_fraction host_tier_bytes
    disk_tier
    remote_tier tier_policy session_ttl preemption target_itl_ms max_batch token_budget max_waiting
    prefix_cache""".split()
)
_CONTROLLER_ONLY: Final = frozenset(
    {"tier_policy", "preemption", "target_itl_ms", "max_batch", "token_budget", "max_waiting"}
)

NODE_OPTIONS: Final = (
    CliOption(
        "listen",
        "Address and first port of the group: five in a row, for requests, KV events, step plans, reports and the "
        "meeting of the ranks; the last three only if --ranks leaves some to other hosts.",
        NODE,
        metavar="HOST:PORT",
    ),
    CliOption("leader", "What the group with rank 0 listens on.", NODE, metavar="HOST:PORT"),
    CliOption(
        "controllers",
        "What the groups listen on; ranges in names as in group-{0..3}.group:7400. They may come later.",
        NODE,
        metavar="HOST:PORT,…",
    ),
    CliOption(
        "ranks",
        "Those that run here. Default of a group: all; others join by `workers`. With it, --tp is 2 by default.",
        NODE,
        metavar="A-B",
    ),
    CliOption(
        "wire_keys",
        "Keys of the sockets between hosts; `trunkline key wire FILE` makes some.",
        NODE,
        metavar="FILE",
    ),
    CliOption(
        "plain_tcp", "No keys: for tests, and networks in which nobody else is.", NODE, flags=("--plain-tcp",)
    ),
    CliOption("health_host", "Address to listen on for --health-port.", NODE),
    CliOption("health_port", "Port for /livez, /readyz and /startupz of this part; 0: none.", NODE),
)
"""Of `NodeSettings`."""

_KEYS: Final = ("wire_keys", "plain_tcp", "health_host", "health_port")


def _options(without: frozenset[str], *own: str) -> tuple[CliOption, ...]:
    chosen = tuple(option for option in SERVE_OPTIONS if option.field not in without | _CLUSTER_ONLY)
    own_options = tuple(option for option in NODE_OPTIONS if option.field in (*own, *_KEYS))
    return (*chosen[:1], *own_options, *chosen[1:])  # MODEL comes first


def _run(kind: Kind, given: dict[str, Any]) -> None:
    own = {field.name for field in fields(NodeSettings)}
    node = NodeSettings(**{name: value for name, value in given.items() if name in own})
    settings = ServeSettings(**{name: value for name, value in given.items() if name not in own})
    raise typer.Exit(run(lambda: run_node(kind, settings, node)))


@command((NodeSettings, ServeSettings), _options(_ROUTER_ONLY, "listen", "ranks"))
def group(given: dict[str, Any]) -> None:
    """Run a group on this host: a controller and its workers, or those of its ranks that run here.

    Routers elsewhere find it by --listen. With --ranks 0-1 of --tp 4, the other two run on other hosts, by
    `trunkline workers`. Processes that die are started again. SIGTERM drains: running requests finish, and what is
    left after --drain-seconds goes on in another group.

    [bold]Examples[/]

    trunkline group ./my-llama --tp 2 --listen 10.0.0.1:7400 --wire-keys wire.key

    trunkline group ./my-llama --tp 4 --ranks 0-1 --listen 10.0.0.1:7400 --wire-keys wire.key
    """
    _run(Kind.GROUP, given)


@command((NodeSettings, ServeSettings), _options(_ROUTER_ONLY | _CONTROLLER_ONLY, "leader", "ranks"))
def workers(given: dict[str, Any]) -> None:
    """Run further ranks of a group whose controller and rank 0 run on another host.

    They connect to the leader, now or when it is there, and form the group again after each loss. Model, precision
    and sizes must be the leader's: a rank that has others is refused.

    [bold]Example[/]

    trunkline workers ./my-llama --tp 4 --ranks 2-3 --leader 10.0.0.1:7400 --wire-keys wire.key
    """
    _run(Kind.WORKERS, given)


@command((NodeSettings, ServeSettings), _options(_ENGINE_ONLY, "controllers"))
def router(given: dict[str, Any]) -> None:
    """Serve the API for groups that run elsewhere, or on this host.

    MODEL is needed for its tokenizer and chat template; the weights are not. Groups may come later, go, and come
    back. SIGTERM drains: new requests get 503, running ones finish within --drain-seconds.

    [bold]Example[/]

    trunkline router ./my-llama --controllers 10.0.0.1:7400,10.0.0.2:7400 --wire-keys wire.key
    """
    _run(Kind.ROUTER, given)


def add_to(app: typer.Typer, panel: str) -> None:
    """Make these commands known."""
    for function in (group, workers, router):
        app.command(rich_help_panel=panel)(function)
