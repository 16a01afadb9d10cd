"""One sample of several is given up: the others go on as if it had never been there."""

from __future__ import annotations

from simulation.driver import Simulation
from simulation.oracle import expected_output

from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.sequences.beam_search import sample_seed

PROMPT = list(range(10))


def start(n: int) -> tuple[Simulation, int]:
    """A request of n samples that has brought some tokens."""
    simulation = Simulation(EngineConfig(num_blocks=60, chunk_size=4, max_context=60, token_budget=40, max_rows=8))
    request = simulation.submit(PROMPT, 20, seed=3, n=n)
    for _ in range(6):
        simulation.step()
    return simulation, request


def test_the_others_go_on() -> None:
    simulation, request = start(3)
    stream = simulation.streams[request]
    length = len(stream.outputs[1])
    assert 0 < length < 20
    held = simulation.engine.scheduler.running_count
    simulation.abort(request, sample=1)
    assert simulation.engine.scheduler.running_count == held - 1
    while not simulation.engine.is_idle:
        simulation.step()
    assert len(stream.outputs[1]) == length, "a token of a sample that was given up"
    for sample in (0, 2):
        assert stream.outputs[sample] == expected_output(PROMPT, sample_seed(3, sample), 20)
    assert sorted(stream.reasons) == [0, 2]


def test_the_last_one_ends_the_request() -> None:
    simulation, request = start(2)
    simulation.abort(request, sample=0)
    simulation.abort(request, sample=0)
    assert simulation.engine.request_ids() == [request]
    simulation.abort(request, sample=1)
    assert simulation.engine.request_ids() == []
    while not simulation.engine.is_idle:
        simulation.step()
    assert simulation.engine.scheduler.running_count == 0


def test_a_preempted_one_can_be_given_up() -> None:
    simulation, request = start(3)
    scheduler = simulation.engine.scheduler
    scheduler.preempt(scheduler.running()[0].group, simulation.now)
    simulation.abort(request, sample=2)
    while not simulation.engine.is_idle:
        simulation.step()
    stream = simulation.streams[request]
    for sample in (0, 1):
        assert stream.outputs[sample] == expected_output(PROMPT, sample_seed(3, sample), 20)
