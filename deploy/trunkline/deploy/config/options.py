"""The options of `serve`, `group`, `workers` and `router`: one table, of which each command has the part it needs.

To add an option: a field with its default in `ServeSettings` (or `NodeSettings`), and a line in the table, at the
place where `--help` should show it. Its type is the field's, unless what is typed has to be parsed first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import wraps
from typing import Annotated, Any, Final, get_type_hints

import typer

from trunkline.deploy.config.settings import POLICIES
from trunkline.deploy.config.sizes import parse_bytes
from trunkline.deploy.config.tenant_options import parse_names, parse_tenant_limits
from trunkline.deploy.config.tier_options import parse_disk_tier
from trunkline.deploy.reporting import run

MODEL: Final = "Model"
CLUSTER: Final = "Cluster"
MEMORY: Final = "Memory and batching"
SERVER: Final = "Server"
NODE: Final = "This part of the cluster"


@dataclass(frozen=True)
class CliOption:
    """How a field of the settings is given on the command line."""

    field: str
    help: str
    panel: str
    name: str = ""
    """Of the parameter, if it is not the field's."""
    flags: tuple[str, ...] = ()
    """As in `--on/--off`, if the name does not say it."""
    metavar: str | None = None
    parse: Callable[[str], Any] | None = None
    """From the text that is typed. Raises `UserError`."""
    is_argument: bool = False
    variable: str | None = None
    """Of the environment, that means the same: for what others should not read on a command line."""

    @property
    def parameter(self) -> str:
        return self.name or self.field

    def annotation(self, field_type: Any) -> Any:
        """For a command's signature."""
        if self.is_argument:
            return Annotated[str, typer.Argument(help=self.help, metavar=self.metavar)]
        shown = (str | None) if self.parse is not None else field_type
        return Annotated[
            shown,
            typer.Option(
                *self.flags,
                help=self.help,
                metavar=self.metavar,
                rich_help_panel=self.panel,
                envvar=self.variable,
            ),
        ]


def _parse_host_tier(text: str) -> int:
    return 0 if text.strip() == "0" else parse_bytes(text, "--host-tier")


SERVE_OPTIONS: Final = (
    CliOption(
        "model",
        "'demo', a local Hugging Face folder, or a hub name OWNER/NAME.",
        MODEL,
        metavar="MODEL",
        is_argument=True,
    ),
    CliOption("groups", "Independent copies of the model, each with a controller.", CLUSTER),
    CliOption(
        "tp",
        "Tensor-parallel workers per group. Default: on GPUs as many as each group can have one for and the model "
        "can be split over, on CPUs 2.",
        CLUSTER,
    ),
    CliOption("routers", "Router processes that share the port.", CLUSTER),
    CliOption("policy", f"How a group is chosen: {', '.join(POLICIES)}.", CLUSTER),
    CliOption(
        "restart",
        "Start processes again that die; else the cluster stops with the first.",
        CLUSTER,
        flags=("--restart/--no-restart",),
    ),
    CliOption(
        "resume_seconds",
        "How long requests and streams wait for a group when there is none; 0: they fail.",
        CLUSTER,
    ),
    CliOption("device", "auto (cuda where there is a GPU), cpu or cuda.", CLUSTER),
    CliOption("threads", "CPU threads per worker. Default: the cores, shared equally.", CLUSTER),
    CliOption("dtype", "auto (the checkpoint's), float32, bfloat16 or float16.", MODEL),
    CliOption("max_context", "Longest prompt + answer, in tokens. Default: what the model allows.", MODEL),
    CliOption("served_model_name", "The name that clients use for the model.", MODEL),
    CliOption("kernels", "auto (the device's own), cpu, cuda or reference (slow).", MODEL),
    CliOption("quantization", "none, or int8 weights (activations stay as they are).", MODEL),
    CliOption("tool_call_parser", "How the model writes tool calls: auto, hermes, llama3_json, mistral.", MODEL),
    CliOption("chunk_size", "Tokens per KV chunk.", MEMORY),
    CliOption(
        "kv_memory_bytes",
        "KV memory per worker, such as 512MiB or 1GiB.",
        MEMORY,
        name="kv_memory",
        parse=lambda text: parse_bytes(text, "--kv-memory"),
    ),
    CliOption(
        "gpu_memory_fraction",
        "Share of each GPU's memory that a worker may use, 0.9 by default. Given, groups may share GPUs as far as "
        "the shares fit.",
        MEMORY,
    ),
    CliOption(
        "host_tier_bytes",
        "Host memory per worker for KV that is not on the device, such as 1GiB; 0: none.",
        MEMORY,
        name="host_tier",
        parse=_parse_host_tier,
    ),
    CliOption(
        "disk_tier",
        "Disk space of all workers together for KV that survives restarts, such as /data/kv:50GiB; 0: "
        "none. Default: a tenth of what is free, 10 GiB at most, in the user's cache folder.",
        MEMORY,
        metavar="PATH:SIZE|SIZE|0",
        parse=parse_disk_tier,
    ),
    CliOption(
        "remote_tier",
        "Redis or Valkey server for KV that several clusters share (rediss: with TLS; unix:///PATH?db=DB: a "
        "socket of this host).",
        MEMORY,
        metavar="redis://HOST:PORT/DB",
        variable="TRUNKLINE_REMOTE_TIER",
    ),
    CliOption(
        "tier_policy", "What leaves host and disk first: look-ahead (goes by the queue), lru or fifo.", MEMORY
    ),
    CliOption("session_ttl", "Seconds without use after which KV is forgotten; 0: no limit.", MEMORY),
    CliOption("preemption", "How preempted requests come back: auto (what is faster), swap or recompute.", MEMORY),
    CliOption(
        "target_itl_ms",
        "Time between tokens that prompts should not push streams beyond; 0: no target.",
        MEMORY,
    ),
    CliOption("max_batch", "Sequences that decode in one step at most.", MEMORY),
    CliOption("token_budget", "Tokens computed in one step at most.", MEMORY),
    CliOption("max_waiting", "Requests that may wait per group; more get HTTP 429.", MEMORY),
    CliOption("prefix_cache", "Reuse KV of equal prefixes.", MEMORY, flags=("--prefix-cache/--no-prefix-cache",)),
    CliOption("host", "Address to listen on; 0.0.0.0 lets other machines connect.", SERVER),
    CliOption("port", "Port to listen on; 0 takes any free one.", SERVER),
    CliOption(
        "tenants",
        "JSON file with tenants, their keys (`trunkline key`) and limits; followed while the cluster runs.",
        SERVER,
        metavar="FILE",
    ),
    CliOption(
        "api_key_file",
        "File with the one key that all clients share; or TRUNKLINE_API_KEY in the environment.",
        SERVER,
        metavar="FILE",
    ),
    CliOption(
        "allow_anonymous",
        "Let everybody who reaches the server use it without a key.",
        SERVER,
        flags=("--allow-anonymous",),
    ),
    CliOption(
        "allowed_hosts",
        "Names under which browsers reach a server without keys, with commas between them.",
        SERVER,
        name="allowed_host",
        metavar="NAME,…",
        parse=parse_names,
    ),
    CliOption(
        "cors_origins",
        "Pages of other servers that may use this one from a browser, as https://chat.example.com.",
        SERVER,
        name="cors_origin",
        metavar="ORIGIN,…",
        parse=parse_names,
    ),
    CliOption(
        "tenant_limits",
        "Limits of other tenants: requests (at once), requests_per_minute, tokens_per_minute, priority.",
        SERVER,
        metavar="NAME=N,…",
        parse=parse_tenant_limits,
    ),
    CliOption(
        "tenant_header",
        "Header in which a gateway names the tenant. Default: keys tell tenants apart.",
        SERVER,
        metavar="NAME",
    ),
    CliOption(
        "idempotency_ttl",
        "Seconds for which answers are kept for retries with an Idempotency-Key; 0: none are.",
        SERVER,
    ),
    CliOption("drain_seconds", "How long running requests may finish after a stop or drain.", SERVER),
    CliOption("log_level", "debug, info (a line for each request), warning or error.", SERVER),
    CliOption("log_format", "text for people, json for a log collector; auto: text.", SERVER),
    CliOption(
        "otlp_endpoint",
        "Collector that traces are sent to, by OTLP over HTTP. Default: as OTEL_EXPORTER_OTLP_ENDPOINT says.",
        SERVER,
        metavar="URL",
    ),
    CliOption("trace_sample", "Part of requests that is traced, 0 to 1. Default: all.", SERVER),
)
"""Of `ServeSettings`."""


def command(
    settings: type | tuple[type, ...], options: Sequence[CliOption]
) -> Callable[[Callable[[dict[str, Any]], None]], Callable[..., None]]:
    """Make a function a command with these options.

    Args:
        settings: the dataclass, or several, whose fields they are, with their types and defaults.

    The function gets the fields' values by name, and its docstring is the command's help.
    """
    records = settings if isinstance(settings, tuple) else (settings,)
    types = {name: hint for record in records for name, hint in get_type_hints(record).items()}
    defaults = {field.name: field.default for record in records for field in fields(record)}

    def make(action: Callable[[dict[str, Any]], None]) -> Callable[..., None]:
        @wraps(action)
        def call(**typed: Any) -> None:
            action(run(lambda: values(options, defaults, typed)))

        parameters = []
        for option in options:
            default = None if option.parse is not None else defaults[option.field]
            parameters.append(
                inspect.Parameter(
                    option.parameter,
                    inspect.Parameter.POSITIONAL_OR_KEYWORD,
                    default=inspect.Parameter.empty if default is MISSING else default,
                    annotation=option.annotation(types[option.field]),
                )
            )
        # What Typer looks at: without it, it would see the parameters of `action`.
        vars(call)["__signature__"] = inspect.Signature(parameters)
        call.__annotations__ = {}
        return call

    return make


def values(options: Sequence[CliOption], defaults: Mapping[str, Any], typed: Mapping[str, Any]) -> dict[str, Any]:
    """Values of the settings' fields.

    Raises:
        UserError: a text cannot be parsed.
    """
    found = {}
    for option in options:
        value = typed[option.parameter]
        if option.parse is not None:
            value = defaults[option.field] if value is None else option.parse(value)
        found[option.field] = value
    return found
