"""What a prompt costs beside its linear layers: attention, measured by the product, and writing its KV.

    python benchmarks/prefill.py [--quick] [--json PATH] [--rounds 15] [--beside LIBRARY]

One thread, CPU time, medians of calls that take turns, so that ratios hold on a machine where others work, too.

- attention: of `new` tokens behind `context`, whose KV is packed, as that of a prompt's earlier steps is.
  `rate`: multiplications and additions of the pairs that a query sees, in a second; `of_product`: divided by what
  the same instructions do in the first-level cache, measured in turn.
- write: KV of a prompt of 2,048 tokens of the small model (one of two ranks), in steps of 1,024, caches cold. Into
  blocks that were never written (`new`), whose memory an idle rank has taken (`ahead`), that were written (`old`).
- builds: only this with `--beside`: attention by this build and by another one (`builds.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from builds import add_beside, compare, of_builds
from report import Report, argument_parser

from trunkline.kernels.cpu import CpuKernels
from trunkline.kernels.ops import Angles, AttentionSpec, KvPool
from trunkline.kernels.plan import PrefillPlan, WritePlan
from trunkline.kvstore.chunk_format import kv_format
from trunkline.kvstore.chunks import pack_int32
from trunkline.worker.messages import Join, Sampling, StepPlan
from trunkline.worker.model.decoder import make_kv_pool
from trunkline.worker.pool_memory import MemoryAhead

CHUNK: Final = 64
PRODUCTS: Final = 20_000
"""Products between two looks at the clock: some milliseconds."""
STEP: Final = 1024
PROMPT: Final = 2048
LAYERS: Final = 12
SPEC: Final = AttentionSpec(heads=6, kv_heads=2, head_dim=64, scale=64**-0.5)
"""One rank of two of the small model."""
COLD_BYTES: Final = 64 << 20


class Case(NamedTuple):
    """A step of a prompt: heads of a rank, tokens before it, new ones."""

    heads: int
    kv_heads: int
    d: int
    context: int
    new: int

    @property
    def flop(self) -> float:
        """Of the pairs that a query sees: products for scores and for values."""
        return 4.0 * self.heads * self.d * self.new * (self.context + (self.new + 1) / 2)


CASES: Final = (
    Case(6, 2, 64, 0, 1024),
    Case(6, 2, 64, 1024, 1024),
    Case(6, 2, 64, 7168, 1024),
    Case(8, 2, 128, 0, 1024),
    Case(8, 2, 128, 1024, 1024),
    Case(4, 4, 64, 1024, 1024),
)


class Attention:
    """Attention of a step, one layer of it."""

    def __init__(self, case: Case, kernels: CpuKernels) -> None:
        self._kernels = kernels
        self._spec = AttentionSpec(case.heads, case.kv_heads, case.d, case.d**-0.5)
        total = case.context + case.new
        blocks = -(-total // CHUNK)
        generator = torch.Generator().manual_seed(0)
        shape = (blocks, 1, 2, case.kv_heads, CHUNK, case.d)
        self._pool = KvPool.wrap(torch.empty(shape, dtype=torch.bfloat16))
        data = torch.randn(shape, generator=generator).bfloat16()
        kernels.scatter_blocks(self._pool, np.arange(blocks, dtype=np.int32), range(1), data)
        self._q = torch.randn(case.new, case.heads, case.d, generator=generator).bfloat16()
        self._out = torch.empty_like(self._q)
        arrays = {
            "query_indptr": [0, case.new],
            "query_position": range(case.context, total),
            "item_indptr": [0, blocks],
            "block": range(blocks),
            "first": [0] * blocks,
            "count": [min(CHUNK, total - block * CHUNK) for block in range(blocks)],
            "base": range(0, total, CHUNK),
            "shift": [0] * blocks,
        }
        self._plan = PrefillPlan(CHUNK, **{name: np.array(each, dtype=np.int32) for name, each in arrays.items()})

    def __call__(self) -> None:
        self._kernels.prefill_attention(self._plan, self._q, self._pool, 0, self._spec, self._out)


def timed(call: Callable[[], object]) -> float:
    begun = time.thread_time()
    call()
    return time.thread_time() - begun


def attention(report: Report, kernels: CpuKernels, cases: tuple[Case, ...], rounds: int) -> None:
    module: Any = kernels._module
    like, handle = torch.empty(1, dtype=torch.bfloat16), kernels.context.handle
    done = module.limit_multiply(handle, like, PRODUCTS)
    steps = [Attention(case, kernels) for case in cases]
    for step in steps:
        step()
    shares: list[list[float]] = [[] for _ in cases]
    rates: list[list[float]] = [[] for _ in cases]
    for _ in range(rounds):
        for number, (case, step) in enumerate(zip(cases, steps, strict=True)):
            before = timed(lambda: module.limit_multiply(handle, like, PRODUCTS))
            rate = case.flop / timed(step)
            behind = timed(lambda: module.limit_multiply(handle, like, PRODUCTS))
            rates[number].append(rate / 1e9)
            shares[number].append(rate / (2 * done / (before + behind)))
    for case, found, share in zip(cases, rates, shares, strict=True):
        shown = {"part": "attention", **case._asdict()}
        report.add(shown, "rate", median(found), "GFLOP/s", rounds)
        report.add(shown, "of_product", median(share), "ratio", rounds)


def builds(report: Report, beside: Path, cases: tuple[Case, ...], rounds: int) -> None:
    of_this, of_other = of_builds(beside, lambda: CpuKernels(threads=1))
    for case in cases:
        this, other = Attention(case, of_this), Attention(case, of_other)
        compare(report, case._asdict(), partial(timed, this), partial(timed, other), rounds)


class Writes:
    """Prompts whose KV is written, each into blocks that follow those of the one before."""

    def __init__(self, kernels: CpuKernels, prompts: int) -> None:
        self._kernels = kernels
        part = kv_format((LAYERS, SPEC.kv_heads, CHUNK, SPEC.head_dim), "bfloat16")
        self.pool = make_kv_pool(prompts * PROMPT // CHUNK, part, torch.device("cpu"))
        self._qkv = torch.randn(STEP, SPEC.qkv_width).bfloat16()
        self._angles = Angles(torch.ones(STEP, 1, SPEC.head_dim), torch.zeros(STEP, 1, SPEC.head_dim))
        self._cold = torch.ones(COLD_BYTES, dtype=torch.uint8)

    def take(self, prompt: int) -> None:
        """Take the memory of a prompt's blocks as an idle rank does."""
        ahead, first = MemoryAhead(self.pool, None), prompt * PROMPT // CHUNK
        if first:
            before = Join(1, pack_int32([0]), 0, 1, pack_int32([first - 1]), Sampling())
            ahead.note(StepPlan(1, 1, joins=[before]))
        while ahead.is_short:
            ahead.touch()

    def seconds(self, prompt: int) -> float:
        """Return the CPU time of writing a prompt, all layers of all steps."""
        spent = 0.0
        for step in range(PROMPT // STEP):
            first = (prompt * PROMPT // STEP + step) * STEP
            plan = WritePlan(CHUNK, np.arange(first, first + STEP, dtype=np.int32))
            for layer in range(LAYERS):
                self._cold.add_(1)
                qkv = self._qkv.clone()
                call = lambda: self._kernels.write_kv(plan, qkv, self._angles, self.pool, layer, SPEC)  # noqa: B023, E731
                spent += timed(call)
        return spent


def write(report: Report, kernels: CpuKernels, rounds: int) -> None:
    spent: dict[str, list[float]] = {"new": [], "ahead": [], "old": []}
    for _ in range(rounds):
        # A pool of its own for each round: prompt 0 is never asked for ahead, prompt 5 lies behind all that is.
        writes = Writes(kernels, 6)
        spent["new"].append(writes.seconds(0))
        spent["old"].append(writes.seconds(0))
        writes.take(4)
        spent["ahead"].append(writes.seconds(4))
    for blocks, seconds in spent.items():
        case = {"part": "write", "blocks": blocks, "tokens": PROMPT}
        report.add(case, "cpu", median(seconds) * 1e3, "ms", rounds)
        report.add(case, "cpu, least", min(seconds) * 1e3, "ms", rounds)
        report.add(case, "cpu, most", max(seconds) * 1e3, "ms", rounds)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    add_beside(parser)
    arguments = parser.parse_args()
    rounds = 5 if arguments.quick else arguments.rounds
    torch.set_num_threads(1)
    kernels, report = CpuKernels(threads=1), Report("prefill")
    cases = CASES[:2] if arguments.quick else CASES
    if arguments.beside is None:
        attention(report, kernels, cases, rounds)
        write(report, kernels, rounds)
    else:
        builds(report, arguments.beside, cases, rounds)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
