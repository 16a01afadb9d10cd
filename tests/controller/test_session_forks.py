"""The next turn of a conversation and its forks at once: one batch, one read of what they share, and what becomes
of them if the group is lost that has it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from controller.tier_harness import CHUNK, TIERED, settle, simulate
from msgspec.structs import replace
from seeds import seeds
from simulation.driver import Simulation
from simulation.oracle import expected_output
from simulation.peers import Network

from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import Holder
from trunkline.kvstore import peers
from trunkline.kvstore.chunks import unpack_int32
from trunkline.worker.messages import StepPlan

ROOMY = EngineConfig(num_blocks=200, chunk_size=CHUNK, max_context=200, token_budget=64, max_rows=16)
PEERED = replace(TIERED, num_blocks=80, disk_slots=0, remote=False, peers=True)
ANSWER = 6


class Reads:
    """What the plans of a simulation tell the workers to read, step by step."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._rows: list[int] = []
        self._runs: list[list[int]] = []
        self.most_rows = 0
        self.runs: list[list[int]] = []
        """Runs of the last step with the most rows."""
        self.held = (0, 0)
        """Blocks that its rows held: each counted once, and once for each row."""
        simulation.workers.observer = self._note

    def _note(self, plan: StepPlan) -> None:
        if plan.rows is not None:
            self._rows = unpack_int32(plan.rows).tolist()
        if plan.runs is not None:
            self._runs = unpack_int32(plan.runs, columns=4).tolist()
        if len(self._rows) >= self.most_rows:
            self.most_rows, self.runs = len(self._rows), self._runs
            self.held = self._simulation.workers.blocks_held


def conversation(simulation: Simulation, rng: random.Random, length: int) -> list[int]:
    """The history after a turn, with its answer."""
    prompt = [rng.randrange(37) for _ in range(length)]
    simulation.ask(prompt, ANSWER)
    return prompt + expected_output(prompt, 0, ANSWER)


def turns(rng: random.Random, history: Sequence[int], count: int) -> list[list[int]]:
    """What the parent and its forks send: the history and, of each, something else."""
    return [
        [*history, 40 + number, *(rng.randrange(37) for _ in range(rng.randrange(3)))] for number in range(count)
    ]


@pytest.mark.parametrize("seed", seeds(8))
def test_a_turn_and_its_forks_read_what_they_share_once(seed: int) -> None:
    rng = random.Random(seed)
    simulation = Simulation(ROOMY)
    history = conversation(simulation, rng, rng.randrange(20, 90))
    known, shared, forks = (len(history) - 1) // CHUNK, len(history) // CHUNK, rng.randrange(1, 6)
    before = simulation.workers.computed_tokens
    asked = turns(rng, history, 1 + forks)
    reads = Reads(simulation)
    requests = [simulation.submit(prompt, 12) for prompt in asked]
    simulation.finish()
    assert reads.most_rows == 1 + forks, "they decode in one step"
    whole = [run for run in reads.runs if run[:2] == [0, 1 + forks]]
    assert [run[2:] for run in whole] == [[0, shared]], "one run names the shared blocks, for all rows"
    assert not any(run[2] < shared for run in reads.runs if run not in whole)
    once, apart = reads.held
    assert apart - once == forks * shared
    assert all((simulation.streams[each].cached_tokens or 0) >= known * CHUNK for each in requests)
    new = sum(len(prompt) - known * CHUNK for prompt in asked)
    assert simulation.workers.computed_tokens - before <= new + (1 + forks) * 11


@pytest.mark.parametrize("seed", seeds(8))
def test_a_group_that_is_lost_in_the_middle_of_a_fork_is_a_recomputation(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another group pulls the parent's KV for the forks when it goes, at any moment; they compute it, once."""
    monkeypatch.setattr(peers, "PEER_READ_US", 1.0)
    rng, network = random.Random(seed), Network()
    here, there = simulate(PEERED), simulate(PEERED)
    for group in (here, there):
        group.tiers.network = network
    endpoints = network.export(here.workers.pool, "here", PEERED.ranks)
    history = conversation(here, rng, 40)
    settle(here)
    shared = (len(history) - 1) // CHUNK
    there.holders_of = lambda _: [Holder("here", endpoints, 0, shared)]
    there.tier_pace = rng.choice([0.1, 0.3, 1.0])
    asked = turns(rng, history, 3)
    requests = [there.submit(prompt, 8) for prompt in asked]
    for _ in range(rng.randrange(12)):
        there.step()
    network.leave(endpoints)
    there.finish()
    streams = [there.streams[each] for each in requests]
    assert [stream.outputs for stream in streams] == [[expected_output(prompt, 0, 8)] for prompt in asked]
    own = sum(len(prompt) - shared * CHUNK for prompt in asked)
    assert there.workers.computed_tokens <= shared * CHUNK + own + 3 * 7, "the history once at most"


@pytest.mark.parametrize("seed", seeds(8))
def test_a_group_that_loses_its_workers_computes_a_turn_and_its_forks_again(seed: int) -> None:
    rng = random.Random(seed)
    simulation = Simulation(ROOMY)
    history = conversation(simulation, rng, rng.randrange(20, 90))
    asked = turns(rng, history, 4)
    requests = [simulation.submit(prompt, 12) for prompt in asked]
    simulation.events(rng.randrange(20))
    simulation.lose_workers()
    simulation.replace_workers()
    reads = Reads(simulation)
    before = simulation.workers.computed_tokens
    simulation.finish()
    streams = [simulation.streams[each] for each in requests]
    assert [stream.outputs for stream in streams] == [[expected_output(prompt, 0, 12)] for prompt in asked]
    shared = len(history) // CHUNK
    if reads.most_rows == 4:
        assert [run[2:] for run in reads.runs if run[:2] == [0, 4]] == [[0, shared]]
    most = shared * CHUNK + sum(len(prompt) - shared * CHUNK + 12 for prompt in asked)
    assert simulation.workers.computed_tokens - before <= most, "the history once"
