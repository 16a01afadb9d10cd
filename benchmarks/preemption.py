"""Swapping against recomputation, by block size (PagedAttention §7.3 and figure 19).

    python benchmarks/preemption.py [--quick] [--json PATH] [--parts overhead,pressure] [--threads 2]

Small model, bfloat16, one rank with two threads, engine and rank in one process (engine_loop.py).

- overhead: a sequence of 256 tokens leaves the pool and comes back. `swap`: save and load of its blocks;
  `swap_bandwidth`: the bytes of both; `memcpy`: the limit, a copy of the same bytes between two plain buffers and
  back. `recompute`: the step that computes them again.
- pressure: 12 requests (ShareGPT-like lengths, cut to 160 in and 256 out) at once in a pool that holds about a
  third of them, once for each way of coming back: normalised latency, how many preemptions there were, the tokens
  that prefills computed and the blocks that were loaded. `roomy`: a pool for all. With `recompute` nothing is
  loaded: what a request had computed and lost is computed again.
"""

from __future__ import annotations

import argparse
import time
from statistics import fmean, median
from typing import Final

import numpy as np
import torch
from engine_loop import EngineLoop
from load_workload import DATASETS
from report import Report, argument_parser
from small_model import VOCABULARY, small_model

from trunkline.controller.engine_config import EngineConfig
from trunkline.kvstore.chunks import pack_int32
from trunkline.kvstore.tier import TierKind
from trunkline.worker.messages import StepPlan

PARTS: Final = ("overhead", "pressure")
TOKENS: Final = 256


def overhead(arguments: argparse.Namespace, report: Report) -> None:
    rounds = 3 if arguments.quick else 9
    for chunk_size in (16, 64) if arguments.quick else (1, 4, 8, 16, 32, 64, 128, 256):
        blocks = TOKENS // chunk_size
        loop = EngineLoop(
            small_model(),
            EngineConfig(num_blocks=4 * blocks, chunk_size=chunk_size, dtype="bfloat16", max_inflight_steps=1),
            {"dtype": "bfloat16", "threads": arguments.threads, "host_memory_bytes": 1 << 26},
        )
        prompt = np.random.default_rng(0).integers(2, VOCABULARY, TOKENS).tolist()
        swaps, copies, prefills = [], [], []
        size = blocks * loop.runner.block_bytes
        source, target = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
        for round_ in range(rounds + 1):
            loop.flush_cache()
            start = time.perf_counter()
            loop.submit(prompt, 1)
            loop.run()
            prefills.append(time.perf_counter() - start)
            moves = [[block, block, round_ + 1] for block in range(blocks)]
            swaps.append(sum(move(loop, saves, loads) for saves, loads in ((moves, []), ([], moves))))
            start = time.perf_counter()
            target.copy_(source)
            source.copy_(target)
            copies.append(time.perf_counter() - start)
        case = {"part": "overhead", "chunk_size": chunk_size, "tokens": TOKENS}
        for impl, times in (("swap", swaps), ("recompute", prefills), ("memcpy", copies)):
            report.add({**case, "impl": impl}, "time", 1e3 * median(times[1:]), "ms", rounds)
        report.add({**case, "impl": "swap"}, "swap_bandwidth", 2 * size / median(swaps[1:]) / 1e9, "GB/s", rounds)
        loop.close()


def move(loop: EngineLoop, saves: list[list[int]], loads: list[list[int]]) -> float:
    """Seconds of a step that does nothing but move blocks; the engine does not hear of it."""
    runner = loop.runner
    step = runner.steps + 1
    # The fences make the step wait for its own saves and loads, which go on beside steps otherwise.
    plan = StepPlan(
        step=step,
        epoch=1,
        saves=pack_int32(np.array(saves)),
        loads=pack_int32(np.array(loads)),
        save_fence=step,
        load_fence=step,
    )
    start = time.perf_counter()
    result = runner.execute(plan)
    assert result is not None
    seconds = time.perf_counter() - start
    loop.engine._step += 1  # the engine numbers its plans from here on
    return seconds


def pressure(arguments: argparse.Namespace, report: Report) -> None:
    """The ways take turns, so that a noisy moment hits all of them."""
    count, rounds = (8, 1) if arguments.quick else (12, 2)
    for chunk_size in (64,) if arguments.quick else (16, 64, 256):
        runs: dict[str, list[dict[str, float]]] = {"roomy": [], "recompute": [], "swap": [], "auto": []}
        for _ in range(rounds):
            for mode, found in runs.items():
                found.append(under_pressure(arguments, mode, chunk_size, count))
        for mode, found in runs.items():
            case = {"part": "pressure", "impl": mode, "chunk_size": chunk_size, "requests": count}
            for metric, unit in (
                ("normalised_latency", "ms/token"),
                ("output_rate", "tokens/s"),
                ("preemptions", ""),
                ("prefilled", "tokens"),
                ("loaded", "blocks"),
            ):
                report.add(case, metric, median(run[metric] for run in found), unit, rounds)


def under_pressure(arguments: argparse.Namespace, mode: str, chunk_size: int, count: int) -> dict[str, float]:
    """One run; the figures of it."""
    inputs, outputs = DATASETS["sharegpt-like"]
    rng = np.random.default_rng(0)
    drawn = zip(inputs.draw(count, rng), outputs.draw(count, rng), strict=True)
    lengths = [(min(tokens, 160), min(output, 256)) for tokens, output in drawn]
    blocks = sum(-(-(tokens + output) // chunk_size) + 1 for tokens, output in lengths)
    config = EngineConfig(
        num_blocks=blocks if mode == "roomy" else max(3, blocks // 3),
        chunk_size=chunk_size,
        dtype="bfloat16",
        host_slots=2 * blocks,
        preemption="auto" if mode == "roomy" else mode,
    )
    memory = 2 * blocks * chunk_size * 2 * 12 * 4 * 64 * 2
    worker = {"dtype": "bfloat16", "threads": arguments.threads, "host_memory_bytes": memory}
    loop = EngineLoop(small_model(), config, worker)
    for tokens, output in lengths:
        loop.submit(rng.integers(2, VOCABULARY, tokens).tolist(), output)
    seconds = loop.run()
    done, scheduler = loop.requests.values(), loop.engine.scheduler
    loop.close()
    return {
        "normalised_latency": 1e3 * fmean((d.ended_at - d.submitted_at) / d.tokens for d in done),
        "output_rate": sum(d.tokens for d in done) / seconds,
        "preemptions": scheduler.counters.preemptions,
        "prefilled": loop.prefilled,
        "loaded": scheduler.kv.tree.totals.tiers[TierKind.DEVICE].writes,
    }


def main() -> None:
    parser = argument_parser(__doc__, PARTS)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    report = Report("preemption")
    for name, part in (("overhead", overhead), ("pressure", pressure)):
        if name in arguments.parts:
            part(arguments, report)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
