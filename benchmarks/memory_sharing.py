"""What sharing saves: parallel samples and beams (PagedAttention §6.3 and figure 15).

    python benchmarks/memory_sharing.py [--quick] [--json PATH] [--parts memory,throughput,beams] [--threads 2]

A real engine and a real rank in one process (engine_loop.py). Prompts and outputs are synthetic, with the lengths
that the paper gives for its two data sets: Alpaca-like (mean 19 in, 58 out) and ShareGPT-like (161 in, 338 out).

- memory (demo model, float32, chunks of 16 as in the paper): all requests at once; `memory_saved` is the share of
  block-table entries that needs no block of its own, averaged over the steps. `none`: requests of one sample each,
  which share nothing.
- throughput (small model, bfloat16, chunks of 64): one request of n samples against n requests of one sample with
  the same prompt, with and without the prefix cache; output tokens per second, in turn.
- beams (small model): time of a decode step (planning and execution) of a beam search of width 4 on a prompt of
  1,024 tokens against four independent samples of it and against four unrelated prompts of that length.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
from engine_loop import EngineLoop
from load_workload import DATASETS
from report import Report, argument_parser
from small_model import VOCABULARY, small_model

from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import BeamSearch
from trunkline.worker.messages import Sampling

DEMO_MODEL: Final = Path(__file__).parents[1] / "deploy/trunkline/deploy/demo_model"
DEMO_VOCABULARY: Final = 4096
PARTS: Final = ("memory", "throughput", "beams")
PROMPT_TOKENS: Final = 1024
OUTPUT_TOKENS: Final = 96


def memory(arguments: argparse.Namespace, report: Report) -> None:
    count = 4 if arguments.quick else 12
    for dataset, (inputs, outputs) in DATASETS.items():
        methods = [("none", 1), *((method, k) for method in ("samples", "beams") for k in (2, 4, 6))]
        for method, k in methods:
            rng = np.random.default_rng(0)
            config = EngineConfig(num_blocks=8192, chunk_size=16, max_context=2048, max_rows=128)
            loop = EngineLoop(DEMO_MODEL, config, {"threads": arguments.threads})
            lengths = zip(inputs.draw(count, rng), outputs.draw(count, rng), strict=True)
            for tokens, output in lengths:
                prompt = rng.integers(2, DEMO_VOCABULARY, tokens).tolist()
                beam = BeamSearch(k) if method == "beams" else None
                loop.submit(prompt, min(output, 96) if arguments.quick else output, n=k, beam=beam)
            loop.run()
            case = {"dataset": dataset, "method": method, "k": k, "requests": count, "chunk_size": 16}
            report.add(case, "memory_saved", 100 * loop.memory.saved, "%", 1)
            loop.close()


def throughput(arguments: argparse.Namespace, report: Report) -> None:
    rounds = 1 if arguments.quick else 3
    for k in (4,) if arguments.quick else (2, 4, 6):
        rates: dict[str, list[float]] = {"samples": [], "requests": [], "requests, no prefix cache": []}
        for round_ in range(rounds):
            prompt = np.random.default_rng(round_).integers(2, VOCABULARY, PROMPT_TOKENS).tolist()
            for name, found in rates.items():
                loop = small_loop(arguments, prefix_cache="no prefix" not in name)
                for _ in range(1 if name == "samples" else k):
                    loop.submit(prompt, OUTPUT_TOKENS, n=k if name == "samples" else 1)
                seconds = loop.run()
                found.append(k * OUTPUT_TOKENS / seconds)
                loop.close()
        for name, found in rates.items():
            case = {"impl": name, "n": k, "prompt": PROMPT_TOKENS, "output": OUTPUT_TOKENS}
            report.add(case, "output_rate", median(found), "tokens/s", rounds)


def beams(arguments: argparse.Namespace, report: Report) -> None:
    """Steps of the arms in turn: each arm's loop is asked for a stretch of steps at a time."""
    width = 4
    rng = np.random.default_rng(1)
    prompts = [rng.integers(2, VOCABULARY, PROMPT_TOKENS).tolist() for _ in range(width)]
    output = 64 if arguments.quick else 256
    loops = {name: small_loop(arguments) for name in ("beam search", "samples", "unrelated prompts")}
    loops["beam search"].submit(prompts[0], output, n=width, beam=BeamSearch(width))
    loops["samples"].submit(prompts[0], output, n=width)
    for prompt in prompts:
        loops["unrelated prompts"].submit(prompt, output, sampling=Sampling(temperature=1.0, seed=1))
    while any(not loop.engine.is_idle for loop in loops.values()):
        for loop in loops.values():
            for _ in range(16):
                loop.step()
    for name, loop in loops.items():
        case = {"impl": name, "width": width, "prompt": PROMPT_TOKENS, "threads": arguments.threads}
        report.add(case, "step_time", 1e3 * median(loop.step_seconds), "ms", len(loop.step_seconds))
        loop.close()
    times = {name: median(loop.step_seconds) for name, loop in loops.items()}
    case = {"impl": "beam search / samples", "width": width, "prompt": PROMPT_TOKENS, "threads": arguments.threads}
    report.add(case, "step_time_ratio", times["beam search"] / times["samples"], "", 1)


def small_loop(arguments: argparse.Namespace, *, prefix_cache: bool = True) -> EngineLoop:
    config = EngineConfig(num_blocks=192, max_context=4096, dtype="bfloat16", prefix_cache=prefix_cache)
    return EngineLoop(small_model(), config, {"dtype": "bfloat16", "threads": arguments.threads})


def main() -> None:
    parser = argument_parser(__doc__, PARTS)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    report = Report("memory_sharing")
    for name, part in (("memory", memory), ("throughput", throughput), ("beams", beams)):
        if name in arguments.parts:
            part(arguments, report)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
