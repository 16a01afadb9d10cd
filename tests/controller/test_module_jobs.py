"""Encoding as scheduled work: beside decoding, preempted, waited for, given up; and nobody waits for ever."""

from __future__ import annotations

import random

import pytest
from controller.module_harness import ROOMY, ask, jobs_of, layout, submit, text, verify_all, words
from controller.tier_harness import TIERED, simulate, sink, tree_of
from msgspec.structs import replace
from simulation.driver import Simulation

from trunkline.controller.config import EngineConfig
from trunkline.kvstore.tier import TierKind

LONG = text(words(100, 60), 0)


def test_a_long_text_is_encoded_in_parts_beside_decoding() -> None:
    simulation = Simulation(replace(ROOMY, token_budget=13))
    plain = simulation.submit(words(0, 5), 20)
    simulation.step()
    modules = submit(simulation, [LONG], [(60, 1)])
    steps = 0
    while simulation.streams[modules].started is None:
        before = len(simulation.streams[plain].output)
        simulation.step()
        steps += 1
        assert len(simulation.streams[plain].output) == before + 1, "a stream waits for somebody's text"
    assert steps >= 5
    simulation.run()
    verify_all(simulation)


@pytest.mark.parametrize("host_slots", [0, 40])
@pytest.mark.parametrize("after", range(1, 8))
def test_a_text_whose_encoding_is_preempted_is_encoded_on(after: int, host_slots: int) -> None:
    simulation = Simulation(replace(ROOMY, token_budget=13, host_slots=host_slots))
    submit(simulation, [LONG], [(60, 1)])
    for event in range(after):
        _ = simulation.answer() if event % 3 == 2 else simulation.plan()
    taken = [sequence.group for sequence in simulation.engine.scheduler.running() if sequence.group.encodes]
    for group in taken:
        simulation.engine.scheduler.preempt(group, simulation.now)
    simulation.run()
    verify_all(simulation)
    assert jobs_of(simulation).encoded_texts == 1
    assert simulation.workers.computed_tokens <= 60 + 13 + 4, "what was computed before is found"


def test_growth_preempts_encoding_first() -> None:
    """Whoever waits for a text came later than who decodes."""
    simulation = Simulation(replace(ROOMY, num_blocks=19, token_budget=4, max_rows=2))
    old = simulation.submit(words(0, 4), 40)
    for _ in range(3):
        simulation.step()
    submit(simulation, [LONG], [(60, 1)], 2)
    simulation.run()
    verify_all(simulation)
    assert simulation.engine.scheduler.counters.preemptions > 0
    assert simulation.streams[old].reasons


def test_nobody_encodes_for_who_has_left() -> None:
    simulation = Simulation(replace(ROOMY, token_budget=13))
    first = submit(simulation, [LONG, text(words(200, 5), 60, parent=0)], [(65, 1)])
    for _ in range(2):
        simulation.step()
    assert len(jobs_of(simulation)) == 2
    simulation.abort(first)
    assert not len(jobs_of(simulation))
    simulation.run()
    assert simulation.workers.computed_tokens < 60
    assert tree_of(simulation).active_count == 0


def test_a_text_is_encoded_for_those_who_are_left() -> None:
    simulation = Simulation(replace(ROOMY, token_budget=13))
    first = submit(simulation, [LONG], [(60, 1)])
    second = submit(simulation, [LONG], [(60, 2)])
    simulation.step()
    simulation.abort(first)
    assert len(jobs_of(simulation)) == 1
    simulation.run()
    verify_all(simulation)
    assert simulation.streams[second].reasons
    assert jobs_of(simulation).started_texts == jobs_of(simulation).encoded_texts == 1


def test_a_text_is_as_urgent_as_the_most_urgent_who_waits_for_it() -> None:
    simulation = Simulation(replace(ROOMY, token_budget=13))
    other = text(words(300, 60), 0)
    patient = submit(simulation, [LONG], [(60, 1)], priority=5)
    middle = submit(simulation, [other], [(60, 1)], priority=3)
    urgent = submit(simulation, [LONG], [(60, 2)], priority=0)
    order: list[int] = []
    while len(order) < 3:
        simulation.step()
        order += [i for i in (patient, middle, urgent) if simulation.streams[i].started and i not in order]
    assert order.index(urgent) < order.index(middle)
    simulation.run()
    verify_all(simulation)


def test_a_tier_that_does_not_give_a_text_back_is_not_waited_for() -> None:
    simulation = simulate(replace(TIERED, remote=False))
    ask(simulation, [LONG], [(60, 1)])
    sink(simulation, TierKind.DISK)
    simulation.tiers.faults.dead.add(TierKind.DISK)
    stream = ask(simulation, [LONG], [(60, 2)])
    assert stream.started is not None
    assert stream.started.miss in ("slow", "lost")
    assert stream.cached_tokens == 0
    assert jobs_of(simulation).encoded_texts == 2


def test_a_text_whose_end_is_only_in_a_longer_one_far_away_is_encoded_once() -> None:
    simulation = simulate()
    ask(simulation, [text(words(0, 8), 0)], [(8, 1)])
    sink(simulation, TierKind.REMOTE)
    simulation.tiers.faults.dead.add(TierKind.REMOTE)
    submit(simulation, [text(words(0, 6), 0)], [(6, 2)])
    simulation.run(steps_max=500)
    verify_all(simulation)
    assert jobs_of(simulation).encoded_texts == 2


@pytest.mark.parametrize("seed", range(60))
def test_requests_whose_texts_do_not_fit_together_all_end(seed: int) -> None:
    """They do not evict each other's texts for ever, and the first is never overtaken by much."""
    rng = random.Random(seed)
    blocks = rng.randrange(8, 16)
    budget = rng.choice([5, 6, 9, 17])
    config = EngineConfig(num_blocks=blocks, chunk_size=4, max_context=200, token_budget=budget, max_rows=4)
    simulation = Simulation(config)
    needed = 0
    for _ in range(rng.randrange(2, 7)):
        texts, position, left = [], 0, blocks - 2
        for _ in range(rng.randrange(1, 4)):
            length = 4 * rng.randrange(1, 5)
            if length > 4 * left:
                break
            left -= length // 4
            texts.append(text(words(1000 * rng.randrange(8), length), position))
            position += length
        needed += position + 6
        submit(simulation, texts, [(position, 3)], 3, priority=rng.choice([0, 0, 0, 1]))
    simulation.run(steps_max=2000)
    verify_all(simulation)
    assert simulation.workers.computed_tokens <= 2 * needed


def test_a_preempted_group_of_samples_is_not_kept_out_by_what_is_held_for_others() -> None:
    simulation = Simulation(replace(ROOMY, num_blocks=18, max_context=72, token_budget=13))
    old = simulation.submit(words(0, 20), 16, n=3)
    for _ in range(5):
        simulation.step()
    for i in range(3):
        submit(simulation, [text(words(100 * i, 20), 0), text(words(100 * i + 50, 20), 20)], [(40, 1)], 2)
    for _ in range(2):
        simulation.step()
        for sequence in simulation.engine.scheduler.running():
            if sequence.request == old:
                simulation.engine.scheduler.preempt(sequence.group, simulation.now)
                break
    simulation.run(steps_max=2000)
    verify_all(simulation)


def test_flushing_the_cache_while_texts_are_waited_for() -> None:
    simulation = Simulation(replace(ROOMY, token_budget=13))
    texts = [text(words(100 * i, 20), 20 * i) for i in range(4)]
    submit(simulation, texts, [(80, 1)])
    ended = False
    while not ended:
        simulation.engine.flush_cache()
        ended = not any(simulation.step() for _ in range(4))
    verify_all(simulation)
    assert simulation.engine.is_idle


def test_a_layout_of_no_texts_waits_for_nothing() -> None:
    simulation = Simulation(ROOMY)
    simulation.submit([1, 2, 3], 4, layout=layout([], [(5, 1), (9, 2)]))
    simulation.run()
    verify_all(simulation)
    assert jobs_of(simulation).started_texts == 0
