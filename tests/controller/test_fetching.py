"""Load or recompute, and for how long: patience per run of one tier, deadlines, probes."""

from __future__ import annotations

import pytest

from trunkline.controller.cache.radix_tree import Node
from trunkline.controller.messages import Submit
from trunkline.controller.sequences.sequence import Request, SequenceGroup
from trunkline.controller.tiers.costs import StepCosts
from trunkline.controller.tiers.fetching import (
    PATIENCE_FACTOR,
    PATIENCE_LEAST_S,
    PATIENCE_SHARE,
    PROBE_PATIENCE_S,
    Fetching,
)
from trunkline.kvstore.chunks import NO_BLOCK, SlotId, chunk_name, pack_int32, root_name
from trunkline.kvstore.directory import READ_US, Directory
from trunkline.kvstore.tier import TierKind
from trunkline.kvstore.tier_health import DOUBT_AGAIN_S
from trunkline.kvstore.tier_moves import MoveStatus
from trunkline.kvstore.tier_policy import DirectoryConfig
from trunkline.worker.messages import Sampling

CHUNK = 4


class Desk:
    """A directory with chunks of one path in disk and remote tiers, and what fetching makes of them."""

    def __init__(self, disk: int, remote: int = 0, *, token_us: float = 1000.0) -> None:
        self.tiers: Directory[Node] = Directory(
            DirectoryConfig(host_slots=16, disk_slots=32, remote=True, host_free=0)
        )
        self.costs = StepCosts(0.0)
        self.costs._costs[2] = token_us
        self.fetching = Fetching(self.tiers, self.costs, CHUNK)
        node = Node(None, b"s", root_name(b"", "", CHUNK, b""), NO_BLOCK)
        self.path: list[Node] = []
        for index in range(disk + remote):
            key = bytes([index]) * 4 * CHUNK
            node = Node(node, key, chunk_name(node.name, key), NO_BLOCK)
            self.path.append(node)
            if index < disk:
                assert self.tiers.restore(node, SlotId(index), 1, 0.0)
            else:
                self.tiers.add_remote(node)

    def costs_us(self, disk: float, remote: float = 1000.0) -> None:
        """What one read of each tier is known to take."""
        self.tiers.health[TierKind.DISK].read_us = disk
        self.tiers.health[TierKind.REMOTE].read_us = remote


def group(number: int = 1) -> SequenceGroup:
    submit = Submit(number, pack_int32(range(4)), 4, 1, Sampling())
    return SequenceGroup(Request.of(number, submit), number, 100, submit.sampling)


def test_what_loads_faster_than_it_is_computed_is_waited_for() -> None:
    desk = Desk(4)
    desk.costs_us(100.0)
    assert desk.fetching.worth_waiting(group(), desk.path, 0.0)
    assert not desk.fetching.gave_up(group())
    assert len(desk.tiers.moves(0.0)) == 4, "and is fetched now, if nobody has asked for it before"


def test_what_is_computed_faster_is_computed() -> None:
    desk = Desk(4, token_us=1.0)
    desk.costs_us(100.0)
    assert not desk.fetching.worth_waiting(group(), desk.path, 0.0)
    assert desk.fetching.gave_up(group())
    assert not desk.tiers.moves(0.0)


def test_chunks_in_a_window_are_worth_all_that_they_save() -> None:
    """Two of them from disk instead of forty that would be computed; never a part of them."""
    desk = Desk(1, 1, token_us=10.0)
    desk.costs_us(100.0, 1000.0)
    assert not desk.fetching.worth_waiting(group(1), desk.path[1:], 0.0)
    assert desk.fetching.worth_waiting(group(2), desk.path, 0.0, 40)
    assert len(desk.tiers.moves(0.0)) == 2
    dear = Desk(1, 1, token_us=10.0)
    dear.costs_us(10.0, 3000.0)
    assert not dear.fetching.worth_waiting(group(3), dear.path, 0.0, 40), "1600 µs: the first alone is no use"


def test_each_run_of_a_tier_is_weighed_by_itself() -> None:
    """A near run before a far one that does not pay, and far runs in front that spoil all behind them."""
    desk = Desk(4, 4)
    desk.costs_us(disk=100.0, remote=1e6)
    count, load_us = desk.fetching._best(desk.path, 8)
    assert count == 4
    assert load_us == pytest.approx(400.0)
    desk.costs_us(disk=100.0, remote=1000.0)
    assert desk.fetching._best(desk.path, 8)[0] == 8
    desk.costs_us(disk=1e6, remote=1.0)
    assert desk.fetching._best(desk.path, 8)[0] == 0, "nobody gets to the remote run but through the slow one"
    desk.costs_us(disk=4500.0, remote=1.0)
    assert desk.fetching._best(desk.path, 8)[0] == 8, "the slow run pays with what comes behind it"


@pytest.mark.parametrize(
    ("read_us", "token_us", "patience"),
    [
        (1.0, 1000.0, PATIENCE_LEAST_S),
        (1e5, 5e4, PATIENCE_FACTOR * 0.4),
        (1.0, 1e6, PATIENCE_SHARE * 16.0),
        (1e5, 1e6, PATIENCE_SHARE * 16.0),
    ],
)
def test_patience_is_the_longest_of_three(read_us: float, token_us: float, patience: float) -> None:
    """Four chunks of four tokens: a least time, twice what was predicted, half of what computing them takes."""
    desk = Desk(4, token_us=token_us)
    desk.costs_us(read_us)
    waiting = group()
    assert desk.fetching.worth_waiting(waiting, desk.path, 10.0)
    assert desk.fetching.next_deadline(10.0) == pytest.approx(10.0 + patience)
    assert desk.fetching.worth_waiting(waiting, desk.path, 10.0 + 0.99 * patience)
    assert not desk.fetching.worth_waiting(waiting, desk.path, 10.0 + 1.01 * patience)
    assert desk.fetching.gave_up(waiting)
    assert not desk.fetching.worth_waiting(waiting, desk.path, 10.0), "for good"
    assert desk.fetching.next_deadline(10.0 + 2 * patience) == float("inf")


def test_patience_counts_only_what_is_waited_for() -> None:
    """The remote run is computed in any case: that it takes long is no reason to wait longer for the disk."""
    desk = Desk(4, 4, token_us=1e5)
    desk.costs_us(disk=100.0, remote=1e7)
    assert desk.fetching.worth_waiting(group(), desk.path, 10.0)
    assert desk.fetching.next_deadline(10.0) == pytest.approx(10.0 + PATIENCE_SHARE * 4 * CHUNK * 0.1)


def test_the_deadline_does_not_move_while_chunks_come() -> None:
    """Each time there are fewer left: a tier that trickles must not hold a request for ever."""
    desk = Desk(8, token_us=5e4)
    desk.costs_us(1e5)
    waiting, now = group(), 0.0
    assert desk.fetching.worth_waiting(waiting, desk.path, now)
    for left in range(7, 0, -1):
        now += 0.2
        assert desk.fetching.worth_waiting(waiting, desk.path[-left:], now)
    assert not desk.fetching.worth_waiting(waiting, desk.path[-1:], 1.7)


def test_a_wait_that_has_begun_does_not_end_because_reads_turn_out_slower() -> None:
    """What is being read would be computed as well. The run behind it is weighed by itself."""
    desk, waiting = Desk(4, 4), group()
    desk.costs_us(disk=3000.0, remote=1e6)
    assert desk.fetching.worth_waiting(waiting, desk.path, 10.0)
    deadline = desk.fetching.next_deadline(10.0)
    desk.costs_us(disk=50000.0, remote=1e6)
    for left in (8, 7, 5):
        assert desk.fetching.worth_waiting(waiting, desk.path[-left:], 10.01)
    assert desk.fetching.next_deadline(10.01) == deadline
    assert not desk.fetching.worth_waiting(waiting, desk.path[4:], 10.02), "the disk's are there"
    desk, waiting = Desk(4, 4), group()
    desk.costs_us(disk=3000.0)
    desk.tiers.health[TierKind.REMOTE].is_paused = True
    for _ in range(2):
        assert desk.fetching.worth_waiting(waiting, desk.path, 10.0), "what is behind it was never waited for"
        desk.costs_us(disk=50000.0)
    desk, waiting = Desk(4), group()
    assert desk.fetching.worth_waiting(waiting, desk.path, 10.0)
    desk.tiers.health[TierKind.DISK].is_paused = True
    assert not desk.fetching.worth_waiting(waiting, desk.path, 10.01), "out of reach"


def test_a_refusal_for_cost_lowers_what_reads_are_thought_to_cost() -> None:
    """By a fifth, once for each request: nothing else would correct it, as nothing is read."""
    desk = Desk(4, token_us=300.0)
    desk.costs_us(5000.0)
    health, refused = desk.tiers.health[TierKind.DISK], group()
    for _ in range(3):
        assert not desk.fetching.worth_waiting(refused, desk.path, 0.0)
    assert health.read_us == pytest.approx(4000.0)
    for number in range(2, 8):
        assert not desk.fetching.worth_waiting(group(number), desk.path, 0.0)
    assert health.read_us == pytest.approx(5000.0 * 0.8**7)
    assert desk.fetching.worth_waiting(group(8), desk.path, 0.0), "1049 µs against 1200: it is tried again"
    assert health.read_us == pytest.approx(5000.0 * 0.8**7), "who waits does not doubt"


def test_doubt_ends_at_what_was_assumed_at_first() -> None:
    desk = Desk(4, token_us=1.0)
    desk.costs_us(disk=600.0, remote=1e6)
    for number in range(1, 5):
        assert not desk.fetching.worth_waiting(group(number), desk.path, 0.0)
    assert desk.tiers.health[TierKind.DISK].read_us == READ_US[TierKind.DISK]
    assert desk.tiers.health[TierKind.REMOTE].read_us == pytest.approx(1e6 * 0.8**4)


def test_doubt_ends_at_the_least_that_was_measured_and_old_estimates_are_doubted() -> None:
    """A disk that is faster than assumed, and busy for a while. 400 µs are less than was assumed, and too many."""
    desk = Desk(4, token_us=60.0)
    health, now = desk.tiers.health[TierKind.DISK], 0.0

    def reads(cost_us: float) -> None:
        nonlocal now
        for _ in range(60):
            health.ordered(False)
            now += cost_us / 1e6
            health.succeeded(False, now - cost_us / 1e6, now, cost_us)

    reads(100.0)
    usual = health.read_us
    assert usual == pytest.approx(100.0, rel=0.1)
    reads(400.0)
    slow = health.read_us
    assert not desk.fetching.worth_waiting(group(1), desk.path, now)
    assert usual < health.read_us == pytest.approx(0.8 * slow)
    for number in range(2, 20):
        desk.fetching.worth_waiting(group(number), desk.path, now)
    assert desk.fetching.worth_waiting(group(20), desk.path, now)
    reads(400.0)
    for doubts in range(10):
        assert health.read_us == pytest.approx(max(usual, slow * 0.8**doubts), rel=0.01)
        for share in (0.5, 0.4, 0.2):
            assert health.read_us == pytest.approx(max(usual, slow * 0.8**doubts), rel=0.01)
            now += share * DOUBT_AGAIN_S
            health.look(now)
    assert health.read_us == usual


def test_a_paused_tier_is_not_waited_for() -> None:
    desk = Desk(4)
    desk.costs_us(1.0)
    for _ in range(3):
        desk.tiers.health[TierKind.DISK].ordered(False)
        desk.tiers.health[TierKind.DISK].failed(False, 0.0, "gone")
    assert not desk.fetching.worth_waiting(group(), desk.path, 0.0)


def test_chunks_are_fetched_while_their_request_waits_and_not_after() -> None:
    desk = Desk(3)
    waiting = group()
    desk.fetching.expect(waiting, desk.path)
    moves = desk.tiers.moves(0.0)
    assert [move.chunk for move in moves] == desk.path
    desk.tiers.done(moves[0].id, MoveStatus.DONE, 0.1)
    desk.fetching.done(waiting)
    desk.fetching.settle()
    assert all(not node.wants for node in desk.path)
    other = Desk(3)
    other.fetching.expect(waiting, other.path)
    other.fetching.done(waiting)
    other.fetching.settle()
    assert not other.tiers.moves(0.0)


def test_where_a_chunk_came_from_is_remembered() -> None:
    desk = Desk(1, 1)
    waiting = group()
    desk.fetching.expect(waiting, desk.path)
    for move in desk.tiers.moves(0.0):
        desk.tiers.done(move.id, MoveStatus.DONE, 0.1)
    assert all(node.host_ready for node in desk.path)
    origins = [desk.fetching.origin(waiting, node, TierKind.HOST) for node in desk.path]
    assert origins == [TierKind.DISK, TierKind.REMOTE]
    assert desk.fetching.origin(group(5), desk.path[0], TierKind.HOST) == TierKind.HOST
    desk.fetching.done(waiting)
    desk.fetching.settle()
    assert desk.fetching.origin(waiting, desk.path[0], TierKind.HOST) == TierKind.HOST


def test_a_probe_is_waited_for_a_moment_only() -> None:
    desk, waiting = Desk(1), group()
    assert not desk.fetching.is_probing(waiting, 0.0)
    desk.fetching.probing(waiting, 3.0)
    assert desk.fetching.is_probing(waiting, 3.0 + 0.9 * PROBE_PATIENCE_S)
    assert desk.fetching.next_deadline(3.0) == 3.0 + PROBE_PATIENCE_S
    assert not desk.fetching.is_probing(waiting, 3.0 + PROBE_PATIENCE_S)
    desk.fetching.probing(waiting, 5.0)
    desk.fetching.probed(waiting)
    assert not desk.fetching.is_probing(waiting, 5.0)
