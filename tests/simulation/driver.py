"""Drives an engine with simulated workers, step by step, with up to two steps in flight."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from simulation.worker import SimulatedWorkers

from trunkline.controller.config import EngineConfig
from trunkline.controller.engine import Engine, Request
from trunkline.controller.integrity import check_integrity
from trunkline.controller.messages import StepResult
from trunkline.worker.messages import Sampling


@dataclass
class Stream:
    """What a client of the simulation sees of a request."""

    prompt: list[int]
    seed: int
    max_tokens: int
    stop_ids: tuple[int, ...]
    output: list[int] = field(default_factory=list)
    cached_tokens: int | None = None
    reason: str | None = None


class Simulation:
    """An engine, its workers and its clients. Results return after the next plan where the engine allows."""

    def __init__(self, config: EngineConfig, *, check: bool = True) -> None:
        self.engine = Engine(config)
        self.workers = SimulatedWorkers(config.num_blocks, config.chunk_size)
        self.streams: dict[int, Stream] = {}
        self.results: deque[StepResult] = deque()
        self.now = 0.0
        self.check = check
        self.next_id = 1

    def submit(
        self,
        prompt: list[int],
        max_tokens: int = 8,
        *,
        seed: int = 0,
        stop_ids: tuple[int, ...] = (),
        salt: bytes = b"",
    ) -> int:
        request_id = self.next_id
        self.next_id += 1
        self.streams[request_id] = Stream(prompt, seed, max_tokens, stop_ids)
        request = Request(
            id=request_id,
            tokens=np.array(prompt, np.int32),
            max_tokens=max_tokens,
            sampling=Sampling(seed=seed),
            stop_ids=stop_ids,
            salt=salt,
        )
        self.engine.submit(request, self.now)
        self._collect()
        return request_id

    def abort(self, request_id: int) -> None:
        self.engine.abort(request_id, self.now)
        self._collect()

    def step(self) -> bool:
        """Plan as far ahead as allowed, then answer the oldest step; False when nothing is left to do."""
        self.now += 1.0
        planned = self.plan()
        return self.answer() or planned

    def plan(self) -> bool:
        planned = False
        while (plan := self.engine.next_step(self.now)) is not None:
            self.results.append(self.workers.execute(plan))
            planned = True
            self._verify()
        return planned

    def answer(self) -> bool:
        if not self.results:
            return False
        self.engine.step_done(self.results.popleft(), self.now)
        self._collect()
        self._verify()
        return True

    def run(self, steps_max: int = 100_000) -> None:
        """Until everything ended."""
        for _ in range(steps_max):
            if not self.step() and self.engine.is_idle:
                return
        raise AssertionError(f"requests are still running after {steps_max} steps")

    def _verify(self) -> None:
        if self.check:
            check_integrity(self.engine.scheduler)

    def _collect(self) -> None:
        outputs = self.engine.outputs()
        if outputs is None:
            return
        for started in outputs.started:
            stream = self.streams[started.request]
            assert stream.cached_tokens is None, "a request started twice"
            stream.cached_tokens = started.cached_tokens
        for requests, tokens in zip(outputs.requests, outputs.tokens, strict=True):
            for request, token in zip(requests.tolist(), tokens.tolist(), strict=True):
                stream = self.streams[request]
                assert stream.reason is None, "a token after the end"
                stream.output.append(token)
        for finished in outputs.finished:
            stream = self.streams[finished.request]
            assert stream.reason is None, "a request ended twice"
            stream.reason = finished.reason
