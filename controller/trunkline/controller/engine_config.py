"""The limits of an engine: what it may hold and compute, validated once. Pure."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Final

import msgspec

from trunkline.kvstore.chunks import blocks_for
from trunkline.kvstore.tier_policy import DirectoryConfig, EvictionPolicy
from trunkline.kvstore.windows import window_blocks

PREEMPTIONS: Final = ("auto", "swap", "recompute")
SPECULATIONS: Final = ("auto", "off")
TIER_POLICIES: Final = ("predicted", "look-ahead", "lru", "fifo")
HOLE_BLOCKS: Final = 256
"""Number of blocks that a sequence may have beyond its length because parts of them are not seen: cut off, or the
empty rest behind a module's text."""


class ConfigError(ValueError):
    """A configuration that cannot work; the message names the field, its value and what is allowed."""


def require(condition: bool, message: str) -> None:
    """Raise `ConfigError` with the message unless the condition holds."""
    if not condition:
        raise ConfigError(message)


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits that a group is started with. Tokens and blocks count per sequence and group, not per rank."""

    chunk_size: int = 64
    """Tokens per chunk. 64 is ChunkAttention's default: long enough for matmul tiles, short enough to share."""
    max_context: int = 2048
    """Prompt + output tokens of one sequence at most: what the model's positions allow."""
    token_budget: int = 1024
    """Tokens computed in one step at most. Bounds how long running streams wait for another request's prefill."""
    max_rows: int = 256
    """Sequences that decode in one step at most."""
    max_waiting: int = 1024
    """Requests that wait at most; more are refused (HTTP 429), so that memory and delay stay bounded."""
    prefix_cache: bool = True
    """Whether KV stays cached after a request. If not, every request computes all its KV and gives it back when it
    ends (for comparison)."""
    preemption: str = "auto"
    """How a preempted request gets back what it had computed and what has left the device since: "swap" keeps it
    on the host and loads it, "recompute" computes it again and loads none of it, "auto" does what was measured to
    be faster (PagedAttention §4.5)."""
    target_itl_ms: float = 0.0
    """Time between two tokens of a stream that prefill should not exceed (soft); 0: no target."""
    speculation: str = "off"
    """Whether steps try drafts of next tokens ("auto": where they gain time; `trunkline.controller.drafts`)."""
    dtype: str = "float32"
    tier_policy: str = "look-ahead"
    """Which chunks leave the device and the tiers, and which are fetched early: "look-ahead" goes by the queue
    (CachedAttention §3.3); "predicted" also by when conversations come back (`trunkline.kvstore.next_use`); "lru"
    and "fifo" are for comparison."""
    session_ttl_s: float = 0.0
    """Seconds without use after which cached KV is forgotten, unless its request says otherwise; 0: never."""
    peers: bool = False
    """Whether KV is pulled from other groups, and exported to them."""
    positions_shift: bool = True
    """Whether the model can read cached KV at other positions than those at which it was computed (CachedAttention
    §3.4); not with learned positions. If not, what remains behind a cut is computed again."""


class EngineConfig(EngineLimits, frozen=True, kw_only=True, dict=True):
    """The configuration of the pure engine: the limits, and what the workers hold."""

    num_blocks: int
    """Number of device blocks; the smallest number that any rank has."""
    ranks: int = 1
    """Number of tensor-parallel workers; each answers every move of a chunk."""
    max_inflight_steps: int = 2
    """Largest number of steps sent but not answered: 2 lets planning of step k + 1 overlap execution of step k."""
    host_slots: int = 0
    """Number of blocks that the workers' host pools hold; the smallest number that any rank has."""
    swap_us_per_block: float = 0.0
    """Microseconds of a save and a load of one block, as the workers measured them at their start."""
    model_fingerprint: bytes = b""
    """Digest of configuration and weights, as they are computed with (quantised or not); part of every chunk's
    name."""
    disk_slots: int = 0
    """Number of blocks that the workers' disk tiers hold; the smallest number that any rank has; 0: no disk
    tier."""
    remote: bool = False
    """Whether every rank has been given a remote tier."""
    write_pause_s: float = 0.0
    """Seconds without requests after which chunks in host memory are written to the tiers below."""
    write_within_s: float = 0.0
    """Seconds after which they are written in any case."""
    window: int = 0
    """Number of tokens that a query sees in the layer with the widest window, its own included; 0: some layer sees
    all tokens."""
    part_window: int = 0
    """Where some layers see all tokens and others have a window: what a query sees in the widest of these; 0: all
    layers are of one kind."""
    whole_blocks: int = 0
    """Number of blocks that can hold KV of the layers with a window at once (`part_window`); 0: all
    (`trunkline.controller.cache.thin_blocks`)."""

    @property
    def kept_blocks(self) -> int:
        """Number of blocks for sequences that keep the KV of all layers."""
        return self.whole_blocks or self.num_blocks

    @cached_property
    def longest_sequence(self) -> int:
        """Largest number of tokens that a sequence can reach alone if it keeps all its KV: the model's limit or
        the whole pool."""
        return min(self.max_context, self.kept_blocks * self.chunk_size)

    @property
    def whole_max(self) -> int:
        """Largest number of whole blocks that a plain sequence holds at once, if blocks may be thin."""
        return window_blocks(self.part_window, self.token_budget, self.chunk_size)

    @property
    def blocks_max(self) -> int:
        """Largest number of blocks that a plain sequence holds at once; 0: as many as it has chunks."""
        if not (self.window and self.prefix_cache):
            return 0
        return window_blocks(self.window, self.token_budget, self.chunk_size)

    @cached_property
    def longest_plain(self) -> int:
        """Largest number of tokens that a plain request of one sequence can reach alone: only the window of it
        need be in the pool."""
        if self.whole_blocks:
            return min(self.max_context, self.num_blocks * self.chunk_size)
        return self.max_context if 0 < self.blocks_max < self.num_blocks else self.longest_sequence

    def validate(self) -> None:
        """Raise `ConfigError` for the first field that cannot work."""
        require(self.num_blocks >= 2, f"num_blocks is {self.num_blocks}; a group needs at least 2 blocks")
        require(1 <= self.chunk_size <= 1024, f"chunk_size is {self.chunk_size}; allowed are 1 to 1024 tokens")
        require(self.max_context >= 2, f"max_context is {self.max_context}; at least 2 tokens are needed")
        require(self.max_rows >= 1, f"max_rows is {self.max_rows}; at least 1 sequence must run")
        require(
            self.token_budget > self.max_rows,
            f"token_budget is {self.token_budget}; it must exceed max_rows ({self.max_rows}), "
            "or a full batch would leave no room for prefill",
        )
        require(self.max_waiting >= 1, f"max_waiting is {self.max_waiting}; at least 1 request must wait")
        require(
            self.preemption in PREEMPTIONS,
            f"preemption is {self.preemption!r}; allowed are {', '.join(PREEMPTIONS)}",
        )
        require(self.host_slots >= 0, f"host_slots is {self.host_slots}; it counts blocks")
        require(
            self.preemption != "swap" or self.host_slots > 0,
            "preemption is 'swap', but the workers have no host pool; give them host memory",
        )
        require(
            self.preemption != "swap" or self.prefix_cache,
            "preemption is 'swap', but without the prefix cache nothing is found again",
        )
        require(
            0 <= self.target_itl_ms < math.inf,
            f"target_itl_ms is {self.target_itl_ms}; it is a time in milliseconds, 0 for no target",
        )
        require(
            1 <= self.max_inflight_steps <= 2,
            f"max_inflight_steps is {self.max_inflight_steps}; step sockets hold 1 or 2 unanswered steps",
        )
        require(
            self.speculation in SPECULATIONS,
            f"speculation is {self.speculation!r}; allowed are {', '.join(SPECULATIONS)}",
        )
        self._validate_tiers()
        self._validate_thin()

    def _validate_thin(self) -> None:
        whole, least = self.whole_blocks, self.whole_max + 1
        require(0 <= whole <= self.num_blocks, f"whole_blocks is {whole}; the pool has {self.num_blocks} blocks")
        if not whole:
            return
        require(
            self.part_window > 0, f"whole_blocks is {whole}, but no layers with a window are beside others without"
        )
        require(
            whole >= least,
            f"whole_blocks is {whole}, but a window of {self.part_window} tokens and a step of "
            f"{self.token_budget} need {least}; give KV more memory or a larger share to windows "
            "(--window-share), or take smaller steps (--token-budget)",
        )
        require(self.prefix_cache, "blocks can be thin with the prefix cache only")

    def _validate_tiers(self) -> None:
        require(self.disk_slots >= 0, f"disk_slots is {self.disk_slots}; it counts blocks")
        below_host = self.disk_slots > 0 or self.remote
        require(
            not below_host or self.host_slots > 0,
            "there is a disk or remote tier, but no host pool, through which everything passes on its way",
        )
        require(
            not below_host or self.prefix_cache,
            "there is a disk or remote tier, but without the prefix cache nothing is found again",
        )
        require(
            self.tier_policy in TIER_POLICIES,
            f"tier_policy is {self.tier_policy!r}; allowed are {', '.join(TIER_POLICIES)}",
        )
        require(
            0 <= self.session_ttl_s < math.inf,
            f"session_ttl_s is {self.session_ttl_s}; it is a time in seconds, 0 for no limit",
        )

    @property
    def max_blocks_per_sequence(self) -> int:
        return blocks_for(self.longest_plain, self.chunk_size)

    @property
    def max_table_blocks(self) -> int:
        """Largest number of entries of a block table: behind cuts some of their tokens are not seen."""
        return self.max_blocks_per_sequence + HOLE_BLOCKS

    def tiers(self, first_generation: int = 0) -> DirectoryConfig:
        """Return the configuration of the tiers below the device.

        Args:
            first_generation: generations of disk slots begin above this number.
        """
        if not self.prefix_cache:
            return DirectoryConfig()
        return DirectoryConfig(
            host_slots=self.host_slots,
            disk_slots=self.disk_slots,
            remote=self.remote,
            peers=self.peers and self.host_slots > 0,
            policy=EvictionPolicy(self.tier_policy),
            write_pause_s=self.write_pause_s,
            write_within_s=self.write_within_s,
            first_generation=first_generation,
        )
