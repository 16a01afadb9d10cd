"""Beam searches in the engine, over simulated workers that move beams by the contract: results, copies, blocks."""

from __future__ import annotations

import msgspec
import pytest
from simulation.driver import Simulation
from simulation.oracle import beam_search
from simulation.streams import Stream

from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import BeamSearch, Submit
from trunkline.controller.sequences.sequence import Request
from trunkline.kvstore.chunks import blocks_for, pack_int32
from trunkline.worker.messages import Sampling

SMALL = EngineConfig(num_blocks=96, chunk_size=4, max_context=96, token_budget=24, max_rows=16)
STOPS = tuple(range(0, 50, 7))


def sized(chunk_size: int, **changes: int) -> EngineConfig:
    return msgspec.structs.replace(SMALL, chunk_size=chunk_size, num_blocks=480 // chunk_size, **changes)


@pytest.mark.parametrize(
    ("width", "chunk_size", "early_stopping"),
    [(2, 16, True), (4, 4, True), (6, 1, False), (2, 4, False), (4, 16, None), (6, 4, None)],
)
def test_equals_the_oracle(width: int, chunk_size: int, early_stopping: bool | None) -> None:
    """`verify` compares every hypothesis, its order and its scores, bit by bit."""
    for length, penalty, stop_ids in [(1, 1.0, ()), (7, 0.7, STOPS), (8, -1.0, STOPS), (30, 2.0, STOPS[:2])]:
        simulation = Simulation(sized(chunk_size))
        beam = BeamSearch(width, penalty, early_stopping)
        simulation.submit([(3 * i) % 41 for i in range(length)], 14, beam=beam, n=width, stop_ids=stop_ids)
        simulation.finish()


@pytest.mark.parametrize(("width", "chunk_size"), [(2, 1), (4, 4), (6, 4), (3, 16)])
def test_only_tails_of_diverging_beams_are_copied(width: int, chunk_size: int) -> None:
    """One step in flight, so that no step is computed after the end; then copies are exactly those needed."""
    prompt, limit = list(range(10)), 20
    simulation = Simulation(sized(chunk_size, max_inflight_steps=1))
    simulation.ask(prompt, limit, beam=BeamSearch(width))
    parents = beam_search(prompt, BeamSearch(width), limit).parents
    copied = sum((width - len(set(step))) * ((10 + i) % chunk_size) for i, step in enumerate(parents))
    assert simulation.workers.copied_tokens == copied
    assert simulation.workers.computed_tokens == 10 + width * len(parents)


@pytest.mark.parametrize("width", [2, 4, 6])
def test_memory_is_the_prompt_once_and_what_beams_do_not_share(width: int) -> None:
    """PagedAttention's Figure 15b: blocks are shared and freed as beams move."""
    prompt, limit = list(range(33)), 24
    simulation = Simulation(sized(4))
    held: list[tuple[int, int]] = []
    simulation.workers.observer = lambda _: held.append(simulation.workers.blocks_held)
    simulation.submit(prompt, limit, beam=BeamSearch(width))
    pool = simulation.scheduler.kv.pool
    used = 0
    while simulation.step():
        running = simulation.scheduler.running()
        if len(running) == width:
            used = max(used, len({block for s in running for block in s.block_table()}))
    simulation.finish()
    apart = width * blocks_for(len(prompt) + limit, 4)
    most = max(physical for physical, _ in held)
    assert max(logical for _, logical in held) >= apart - 2 * width
    assert used <= most + 2 * width  # the controller knows of a move a step or two later
    assert most <= apart - (width - 1) * (len(prompt) // 4)
    assert pool.num_blocks - pool.free_count <= blocks_for(len(prompt) + limit, 4) * width


@pytest.mark.parametrize("penalty", [1e300, -1e300])
def test_an_absurd_length_penalty_harms_nobody(penalty: float) -> None:
    simulation = Simulation(SMALL)
    simulation.submit([1, 2, 3], 6, beam=BeamSearch(2, penalty), stop_ids=STOPS)
    simulation.submit([1, 2, 3], 6)
    simulation.run()
    assert simulation.streams[1].hypotheses
    assert simulation.streams[2].reason == "length"


def test_a_search_that_another_controller_began_starts_again() -> None:
    """The tokens that come with it are of beams whose state is lost."""
    simulation, beam = Simulation(SMALL), BeamSearch(3)
    prompt = [1, 2, 3, 4, 5, 6]
    submit = Submit(1, pack_int32([*prompt, 7, 8]), len(prompt), 12, Sampling(), beam=beam, n=3)
    simulation.streams[1] = Stream(prompt, 0, 12, (), 3, beam)
    simulation.receive(Request.of(1, submit))
    simulation.finish()
