"""The engine's own plans, executed by a real runner: the simulation of a group with a model in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from simulation.driver import Simulation
from worker.driver import run_config
from worker.ranks import Rank

from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.reports import StepResult
from trunkline.worker.loading import load_runner
from trunkline.worker.messages import StepPlan
from trunkline.worker.runner import Runner


class RealWorkers:
    """Stands where the simulation has its simulated workers."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def execute(self, plan: StepPlan) -> StepResult:
        result = self.runner.execute(plan)
        assert result is not None
        return result


def make_simulation(folder: Path, blocks: int, **settings: Any) -> Simulation:
    """An engine over a real runner, whose pool begins with what must never be read."""
    worker = {
        "host_memory_bytes": settings.pop("host_memory_bytes", 0),
        "kv_dtype": settings.pop("kv_dtype", "auto"),
        "window_share": settings.pop("window_share", 1.0),
    }
    config = run_config(folder, pool_blocks=blocks, **worker)
    runner = load_runner(config, lambda *_: None)
    runner.pool.data.view(torch.uint8).fill_(255)  # NaN in every type, scales of int8 among them
    settings = {"max_context": 400, "host_slots": runner.host_slots, **runner.windows, **settings}
    simulation = Simulation(EngineConfig(num_blocks=blocks, chunk_size=8, **settings))
    simulation.workers = RealWorkers(runner)  # type: ignore[assignment]
    return simulation


def replay(rank: Rank, folder: Path, blocks: int, plans: list[StepPlan], window_share: float = 1.0) -> list[bytes]:
    """Execute plans that another group was given; return the tokens of each step, of rank 0."""
    runner = rank.load(folder, pool_blocks=blocks, window_share=window_share)
    results = [runner.execute(plan) for plan in plans]
    runner.close()
    return [result.tokens for result in results if result is not None]
