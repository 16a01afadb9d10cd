"""Workers that are lost and replaced: no request notices more than a pause.

What a stream says is compared with its oracle, by token, score and hypothesis; the driver asserts that nothing is
said twice.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from controller.module_harness import ROOMY, call, tiers_in, words
from controller.tier_harness import TIERED, Session, settle, simulate
from msgspec.structs import replace
from seeds import seeds
from simulation.driver import Simulation
from simulation.engines import ENGINES, MIXES
from simulation.module_prompts import text
from simulation.streams import Options, verify
from simulation.traffic import Mix, Traffic

from trunkline.controller.engine.events import EndAdapter, EndWaiting
from trunkline.controller.engine.integrity import check_integrity
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import BeamSearch, Grammar
from trunkline.controller.service.status import adapters_in_use, state_of
from trunkline.controller.storage.persistence import Persistence
from trunkline.kvstore.adapters import adapter_key, adapter_salt
from trunkline.kvstore.tier import TierKind
from trunkline.router.messages import FinishReason

SMALL = EngineConfig(num_blocks=40, chunk_size=4, max_context=96, token_budget=24, max_rows=8)
PROMPT = list(range(5, 25))
KINDS: dict[str, Options] = {
    "plain": {"seed": 3},
    "samples": {"n": 3, "seed": 1},
    "beams": {"beam": BeamSearch(3), "n": 2},
    "one beam": {"beam": BeamSearch(1)},
    "grammar": {"grammar": Grammar("regex", "a")},
    "scored": {"prompt_logprobs": 2},
    "scored samples": {"prompt_logprobs": 0, "n": 2},
    "cut": {"drops": ((4, 12),)},
    "stop": {"stop_ids": (7, 30, 31)},
}


@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize("name", ENGINES)
def test_traffic(name: str, seed: int) -> None:
    """Requests of all kinds; workers are lost at any moment, also before the last ones are replaced."""
    mix = dataclasses.replace(MIXES.get(name, Mix()), losses=0.1, crowd=20)
    traffic = Traffic(ENGINES[name], mix, seed, check=name == "tiny, both")
    while not traffic.losses:
        traffic.run(40)
    streams = traffic.simulation.streams.values()
    assert all(stream.is_cut_off for stream in streams if stream.reason == FinishReason.ENGINE_FAILED)


@pytest.mark.parametrize("name", ["tiers", "little host memory, cuts", "modules, tiers"])
def test_traffic_whose_chunks_are_found_on_disk(name: str, tmp_path: Path) -> None:
    mix = dataclasses.replace(MIXES[name], losses=0.1, crowd=20)
    traffic = Traffic(ENGINES[name], mix, seed=8, check=False)
    traffic.simulation.persistence = Persistence(str(tmp_path / "index"), b"a model", 0.0, 0.0)
    traffic.run(60)
    assert traffic.losses
    assert traffic.simulation.engine.counters.tier_tokens[TierKind.DISK] > 0
    traffic.simulation.persistence.close()


@pytest.mark.parametrize("kind", KINDS)
def test_lost_after_every_number_of_steps(kind: str) -> None:
    """Of a prompt of three steps and an output of twelve; up to two steps are in flight each time."""
    undisturbed = Simulation(SMALL)
    undisturbed.submit(PROMPT, 12, **KINDS[kind])
    undisturbed.run()
    for steps in range(0 if kind in ("samples", "beams", "plain") else 1, 18, 1 if kind == "beams" else 2):
        simulation = Simulation(SMALL)
        request = simulation.submit(PROMPT, 12, **KINDS[kind])
        for _ in range(steps):
            for grammar in list(simulation.grammars):
                simulation.compiled(grammar)
            simulation.step()
        simulation.plan()
        simulation.lose_workers()
        simulation.replace_workers()
        simulation.run()
        stream = simulation.streams[request]
        verify(stream, SMALL.longest_sequence)
        for name in ("outputs", "reasons", "hypotheses", "scored"):
            assert getattr(stream, name) == getattr(undisturbed.streams[request], name)
        before, after = undisturbed.engine.counters, simulation.engine.counters
        assert after.output_tokens == before.output_tokens
        assert after.prompt_tokens == before.prompt_tokens
        assert sum(after.misses.values()) == sum(before.misses.values())
        simulation.flush_cache()
        assert simulation.engine.scheduler.kv.pool.free_count == SMALL.num_blocks


def test_nothing_is_planned_while_nobody_is_there() -> None:
    simulation = Simulation(SMALL)
    first = simulation.submit(PROMPT, 12)
    for _ in range(4):
        simulation.step()
    simulation.lose_workers()
    second = simulation.submit(PROMPT, 5, seed=1, grammar=Grammar("regex", "b"))
    third = simulation.submit(PROMPT, 5)
    assert not simulation.step()
    assert not simulation.grammars
    assert not simulation.engine.is_idle
    assert simulation.wanted.wake_at == float("inf")
    assert simulation.expect(simulation.engine._requests.groups[first].request) == (0, 0)
    counts = state_of(simulation.engine)
    assert (counts.running, counts.waiting) == (0, 3)
    simulation.abort(third)
    simulation.lose_workers()  # once more, before others were ready
    simulation.replace_workers()
    simulation.run()
    for request in (first, second, third):
        verify(simulation.streams[request], SMALL.longest_sequence)
    assert simulation.streams[third].reason == FinishReason.ABORT


def test_those_who_ran_come_first_and_in_their_order() -> None:
    simulation = Simulation(replace(SMALL, max_rows=2, token_budget=4))
    requests = [simulation.submit([10 + i, 11, 12, 13, 14, 15, 16, 17], 6) for i in range(4)]
    urgent = simulation.submit([1, 2, 3], 6, priority=1)
    while not all(simulation.streams[request].output for request in requests[:2]):
        simulation.step()
    simulation.lose_workers()
    keys = [group.id for group in simulation.engine.scheduler.queue]
    assert keys == [*requests, urgent]
    simulation.replace_workers()
    started: list[int] = []
    while not simulation.engine.is_idle:
        simulation.step()
        started += [r for r in simulation.take_ended() if r not in started]
    assert started == [*requests, urgent]
    simulation.finish()


def test_samples_that_have_ended_stay_ended() -> None:
    simulation = Simulation(SMALL)
    request = simulation.submit(PROMPT, 20, n=4, seed=2, stop_ids=(3, 9, 12, 20, 33, 41))
    stream = simulation.streams[request]
    while not stream.reasons:
        simulation.step()
    assert stream.ended is None, "this seed is of no use"
    simulation.abort(request, sample=next(i for i in range(4) if i not in stream.reasons))
    rest = len(simulation.engine._requests.groups[request].members)
    simulation.lose_workers()
    simulation.replace_workers()
    assert len(simulation.engine._requests.groups[request].members) == rest
    while not simulation.engine.is_idle:
        simulation.step()
    assert len(stream.reasons) == 3
    check_integrity(simulation.engine.scheduler)


def test_fewer_blocks_than_before() -> None:
    """Who fits goes on; who does not is told why."""
    simulation = Simulation(SMALL)
    long = simulation.submit(list(range(50)), 40)
    wide = simulation.submit(PROMPT, 30, n=4)
    search = simulation.submit([3, 4, 5], 60, beam=BeamSearch(2))
    short = simulation.submit(PROMPT, 12)
    for _ in range(12):
        simulation.step()
    simulation.lose_workers()
    smaller = replace(SMALL, num_blocks=12)
    simulation.replace_workers(smaller)
    for request, problem in ((long, "this group holds 48"), (wide, "need 33 blocks"), (search, "need 24 blocks")):
        ended = simulation.streams[request].ended
        assert ended is not None
        assert ended.reason == FinishReason.ENGINE_FAILED
        assert "the workers are new" in ended.detail
        assert problem in ended.detail
    simulation.run()
    verify(simulation.streams[short], smaller.longest_sequence)
    assert simulation.engine.config.num_blocks == 12
    simulation.flush_cache()
    assert simulation.engine.scheduler.kv.pool.free_count == 12


def test_a_request_that_has_more_tokens_than_new_workers_hold_ends() -> None:
    simulation = Simulation(SMALL)
    request = simulation.submit(PROMPT, 60)
    stream = simulation.streams[request]
    while len(stream.output) < 28:
        simulation.step()
    simulation.lose_workers()
    simulation.replace_workers(replace(SMALL, num_blocks=12))
    assert stream.ended is not None
    assert stream.ended.detail == "the workers are new and hold 48 tokens, fewer than it has"
    assert not simulation.engine.requests()
    simulation.run()
    check_integrity(simulation.engine.scheduler)
    simulation.flush_cache()
    assert simulation.engine.scheduler.kv.pool.free_count == 12


def test_with_recompute_what_is_left_on_disk_is_loaded_all_the_same(tmp_path: Path) -> None:
    """Lost workers are no preemption: what a request had computed itself is loaded, not computed again."""
    config = replace(TIERED, remote=False, ranks=2, preemption="recompute")
    simulation = simulate(config)
    simulation.persistence = Persistence(str(tmp_path / "index"), b"a model", 0.0, simulation.now)
    request = simulation.submit(PROMPT * 2, 12, seed=3)
    for _ in range(6):
        simulation.step()
    while simulation.move_chunks():
        pass
    assert 0 < len(simulation.streams[request].output) < 12
    computed = simulation.workers.computed_tokens
    simulation.lose_workers()
    simulation.replace_workers()
    for health in simulation.tree.tiers.health.values():
        health.read_us = 1.0
    assert simulation.tree.node_count >= 10
    simulation.run()
    verify(simulation.streams[request], config.longest_sequence)
    assert simulation.workers.computed_tokens - computed <= 4 + 12, "40 tokens are on disk"
    simulation.persistence.close()


def test_a_cache_that_was_to_be_dropped_meanwhile_is(tmp_path: Path) -> None:
    simulation = simulate(replace(TIERED, remote=False))
    simulation.persistence = Persistence(str(tmp_path / "index"), b"a model", 0.0, simulation.now)
    Session(simulation).turn(30)
    settle(simulation)
    simulation.move_chunks()
    simulation.lose_workers()
    simulation.flush_cache()
    simulation.replace_workers()
    assert simulation.tree.node_count == 0
    simulation.persistence.close()


class Store(dict[bytes, Any]):
    """A remote tier that counts how often each chunk is written."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = Counter[bytes]()

    def __setitem__(self, name: bytes, content: Any) -> None:
        self.writes[name] += 1
        super().__setitem__(name, content)


@pytest.mark.parametrize("seed", seeds(6))
def test_what_the_remote_tier_lacked_is_written_once_it_is_read(seed: int, tmp_path: Path) -> None:
    """The store is away while workers die, and the disk outlives both. What the store has got before is not
    written again."""
    rng = random.Random(seed)
    simulation = simulate(replace(TIERED, host_slots=rng.randint(16, 40)))
    simulation.persistence = Persistence(str(tmp_path / "index"), b"a model", 0.0, simulation.now)
    store = simulation.tiers.remote[0] = Store()
    sessions = [Session(simulation, start=100 * number) for number in range(3)]
    for away in (False, True):
        if away:
            simulation.tiers.faults.dead.add(TierKind.REMOTE)
        for _ in range(4):
            rng.choice(sessions).turn(rng.randint(4, 10))
        settle(simulation)
    chunks = {node.name for node in simulation.tree.nodes() if node.disk_ready}
    assert chunks - store.keys(), "the store lacks some"
    for _ in range(rng.randint(1, 2)):  # also once more, before others were ready
        simulation.lose_workers()
    simulation.tiers.faults.dead.clear()
    simulation.replace_workers()
    for health in simulation.tree.tiers.health.values():
        health.read_us = 1.0
    for session in sessions:
        session.turn(1)
        settle(simulation)
    assert chunks <= store.keys()
    assert set(store.writes.values()) == {1}
    simulation.persistence.close()


SCHEMA = [text(words(0, 10), 0), text(words(20, 7), 10, parent=0)]


def test_what_was_pinned_is_pinned_again() -> None:
    simulation = Simulation(ROOMY)
    assert call(simulation, "encode", SCHEMA, pin_name="schema/a").status == "ok"
    assert call(simulation, "encode", [text(words(60, 9), 0)], pin_name="schema/b").status == "ok"
    calls = simulation.engine.scheduler.encoding.calls
    assert calls.pinned_count == 3 + 2 + 3
    simulation.lose_workers()
    simulation.unpin("schema/b")  # its record is deleted
    simulation.replace_workers()
    simulation.run()
    assert simulation.engine.scheduler.encoding.calls.pinned_count == 3 + 2
    assert tiers_in(call(simulation, "look", SCHEMA)) == [0, 0]
    simulation.unpin("schema/a")
    assert simulation.engine.scheduler.encoding.calls.pinned_count == 0
    assert simulation.engine.counters.encoded_texts == 3 + 2


def test_a_later_pin_replaces_the_one_that_comes_back() -> None:
    simulation = Simulation(ROOMY)
    call(simulation, "encode", SCHEMA, pin_name="schema/a")
    simulation.lose_workers()
    other = [text(words(60, 9), 0)]
    ticket = simulation.modules_call("encode", other, pin_name="schema/a")
    simulation.replace_workers()
    simulation.run()
    assert simulation.replies[ticket].status == "ok"
    assert simulation.engine.scheduler.encoding.calls.pinned_count == 3
    assert tiers_in(call(simulation, "look", other)) == [0]


def test_an_adapter_that_does_not_come_back_ends_what_uses_it() -> None:
    key = adapter_key("one", b"files")
    salt = adapter_salt(key, b"tenant")
    simulation = Simulation(ROOMY)
    call(simulation, "encode", SCHEMA, pin_name="schema/a", salt=salt)
    call(simulation, "encode", [text(words(60, 9), 0)], pin_name="schema/b")
    gone, stays = simulation.submit(PROMPT, 12, salt=salt), simulation.submit(PROMPT, 12, salt=b"tenant")
    for _ in range(4):
        simulation.step()
    simulation.lose_workers()
    ticket = simulation.modules_call("encode", SCHEMA, salt=salt)
    assert adapters_in_use(simulation.engine) == {key, b""}
    simulation.receive(EndAdapter(key, "the folder is gone"))
    assert adapters_in_use(simulation.engine) == {b""}
    simulation.replace_workers()
    simulation.run()
    ended = simulation.streams[gone].ended
    assert ended is not None
    assert (ended.reason, ended.detail) == (FinishReason.ENGINE_FAILED, "the folder is gone")
    assert (simulation.replies[ticket].status, simulation.replies[ticket].detail) == (
        "failed",
        "the folder is gone",
    )
    verify(simulation.streams[stays], ROOMY.longest_sequence)
    assert simulation.engine.scheduler.encoding.calls.pinned_count == 3  # those of "schema/b"
    check_integrity(simulation.engine.scheduler)


def test_a_drain_sends_those_away_who_have_not_begun() -> None:
    simulation = Simulation(replace(SMALL, max_rows=1))
    running = simulation.submit(PROMPT, 12)
    simulation.step()
    waiting = simulation.submit([1, 2, 3], 4)
    simulation.receive(EndWaiting(FinishReason.DRAINING, "the controller is stopping"))
    simulation.run()
    verify(simulation.streams[running], SMALL.longest_sequence)
    ended = simulation.streams[waiting].ended
    assert ended is not None
    assert ended.reason == FinishReason.DRAINING


def test_totals_go_on() -> None:
    simulation = simulate()
    session = Session(simulation)
    session.turn(30)
    settle(simulation)
    before = state_of(simulation.engine)
    simulation.lose_workers()
    after = state_of(simulation.engine)
    totals = (
        *("prompt_tokens", "cached_tokens", "output_tokens", "preemptions", "steps", "forks", "swapped"),
        *("evicted_blocks", "blocks_saved", "blocks_loaded", "texts_encoded", "misses", "kv_bytes_read"),
    )
    for name in totals:
        assert getattr(after, name) == getattr(before, name), name
    for tier, old in zip(after.tiers, before.tiers, strict=True):
        assert (tier.writes, tier.reads, tier.failures, tier.hit_tokens, tier.evictions) == (
            *(old.writes, old.reads, old.failures, old.hit_tokens, old.evictions),
        )
        assert tier.used == 0


def run_with_culprits(simulation: Simulation, culprits: set[int], losses_max: int = 30) -> int:
    """Run to the end with workers that die of these requests before they bring a token; how often they died."""
    losses = 0
    while not simulation.engine.is_idle:
        simulation.now += simulation.pace_s
        simulation.plan()
        running = {sequence.request_id for sequence in simulation.engine.scheduler.running()}
        if running & culprits:
            simulation.lose_workers()
            simulation.replace_workers()
            losses += 1
            assert losses <= losses_max, "for ever"
        else:
            for grammar in list(simulation.grammars):
                simulation.compiled(grammar)
            simulation.move_chunks()
            simulation.answer()
    return losses


@pytest.mark.parametrize(
    ("max_rows", "culprits"), [(2, {1}), (2, {2, 5}), (8, {3}), (8, {6}), (8, {1, 3, 4})], ids=str
)
def test_a_request_that_kills_ends_and_takes_nobody_with_it(max_rows: int, culprits: set[int]) -> None:
    """Others run beside it each time, in the same first step, and get no token before it kills again."""
    simulation = Simulation(replace(SMALL, max_rows=max_rows, token_budget=200))
    kinds: list[Options] = [KINDS[name] for name in ("plain", "samples", "beams", "grammar", "scored", "cut")]
    if max_rows == 2:
        kinds = [KINDS["plain"]] * 6
    requests = [simulation.submit([30 + i, *PROMPT], 9, **kind) for i, kind in enumerate(kinds)]
    assert requests == [1, 2, 3, 4, 5, 6]
    losses = run_with_culprits(simulation, culprits)
    assert losses <= 3 * len(culprits)
    for request in requests:
        stream = simulation.streams[request]
        if request in culprits:
            assert stream.reason == FinishReason.ENGINE_FAILED
            assert stream.ended is not None
            assert "lost 3 times" in stream.ended.detail
        else:
            assert stream.reason in (FinishReason.STOP, FinishReason.LENGTH)
            verify(stream, SMALL.longest_sequence)
    assert not simulation.engine._requests.quarantine
    check_integrity(simulation.engine.scheduler)


def test_who_gets_tokens_between_losses_is_no_suspect() -> None:
    simulation = Simulation(SMALL)
    request = simulation.submit(PROMPT, 12, seed=4)
    stream = simulation.streams[request]
    for count in range(1, 10):
        for _ in range(2):  # in a row
            simulation.plan()
            simulation.lose_workers()
            simulation.replace_workers()
        while len(stream.output) < count:
            simulation.step()
    simulation.run()
    assert stream.reason == FinishReason.LENGTH
    verify(stream, SMALL.longest_sequence)


def test_a_suspect_that_its_client_leaves_lets_the_next_one_in() -> None:
    simulation = Simulation(replace(SMALL, token_budget=200))
    requests = [simulation.submit([10 + i, *PROMPT], 5) for i in range(3)]
    for _ in range(2):
        simulation.plan()
        simulation.lose_workers()
        simulation.replace_workers()
    for request in requests:
        simulation.plan()
        assert {sequence.request_id for sequence in simulation.engine.scheduler.running()} == {request}
        simulation.abort(request)
        while simulation.answer():
            pass  # at most two steps are unanswered
    assert simulation.engine._requests.quarantine.lost([]) == []
    assert not simulation.engine._requests.quarantine
