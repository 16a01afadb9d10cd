"""What is read from the remote tier is written to the disk if that lacks it."""

from __future__ import annotations

from simulation.directory_bench import Bench, where

from trunkline.kvstore.tier import TierKind


def test_what_only_the_remote_tier_has_is_on_disk_once_it_was_read() -> None:
    """Another group has computed `a`; the disk has lost `b1`. They travel once."""
    bench = Bench(8, 16, remote=True, write_behind=True)
    path, other = bench.path("a", 3), bench.path("b", 2)
    bench.on_disk(*other)
    for chunk in (*path, *other):
        bench.directory.add_remote(chunk)
    bench.directory.copies.drop_disk(other[1])
    assert where(*path, *other) == "rrrdr"
    for job, moves in enumerate([["<a0", "<a1", "<a2", ">a0", ">a1", ">a2"], ["<a0", "<a1", "<a2"]]):
        bench.directory.want(job, (float(job),), path)
        assert bench.settle() == moves
        assert where(*path) == "bbb"
        bench.directory.unwant(job)
        for chunk in path:
            bench.directory.mover.drop_host(chunk)
    assert where(*path) == "ddd"
    bench.directory.want(2, (2.0,), other)
    assert sorted(bench.settle()) == ["<b0", "<b1", ">b1"]
    remote = bench.directory.stats()[TierKind.REMOTE].totals
    assert (remote.reads, remote.writes) == (4, 0)


def test_what_only_the_remote_tier_has_replaces_nothing_on_disk() -> None:
    bench = Bench(8, 2, remote=True, write_behind=True)
    path, old = bench.path("a", 3), bench.path("b", 2)
    bench.on_disk(*old)
    for chunk in path:
        bench.directory.add_remote(chunk)
    bench.directory.want(1, (1.0,), path)
    assert bench.settle() == ["<a0", "<a1", "<a2"]
    assert not bench.directory.has_unwritten
    bench.directory.forget(old[1])
    assert bench.settle() == [">a0"]
    assert where(*path, old[0]) == "bhhd"


def test_writes_to_disk_of_what_the_remote_tier_has_keep_no_fetch_waiting() -> None:
    """Host memory has read from the remote tier, and the disk has as many writes in flight as it may, more than
    slots are to be kept free, and takes its time. Meanwhile steps save chunks into the free slots."""
    times = {"write_pause_s": 1.0, "write_within_s": 9.0}
    bench = Bench(32, 64, remote=True, write_behind=True, host_free=2, writes_in_flight=4, **times)
    held, saved, wanted = bench.path("a", 30), bench.path("b", 2), bench.path("c", 8)
    for chunk in (*held, *saved, *wanted):
        bench.directory.add_remote(chunk)
    bench.directory.want(0, (0.0,), held)
    while moves := [move for move in bench.orders() if not move.is_write]:
        bench.directory.mover.behind.note_requests(bench.now, is_busy=True)
        bench.end(moves)
    bench.directory.unwant(0)
    bench.end(list(bench.directory.mover.in_flight.values()))
    bench.orders()
    assert bench.directory.health[TierKind.DISK].writing == 4
    assert bench.save(*saved)
    bench.directory.want(1, (0.0,), wanted)
    for _ in range(8):
        bench.end([move for move in bench.orders() if move.tier is TierKind.REMOTE])
    assert [chunk for chunk in wanted if not chunk.host_ready] == []
