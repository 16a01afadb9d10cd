"""Decode attention on a CPU: one step's attention of a batch whose rows share a prefix (ChunkAttention, Table 3).

    python benchmarks/decode_attention.py [--quick] [--json PATH] [--part NAME] [--threads 1|2] [--beside LIBRARY]

Parts: grid, merge, diverge, batch, open, chunks, plan; all without `--part`. With `--beside` there is only this:
attention by this build's kernels and by those of another one, a library (`_native.so`) of the same interface, in
turn in one process, plain and batch-invariant. A row's context is `n_p` tokens, the first `n_s` of them shared by
all rows, and one token of its own. `open` has rows as a server has them, with 17 to 112 tokens behind 1,024
shared ones, and the heads of the small model. `plan` runs no attention: it builds the plan of 32 beams, eight
searches of four, with 20 to 32 blocks each. Implementations, interleaved in rounds within a cell:

- tpp: two-phase partition, what the engine uses.
- sequence_first: the same kernels without batching over rows, on the same shared pages (the paper's PagedAttn*).
- tpp_buffer: partial results through a temporary buffer instead of in place (part `merge`).
- sdpa_fp32, sdpa_bf16: torch over private contiguous copies, which is all that torch can do; independent of `n_s`.
- read_bandwidth, matmul_bf16: what this machine gives at most, measured in the same run.

The pool has several layers, used in turn, so that what one call reads has left the caches before it is read again,
as in a model. Time of one thread is CPU time, of several wall time; medians.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from builds import add_beside, of_builds
from report import Report, argument_parser
from torch import Tensor

from trunkline.kernels.cpu import CpuKernels
from trunkline.kernels.cpu_plans import CpuDecodeWork, Planning
from trunkline.kernels.large_pages import advise_large_pages
from trunkline.kernels.native import isa_levels, library
from trunkline.kernels.ops import AttentionSpec, KernelCounters, KvPool
from trunkline.kernels.plan import DecodePlan, Segments, build_decode_plan, plan_decode_work
from trunkline.kvstore.chunks import Int32Array

POOL_BYTES_MIN: Final = 192 << 20
"""Several times the last-level cache: what a round of layers reads at least, where layers are many enough."""
LAYERS_MAX: Final = 192
SCATTER_BLOCKS: Final = 64
PARTS: Final = ("grid", "merge", "diverge", "batch", "open", "chunks", "plan")
SEARCHES, WIDTH = 8, 4
"""Of part `plan`."""


@dataclass(frozen=True)
class Case:
    """One cell."""

    n_p: int
    n_s: int
    batch: int = 32
    heads: int = 8
    kv_heads: int = 8
    d: int = 128
    threads: int = 1
    chunk: int = 64

    spread: int = 0
    """How many tokens more than the first row the last one has; `n_p` is the middle."""

    @property
    def totals(self) -> Int32Array:
        """Tokens of each row's context."""
        ends = self.n_p + 1 - self.spread // 2, self.n_p + 1 + self.spread - self.spread // 2
        return np.linspace(*ends, self.batch).astype(np.int32)

    @property
    def distinct_tokens(self) -> int:
        """Tokens of KV that exist."""
        return int(self.n_s + (self.totals - self.n_s).sum())

    @property
    def layer_bytes(self) -> int:
        return self.distinct_tokens * self.kv_heads * self.d * 2 * 2

    @property
    def flops(self) -> int:
        return int(self.totals.sum()) * self.heads * self.d * 4


def make_plan(case: Case) -> tuple[DecodePlan, int]:
    """The plan, and the number of blocks it uses."""
    chunk, totals = case.chunk, case.totals
    shared = case.n_s // chunk
    tables = -(-totals // chunk)
    begins = np.cumsum(tables) - tables
    row = np.repeat(np.arange(case.batch), tables)
    index = np.arange(len(row)) - begins[row]
    own = begins - np.arange(case.batch) * shared  # how many own blocks the rows before have
    block = np.where(index < shared, index, own[row] + index)
    count = np.minimum(chunk, totals[row] - index * chunk)
    zeros = np.zeros(len(row))
    columns = (row, index, block, zeros, count, index * chunk, zeros)
    segments = Segments(*(column.astype(np.int32) for column in columns))
    runs = np.array([[0, case.batch, 0, shared]] if shared and case.batch > 1 else [], dtype=np.int32).reshape(
        -1, 4
    )
    return build_decode_plan(segments, totals - 1, runs, chunk), int(block.max()) + 1


class Setup:
    """Inputs of a cell: pool, queries, plans."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.plan, blocks = make_plan(case)
        self.layers = max(2, min(LAYERS_MAX, math.ceil(POOL_BYTES_MIN / case.layer_bytes)))
        shape = (blocks, self.layers, 2, case.kv_heads, case.chunk, case.d)
        data = torch.empty(shape, dtype=torch.bfloat16)
        advise_large_pages(data)  # as the worker does
        self.pool = KvPool.wrap(data)
        self.spec = AttentionSpec(case.heads, case.kv_heads, case.d, case.d**-0.5)
        generator = torch.Generator().manual_seed(0)
        self.q = torch.randn(case.batch, case.heads, case.d, generator=generator).bfloat16()
        data = torch.randn((SCATTER_BLOCKS, *shape[1:]), generator=generator).bfloat16()
        kernels = CpuKernels(threads=2)
        for begin in range(0, blocks, SCATTER_BLOCKS):
            ids = np.arange(begin, min(begin + SCATTER_BLOCKS, blocks), dtype=np.int32)
            kernels.scatter_blocks(self.pool, ids, range(self.layers), data[: len(ids)])
        # Open tails are in plain order.
        self.pool.packed[torch.from_numpy(self.plan.block[self.plan.tail_item]).long()] = 0

    def runner(self, start: float = 0.0, **options: object) -> Callable[[], None]:
        """Attention of one layer after the other, one per call, from this fraction of the layers on: what runs
        in turn with another must not find in the cache what that has just read."""
        kernels = CpuKernels(threads=self.case.threads, **options)  # type: ignore[arg-type]
        plan, out = replace(self.plan, state=None), torch.empty_like(self.q)
        layer = int(start * self.layers)

        def run() -> None:
            nonlocal layer
            kernels.decode_attention(plan, self.q, self.pool, layer, self.spec, out)
            layer = (layer + 1) % self.layers

        return run


def timed(run: Callable[[], object], threads: int) -> float:
    """Microseconds of one call."""
    clock = time.process_time if threads == 1 else time.perf_counter
    start = clock()
    run()
    return (clock() - start) * 1e6


def measure(runs: Mapping[str, Callable[[], object]], threads: int, rounds: int) -> dict[str, float]:
    """Median microseconds of each, interleaved."""
    torch.set_num_threads(threads)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(timed(run, threads))
    return {name: median(values) for name, values in times.items()}


def rounds_for(case: Case, quick: bool) -> int:
    """More rounds for short cells."""
    reads = case.layer_bytes / 30e3  # microseconds
    return int(min(60, max(5, (50e3 if quick else 400e3) / reads)))


def case_of(case: Case, impl: str) -> dict[str, object]:
    return {"impl": impl, **vars(case)}


def sdpa(case: Case, dtype: torch.dtype) -> Callable[[], Tensor]:
    shape = (case.batch, case.kv_heads, case.n_p + 1, case.d)
    pattern = torch.randn(1, case.kv_heads, case.n_p + 1, case.d)
    k, v = (pattern.to(dtype).expand(shape).contiguous() for _ in range(2))
    q = torch.randn(case.batch, case.heads, 1, case.d).to(dtype)
    return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=case.heads != case.kv_heads)


def ceilings(report: Report, threads: int, quick: bool) -> tuple[float, float]:
    """(bytes/us read, FLOPs/us of a bf16 matmul): the machine's limits at this number of threads."""
    torch.set_num_threads(threads)
    big, size = torch.ones(64 << 20), 2048
    module: Any = library()
    context = module.cpu_context_new(len(isa_levels()) - 1, threads)
    a, b = torch.randn(size, size).bfloat16(), torch.randn(size, size).bfloat16()
    rounds = 5 if quick else 15
    # Apart: torch's threads go on spinning for a while after a product, on the cores of whoever comes next.
    times = measure({"read": lambda: module.limit_read(context, big)}, threads, rounds)
    times |= measure({"matmul": lambda: a @ b}, threads, rounds)
    module.cpu_context_delete(context)
    bandwidth, flops = big.numel() * 4 / times["read"], 2 * size**3 / times["matmul"]
    report.add({"impl": "read_bandwidth", "threads": threads}, "bandwidth", bandwidth / 1e3, "GB/s", rounds)
    report.add({"impl": "matmul_bf16", "threads": threads}, "rate", flops / 1e3, "GFLOP/s", rounds)
    return bandwidth, flops


def grid(report: Report, quick: bool, threads_wanted: int | None) -> None:
    lengths = (1024, 4096) if quick else (1024, 2048, 4096)
    widths = (128,) if quick else (64, 128)
    for threads in (threads_wanted,) if threads_wanted else (1, 2):
        bandwidth, flops = ceilings(report, threads, quick)
        for heads in (8, 32):
            for d in widths:
                for n_p in lengths:
                    base = Case(n_p, 0, heads=heads, d=d, threads=threads)
                    torch_times = {} if quick and n_p > 1024 else torch_baselines(report, base, quick)
                    for n_s in (0, n_p // 2, n_p // 4 * 3, n_p):
                        case = replace(base, n_s=n_s)
                        cell(report, case, (bandwidth, flops), torch_times, quick)


def torch_baselines(report: Report, case: Case, quick: bool) -> dict[str, float]:
    times: dict[str, float] = {}
    for name, dtype, rounds in (("sdpa_fp32", torch.float32, 5), ("sdpa_bf16", torch.bfloat16, 3)):
        run = sdpa(case, dtype)
        times |= measure({name: run}, case.threads, 2 if quick else rounds)
        report.add(case_of(case, name), "time_us", times[name], "us", 2 if quick else rounds)
    return times


def cell(
    report: Report, case: Case, limits: tuple[float, float], torch_times: dict[str, float], quick: bool
) -> None:
    setup, rounds = Setup(case), rounds_for(case, quick)
    runs = {"tpp": setup.runner(), "sequence_first": setup.runner(0.5, share=False)}
    times = measure(runs, case.threads, rounds)
    for name, value in times.items():
        report.add(case_of(case, name), "time_us", value, "us", rounds)
    tpp = times["tpp"]
    shown = case_of(case, "tpp")
    report.add(shown, "of_read_bandwidth", case.layer_bytes / tpp / limits[0], "ratio", rounds)
    report.add(shown, "of_matmul", case.flops / tpp / limits[1], "ratio", rounds)
    report.add(shown, "speedup_over_sequence_first", times["sequence_first"] / tpp, "ratio", rounds)
    if "sdpa_fp32" in torch_times:
        report.add(shown, "speedup_over_sdpa_fp32", torch_times["sdpa_fp32"] / tpp, "ratio", rounds)


def merge(report: Report, quick: bool) -> None:
    """B9: partials merged in place against a temporary buffer."""
    for threads in (1, 2):
        for n_p, n_s in ((1024, 0), (1024, 512), (4096, 2048), (4096, 4096)):
            case = Case(n_p, n_s, threads=threads)
            setup = Setup(case)
            runs = {"tpp": setup.runner(), "tpp_buffer": setup.runner(0.5, merge="buffer")}
            rounds = rounds_for(case, quick)
            for name, value in measure(runs, threads, rounds).items():
                report.add({"part": "merge", **case_of(case, name)}, "time_us", value, "us", rounds)


def diverge(report: Report, quick: bool) -> None:
    """B12: rows share 2,048 tokens and have n_c of their own."""
    for n_c in (1, 64, 512) if quick else (1, 64, 128, 256, 384, 512, 1024, 2048):
        case = Case(2048 + n_c - 1, 2048)
        setup = Setup(case)
        rounds = rounds_for(case, quick)
        runs = {"tpp": setup.runner(), "sequence_first": setup.runner(0.5, share=False)}
        for name, value in measure(runs, 1, rounds).items():
            shown = {"part": "diverge", "n_c": n_c, **case_of(case, name)}
            report.add(shown, "rate", case.batch / value * 1e6, "tokens/s of one layer", rounds)


def batch(report: Report, quick: bool) -> None:
    """B12: b from 1 to 96 rows that share 2,048 of 2,304 tokens."""
    for rows in (1, 8, 96) if quick else (1, 2, 4, 8, 16, 32, 64, 96):
        case = Case(2304, 2048, batch=rows)
        setup = Setup(case)
        rounds = rounds_for(case, quick)
        runs = {"tpp": setup.runner(), "sequence_first": setup.runner(0.5, share=False)}
        for name, value in measure(runs, 1, rounds).items():
            shown = {"part": "batch", **case_of(case, name)}
            report.add(shown, "rate", rows / value * 1e6, "tokens/s of one layer", rounds)


def open_chunks(report: Report, quick: bool) -> None:
    """A step of 32 rows of the small model, beside the matrix product of the same minute."""
    limits = ceilings(report, 1, quick)
    for rows in (32,) if quick else (8, 32):
        cell(report, Case(1088, 1024, batch=rows, heads=12, kv_heads=4, d=64, spread=95), limits, {}, quick)


def chunks(report: Report, quick: bool) -> None:
    """Chunk sizes, without sharing and with three quarters shared."""
    for chunk in (16, 64) if quick else (16, 32, 64, 128):
        for n_s in (0, 1536):
            case = Case(2048, n_s, chunk=chunk)
            rounds = rounds_for(case, quick)
            times = measure({"tpp": Setup(case).runner()}, 1, rounds)
            report.add({"part": "chunks", **case_of(case, "tpp")}, "time_us", times["tpp"], "us", rounds)


def beams(rng: np.random.Generator, chunk: int) -> tuple[Segments, Int32Array, Int32Array]:
    """Segments, positions and runs of searches whose beams parted at random blocks, as the controller plans them:
    a run over all full blocks of a search, whichever of them are the same."""
    columns: list[tuple[int, ...]] = []
    runs, positions, block = [], [], 0
    for search in range(SEARCHES):
        full = int(rng.integers(19, 32))
        parted = sorted(rng.integers(full // 2, full, WIDTH))
        common = list(range(block, block + full))
        block += full
        for beam, at in enumerate(parted):
            row = search * WIDTH + beam
            own = range(block, block + full + 1 - int(at))
            block += len(own)
            table = [*common[: int(at)], *own]
            tail = int(rng.integers(1, chunk))
            positions.append(full * chunk + tail - 1)
            for index, place in enumerate(table):
                columns.append((row, index, place, 0, tail if index == full else chunk, index * chunk, 0))
        runs.append((search * WIDTH, (search + 1) * WIDTH, 0, full))
    arrays = np.array(columns, dtype=np.int32).T
    return Segments(*arrays), np.array(positions, dtype=np.int32), np.array(runs, dtype=np.int32)


def plan(report: Report, quick: bool) -> None:
    """What a worker builds when beams have moved: Python and native part together."""
    rounds = 200 if quick else 2000
    inputs = [(*beams(np.random.default_rng(seed), 64), 64) for seed in range(10)]
    options = Planning(1, 0, True, KernelCounters()).options(AttentionSpec(8, 8, 128, 128**-0.5), 2)
    blocks, times = [], []
    for round_ in range(rounds):
        segments, positions, runs, chunk = inputs[round_ % len(inputs)]
        start = time.perf_counter()
        CpuDecodeWork(plan_decode_work(build_decode_plan(segments, positions, runs, chunk), options))
        times.append(time.perf_counter() - start)
        blocks.append(len(segments.row) / (SEARCHES * WIDTH))
    case = {"part": "plan", "rows": SEARCHES * WIDTH, "blocks": round(median(blocks), 1)}
    report.add(case, "build_time", 1e6 * median(times), "us", rounds)


def builds(report: Report, quick: bool, beside: Path) -> None:
    """Rows with 1,024 tokens of their own, and rows as in `open`, by two builds."""
    for heads, kv_heads, d in ((12, 4, 64), (32, 8, 128)):
        base = Case(1023, 0, heads=heads, kv_heads=kv_heads, d=d)
        for rows in (1, 32) if quick else (1, 4, 8, 32):
            own = replace(base, batch=rows)
            for case in (own, replace(own, n_p=1088, n_s=1024, spread=95)) if rows > 1 else (own,):
                setup, rounds = Setup(case), rounds_for(case, quick)
                for invariant in (False, True):
                    starts = iter((0.0, 0.5))
                    made = of_builds(beside, lambda: setup.runner(next(starts), invariant=invariant))  # noqa: B023
                    times = measure(dict(zip(("this", "other"), made, strict=True)), case.threads, rounds)
                    shown = {"part": "builds", "invariant": invariant, **case_of(case, "tpp")}
                    report.add(shown, "time_us", times["this"], "us", rounds)
                    report.add(shown, "of_other_build", times["this"] / times["other"], "ratio", rounds)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--part", choices=PARTS, help="only this part")
    parser.add_argument("--threads", type=int, choices=(1, 2), help="of the grid; default: both")
    add_beside(parser)
    arguments: argparse.Namespace = parser.parse_args()
    report = Report("decode_attention")
    if arguments.beside is not None:
        builds(report, arguments.quick, arguments.beside)
        report.finish(arguments.json)
        return
    parts = {
        "merge": merge,
        "diverge": diverge,
        "batch": batch,
        "open": open_chunks,
        "chunks": chunks,
        "plan": plan,
    }
    for name in [arguments.part] if arguments.part else PARTS:
        if name == "grid":
            grid(report, arguments.quick, arguments.threads)
        else:
            parts[name](report, arguments.quick)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
