"""Two-phase decode attention end to end, on and off: requests whose prompts form a tree of three levels.

    python benchmarks/tree_attention.py [--quick] [--json PATH] [--threads 2] [--tokens 64]

A real engine and a real rank in one process (engine_loop.py), the small model in bfloat16. `tree`: all requests
share a beginning, groups of eight share more behind it, and each has 64 tokens of its own; `apart`: prompts of the
same lengths that share nothing. `two-phase` reads a chunk once for all rows that have it; `sequence-first` is the
same engine on the same shared blocks, and its kernels read every row's whole context (`CpuKernels(share=False)`).
Prompts are computed before anything is measured; then the two decode in turn, a step each.

- step_time: planning and execution of a step in which all rows decode.
- rate: rows / step_time.
- kv_read: bytes that decode attention read in a step.
"""

from __future__ import annotations

from statistics import median
from typing import Final
from unittest import mock

import numpy as np
from engine_loop import EngineLoop
from report import Report, argument_parser
from small_model import VOCABULARY, small_model

from trunkline.controller.engine_config import EngineConfig
from trunkline.kernels.cpu import CpuKernels
from trunkline.worker import device

CHUNK: Final = 64
OWN: Final = 64
GROUP: Final = 8
"""Rows that share the second level."""


def prompts(rows: int, first: int, second: int, *, shared: bool) -> list[list[int]]:
    """One per row; the levels have `first`, `second` and `OWN` tokens."""
    rng = np.random.default_rng(0)

    def draw(count: int) -> list[int]:
        found: list[int] = rng.integers(2, VOCABULARY, count).tolist()
        return found

    if not shared:
        return [draw(first + second + OWN) for _ in range(rows)]
    beginning, documents = draw(first), [draw(second) for _ in range(rows // GROUP)]
    return [beginning + documents[row // GROUP] + draw(OWN) for row in range(rows)]


class Arm:
    """A loop that decodes; what it read is counted from the first step on in which all rows do."""

    def __init__(self, texts: list[list[int]], tokens: int, threads: int, *, two_phase: bool) -> None:
        blocks = sum(-(-(len(text) + tokens) // CHUNK) for text in texts) + CHUNK
        config = EngineConfig(
            num_blocks=blocks, chunk_size=CHUNK, dtype="bfloat16", max_context=8192, max_inflight_steps=1
        )
        kernels = CpuKernels(threads=threads, share=two_phase)
        with mock.patch.object(device, "load_kernels", return_value=kernels):  # a server has no such option
            self.loop = EngineLoop(small_model(), config, {"dtype": "bfloat16", "threads": threads})
        for text in texts:
            self.loop.submit(text, tokens)
        scheduler = self.loop.engine.scheduler
        while scheduler.waiting_count or scheduler.prefilling or len(scheduler.row_set) < len(texts):
            self.loop.step()
            assert all(not done.ended_at for done in self.loop.requests.values()), "a row ended too soon: --tokens"
        self.loop.step_seconds.clear()
        self.kv_read: list[int] = []

    def step(self) -> bool:
        """A step of all rows; False: one of them has ended."""
        counters = self.loop.engine.counters
        before = counters.kv_bytes_read
        self.loop.step()
        self.kv_read.append(counters.kv_bytes_read - before)
        return not any(done.ended_at for done in self.loop.requests.values())


def measure(report: Report, rows: int, lengths: tuple[int, int], steps: int, threads: int) -> None:
    """Both arms on both kinds of prompts."""
    first, second = lengths
    for kind in ("tree", "apart"):
        texts = prompts(rows, first, second, shared=kind == "tree")
        # Where nothing is shared, each prompt is a step or more of its own, in which those before it decode.
        spare = 2 * rows + sum(map(len, texts)) // 512
        arms = {
            name: Arm(texts, steps + spare, threads, two_phase=name == "two-phase")
            for name in ("two-phase", "sequence-first")
        }
        for _ in range(steps):
            going = [arm.step() for arm in arms.values()]
            if not all(going):
                raise SystemExit("a row ended before all steps were measured; give it more tokens")
        for name, arm in arms.items():
            case = {"prompts": kind, "impl": name, "rows": rows, "first": first, "second": second, "own": OWN}
            seconds = median(arm.loop.step_seconds)
            report.add(case, "step_time", 1e3 * seconds, "ms", steps)
            report.add(case, "rate", rows / seconds, "tokens/s", steps)
            report.add(case, "kv_read", median(arm.kv_read) / 1e6, "MB", steps)
            arm.loop.close()


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=0, help="steps that are measured; default: 64, quick 16")
    arguments = parser.parse_args()
    steps = arguments.tokens or (16 if arguments.quick else 64)
    report = Report("tree_attention")
    rows, lengths = (16, (512, 256)) if arguments.quick else (32, (1024, 1024))
    measure(report, rows, lengths, steps, arguments.threads)
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
