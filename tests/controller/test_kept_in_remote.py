"""What a group has kept behind a cut, and saved in the remote tier, is found there by another one."""

from __future__ import annotations

import random

import pytest
from controller.tier_harness import (
    CHUNK,
    CUTS,
    FIRST,
    TIERED,
    Drops,
    Session,
    below,
    cut_of,
    settle,
    simulate,
    sink,
    tiers_of,
)
from msgspec.structs import replace
from seeds import seeds
from simulation.driver import Simulation

from trunkline.kvstore.root_keys import CUT_ROOT
from trunkline.kvstore.tier import TierKind

STORED = replace(TIERED, disk_slots=0, ranks=2)


def behind_cuts(simulation: Simulation) -> set[bytes]:
    """The names of all chunks behind cuts."""
    roots = [root for root in simulation.tree.roots() if root.key.startswith(CUT_ROOT)]
    return {node.name for root in roots for node in below(root)}


def moved(session: Session) -> Simulation:
    """Another group takes a session over: all that it can have of it is in the remote tier."""
    before = session.simulation
    sink(before, TierKind.REMOTE)
    session.simulation = simulate(STORED)
    session.simulation.tiers.remote = before.tiers.remote
    return session.simulation


@pytest.mark.parametrize("drops", CUTS)
@pytest.mark.parametrize("turns", [0, 1, 2])
def test_what_is_kept_behind_a_cut_is_found(drops: Drops, turns: int) -> None:
    """Before the cut was made at the first group, and after turns that were computed behind it there."""
    session = Session(simulate(STORED))
    session.turn(FIRST)
    for _ in range(turns):
        assert cut_of(session.turn(9, drops=drops)) == "kept"
    away, before = moved(session), len(session.history)
    stream = session.turn(5, drops=drops)
    assert cut_of(stream) == "kept"
    seen = before - sum(stop - start for start, stop in drops)
    assert tiers_of(stream)[TierKind.REMOTE] >= seen - 2 * CHUNK
    assert away.workers.computed_tokens <= 5 + 4 + 2 * CHUNK
    again = session.turn(3, drops=drops)
    assert (cut_of(again), tiers_of(again)[TierKind.REMOTE]) == ("kept", 0), "it is this group's own now"


def test_what_was_computed_since_is_found_by_a_group_that_has_the_beginning() -> None:
    session, drops = Session(simulate(STORED)), ((4, 16),)
    session.turn(FIRST)
    home, away = session.simulation, moved(session)
    session.turn(2, drops=drops)
    settle(away)
    session.simulation = home
    for _ in range(2):
        session.turn(11, drops=drops)
    sink(home, TierKind.REMOTE)
    names = behind_cuts(home)
    plain = moved(session)  # this one computes it without a cut
    session.turn(0)
    sink(plain, TierKind.REMOTE)
    session.simulation = away
    stream = session.turn(2, drops=drops)
    assert cut_of(stream) == "kept"
    assert len(names & behind_cuts(away)) >= 8, "it goes on with the first group's chunks"


def test_a_cut_of_all_that_was_computed() -> None:
    """Nothing is moved behind it, so the first chunk there is named after the cut."""
    session, drops = Session(simulate(STORED)), ((4, 8), (12, 36))
    session.turn(FIRST)
    for _ in range(2):
        assert cut_of(session.turn(9, drops=drops)) == "kept"
    away, before = moved(session), len(session.history)
    assert cut_of(session.turn(2, drops=drops)) == "kept"
    assert away.workers.computed_tokens <= 2 + 4 + 2 * CHUNK < before - 32


def test_a_store_that_has_lost_what_came_before_the_last_piece_is_of_no_use() -> None:
    session, drops = Session(simulate(STORED)), ((4, 16),)
    session.turn(FIRST)
    session.turn(9, drops=drops)
    home, away = session.simulation, moved(session)
    first = next(node for root in home.tree.roots() for node in root.children.values() if root.key == b"s")
    for shards in away.tiers.remote:
        del shards[first.name]
    stream = session.turn(5, drops=drops)
    assert (cut_of(stream), sum(tiers_of(stream))) == ("recomputed", 0)
    assert not behind_cuts(away)


@pytest.mark.parametrize("seed", seeds(8))
def test_a_store_that_loses_chunks_changes_no_text(seed: int) -> None:
    """A session whose cut moves on goes from group to group, each of which forgets all; every answer is the
    oracle's."""
    rng = random.Random(seed)
    session, drops = Session(simulate(STORED)), list[tuple[int, int]]()
    for _ in range(12):
        if len(session.history) - sum(stop - start for start, stop in drops) > 40:
            last = drops.pop() if drops else (0, 0)
            start = last[0] if rng.random() < 0.7 else last[1] + rng.randrange(1, 5)
            drops += [last] if start > last[1] > 0 else []
            drops.append((start, len(session.history) - rng.randrange(8, 16)))
        session.turn(rng.randrange(1, 12), drops=tuple(drops))
        if rng.random() < 0.6:
            away = moved(session)
            away.tiers.faults.fail = rng.choice([0.0, 0.0, 0.2])
            for shards in away.tiers.remote:
                for name in [name for name in shards if rng.random() < 0.03]:
                    del shards[name]
