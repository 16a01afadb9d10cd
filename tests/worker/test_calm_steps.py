"""Calm steps: what is computed, drawn and reported is what the ordinary way gives; what ends them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from seeds import seeds
from worker.driver import VOCAB_SIZE, Driver, run_config

from trunkline.controller.reports import StepResult
from trunkline.kernels.cpu_memory import FEW_ROWS
from trunkline.kernels.native import isa_levels
from trunkline.worker.errors import PlanError
from trunkline.worker.loading import load_runner
from trunkline.worker.messages import Sampling, StepPlan
from trunkline.worker.runner import Runner

pytestmark = pytest.mark.skipif(not isa_levels(), reason="the compiled kernels are not installed")

CHUNK, BLOCKS = 32, 256


class Watched:
    """A runner that keeps its results, and counts its calm steps."""

    def __init__(self, folder: Path, *, is_calm: bool) -> None:
        config = run_config(folder, chunk_size=CHUNK, pool_blocks=BLOCKS, threads=2)
        self.runner: Runner = load_runner(config, lambda *_: None)
        self.results: list[dict[str, Any]] = []
        self.calm = 0
        if not is_calm:
            self.runner._calm._planner = None

    def execute(self, plan: StepPlan) -> StepResult | None:
        calm = self.runner._calm
        made = calm._made
        result = self.runner.execute(plan)
        self.calm += calm._made > made
        assert result is not None
        timed = ("elapsed_us", "moved_us", "moved_blocks")
        names = [name for name in StepResult.__struct_fields__ if name not in timed]
        self.results.append({name: getattr(result, name) for name in names})
        return result


def random_sampling(rng: np.random.Generator) -> Sampling:
    kind = rng.integers(6)
    seed = int(rng.integers(1 << 60))
    return [
        Sampling(temperature=0),
        Sampling(temperature=0, logprobs=3),
        Sampling(seed=seed, temperature=1.5, top_k=20, top_p=0.9),
        Sampling(seed=seed, temperature=1.0, repetition_penalty=1.3, presence_penalty=0.5),
        Sampling(seed=seed, temperature=1.0, bad_words=[[3], [4, 5]]),
        Sampling(temperature=0, min_tokens=9, stop_ids=np.arange(40, dtype=np.int32).tobytes()),
    ][kind]


@pytest.mark.parametrize("seed", seeds(4))
def test_calm_steps_give_what_ordinary_ones_give(folder: Path, seed: int) -> None:
    """Streams of any lengths and parameters, alone and beside others, over many chunks: the same results."""
    found = []
    for is_calm in (True, False):
        watched, rng = Watched(folder, is_calm=is_calm), np.random.default_rng(seed)
        driver = Driver(watched.execute, num_blocks=BLOCKS, chunk_size=CHUNK, seed=seed)
        texts = []
        for count in (1, int(rng.integers(2, 4)), FEW_ROWS + 2):
            # Many rows that begin their blocks in different steps are hardly ever calm.
            sizes = rng.integers(1, 90, size=count).tolist() if count <= 3 else [int(rng.integers(1, 90))] * count
            streams = [driver.add(rng.integers(VOCAB_SIZE, size=n).tolist(), random_sampling(rng)) for n in sizes]
            driver.run(streams, int(rng.integers(20, 80)), piece=40)
            texts.append([stream.output for stream in streams])
        found.append((texts, watched.results, watched.runner.kernels.counters.calls))
        assert (watched.calm > len(watched.results) / 5) == is_calm
    (texts, results, calls), ordinary = found
    assert texts == ordinary[0]
    assert results == ordinary[1]
    assert calls == ordinary[2]


def test_plans_that_are_lost_or_of_another_epoch_are_noticed_in_calm_steps(folder: Path) -> None:
    """And whether a row begins a block is seen in time: without one for it the plan is refused."""
    watched = Watched(folder, is_calm=True)
    driver = Driver(watched.execute, num_blocks=BLOCKS, chunk_size=CHUNK)
    stream = driver.add([1, 2, 3], Sampling(temperature=0))
    driver._grow(stream, 3)
    entry = np.array([stream.id, 0, 3, 0, 1], dtype=np.int32).tobytes()
    driver.send(joins=[driver._join(stream)], prefill=entry)
    driver.send(rows=np.array([stream.id], dtype=np.int32).tobytes(), runs=b"")
    for _ in range(6):
        driver.send()
    assert watched.calm == 5, "the first of them is the one that looks"
    runner, last = watched.runner, driver.step
    for plan, message in ((StepPlan(last + 2, 1), "a plan was lost"), (StepPlan(last + 1, 2), "plan of epoch 2")):
        with pytest.raises(PlanError, match=message):
            runner.execute(plan)
    for _ in range(CHUNK - 3 - (driver.step - 1)):  # there are the prompt's tokens, and one of each later step
        driver.send()
    with pytest.raises(PlanError, match="needs block-table entry 1"):
        driver.send()
