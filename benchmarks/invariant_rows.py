"""What the batch-invariant mode of `--speculation auto` costs a decode step without drafts (docs/kernels.md).

    python benchmarks/invariant_rows.py [--quick] [--json PATH] [--model FOLDER] [--cuts 512 1024]

An engine and a worker of one thread for each way, all in this process, decode the same prompts, a step of each in
turn. `plain` is a worker without the mode, `alone` one whose rows share whole cuts of 512 tokens only, and the
others have a cut after so many tokens, within which states are carried on. Times are CPU times of steps, engine
included, and ratios to the plain one.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np
from engine_loop import EngineLoop
from report import Report, argument_parser

from trunkline.controller.engine_config import EngineConfig
from trunkline.kernels.cpu import CpuKernels
from trunkline.kernels.cpu_plans import INVARIANT_TOKENS, Planning

DEMO: Final = Path(__file__).resolve().parents[1] / "deploy/trunkline/deploy/demo_model"
CHUNK: Final = 64


class Case(NamedTuple):
    """Rows, and tokens of each prompt."""

    rows: int
    shared: int
    own: int


CASES: Final = (
    Case(32, 1500, 20),
    Case(32, 1000, 200),
    Case(32, 900, 20),
    Case(32, 500, 20),
    Case(32, 0, 500),
    Case(16, 0, 1400),
)


def loop_of(model: Path, case: Case, steps: int, cut: int, carries: bool) -> EngineLoop:
    """A group whose rows all decode."""
    longest = case.shared + case.own + steps + 20
    blocks = case.rows * (longest // CHUNK + 2) + 64
    config = EngineConfig(num_blocks=blocks, max_context=longest, token_budget=2048, max_rows=case.rows)
    worker: dict[str, Any] = {"dtype": "bfloat16", "kernels": "cpu", "threads": 1, "invariant_rows": cut > 0}
    loop = EngineLoop(model, config, worker)
    kernels = loop.runner.kernels
    assert isinstance(kernels, CpuKernels)
    if cut:
        kernels.planning = Planning(1, cut, True, kernels.counters, carries=carries)
    rng = np.random.default_rng(0)
    shared = rng.integers(10, 4000, case.shared).tolist()
    for _ in range(case.rows):
        loop.submit(shared + rng.integers(10, 4000, case.own).tolist(), longest)
    scheduler = loop.engine.scheduler
    while scheduler.waiting_count or scheduler.prefilling:
        loop.step()
    for _ in range(4):
        loop.step()
    return loop


def measure(report: Report, model: Path, case: Case, cuts: list[int], steps: int) -> None:
    """Add the ratios of a case."""
    ways = {"plain": (0, False), "alone": (512, False)} | {f"{cut}": (cut, True) for cut in cuts}
    loops = {name: loop_of(model, case, steps, *way) for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(steps):
        for name, loop in loops.items():
            start = time.thread_time()
            loop.step()
            times[name].append(time.thread_time() - start)
    for loop in loops.values():
        loop.close()
    plain = np.array(times["plain"])
    report.add({"impl": "plain", **case._asdict()}, "step_cpu", median(times["plain"]) * 1e3, "ms", steps)
    for name in list(loops)[1:]:
        ratios = np.array(times[name]) / plain
        report.add({"impl": name, **case._asdict()}, "ratio", float(np.median(ratios)), "", steps)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", type=Path, default=DEMO, help="folder of a checkpoint; default: the demo model")
    parser.add_argument("--cuts", type=int, nargs="+", default=[INVARIANT_TOKENS], help="tokens between cuts")
    arguments = parser.parse_args()
    report = Report("invariant_rows")
    for case in CASES[:1] + CASES[4:5] if arguments.quick else CASES:
        measure(report, arguments.model, case, arguments.cuts, 40 if arguments.quick else 80)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
