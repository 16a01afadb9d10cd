"""CPU time of a cached prompt's first token beside its ops: the engine's part and the rank's, behind cold caches.

    python benchmarks/cached_step.py [--quick] [--rounds 40] [--clones PATH,PATH] [--model small] [--tokens 2048]
                                     [--dtype bfloat16] [--functions] [--json PATH]

A real engine, a real rank with one thread and its tiers, and a router's socket, in one process for each of
`--clones` (default: this one; folders with a `.venv`), whose own copies of this script are asked by turns. A round
sends a prompt of which all but the last token is cached, and wants one token. Before each stage 48 MB are read, as
the weights are between two stages of a served request. `decode ops` are those of the steps of a longer answer.
It is CPU time of the thread, because other work on the machine changes it less than wall time. `--functions` lists
the Python and native functions that each stage of one request calls, with the number of calls, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from types import FrameType
from typing import Any, Final

import msgspec
import numpy as np
import torch
import zmq
from engine_loop import Done
from report import Report, argument_parser
from small_model import small_model
from tiered_loop import TieredLoop

from trunkline.controller.engine.events import Event, Ready
from trunkline.controller.engine.validation import problem_of_submit
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import Submit
from trunkline.controller.reports import StepResult
from trunkline.controller.sequences.sequence import Request
from trunkline.controller.service.routers import ROUTER_SHIFT, Routers
from trunkline.kvstore.chunks import pack_int32
from trunkline.runtime.wire_gate import Gate
from trunkline.worker.messages import Sampling, StepPlan

STAGES: Final = ("plan", "begin", "ops", "end", "reply", "rest")
"""Message to plan; plan to the first op; ops; ops to the result; result to the token's reply; what is left."""
COLD: Final = np.zeros(48 << 17)
VOCABULARY: Final = 16_384
DECODED: Final = 8


class Clock:
    """CPU time by stage, or the functions that each calls."""

    def __init__(self, *, lists: bool) -> None:
        self.us: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self.calls: dict[str, Counter[str]] = {stage: Counter() for stage in STAGES}
        self._lists = lists
        self._stage = ""
        self._since = 0

    def begin(self, stage: str, *, cold: bool = False) -> None:
        """End the stage before, and begin this one; "": none."""
        now = time.thread_time_ns()
        sys.setprofile(None)
        if self._stage:
            self.us[self._stage] += (now - self._since) / 1000
        if cold:
            COLD.sum()
        self._stage = stage
        if self._lists and stage:
            sys.setprofile(self._called)
        self._since = time.thread_time_ns()

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            self.calls[self._stage][f"{code.co_filename.rpartition('trunkline/')[2]}:{code.co_qualname}"] += 1
        elif event == "c_call":
            self.calls[self._stage][f"native {argument.__qualname__}"] += 1


class Cluster(TieredLoop):
    """An engine, a rank and a router's socket: messages in, messages out."""

    def __init__(self, model: str, dtype: str) -> None:
        config = EngineConfig(num_blocks=512, dtype=dtype, max_context=4096, token_budget=4096)
        super().__init__(Path(model), config, {"dtype": dtype, "threads": 1, "host_memory_bytes": 256 << 20})
        self._folder = tempfile.TemporaryDirectory()
        endpoint = f"ipc://{self._folder.name}/router"
        context = zmq.Context()
        self._routers = Routers(Gate(context, ""), endpoint)
        self._router = context.socket(zmq.DEALER)
        self._router.connect(endpoint)
        self._encoder = msgspec.msgpack.Encoder()
        self._orders = msgspec.msgpack.Decoder(StepPlan)
        self._answers = msgspec.msgpack.Decoder(StepResult)
        self._run_ops: dict[str, Callable[..., Any]] = {}

    def answer(self, prompt: list[int], tokens: int, clock: Clock) -> None:
        """Compute a request that a router sends; the clock has the sum of all its steps."""
        sampling = Sampling(temperature=0.0, seed=1)
        message = Submit(self._next_id, pack_int32(prompt), len(prompt), tokens, sampling)
        self._next_id += 1
        self._router.send(self._encoder.encode(message))
        self._routers.socket.poll()
        clock.begin("plan", cold=True)
        now = time.monotonic()
        [(router, got)] = self._routers.receive(now)
        assert isinstance(got, Submit)
        assert not problem_of_submit(got, VOCABULARY)
        request = Request.of(router << ROUTER_SHIFT | got.request, got)
        self.requests[request.id] = Done(now)
        plans = deque(self._turn([request], clock))
        for _ in range(tokens):
            result = self._execute(plans.popleft(), clock)
            clock.begin("reply", cold=True)
            plans.extend(self._turn([self._answers.decode(result)], clock))
        clock.begin("")
        self.settle()
        while self._router.poll(0):
            self._router.recv()

    def _turn(self, events: list[Event], clock: Clock) -> list[bytes]:
        """Do what the controller does in a turn; return the plans that it sends."""
        plans, again = list[bytes](), True
        while again:
            now = time.monotonic()
            ready = self.engine.begin(events, now)
            self._send(ready, plans, clock)
            if ready.has_rest:
                ready = self.engine.finish(ready, now)
                self._send(ready, plans, clock)
            events, again = [], ready.again
        return plans

    def _send(self, ready: Ready, plans: list[bytes], clock: Clock) -> None:
        """Do what the controller does with a part of a step; add its plan to `plans`."""
        if ready.plan is not None:
            plans.append(self._encoder.encode(ready.plan))
            clock.begin("rest")
        if ready.outputs is not None:
            self._routers.publish(ready.outputs)
            clock.begin("rest")
        for order in ready.orders:
            self.tiers.take(order)

    def _execute(self, payload: bytes, clock: Clock) -> bytes:
        clock.begin("begin", cold=True)
        self.runner.launch(self._orders.decode(payload))
        encoded = self._encoder.encode(self.runner.launched.take())
        clock.begin("rest")
        assert self.runner.copier is not None
        self.runner.copier.settle()
        clock.begin("")
        return encoded

    def time_ops(self, clock: Clock) -> None:
        """Count the calls of the native program as ops of this clock, from now on."""
        program: Any = self.runner._decoder.runner
        library = program._library
        if not self._run_ops:
            self._run_ops = {name: getattr(library, name) for name in ("run", "step")}

        def timed(run: Callable[..., Any], *arguments: Any) -> Any:
            clock.begin("ops")
            found = run(*arguments)
            clock.begin("end")
            return found

        for name, run in self._run_ops.items():
            setattr(library, name, partial(timed, run))


class Rounds:
    """One prompt that is cached, and asked for again with other last tokens."""

    def __init__(self, arguments: argparse.Namespace, model: str) -> None:
        self._cluster = Cluster(model, arguments.dtype)
        self._rng = np.random.default_rng(1)
        self._prompt: list[int] = self._rng.integers(300, 4000, arguments.tokens).tolist()
        self.answer(1, lists=False)

    def answer(self, tokens: int, *, lists: bool) -> Clock:
        """Ask for so many tokens behind the prompt with a new last token."""
        clock = Clock(lists=lists)
        self._cluster.time_ops(clock)
        self._cluster.answer([*self._prompt[:-1], int(self._rng.integers(4000, VOCABULARY))], tokens, clock)
        return clock

    def measured(self) -> dict[str, float]:
        """Return a round's figures in microseconds."""
        first, more = self.answer(1, lists=False).us, self.answer(1 + DECODED, lists=False).us
        beside = sum(first[stage] for stage in ("plan", "begin", "end", "reply"))
        return {**first, "beside ops": beside, "decode ops": (more["ops"] - first["ops"]) / DECODED}


def started(clone: Path, options: list[str]) -> subprocess.Popen[str]:
    """Start the script of a clone in its environment; it answers lines."""
    command = [str(clone / ".venv/bin/python"), str(clone / "benchmarks/cached_step.py"), "--child", *options]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(process: subprocess.Popen[str]) -> dict[str, float]:
    """Return the figures of one round of another interpreter."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("round\n")
    process.stdin.flush()
    figures: dict[str, float] = json.loads(process.stdout.readline())
    return figures


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--clones", default=str(Path(__file__).parents[1]))
    parser.add_argument("--model", default="small", help="what to serve; small: the model of small_model.py")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=2048, help="of the prompt (%(default)s)")
    parser.add_argument("--functions", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    model = str(small_model()) if arguments.model == "small" else arguments.model
    if arguments.functions or arguments.child:
        mode = torch.inference_mode()  # as a worker's thread; it ends with the object
        mode.__enter__()
        rounds = Rounds(arguments, model)
        for _ in sys.stdin if arguments.child else ():
            print(json.dumps(rounds.measured()), flush=True)
        if arguments.functions:
            rounds.answer(1, lists=False)
            for stage, calls in rounds.answer(1, lists=True).calls.items():
                print(f"{stage}: {len(calls)} functions, {calls.total()} calls")
                print(*(f"  {count:4} {name}" for name, count in calls.items()), sep="\n")
        sys.stdout.flush()
        os._exit(0)  # threads of the tiers and sockets have nothing to lose
    clones, count = arguments.clones.split(","), 6 if arguments.quick else arguments.rounds
    options = ["--model", model, "--dtype", arguments.dtype, "--tokens", str(arguments.tokens)]
    children = {clone: started(Path(clone), options) for clone in clones}
    figures: dict[str, list[dict[str, float]]] = {clone: [] for clone in clones}
    for turn in range(count):
        for clone in clones[turn % len(clones) :] + clones[: turn % len(clones)]:
            figures[clone].append(ask(children[clone]))
    report = Report("cached_step")
    for clone, values in figures.items():
        for what in values[0]:
            own = [value[what] for value in values]
            report.add({"clone": clone}, what, median(own), "us", count)
            report.add({"clone": clone}, f"{what}, lower quartile", quantiles(own, n=4)[0], "us", count)
    report.finish(arguments.json)
    for child in children.values():
        child.kill()


if __name__ == "__main__":
    main()
