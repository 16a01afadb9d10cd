"""What is learnt of sessions that come back, and which chunks are evicted first because of it."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from kvstore.paths import grow
from seeds import seeds

from trunkline.kvstore.chunks import TieredChunk
from trunkline.kvstore.directory import Directory
from trunkline.kvstore.next_use import TURNS_PER_CHUNK, NextUse, Turn, TurnEnd, wait_of
from trunkline.kvstore.return_times import CURVES_MAX, EDGES, ReturnTimes, interval_of
from trunkline.kvstore.tier_moves import MoveStatus
from trunkline.kvstore.tier_policy import DirectoryConfig, EvictionPolicy


def teach(times: ReturnTimes, kind: tuple[str, ...], gap: float, count: int = 200) -> None:
    for _ in range(count):
        for interval in range(interval_of(gap) + 1):
            times.reached(kind, interval)
        times.came(kind, interval_of(gap))


def end(arrived: float, prompt: int, ended: str = "", *, last: bool = False, expected: float = 0.0) -> TurnEnd:
    """A turn whose answer has a token more than its prompt's full chunks of ten."""
    return TurnEnd(
        arrived=arrived,
        prompt_chunks=prompt,
        prompt_tokens=10 * prompt,
        output_tokens=1,
        ended=ended,
        is_last=last,
        expected_s=expected,
    )


def nothing(_: TieredChunk) -> None: ...


def test_what_always_comes_back_at_one_time_is_awaited_for_the_time_that_is_left() -> None:
    times = ReturnTimes()
    teach(times, ("slow tool",), 100.0)
    for age in (0.0, 10.0, 60.0):
        left = 100.0 - EDGES[interval_of(age)]
        assert times.wait(("slow tool",), interval_of(age)) == pytest.approx(left, rel=0.35)


def test_the_wait_grows_when_the_usual_time_is_past() -> None:
    times = ReturnTimes()
    teach(times, ("tool",), 6.0, 180)
    teach(times, ("tool",), 5000.0, 20)
    soon, late = times.wait(("tool",), interval_of(5.0)), times.wait(("tool",), interval_of(30.0))
    assert soon < 10.0 < 1000.0 < late


def test_a_kind_that_was_seen_seldom_is_judged_by_the_coarser_one() -> None:
    times = ReturnTimes()
    teach(times, ("a", "fast"), 3.0)
    teach(times, ("a", "slow"), 1000.0)
    assert times.wait(("a", "fast"), 0) < 10.0 < 50.0 < times.wait(("a", "slow"), 0)
    assert times.wait(("a", "fast"), 0) < times.wait(("a", "new"), 0) < times.wait(("a", "slow"), 0)


def test_what_is_long_ago_counts_less() -> None:
    times = ReturnTimes()
    teach(times, ("tool",), 1000.0, 3000)
    teach(times, ("tool",), 3.0, 6000)
    assert times.wait(("tool",), 0) < 6.0


def test_curves_are_bounded() -> None:
    times = ReturnTimes()
    for number in range(2 * CURVES_MAX):
        times.reached((f"tool {number}",), 0)
    assert len(times) == CURVES_MAX


def test_a_turn_is_awaited_until_a_longer_prompt_with_its_prompt_comes() -> None:
    uses = NextUse(nothing)
    first = grow("session", 5)
    turn = uses.ended(first, end(0.0, 4), 2.0)
    assert turn is not None
    other = uses.ended(grow("other", 6, first[:4]), end(3.0, 4), 3.5)
    assert turn.wait < math.inf, "the same instructions, another session"
    assert first[0].turns == (turn, other)
    assert other is not None
    uses.ended(grow("longer", 8, first[:4]), end(12.0, 7), 13.0)
    assert other.wait == math.inf
    assert turn.wait < math.inf, "the name was the other's by then"


def test_a_session_that_returns_replaces_its_turn_and_is_counted() -> None:
    uses = NextUse(nothing)
    first = grow("session", 5)
    turn = uses.ended(first, end(0.0, 4), 2.0)
    longer = grow("session", 9, first)
    following = uses.ended(longer, end(10.0, 8), 11.0)
    assert turn is not None
    assert turn.wait == math.inf
    assert all(chunk.turns == (following,) for chunk in longer)
    assert following is not None
    assert 2.0 < 2.0**following.mean_gap < 10.0


def test_of_two_turns_with_one_prompt_both_grow_old() -> None:
    uses = NextUse(nothing)
    first = grow("session", 4)
    turns = [uses.ended(grow(f"answer {number}", 6, first), end(0.0, 4), 1.0) for number in range(2)]
    uses.tick(5000.0)
    for turn in turns:
        assert turn is not None
        assert turn.wait > 1000.0


def test_what_an_edit_left_behind_and_what_was_closed_is_awaited_no_more() -> None:
    uses = NextUse(nothing)
    first = grow("session", 6)
    uses.ended(first, end(0.0, 4), 2.0)
    edited = grow("edited", 9, first[:4])
    turn = uses.ended(edited, end(5.0, 7), 6.0)
    assert [wait_of(chunk) < math.inf for chunk in first] == [True] * 4 + [False] * 2
    assert turn is not None
    uses.close(turn)
    assert all(wait_of(chunk) == math.inf for chunk in [*first, *edited])
    assert not len(uses)
    assert uses.ended(grow("last", 3), end(7.0, 2, last=True), 8.0) is None


def test_a_session_that_went_on_elsewhere_is_awaited_no_more_and_was_learnt_from() -> None:
    uses = NextUse(nothing)
    first = grow("session", 5)
    turn, other = uses.ended(first, end(0.0, 4), 2.0), uses.ended(grow("other", 5, first[:2]), end(0.0, 5), 2.0)
    assert turn is not None
    assert other is not None
    names = [chunk.name for chunk in first[2:]]
    uses.went_on(names, 40, 9.0)
    assert len(uses) == 2, "that prompt is no longer than the turn's: another session's"
    uses.went_on(names[2:], 70, 9.0)
    assert len(uses) == 2, "the last chunk of its prompt is not named"
    uses.went_on(names, 70, 9.0)
    assert turn.wait == math.inf > other.wait
    assert 6.0 < 2.0**turn.mean_gap < 9.0
    assert [wait_of(chunk) < math.inf for chunk in first] == [True] * 2 + [False] * 3


def test_a_client_that_says_when_it_returns_is_believed_until_then() -> None:
    uses = NextUse(nothing)
    path = grow("session", 3)
    turn = uses.ended(path, end(0.0, 2, expected=300.0), 0.0)
    assert turn is not None
    assert turn.wait == 300.0
    uses.tick(200.0)
    assert turn.wait == pytest.approx(300.0 - EDGES[interval_of(200.0)])
    uses.tick(400.0)
    assert turn.wait == uses.times.wait(turn.kind, interval_of(400.0))


def test_how_a_turn_ended_may_be_told_later() -> None:
    uses = NextUse(nothing)
    for number in range(60):
        tool, gap = ("fast", 3.0) if number % 2 else ("slow", 2000.0)
        path = grow(f"session {number}", 3)
        uses.ended(path, end(number * 5000.0, 2, tool), number * 5000.0)
        uses.ended(
            grow(f"session {number}", 6, path), end(number * 5000.0 + gap, 5, "text"), number * 5000.0 + gap
        )
    turn = uses.ended(grow("new", 3), end(1e6, 2), 1e6)
    assert turn is not None
    unknown = turn.wait
    uses.told(turn, "slow")
    slow = turn.wait
    uses.told(turn, "fast")
    assert turn.wait < unknown < slow


STEPS = itertools.count(1)


def stored(directory: Directory[TieredChunk], path: list[TieredChunk]) -> None:
    for chunk in path:
        assert directory.save(chunk, next(STEPS)) is not None


def test_evicted_first_is_what_comes_back_last_its_end_first() -> None:
    directory: Directory[TieredChunk] = Directory(DirectoryConfig(host_slots=6, policy=EvictionPolicy.PREDICTED))
    soon, late = grow("soon", 3), grow("late", 3)
    directory.next_use.ended(soon, end(0.0, 2, expected=30.0), 1.0)
    directory.next_use.ended(late, end(0.0, 2, expected=3000.0), 2.0)
    for path in (soon, late):
        directory.used(path, 2.0)
        stored(directory, path)
    new = grow("new", 2)
    stored(directory, new)
    assert directory.lost() == [late[2], late[1]], "used last, but needed later"


def test_time_that_goes_by_changes_who_is_evicted() -> None:
    directory: Directory[TieredChunk] = Directory(DirectoryConfig(host_slots=4, policy=EvictionPolicy.PREDICTED))
    missed, due = grow("missed", 2), grow("due", 2)
    directory.next_use.ended(missed, end(0.0, 1, expected=20.0), 0.0)
    directory.next_use.ended(due, end(0.0, 1, expected=2000.0), 0.0)
    stored(directory, missed)
    stored(directory, due)
    directory.moves(1500.0)
    stored(directory, grow("new", 1))
    assert directory.lost() == [missed[1]], "it should have come long ago"


def test_a_path_leaves_host_memory_from_its_end_on_although_the_disk_has_it() -> None:
    config = DirectoryConfig(host_slots=5, disk_slots=9, host_free=1, policy=EvictionPolicy.PREDICTED)
    directory: Directory[TieredChunk] = Directory(config)
    missed, due = grow("missed", 2), grow("due", 2)
    directory.next_use.ended(missed, end(0.0, 1, expected=20.0), 0.0)
    directory.next_use.ended(due, end(0.0, 1, expected=2000.0), 0.0)
    for path in (missed, due):
        stored(directory, path)
    for move in directory.moves(1.0):
        directory.done(move.id, MoveStatus.DONE, 1.0)
    directory.next_use.tick(1500.0)
    stored(directory, grow("new", 3))
    assert [chunk.host_ready for chunk in (*missed, *due)] == [False, False, True, True]


@pytest.mark.parametrize("seed", seeds(3))
def test_random_sessions(seed: int) -> None:
    """Sessions that share their beginnings come, go on, are edited and vanish: what is evicted is always the chunk
    with the smallest key of all that may go."""
    rng = random.Random(seed)
    directory: Directory[TieredChunk] = Directory(DirectoryConfig(host_slots=40, policy=EvictionPolicy.PREDICTED))
    uses, key = directory.next_use, directory.copies.shares.key
    shared = grow("system", 3)
    paths: dict[int, list[TieredChunk]] = {}
    held: dict[TieredChunk, None] = {}
    now, turns = 0.0, list[Turn]()
    for step in range(1, 600):
        now += rng.expovariate(0.5)
        number = rng.randrange(12)
        before = [chunk for chunk in paths.get(number, shared) if not chunk.is_forgotten]
        if rng.random() < 0.1:
            before = before[: rng.randint(0, len(before))]
        path = grow(f"{number} {step}", len(before) + rng.randint(1, 4), before)
        if any(chunk.is_forgotten for chunk in path):
            continue
        prompt = rng.randint(0, len(path))
        turn = uses.ended(path, end(now - rng.random(), prompt, rng.choice("ab"), last=rng.random() < 0.05), now)
        if turn is not None:
            turns.append(turn)
        if turns and rng.random() < 0.1:
            uses.close(turns.pop(rng.randrange(len(turns))))
        if turns and rng.random() < 0.1:
            uses.told(turns.pop(rng.randrange(len(turns))), "c")
        if rng.random() < 0.1:
            uses.went_on(
                [chunk.name for chunk in rng.choice(list(paths.values()))[-4:]] if paths else [], 1 << 20, now
            )
        directory.used(path, now)
        paths[number] = path
        for chunk in path:
            if chunk.host_ready:
                continue
            leaves = [other for other in held if not other.stored_below]
            least = min(map(key, leaves), default=())
            if directory.save(chunk, next(STEPS)) is None:
                break
            held[chunk] = None
            for lost in directory.lost():
                assert key(lost) == least, "another chunk would have had to go"
                del held[lost]
                directory.forget(lost)
        for chunk in path:
            directory.left_device(chunk)
            assert len(chunk.turns) <= TURNS_PER_CHUNK
            assert wait_of(chunk) >= 0.0
        directory.check()
        for chunk in reversed([c for c in path if not (c.is_stored or c.stored_below or c.is_forgotten)]):
            directory.forget(chunk)
        assert all(turn.wait < math.inf for turn in uses._away)
        assert len(uses._by_name) <= len(uses) <= len(uses._due)
