"""What a controller is told: frozen, validated once, written by whoever starts the group."""

from __future__ import annotations

import math
from typing import Final

import msgspec

from trunkline.kvstore.directory_config import DirectoryConfig
from trunkline.kvstore.eviction import EvictionPolicy
from trunkline.kvstore.extents import blocks_for
from trunkline.runtime.wire_keys import Role, problem_of

PREEMPTIONS: Final = ("auto", "swap", "recompute")
TIER_POLICIES: Final = ("look-ahead", "lru", "fifo")
HOLE_BLOCKS: Final = 256
"""Blocks that a sequence may have beyond its length because parts of them are not seen: cut off, or the empty rest
behind a module's text."""


class ConfigError(ValueError):
    """A configuration that cannot work; the message names the field, its value and what is allowed."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the pure engine. Tokens and blocks count per sequence and group, not per rank."""

    num_blocks: int
    """Device blocks; the smallest number that any rank has."""
    ranks: int = 1
    """Tensor-parallel workers; each answers every move of a chunk."""
    chunk_size: int = 64
    """Tokens per chunk. 64 is ChunkAttention's default: long enough for matmul tiles, short enough to share."""
    max_context: int = 2048
    """Prompt + output tokens of one sequence at most: what the model's positions allow."""
    token_budget: int = 1024
    """Tokens computed in one step at most. Bounds how long running streams wait for somebody's prefill."""
    max_rows: int = 256
    """Sequences that decode in one step at most."""
    max_waiting: int = 1024
    """Requests that wait at most; more are refused (HTTP 429), so that memory and delay stay bounded."""
    max_inflight_steps: int = 2
    """Steps sent but not answered: 2 lets planning of step k + 1 overlap execution of step k."""
    prefix_cache: bool = True
    """Off: every request computes all its KV and gives it back when it ends (for comparison)."""
    preemption: str = "auto"
    """How a preempted request gets back what it had computed and what has left the device since: "swap" keeps it
    on the host and loads it, "recompute" computes it again and loads none of it, "auto" does what was measured to
    be faster (PagedAttention §4.5)."""
    host_slots: int = 0
    """Blocks that the workers' host pools hold; the smallest number that any rank has."""
    swap_us_per_block: float = 0.0
    """Measured by the workers at their start: a save and a load of one block."""
    target_itl_ms: float = 0.0
    """Time between two tokens of a stream that prefill should not exceed (soft); 0: no target."""
    model_fingerprint: bytes = b""
    """Digest of configuration and weights, as they are computed with (quantised or not); part of every chunk's
    name."""
    dtype: str = "float32"
    disk_slots: int = 0
    """Blocks that the workers' disk tiers hold; the smallest number that any rank has; 0: there is none."""
    remote: bool = False
    """Every rank has been given a remote tier."""
    tier_policy: str = "look-ahead"
    """What leaves the host and disk tiers, and what is fetched early: "look-ahead" goes by the queue
    (CachedAttention §3.3); "lru" and "fifo" are there to compare with."""
    session_ttl_s: float = 0.0
    """Seconds without use after which cached KV is forgotten, unless its request says otherwise; 0: never."""
    positions_shift: bool = True
    """Cached KV may stand at other positions than those it was computed at (CachedAttention §3.4). False: where
    tokens before it are cut off, it is computed again."""

    @property
    def longest_sequence(self) -> int:
        """Tokens that one sequence can reach alone: the model's limit or the whole pool."""
        return min(self.max_context, self.num_blocks * self.chunk_size)

    def validate(self) -> None:
        """Raise `ConfigError` for the first field that cannot work."""
        _require(self.num_blocks >= 2, f"num_blocks is {self.num_blocks}; a group needs at least 2 blocks")
        _require(1 <= self.chunk_size <= 1024, f"chunk_size is {self.chunk_size}; allowed are 1 to 1024 tokens")
        _require(self.max_context >= 2, f"max_context is {self.max_context}; at least 2 tokens are needed")
        _require(self.max_rows >= 1, f"max_rows is {self.max_rows}; at least 1 sequence must run")
        _require(
            self.token_budget > self.max_rows,
            f"token_budget is {self.token_budget}; it must exceed max_rows ({self.max_rows}), "
            "or a full batch would leave no room for prefill",
        )
        _require(self.max_waiting >= 1, f"max_waiting is {self.max_waiting}; at least 1 request must wait")
        _require(
            self.preemption in PREEMPTIONS,
            f"preemption is {self.preemption!r}; allowed are {', '.join(PREEMPTIONS)}",
        )
        _require(self.host_slots >= 0, f"host_slots is {self.host_slots}; it counts blocks")
        _require(
            self.preemption != "swap" or self.host_slots > 0,
            "preemption is 'swap', but the workers have no host pool; give them host memory",
        )
        _require(
            self.preemption != "swap" or self.prefix_cache,
            "preemption is 'swap', but without the prefix cache nothing is found again",
        )
        _require(
            0 <= self.target_itl_ms < math.inf,
            f"target_itl_ms is {self.target_itl_ms}; it is a time in milliseconds, 0 for no target",
        )
        _require(
            1 <= self.max_inflight_steps <= 2,
            f"max_inflight_steps is {self.max_inflight_steps}; step sockets hold 1 or 2 unanswered steps",
        )
        self._validate_tiers()

    def _validate_tiers(self) -> None:
        _require(self.disk_slots >= 0, f"disk_slots is {self.disk_slots}; it counts blocks")
        below_host = self.disk_slots > 0 or self.remote
        _require(
            not below_host or self.host_slots > 0,
            "there is a disk or remote tier, but no host pool, through which everything passes on its way",
        )
        _require(
            not below_host or self.prefix_cache,
            "there is a disk or remote tier, but without the prefix cache nothing is found again",
        )
        _require(
            self.tier_policy in TIER_POLICIES,
            f"tier_policy is {self.tier_policy!r}; allowed are {', '.join(TIER_POLICIES)}",
        )
        _require(
            0 <= self.session_ttl_s < math.inf,
            f"session_ttl_s is {self.session_ttl_s}; it is a time in seconds, 0 for no limit",
        )

    @property
    def max_blocks_per_sequence(self) -> int:
        return blocks_for(self.longest_sequence, self.chunk_size)

    @property
    def max_table_blocks(self) -> int:
        """Entries of a block table at most: behind cuts some of their tokens are not seen."""
        return self.max_blocks_per_sequence + HOLE_BLOCKS

    def tiers(self, first_generation: int = 0) -> DirectoryConfig:
        """What there is below the device.

        Args:
            first_generation: generations of disk slots begin above it.
        """
        if not self.prefix_cache:
            return DirectoryConfig()
        return DirectoryConfig(
            host_slots=self.host_slots,
            disk_slots=self.disk_slots,
            remote=self.remote,
            policy=EvictionPolicy(self.tier_policy),
            first_generation=first_generation,
        )


class ControllerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A controller process: its group, its sockets and the engine's limits.

    The number of blocks is not here: the workers report what fits and the smallest one counts.
    """

    group: int = 0
    tp: int = 1
    plan_endpoint: str
    """XPUB, bound: step plans to the workers."""
    report_endpoint: str
    """PULL, bound: results from the workers."""
    router_endpoint: str
    """ROUTER, bound: requests from routers, outputs to them."""
    local_endpoint: str = ""
    """As `router_endpoint`, ipc://PATH, for processes of the same host, which need no keys; "": none."""
    events_endpoint: str = ""
    """PUB, bound: where chunks are, to routers; "": nobody is told."""
    model_fingerprint: str = ""
    """Hexadecimal."""
    dtype: str = "float32"
    chunk_size: int = 64
    max_context: int = 2048
    token_budget: int = 1024
    max_rows: int = 256
    max_waiting: int = 1024
    prefix_cache: bool = True
    preemption: str = "auto"
    target_itl_ms: float = 0.0
    index_path: str = ""
    """SQLite file with the disk tier's chunks; "": there is no disk tier."""
    records_path: str = ""
    """SQLite file with the records (sessions, schemas, kept answers); "": they live as long as the process."""
    tier_fingerprint: str = ""
    """Hexadecimal (`trunkline.kvstore.fingerprint`): an index of another one is not read."""
    remote_tier: bool = False
    """The workers are given a remote tier."""
    tier_policy: str = "look-ahead"
    session_ttl_s: float = 0.0
    positions_shift: bool = True
    vocab_size: int = 0
    """Requests with token ids from here on are refused. 0: unknown, ids are only checked to be ids."""
    epoch: int = 0
    """Of the first worker group; 0: milliseconds since 1970, so that a controller that is started again never uses
    one a second time."""
    step_timeout_s: float = 60.0
    """Workers that do not answer a step for so long are lost (and 20 times as long as it should take, if that is
    more)."""
    resume_seconds_max: float = 300.0
    """Requests wait so long for other workers when theirs are lost."""
    status_path: str = ""
    """Socket of the supervisor for what this process says of itself (`trunkline.runtime.notify`); "": none."""
    debug_checks: bool = False
    """Check the engine's invariants after every step (slow: for tests and bug hunts)."""
    router_silence_seconds_max: float = 10.0
    """A router that sends no `Ping` for so long is dead; its requests are aborted."""
    drain_seconds: float = 30.0
    """After SIGTERM running requests may take so long to finish."""
    wire_keys: str = ""
    """File of the keys of sockets between hosts (`trunkline key wire`); "": there is none."""
    plain_tcp: bool = False
    """Sockets between hosts have no keys: for tests, and networks in which nobody else is."""
    parent_pid: int = 0
    log_level: str = "info"
    log_format: str = "auto"
    """"json", "text", or "auto": text on a terminal."""
    otlp_endpoint: str = ""
    """Collector that spans are sent to; "": as OpenTelemetry's environment variables say
    (`runtime/tracing.py`)."""

    @property
    def terms(self) -> dict[str, str]:
        """As of `WorkerConfig`."""
        return {
            "tp": str(self.tp),
            "dtype": self.dtype,
            "chunk_size": str(self.chunk_size),
            "max_context": str(self.max_context),
            "model": self.model_fingerprint,
        }

    def validate(self) -> None:
        """Raise `ConfigError` for the first field that cannot work."""
        _require(self.tp >= 1, f"tp is {self.tp}; a group has at least 1 rank")
        endpoints = [self.plan_endpoint, self.report_endpoint, self.router_endpoint]
        endpoints += [self.events_endpoint] if self.events_endpoint else []
        for endpoint in endpoints:
            _require(
                endpoint.startswith(("ipc://", "tcp://")),
                f"endpoint {endpoint!r} is neither ipc://PATH nor tcp://HOST:PORT",
            )
        _require(
            self.local_endpoint.startswith("ipc://") or not self.local_endpoint,
            f"local_endpoint is {self.local_endpoint!r}; it is ipc://PATH, or empty",
        )
        _require(len(set(endpoints)) == len(endpoints), f"all endpoints must differ; given were {endpoints}")
        keys_problem = problem_of(endpoints, self.wire_keys, Role.CONTROLLER, plain_tcp=self.plain_tcp)
        _require(not keys_problem, keys_problem)
        for field in ("model_fingerprint", "tier_fingerprint"):
            value = getattr(self, field)
            try:
                bytes.fromhex(value)
            except ValueError:
                raise ConfigError(f"{field} {value!r} is not hexadecimal") from None
        _require(
            not self.index_path or bool(self.tier_fingerprint),
            "index_path is given, but no tier_fingerprint; without it another model's chunks could be read",
        )
        _require(self.vocab_size >= 0, f"vocab_size is {self.vocab_size}; it counts tokens, or is 0 if unknown")
        silence, drain = self.router_silence_seconds_max, self.drain_seconds
        _require(silence > 0, f"router_silence_seconds_max is {silence}; routers ping once a second")
        _require(self.epoch >= 0, f"epoch is {self.epoch}; it is a number, or 0 to go by the clock")
        _require(self.step_timeout_s > 0, f"step_timeout_s is {self.step_timeout_s}; a step takes some time")
        _require(
            self.resume_seconds_max >= 0,
            f"resume_seconds_max is {self.resume_seconds_max}; 0 ends requests when their workers are lost",
        )
        _require(drain >= 0, f"drain_seconds is {drain}; 0 ends running requests at once")
        has_disk = int(bool(self.index_path))
        self.engine(num_blocks=2, host_slots=1, disk_slots=has_disk, remote=self.remote_tier).validate()

    def engine(
        self,
        num_blocks: int,
        host_slots: int = 0,
        swap_us_per_block: float = 0.0,
        disk_slots: int = 0,
        remote: bool = False,
    ) -> EngineConfig:
        """The engine's limits, once the workers have said what they hold."""
        return EngineConfig(
            num_blocks=num_blocks,
            ranks=self.tp,
            host_slots=host_slots,
            swap_us_per_block=swap_us_per_block,
            disk_slots=disk_slots,
            remote=remote,
            tier_policy=self.tier_policy,
            session_ttl_s=self.session_ttl_s,
            positions_shift=self.positions_shift,
            preemption=self.preemption,
            target_itl_ms=self.target_itl_ms,
            chunk_size=self.chunk_size,
            max_context=self.max_context,
            token_budget=self.token_budget,
            max_rows=self.max_rows,
            max_waiting=self.max_waiting,
            prefix_cache=self.prefix_cache,
            model_fingerprint=bytes.fromhex(self.model_fingerprint),
            dtype=self.dtype,
        )
