"""The settings of `trunkline serve`: one frozen record, checked before any process starts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from trunkline.controller.config import ROLES
from trunkline.controller.engine_config import SPECULATIONS, TIER_POLICIES
from trunkline.deploy.config.machine import available_cores
from trunkline.deploy.config.option_values import (
    DiskOption,
    FurtherModel,
    check_exposure,
    check_records_url,
    check_remote_url,
    check_tenants,
)
from trunkline.deploy.errors import UserError
from trunkline.kvstore.chunk_format import KV_DTYPES
from trunkline.router.config import (
    HEADER_NAME,
    HOST,
    IDEMPOTENCY_TTL_S_MAX,
    NO_LIMITS,
    ORIGIN,
    TenantLimits,
    is_pattern,
    problem_of_model_name,
)
from trunkline.router.text.volatile_lines import problem_of_rules
from trunkline.runtime.process import LOG_FORMATS
from trunkline.runtime.tracing import problem_of_endpoint

DTYPES: Final = ("auto", "float32", "bfloat16", "float16")
DEVICES: Final = ("auto", "cpu", "cuda")
KERNELS: Final = ("auto", "cpu", "cuda", "reference")
LOG_LEVELS: Final = ("debug", "info", "warning", "error")

SWITCHES: Final = ("on", "off")
PREEMPTIONS: Final = ("auto", "swap", "recompute")
QUANTIZATIONS: Final = ("none", "int8")
EP_CHOICES: Final = ("on", "off")
ROPE_SCALINGS: Final = ("none", "yarn", "linear")
POLICIES: Final = ("prefix", "round-robin", "least-loaded", "session-hash", "sglang", "dynamo", "lmetric", "llm-d")
TOOL_CALL_PARSERS: Final = tuple(
    """auto hermes qwen qwen25 qwen3 llama3_json llama3 llama4_json mistral qwen3_coder qwen3_xml pythonic
    llama4_pythonic llama4 gemma3 harmony openai gpt-oss gpt_oss glm45 glm glm47 deepseek_v3 deepseekv3 deepseek_r1
    deepseek deepseek_v31 deepseekv31 granite phi4_mini phi4_mini_json phi4 kimi_k2 kimi""".split()
)
REASONING_PARSERS: Final = tuple(
    """auto none think deepseek_r1 mistral granite seed_oss harmony qwen3 glm45 deepseek_v3 hunyuan phi4
    openai_gptoss gpt-oss gpt_oss deepseek-r1 magistral""".split()
)
"""Those of the router, by all of their names; written down here because importing the router takes long."""

GROUPS_MAX: Final = 256
"""Largest number of groups on one machine. Each group is two processes at least, and each router has three
connections to each group."""
_ROUTERS_MAX: Final = 64
_RESUME_S_MAX: Final = 86400.0
GPU_MEMORY_FRACTION: Final = 0.9
"""Part of a GPU's total memory that Trunkline uses by default. The rest is for the driver and other processes."""
_KV_MEMORY_CPU: Final = 1 << 30
_HOST_TIER_GPU: Final = 4 << 30
_SESSION_TTL_S_MAX: Final = 10 * 365 * 86400.0


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """The settings of a cluster on one machine. None: chosen by the model and the machine."""

    model: str = "demo"
    groups: int = 1
    """Copies of the model; the routers spread requests over them."""
    routers: int = 1
    """Processes that share the port. One streams some thousand tokens a second."""
    policy: str = "prefix"
    """The rule by which a router chooses the group for a request."""
    restart: bool = True
    """Whether a process that dies is started again."""
    resume_seconds: float = 60.0
    """Longest time in seconds that a stream whose group was lost waits for that group or for another one."""
    tp: int | None = None
    """Tensor-parallel workers per group. None: by the model and the GPUs that each group can have
    (`plans.settle`)."""
    ep: str = "on"
    """Expert parallelism: "on": each worker of a group has whole experts; "off": a part of every one."""
    dtype: str = "auto"
    kv_dtype: str = "auto"
    """The number format in which KV is kept: "int8", "fp8", or "auto" for that of the computation."""
    window_share: float = 1.0
    """Share of the KV pool's blocks that can hold KV of layers with a window at once, where other layers see all
    tokens; 1: all (docs/decisions/0021-windows.md)."""
    device: str = "auto"
    kernels: str = "auto"
    cuda_graphs: str = "on"
    """Whether decode steps on GPUs run as graphs: "on" or "off"."""
    quantization: str = "none"
    """The number format in which weights are stored: "int8", or "none" for that of the computation."""
    host: str = "127.0.0.1"
    """Address on which routers listen. By default only this machine may connect."""
    port: int = 8000
    """Port on which routers listen; 0: any free port."""
    served_model_name: str | None = None
    """Names of the model in the API with commas between them, the main one first; None: its own. One with a star
    at its end stands for all names that begin like it."""
    models: tuple[FurtherModel, ...] = ()
    """Further models, each with groups of its own (`further_models.py`). The other fields describe the first one,
    which requests mean that name none."""
    adapters: tuple[tuple[str, str], ...] = ()
    """Names and folders of LoRA adapters."""
    max_lora_rank: int = 64
    """Largest rank of an adapter."""
    lora_updates: bool = False
    """Whether requests with an admin's key may load and unload adapters."""
    chunk_size: int = 64
    """Tokens per chunk, the unit of storage; sharing is exact to the token whatever it is."""
    kv_memory_bytes: int | None = None
    """Memory for KV of each worker in bytes; None: see `kv_memory_per_worker`."""
    gpu_memory_fraction: float | None = None
    """Part of each GPU's total memory that one worker may use. None: `GPU_MEMORY_FRACTION`, and no two workers
    share a GPU."""
    max_context: int | None = None
    rope_scaling: str = "none"
    """How rotary positions are scaled so that the model takes `max_context` tokens, more than it was made for:
    one of `ROPE_SCALINGS`."""
    max_batch: int = 256
    token_budget: int = 1024
    """Largest number of tokens computed in one step. It bounds how long running streams wait for the prefill of a
    prompt."""
    max_waiting: int = 1024
    prefix_cache: bool = True
    host_tier_bytes: int | None = None
    """Host memory of each worker for KV that is not on the device, and for KV on its way to and from the tiers
    below; 0: none."""
    disk_tier: DiskOption | None = None
    """Folder and size of the disk tier. None: a folder in the user's cache folder, if there is room."""
    remote_tier: str = ""
    """URL of a Redis or Valkey server that several clusters may share; "": none. May hold a password."""
    peers: str = "on"
    """Whether groups give each other the KV in their host memory: "on" or "off"."""
    role: str = "both"
    """What each group is for: one of `ROLES`, or several with commas between them: of the first group, of the
    second one and so on; the last one holds for all further groups."""
    tier_policy: str = "predicted"
    session_ttl: float = 86400.0
    """Seconds after which unused KV is forgotten: a conversation is seldom continued after a day. 0: no limit."""
    preemption: str = "auto"
    speculation: str = "off"
    target_itl_ms: float = 0.0
    """Target for the time between two tokens of a stream: prompts are computed in smaller parts to keep it. 0:
    none."""
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    show_lines: tuple[str, ...] = ()
    """Names of the rules for volatile lines of prompts that are switched off."""
    drain_seconds: float = 30.0
    tenants: str = ""
    """File of tenants, their keys and limits, which is read again when it changes; "": none."""
    tenant_limits: TenantLimits = NO_LIMITS
    """Limits of each tenant that the file does not name."""
    tenant_header: str = ""
    """The header in which a gateway names the tenant; "": a tenant is known by its key."""
    api_key_file: str = ""
    """File with the one key that all clients share; "": none, or in TRUNKLINE_API_KEY."""
    allow_anonymous: bool = False
    """Whether a server without keys may listen where other machines can connect."""
    allowed_hosts: tuple[str, ...] = ()
    """Names under which browsers may reach a server without keys, besides localhost and addresses."""
    cors_origins: tuple[str, ...] = ()
    """Pages of other servers that may use this one from a browser."""
    idempotency_ttl: float = 600.0
    """Seconds for which answers are kept for clients that send an `Idempotency-Key`; 0: none are."""
    records: str = ""
    """URL of the store of sessions, schemas and kept answers; "": see `record_files.plan_records`. May hold a
    password."""
    records_max_bytes: int = 8 << 30
    """Bytes that all records may take; 0: no limit. Beyond it the least recently used ones are deleted."""
    records_tenant_bytes: int = 0
    """Bytes that the records of one tenant may take; 0: no limit. Beyond it the tenant can make no new ones."""
    file_bytes_max: int = 200 << 20
    """Largest size in bytes of a file that clients upload."""
    prompt_memory_bytes: int = 256 << 20
    """Bytes of each router for prompts and answers that it remembers; 0: none are."""
    threads: int | None = None
    """CPU threads per worker."""
    log_level: str = "warning"
    log_format: str = "auto"
    """"text" for people, "json" for a log collector; "auto": text."""
    otlp_endpoint: str = ""
    """The collector that traces are sent to; "": as OpenTelemetry's environment variables say, by default none."""
    trace_sample: float | None = None
    """Part of the requests that is traced; None: as OpenTelemetry's environment variables say, by default all."""
    ranks_here: int | None = None
    """Number of ranks of each group that run on this machine; None: all ranks. `NodeSettings` sets it."""

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names of the model that were given, the main one first."""
        return tuple(self.served_model_name.split(",")) if self.served_model_name else ()

    def validate(self) -> None:
        """Raise `UserError` for the first setting that is wrong by itself."""
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise UserError(f"{_flag(name)} is {value!r}; allowed are {', '.join(allowed)}")
        for name, (least, most, rule) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise UserError(f"{_flag(name)} is {value if isinstance(value, int) else f'{value:g}'}; {rule}")
        cores = os.cpu_count() or 1
        if self.threads is not None and not 1 <= self.threads <= cores:
            raise UserError(f"--threads is {self.threads}; allowed are 1 to {cores}, the cores of this machine")
        fraction = self.gpu_memory_fraction
        if fraction is not None and not 0 < fraction <= 1:
            raise UserError(f"--gpu-memory-fraction is {fraction:g}; it must be more than 0 and at most 1")
        if problem := next(filter(None, map(problem_of_model_name, self.served_names)), ""):
            raise UserError(f"--served-model-name: {problem}")
        if any(map(is_pattern, self.served_names[:1])):
            raise UserError(
                f"--served-model-name: {self.served_names[0]!r} stands for many names; give one in front of it"
            )
        if problem := problem_of_rules(self.show_lines):
            raise UserError(f"--show-lines: {problem}")
        if problem := problem_of_endpoint(self.otlp_endpoint):
            raise UserError(f"--otlp-endpoint: {problem}")
        if self.token_budget <= self.max_batch:
            raise UserError(
                f"--token-budget is {self.token_budget}; it must exceed --max-batch ({self.max_batch}), or a "
                "full batch would leave no room for new prompts"
            )
        self._validate_tiers()
        self._validate_tenants()

    def _validate_tiers(self) -> None:
        roles = self.role.split(",")
        if wrong := next((role for role in roles if role not in ROLES), None):
            raise UserError(f"--role: {wrong!r} is no role; allowed are {', '.join(ROLES)}")
        if "prefill" in roles and self.peers == "off":
            raise UserError("--role has a prefill group, but with --peers off no other group can have its KV")
        if self.preemption == "swap" and not self.prefix_cache:
            raise UserError("--preemption is swap, but with --no-prefix-cache nothing is found again")
        if self.preemption == "swap" and self.host_tier_bytes == 0:
            raise UserError("--preemption is swap, but --host-tier is 0; swapping needs memory to swap to")
        if self.remote_tier:
            check_remote_url(self.remote_tier)
        if self.records:
            check_records_url(self.records)
        asked = self.asked_tier
        if asked and not self.prefix_cache:
            raise UserError(f"{asked} keeps KV to be found again, but --no-prefix-cache finds nothing again")
        if asked and self.host_tier_bytes == 0:
            raise UserError(
                f"{asked} is given, but --host-tier is 0; KV passes through host memory on its way, so give "
                f"--host-tier a size or leave {asked} out"
            )

    def _validate_tenants(self) -> None:
        check_tenants(self.tenants, self.tenant_limits)
        check_exposure(self.host, self.tenants, self.api_key_file, allow_anonymous=self.allow_anonymous)
        for origin in self.cors_origins:
            if not ORIGIN.fullmatch(origin):
                raise UserError(f"--cors-origin: {origin!r} is no origin, as https://chat.example.com is")
        for host in self.allowed_hosts:
            if not HOST.fullmatch(host):
                raise UserError(f"--allowed-host: {host!r} is no name of a machine; it has no port and no slashes")
        if self.tenant_header and not HEADER_NAME.fullmatch(self.tenant_header):
            raise UserError(f"--tenant-header is {self.tenant_header!r}; that names no header, as X-Tenant does")
        if self.idempotency_ttl != 0 and not 1 <= self.idempotency_ttl <= IDEMPOTENCY_TTL_S_MAX:
            most = f"{IDEMPOTENCY_TTL_S_MAX:.0f}"
            raise UserError(f"--idempotency-ttl is {self.idempotency_ttl:g}; allowed are 0 (off) and 1 to {most}")

    @property
    def asked_tier(self) -> str:
        """The option by which a tier below host memory was asked for; "": none was."""
        has_disk = self.disk_tier is not None and self.disk_tier.size_bytes > 0
        return "--disk-tier" if has_disk else "--remote-tier" if self.remote_tier else ""

    @property
    def connect_host(self) -> str:
        """The address at which this machine reaches the server."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)

    @property
    def ranks(self) -> int:
        """The number of ranks of a group: `tp`, which must have been set by `plans.settle`."""
        if self.tp is None:
            raise ValueError("the number of ranks is not settled yet")
        return self.tp

    def role_of(self, group: int) -> str:
        """Return what a group is for. `group`: its number, from 0 on."""
        roles = self.role.split(",")
        return roles[min(group, len(roles) - 1)]

    @property
    def workers_here(self) -> int:
        """Worker processes on this machine."""
        return self.groups * (self.ranks_here or self.ranks)

    def threads_per_worker(self) -> int:
        """`threads`, or an equal share of the cores this process may use."""
        return self.threads or max(1, available_cores() // self.workers_here)

    def kv_memory_per_worker(self, device: str) -> int:
        """`kv_memory_bytes`; else on CPUs 1 GiB, enough for long contexts of a small model on any laptop, and
        on GPUs 0: what the worker finds free."""
        return self.kv_memory_bytes or (_KV_MEMORY_CPU if device == "cpu" else 0)

    def host_tier_per_worker(self, device: str) -> int:
        """`host_tier_bytes`; else on CPUs as much as the KV pool has (what is not used is never touched), and on
        GPUs 4 GiB, as others do."""
        if self.host_tier_bytes is not None:
            return self.host_tier_bytes
        return self.kv_memory_per_worker(device) if device == "cpu" else _HOST_TIER_GPU


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def _between(least: int, most: int) -> tuple[float, float, str]:
    return least, most, f"allowed are {least} to {most}"


_CHOICES: Final = {
    "policy": POLICIES,
    "dtype": DTYPES,
    "kv_dtype": KV_DTYPES,
    "ep": EP_CHOICES,
    "device": DEVICES,
    "kernels": KERNELS,
    "cuda_graphs": SWITCHES,
    "log_level": LOG_LEVELS,
    "log_format": LOG_FORMATS,
    "quantization": QUANTIZATIONS,
    "rope_scaling": ROPE_SCALINGS,
    "preemption": PREEMPTIONS,
    "tool_call_parser": TOOL_CALL_PARSERS,
    "reasoning_parser": REASONING_PARSERS,
    "tier_policy": TIER_POLICIES,
    "speculation": SPECULATIONS,
    "peers": SWITCHES,
}
"""The values that a field may have."""
_RANGES: Final[dict[str, tuple[float, float, str]]] = {
    "groups": _between(1, GROUPS_MAX),
    "tp": _between(1, 4096),
    "routers": _between(1, _ROUTERS_MAX),
    "resume_seconds": (0, _RESUME_S_MAX, f"allowed are 0 (do not wait) to {_RESUME_S_MAX:.0f}"),
    "window_share": (0.001, 1, "allowed are 0.001 to 1 (all blocks)"),
    "trace_sample": (0, 1, "allowed are 0 (none) to 1 (all requests)"),
    "target_itl_ms": (0, 60_000, "allowed are 0 (no target) to 60000"),
    "port": (0, 65535, "allowed are 0 (any free port) to 65535"),
    "chunk_size": (1, 1024, "allowed are 1 to 1024 tokens"),
    "max_context": _between(2, 1 << 30),
    "max_lora_rank": _between(1, 4096),
    "max_batch": _between(1, 1 << 14),
    "token_budget": _between(2, 1 << 20),
    "max_waiting": _between(1, 1_000_000),
    "drain_seconds": _between(0, 3600),
    "session_ttl": (0, _SESSION_TTL_S_MAX, f"allowed are 0 (no limit) to {_SESSION_TTL_S_MAX:.0f} seconds"),
}
"""The least and the largest value of a field, and the rule in words."""
