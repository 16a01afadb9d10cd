"""The configuration of a controller process: frozen, validated once, written by the supervisor that starts it."""

from __future__ import annotations

from typing import Final

import msgspec

from trunkline.controller.engine_config import ConfigError, EngineConfig, EngineLimits, require
from trunkline.router.messages import GroupIdentity
from trunkline.runtime.wire_keys import Role, problem_of

ADAPTERS_MAX: Final = 256
"""Largest number of adapters of a group."""
WRITE_PAUSE_S: Final = 0.25
"""`EngineConfig.write_pause_s`: longer than an agent's quick tool takes."""
WRITE_WITHIN_S: Final = 3.0
"""`EngineConfig.write_within_s`: what a crash may lose."""
ROLES: Final = ("both", "prefill", "decode")
"""What a group may be for: to compute prompts and go on with streams, to compute long prompts for other groups, or
to go on with streams and compute short prompts."""


class ControllerConfig(EngineLimits, frozen=True, kw_only=True):
    """The configuration of a controller process: its group, its sockets and the engine's limits.

    The number of blocks is not here: the workers report what fits and the smallest one counts.
    """

    group: int = 0
    tp: int = 1
    plan_endpoint: str
    """Address of the XPUB socket, which is bound: step plans to the workers."""
    report_endpoint: str
    """Address of the PULL socket, which is bound: results from the workers."""
    router_endpoint: str
    """Address of the ROUTER socket, which is bound: requests from routers, outputs to them."""
    local_endpoint: str = ""
    """Second address of the ROUTER socket, ipc://PATH, for routers on the same host, which need no keys; "":
    none."""
    events_endpoint: str = ""
    """Address of the PUB socket, which is bound: tells routers which chunks are where; "": routers are not
    told."""
    model_fingerprint: str = ""
    """Digest of the model that the workers compute with, hexadecimal."""
    member: str = ""
    """The id of the group as a member of the cluster; "": it has none, or routers list it by its address."""
    model_name: str = ""
    """The name by which requests ask for the model; "": routers know it."""
    tokenizer_digest: str = ""
    """Digest of the model's tokenizer (`trunkline.kvstore.fingerprint`); "": not known."""
    role: str = "both"
    """What the group is for (`ROLES`)."""
    weights_digest: str = ""
    """Digest of the checkpoint as it is stored, hexadecimal; "": not known."""
    model_is_named: bool = False
    """Whether `model_name` was given, so that it is not just the name of the model's folder."""
    adapters: dict[str, str] = msgspec.field(default_factory=dict)
    """Folders of the adapters (LoRA) that the group has from the start, on the hosts of its workers, by name."""
    lora_rank_max: int = 64
    """Largest rank of an adapter that is loaded."""
    index_path: str = ""
    """SQLite file with the disk tier's chunks; "": there is no disk tier."""
    tier_fingerprint: str = ""
    """Hexadecimal digest of all that the tiers' bytes depend on (`trunkline.kvstore.fingerprint`). A disk index
    with another digest is not read."""
    remote_tier: bool = False
    """Whether the workers are given a remote tier."""
    vocab_size: int = 0
    """Number of the model's tokens: requests with larger token ids are refused. 0: unknown, so ids are only
    checked to be ids."""
    epoch: int = 0
    """Epoch of the first workers; 0: milliseconds since 1970, so that a restarted controller never uses an epoch
    again."""
    step_timeout_s: float = 60.0
    """Seconds after which workers that do not answer a step are lost; or 20 times the predicted time, if that is
    longer."""
    resume_seconds_max: float = 300.0
    """Seconds that requests wait for new workers when their workers are lost."""
    status_path: str = ""
    """Socket of the supervisor, to which this process reports its status (`trunkline.runtime.process`); "":
    none."""
    debug_checks: bool = False
    """Whether to check the engine's invariants after every step (slow: for tests and bug hunts)."""
    router_silence_seconds_max: float = 10.0
    """A router that sends no `Ping` for this long counts as dead, and its requests are aborted."""
    drain_seconds: float = 30.0
    """Seconds that running requests may take to finish after SIGTERM."""
    wire_keys: str = ""
    """File with the keys of sockets between hosts (`trunkline key wire`); "": no file."""
    plain_tcp: bool = False
    """Whether sockets between hosts have no keys: for tests, and networks that only this cluster uses."""
    parent_pid: int = 0
    log_level: str = "info"
    log_format: str = "auto"
    """Format of log lines: "json", "text", or "auto": text on a terminal."""
    otlp_endpoint: str = ""
    """Collector that spans are sent to; "": as OpenTelemetry's environment variables say
    (`runtime/tracing.py`)."""

    @property
    def identity(self) -> GroupIdentity:
        """What this controller tells routers of its group."""
        return GroupIdentity(
            self.member, self.model_name, self.tokenizer_digest, self.weights_digest, self.model_is_named
        )

    @property
    def terms(self) -> dict[str, str]:
        """The settings that all workers must have in common with this controller, by name
        (`WorkerConfig.terms`)."""
        return {
            "tp": str(self.tp),
            "dtype": self.dtype,
            "chunk_size": str(self.chunk_size),
            "max_context": str(self.max_context),
            "model": self.model_fingerprint,
        }

    def validate(self) -> None:
        """Raise `ConfigError` for the first field that cannot work."""
        require(self.role in ROLES, f"role is {self.role!r}; allowed are {', '.join(ROLES)}")
        require(self.tp >= 1, f"tp is {self.tp}; a group has at least 1 rank")
        endpoints = [self.plan_endpoint, self.report_endpoint, self.router_endpoint]
        endpoints += [self.events_endpoint] if self.events_endpoint else []
        for endpoint in endpoints:
            require(
                endpoint.startswith(("ipc://", "tcp://")),
                f"endpoint {endpoint!r} is neither ipc://PATH nor tcp://HOST:PORT",
            )
        require(
            self.local_endpoint.startswith("ipc://") or not self.local_endpoint,
            f"local_endpoint is {self.local_endpoint!r}; it is ipc://PATH, or empty",
        )
        require(len(set(endpoints)) == len(endpoints), f"all endpoints must differ; given were {endpoints}")
        keys_problem = problem_of(endpoints, self.wire_keys, Role.CONTROLLER, plain_tcp=self.plain_tcp)
        require(not keys_problem, keys_problem)
        for field in ("model_fingerprint", "tier_fingerprint"):
            value = getattr(self, field)
            try:
                bytes.fromhex(value)
            except ValueError:
                raise ConfigError(f"{field} {value!r} is not hexadecimal") from None
        require(
            not self.index_path or bool(self.tier_fingerprint),
            "index_path is given, but no tier_fingerprint; without it another model's chunks could be read",
        )
        require(self.vocab_size >= 0, f"vocab_size is {self.vocab_size}; it counts tokens, or is 0 if unknown")
        require(
            len(self.adapters) <= ADAPTERS_MAX, f"there are {len(self.adapters)} adapters; at most {ADAPTERS_MAX}"
        )
        require(self.lora_rank_max >= 1, f"lora_rank_max is {self.lora_rank_max}; a rank is at least 1")
        silence, drain = self.router_silence_seconds_max, self.drain_seconds
        require(silence > 0, f"router_silence_seconds_max is {silence}; routers ping once a second")
        require(self.epoch >= 0, f"epoch is {self.epoch}; it is a number, or 0 to go by the clock")
        require(self.step_timeout_s > 0, f"step_timeout_s is {self.step_timeout_s}; a step takes some time")
        require(
            self.resume_seconds_max >= 0,
            f"resume_seconds_max is {self.resume_seconds_max}; 0 ends requests when their workers are lost",
        )
        require(drain >= 0, f"drain_seconds is {drain}; 0 ends running requests at once")
        has_disk = int(bool(self.index_path))
        self.engine(num_blocks=2, host_slots=1, disk_slots=has_disk, remote=self.remote_tier).validate()

    def engine(
        self,
        num_blocks: int,
        host_slots: int = 0,
        swap_us_per_block: float = 0.0,
        disk_slots: int = 0,
        remote: bool = False,
        window: int = 0,
        part_window: int = 0,
        whole_blocks: int = 0,
    ) -> EngineConfig:
        """Return the engine's configuration, once the workers have reported what they hold."""
        return EngineConfig(
            num_blocks=num_blocks,
            ranks=self.tp,
            host_slots=host_slots,
            swap_us_per_block=swap_us_per_block,
            disk_slots=disk_slots,
            remote=remote,
            write_pause_s=WRITE_PAUSE_S,
            write_within_s=WRITE_WITHIN_S,
            window=window,
            part_window=part_window,
            whole_blocks=whole_blocks,
            model_fingerprint=bytes.fromhex(self.model_fingerprint),
            **{name: getattr(self, name) for name in EngineLimits.__struct_fields__},
        )
