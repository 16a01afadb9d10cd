"""What reviews found in the engine's part of modules: chains, crowds, long calls, urgency, late answers."""

from __future__ import annotations

import numpy as np
import pytest
from controller.module_harness import ROOMY, ask, call, jobs_of, submit, text, tiers_in, verify_all, words
from controller.tier_harness import TIERED, simulate, tree_of
from msgspec.structs import replace
from simulation.driver import Simulation
from simulation.module_prompts import layout

from trunkline.controller.config import EngineConfig
from trunkline.controller.engine.engine import Engine
from trunkline.controller.engine.integrity import check_integrity
from trunkline.controller.messages import ModulesCall, ModuleText, Probed
from trunkline.controller.scheduling.module_calls import JOBS_AT_ONCE, TEXTS_PER_STEP
from trunkline.controller.scheduling.module_jobs import JOBS_MAX, TEXTS_AT_ONCE
from trunkline.controller.sequences.sequence import Request
from trunkline.worker.messages import Probe, Sampling

WIDE = replace(ROOMY, num_blocks=2000, max_context=4096)


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
    assert tree_of(simulation).active_count == 0


def test_a_chain_of_more_texts_than_are_encoded_at_once() -> None:
    simulation = Simulation(WIDE, check=False)
    count = TEXTS_AT_ONCE + 20
    stream = ask(simulation, chain(count, 2), [(2 * count, 1)])
    assert stream.cached_tokens == 0
    assert jobs_of(simulation).encoded_texts == count


def test_many_who_lack_texts_have_them_encoded_a_crowd_at_a_time() -> None:
    simulation = Simulation(replace(WIDE, max_waiting=1000), check=False)
    asked = JOBS_MAX // 10 + 20
    for i in range(asked):
        texts = [text(words(1000 * i + 10 * k, 3), 3 * k) for k in range(10)]
        submit(simulation, texts, [(30, 1)], own=words(70000 + i, 1))
    assert len(jobs_of(simulation)) < JOBS_MAX + 10
    simulation.run()
    verify_all(simulation)
    assert jobs_of(simulation).encoded_texts == 10 * asked


def test_a_text_that_is_being_computed_when_somebody_more_urgent_wants_it() -> None:
    simulation = Simulation(ROOMY)
    texts = [text(words(0, 60), 0)]
    submit(simulation, texts, [(60, 1)], priority=9)
    simulation.step()
    job = next(jobs_of(simulation).groups())
    assert not job.queued
    submit(simulation, texts, [(60, 1)], priority=1)
    assert job.rank[0] == 1, "others of priority 5 would be before it if it were preempted"
    simulation.run()
    verify_all(simulation)


def test_what_is_held_is_not_given_up_for_a_text_that_its_holder_needs_itself() -> None:
    simulation = Simulation(replace(ROOMY, num_blocks=24))
    seen, above = text(words(0, 24), 0), text(words(100, 28), 24, seen=[])
    behind = text(words(200, 4), 52, parent=1)
    call(simulation, "encode", [seen])
    simulation.submit(words(300, 44), 20)
    simulation.step()
    submit(simulation, [seen, above, behind], [(56, 1)])
    simulation.run()
    verify_all(simulation)
    assert jobs_of(simulation).encoded_texts == 3, "the first text was encoded once"


def test_a_call_about_very_many_texts_goes_step_by_step() -> None:
    simulation = Simulation(WIDE, check=False)
    texts = [text([i], i) for i in range(3 * TEXTS_PER_STEP)]
    ticket = simulation.modules_call("look", texts)
    assert ticket not in simulation.replies
    request = simulation.submit(words(5000, 5), 2)
    simulation.run()
    assert simulation.streams[request].output
    assert tiers_in(simulation.replies[ticket]) == [-1] * len(texts)
    assert tiers_in(call(simulation, "encode", texts)) == [0] * len(texts)
    assert tiers_in(call(simulation, "look", texts)) == [0] * len(texts)
    assert simulation.engine.next_deadline(0.0) == float("inf")


def test_calls_share_what_is_encoded_at_once() -> None:
    simulation = Simulation(replace(WIDE, token_budget=13))
    for i in range(4):
        simulation.modules_call("encode", [text(words(1000 * i + 10 * k, 9), 0) for k in range(JOBS_AT_ONCE)])
    simulation.plan()
    assert JOBS_AT_ONCE - 4 < len(jobs_of(simulation)) <= JOBS_AT_ONCE
    simulation.run()
    assert len(simulation.replies) == 4


def test_a_ticket_that_is_used_twice_is_refused() -> None:
    engine = Engine(ROOMY)
    for _ in range(2):
        engine.modules_call(5, ModulesCall(5, "encode", chain(3)), 0.0)
    outputs = engine.outputs()
    assert outputs is not None
    assert [(done.call, done.status) for done in outputs.modules] == [(5, "failed")]
    assert engine.modules_calls() == [5], "the first goes on"


def test_who_wants_a_text_for_longer_keeps_it_for_longer() -> None:
    simulation = Simulation(ROOMY)
    texts = [text(words(0, 30), 0)]
    simulation.submit([7], 1, layout=layout(texts, [(30, 1)], ttl=5.0))
    call(simulation, "encode", texts, ttl=100.0)
    simulation.now += 50.0
    simulation.move_chunks()
    assert tiers_in(call(simulation, "look", texts)) == [0]


@pytest.mark.parametrize("config", [ROOMY, TIERED])
def test_what_was_pinned_beyond_its_time_goes_when_it_is_not_any_more(config: EngineConfig) -> None:
    simulation = Simulation(config)
    texts = [text(words(0, 30), 0)]
    call(simulation, "encode", texts, holder="schema", ttl=5.0)
    simulation.now += 50.0
    simulation.move_chunks()
    assert tiers_in(call(simulation, "look", texts)) == [0]
    call(simulation, "unpin", [], holder="schema")
    simulation.now += 50.0
    simulation.move_chunks()
    assert tiers_in(call(simulation, "look", texts)) == [-1]


def test_a_schema_that_cannot_stay_whole_is_not_pinned() -> None:
    simulation = Simulation(replace(ROOMY, num_blocks=24))
    reply = call(simulation, "encode", [text(words(100 * i, 32), 0) for i in range(4)], holder="schema")
    assert reply.status == "quota"
    assert "no room" in reply.detail
    assert not simulation.engine.scheduler.encoding.held


def test_an_announcement_of_more_than_can_ever_come_is_not_looked_at() -> None:
    simulation = Simulation(replace(TIERED, remote=False))
    texts = [text([i], i) for i in range(90)]
    call(simulation, "encode", texts[:4])
    engine = simulation.engine
    assert engine.prefetch(announced(texts[:4]), 0.0) == (4, 0)
    assert engine.prefetch(announced([*texts[:4], text([999], 95)]), 0.0) == (4, 0)
    assert engine.prefetch(announced([*texts[:4], text([999], 96)]), 0.0) == (0, 0), "there is no position 96"
    assert engine.prefetch(announced([text([1], 0)] * 297), 0.0) == (0, 0), "a table has no more entries than 296"


def announced(texts: list[ModuleText]) -> Request:
    return Request(id=0, tokens=np.empty(0, np.int32), max_tokens=1, sampling=Sampling(), layout=layout(texts, []))


def test_the_remote_tier_answers_when_the_text_is_computed_at_another_position() -> None:
    """Names say at which position a text was computed: what the answer speaks of is not what is being made."""
    simulation = simulate(replace(TIERED, disk_slots=0))
    engine, tree = simulation.engine, tree_of(simulation)
    submit(simulation, [text(words(0, 8), 0)], [(8, 1)])
    submit(simulation, [text(words(0, 4) + words(50, 4), 30)], [(38, 1)])
    probes = [message.id for message in engine.tier_messages(simulation.now) if isinstance(message, Probe)]
    assert len(probes) == 2
    engine.tier_report(Probed(0, engine.epoch, probes[1], 0), simulation.now)
    simulation.plan()
    engine.tier_report(Probed(0, engine.epoch, probes[0], 2), simulation.now)
    assert not any(node.remote for node in tree.nodes())
    simulation.run()
    verify_all(simulation)


def test_the_remote_tier_answers_when_nobody_knows_the_text_any_more() -> None:
    simulation = simulate(replace(TIERED, disk_slots=0))
    engine, tree = simulation.engine, tree_of(simulation)
    call(simulation, "encode", [text(words(0, 4), 0)])
    submit(simulation, [text(words(0, 8), 0)], [(8, 1)])
    probe = next(message.id for message in engine.tier_messages(simulation.now) if isinstance(message, Probe))
    engine.flush_cache()
    engine.tier_report(Probed(0, engine.epoch, probe, 1), simulation.now)
    check_integrity(engine.scheduler)
    assert not list(tree.roots())
    simulation.run()
    verify_all(simulation)
