"""`trunkline size`: compute how much memory the sessions of a cluster need, by CachedAttention's capacity rule
(§4.5).

    CCpUT = DSpUT x CCpS

CCpS is what the KV of one session can come to, DSpUT how many distinct sessions are served within the time for
which KV is kept, and CCpUT the capacity with which every later turn finds its KV. Far less is enough, because
some sessions are used more than others: `SHARES` has what a part of CCpUT finds, measured in simulation with this
project's directory of tiers (docs/measurements/sessions.md, "Hit rate"), and what the paper found.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from trunkline.controller.engine_config import EngineLimits
from trunkline.deploy.cli.option_commands import NUMBER, WHOLE, run
from trunkline.deploy.config import models
from trunkline.deploy.config.option_values import check_range, format_bytes
from trunkline.deploy.errors import UserError
from trunkline.kvstore.chunk_format import KV_DTYPES
from trunkline.kvstore.chunks import blocks_for
from trunkline.kvstore.windows import window_blocks
from trunkline.worker.config import DTYPES
from trunkline.worker.errors import WorkerError
from trunkline.worker.model.families import read_model_config
from trunkline.worker.model.model_config import ModelConfig
from trunkline.worker.model.parallelism import check_parallelism

_CHUNK_SIZE: Final = 64
_STEP_TOKENS: Final = EngineLimits().token_budget
"""Largest number of tokens of a sequence that a step computes."""


def size(
    model: Annotated[
        str, typer.Argument(help="As for serve; of a folder only config.json is needed.", metavar="MODEL")
    ] = "demo",
    sessions_per_hour: Annotated[float, typer.Option(help="Different sessions in an hour.", **NUMBER)] = 1000.0,
    context: Annotated[
        int | None,
        typer.Option(help="Tokens of a session. Default: the model's longest context.", **WHOLE),
    ] = None,
    ttl: Annotated[
        float, typer.Option(help="Seconds for which KV is kept after its last use (--session-ttl).", **NUMBER)
    ] = 3600.0,
    concurrent: Annotated[int, typer.Option(help="Requests that run at the same time.", **WHOLE)] = 32,
    dtype: Annotated[
        str, typer.Option(help="Number format of KV: float32, bfloat16, float16, int8 or fp8.")
    ] = "bfloat16",
    tp: Annotated[int, typer.Option(help="Tensor-parallel workers per group.", **WHOLE)] = 1,
) -> None:
    """Compute how much memory the KV of your sessions needs.

    [bold]Examples[/]

    trunkline size ./my-llama --sessions-per-hour 5000 --context 4096

    trunkline size ./my-llama --ttl 86400 --tp 8 --dtype float16
    """
    run(lambda: _print(_sized(model, (sessions_per_hour, context, ttl, concurrent), dtype, tp)))


def _sized(model: str, asked: tuple[float, int | None, float, int], dtype: str, tp: int) -> Sizing:
    allowed = (*DTYPES, *KV_DTYPES[1:])
    if dtype not in allowed:
        raise UserError(f"--dtype is {dtype!r}; allowed are {', '.join(allowed)}")
    check_range("--tp", tp, 1, 4096)
    folder = Path(model).expanduser()
    try:
        config = read_model_config(folder if os.path.isfile(folder / "config.json") else models.resolve(model))
        check_parallelism(config, tp)
    except WorkerError as error:
        raise UserError(str(error)) from error
    sessions_per_hour, context, ttl, concurrent = asked
    demand = Demand(sessions_per_hour, config.max_positions if context is None else context, ttl, concurrent)
    return memory_for(config, demand, dtype=dtype, chunk_size=_CHUNK_SIZE, tp=tp)


def _print(sizing: Sizing) -> None:
    console = Console(highlight=False)
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    facts.add_row("KV of a token", format_bytes(sizing.token_bytes))
    facts.add_row("of a session (CCpS)", format_bytes(sizing.session_bytes))
    facts.add_row("distinct sessions within the time KV is kept (DSpUT)", f"{sizing.sessions:,.0f}")
    facts.add_row("all of them (CCpUT)", format_bytes(sizing.capacity_bytes))
    facts.add_row("sequences that run at once, sharing nothing", format_bytes(sizing.running_bytes))
    console.print(facts)
    table = Table(
        "capacity", "of CCpUT", "later turns that find their KV", "in the paper", box=None, padding=(0, 2, 0, 0)
    )
    for share, found, paper in SHARES:
        table.add_row(format_bytes(round(sizing.capacity_bytes * share)), f"{share:.0%}", found, paper)
    console.print()
    console.print(table)
    console.print(
        "\nCapacity is host memory, disk and remote tier of all groups together. Device memory needs what runs at "
        "once, beside the weights. The share of turns that find their KV was measured in a simulation with the "
        "paper's sessions: measure yours (trunkline top, docs/operating.md)."
    )


SHARES: Final = ((0.1, "64 %", "51 %"), (0.25, "99.9 %", "98 %"), (1.0, "100 %", "100 %"))
"""Hit rates by capacity, in rows of three: the part of CCpUT, the share of later turns that find their KV in this
project, and that share in the paper."""
_HOUR_S: Final = 3600.0


@dataclass(frozen=True)
class Demand:
    """The sessions that are to be served."""

    sessions_per_hour: float
    """Distinct sessions in an hour."""
    context: int
    """Number of tokens of a session, including its history: the largest number for a safe result, or the average
    for a lower one."""
    ttl_s: float
    """Time in seconds for which KV is kept after its last use."""
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
                raise UserError(f"{option} is {value:g}; it must be more than 0 and less than 1e+12")


@dataclass(frozen=True)
class Sizing:
    """The memory for a demand, in bytes of all ranks of a group together."""

    token_bytes: int
    """Bytes of the KV of one token."""
    session_bytes: int
    """CCpS: bytes of the KV of one session, in whole chunks."""
    sessions: float
    """DSpUT: number of distinct sessions within the time for which KV is kept."""
    capacity_bytes: int
    """CCpUT: bytes with which every later turn finds its KV."""
    running_bytes: int
    """Bytes of the KV of the sequences that run at once if they share nothing: device memory needed besides the
    weights. Where all layers have a window, a sequence needs one window and one step of it."""


def memory_for(model: ModelConfig, demand: Demand, *, dtype: str, chunk_size: int, tp: int) -> Sizing:
    """Return the memory that a demand needs.

    Args:
        dtype: The number format of KV: "float32", "bfloat16", "float16", or "int8" or "fp8" with their scales.
        chunk_size: Tokens of a chunk.
        tp: Ranks of a group; KV heads that cannot be divided among them are kept by several.

    Raises:
        UserError: The demand is impossible, or the model cannot hold such a context.
    """
    demand.validate()
    if demand.context > model.max_positions:
        raise UserError(f"--context is {demand.context}; the model allows at most {model.max_positions} tokens")
    types = ("bfloat16", dtype) if dtype in KV_DTYPES else (dtype, "auto")
    block_bytes = model.chunk_format(chunk_size, *types).of_rank(tp).chunk_bytes * tp
    session_bytes = blocks_for(demand.context, chunk_size) * block_bytes
    sessions = demand.sessions_per_hour * demand.ttl_s / _HOUR_S
    running_blocks = blocks_for(demand.context, chunk_size)
    if model.window:
        running_blocks = min(running_blocks, window_blocks(model.window, _STEP_TOKENS, chunk_size))
    return Sizing(
        token_bytes=block_bytes // chunk_size,
        session_bytes=session_bytes,
        sessions=sessions,
        capacity_bytes=round(sessions * session_bytes),
        running_bytes=demand.concurrent * running_blocks * block_bytes,
    )
