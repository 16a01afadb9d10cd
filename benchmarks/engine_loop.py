"""A real engine and a real rank in one process: what the group does, without sockets and other processes.

Plans are made as the controller makes them (up to two steps ahead of the results) and executed by the worker's
runner at once; so a step's time is planning + execution, and nothing else runs beside it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from trunkline.controller.engine.engine import Engine
from trunkline.controller.engine.events import DropCache, EngineOutputs, Event, Ready
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import BeamSearch, Submit
from trunkline.controller.reports import StepResult
from trunkline.controller.sequences.sequence import Request
from trunkline.kvstore.chunks import pack_int32, unpack_int32
from trunkline.worker.config import WorkerConfig
from trunkline.worker.loading import load_runner
from trunkline.worker.messages import Sampling
from trunkline.worker.tiers.copy_lane import CopyOptions


@dataclass(slots=True)
class Memory:
    """Blocks over the steps of a run: what is held, and what would be held if no sequence shared any."""

    physical: list[int] = field(default_factory=list)
    logical: list[int] = field(default_factory=list)

    @property
    def saved(self) -> float:
        """Share of the blocks that sharing saves, averaged over the steps (PagedAttention §6.3)."""
        return 1 - sum(self.physical) / sum(self.logical) if self.logical else 0.0


@dataclass(slots=True)
class Done:
    """When a request came and ended, in seconds of the loop's clock."""

    submitted_at: float
    ended_at: float = 0.0
    tokens: int = 0
    """Output, of all samples."""


class EngineLoop:
    """Drives both until nothing is left to do."""

    def __init__(
        self,
        model: Path,
        engine: EngineConfig,
        worker: dict[str, Any],
        copying: CopyOptions = CopyOptions(),  # noqa: B008
    ) -> None:
        """
        Args:
            engine: limits; blocks and chunk size count for the worker, too. Windows are the model's.
            worker: more fields of `WorkerConfig`.
        """
        config = WorkerConfig(
            model=str(model),
            plan_endpoint="",
            report_endpoint="",
            chunk_size=engine.chunk_size,
            pool_blocks=engine.num_blocks,
            **worker,
        )
        self.runner = load_runner(config, lambda *_: None, copying=copying)
        self.engine = Engine(msgspec.structs.replace(engine, **self.runner.windows))
        self.memory = Memory()
        self.requests: dict[int, Done] = {}
        self.step_seconds: list[float] = []
        """Of the steps that only decoded."""
        self.prefilled = 0
        """Tokens of prompts, and of what came back, that were computed."""
        self.waited_seconds = 0.0
        """Of the steps, for copies."""
        self.wake_at = float("inf")
        self._results: deque[StepResult] = deque()
        self._next_id = 1

    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        n: int = 1,
        beam: BeamSearch | None = None,
        sampling: Sampling | None = None,
    ) -> int:
        sampling = sampling or Sampling(temperature=0.0 if beam else 1.0, seed=self._next_id)
        submit = Submit(self._next_id, pack_int32(prompt), len(prompt), max_tokens, sampling, n=n, beam=beam)
        request = Request.of(self._next_id, submit)
        self._next_id += 1
        now = time.perf_counter()
        self.requests[request.id] = Done(now)
        self.receive(request, now)
        return request.id

    def receive(self, event: Event, now: float) -> None:
        """Give the engine an event, and nothing to plan yet."""
        self.engine.receive(event, now)
        self._collect(self.engine.take_outputs(), now)

    def flush_cache(self) -> None:
        self.receive(DropCache(), time.perf_counter())

    def run(self, arrivals: Callable[[float], bool] = lambda now: False) -> float:
        """Until everything has ended and `arrivals` (called with the time, submits what is due) says that nothing
        more will come; seconds spent."""
        begin = time.perf_counter()
        while True:
            more = arrivals(time.perf_counter())
            if not self.step() and not more and self.engine.is_idle:
                return time.perf_counter() - begin

    def step(self) -> bool:
        """Plan ahead, execute, take in one result; False: nothing was there to do."""
        start = time.perf_counter()
        planned, prefill = False, False
        while True:
            ready = self.engine.step((), time.perf_counter())
            self._act(ready)
            if (plan := ready.plan) is not None:
                prefill |= bool(plan.prefill)
                self.prefilled += int(unpack_int32(plan.prefill, 5)[:, 2].sum()) if plan.prefill else 0
                planned = True
            if not ready.again:
                break
        if not self._results:
            return planned
        result = self._results.popleft()
        self.waited_seconds += result.waited_us / 1e6
        self.receive(result, time.perf_counter())
        self._measure()
        if planned and not prefill:
            self.step_seconds.append(time.perf_counter() - start)
        return True

    def _act(self, ready: Ready) -> None:
        """Execute what the engine has planned."""
        if ready.plan is not None:
            result = self.runner.execute(ready.plan)
            assert result is not None
            self._results.append(result)
        self._collect(ready.outputs, time.perf_counter())
        self.wake_at = ready.wake_at

    def _measure(self) -> None:
        scheduler = self.engine.scheduler
        running = scheduler.running()
        if running:
            kv = scheduler.kv
            self.memory.physical.append(self.engine.config.num_blocks - kv.available)
            self.memory.logical.append(sum(len(s.path) + len(s.private) for s in running))

    def _collect(self, outputs: EngineOutputs | None, now: float) -> None:
        if outputs is None:
            return
        self._count(outputs)
        for finished in outputs.finished:
            if finished.reason not in ("stop", "length"):
                raise SystemExit(f"request {finished.request} ended with {finished.reason}: {finished.detail}")
            self.requests[finished.request].ended_at = now

    def _count(self, outputs: EngineOutputs) -> None:
        for requests in outputs.requests:
            for request in requests.tolist():
                self.requests[request].tokens += 1
        for found in outputs.beams:
            self.requests[found.request].tokens += sum(len(h.tokens) // 4 for h in found.hypotheses)

    def close(self) -> None:
        self.runner.close()
