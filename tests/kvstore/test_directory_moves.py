"""The directory, rule by rule: moves and what becomes of them, lifetimes, restarts, statistics."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from seeds import seeds
from simulation.directory_bench import Bench, Chunk, where

from trunkline.kvstore.chunks import NO_SLOT, SlotId
from trunkline.kvstore.directory import Directory
from trunkline.kvstore.tier import TierKind
from trunkline.kvstore.tier_moves import Move, MoveStatus
from trunkline.kvstore.tier_policy import DirectoryConfig


def test_write_behind_fills_free_disk_slots_only() -> None:
    bench = Bench(8, 2, write_behind=True)
    chunks = [bench.path(name)[0] for name in "abcd"]
    assert bench.save(*chunks)
    assert bench.settle() == [">a0", ">b0"]
    assert where(*chunks) == "bbhh"
    events = bench.directory.index_events()
    assert [(e.chunk, e.generation) for e in events] == [(chunks[0], 1), (chunks[1], 1)]
    bench.directory.forget(chunks[0])
    assert bench.settle() == [">c0"]
    freed, stored = bench.directory.index_events()
    assert (freed.chunk, freed.slot) == (None, events[0].slot)
    assert (stored.chunk, stored.slot, stored.generation) == (chunks[2], events[0].slot, 2)


def test_who_comes_back_at_once_does_not_wait_beside_writes() -> None:
    bench = Bench(16, 16, write_behind=True, write_pause_s=0.25, write_within_s=3.0)
    behind, path = bench.directory.mover.behind, bench.path("a", 4)

    def orders(now: float, *, is_busy: bool) -> int:
        bench.now = now
        behind.note_requests(now, is_busy=is_busy)
        moves = bench.orders()
        bench.end(moves)
        return len(moves)

    assert bench.save(path[0])
    assert orders(10.0, is_busy=True) == 0
    assert behind.next_time(10.0) == math.inf, "steps come in any case"
    assert orders(11.0, is_busy=False) == 0, "a request has just ended"
    assert behind.next_time(11.0) == 11.25
    assert orders(11.2, is_busy=True) == 0, "the next one is here"
    assert bench.save(path[1])
    assert orders(12.9, is_busy=True) == 0
    assert orders(13.0, is_busy=True) == 1, "the first chunk has waited for long enough"
    assert orders(14.0, is_busy=False) == 0
    assert behind.next_time(14.0) == 14.25
    assert orders(14.25, is_busy=False) == 1
    assert behind.next_time(14.25) == math.inf, "nothing is left"
    assert bench.save(path[2])
    assert orders(20.0, is_busy=False) == 1, "long since the last request"
    assert bench.save(path[3])
    behind.is_hurried = True
    assert orders(20.0, is_busy=True) == 1
    assert where(*path) == "bbbb"


def test_chunks_for_which_a_tier_has_no_room_wake_nobody() -> None:
    bench = Bench(16, 1, write_behind=True, write_pause_s=0.25, write_within_s=3.0)
    behind = bench.directory.mover.behind
    assert bench.save(*bench.path("a", 2))
    bench.now = 10.0
    assert bench.settle() == [">a0"]
    assert behind.next_time(10.0) == math.inf, "a1's time is over"


def test_many_chunks_do_not_wait_for_a_pause() -> None:
    """What host memory evicts before it is written would be lost."""
    bench = Bench(16, 16, write_behind=True, write_pause_s=0.25, write_within_s=3.0)
    path = bench.path("a", 5)
    for count, chunk in enumerate(path, 1):
        assert bench.save(chunk)
        bench.directory.mover.behind.note_requests(bench.now, is_busy=True)
        moves = bench.orders()
        bench.end(moves)
        assert len(moves) == (count in (3, 4, 5)), "an eighth may wait"


def test_what_a_probe_finds_in_a_tier_is_not_written_there() -> None:
    bench = Bench(8, 0, remote=True, write_behind=True)
    path = bench.path("a", 3)
    assert bench.save(*path)
    bench.directory.add_remote(path[1])
    moves = bench.orders()
    assert [move.chunk for move in moves if move.is_write] == [path[0], path[2]]
    bench.end(moves)


def test_orders_are_bounded_and_reads_come_first() -> None:
    bench = Bench(16, 32, write_behind=True, reads_in_flight=3, writes_in_flight=2)
    dirty, cold = bench.path("d", 6), bench.path("c", 6)
    bench.on_disk(*cold)
    assert bench.save(*dirty)
    bench.directory.want(1, (1.0,), cold)
    moves = bench.orders()
    assert [m.is_write for m in moves] == [False] * 3 + [True] * 2
    assert bench.orders() == []
    bench.end(moves[:1])
    assert [m.is_write for m in bench.orders()] == [False]


def test_what_a_read_does_not_bring_back_is_forgotten() -> None:
    bench = Bench(4, 4)
    path = bench.path("a", 2)
    bench.on_disk(*path)
    bench.directory.want(1, (1.0,), path)
    moves = bench.orders()
    bench.end(moves[:1], MoveStatus.MISS)
    bench.end(moves[1:])
    assert where(*path) == "-b"
    assert bench.directory.lost() == [path[0]]
    assert [e.chunk for e in bench.directory.index_events()] == [None]
    assert bench.directory.predicted_us(path) == math.inf
    assert bench.directory.stats()[TierKind.DISK].totals.failures == 1


def test_a_failing_tier_is_left_alone_for_longer_and_longer_and_loses_nothing() -> None:
    bench = Bench(4, 8, write_behind=True)
    chunks = bench.path("a", 3)
    assert bench.save(*chunks)
    moves = bench.orders()
    assert len(moves) == 3
    for move in moves:
        bench.directory.done(move.id, MoveStatus.FAILED, bench.now, detail="no space left")
    bench.directory.check()
    assert where(*chunks) == "hhh"
    assert bench.directory.stats()[TierKind.DISK].problem == "no space left"
    pauses = []
    for _ in range(3):
        start = bench.now
        while not (moves := bench.orders()):
            bench.now += 0.25
        pauses.append(bench.now - start)
        assert len(moves) == 1, "one at a time until it works"
        bench.end(moves, MoveStatus.FAILED)
    assert pauses == [1.0, 2.0, 4.0]
    bench.now += 10.0
    bench.settle()
    assert where(*chunks) == "bbb"
    assert bench.directory.stats()[TierKind.DISK].problem == ""


def test_a_copy_that_cannot_be_read_is_given_up_though_the_tier_works() -> None:
    bench = Bench(4, 8)
    bad, good = bench.path("b"), bench.path("g", 3)
    bench.on_disk(*bad, *good)
    for i, chunk in enumerate(good):
        bench.directory.want(1, (1.0,), bad)
        bench.end(bench.orders(), MoveStatus.FAILED)
        bench.directory.unwant(1)
        assert bad[0].disk_ready == (i < 2)
        bench.directory.want(2, (2.0,), [chunk])
        bench.settle()
        bench.directory.unwant(2)
    assert bench.directory.lost() == bad


def test_a_forgotten_chunk_s_slots_are_free_when_its_moves_have_ended() -> None:
    bench = Bench(2, 2, write_behind=True)
    (a,) = bench.path("a")
    assert bench.save(a)
    moves = bench.orders()
    bench.directory.forget(a)
    bench.directory.check()
    assert bench.directory.copies.host.free_count == bench.directory.copies.disk.free_count == 1
    bench.end(moves)
    assert bench.directory.copies.host.free_count == bench.directory.copies.disk.free_count == 2
    assert bench.directory.index_events() == []
    assert bench.directory.lost() == []


def test_pins_keep_chunks_in_the_system_up_to_a_quota() -> None:
    bench = Bench(2, 4, host_free=1, pin_quota=0.5)
    pinned, rest = bench.path("p", 2), [bench.path(name)[0] for name in "abcdef"]
    assert not bench.directory.pin(rest[:3])
    assert bench.directory.pin(pinned)
    assert not bench.directory.pin(rest[:1])
    assert bench.save(*pinned)
    for chunk in rest:
        bench.settle()
        assert bench.save(chunk)
    assert where(*pinned) == "dd"
    bench.directory.keep(pinned, 1.0)
    assert bench.directory.expire(100.0) == []
    bench.directory.unpin(pinned)
    assert bench.directory.expire(100.0) == [pinned[1], pinned[0]]
    assert bench.directory.pin(rest[-2:])


def test_time_over_frees_a_path_from_its_end_unless_somebody_needs_it() -> None:
    bench = Bench(8, 8)
    path, other = bench.path("a", 3), bench.path("b", 2)
    assert bench.save(*path, *other)
    bench.directory.keep(path, 10.0)
    bench.directory.keep(path[:1], 20.0)
    bench.directory.keep(other, math.inf)
    bench.directory.want(1, (1.0,), [path[2]])
    assert bench.directory.expire(15.0) == []
    bench.directory.unwant(1)
    assert bench.directory.expire(9.0) == []
    assert bench.directory.expire(15.0) == [path[2], path[1]]
    assert where(*path, *other) == "h--hh"
    bench.directory.keep(path[:1], 12.0)
    assert bench.directory.expire(19.9) == [], "who says later wins"
    assert bench.directory.expire(1e9) == [path[0]]
    assert bench.directory.stats()[TierKind.HOST].totals.evictions == 3


def test_the_remote_tier_is_written_behind_read_and_bounded() -> None:
    bench = Bench(4, 0, remote=True, write_behind=True, remote_known=1)
    path = bench.path("a", 2)
    assert bench.save(*path)
    assert bench.settle() == [">a0", ">a1"]
    for chunk in path:
        bench.directory.mover.release_host(chunk)
    bench.directory.check()
    assert where(*path) == "rr"
    bench.directory.want(1, (1.0,), path)
    assert bench.settle() == ["<a0"], "only one chunk that nobody else has is remembered, the end of the path not"
    assert bench.directory.lost() == [path[1]]
    bench.directory.add_remote(path[1])
    assert bench.settle() == ["<a1"]


def test_a_restart_finds_what_was_on_disk_and_uses_new_generations() -> None:
    bench = Bench(2, 2, first_generation=1 << 32)
    path = bench.path("a", 2)
    assert bench.directory.restore(path[1], SlotId(1), 5, 3.0)
    assert not bench.directory.restore(path[0], path[1].disk, 6, 3.0), "taken"
    assert not bench.directory.restore(path[0], SlotId(9), 6, 3.0), "no such slot"
    bench.directory.check()
    assert path[0].stored_below == 1
    bench.directory.want(1, (1.0,), path[1:])
    (move,) = bench.orders()
    assert (move.slot, move.generation) == (1, 5)
    bench.end([move])
    (b,) = bench.path("b")
    assert bench.save(b)
    bench.settle()
    assert all(e.generation > 1 << 32 for e in bench.directory.index_events() if e.chunk is not None)


def test_a_prediction_counts_what_is_missing_and_what_goes_first() -> None:
    bench = Bench(8, 8, reads_in_flight=1)
    path = bench.path("a", 4)
    bench.on_disk(*path)
    before = bench.directory.predicted_us(path)
    assert 0.0 < before < math.inf
    bench.directory.want(1, (1.0,), path)
    for _ in range(60):  # a read takes 10 ms of this clock
        for move in bench.orders():
            bench.now += 0.01
            bench.directory.done(move.id, MoveStatus.DONE, bench.now, elapsed_us=9000.0)
        if path[3].host_ready:
            bench.directory.unwant(1)
            for chunk in path:
                bench.directory.mover.release_host(chunk)
            bench.directory.want(1, (1.0,), path)
    assert 2 * bench.directory.predicted_us(path[:2]) == pytest.approx(
        bench.directory.predicted_us(path), rel=0.01
    )
    assert bench.directory.predicted_us(path) == pytest.approx(40_000.0, rel=0.3)
    path[0].place()
    assert bench.directory.predicted_us(path[:1]) == 0.0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"disk_slots": 4}, "needs host slots"),
        ({"remote": True}, "needs host slots"),
        ({"host_slots": -1}, "negative"),
        ({"reads_in_flight": 0}, "at least 1"),
        ({"pin_quota": 1.5}, "share"),
        ({"write_pause_s": 1.0, "write_within_s": 0.5}, "the pause"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(options: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Directory(DirectoryConfig(**options))  # type: ignore[arg-type]


def test_nothing_is_anywhere_without_slots() -> None:
    bench = Bench(0)
    (a,) = bench.path("a")
    assert not bench.save(a)
    assert not bench.directory.claim(a)
    assert bench.settle() == []
    assert bench.directory.stats() == {}
    assert a.host == NO_SLOT


def test_history_stays_on_disk_when_host_memory_is_small_beside_it() -> None:
    """Else each turn would write all of it again."""
    left = {}
    for exclusive in (True, False):
        bench = Bench(4, 4, host_free=2, exclusive=exclusive)
        wanted, old = bench.path("w", 2), bench.path("o", 2)
        bench.on_disk(*wanted, *old)
        bench.directory.want(1, (1.0,), wanted)
        bench.settle()
        fresh = bench.path("f", 2)
        assert bench.save(*fresh)
        bench.settle()
        left[exclusive] = where(*wanted, *old, *fresh)
    assert left == {True: "hhdddd", False: "bb--dd"}


def test_a_chunk_for_which_there_will_be_no_room_is_not_said_to_be_coming() -> None:
    bench = Bench(2, 8, host_free=0)
    (cold,), kept = bench.path("c"), bench.path("k", 2)
    bench.on_disk(cold)
    assert bench.save(*kept)
    assert all(bench.directory.claim(chunk) for chunk in kept)
    bench.directory.want(1, (1.0,), [cold])
    assert bench.settle() == []
    assert not bench.directory.is_coming(cold)
    bench.directory.unclaim(kept[1])
    assert bench.settle() == [">k1", "<c0"]
    assert where(cold, *kept) == "bhd"


def test_what_is_still_to_be_written_is_written_before_host_memory_drops_it() -> None:
    """The disk has it, so nothing is lost here; but other groups look for it in the remote tier."""
    bench = Bench(9, 16, remote=True, write_behind=True, host_free=2, write_pause_s=1.0, write_within_s=9.0)
    path = bench.path("a", 8)
    bench.on_disk(*path)
    for chunk in path[:7]:
        bench.directory.add_remote(chunk)
    assert bench.save(*path)
    bench.directory.mover.behind.note_requests(bench.now, is_busy=True)
    moves = bench.orders()
    assert [(move.chunk, move.tier, move.evicts) for move in moves] == [(path[7], TierKind.REMOTE, True)]
    bench.end(moves)
    assert where(*path) == "bbbbbbbb"
    assert bench.orders() == []
    assert where(*path) == "bbbbbbbd"
    assert path[7].remote


@pytest.mark.parametrize("host_free", [1, 2, 3, 4])
def test_a_remote_tier_that_takes_its_time_keeps_no_fetch_waiting(host_free: int) -> None:
    """Host memory is full of what is still to be written there, and the disk has all of it."""
    times = {"write_pause_s": 1.0, "write_within_s": 9.0}
    bench = Bench(16, 64, remote=True, write_behind=True, host_free=host_free, **times)
    held, wanted = bench.path("a", 16), bench.path("b", 8)
    bench.on_disk(*held, *wanted)
    assert bench.save(*held)
    bench.directory.mover.behind.note_requests(bench.now, is_busy=True)
    bench.directory.want(1, (0.0,), wanted)
    for _ in range(8):
        bench.end([move for move in bench.orders() if move.tier is TierKind.DISK])
    assert where(*wanted) == "bbbbbbbb"


@pytest.mark.parametrize("seed", seeds(20))
def test_what_left_host_memory_too_early_is_written_when_it_is_read_again(seed: int) -> None:
    """Each chunk once to each tier, however slow one of them is and whichever chunks host memory drops meanwhile.
    A gap would hide all of the path below it from other groups. What another group has written to the remote tier
    is written to the disk only."""
    rng = random.Random(seed)
    times = {"write_pause_s": 0.25, "write_within_s": 1.0}
    limits = {"host_free": rng.randint(1, 2), "writes_in_flight": rng.randint(1, 3)}
    bench = Bench(rng.randint(5, 8), 64, remote=True, write_behind=True, **times, **limits)
    paths = [bench.path(name, 3) for name in "abcdefgh"]
    under_way, written = list[Move[Chunk]](), Counter[tuple[TierKind, Chunk]]()
    foreign = [chunk for path in rng.sample(paths, 3) for chunk in path[: rng.randint(1, 3)]]
    for chunk in foreign:
        bench.directory.add_remote(chunk)

    def order(*, is_busy: bool) -> None:
        bench.directory.mover.behind.note_requests(bench.now, is_busy=is_busy)
        under_way.extend(bench.orders())
        rng.shuffle(under_way)

    def end(chance: dict[TierKind, float]) -> None:
        for move in [move for move in under_way if rng.random() < chance[move.tier]]:
            under_way.remove(move)
            bench.end([move])
            written[move.tier, move.chunk] += move.is_write

    for _ in range(200):
        bench.now += rng.choice([0.01, 0.1])
        path = rng.choice(paths)
        new = next((chunk for chunk in path if not chunk.is_stored), None)
        if new is not None and rng.random() < 0.5:
            bench.save(new)
        elif rng.random() < 0.3:
            bench.directory.want(1, (bench.now,), [chunk for chunk in path if chunk.is_stored])
        order(is_busy=rng.random() < 0.8)
        end({TierKind.DISK: 0.8, TierKind.REMOTE: 0.1})
    for number, path in enumerate(paths, 2):
        bench.directory.want(number, (bench.now,), [chunk for chunk in path if chunk.is_stored])
        bench.directory.unwant(number - 1)
        for _ in range(60):
            bench.now += 0.1
            order(is_busy=False)
            end({TierKind.DISK: 1.0, TierKind.REMOTE: 1.0})
    stored = [chunk for path in paths for chunk in path if chunk.is_stored]
    assert len(stored) > 12
    assert [chunk for chunk in stored if not (chunk.disk_ready and chunk.remote)] == []
    assert set(written.values()) <= {0, 1}
    assert not any(written[TierKind.REMOTE, chunk] for chunk in foreign)


def test_what_host_memory_held_wrongly_is_written_when_the_disk_has_given_it() -> None:
    """The disk had it already when the write to the remote tier found another chunk's bytes in its slot."""
    bench = Bench(8, 16, remote=True, write_behind=True)
    (chunk,) = bench.path("a")
    assert bench.save(chunk)
    moves = {move.tier: move for move in bench.orders()}
    bench.end([moves[TierKind.DISK]])
    bench.end([moves[TierKind.REMOTE]], MoveStatus.MISS)
    assert where(chunk) == "d"
    assert bench.directory.unwritten() == {chunk.name}
    bench.directory.want(1, (0.0,), [chunk])
    assert bench.settle() == ["<a0", ">a0"]
    assert chunk.remote


def test_what_a_probe_has_found_is_not_written_again() -> None:
    bench = Bench(8, 16, remote=True, write_behind=True)
    owed, found = bench.path("a", 2)
    bench.on_disk(owed, found)
    for chunk in (owed, found):
        bench.directory.owe(chunk)
    bench.directory.add_remote(found)
    assert bench.directory.unwritten() == {owed.name}


def test_writes_behind_of_what_the_disk_has_keep_no_fetch_waiting() -> None:
    """The remote tier has as many in flight as it may, more than slots are to be kept free, and takes its time.
    Meanwhile steps save chunks into the free slots."""
    times = {"write_pause_s": 1.0, "write_within_s": 9.0}
    bench = Bench(32, 64, remote=True, write_behind=True, host_free=2, writes_in_flight=4, **times)
    held, saved, wanted = bench.path("a", 30), bench.path("b", 2), bench.path("c", 8)
    bench.on_disk(*held, *saved, *wanted)
    assert bench.save(*held)
    bench.orders()
    bench.now += 2.0
    assert bench.orders() == []
    assert bench.directory.health[TierKind.REMOTE].writing == 4
    assert bench.save(*saved)
    bench.directory.want(1, (0.0,), wanted)
    for _ in range(8):
        bench.end([move for move in bench.orders() if move.tier is TierKind.DISK])
    assert where(*wanted) == "bbbbbbbb"
