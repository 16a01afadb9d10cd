"""What a controller is told: frozen, validated once, written by whoever starts the group."""

from __future__ import annotations

import math
from typing import Final

import msgspec

from trunkline.kvstore.layout import blocks_for

PREEMPTIONS: Final = ("auto", "swap", "recompute")


class ConfigError(ValueError):
    """A configuration that cannot work; the message names the field, its value and what is allowed."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the pure engine. Tokens and blocks count per sequence and group, not per rank."""

    num_blocks: int
    """Device blocks; the smallest number that any rank has."""
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
    """What becomes of a preempted request's chunks when their blocks are needed: "swap" copies them to the host
    pool, "recompute" drops them, "auto" does what was measured to be faster (PagedAttention §4.5)."""
    host_slots: int = 0
    """Blocks that the workers' host pools hold; the smallest number that any rank has."""
    swap_us_per_block: float = 0.0
    """Measured by the workers at their start: a save and a load of one block."""
    target_itl_ms: float = 0.0
    """Time between two tokens of a stream that prefill should not exceed (soft); 0: no target."""
    model_fingerprint: bytes = b""
    """Digest of weights and configuration; part of every chunk's name."""
    dtype: str = "float32"

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

    @property
    def max_blocks_per_sequence(self) -> int:
        return blocks_for(self.longest_sequence, self.chunk_size)


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
    vocab_size: int = 0
    """Requests with token ids from here on are refused. 0: unknown, ids are only checked to be ids."""
    epoch: int = 1
    debug_checks: bool = False
    """Check the engine's invariants after every step (slow: for tests and bug hunts)."""
    router_silence_seconds_max: float = 10.0
    """A router that sends no `Ping` for so long is dead; its requests are aborted."""
    drain_seconds: float = 30.0
    """After SIGTERM running requests may take so long to finish."""
    parent_pid: int = 0
    log_level: str = "info"

    def validate(self) -> None:
        """Raise `ConfigError` for the first field that cannot work."""
        _require(self.tp >= 1, f"tp is {self.tp}; a group has at least 1 rank")
        endpoints = (self.plan_endpoint, self.report_endpoint, self.router_endpoint)
        for endpoint in endpoints:
            _require(
                endpoint.startswith(("ipc://", "tcp://")),
                f"endpoint {endpoint!r} is neither ipc://PATH nor tcp://HOST:PORT",
            )
        _require(len(set(endpoints)) == 3, f"the three endpoints must differ; given were {endpoints}")
        try:
            bytes.fromhex(self.model_fingerprint)
        except ValueError:
            raise ConfigError(f"model_fingerprint {self.model_fingerprint!r} is not hexadecimal") from None
        _require(self.vocab_size >= 0, f"vocab_size is {self.vocab_size}; it counts tokens, or is 0 if unknown")
        silence, drain = self.router_silence_seconds_max, self.drain_seconds
        _require(silence > 0, f"router_silence_seconds_max is {silence}; routers ping once a second")
        _require(drain >= 0, f"drain_seconds is {drain}; 0 ends running requests at once")
        self.engine(num_blocks=2, host_slots=1).validate()

    def engine(self, num_blocks: int, host_slots: int = 0, swap_us_per_block: float = 0.0) -> EngineConfig:
        """The engine's limits, once the workers have said what they hold."""
        return EngineConfig(
            num_blocks=num_blocks,
            host_slots=host_slots,
            swap_us_per_block=swap_us_per_block,
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
