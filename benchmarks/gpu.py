"""Everything that has to be measured on a GPU, in one command and under eight minutes.

    python benchmarks/gpu.py [--quick] [--json PATH] [--model FOLDER] [--seconds 460]

In this order, each part with a share of the time, and the JSON written again after every figure:

1. correctness of every op against the float64 reference over random trees; `compute-sanitizer` on a small round;
2. ceilings of this machine: copy bandwidth, bfloat16 matrix product;
3. decode attention, Table 3 of ChunkAttention (b = 32, d = 128, float16) with 32 and with 8 KV heads: ours first,
   with the planner's time apart, then each baseline, which is dropped after its first failure or timeout;
4. the whole engine (demo model, float32): greedy tokens on the GPU against those on the CPU, with NCCL forced at
   one rank, and with two ranks that share the GPU over gloo.

A row whose context is all shared has one more token of its own: in a server its newest one always is.
Exit code: 0, 1 if anything is wrong (speed is reported, not judged), 2 without a GPU.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_baselines import BASELINES, Calls, has_flashinfer
from gpu_cases import (
    ACCEPT_US,
    GOAL_US,
    ROTATED_SETS,
    TABLE_3,
    Buffers,
    Cell,
    copy_bandwidth,
    exact_rows,
    make_buffers,
    matmul_rate,
    target_us,
    time_graph,
)
from gpu_checks import LIMITS, check_all, relative_error
from report import Report, argument_parser, commit, cpu_name

from trunkline.kernels.cuda import CudaKernels

FOLDER = Path(__file__).parent
DEMO_MODEL = FOLDER.parent / "deploy" / "trunkline" / "deploy" / "demo_model"
BASELINE_SECONDS = 60
"""For one cell of a baseline; the first compiles."""


class OutOfTimeError(Exception):
    """A part used up its time."""


@contextmanager
def time_box(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise OutOfTimeError(f"stopped after {seconds:.0f} s")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(0.1, seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


class GpuRun(Report):
    """The results so far, the problems so far, and the time that is left."""

    def __init__(self, seconds: float, path: Path | None) -> None:
        super().__init__("gpu")
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.deadline = time.monotonic() + seconds
        self.path = path

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def add(self, case: dict[str, Any], metric: str, value: float, unit: str, runs: int) -> None:
        super().add(case, metric, value, unit, runs)
        self.write()

    def problem(self, sentence: str) -> None:
        print(f"WRONG: {sentence}", flush=True)
        self.problems.append(sentence)
        self.write()

    def note(self, sentence: str) -> None:
        print(f"note: {sentence}", flush=True)
        self.notes.append(sentence)
        self.write()

    def write(self) -> None:
        if self.path is None:
            return
        gpu = torch.cuda.get_device_properties(0)
        machine = {
            "cpu": cpu_name(),
            "gpu": gpu.name,
            "processors": gpu.multi_processor_count,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        }
        document = {
            "benchmark": self.benchmark,
            "commit": commit_once(),
            "machine": machine,
            "results": self.results,
            "problems": self.problems,
            "notes": self.notes,
        }
        self.path.write_text(json.dumps(document, indent=1) + "\n")


_COMMIT: list[str] = []


def commit_once() -> str:
    if not _COMMIT:
        _COMMIT.append(commit())
    return _COMMIT[0]


def check_correctness(run: GpuRun, quick: bool) -> None:
    print(
        "\n## Correctness (largest relative error over random trees)\n\n| op | type | error | allowed | trials |"
    )
    print("|---|---|---|---|---|")
    for name, dtype, error, trials in check_all(2 if quick else 6):
        kind = str(dtype).removeprefix("torch.")
        print(f"| {name} | {kind} | {error:.2e} | {LIMITS[dtype]:.1e} | {trials} |", flush=True)
        run.add({"op": name, "dtype": kind}, "relative_error_max", error, "", trials)
        if not error <= LIMITS[dtype]:
            run.problem(f"{name} in {kind} is off by {error:.2e}")


def sanitize(run: GpuRun) -> None:
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        run.note("compute-sanitizer is not installed; memory accesses were not checked")
        return
    for check in ("memcheck", "racecheck"):
        command = [tool, "--tool", check, "--error-exitcode", "9", sys.executable, str(FOLDER / "gpu_checks.py")]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=75, check=False)
        except subprocess.TimeoutExpired:
            run.note(f"compute-sanitizer {check} was stopped after 75 s")
            continue
        if done.returncode:
            run.problem(f"compute-sanitizer {check}: {(done.stdout + done.stderr)[-1500:]}")
        else:
            run.note(f"compute-sanitizer {check}: nothing found")


def measure_ceilings(run: GpuRun) -> float:
    """Bytes per second of a copy."""
    bandwidth, rate = copy_bandwidth(), matmul_rate()
    run.add({"impl": "memcpy"}, "bandwidth", bandwidth / 1e12, "TB/s", 21)
    run.add({"impl": "matmul_bf16"}, "rate", rate / 1e12, "TFLOP/s", 9)
    print(f"\nCopy {bandwidth / 1e12:.2f} TB/s (read + written), bfloat16 product {rate / 1e12:.0f} TFLOP/s")
    return bandwidth


def case_of(cell: Cell, impl: str) -> dict[str, Any]:
    return {
        "impl": impl,
        "n_p": cell.n_p,
        "n_s": cell.n_s,
        "batch": cell.batch,
        "heads": cell.heads,
        "kv_heads": cell.kv_heads,
        "d": cell.head_dim,
    }


def measure_ours(run: GpuRun, cell: Cell, sets: list[Buffers], share: bool) -> float:
    kernels, plan, spec = CudaKernels(share=share), cell.plan(), cell.spec()
    name = "tpp" if share else "sequence_first"
    buffers = sets[0]
    kernels.decode_attention(plan, buffers.q, buffers.pool, 0, spec, buffers.out)
    rows = [0, cell.batch // 2, cell.batch - 1]
    error = relative_error(buffers.out[rows], exact_rows(cell, buffers, rows))
    if not error <= LIMITS[torch.float16]:
        run.problem(f"{name} at {cell} is off by {error:.2e}")
    calls: Calls = [partial(kernels.decode_attention, plan, each.q, each.pool, 0, spec, each.out) for each in sets]
    taken = time_graph(calls)
    run.add(case_of(cell, name), "time_us", taken, "us", 21)
    if share:
        times = []
        for _ in range(5):
            fresh = cell.plan()
            torch.cuda.synchronize()
            start = time.perf_counter()
            kernels.decode_attention(fresh, buffers.q, buffers.pool, 0, spec, buffers.out)
            times.append((time.perf_counter() - start) * 1e6)
        run.add(case_of(cell, "planner"), "time_us", sorted(times)[2], "us", 5)
    return taken


def measure_table(run: GpuRun, bandwidth: float, quick: bool) -> None:
    cells = [cell for cell in TABLE_3 if not quick or cell.n_p == 2048]
    print("\n## Decode attention, µs per layer\n")
    columns = ["tpp", "floor here", "accept", "goal", "sequence_first", *BASELINES]
    print(f"| heads | n_p | n_s | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 3)}")
    dropped: dict[str, str] = (
        {}
        if has_flashinfer()
        else {name: "flashinfer cannot be imported" for name in BASELINES if name.startswith("flashinfer")}
    )
    for cell in cells:
        if run.seconds_left < 60:
            run.note(f"no time was left for {cell} and what follows it")
            break
        needed = cell.pool_bytes * (ROTATED_SETS + 1)
        if needed > torch.cuda.mem_get_info()[0]:
            run.note(f"{cell} needs {needed / 1e9:.0f} GB of memory")
            continue
        sets = [make_buffers(cell, seed) for seed in range(ROTATED_SETS)]
        ours = measure_ours(run, cell, sets, True)
        # A copy reads as much as it writes; a pass that only reads is bound by about the same total.
        floor = cell.floor_bytes / bandwidth * 1e6
        line = [f"{ours:.1f}", f"{floor:.1f}", str(target_us(ACCEPT_US, cell)), str(target_us(GOAL_US, cell))]
        line.append(f"{measure_ours(run, cell, sets, False):.1f}")
        line += [measure_baseline(run, cell, sets, name, dropped) for name in BASELINES]
        print(f"| {cell.name} | {cell.n_p} | {cell.n_s} | {' | '.join(line)} |", flush=True)
        del sets
        torch.cuda.empty_cache()


def measure_baseline(run: GpuRun, cell: Cell, sets: list[Buffers], name: str, dropped: dict[str, str]) -> str:
    if name in dropped or (name == "flashinfer_cascade" and not cell.n_s) or run.seconds_left < 45:
        return "–"
    try:
        with time_box(min(BASELINE_SECONDS, run.seconds_left - 40)):
            taken = time_graph(BASELINES[name](cell, sets))
    except (OutOfTimeError, RuntimeError, ValueError, TypeError, AttributeError, OSError) as error:
        # Another project's interface: whatever it raises is its entry in the table.
        dropped[name] = f"{type(error).__name__}: {error}"
        run.note(f"{name} is left out from {cell} on: {dropped[name][:300]}")
        return "–"
    run.add(case_of(cell, name), "time_us", taken, "us", 21)
    return f"{taken:.1f}"


def generate(model: Path, device: str, ranks: int, collectives: str, seconds: float) -> dict[str, Any]:
    """Tokens of the engine, one process per rank."""
    command = [sys.executable, str(FOLDER / "gpu_engine.py"), str(model), device]
    with tempfile.TemporaryDirectory() as folder:
        running = [
            subprocess.Popen(
                [*command, str(rank), str(ranks), collectives, f"file://{folder}/rendezvous"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        try:
            done = [process.communicate(timeout=seconds) for process in running]
        finally:
            for process in running:
                process.kill()
    if any(process.returncode for process in running):
        raise RuntimeError("".join(errors[-1500:] for _, errors in done))
    result: dict[str, Any] = json.loads(done[0][0].splitlines()[-1])
    return result


def check_engine(run: GpuRun, model: Path) -> None:
    print("\n## The engine, greedy tokens in float32\n")
    try:
        expected = generate(model, "cpu", 1, "none", 90)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        run.problem(f"the engine on the CPU: {error}")
        return
    for name, ranks, collectives in (
        ("TP = 1", 1, "none"),
        ("TP = 1 with NCCL", 1, "auto"),
        ("TP = 2 over gloo", 2, "gloo"),
    ):
        if run.seconds_left < 5:
            run.note(f"no time was left for the engine, {name}")
            continue
        try:
            got = generate(model, "cuda", ranks, collectives, min(90, run.seconds_left))
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            run.problem(f"the engine, {name}: {error}")
            continue
        same = sum(ours == theirs for ours, theirs in zip(got["tokens"], expected["tokens"], strict=True))
        total = len(expected["tokens"])
        print(f"{name}: {same} of {total} texts equal those of the CPU; kernels {got['kernels']}", flush=True)
        run.add({"engine": name}, "equal_texts", same / total, "", total)
        if same != total or got["kernels"] != "cuda":
            run.problem(f"the engine, {name}: {same} of {total} texts are equal; kernels {got['kernels']}")


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--seconds", type=float, default=460.0, help="stop in time, with what there is")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no CUDA device here: nothing was measured.", file=sys.stderr)
        sys.exit(2)
    run = GpuRun(arguments.seconds, arguments.json)
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, commit {commit_once()}")
    start = time.perf_counter()
    CudaKernels()
    run.note(f"the kernels were ready after {time.perf_counter() - start:.0f} s")
    check_correctness(run, arguments.quick)
    bandwidth = measure_ceilings(run)
    measure_table(run, bandwidth, arguments.quick)
    check_engine(run, arguments.model)
    if run.seconds_left > 80:
        sanitize(run)
    else:
        run.note("no time was left for compute-sanitizer")
    run.write()
    print(f"\n{len(run.problems)} problems" + "".join(f"\n- {problem}" for problem in run.problems))
    sys.exit(1 if run.problems else 0)


if __name__ == "__main__":
    main()
