"""Encoding as scheduled work: beside decoding, preempted, waited for, given up; and nobody waits for ever."""

from __future__ import annotations

import random

import pytest
from controller.module_harness import ROOMY, WIDE, ask, call, jobs_of, submit, words
from controller.tier_harness import TIERED, simulate, sink
from msgspec.structs import replace
from seeds import seeds
from simulation.driver import Simulation
from simulation.module_prompts import layout, text

from trunkline.controller.engine.integrity import check_integrity
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import ModuleText, Submit
from trunkline.controller.reports import Probed
from trunkline.controller.scheduling.module_jobs import JOBS_MAX, TEXTS_AT_ONCE
from trunkline.controller.sequences.sequence import Request
from trunkline.kvstore.tier import TierKind
from trunkline.worker.messages import Probe, Sampling

LONG = text(words(100, 60), 0)


@pytest.fixture
def simulation() -> Simulation:
    return Simulation(ROOMY)


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
    simulation.finish()


@pytest.mark.parametrize(("after", "host_slots"), [(1, 0), (2, 40), (3, 0), (4, 0), (5, 40), (6, 0), (7, 40)])
def test_a_text_whose_encoding_is_preempted_is_encoded_on(after: int, host_slots: int) -> None:
    simulation = Simulation(replace(ROOMY, token_budget=13, host_slots=host_slots))
    submit(simulation, [LONG], [(60, 1)])
    simulation.events(after)
    taken = [sequence.group for sequence in simulation.scheduler.running() if sequence.group.encodes]
    for group in taken:
        simulation.scheduler.preempt(group, simulation.now)
    simulation.finish()
    assert simulation.engine.counters.encoded_texts == 1
    assert simulation.workers.computed_tokens <= 60 + 13 + 4, "what was computed before is found"


def test_growth_preempts_encoding_first() -> None:
    """Whoever waits for a text came later than who decodes."""
    simulation = Simulation(replace(ROOMY, num_blocks=19, token_budget=4, max_rows=2))
    old = simulation.submit(words(0, 4), 40)
    for _ in range(3):
        simulation.step()
    submit(simulation, [LONG], [(60, 1)], 2)
    simulation.finish()
    assert simulation.scheduler.counters.preemptions > 0
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
    assert simulation.tree.active_count == 0


def test_a_text_is_encoded_for_those_who_are_left() -> None:
    simulation = Simulation(replace(ROOMY, token_budget=13))
    first = submit(simulation, [LONG], [(60, 1)])
    second = submit(simulation, [LONG], [(60, 2)])
    simulation.step()
    simulation.abort(first)
    assert len(jobs_of(simulation)) == 1
    simulation.finish()
    assert simulation.streams[second].reasons
    assert jobs_of(simulation).started_texts == simulation.engine.counters.encoded_texts == 1


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
    simulation.finish()


def test_a_tier_that_does_not_give_a_text_back_is_not_waited_for() -> None:
    simulation = simulate(replace(TIERED, remote=False))
    ask(simulation, [LONG], [(60, 1)])
    sink(simulation, TierKind.DISK)
    simulation.tiers.faults.dead.add(TierKind.DISK)
    stream = ask(simulation, [LONG], [(60, 2)])
    assert stream.started is not None
    assert stream.started.miss in ("slow", "lost")
    assert stream.cached_tokens == 0
    assert simulation.engine.counters.encoded_texts == 2


def test_a_text_whose_end_is_only_in_a_longer_one_far_away_is_encoded_once() -> None:
    simulation = simulate()
    ask(simulation, [text(words(0, 8), 0)], [(8, 1)])
    sink(simulation, TierKind.REMOTE)
    simulation.tiers.faults.dead.add(TierKind.REMOTE)
    submit(simulation, [text(words(0, 6), 0)], [(6, 2)])
    simulation.finish(500)
    assert simulation.engine.counters.encoded_texts == 2


@pytest.mark.parametrize("seed", seeds(12))
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
    simulation.finish(2000)
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
        for sequence in simulation.scheduler.running():
            if sequence.request_id == old:
                simulation.scheduler.preempt(sequence.group, simulation.now)
                break
    simulation.finish(2000)


def chain(count: int, length: int = 1) -> list[ModuleText]:
    """Texts of which each sees all before it."""
    return [text(words(10 * i, length), length * i, parent=i - 1) for i in range(count)]


def test_a_request_whose_texts_are_a_long_chain_can_leave_at_any_time() -> None:
    simulation = Simulation(WIDE, check=False)
    request = submit(simulation, chain(600), [(600, 1)])
    for _ in range(3):
        simulation.step()
    assert len(jobs_of(simulation)) <= TEXTS_AT_ONCE, "each has a table of all above it"
    simulation.abort(request)
    simulation.run()
    assert len(jobs_of(simulation)) == 0
    assert simulation.tree.active_count == 0


def test_many_who_lack_texts_have_them_encoded_a_crowd_at_a_time() -> None:
    simulation = Simulation(replace(WIDE, max_waiting=1000), check=False)
    asked = JOBS_MAX // 10 + 20
    for i in range(asked):
        texts = [text(words(1000 * i + 10 * k, 3), 3 * k) for k in range(10)]
        submit(simulation, texts, [(30, 1)], own=words(70000 + i, 1))
    assert len(jobs_of(simulation)) < JOBS_MAX + 10
    simulation.finish()
    assert simulation.engine.counters.encoded_texts == 10 * asked


def test_a_text_that_is_being_computed_when_somebody_more_urgent_wants_it(simulation: Simulation) -> None:
    texts = [text(words(0, 60), 0)]
    submit(simulation, texts, [(60, 1)], priority=9)
    simulation.step()
    job = next(jobs_of(simulation).groups())
    assert not job.queued
    submit(simulation, texts, [(60, 1)], priority=1)
    assert job.request.submit.priority == 1, "others of priority 5 would be before it if it were preempted"
    simulation.finish()


def test_what_is_held_is_not_given_up_for_a_text_that_its_holder_needs_itself() -> None:
    simulation = Simulation(replace(ROOMY, num_blocks=24))
    seen, above = text(words(0, 24), 0), text(words(100, 28), 24, seen=[])
    behind = text(words(200, 4), 52, parent=1)
    call(simulation, "encode", [seen])
    simulation.submit(words(300, 44), 20)
    simulation.step()
    submit(simulation, [seen, above, behind], [(56, 1)])
    simulation.finish()
    assert simulation.engine.counters.encoded_texts == 3, "the first text was encoded once"


def test_an_announcement_of_more_than_can_ever_come_is_not_looked_at() -> None:
    simulation = Simulation(replace(TIERED, remote=False))
    texts = [text([i], i) for i in range(90)]
    call(simulation, "encode", texts[:4])
    assert simulation.expect(announced(texts[:4])) == (4, 0)
    assert simulation.expect(announced([*texts[:4], text([999], 95)])) == (4, 0)
    assert simulation.expect(announced([*texts[:4], text([999], 96)])) == (0, 0), "there is no position 96"
    assert simulation.expect(announced([text([1], 0)] * 297)) == (0, 0), "a table has no more entries than 296"


def announced(texts: list[ModuleText]) -> Request:
    return Request.of(0, Submit(0, b"", 0, 1, Sampling(), layout=layout(texts, [])))


def test_the_remote_tier_answers_when_the_text_is_computed_at_another_position() -> None:
    """Names say at which position a text was computed: what the answer speaks of is not what is being made."""
    simulation = simulate(replace(TIERED, disk_slots=0))
    engine, tree = simulation.engine, simulation.tree
    submit(simulation, [text(words(0, 8), 0)], [(8, 1)])
    submit(simulation, [text(words(0, 4) + words(50, 4), 30)], [(38, 1)])
    simulation.plan()
    probes = [order.id for order in simulation.wanted.orders if isinstance(order, Probe)]
    assert len(probes) == 2
    simulation.receive(Probed(0, engine.epoch, probes[1], 0))
    simulation.plan()
    simulation.receive(Probed(0, engine.epoch, probes[0], 2))
    assert not any(node.remote for node in tree.nodes())
    simulation.finish()


def test_the_remote_tier_answers_when_nobody_knows_the_text_any_more() -> None:
    simulation = simulate(replace(TIERED, disk_slots=0))
    engine, tree = simulation.engine, simulation.tree
    call(simulation, "encode", [text(words(0, 4), 0)])
    submit(simulation, [text(words(0, 8), 0)], [(8, 1)])
    simulation.plan()
    probe = next(order.id for order in simulation.wanted.orders if isinstance(order, Probe))
    simulation.flush_cache()
    simulation.receive(Probed(0, engine.epoch, probe, 1))
    check_integrity(engine.scheduler)
    assert not list(tree.roots())
    simulation.finish()
