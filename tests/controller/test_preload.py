"""When a sequence whose KV is on its way may begin: `S_buf` in time, on numbers that are worked out by hand."""

from __future__ import annotations

import random

import pytest
from seeds import seeds
from simulation.driver import Simulation
from simulation.streams import verify

from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.tiers.costs import Preloads
from trunkline.kvstore.tier import TierKind

MOVE_US = 1000.0


def loading(*blocks: int) -> Preloads:
    """One sequence after the other, numbered from 1 on, whose loads plan 7 orders."""
    loads = Preloads()
    for batch_seq_id, count in enumerate(blocks, 1):
        loads.ordered(count, 0.0, MOVE_US)
        loads.wait(batch_seq_id, 7)
    return loads


def test_whoever_loads_nothing_may_begin() -> None:
    assert loading().is_due(1, 0.0, 0.0, alone=False)
    assert loading().begin(1) == 0


@pytest.mark.parametrize(("step_us", "due_at"), [(10_000.0, 0.0), (4000.0, 0.006), (0.0, 0.010)])
def test_it_begins_when_the_rest_comes_during_its_first_step(step_us: float, due_at: float) -> None:
    """T_load · L_hist is 10 ms here: with T_pref · L_new of 4 ms, 6 ms of it must be in the buffer."""
    loads = loading(10)
    assert loads.is_due(1, due_at + 1e-9, step_us, alone=False)
    assert due_at == 0.0 or not loads.is_due(1, due_at - 1e-4, step_us, alone=False)


@pytest.mark.parametrize("seed", seeds(5))
def test_it_is_the_papers_rule(seed: int) -> None:
    """S_buf = B · (T_load · L_hist − T_pref · L_new) bytes have come, if it has the link to itself."""
    rng = random.Random(seed)
    bandwidth, block_bytes = rng.uniform(1e9, 1e10), rng.uniform(1e5, 1e7)
    blocks, compute_s = rng.randrange(1, 100), rng.uniform(0.0, 0.05)
    move_us = block_bytes / bandwidth * 1e6
    loads = Preloads()
    loads.ordered(blocks, 5.0, move_us)
    loads.wait(1, 3)
    load_s = blocks * move_us / 1e6
    buffer_bytes = max(0.0, bandwidth * (load_s - compute_s))
    for now in [5.0 + rng.uniform(0.0, 1.2) * load_s for _ in range(20)]:
        come = min((now - 5.0) * bandwidth, blocks * block_bytes)
        if abs(come - buffer_bytes) > 1.0:
            assert loads.is_due(1, now, compute_s * 1e6, alone=False) == (come >= buffer_bytes)


def test_loads_queue_on_one_link() -> None:
    loads = loading(10, 5)
    assert loads.is_due(1, 0.010, 0.0, alone=False)
    assert not loads.is_due(2, 0.014, 0.0, alone=False)
    assert loads.is_due(2, 0.0151, 0.0, alone=False)
    loads.ordered(3, 1.0, MOVE_US)  # the link has been idle since
    loads.wait(3, 9)
    assert not loads.is_due(3, 1.0029, 0.0, alone=False)
    assert loads.is_due(3, 1.0031, 0.0, alone=False)


def test_nobody_waits_alone() -> None:
    loads = loading(1000)
    assert not loads.is_due(1, 0.0, 0.0, alone=False)
    assert loads.is_due(1, 0.0, 0.0, alone=True)


def test_it_says_once_which_plan_to_wait_for() -> None:
    loads = loading(4, 4)
    assert loads.begin(1) == 7
    assert loads.begin(1) == 0, "its later steps wait for nothing"
    loads.left(2)
    assert loads.begin(2) == 0
    loads.left(2)


def test_others_decode_while_a_session_comes_back() -> None:
    """The loads go out with the admission, the first prefill step only when it will not wait; others go on."""
    config = EngineConfig(
        num_blocks=24, chunk_size=4, max_context=96, token_budget=24, max_rows=8, host_slots=60, preemption="swap"
    )
    simulation = Simulation(config)
    first = simulation.submit([30 + i for i in range(24)], 4)
    simulation.run()
    simulation.scheduler.kv.make_room(24)
    other = simulation.submit(list(range(5)), 60)
    simulation.step_until(lambda: len(simulation.streams[other].output) >= 3)
    history = simulation.streams[first].prompt + simulation.streams[first].output
    turn = simulation.submit([*history, 1, 2, 3], 4)
    scheduler, waited = simulation.scheduler, 0
    scheduler.costs._moved_us = 0.5e6 * scheduler.costs._moved_blocks  # a slow link: half a second a block
    while not simulation.streams[turn].output:
        before = len(simulation.streams[other].output)
        simulation.step()
        if any(sequence.request_id == turn for sequence in scheduler.prefilling):
            waited += 1
            assert len(simulation.streams[other].output) > before, "a row stood still for somebody else's loads"
    assert waited >= 2, "it began at once though its loads took seconds"
    assert simulation.workers.pool.loaded_blocks >= 6
    simulation.run()
    for stream in simulation.streams.values():
        verify(stream, config.longest_sequence)


@pytest.mark.parametrize(("steps", "seed"), [(4, 0), (5, 1), (9, 0), (12, 1), (13, 0), (17, 1)])
def test_a_row_whose_chunk_is_merged_with_one_on_its_way_waits_for_it(steps: int, seed: int) -> None:
    """It computes a chunk that another request has just had loaded: from then on it reads that block, which must
    be there. The simulated workers assert that it is."""
    config = EngineConfig(
        num_blocks=40,
        chunk_size=4,
        max_context=120,
        token_budget=6,
        max_rows=4,
        host_slots=30,
        preemption="swap",
        swap_us_per_block=1e6,
    )
    simulation = Simulation(config, seed=seed)
    simulation.pace_s = 0.001
    prompt = [5] * 8 + [7, 9, 11]
    first = simulation.submit(prompt, 30, seed=3)
    simulation.run()
    for _ in range(5):
        simulation.step()
    tree = simulation.tree
    tree.evict(7)
    again = simulation.submit(prompt, 30, seed=3)
    for _ in range(steps):
        simulation.step()
    output, loaded = simulation.streams[first].output, tree.totals.tiers[TierKind.DEVICE].writes
    longer = simulation.submit([*prompt, *output, *[1, 2, 3] * 4], 4, seed=1)
    simulation.run()
    assert tree.totals.tiers[TierKind.DEVICE].writes > loaded
    for request in (again, longer):
        verify(simulation.streams[request], config.longest_sequence)
