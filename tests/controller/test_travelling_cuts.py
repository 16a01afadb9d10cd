"""What a group has kept behind a cut is pulled by another one, as a router finds it by its names."""

from __future__ import annotations

from functools import partial

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
    pulled_of,
    settle,
    simulate,
)
from msgspec.structs import replace
from simulation.driver import Simulation
from simulation.peers import Network
from simulation.streams import Stream, verify

from trunkline.controller.cache.kv_events import announced_tiers
from trunkline.controller.engine.validation import problem_of_submit
from trunkline.controller.messages import Holder, KeptChunks, Submit
from trunkline.kvstore import peers
from trunkline.kvstore.chunks import unpack_int32
from trunkline.kvstore.root_keys import CUT_ROOT
from trunkline.kvstore.tier import TierKind
from trunkline.router.routing.core import Decision, RouteRequest, RoutingCore
from trunkline.router.routing.names import KvIdentity

PEERED = replace(TIERED, disk_slots=0, remote=False, peers=True)


@pytest.fixture(autouse=True)
def pulls_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated steps are so fast that pulls at the usual assumption would not be tried."""
    monkeypatch.setattr(peers, "PEER_READ_US", 1.0)


class Cluster:
    """Groups that exchange KV, and a router that knows what they have told."""

    def __init__(self, count: int) -> None:
        self.network = Network()
        self.groups = [simulate(PEERED) for _ in range(count)]
        self.core = RoutingCore(map(str, range(count)))
        for slot, group in enumerate(self.groups):
            group.tiers.network = self.network
            endpoints = self.network.export(group.workers.pool, str(slot), PEERED.ranks)
            self.core.traits.set_identity(slot, KvIdentity(*group.tree._identity, CHUNK))
            self.core.traits.set_exports(slot, endpoints)
            self.core.set_available(slot, True)
            group.holders_of = partial(self.holders, slot)
            group.kept_of = partial(self.kept, slot)

    def holders(self, slot: int, submit: Submit) -> list[Holder]:
        return self.asked(slot, submit).holders

    def kept(self, slot: int, submit: Submit) -> KeptChunks | None:
        return self.asked(slot, submit).kept

    def asked(self, slot: int, submit: Submit) -> Decision:
        """What the router decides if only one group can take a request."""
        for other, group in enumerate(self.groups):
            self.core.index.forget(other)
            for node in group.tree.nodes():
                tiers = announced_tiers(node, group.tree)
                self.core.index.apply(other, node.name, bytes([tiers]))
        drops = tuple((start, stop) for start, stop in unpack_int32(submit.drops, columns=2).tolist())
        decision = self.core.route(RouteRequest(submit.tokens, drops=drops, pinned=slot), 0.0)
        assert not problem_of_submit(replace(submit, holders=decision.holders, kept=decision.kept), 0)
        return decision


def turn(cluster: Cluster, slot: int, session: Session, new: int, drops: Drops) -> Stream:
    """A session's next turn, at a group."""
    session.simulation = cluster.groups[slot]
    stream = session.turn(new, drops=drops)
    settle(session.simulation)
    return stream


def kept_at(simulation: Simulation) -> int:
    """How many chunks are behind cuts."""
    behind = [root for root in simulation.tree.roots() if root.key.startswith(CUT_ROOT)]
    return sum(len(root.children) for root in behind)


@pytest.mark.parametrize("drops", CUTS)
@pytest.mark.parametrize("turns", [0, 1, 2])
def test_what_is_kept_behind_a_cut_is_pulled(drops: Drops, turns: int) -> None:
    """Before the cut was made at the first group, and after turns that were computed behind it there."""
    cluster = Cluster(2)
    home, away = cluster.groups
    session = Session(home)
    turn(cluster, 0, session, FIRST, ())
    for _ in range(turns):
        assert cut_of(turn(cluster, 0, session, 9, drops)) == "kept"
    before = len(session.history)
    stream = turn(cluster, 1, session, 5, drops)
    assert cut_of(stream) == "kept"
    seen = before - sum(stop - start for start, stop in drops)
    assert pulled_of(stream) >= seen - 2 * CHUNK
    assert away.workers.computed_tokens <= 5 + 4 + 2 * CHUNK
    again = turn(cluster, 1, session, 3, drops)
    assert (cut_of(again), pulled_of(again)) == ("kept", 0), "it is this group's own now"


def test_a_group_that_has_the_beginning_pulls_what_was_computed_since() -> None:
    cluster, drops = Cluster(2), ((4, 16),)
    session = Session(cluster.groups[0])
    for slot, new, cut in [(0, FIRST, ()), (1, 2, drops), (0, 11, drops), (0, 11, drops)]:
        turn(cluster, slot, session, new, cut)
    pulled = cluster.groups[1].engine.counters.tiers[TierKind.PEER].reads
    stream = turn(cluster, 1, session, 2, drops)
    assert cut_of(stream) == "kept"
    assert cluster.groups[1].engine.counters.tiers[TierKind.PEER].reads > pulled
    assert pulled_of(stream) >= 5 * CHUNK


def test_of_two_groups_the_one_that_has_kept_more_gives() -> None:
    """They have cut the same history, one of them before it had computed all of it, so their chunks have other
    names."""
    cluster, drops = Cluster(3), ((4, 16),)
    session = Session(cluster.groups[0])
    turn(cluster, 0, session, FIRST, ())
    other = Session(cluster.groups[1], history=session.history[:-9])
    turn(cluster, 1, other, 0, ())
    for _ in range(2):
        turn(cluster, 0, session, 9, drops)
    cluster.groups[1].submit(list(session.history), 1, drops=drops)
    cluster.groups[1].run()
    settle(cluster.groups[1])
    stream = turn(cluster, 2, session, 5, drops)
    assert cut_of(stream) == "kept"
    assert pulled_of(stream) >= len(session.history) - 5 - 4 - 12 - 2 * CHUNK


def test_without_what_came_before_the_last_piece_nothing_is_pulled_in_vain() -> None:
    cluster, drops = Cluster(2), ((4, 16),)
    session = Session(cluster.groups[0])
    turn(cluster, 0, session, FIRST, ())
    turn(cluster, 0, session, 9, drops)
    cluster.groups[0].flush_cache()
    cluster.groups[0].workers.pool.names.clear()
    stream = turn(cluster, 1, session, 5, drops)
    assert (cut_of(stream), pulled_of(stream)) == ("recomputed", 0)
    assert not cluster.network.asked


@pytest.mark.parametrize("lie", [b"\0" * 16, b"\xff" * 16])
def test_wrong_names_cost_a_pull_and_change_no_text(lie: bytes) -> None:
    cluster, drops = Cluster(2), ((4, 16),)
    session = Session(cluster.groups[0])
    turn(cluster, 0, session, FIRST, ())
    turn(cluster, 0, session, 9, drops)
    endpoints = cluster.core.traits.exports(0)
    cluster.groups[1].kept_of = lambda submit: KeptChunks(lie * 6, [Holder("0", endpoints, 0, 6)])
    stream = turn(cluster, 1, session, 5, drops)
    assert cut_of(stream) == "recomputed"
    assert cluster.network.asked
    verify(stream, PEERED.longest_sequence)
    assert not kept_at(cluster.groups[1])


def test_a_peer_that_dies_meanwhile_costs_the_kept_chunks() -> None:
    cluster, drops = Cluster(2), ((4, 16),)
    session = Session(cluster.groups[0])
    turn(cluster, 0, session, FIRST, ())
    turn(cluster, 0, session, 9, drops)
    cluster.network.leave(cluster.core.traits.exports(0))
    stream = turn(cluster, 1, session, 5, drops)
    assert cut_of(stream) == "recomputed"


@pytest.mark.parametrize("kept", [KeptChunks(b"x" * 15, []), KeptChunks(b"x" * 16, [Holder("a", [], 0, 1)])])
def test_malformed_reports_of_kept_chunks_are_refused(kept: KeptChunks) -> None:
    session = Session(simulate(PEERED))
    session.simulation.kept_of = lambda submit: kept
    submits: list[Submit] = []
    session.simulation.holders_of = lambda submit: submits.append(submit) or []  # type: ignore[func-returns-value]
    session.turn(FIRST)
    cut = replace(submits[0], drops=b"\4\0\0\0\x08\0\0\0")
    assert not problem_of_submit(cut, 0)
    assert problem_of_submit(replace(cut, kept=kept), 0)
    assert problem_of_submit(replace(submits[0], kept=KeptChunks(b"", [])), 0), "there is no cut"


def test_what_is_computed_instead_of_a_kept_chunk_has_another_name() -> None:
    """It did not see what was cut off. (`Network` fails if one name stands for both.)"""
    cluster, drops = Cluster(2), ((4, 16),)
    home, away = cluster.groups
    session = Session(home)
    turn(cluster, 0, session, FIRST, ())
    away.submit(session.history[:CHUNK], 1)
    away.run()  # it has what stands before the cut, so it can compute what is behind it
    settle(away)
    turn(cluster, 0, session, 9, drops)
    kept = {node.name for root in home.tree.roots() if root.key.startswith(CUT_ROOT) for node in below(root)}
    cluster.network.silent.update(cluster.core.traits.exports(0))
    away.pace_s, away.tier_pace = 0.1, 0.0
    session.simulation = away
    request = session.send(5, drops=drops)
    away.step_until(lambda: away.streams[request].started)
    away.tier_pace = 1.0
    away.finish()
    assert cut_of(away.streams[request]) == "kept"
    assert pulled_of(away.streams[request]) == 0
    roots = [root for root in away.tree.roots() if root.key.startswith(CUT_ROOT)]
    computed = {node.name for root in roots for node in below(root)}
    assert computed
    assert not computed & kept
    settle(away)
