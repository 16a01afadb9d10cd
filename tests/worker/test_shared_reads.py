"""Ordinary prefixes are read once: an engine and a runner over a tree of three levels, byte by byte.

32 tokens ─┬─ 24 tokens ─┬─ 5 tokens     row 0        Each step of decode attention reads every chunk once,
           │             └─ 6 tokens     row 1        however many rows have it. Without sharing it would
           └─ 24 tokens ─┬─ 7 tokens     row 2        read each row's whole context.
                         └─ 8 tokens     row 3
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from worker.driver import VOCAB_SIZE
from worker.engine_driver import RealWorkers, make_simulation

from trunkline.controller.reports import StepResult
from trunkline.kernels import cpu_plans
from trunkline.kernels.plan import WorkOptions
from trunkline.kvstore.chunks import unpack_int32
from trunkline.worker.messages import StepPlan

CHUNK: Final = 8
FIRST, SECOND = 32, 24
OWN: Final = (5, 6, 7, 8)
OUTPUT: Final = 12


class Watched(RealWorkers):
    """Notes what steps read, beside what their rows' contexts are."""

    def __init__(self, workers: RealWorkers) -> None:
        super().__init__(workers.runner)
        self.reads: list[tuple[int, int]] = []
        """(rows, tokens read) of each step that decodes."""
        self._rows: list[int] = []

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.rows is not None:
            self._rows = unpack_int32(plan.rows).tolist()
        result = super().execute(plan)
        tokens, rest = divmod(result.kv_bytes_read * CHUNK, self.runner.block_bytes)
        assert rest == 0
        if self._rows:
            self.reads.append((len(self._rows), tokens))
        return result


def decode(folder: Path) -> tuple[list[list[int]], list[int]]:
    """The four rows' outputs, and the tokens that were read by each step of all four."""
    rng = np.random.default_rng(5)

    def draw(count: int) -> list[int]:
        found: list[int] = rng.integers(VOCAB_SIZE, size=count).tolist()
        return found

    first, seconds = draw(FIRST), [draw(SECOND), draw(SECOND)]
    prompts = [first + seconds[row // 2] + draw(own) for row, own in enumerate(OWN)]
    simulation = make_simulation(folder, 60)
    watched = Watched(simulation.workers)  # type: ignore[arg-type]
    simulation.workers = watched  # type: ignore[assignment]
    simulation.submit(first + seconds[0], 1)
    simulation.submit(first + seconds[1], 1)
    simulation.run()
    requests = [simulation.submit(prompt, OUTPUT, seed=row) for row, prompt in enumerate(prompts)]
    simulation.run()
    outputs = [simulation.streams[request].output for request in requests]
    assert Counter(rows for rows, _ in watched.reads)[4] == OUTPUT - 1
    return outputs, [tokens for rows, tokens in watched.reads if rows == 4]


def once(step: int) -> int:
    """Tokens of KV that there are in the `step`-th step, from 1: what is to be read."""
    return FIRST + 2 * SECOND + sum(own + step for own in OWN)


def test_every_chunk_of_a_tree_is_read_once(folder: Path) -> None:
    _, reads = decode(folder)
    assert reads == [once(step) for step in range(1, OUTPUT)]


def test_what_is_read_again_without_sharing_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes no text, and only the count of bytes tells it."""
    outputs, _ = decode(folder)
    monkeypatch.setattr(cpu_plans, "WorkOptions", lambda **options: WorkOptions(**(options | {"share": False})))
    alone, reads = decode(folder)
    assert alone == outputs
    assert reads == [once(step) + 3 * FIRST + 2 * SECOND for step in range(1, OUTPUT)]
