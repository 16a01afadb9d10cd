"""Compute how much memory the sessions of a cluster need, by CachedAttention's capacity rule (§4.5).

    CCpUT = DSpUT x CCpS

CCpS is what the KV of one session can come to, DSpUT how many distinct sessions are served within the time for
which KV is kept, and CCpUT the capacity with which every later turn finds its KV. Far less is enough, because some
sessions are used more than others: `SHARES` has what a part of CCpUT finds, measured in simulation with this
project's directory of tiers (docs/benchmarks.md, "Hit rate"), and what the paper found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from trunkline.deploy.errors import UserError
from trunkline.kvstore.chunks import blocks_for
from trunkline.worker.model.model_config import ModelConfig

SHARES: Final = ((0.1, "64 %", "51 %"), (0.25, "99.9 %", "98 %"), (1.0, "100 %", "100 %"))
"""Part of CCpUT; later turns that find their KV: here, in the paper."""
_HOUR_S: Final = 3600.0


@dataclass(frozen=True)
class Demand:
    """The sessions that are to be served."""

    sessions_per_hour: float
    """Distinct sessions in an hour."""
    context: int
    """Tokens of a session with its history: at most, or on average for a tighter figure."""
    ttl_s: float
    """How long KV is kept after its last use."""
    concurrent: int
    """Sequences that run at once."""

    def validate(self) -> None:
        """Raise `UserError` for the first value that is impossible."""
        for option, value in (
            ("--sessions-per-hour", self.sessions_per_hour),
            ("--context", self.context),
            ("--ttl", self.ttl_s),
            ("--concurrent", self.concurrent),
        ):
            if not 0 < value < 1e12:
                raise UserError(f"{option} is {value:g}; it must be more than 0")


@dataclass(frozen=True)
class Sizing:
    """The memory for a demand, in bytes of all ranks of a group together."""

    token_bytes: int
    """KV of a token."""
    session_bytes: int
    """CCpS, in whole chunks."""
    sessions: float
    """DSpUT."""
    capacity_bytes: int
    """CCpUT."""
    running_bytes: int
    """KV of the sequences that run at once, if they share nothing: device memory beside the weights."""


def size(model: ModelConfig, demand: Demand, *, dtype: str, chunk_size: int, tp: int) -> Sizing:
    """Return the memory that a demand needs.

    Args:
        dtype: The number format of KV: "float32", "bfloat16" or "float16".
        chunk_size: Tokens of a chunk.
        tp: Ranks of a group; KV heads that cannot be divided among them are kept by several.

    Raises:
        UserError: The demand is impossible, or the model cannot hold such a context.
    """
    demand.validate()
    if demand.context > model.max_positions:
        raise UserError(f"--context is {demand.context}; the model allows at most {model.max_positions} tokens")
    block_bytes = model.kv_block_bytes(chunk_size, tp, dtype) * tp
    session_bytes = blocks_for(demand.context, chunk_size) * block_bytes
    sessions = demand.sessions_per_hour * demand.ttl_s / _HOUR_S
    return Sizing(
        token_bytes=block_bytes // chunk_size,
        session_bytes=session_bytes,
        sessions=sessions,
        capacity_bytes=round(sessions * session_bytes),
        running_bytes=demand.concurrent * session_bytes,
    )
