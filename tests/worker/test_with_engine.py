"""The real engine's plans executed by the real runner: sharing, preemption and eviction change no text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from simulation.driver import Simulation
from worker.checkpoints import make_checkpoint
from worker.driver import VOCAB_SIZE, run_config

from trunkline.controller.config import EngineConfig
from trunkline.controller.messages import StepResult
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "model")


def simulate(folder: Path, prompts: dict[int, list[int]], blocks: int) -> tuple[list[list[int]], Simulation]:
    """Sampled output of all prompts (by seed), submitted together."""
    runner = Runner.load(run_config(folder, pool_blocks=blocks), lambda *_: None)
    runner.pool.data.fill_(float("nan"))
    simulation = Simulation(EngineConfig(num_blocks=blocks, chunk_size=8, max_context=400))
    simulation.workers = RealWorkers(runner)  # type: ignore[assignment]
    ids = [simulation.submit(prompt, 20, seed=seed) for seed, prompt in prompts.items()]
    simulation.run()
    return [simulation.streams[request].output for request in ids], simulation


def test_text_does_not_depend_on_what_the_engine_does(folder: Path) -> None:
    rng = np.random.default_rng(0)
    prefix = rng.integers(VOCAB_SIZE, size=45).tolist()
    heads = [prefix[: int(rng.integers(0, 46))] for _ in range(8)]
    prompts = {
        seed: head + rng.integers(VOCAB_SIZE, size=int(rng.integers(1, 30))).tolist()
        for seed, head in enumerate(heads)
    }
    alone = [simulate(folder, {seed: prompt}, 60)[0][0] for seed, prompt in prompts.items()]
    roomy, simulation = simulate(folder, prompts, 200)
    assert roomy == alone
    assert simulation.engine.counters.cached_tokens > 0
    assert simulation.engine.scheduler.preemptions == 0
    tight, simulation = simulate(folder, prompts, 24)
    assert tight == alone
    assert simulation.engine.scheduler.preemptions > 0
