"""`trunkline size`: compute how much memory the sessions of a cluster need."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from trunkline.deploy.config import models
from trunkline.deploy.config.sizes import format_bytes
from trunkline.deploy.config.sizing import SHARES, Demand, Sizing, size
from trunkline.deploy.errors import UserError
from trunkline.deploy.reporting import run
from trunkline.worker.config import DTYPES
from trunkline.worker.errors import WorkerError
from trunkline.worker.model.families import read_model_config

_CHUNK_SIZE: Final = 64


def command(
    model: Annotated[
        str, typer.Argument(help="As for serve; of a folder only config.json is needed.", metavar="MODEL")
    ] = "demo",
    sessions_per_hour: Annotated[float, typer.Option(help="Different sessions in an hour.")] = 1000.0,
    context: Annotated[
        int | None,
        typer.Option(help="Tokens of a session. Default: the model's longest context."),
    ] = None,
    ttl: Annotated[
        float, typer.Option(help="Seconds for which KV is kept after its last use (--session-ttl).")
    ] = 3600.0,
    concurrent: Annotated[int, typer.Option(help="Requests that run at the same time.")] = 32,
    dtype: Annotated[str, typer.Option(help="Number format of KV: float32, bfloat16 or float16.")] = "bfloat16",
    tp: Annotated[int, typer.Option(help="Tensor-parallel workers per group.")] = 1,
) -> None:
    """Compute how much memory the KV of your sessions needs.

    [bold]Examples[/]

    trunkline size ./my-llama --sessions-per-hour 5000 --context 4096

    trunkline size ./my-llama --ttl 86400 --tp 8 --dtype float16
    """
    run(lambda: _print(_sized(model, (sessions_per_hour, context, ttl, concurrent), dtype, tp)))


def _sized(model: str, asked: tuple[float, int | None, float, int], dtype: str, tp: int) -> Sizing:
    if dtype not in DTYPES:
        raise UserError(f"--dtype is {dtype!r}; allowed are {', '.join(DTYPES)}")
    if not 1 <= tp <= 1024:
        raise UserError(f"--tp is {tp}; allowed are 1 to 1024")
    folder = Path(model).expanduser()
    try:
        config = read_model_config(folder if (folder / "config.json").is_file() else models.resolve(model))
    except WorkerError as error:
        raise UserError(str(error)) from error
    sessions_per_hour, context, ttl, concurrent = asked
    demand = Demand(sessions_per_hour, config.max_positions if context is None else context, ttl, concurrent)
    return size(config, demand, dtype=dtype, chunk_size=_CHUNK_SIZE, tp=tp)


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
