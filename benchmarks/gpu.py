"""Everything that has to be measured on a GPU, in one command and under eight minutes.

    python benchmarks/gpu.py [--quick] [--json PATH] [--model FOLDER] [--seconds 460]

In this order, each part with a share of the time, and the JSON written again after every figure:

1. correctness of every op against the float64 reference over random trees; `compute-sanitizer` on a small round;
2. ceilings of this machine: copy bandwidth, bfloat16 matrix product;
3. decode attention, Table 3 of ChunkAttention (b = 32, d = 128, float16) with 32 and with 8 KV heads: ours in
   every cell, with the planner's time apart, then each baseline in a process of its own;
4. the whole engine (demo model): greedy tokens in float32 on the GPU against those on the CPU, with NCCL forced at
   one rank, and with two ranks that share the GPU over gloo; in bfloat16 against the reference kernels there.

A part that fails is recorded as a problem, and the next one begins.

A row whose context is all shared has one more token of its own: in a server its newest one always is.
Exit code: 0, 1 if anything is wrong (speed is reported, not judged), 2 without a GPU.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from gpu_baselines import BASELINES, Calls, has_flashinfer
from gpu_cases import (
    ACCEPT_US,
    GOAL_US,
    TABLE_3,
    Buffers,
    Cell,
    cache_bytes,
    captured,
    copy_bandwidth,
    make_buffers,
    matmul_rate,
    replay_error,
    target_us,
    time_events,
)
from gpu_checks import LIMITS, check_all
from report import Report, argument_parser, commit, cpu_name

from trunkline.kernels.cuda import CudaKernels
from trunkline.kernels.cuda_build import CudaBuildError, find_compiler
from trunkline.kernels.cuda_library import CudaError

T = TypeVar("T")

FOLDER = Path(__file__).parent
DEMO_MODEL = FOLDER.parent / "deploy" / "trunkline" / "deploy" / "demo_model"
BASELINE_SECONDS = 75
"""For all cells of a baseline; the first compiles."""
ENGINE_SECONDS = 70
"""Kept for the engine while baselines run."""
PART_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    OSError,
    ImportError,
    AssertionError,
    LookupError,
    CudaError,
    CudaBuildError,
    subprocess.SubprocessError,
)
"""What a part may fail with, so that the ones after it are still run."""
BFLOAT16_EQUAL = 0.7
"""Share of greedy tokens before a text's first difference that has to agree between two kernels in bfloat16."""


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

    def part(self, name: str, do: Callable[..., T], *arguments: Any) -> T | None:
        """None if it failed."""
        try:
            return do(*arguments)
        except PART_ERRORS as error:
            self.problem(f"{name}: {type(error).__name__}: {str(error)[-1500:]}")
            return None

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


def find_sanitizer() -> str | None:
    compiler = find_compiler()
    beside = None if compiler is None else compiler.path.resolve().with_name("compute-sanitizer")
    return str(beside) if beside is not None and beside.is_file() else shutil.which("compute-sanitizer")


def sanitize(run: GpuRun) -> None:
    tool = find_sanitizer()
    if tool is None:
        run.note("compute-sanitizer is not installed; memory accesses were not checked")
        return
    # torch's allocator would hide accesses beyond a tensor inside its own large blocks.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for check in ("memcheck", "racecheck"):
        # Errors of calls: torch and its libraries probe for what may be missing.
        command = [tool, "--tool", check, "--error-exitcode", "9", "--report-api-errors", "no"]
        command += [sys.executable, str(FOLDER / "gpu_checks.py")]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=75, check=False, env=environment
            )
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


def measure_ours(run: GpuRun, cell: Cell, sets: list[Buffers], share: bool) -> None:
    kernels, plan, spec = CudaKernels(share=share), cell.plan(), cell.spec()
    name = "tpp" if share else "sequence_first"
    calls: Calls = [partial(kernels.decode_attention, plan, each.q, each.pool, 0, spec, each.out) for each in sets]
    graph = captured(calls)
    error = replay_error(graph, cell, sets)
    if not error <= LIMITS[torch.float16]:
        run.problem(f"{name} at {cell} is off by {error:.2e}")
    run.add(case_of(cell, name), "time_us", time_events(graph.replay) / len(sets), "us", 21)
    if share:
        times, buffers = [], sets[0]
        for _ in range(5):
            fresh = cell.plan()
            torch.cuda.synchronize()
            start = time.perf_counter()
            kernels.decode_attention(fresh, buffers.q, buffers.pool, 0, spec, buffers.out)
            times.append((time.perf_counter() - start) * 1e6)
        run.add(case_of(cell, "planner"), "time_us", sorted(times)[2], "us", 5)


def measure_cell(run: GpuRun, cell: Cell) -> None:
    count = cell.rotated_sets(cache_bytes())
    needed = cell.pool_bytes * (count + 1)
    if needed > torch.cuda.mem_get_info()[0]:
        run.note(f"{cell} needs {needed / 1e9:.0f} GB of memory")
        return
    sets = [make_buffers(cell, seed) for seed in range(count)]
    for share in (True, False):
        measure_ours(run, cell, sets, share)


def measure_table(run: GpuRun, bandwidth: float, quick: bool) -> None:
    chosen = [index for index, cell in enumerate(TABLE_3) if not quick or cell.n_p == 2048]
    for index in chosen:
        if run.seconds_left < ENGINE_SECONDS:
            run.note(f"no time was left for {TABLE_3[index]} and what follows it")
            break
        run.part(f"{TABLE_3[index]}", measure_cell, run, TABLE_3[index])
        run.part("freeing memory", torch.cuda.empty_cache)
    print_table(run, bandwidth, chosen)
    for name in BASELINES:
        run.part(name, measure_baseline, run, name, chosen)
    print_table(run, bandwidth, chosen)


def print_table(run: GpuRun, bandwidth: float, chosen: list[int]) -> None:
    print("\n## Decode attention, µs per layer\n")
    columns = ["tpp", "floor here", "accept", "goal", "sequence_first", "planner", *BASELINES]
    print(f"| heads | n_p | n_s | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 3)}")
    for cell in (TABLE_3[index] for index in chosen):

        def taken(name: str, cell: Cell = cell) -> str:
            case = case_of(cell, name)
            values = [r["value"] for r in run.results if r["case"] == case and r["metric"] == "time_us"]
            return f"{values[0]:.1f}" if values else "–"

        # A copy reads as much as it writes; a pass that only reads is bound by about the same total.
        line = [taken("tpp"), f"{cell.floor_bytes / bandwidth * 1e6:.1f}"]
        line += [str(target_us(ACCEPT_US, cell)), str(target_us(GOAL_US, cell))]
        line += [taken(name) for name in columns[4:]]
        print(f"| {cell.name} | {cell.n_p} | {cell.n_s} | {' | '.join(line)} |", flush=True)


def measure_baseline(run: GpuRun, name: str, chosen: list[int]) -> None:
    if name.startswith("flashinfer") and not has_flashinfer():
        run.note(f"{name}: flashinfer cannot be imported")
        return
    seconds = min(BASELINE_SECONDS, run.seconds_left - ENGINE_SECONDS)
    if seconds < 5:
        run.note(f"no time was left for {name}")
        return
    cells = [index for index in chosen if name != "flashinfer_cascade" or TABLE_3[index].n_s]
    command = [sys.executable, str(FOLDER / "gpu_baselines.py"), name, ",".join(map(str, cells))]
    with tempfile.TemporaryFile("w+") as lines, tempfile.TemporaryFile("w+") as errors:
        running = subprocess.Popen(command, stdout=lines, stderr=errors, start_new_session=True)
        try:
            code: int | None = running.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)  # with the compilers that it may have started
            running.wait()
        lines.seek(0)
        errors.seek(0)
        got = [json.loads(line) for line in lines.read().splitlines() if line.startswith('{"cell"')]
        said = errors.read()[-300:].strip()
    for result in got:
        cell = TABLE_3[result["cell"]]
        if "failure" in result:
            run.note(f"{name} at {cell}: {result['failure'][:300]}")
        else:
            run.add(case_of(cell, name), "time_us", result["time_us"], "us", 21)
    if code != 0:
        end = f"was stopped after {seconds:.0f} s" if code is None else f"ended with {code}: {said}"
        run.note(f"{name} {end}; {len(got)} of {len(cells)} cells are there")


class Engine(NamedTuple):
    """How the engine is run."""

    device: str
    kernels: str
    dtype: str = "float32"
    ranks: int = 1
    collectives: str = "none"


def generate(model: Path, engine: Engine, seconds: float) -> dict[str, Any]:
    """Tokens of the engine, one process per rank."""
    device, kernels, dtype, ranks, collectives = engine
    command = [sys.executable, str(FOLDER / "gpu_engine.py"), str(model), device, kernels, dtype]
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
    print("\n## The engine, greedy tokens\n")
    expected = generate(model, Engine("cpu", "cpu"), 90)["tokens"]
    for name, engine in (
        ("TP = 1", Engine("cuda", "cuda")),
        ("TP = 1 with NCCL", Engine("cuda", "cuda", collectives="auto")),
        ("TP = 2 over gloo", Engine("cuda", "cuda", ranks=2, collectives="gloo")),
    ):
        run.part(f"the engine, {name}", compare_engine, run, model, (name, engine, expected, 1.0))
    run.part("the engine in bfloat16", check_bfloat16, run, model)


def check_bfloat16(run: GpuRun, model: Path) -> None:
    """Against the reference kernels on the same GPU. A rounding may tip a choice; a wrong kernel tips them all."""
    reference = Engine("cuda", "reference", "bfloat16")
    expected = generate(model, reference, min(90, max(5, run.seconds_left)))["tokens"]
    compare = (
        "TP = 1, bfloat16 against the reference",
        reference._replace(kernels="cuda"),
        expected,
        BFLOAT16_EQUAL,
    )
    compare_engine(run, model, compare)


def compare_engine(run: GpuRun, model: Path, compare: tuple[str, Engine, list[list[int]], float]) -> None:
    """By the share of tokens before each text's first difference: what comes after it has another context."""
    name, engine, expected, least = compare
    if run.seconds_left < 5:
        run.note(f"no time was left for the engine, {name}")
        return
    got = generate(model, engine, min(90, run.seconds_left))
    total = sum(map(len, expected))
    same = sum(
        len(list(takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=True))))
        for ours, theirs in zip(got["tokens"], expected, strict=True)
    )
    print(f"{name}: {same} of {total} tokens until the first difference; kernels {got['kernels']}", flush=True)
    run.add({"engine": name}, "equal_tokens", same / total, "", total)
    if same < least * total or got["kernels"] != engine.kernels:
        run.problem(f"the engine, {name}: {same} of {total} tokens are equal; kernels {got['kernels']}")


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
    run.part("making the kernels", CudaKernels)
    run.note(f"the kernels were ready after {time.perf_counter() - start:.0f} s")
    run.part("correctness", check_correctness, run, arguments.quick)
    bandwidth = run.part("ceilings", measure_ceilings, run) or float("nan")
    run.part("decode attention", measure_table, run, bandwidth, arguments.quick)
    run.part("the engine", check_engine, run, arguments.model)
    if run.seconds_left > 80:
        run.part("compute-sanitizer", sanitize, run)
    else:
        run.note("no time was left for compute-sanitizer")
    run.write()
    print(f"\n{len(run.problems)} problems" + "".join(f"\n- {problem}" for problem in run.problems))
    sys.exit(1 if run.problems else 0)


if __name__ == "__main__":
    main()
