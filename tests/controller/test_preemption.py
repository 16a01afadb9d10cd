"""Preemption of whole groups, before and after their forks, with recovery by recomputation and by swapping."""

from __future__ import annotations

import msgspec
import pytest
from simulation.driver import Options, Simulation, verify

from trunkline.controller.config import EngineConfig
from trunkline.controller.messages import BeamSearch

ROOMY = EngineConfig(num_blocks=96, chunk_size=4, max_context=96, token_budget=24, max_rows=12, host_slots=60)
TINY = msgspec.structs.replace(ROOMY, num_blocks=24)
SLOTS = {"recompute": 0, "swap": 60, "auto": 60}
"""Host slots: what is saved as cache is found again by whoever comes back, claimed or not. So recomputation alone
is seen only without a host pool."""
KINDS: dict[str, Options] = {
    "one": {"seed": 5},
    "samples": {"seed": 5, "n": 3},
    "beams": {"beam": BeamSearch(3), "n": 3, "stop_ids": (3, 30)},
    "scored": {"seed": 5, "prompt_logprobs": 1, "n": 2},
}


def verify_all(simulation: Simulation) -> None:
    for stream in simulation.streams.values():
        verify(stream, simulation.engine.config.longest_sequence)


def preempt(simulation: Simulation, request: int) -> bool:
    """Take a request out, whatever it is doing; False if nothing of it runs."""
    scheduler = simulation.engine.scheduler
    groups = [sequence.group for sequence in scheduler.running() if sequence.request == request]
    if groups:
        scheduler.preempt(groups[0], simulation.now)
    return bool(groups)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("preemption", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("after", [1, 2, 3, 4, 5, 8, 13, 14, 15, 16])
def test_resumed_output_is_the_undisturbed_one(kind: str, preemption: str, after: int) -> None:
    """At any event: in the prompt, right after the fork, with results on their way, in the middle of decoding."""
    simulation = Simulation(msgspec.structs.replace(ROOMY, preemption=preemption))
    request = simulation.submit([(3 * i) % 29 for i in range(30)], 12, **KINDS[kind])
    simulation.submit([(3 * i) % 29 for i in range(27)], 12, seed=1)
    for event in range(after):
        _ = simulation.answer() if event % 3 == 2 else simulation.plan()
    taken = preempt(simulation, request)
    simulation.step()
    again = preempt(simulation, request)
    simulation.run()
    verify_all(simulation)
    assert simulation.engine.scheduler.counters.preemptions == taken + again > 0
    # Nothing needed the blocks meanwhile: the cache has all but tails, and what was in flight.
    assert simulation.workers.computed_tokens <= 30 + 27 + (3 + 1) * 12 + 2 * (3 * (4 + 2) + 30)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("preemption", ["recompute", "swap", "auto"])
def test_groups_in_a_tiny_pool(kind: str, preemption: str) -> None:
    """Several groups that only fit one after the other: each is preempted whole, and all of them end."""
    config = msgspec.structs.replace(TINY, preemption=preemption, host_slots=SLOTS[preemption])
    simulation = Simulation(config)
    for i in range(4):
        simulation.submit([50 * i + j for j in range(9)], 18, **KINDS[kind])
    simulation.run()
    verify_all(simulation)
    assert all(stream.reason in ("length", "stop") for stream in simulation.streams.values())
    counters = simulation.engine.scheduler.counters
    assert counters.preemptions > 0
    assert (counters.swapped > 0) == (preemption == "swap") or preemption == "auto"
    assert (simulation.workers.pool.loaded_blocks > 0) <= (preemption != "recompute")


def test_swapping_computes_less_again() -> None:
    """Two long sequences take turns in a pool for one and a half of them."""
    computed, loaded = {}, {}
    for preemption in ("recompute", "swap"):
        config = msgspec.structs.replace(TINY, num_blocks=20, preemption=preemption, host_slots=SLOTS[preemption])
        simulation = Simulation(config)
        for i in range(2):
            simulation.submit([50 * i + j for j in range(30)], 30, seed=i)
        simulation.run()
        verify_all(simulation)
        assert simulation.engine.scheduler.counters.preemptions > 0
        computed[preemption] = simulation.workers.computed_tokens
        loaded[preemption] = simulation.workers.pool.loaded_blocks
    assert loaded["recompute"] == 0 < loaded["swap"]
    assert computed["swap"] < computed["recompute"]


def test_without_a_claim_what_was_saved_as_cache_is_found_all_the_same() -> None:
    """Recomputation claims nothing; the copies that were made beside the computation are cache like any other."""
    simulation = Simulation(msgspec.structs.replace(TINY, num_blocks=20, preemption="recompute"))
    for i in range(2):
        simulation.submit([50 * i + j for j in range(30)], 30, seed=i)
    tree = simulation.engine.scheduler.residence.tree
    while simulation.step():
        assert tree.tiers.claimed_count == 0
    verify_all(simulation)
    assert simulation.engine.scheduler.counters.preemptions > 0
    assert simulation.engine.scheduler.counters.swapped == 0
    assert simulation.workers.pool.loaded_blocks > 0


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_a_host_pool_that_is_too_small(slots: int) -> None:
    """What finds no slot is computed again; what was saved is not mixed up."""
    simulation = Simulation(msgspec.structs.replace(TINY, preemption="swap", host_slots=slots))
    for i in range(6):
        simulation.submit([50 * i + j for j in range(14)], 20, seed=i, n=1 + i % 2)
    simulation.run()
    verify_all(simulation)
    assert simulation.workers.pool.saved_blocks > 0


def test_the_choice_follows_the_measured_costs() -> None:
    """Free moves are preferred to computing, and dear ones are not. A simulated step takes 1 µs."""
    swapped = {}
    for cost in (0.0, 1e9):
        config = msgspec.structs.replace(TINY, preemption="auto", swap_us_per_block=cost)
        simulation = Simulation(config)
        for i in range(4):
            simulation.submit([50 * i + j for j in range(9)], 18, seed=i, n=3)
        simulation.run()
        verify_all(simulation)
        swapped[cost] = simulation.engine.scheduler.counters.swapped
    assert swapped[1e9] == 0


def test_the_newest_group_goes_first_and_whole() -> None:
    simulation = Simulation(msgspec.structs.replace(TINY, preemption="recompute"))
    old = simulation.submit(list(range(9)), 30, seed=1)
    new = simulation.submit(list(range(50, 59)), 20, n=3)
    scheduler = simulation.engine.scheduler
    while not scheduler.counters.preemptions:
        simulation.step()
    assert {sequence.request for sequence in scheduler.running()} == {old}
    simulation.run()
    verify_all(simulation)
    assert simulation.streams[new].reason == "length"


def test_a_better_priority_is_not_preempted_for_a_worse_one() -> None:
    simulation = Simulation(msgspec.structs.replace(TINY, num_blocks=16, preemption="recompute"))
    worse = simulation.submit(list(range(9)), 40, seed=1, priority=1)
    while not simulation.streams[worse].output:
        simulation.step()
    better = simulation.submit(list(range(50, 59)), 40, seed=2)
    while not simulation.engine.scheduler.counters.preemptions:
        simulation.step()
    assert {sequence.request for sequence in simulation.engine.scheduler.running()} == {better}
    simulation.run()
    verify_all(simulation)


@pytest.mark.parametrize("kind", KINDS)
def test_aborted_while_preempted(kind: str) -> None:
    simulation = Simulation(msgspec.structs.replace(TINY, preemption="swap"))
    requests = [simulation.submit([50 * i + j for j in range(9)], 18, **KINDS[kind]) for i in range(4)]
    while not simulation.engine.scheduler.counters.preemptions:
        simulation.step()
    running = {sequence.request for sequence in simulation.engine.scheduler.running()}
    for request in requests:
        if request not in running:
            simulation.abort(request)
    simulation.run()
    verify_all(simulation)
    simulation.engine.flush_cache()
    assert simulation.engine.scheduler.residence.pool.free_count == 24
    assert simulation.engine.scheduler.residence.tree.tiers.copies.host.used_count == 0
