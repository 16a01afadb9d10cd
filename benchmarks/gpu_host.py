"""What the host does for attention in each step, without a device: planning, and words that a device would get.

    python benchmarks/gpu_host.py [--quick] [--json PATH]

Rows of about 4,096 tokens decode; their chunks of 64 fill at different steps. "rebuilt": the plan is made
from nothing wherever it does not only grow, and sent whole, as before plans went on; "live": it is told
what changed, and only words that differ are sent. `plan_mean` and `plan_p50` are CPU time of all steps,
those in which nothing changes included. `churn`: in every step a row leaves and another one joins. Both
ways get the same steps in turn, in one process. `launches`: kernels and copies of a step that bring the
plan to the device; attention adds two to each layer.

Part `deal`: how much longer the busiest thread block works than all do on average (`gpu_host_deal`).

Part `prefill`: planning prompts for our kernel, and where large ones are given to a library.

Part `step`: whole steps of the runner, op by op and as graphs (`gpu_host_steps`). `host_p50` is CPU time of the
main thread in a step of two layers, `host_per_layer` what each further layer adds; `calls` are launches, copies
and replays.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import mean, median

import numpy as np
import torch
from gpu_host_deal import GPU, measure_deal
from gpu_host_steps import measure_steps
from report import Report, parse_arguments

from trunkline.kernels.cuda_work import STEPS_WORDS, WORKSPACE_BYTES, PrefillCut, PrefillWork
from trunkline.kernels.library_attention import FLASH, LibraryPrefill, LibraryWork, rest
from trunkline.kernels.ops import AttentionSpec, KvPool
from trunkline.kernels.plan import DecodePlan, PrefillPlan, plan_decode_work
from trunkline.kvstore.chunks import Int32Array, pack_int32
from trunkline.worker.batch.decode_planner import LivePlanner, RebuildingPlanner
from trunkline.worker.batch.sequences import BatchSequence
from trunkline.worker.messages import Join, Sampling

CHUNK, CONTEXT = 64, 4096


class Batch:
    """Sequences that decode."""

    def __init__(self, rows: int, shared: int) -> None:
        self.rng = np.random.default_rng(rows)
        self.shared = list(range(shared // CHUNK))
        self.used = len(self.shared)
        self.joined = 0
        self.rows = [self.join() for _ in range(rows)]
        self.touched: list[int] = []

    def blocks(self, count: int) -> list[int]:
        self.used += count
        return list(range(self.used - count, self.used))

    def join(self) -> BatchSequence:
        tokens = CONTEXT - int(self.rng.integers(CHUNK))
        self.joined += 1
        table = self.shared + self.blocks(-(-tokens // CHUNK) - len(self.shared))
        return BatchSequence(Join(self.joined, pack_int32([0]), tokens - 1, tokens, pack_int32(table), Sampling()))

    def step(self, *, churn: bool) -> None:
        """Each row has a token more, and a block where it needs one."""
        self.touched.clear()
        if churn:
            self.rows = [*self.rows]
            self.rows[int(self.rng.integers(len(self.rows)))] = self.join()
        for row in self.rows:
            row.append(0)
            if row.known > len(row.blocks) * CHUNK:
                row.set_block(len(row.blocks), self.blocks(1)[0])
                self.touched.append(row.id)

    def runs(self) -> Int32Array:
        rows = [[0, len(self.rows), 0, len(self.shared)]] if self.shared and len(self.rows) > 1 else []
        return np.array(rows, dtype=np.int32).reshape(-1, 4)


class Rebuilt:
    """Plans made from nothing."""

    def __init__(self) -> None:
        self.rows = RebuildingPlanner(CHUNK)
        self.made: DecodePlan | None = None

    def step(self, batch: Batch, churn: bool) -> tuple[int, int]:
        """Return words sent, and launches and copies."""
        if churn:
            self.rows.rows_changed()
        self.rows.step(batch.rows, batch.runs(), None)
        plan = self.rows.plan
        if plan is self.made:
            return 0, 1  # the step is counted
        self.made = plan
        return STEPS_WORDS + len(plan_decode_work(plan, GPU)), 1


class Live:
    """Plans that go on."""

    def __init__(self) -> None:
        self.rows = LivePlanner(CHUNK)
        self.generation = -1

    def step(self, batch: Batch, churn: bool) -> tuple[int, int]:
        """Return words sent, and launches and copies."""
        if churn:
            self.rows.rows_changed()
        self.rows.tables_changed(batch.touched)
        self.rows.step(batch.rows, batch.runs(), None)
        work = self.rows.plan.work(GPU, self)
        changes = work.take_changes()
        if work.generation != self.generation:
            self.generation = work.generation
            return STEPS_WORDS + len(work.words), 1
        return (2 + changes.size, 2) if len(changes) else (0, 1)


def decode(report: Report, rows: int, shared: int, steps: int, *, churn: bool) -> None:
    batch = Batch(rows, shared)
    ways: dict[str, Rebuilt | Live] = {"rebuilt": Rebuilt(), "live": Live()}
    found: dict[str, list[tuple[float, int, int]]] = {name: [] for name in ways}
    for step in range(steps + 2):
        batch.step(churn=churn)
        for name in ways if step % 2 else reversed(ways):
            start = time.thread_time()
            words, launches = ways[name].step(batch, churn)
            if step > 1:  # the first plans are whole anyway
                found[name].append((1e6 * (time.thread_time() - start), words, launches))
    for name, each in found.items():
        times, sent, launched = ([row[column] for row in each] for column in range(3))
        case = {"part": "churn" if churn else "decode", "rows": rows, "shared": shared, "way": name}
        report.add(case, "plan_p50", median(times), "us", steps)
        report.add(case, "plan_mean", mean(times), "us", steps)
        report.add(case, "words", mean(sent), "1/step", steps)
        report.add(case, "launches", mean(launched), "1/step", steps)


def prefill(report: Report, prompts: int, tokens: int, runs: int) -> None:
    """Prompts of so many tokens each, without a context: planned for our kernel, and those that are large enough
    for a library."""
    blocks = -(-tokens // CHUNK)
    count = np.full((prompts, blocks), CHUNK, dtype=np.int32)
    count[:, -1] = tokens - (blocks - 1) * CHUNK
    zeros = np.zeros(prompts * blocks, dtype=np.int32)
    plan = PrefillPlan(
        chunk_size=CHUNK,
        query_indptr=np.arange(prompts + 1, dtype=np.int32) * np.int32(tokens),
        query_position=np.tile(np.arange(tokens, dtype=np.int32), prompts),
        item_indptr=np.arange(prompts + 1, dtype=np.int32) * np.int32(blocks),
        block=np.arange(prompts * blocks, dtype=np.int32),
        first=zeros,
        count=count.ravel(),
        base=np.tile(np.arange(blocks, dtype=np.int32) * np.int32(CHUNK), prompts),
        shift=zeros,
    )
    spec = AttentionSpec(32, 8, 128, 128**-0.5)
    pool = KvPool.wrap(
        torch.empty(prompts * blocks, 1, 2, spec.kv_heads, CHUNK, spec.head_dim, dtype=torch.bfloat16)
    )
    cut = PrefillCut(rows_per_tile=16, units_wanted=66, piece_tokens_min=256)

    def given() -> None:
        entries = LibraryPrefill(FLASH).entries(plan, pool, spec, WORKSPACE_BYTES)
        own = rest(plan, entries) if entries else plan
        if own is not None:
            PrefillWork(own, cut)
        if entries:
            LibraryWork(FLASH, plan, entries, pool, WORKSPACE_BYTES)

    ways: dict[str, Callable[[], object]] = {"our kernel": lambda: PrefillWork(plan, cut), "with a library": given}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(runs):
        for way, call in ways.items():
            start = time.thread_time()
            call()
            times[way].append(1e6 * (time.thread_time() - start))
    for way, taken in times.items():
        case = {"part": "prefill", "prompts": prompts, "tokens": tokens, "way": way}
        report.add(case, "plan_p50", median(taken), "us", runs)


def main() -> None:
    arguments = parse_arguments(__doc__)
    report = Report("gpu_host")
    steps = 60 if arguments.quick else 400
    for churn in (False, True):
        for rows in (1, 32, 256):
            for shared in (0, CONTEXT // 2):
                decode(report, rows, shared, steps, churn=churn)
    measure_deal(report, GPU, 3 if arguments.quick else 10)
    measure_steps(report, (1, 32, 256), 16 if arguments.quick else 48)
    for prompts, tokens in ((1, 2048), (1, 8192), (256, 32)):
        prefill(report, prompts, tokens, 20 if arguments.quick else 100)
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
