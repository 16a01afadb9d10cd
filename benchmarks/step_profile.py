"""Where a step's time goes on the workers: every op, the collectives, and the Python between them.

    python benchmarks/step_profile.py [--quick] [--json PATH] [--model small] [--tp 2] [--dtype bfloat16]
                                      [--kernels auto] [--collectives auto] [--threads N]

Real ranks (processes with their own kernels and collectives) execute the plans of a real engine in this process,
sent through pipes. Rank 0 reports the wall time of each step and how much of it each op of its program took, run
one at a time; `other` is what a rank does beside the program: plans, samples, Python. Decode steps at batch 1, 8
and 32 with a shared prefix of 1,024 tokens, and the prefill of 2,048. `step_time` is measured without all this,
and most of its decode steps are calm: one call, without a plan of their own. Timed ones have a plan, and a call
for every op costs about 2 us, so the parts add up to more. `--op-by-op` runs the program as machines without the
compiled interpreter do.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec
import numpy as np
from report import Report, argument_parser
from small_model import small_model

from trunkline.controller.engine.engine import Engine
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import Submit
from trunkline.controller.reports import StepResult
from trunkline.controller.sequences.sequence import Request
from trunkline.kernels.op_by_op import OpByOp, StepRunner
from trunkline.kernels.program import Linear
from trunkline.kvstore.chunks import pack_int32
from trunkline.worker.config import WorkerConfig
from trunkline.worker.loading import load_runner
from trunkline.worker.messages import Sampling, StepPlan

BLOCKS: Final = 512
GROUP_OPS: Final = ("all_gather", "gather_columns", "broadcast")


class Clock:
    """Seconds by op, of the current step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrap(self, owner: Any, names: tuple[str, ...]) -> None:
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name), name))

    def wrap_program(self, runner: StepRunner) -> None:
        """Run a program op by op, each one timed under its kind."""
        run, ops = runner.run, runner.program.ops

        def timed(start: int, stop: int) -> None:
            for index in range(start, stop):
                started, op = time.perf_counter(), ops[index]
                run(index, index + 1)
                name = "gated_linear" if isinstance(op, Linear) and op.gated else op.kind
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

        runner.run = timed  # type: ignore[method-assign]

    def _timed(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any, **keywords: Any) -> Any:
            start = time.perf_counter()
            result = call(*args, **keywords)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            return result

        return timed


def rank_main(config: WorkerConfig, plans: Connection, timed: bool, op_by_op: bool) -> None:
    """One rank: plans in, on rank 0 results and times out."""
    runner = load_runner(config, lambda *_: None)
    clock, decoder_of_step = Clock(), runner._decoder
    if op_by_op:
        decoder_of_step.runner = OpByOp(decoder_of_step.program, runner.kernels, runner.pool, runner._group)
        runner._selector._largest = None  # which the native program alone can tell
    if timed:
        runner._calm._planner = None  # calm steps are one call of all ops, which cannot be timed apart
        clock.wrap_program(decoder_of_step.runner)
        clock.wrap(runner._group, GROUP_OPS)
    decoder, encoder = msgspec.msgpack.Decoder(StepPlan), msgspec.msgpack.Encoder()
    plans.send_bytes(b"ready")
    while payload := plans.recv_bytes():
        clock.seconds.clear()
        start = time.perf_counter()
        result = runner.execute(decoder.decode(payload))
        spent = time.perf_counter() - start
        if result is not None:
            plans.send_bytes(encoder.encode((result, spent, clock.seconds)))
    runner.close()


class Ranks:
    """The worker processes for the time of a `with` block."""

    def __init__(self, arguments: argparse.Namespace, timed: bool) -> None:
        self._arguments = arguments
        self._timed = timed
        self._decoder = msgspec.msgpack.Decoder(tuple[StepResult, float, dict[str, float]])

    def __enter__(self) -> Ranks:
        arguments, context = self._arguments, multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self.pipes, self._processes = [], []
        for rank in range(arguments.tp):
            config = WorkerConfig(
                model=arguments.model,
                plan_endpoint="",
                report_endpoint="",
                rank=rank,
                tp=arguments.tp,
                dtype=arguments.dtype,
                kernels=arguments.kernels,
                collectives=arguments.collectives,
                pool_blocks=BLOCKS,
                threads=arguments.threads or max(1, 2 // arguments.tp),
                rendezvous=f"file://{Path(self._folder.name, 'rendezvous')}",
            )
            ours, theirs = context.Pipe()
            process = context.Process(
                target=rank_main, args=(config, theirs, self._timed, arguments.op_by_op), daemon=True
            )
            process.start()
            self.pipes.append(ours)
            self._processes.append(process)
        for pipe in self.pipes:
            pipe.recv_bytes()
        return self

    def execute(self, plan: bytes) -> tuple[StepResult, float, dict[str, float]]:
        for pipe in self.pipes:
            pipe.send_bytes(plan)
        return self._decoder.decode(self.pipes[0].recv_bytes())

    def __exit__(self, *_: object) -> None:
        for pipe in self.pipes:
            pipe.send_bytes(b"")
        for process in self._processes:
            process.join(30)
        self._folder.cleanup()


def steps_of(engine: Engine, ranks: Ranks) -> list[tuple[bool, float, dict[str, float]]]:
    """Run the engine dry; (whether it was a pure decode step, seconds, seconds by op) of each step."""
    encoder, steps = msgspec.msgpack.Encoder(), []
    while not engine.is_idle:
        plan = engine.step((), 0.0).plan
        if plan is None:
            raise SystemExit("the engine has nothing to do, but is not idle")
        result, seconds, by_op = ranks.execute(encoder.encode(plan))
        steps.append((not plan.prefill, seconds, by_op))
        engine.receive(result, 0.0)
    return steps


def cases(engine: Engine, ranks: Ranks, quick: bool) -> dict[str, list[tuple[float, dict[str, float]]]]:
    """Seconds by case: decode at each batch, and whole prefills."""
    rng = np.random.default_rng(0)
    found: dict[str, list[tuple[float, dict[str, float]]]] = {}
    identity = 0

    def submit(tokens: np.ndarray[Any, Any], count: int) -> None:
        nonlocal identity
        identity += 1
        sampling = Sampling(temperature=0.0)
        request = Submit(identity, pack_int32(tokens), len(tokens), count, sampling)
        engine.receive(Request.of(identity, request), 0.0)

    for _ in range(2 if quick else 5):
        submit(rng.integers(2, 4000, 2048), 1)
        prefill = [(seconds, by_op) for _, seconds, by_op in steps_of(engine, ranks)]
        total: dict[str, float] = {}
        for _, by_op in prefill:
            for name, seconds in by_op.items():
                total[name] = total.get(name, 0.0) + seconds
        found.setdefault("prefill 2048", []).append((sum(seconds for seconds, _ in prefill), total))
    for batch in (1, 8, 32):
        prefix = rng.integers(2, 4000, 1024)
        submit(prefix, 1)
        steps_of(engine, ranks)
        for _ in range(batch):
            submit(np.concatenate([prefix, rng.integers(2, 4000, 16)]), 40 if quick else 97)
        decode = [(seconds, by_op) for pure, seconds, by_op in steps_of(engine, ranks) if pure]
        found[f"decode {batch}"] = decode[2:]
    return found


def run(arguments: argparse.Namespace) -> None:
    report = Report("step_profile")
    shown = {name: getattr(arguments, name) for name in ("tp", "dtype", "kernels", "collectives", "op_by_op")}
    config = EngineConfig(num_blocks=BLOCKS, max_context=4096, token_budget=1024)
    with Ranks(arguments, timed=False) as ranks:
        plain = cases(Engine(config), ranks, arguments.quick)
    with Ranks(arguments, timed=True) as ranks:
        timed = cases(Engine(config), ranks, arguments.quick)
    for name, steps in plain.items():
        case = {"case": name, **shown}
        report.add(case, "step_time", median(seconds for seconds, _ in steps) * 1e3, "ms", len(steps))
        ops = sorted({op for _, by_op in timed[name] for op in by_op})
        spent = {op: median(by_op.get(op, 0.0) for _, by_op in timed[name]) for op in ops}
        spent["other"] = median(seconds - sum(by_op.values()) for seconds, by_op in timed[name])
        for op, seconds in sorted(spent.items(), key=lambda pair: -pair[1]):
            report.add(case, op, seconds * 1e3, "ms", len(timed[name]))
    report.finish(arguments.json)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="small", help="folder, or small")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--collectives", default="auto")
    parser.add_argument("--op-by-op", action="store_true", help="run the program op by op from Python")
    parser.add_argument("--threads", type=int, default=0, help="per rank; default: the share of two cores")
    arguments = parser.parse_args()
    if arguments.model == "small":
        arguments.model = str(small_model())
    run(arguments)


if __name__ == "__main__":
    main()
