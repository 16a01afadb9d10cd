"""Several samples of a prompt of which parts are not seen: tables with holes, forks, tails, and plain prompts
after all."""

from __future__ import annotations

import pytest
from controller.tier_harness import TIERED, Session, simulate, sink, tiers_of, tree_of
from msgspec.structs import replace
from simulation.driver import Simulation, verify
from simulation.traffic import Mix, Traffic

from trunkline.controller.config import EngineConfig
from trunkline.kvstore.tier import TierKind

CONFIG = EngineConfig(num_blocks=60, chunk_size=4, max_context=64, token_budget=40, max_rows=8)
PROMPT = list(range(100, 130))


def cut_of(simulation: Simulation, request: int) -> str:
    """What became of its cut; its samples are the oracle's."""
    stream = simulation.streams[request]
    verify(stream, simulation.engine.config.longest_sequence)
    assert stream.started is not None
    return stream.started.cut


@pytest.mark.parametrize("seed", range(3))
def test_samples_whose_holes_do_not_fit_do_not_preempt_themselves_for_ever(seed: int) -> None:
    """Every second token is dropped: what is left fits three times, the table with its holes does not."""
    simulation = Simulation(replace(CONFIG, num_blocks=21, max_context=60))
    prompt = [5 + i % 7 for i in range(40)]
    simulation.submit(prompt, 2, seed=3)
    simulation.run()
    drops = tuple((i, i + 1) for i in range(1, 36, 2))
    request = simulation.submit(prompt, 18, seed=seed, n=3, drops=drops)
    simulation.run(200)
    assert cut_of(simulation, request) == "recomputed"
    assert simulation.engine.scheduler.counters.preemptions == 0


@pytest.mark.parametrize(
    ("drops", "n", "kind"),
    [
        (((4, 16),), 2, "kept"),
        (((5, 6), (9, 10)), 1, "kept"),
        (((5, 6), (9, 10)), 2, "recomputed"),
        (((5, 6), (25, 26)), 1, "kept"),
        (((5, 6), (25, 26)), 2, "recomputed"),
    ],
)
@pytest.mark.parametrize("steps", [1, 3, 6])
def test_what_is_seen_between_cuts_of_a_tail_is_computed_again_for_samples(
    drops: tuple[tuple[int, int], ...], n: int, kind: str, steps: int
) -> None:
    """A range that ends in the last segment may stand in a tail, which each sample has for itself: of several that
    are preempted only one would find it again. So it is a plain prompt from the start."""
    simulation = Simulation(CONFIG)
    simulation.submit(PROMPT, 4)
    simulation.run()
    request = simulation.submit(PROMPT, 12, n=n, drops=drops)
    group = next(iter(simulation.engine.scheduler.queue))
    assert (group.cut is not None) == (kind == "kept"), "at once, not when it is admitted"
    for _ in range(steps):
        simulation.step()
    scheduler = simulation.engine.scheduler
    for running in {sequence.group.id: sequence.group for sequence in scheduler.running()}.values():
        scheduler.preempt(running, simulation.now)
        scheduler.residence.make_room(6)
    simulation.run(300)
    assert cut_of(simulation, request) == kind


@pytest.mark.parametrize("new", [2, 3, 4, 5])
def test_samples_have_tails_though_the_prompt_became_another_one(new: int) -> None:
    """A table that ends with a chunk needs no tails; the plain prompt of what is seen does. Which of both it is
    turns out when the chunks on disk are found not to be worth waiting for."""
    simulation = simulate(replace(TIERED, remote=False))
    session = Session(simulation)
    session.turn(30)
    sink(simulation, TierKind.DISK)
    tree_of(simulation).tiers.health[TierKind.DISK].read_us = 1e9
    prompt = [*session.history, *range(900, 900 + new)]
    request = simulation.submit(prompt, 6, n=3, drops=((5, 18),))
    simulation.run()
    assert cut_of(simulation, request) == "recomputed"
    assert sum(tiers_of(simulation.streams[request])) == 0


def test_traffic_in_which_cut_samples_become_plain_prompts() -> None:
    config = EngineConfig(
        num_blocks=60,
        ranks=2,
        chunk_size=3,
        max_context=80,
        token_budget=40,
        max_rows=16,
        preemption="recompute",
        host_slots=3,
        disk_slots=10,
    )
    traffic = Traffic(config, Mix(cuts=0.5, ttl=0.3, preempts=0.05), 910_010)
    traffic.simulation.pace_s = 0.002
    traffic.run(150)
    assert traffic.ended == 150
