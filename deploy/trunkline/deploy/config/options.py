"""The options of `serve`, `group`, `workers` and `router`, as one table, and which of them each command takes.

To add an option: a field with its default in `ServeSettings` (or `NodeSettings`), and a line in the table, at the
place where `--help` should show it. Its type is the field's, unless the typed text has to be parsed first.
"""

from __future__ import annotations

from typing import Final

from trunkline.deploy.config.cli_option import (
    CLUSTER,
    MEMORY,
    MODEL,
    NODE,
    OPERATION,
    SERVER,
    SWITCHES,
    TUNING,
    CliOption,
)
from trunkline.deploy.config.node_settings import Kind
from trunkline.deploy.config.option_values import (
    parse_adapters,
    parse_bytes,
    parse_disk_tier,
    parse_limit,
    parse_models,
    parse_names,
    parse_tenant_limits,
)
from trunkline.deploy.config.settings import POLICIES

SERVE_OPTIONS: Final = (
    CliOption(
        "model",
        "What to serve: 'demo' (it comes with Trunkline), a folder in Hugging Face format, a GGUF file, or a hub "
        "name OWNER/NAME.",
        MODEL,
        metavar="MODEL",
        is_argument=True,
    ),
    CliOption(
        "served_model_name",
        "Name of the model in the API, or several, the main one first, with commas or by giving the option again; "
        "claude-* stands for all that begin so. "
        "Default: its folder's or hub name.",
        MODEL,
        metavar="NAME,…",
    ),
    CliOption(
        "models",
        "Further models behind the same address, each with a group of its own. Options of each are a mapping in "
        "--config, or JSON.",
        MODEL,
        name="more_models",
        metavar="NAME=MODEL,…",
        parse=parse_models,
    ),
    CliOption(
        "adapters",
        "LoRA adapters of the model, PEFT folders, which requests choose by NAME as their model; several with "
        "commas or by giving the option again.",
        MODEL,
        name="lora",
        metavar="NAME=PATH,…",
        parse=parse_adapters,
    ),
    CliOption("max_lora_rank", "Largest rank of an adapter that is loaded.", MODEL),
    CliOption(
        "lora_updates",
        "Let requests with an admin's key load and unload adapters (/v1/load_lora_adapter).",
        MODEL,
        flags=("--lora-updates/--no-lora-updates",),
    ),
    CliOption("max_context", "Longest prompt and answer together, in tokens. Default: the model's limit.", MODEL),
    CliOption(
        "rope_scaling",
        "Scale rotary positions (yarn, linear), so that --max-context may be more than the model was made for. "
        "Answers over long texts get worse. none: the model's own positions.",
        MODEL,
    ),
    CliOption("ep", "on: each worker of a group has whole experts; off: it has a part of every one.", MODEL),
    CliOption(
        "dtype",
        "Number format of weights and KV: float32, bfloat16, float16, or auto (the model's own on GPUs, float32 "
        "on CPUs).",
        MODEL,
    ),
    CliOption("kv_dtype", "int8 or fp8 keeps KV in 8 bits, to save memory; auto keeps it as it is.", MODEL),
    CliOption("quantization", "int8 keeps weights in 8 bits, to save memory; none keeps them as they are.", MODEL),
    CliOption(
        "tool_call_parser",
        "How the model writes tool calls: auto (as its files say) or a name of the table in docs/api.md, for "
        "example hermes, llama3_json, mistral, qwen3_coder, pythonic, harmony, glm45, deepseek_v3.",
        MODEL,
    ),
    CliOption(
        "reasoning_parser",
        "How the model marks its thoughts: think, deepseek_r1 (its answers begin with one), mistral, granite, "
        "seed_oss, harmony, none, or auto (as its files say).",
        MODEL,
    ),
    CliOption("groups", "Copies of the model, which share the requests. Each has workers of its own.", CLUSTER),
    CliOption(
        "tp",
        "Workers that compute one copy together (tensor parallelism). Default on GPUs: one for each GPU that a "
        "copy can have, as far as the model can be split; on CPUs 2, with matrix registers (AMX) 1.",
        CLUSTER,
    ),
    CliOption("routers", "Processes that answer HTTP requests, all on the same port.", CLUSTER),
    CliOption("device", "Where to compute: cpu, cuda, or auto (cuda if there is a GPU).", CLUSTER),
    CliOption("threads", "CPU threads of each worker. Default: this machine's cores, shared equally.", CLUSTER),
    CliOption(
        "kv_memory_bytes",
        "KV cache of each worker, such as 512MiB or 1GiB. Default: what is free on a GPU; 1 GiB on CPUs.",
        MEMORY,
        name="kv_memory",
        parse=lambda text: parse_bytes(text, "--kv-memory"),
    ),
    CliOption(
        "window_share",
        "Models in which some layers have a window: part of the KV cache's blocks that hold KV of these layers at "
        "once. Less leaves room for more or longer texts. On CPUs. Default: 1, all.",
        MEMORY,
    ),
    CliOption(
        "gpu_memory_fraction",
        "Part of a GPU's memory that a worker may use. Default: 0.9. If given, copies may share GPUs, as far as "
        "their parts fit.",
        MEMORY,
    ),
    CliOption(
        "host_tier_bytes",
        "RAM of each worker for KV that the device has no room for, such as 8GiB; 0: none. Default: 4 GiB with "
        "GPUs, as much as --kv-memory on CPUs.",
        MEMORY,
        name="host_tier",
        parse=lambda text: parse_limit(text, "--host-tier"),
    ),
    CliOption(
        "disk_tier",
        "Disk space of all workers together for KV that survives restarts, such as 50GiB or /data/kv:50GiB; 0: "
        "none. Default: a tenth of the free space, at most 10 GiB, in the user's cache folder.",
        MEMORY,
        metavar="PATH:SIZE",
        parse=parse_disk_tier,
    ),
    CliOption(
        "remote_tier",
        "Store for KV that several clusters share. A Redis or Valkey server: redis://HOST:PORT/DB, rediss:// with "
        "TLS, or unix:///PATH?db=DB. A bucket: s3://BUCKET/PREFIX?endpoint=URL&region=REGION. Or one of a package "
        "(docs/remote-stores.md).",
        MEMORY,
        metavar="URL",
        variable="TRUNKLINE_REMOTE_TIER",
    ),
    CliOption("host", "Address to listen on; 0.0.0.0 lets other machines connect, which needs API keys.", SERVER),
    CliOption("port", "Port to listen on; 0: any free one.", SERVER),
    CliOption(
        "api_key_file",
        "File with one API key that all clients share. TRUNKLINE_API_KEY in the environment does the same.",
        SERVER,
        metavar="FILE",
    ),
    CliOption(
        "tenants",
        "JSON file of tenants, with their API keys (`trunkline key`) and limits. Changes take effect at once.",
        SERVER,
        metavar="FILE",
    ),
    CliOption(
        "allow_anonymous",
        "Answer requests without an API key even where other machines can connect.",
        SERVER,
        flags=("--allow-anonymous",),
    ),
    CliOption(
        "records",
        "Where sessions, schemas and kept answers are: sqlite:PATH for the routers of one host, "
        "redis://HOST:PORT/DB (or rediss://, unix://) for those of several. Default: the server of --remote-tier, "
        "if there is one; else a file beside the disk tier.",
        SERVER,
        metavar="URL",
        variable="TRUNKLINE_RECORDS",
    ),
    CliOption("drain_seconds", "Seconds for running requests to finish when the cluster stops.", SERVER),
    CliOption("log_level", "Log lines to show: debug, info (one for each request), warning or error.", SERVER),
    CliOption(
        "policy",
        f"How a copy is chosen for a request: {', '.join(POLICIES)}. prefix takes the one that has most of the "
        f"prompt "
        "cached.",
        TUNING,
    ),
    CliOption("max_batch", "Answers that are generated at the same time, at most, by one copy.", TUNING),
    CliOption(
        "token_budget",
        "Tokens computed in one step, at most. Fewer: answers flow evenly; more: long prompts are done sooner.",
        TUNING,
    ),
    CliOption("max_waiting", "Requests that may wait for one copy; more of them get HTTP 429.", TUNING),
    CliOption(
        "target_itl_ms",
        "Target for the time between two tokens of an answer, in milliseconds: prompts are computed in smaller "
        "parts "
        "to keep it. 0: no target.",
        TUNING,
    ),
    CliOption(
        "preemption",
        "How a request goes on that had to give its memory to others: swap (its KV was moved to RAM), "
        "recompute, or "
        "auto (the faster one).",
        TUNING,
    ),
    CliOption(
        "speculation",
        "auto: steps try drafts of next tokens, taken from prompts, predictions and the tenant's earlier answers, "
        "where that gains time; answers stay the same. off: they do not.",
        TUNING,
    ),
    CliOption("chunk_size", "Tokens in a block of the KV cache.", TUNING),
    CliOption(
        "peers",
        "on: copies of the model give each other the KV in their RAM, where that is faster than computing it; "
        "off: they do not.",
        TUNING,
    ),
    CliOption(
        "role",
        "What the copies are for: both, prefill (long prompts for others), or decode (streams and short prompts); "
        "with "
        "several, one of each copy in turn, such as prefill,decode.",
        TUNING,
        metavar="ROLE,…",
    ),
    CliOption(
        "tier_policy",
        "What leaves the KV cache, RAM and disk first when they are full: predicted (what no waiting request "
        "needs, and no conversation is expected to need soon), look-ahead (the former only), lru or fifo.",
        TUNING,
    ),
    CliOption("session_ttl", "Seconds after which unused KV is forgotten; 0: only when there is no room.", TUNING),
    CliOption("kernels", "Code for attention: cpu, cuda, reference (slow), or auto (the device's own).", TUNING),
    CliOption("cuda_graphs", "Whether GPUs run decode steps as graphs: on, or off (op by op, slower).", TUNING),
    CliOption(
        "resume_seconds", "Seconds that requests wait while no copy of the model is up; 0: they fail.", OPERATION
    ),
    CliOption(
        "tenant_limits",
        "Limits of tenants that the file does not name, such as requests=8,priority=1. Names: requests (at once), "
        "requests_per_minute, tokens_per_minute, priority, records_bytes.",
        OPERATION,
        metavar="NAME=N,…",
        parse=parse_tenant_limits,
    ),
    CliOption(
        "tenant_header",
        "HTTP header in which a gateway names the tenant. Default: a tenant is known by its API key.",
        OPERATION,
        metavar="NAME",
    ),
    CliOption(
        "idempotency_ttl",
        "Seconds for which an answer is kept for retries with the same Idempotency-Key header; 0: none is kept.",
        OPERATION,
    ),
    CliOption(
        "records_max_bytes",
        "Size of all sessions, schemas and kept answers, above which those that were not used for the longest "
        "time are deleted; 0: no limit. Default: 8 GiB.",
        OPERATION,
        metavar="SIZE",
        parse=lambda text: parse_limit(text, "--records-max-bytes"),
    ),
    CliOption(
        "records_tenant_bytes",
        "Size of a tenant's sessions and schemas, above which the tenant can store no new ones. Default: no "
        "limit.",
        OPERATION,
        metavar="SIZE",
        parse=lambda text: parse_limit(text, "--records-tenant-bytes"),
    ),
    CliOption(
        "file_bytes_max",
        "Largest file that clients may upload, as input of a batch. Default: 200 MiB.",
        OPERATION,
        name="file_max_bytes",
        metavar="SIZE",
        parse=lambda text: parse_bytes(text, "--file-max-bytes"),
    ),
    CliOption(
        "prompt_memory_bytes",
        "Memory of each router for prompts and answers of conversations that clients send again as a whole; 0: "
        "each prompt is tokenised anew. Default: 256 MiB.",
        OPERATION,
        metavar="SIZE",
        parse=lambda text: parse_limit(text, "--prompt-memory-bytes"),
    ),
    CliOption(
        "allowed_hosts",
        "Host names by which browsers may reach a server without API keys, with commas between them.",
        OPERATION,
        name="allowed_host",
        metavar="NAME,…",
        parse=parse_names,
    ),
    CliOption(
        "cors_origins",
        "Web pages of other servers that may use this one, such as https://chat.example.com, with commas between.",
        OPERATION,
        name="cors_origin",
        metavar="ORIGIN,…",
        parse=parse_names,
    ),
    CliOption(
        "show_lines",
        "Rules for volatile lines of prompts (docs/clients.md) that are switched off, with commas between.",
        OPERATION,
        metavar="RULE,…",
        parse=parse_names,
    ),
    CliOption("log_format", "Form of log lines: text, json (for a log collector), or auto (text).", OPERATION),
    CliOption(
        "otlp_endpoint",
        "OpenTelemetry collector to send traces to, over HTTP. Default: as OTEL_EXPORTER_OTLP_ENDPOINT says.",
        OPERATION,
        metavar="URL",
    ),
    CliOption("trace_sample", "Part of the requests that is traced, from 0 to 1. Default: all.", OPERATION),
    CliOption(
        "prefix_cache",
        "Reuse the KV of prompts that begin alike.",
        SWITCHES,
        flags=("--prefix-cache/--no-prefix-cache",),
    ),
    CliOption(
        "restart",
        "Start a process again when it dies. With --no-restart the cluster stops instead.",
        SWITCHES,
        flags=("--restart/--no-restart",),
    ),
)
"""The options for fields of `ServeSettings`, in the order of `--help`."""

NODE_OPTIONS: Final = (
    CliOption(
        "listen",
        "Address and first of the five ports in a row on which the group takes requests, sends KV events and, if "
        "--ranks leaves ranks to other hosts, coordinates them.",
        NODE,
        metavar="HOST:PORT",
    ),
    CliOption("leader", "Address on which the group's rank 0 listens (its --listen).", NODE, metavar="HOST:PORT"),
    CliOption(
        "controllers",
        "Addresses on which the groups listen, with ranges as in group-{0..3}.group:7400. A group may start "
        "later.",
        NODE,
        metavar="HOST:PORT,…",
    ),
    CliOption(
        "members",
        "Where the groups are listed that come and go: records (groups that --join the store of --records), "
        "static:FILE, dns://NAME:PORT?events=PORT, or kubernetes://NAMESPACE/SERVICE?port=NAME&events=NAME.",
        NODE,
        metavar="URL",
    ),
    CliOption(
        "more_models",
        "Further models, each served by groups with this name as --served-model-name. MODEL has the tokenizer.",
        NODE,
        metavar="NAME=MODEL,…",
    ),
    CliOption(
        "join",
        "Store of records in which the group registers itself, for routers with --members records. Default: it "
        "does not.",
        NODE,
        metavar="URL",
        variable="TRUNKLINE_JOIN",
    ),
    CliOption(
        "ranks",
        "Ranks that run here, such as 0-1; the others join by `trunkline workers`. Default for a group: all. With "
        "it, --tp is 2 unless given.",
        NODE,
        metavar="A-B",
    ),
    CliOption(
        "wire_keys",
        "File with the keys of connections between hosts; `trunkline key wire FILE` makes one.",
        NODE,
        metavar="FILE",
    ),
    CliOption(
        "plain_tcp",
        "Connect hosts without keys: for tests, and for networks that no other machine can reach.",
        NODE,
        flags=("--plain-tcp",),
    ),
    CliOption("health_host", "Address to listen on for --health-port.", NODE),
    CliOption("health_port", "Port for /livez, /readyz and /startupz of this part; 0: none.", NODE),
)
"""The options for fields of `NodeSettings`."""

_CLUSTER_ONLY: Final = frozenset({"groups", "ranks_here", "models"})
"""Fields that only `serve` makes use of."""
_ROUTER_ONLY: Final = frozenset(
    """served_model_name tool_call_parser reasoning_parser routers policy resume_seconds host port tenants
    tenant_limits tenant_header idempotency_ttl records records_max_bytes records_tenant_bytes file_bytes_max
    prompt_memory_bytes api_key_file allow_anonymous allowed_hosts cors_origins show_lines
    lora_updates trace_sample""".split()
)
_ENGINE_ONLY: Final = frozenset(
    """tp ep dtype kv_dtype device threads kernels cuda_graphs quantization chunk_size kv_memory_bytes
    window_share gpu_memory_fraction host_tier_bytes disk_tier remote_tier peers role tier_policy session_ttl
    preemption target_itl_ms max_batch token_budget max_waiting prefix_cache speculation adapters
    max_lora_rank""".split()
)
OF_A_MODEL: Final = _ENGINE_ONLY | {
    "groups",
    "max_context",
    "rope_scaling",
    "tool_call_parser",
    "reasoning_parser",
}
"""Fields that further models of a cluster can have values of their own for."""
_CONTROLLER_ONLY: Final = frozenset(
    """tier_policy role preemption target_itl_ms max_batch token_budget max_waiting speculation adapters
    max_lora_rank""".split()
)
_KEYS: Final = ("wire_keys", "plain_tcp", "health_host", "health_port")


def _options(without: frozenset[str], *own: str) -> tuple[CliOption, ...]:
    chosen = tuple(option for option in SERVE_OPTIONS if option.field not in without | _CLUSTER_ONLY)
    own_options = tuple(option for option in NODE_OPTIONS if option.field in (*own, *_KEYS))
    return (*chosen[:1], *own_options, *chosen[1:])  # MODEL comes first


OPTIONS_OF: Final = {
    Kind.GROUP: _options(_ROUTER_ONLY - {"served_model_name"}, "listen", "ranks", "join"),
    Kind.WORKERS: _options(_ROUTER_ONLY | _CONTROLLER_ONLY, "leader", "ranks"),
    Kind.ROUTER: _options(_ENGINE_ONLY, "controllers", "members", "more_models"),
}
"""The options of the commands that run a part of a cluster."""
