"""Models in which some layers have a window, with host memory below blocks that may be thin, through the real
engine and a real runner: what was spilled and comes back gives the texts of `transformers`.

What becomes thin, or is loaded into a thin block, has large numbers in the layers with a window, so that nothing
counts it unnoticed.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from simulation.driver import Simulation
from worker.checkpoints import Models, assert_greedy
from worker.test_thin_blocks import LARGE, WINDOW, random_tokens, runner_of, small, spoil, windowed_layers

from trunkline.controller.messages import StepResult
from trunkline.kvstore.chunks import unpack_int32
from trunkline.kvstore.window_share import LoadedLayers
from trunkline.worker.messages import StepPlan

HOST = 4 << 20


def loads_of(simulation: Simulation) -> Counter[LoadedLayers]:
    """Spoil what nothing may read (`spoil`), also in blocks that stay thin; return the counts of the loads."""
    spoil(simulation)
    runner, counts = runner_of(simulation), Counter[LoadedLayers]()
    execute = runner.execute
    layers = windowed_layers(runner)

    def step(plan: StepPlan) -> StepResult | None:
        assert runner.copier is not None
        runner.copier.saves.wait_for(runner.copier.saves.submitted)  # of blocks that are spoilt now
        result = execute(plan)
        loads = unpack_int32(plan.loads, columns=3)
        for (block, _, _), which in zip(loads.tolist(), plan.load_layers or bytes(len(loads)), strict=True):
            counts[LoadedLayers(which)] += 1
            if which == LoadedLayers.PLAIN:
                held = runner.pool.data[block, layers]
                assert ((held == LARGE) | held.isnan()).all(), "a thin block was loaded as a whole"
        return result

    runner.execute = step  # type: ignore[method-assign]
    return counts


@pytest.fixture(scope="module", params=("gemma3", "gpt-oss", "olmo3"))
def mixed(models: Models, request: pytest.FixtureRequest) -> Path:
    return models(request.param, sliding_window=WINDOW, head_dim=32)  # a layer of a chunk is a page


def ask(simulation: Simulation, prompt: list[int], tokens: int = 12) -> tuple[list[int], int]:
    """Return the prompt with its output, and how many of the prompt's tokens were found."""
    stream = simulation.streams[simulation.submit(prompt, tokens, temperature=0.0)]
    simulation.run()
    assert stream.cached_tokens is not None
    return stream.prompt + stream.output, stream.cached_tokens


def test_texts_are_spilled_and_come_back(mixed: Path) -> None:
    """A session that has left the device is loaded, into thin blocks but for its last window; one whose blocks
    stayed and became thin gets back what layers with a window need where a request leaves it midway."""
    rng = np.random.default_rng(7)
    simulation = small(mixed, 60, host_memory_bytes=HOST, preemption="swap")
    loads = loads_of(simulation)
    assert (simulation.engine.config.whole_blocks, simulation.engine.config.host_slots > 200) == (12, True)
    session, _ = ask(simulation, random_tokens(rng, 250))
    midway = [*session[:150], 5, 6, 7]
    _, found = ask(simulation, midway)
    assert found == 144
    assert loads[LoadedLayers.WINDOWED] > 0
    for _ in range(3):
        ask(simulation, random_tokens(rng, 200))
    before = loads.copy()
    turn = simulation.streams[simulation.submit([*session, 1, 2, 3], 12, temperature=0.0)]
    simulation.run()
    assert turn.cached_tokens == len(session) - 1
    assert_greedy(mixed, turn)
    assert loads[LoadedLayers.PLAIN] - before[LoadedLayers.PLAIN] > 20
    assert loads[LoadedLayers.ALL] - before[LoadedLayers.ALL] >= 3
    again = simulation.streams[simulation.submit(midway, 12, temperature=0.0)]
    simulation.run()
    assert_greedy(mixed, again)
    assert simulation.engine.scheduler.kv.tree.totals.lost_chunks == 0
