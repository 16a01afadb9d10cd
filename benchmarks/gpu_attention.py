"""Decode attention on the GPU (part `decode`): ChunkAttention's Table 3, batches, and how work is best cut."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, Final
from unittest.mock import patch

import torch
from gpu_cases import ACCEPT_US, GOAL_US, TABLE_3, Buffers, Cell, make_buffers, replay_error, target_us
from gpu_device import Call, Gpu, Output, Visit
from gpu_errors import LIMITS

from trunkline.kernels import cuda, cuda_decode
from trunkline.kernels.cuda import CudaKernels
from trunkline.kvstore.chunk_format import KV_DTYPES

BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 96)
BATCH_CELL: Final = Cell(2304, 2048, 32, 8)
SWEPT: Final = (
    *(Cell(2048, 0, 32, 8), Cell(2048, 1024, 32, 8), Cell(4096, 2048, 32, 8), Cell(4096, 4096, 32, 8)),
    *(Cell(4096, 2048, 32, 32), Cell(4096, 4096, 32, 32), Cell(4096, 2048, 32, 8, kv_dtype="int8")),
)
"""Cells in which cuts and stages are tried out."""
UNITS: Final = tuple(Cell(2049, 2048, 32, 8, batch=batch) for batch in (4, 8, 16))
"""Cells in which the shared tokens are cut into more and more pieces, of 16, 32 and 64 query vectors: so one sees
what a unit takes besides its tiles."""
PARTS: Final = (1, 2, 4, 8, 16)
KEPT: Final = tuple(
    replace(cell, kv_dtype=kv_dtype)
    for cell in (Cell(4096, 0, 32, 8), Cell(4096, 2048, 32, 8), Cell(4096, 4096, 32, 8), Cell(1024, 0, 32, 32))
    for kv_dtype in KV_DTYPES[1:]
)
"""KV in 8 bits, in cells of the table."""
PIECES: Final = (1, 2, 4, 8)
"""Of each thread block."""
PIECE_TOKENS: Final = (128, 256, 512, 1024)


@dataclass(frozen=True)
class Cells:
    """What is measured."""

    table: Sequence[Cell] = TABLE_3
    batches: Sequence[int] = BATCHES
    batch_cell: Cell = BATCH_CELL
    swept: Sequence[Cell] = SWEPT
    kept: Sequence[Cell] = KEPT
    units: Sequence[Cell] = UNITS


def measure_decode(gpu: Gpu, out: Output, visit: Visit, cells: Cells | None = None) -> None:
    """The table, KV in 8 bits, batches, pieces and stages, attention and merge apart; as far as the time goes."""
    cells = cells or Cells()
    bandwidth = gpu.copy_bandwidth(1 << 30 if gpu.device.type == "cuda" else 1 << 16)
    table = cells.table[1::2] if visit.quick else cells.table
    for cell in table:
        if visit.has_used(0.55):
            out.note(f"no time was left for {cell} and what follows it in the table")
            break
        measure_cell(gpu, out, cell, bandwidth)
    for cell in cells.kept:
        if visit.has_used(0.65):
            out.note(f"no time was left for {cell} and what follows it of KV in 8 bits")
            break
        measure_cell(gpu, out, cell, bandwidth)
    for batch in cells.batches:
        if visit.has_used(0.75):
            out.note(f"no time was left for a batch of {batch} and more")
            break
        measure_cell(gpu, out, replace(cells.batch_cell, batch=batch), bandwidth)
    for cell in cells.units:
        if visit.has_used(0.8):
            out.note(f"no time was left for what units take in {cell}")
            break
        measure_units(gpu, out, cell)
    for cell in cells.swept:
        if visit.has_used(0.9):
            out.note(f"no time was left to sweep {cell}")
            break
        sweep(gpu, out, cell)
        split(gpu, out, cell)


def case_of(cell: Cell) -> dict[str, Any]:
    return {
        "heads": cell.name,
        "batch": cell.batch,
        "n_p": cell.n_p,
        "n_s": cell.n_s,
    }


def make_sets(gpu: Gpu, out: Output, cell: Cell) -> list[Buffers]:
    """Buffers to use in turn; none if the memory does not suffice."""
    gpu.empty_cache()
    count = cell.rotated_sets(gpu.cache_bytes)
    needed = cell.pool_bytes * (count + 1)
    if needed > gpu.free_bytes:
        out.note(f"{cell} needs {needed / 1e9:.0f} GB of memory")
        return []
    return [make_buffers(gpu, cell, seed) for seed in range(count)]


def decode_calls(kernels: CudaKernels, cell: Cell, sets: list[Buffers]) -> list[Call]:
    plan, spec = cell.plan(), cell.spec()
    return [partial(kernels.decode_attention, plan, each.q, each.pool, 0, spec, each.out) for each in sets]


def measure_cell(gpu: Gpu, out: Output, cell: Cell, bandwidth: float) -> None:
    """Ours with and without sharing, the planner's time, and what there is to reach."""
    sets = make_sets(gpu, out, cell)
    if not sets:
        return
    for share, name in ((True, "ours"), (False, "each row alone")):
        kernels = gpu.kernels(share=share)
        graph = gpu.graph(decode_calls(kernels, cell, sets), [kernels])
        error = replay_error(gpu, graph, cell, sets)
        if not error <= LIMITS[torch.float16]:
            out.problem(f"decode attention ({name}) at {cell} is off by {error:.2e}")
        out.add(case_of(cell), name, gpu.time_us(graph.replay) / len(sets), "us", 21)
        if share:
            out.add(case_of(cell), "planning, first call", planning_us(gpu, kernels, cell, sets[0]), "us", 5)
    # A copy reads as much as it writes; a pass that only reads is bound by about the same total.
    out.add(case_of(cell), "floor here", cell.floor_bytes / bandwidth * 1e6, "us", 1)
    if cell in TABLE_3:
        out.add(case_of(cell), "accept", target_us(ACCEPT_US, cell), "us", 1)
        out.add(case_of(cell), "goal", target_us(GOAL_US, cell), "us", 1)


def planning_us(gpu: Gpu, kernels: CudaKernels, cell: Cell, buffers: Buffers) -> float:
    """Microseconds on the host of a call with a new plan."""
    times, spec = [], cell.spec()
    for _ in range(5):
        fresh = cell.plan()
        gpu.synchronize()
        start = time.perf_counter()
        kernels.decode_attention(fresh, buffers.q, buffers.pool, 0, spec, buffers.out)
        times.append((time.perf_counter() - start) * 1e6)
    gpu.synchronize()
    return median(times)


@contextmanager
def cut_into(pieces: int, tokens_min: int) -> Iterator[None]:
    """Kernels made inside cut their work so."""
    with (
        patch.object(cuda_decode, "PIECES_PER_WORKER", pieces),
        patch.object(cuda_decode, "PIECE_TOKENS_MIN", dict.fromkeys(cuda_decode.UNIT_NS, tokens_min)),
    ):
        yield


def measure_units(gpu: Gpu, out: Output, cell: Cell) -> None:
    """The shared tokens as one piece, two, four, …; rows' own token is a piece besides."""
    sets = make_sets(gpu, out, cell)
    free = dict.fromkeys(cuda_decode.UNIT_NS, (1, 1))
    for parts in PARTS if sets else ():
        # Where units and merging cost nothing, the finest cut is the best one.
        with (
            patch.object(cuda_decode, "PIECE_TOKENS_MIN", dict.fromkeys(cuda_decode.UNIT_NS, cell.n_s // parts)),
            patch.object(cuda_decode, "UNIT_NS", free),
            patch.object(cuda_decode, "PARTIAL_BYTES_PER_NS", 1 << 30),
        ):
            time_variant(gpu, out, (cell, sets), gpu.kernels(), f"shared tokens in {parts} pieces")


def plan_of(cell: Cell, kernels: CudaKernels, sets: list[Buffers]) -> bytes:
    """The words of the cell's plan as these kernels cut it."""
    return kernels._place(cell.plan(), sets[0].pool, cell.spec())[0].words.numpy().tobytes()


def sweep(gpu: Gpu, out: Output, cell: Cell) -> None:
    """Other cuts, numbers of stages and orders than the built-in ones, which are among them.

    Of cuts with the same plan the first is timed alone.
    """
    sets = make_sets(gpu, out, cell)
    if not sets:
        return
    timed: set[bytes] = set()
    for pieces in reversed(PIECES):
        for tokens in PIECE_TOKENS:
            with cut_into(pieces, tokens):
                kernels = gpu.kernels()
                if (plan := plan_of(cell, kernels, sets)) not in timed:
                    time_variant(gpu, out, (cell, sets), kernels, f"{pieces} pieces of {tokens} tokens or more")
                timed.add(plan)
    shape = gpu.kernels()._shape(sets[0].pool, cell.spec())
    for stages in range(2, shape.stages + 1):
        kernels = gpu.kernels()
        changed = kernels._shape(sets[0].pool, cell.spec())
        changed.stages = stages  # in the memory of all of them, so that as many thread blocks run
        time_variant(gpu, out, (cell, sets), kernels, f"{stages} stages")
    with patch.object(cuda, "NARROW_LAYOUT", True):
        fitting = gpu.kernels()._shape(sets[0].pool, cell.spec()).narrow_stages
    for stages in range(2, fitting + 1):
        kernels = gpu.kernels()
        changed = kernels._shape(sets[0].pool, cell.spec())
        changed.narrow_stages = stages
        time_variant(gpu, out, (cell, sets), kernels, f"{stages} stages for narrow pieces")
    with patch.object(cuda_decode, "DEALT", False):
        time_variant(gpu, out, (cell, sets), gpu.kernels(), "pieces in turns")


def time_variant(
    gpu: Gpu, out: Output, where: tuple[Cell, list[Buffers]], kernels: CudaKernels, name: str
) -> None:
    cell, sets = where
    graph = gpu.graph(decode_calls(kernels, cell, sets), [kernels])
    error = replay_error(gpu, graph, cell, sets)
    if not error <= LIMITS[torch.float16]:
        out.problem(f"decode attention with {name} at {cell} is off by {error:.2e}")
    case = {**case_of(cell), "variant": name}
    out.add(case, "time", gpu.time_us(graph.replay, runs=7) / len(sets), "us", 7)


def split(gpu: Gpu, out: Output, cell: Cell) -> None:
    """Attention and the merge of its partial results, apart."""
    sets = make_sets(gpu, out, cell)
    if not sets:
        return
    calls = decode_calls(gpu.kernels(), cell, sets)

    def all_sets() -> None:
        for call in calls:
            call()

    sums = by_phase(gpu.kernel_times(all_sets))
    for name, spent in sums.items():
        out.add({**case_of(cell), "variant": name}, "time", spent / len(sets), "us", 10)
    if not sums:
        out.note(f"the profiler saw no kernel at {cell}")


def by_phase(times: dict[str, float]) -> dict[str, float]:
    """Microseconds of attention, of the merge, and of all else, by the names of kernels."""
    sums: dict[str, float] = {}
    for name, spent in times.items():
        phase = "merge alone" if "merge" in name else "attention alone" if "attention" in name else "other kernels"
        sums[phase] = sums.get(phase, 0.0) + spent
    return sums
