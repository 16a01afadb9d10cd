"""How large a step plan is where nothing changes: the figure that the documentation names."""

from __future__ import annotations

import msgspec
import pytest
from simulation.driver import Simulation

from trunkline.controller.engine_config import EngineConfig
from trunkline.worker.messages import StepPlan


@pytest.mark.parametrize("requests", [1, 8, 40])
def test_a_decode_step_in_which_nothing_changes_has_38_to_50_bytes(requests: int) -> None:
    """Whatever the batch: the plans of a real engine in which no row joins, leaves or fills a chunk."""
    config = EngineConfig(num_blocks=200, chunk_size=64, max_context=200, token_budget=512, max_rows=64)
    simulation = Simulation(config)
    plans: list[StepPlan] = []
    simulation.workers.observer = plans.append
    for seed in range(requests):
        simulation.submit([seed, 1, 2, 3], 50, seed=seed)
    simulation.run()
    quiet = [plan for plan in plans if plan.rows is None and not (plan.joins or plan.leaves or plan.blocks)]
    assert len(quiet) > 30
    sizes = {len(msgspec.msgpack.encode(plan)) for plan in quiet}
    assert min(sizes) == 38
    assert max(sizes) <= 50


def test_the_largest_after_a_year_of_steps() -> None:
    """2³² steps are 1.3 years at 100 a second; the fences name earlier steps."""
    last = (1 << 32) - 1
    plan = StepPlan(step=last, epoch=2, save_fence=last - 1, load_fence=last - 1)
    assert len(msgspec.msgpack.encode(plan)) == 50
