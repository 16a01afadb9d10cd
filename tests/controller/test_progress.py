"""Nobody waits for ever, and who was aborted stays away, when groups come back in part."""

from __future__ import annotations

import pytest
from simulation.driver import Simulation, verify
from simulation.oracle import expected_output

from trunkline.controller.config import EngineConfig
from trunkline.controller.messages import BeamSearch
from trunkline.controller.sequences.samples import sample_seed


@pytest.mark.parametrize(("length", "n"), [(110, 1), (10, 7)], ids=["blocks", "rows"])
def test_a_search_that_is_coming_in_goes_before_better_priorities(length: int, n: int) -> None:
    """One beam is back and holds blocks and a promise of rows; it computes nothing before the others are there."""
    config = EngineConfig(
        num_blocks=40, chunk_size=4, max_context=120, token_budget=9, max_rows=8, max_inflight_steps=1
    )
    simulation = Simulation(config)
    search = simulation.submit(list(range(40)), 12, n=4, beam=BeamSearch(4), priority=1)
    for _ in range(9):
        simulation.step()
    scheduler = simulation.engine.scheduler
    scheduler.preempt(scheduler.running()[0].group, simulation.now)
    simulation.engine.flush_cache()
    while not scheduler.parked:
        assert simulation.step()
    assert len(scheduler.running()) == 1
    other = simulation.submit([7] * length, 4, n=n)
    simulation.run(300)
    for request in (search, other):
        assert simulation.streams[request].reason == "length"
        verify(simulation.streams[request], config.longest_sequence)


@pytest.mark.parametrize("given_up", [0, 1, 2])
def test_a_sample_given_up_before_its_first_token_does_not_come_back(given_up: int) -> None:
    """The group is preempted before its samples differ; the others then come back by themselves, not by a fork."""
    simulation = Simulation(EngineConfig(num_blocks=60, chunk_size=4, max_context=60, token_budget=40, max_rows=8))
    prompt = list(range(10))
    request = simulation.submit(prompt, 8, seed=3, n=3)
    simulation.plan()
    scheduler = simulation.engine.scheduler
    group = scheduler.running()[0].group
    assert group.forked
    simulation.engine.abort(request, simulation.now, sample=given_up)
    scheduler.preempt(group, simulation.now)
    while not simulation.engine.is_idle:
        assert simulation.step()
    expected = [expected_output(prompt, sample_seed(3, sample), 8) for sample in range(3)]
    expected[given_up] = []
    assert simulation.streams[request].outputs == expected
