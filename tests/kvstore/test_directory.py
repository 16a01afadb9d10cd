"""The directory, rule by rule: host memory, eviction, fetching, what keeps chunks."""

from __future__ import annotations

import pytest
from simulation.directory_bench import Bench, where

from trunkline.kvstore.tier import TierKind
from trunkline.kvstore.tier_policy import EvictionPolicy


def test_a_save_takes_a_free_slot_and_counts_as_ready_at_once() -> None:
    bench = Bench(2)
    (a,), (b,), (c,) = bench.path("a"), bench.path("b"), bench.path("c")
    first = bench.directory.save(a, 1)
    assert first is not None
    assert a.host_ready
    assert bench.directory.load(a, 2) == first
    assert bench.save(b)
    assert bench.directory.save(c, 3) is not None, "a is the least recently used"
    assert where(a, b, c) == "-hh"
    assert bench.directory.lost() == [a]


def test_a_slot_that_the_plan_reads_or_writes_is_not_written_in_it() -> None:
    bench = Bench(2)
    (a,), (b,), (c,) = bench.path("a"), bench.path("b"), bench.path("c")
    assert bench.directory.save(a, 7) is not None
    assert bench.directory.save(b, 6) is not None
    bench.directory.load(b, 7)
    assert bench.directory.save(c, 7, forced=True) is None
    assert where(a, b) == "hh", "no copy is dropped in vain"
    taken = bench.directory.save(c, 8, forced=True)
    assert taken is not None
    assert taken[1] == 2, "the slot's second use"
    bench = Bench(1, 4, write_behind=True)
    (a,), (b,) = bench.path("a"), bench.path("b")
    assert bench.save(a)
    assert bench.settle() == [">a0"]
    bench.directory.load(a, 7)
    assert bench.directory.save(b, 7) is None
    assert where(a, b) == "b-"
    assert bench.directory.save(b, 8) is not None
    assert where(a, b) == "dh"


def test_with_tiers_below_an_only_copy_is_given_up_only_if_forced() -> None:
    bench = Bench(2, 4)
    (a,), (b,), (c,) = bench.path("a"), bench.path("b"), bench.path("c")
    assert bench.save(a, b)
    assert not bench.save(c)
    assert bench.save(c, forced=True)
    assert where(a, b, c) == "-hh"


def test_a_copy_that_is_elsewhere_too_goes_at_once() -> None:
    bench = Bench(2, 4, write_behind=True, host_free=0)
    (a,), (b,), (c,), (d,) = (bench.path(name) for name in "abcd")
    assert bench.save(a, b)
    assert sorted(bench.settle()) == [">a0", ">b0"]
    assert where(a, b) == "db", "one slot is kept free"
    assert bench.save(c, d)
    assert where(a, b, c, d) == "ddhh"
    assert bench.directory.lost() == []


def test_a_copy_on_the_device_counts_until_it_is_gone_if_nothing_is_below() -> None:
    bench = Bench(1, 0)
    (a,), (b,) = bench.path("a"), bench.path("b")
    a.place()
    assert bench.save(a)
    assert bench.save(b)
    assert where(a, b) == "-h"
    assert bench.directory.lost() == [a]
    bench = Bench(1, 4)
    (a,), (b,) = bench.path("a"), bench.path("b")
    a.place()
    assert bench.save(a)
    assert not bench.save(b), "a is still to be written to disk"
    bench = Bench(1, 4)
    (a,), (b,) = bench.path("a"), bench.path("b")
    a.place()
    assert bench.save(a)
    a.place(on_device=False)
    bench.directory.left_device(a)
    assert not bench.save(b)


@pytest.mark.parametrize("policy", [EvictionPolicy.LOOK_AHEAD, EvictionPolicy.FIFO])
@pytest.mark.parametrize("disk", [0, 4])
def test_a_save_goes_below_a_floor_only_if_it_is_forced_and_nothing_else_is_left(
    disk: int, policy: EvictionPolicy
) -> None:
    bench = Bench(2, disk, policy=policy, write_behind=True, host_free=0)
    (a,), (b,), (c,), (d,) = (bench.path(name) for name in "abcd")
    account = bench.directory.shares.account("owner", 0.5, 1.0)
    assert account is not None
    bench.directory.own([a], account)
    assert bench.save(a, b)
    bench.settle()
    assert bench.save(c, forced=True)
    assert a.host_ready, "b makes room, though a was used before it"
    assert bench.directory.claim(c)
    assert not bench.save(d)
    assert bench.save(d, forced=True)
    assert where(a, c, d) == ("d" if disk else "-") + "hh"


def test_what_the_next_request_reads_makes_room_only_if_forced() -> None:
    bench = Bench(1, 4, write_behind=True)
    (a,), (b,) = bench.path("a"), bench.path("b")
    assert bench.save(a)
    assert bench.settle() == [">a0"]
    bench.directory.want(1, (1.0,), [a])
    assert not bench.save(b)
    assert where(a, b) == "b-"
    assert bench.save(b, forced=True)
    assert where(a, b) == "dh"


def test_a_save_takes_the_room_of_the_chunk_above_only_if_that_is_on_disk_too() -> None:
    """A chunk is found only if the one above it is."""
    bench = Bench(1, 4)
    above, below = bench.path("a", 2)
    assert bench.save(above)
    assert not bench.save(below, forced=True)
    assert where(above, below) == "h-"
    bench = Bench(1, 4, write_behind=True)
    above, below = bench.path("a", 2)
    assert bench.save(above)
    assert bench.settle() == [">a0"]
    assert bench.save(below)
    assert where(above, below) == "dh"


def test_claimed_copies_stay_and_no_more_are_claimed_than_there_are_slots() -> None:
    bench = Bench(2, 4)
    (a,), (b,), (c,) = bench.path("a"), bench.path("b"), bench.path("c")
    assert bench.save(a, b)
    assert bench.directory.claim(a)
    assert bench.directory.claim(a)
    assert bench.directory.claim(b)
    assert not bench.directory.claim(c)
    assert not bench.save(c, forced=True)
    assert bench.settle() == [], "nothing can be evicted"
    bench.directory.unclaim(a)
    assert not bench.save(c, forced=True), "somebody else claims it still"
    bench.directory.unclaim(a)
    assert bench.directory.claim(c)
    assert bench.save(c, forced=True)
    assert where(a, b, c) == "-hh"


def test_fetches_leave_room_for_claimed_chunks_that_are_still_to_be_saved() -> None:
    bench = Bench(4, 8, host_free=0)
    waiting, claimed = bench.path("w", 4), bench.path("c", 3)
    bench.on_disk(*waiting)
    for chunk in claimed:
        assert bench.directory.claim(chunk)
    bench.directory.want(1, (1.0,), waiting)
    bench.settle()
    assert where(*waiting) == "bddd"
    assert bench.save(*claimed, forced=True)


def test_a_path_leaves_the_system_from_its_end() -> None:
    bench = Bench(2)
    path = bench.path("a", 2)
    assert bench.save(path[0], path[1])
    assert path[0].stored_below == 1
    bench.path("b")
    (c,) = bench.path("c")
    assert bench.save(c)
    assert where(*path, c) == "h-h"
    assert bench.directory.lost() == [path[1]]
    with pytest.raises(AssertionError, match="below"):
        bench.directory.forget(bench.root)


def test_room_is_kept_in_host_memory_by_writing_the_least_recently_used_to_disk() -> None:
    bench = Bench(4, 8, host_free=2)
    chunks = [bench.path(name)[0] for name in "abcd"]
    assert bench.save(*chunks)
    bench.directory.used([chunks[0]], 99.0)
    assert bench.settle() == [">b0", ">c0"]
    assert where(*chunks) == "hddh"


def test_full_tiers_lose_what_is_worth_least() -> None:
    bench = Bench(2, 2, host_free=1)
    chunks = [bench.path(name)[0] for name in "abcd"]
    for chunk in chunks:
        assert bench.save(chunk)
        bench.settle()
    assert where(*chunks) == "-ddh"
    assert bench.directory.lost() == [chunks[0]]
    assert [bench.directory.stats()[t].totals.evictions for t in (TierKind.HOST, TierKind.DISK)] == [3, 1]


@pytest.mark.parametrize(("older", "left"), [("settled", "b-d"), ("double", "hdd")])
def test_a_full_disk_gives_up_the_copy_that_is_worth_less(older: str, left: str) -> None:
    """Whether its chunk is in host memory as well, or nowhere else."""
    bench = Bench(3, 2, host_free=1, exclusive=False)
    (double,), (settled,) = bench.path("d"), bench.path("s")
    bench.on_disk(double, settled)
    bench.directory.want(1, (1.0,), [double])
    bench.settle()
    assert bench.directory.claim(double)
    bench.directory.unwant(1)
    bench.directory.used([settled if older == "double" else double], bench.now + 1.0)
    (fresh,), (last,) = bench.path("f"), bench.path("l")
    bench.directory.used([fresh], 10.0)
    bench.directory.used([last], 11.0)
    assert bench.save(fresh, last)
    bench.settle()
    assert where(double, settled, fresh) == left


def test_an_unwanted_chunk_pushes_out_no_wanted_one() -> None:
    bench = Bench(2, 2, host_free=1)
    wanted = [bench.path(name)[0] for name in "ab"]
    bench.on_disk(*wanted)
    bench.directory.want(1, (1.0,), [wanted[0]])
    bench.directory.want(2, (2.0,), [wanted[1]])
    bench.settle()
    assert where(*wanted) == "bd"
    fresh = [bench.path(name)[0] for name in "cde"]
    for chunk in fresh:
        assert bench.save(chunk)
        bench.settle()
    assert where(*wanted)[1] == "d"
    assert all(c.is_stored for c in wanted)
    # The room that a's duplicate took on disk is used, then c to e compete among themselves.
    assert where(*fresh).count("-") == 2


def test_if_all_are_wanted_the_one_wanted_last_goes_its_end_first() -> None:
    bench = Bench(4, 2, host_free=2)
    near, far = bench.path("n", 2), bench.path("f", 2)
    bench.on_disk(*near)
    bench.directory.want(1, (1.0,), near)
    bench.directory.want(2, (2.0,), far)
    assert bench.save(*far)
    bench.settle()
    assert where(*near) == "hh", "the duplicates on disk have made room for the others"
    assert where(*far) == "dd"
    (late,) = bench.path("l")
    bench.directory.want(3, (1.5,), [late])
    assert bench.save(late)
    bench.settle()
    assert where(*near, *far, late) == "hhd-d"


def test_the_paper_s_example() -> None:
    """CachedAttention figure 9: a fetch for job 3 sends job 4's KV to disk. There it takes job 3's own place, not
    job 9's."""
    bench = Bench(3, 6, host_free=1)
    kv = {job: bench.path(f"j{job}")[0] for job in (2, 3, 4, 5, 6, 7, 8, 9)}
    bench.on_disk(*(kv[job] for job in (3, 5, 6, 7, 8, 9)))
    for job in (2, 4):
        assert bench.save(kv[job])
    for job in kv:
        bench.directory.want(job, (float(job),), [kv[job]])
    bench.settle()
    assert where(*kv.values()) == "hhdddddd"
    assert bench.directory.lost() == []


def test_fetching_goes_in_the_order_of_the_queue_and_stops_when_host_memory_is_full_of_nearer_ones() -> None:
    bench = Bench(4, 8, host_free=1)
    paths = [bench.path(name, 2) for name in "abc"]
    for path in paths:
        bench.on_disk(*path)
    for job, path in zip((3, 1, 2), paths, strict=True):
        bench.directory.want(job, (float(job),), path)
    assert bench.settle() == ["<b0", "<b1", "<c0"]
    assert bench.settle() == [], "it does not go round in circles"
    assert [where(*path) for path in paths] == ["dd", "bb", "bd"]
    bench.directory.unwant(1)
    bench.settle()
    assert [where(*path) for path in paths] == ["bd", "dd", "bb"]
    assert bench.directory.is_coming(paths[0][1]) is False


@pytest.mark.parametrize("policy", [EvictionPolicy.LRU, EvictionPolicy.FIFO])
def test_the_other_policies_fetch_for_the_next_job_only_and_keep_that_until_it_has_run(
    policy: EvictionPolicy,
) -> None:
    bench = Bench(2, 8, host_free=1, policy=policy)
    old, new = bench.path("o"), bench.path("n")
    bench.on_disk(*old, *new)
    (a,) = bench.path("a")
    assert bench.save(a)
    bench.settle()
    bench.directory.want(1, (1.0,), old)
    bench.directory.want(2, (2.0,), new)
    bench.settle()
    assert where(*old, *new) == "bd"
    bench.directory.unwant(1)
    bench.settle()
    assert where(*old, *new) == "db"


def test_lru_and_fifo_do_not_look_at_the_queue() -> None:
    left = {}
    for policy in EvictionPolicy:
        bench = Bench(3, 0, policy=policy)
        a, b, c = (bench.path(name)[0] for name in "abc")
        assert bench.save(a, b, c)
        bench.directory.used([a], 50.0)
        bench.directory.want(1, (1.0,), [b])
        (d,) = bench.path("d")
        bench.directory.used([d], 60.0)
        assert bench.save(d)
        (left[policy],) = bench.directory.lost()
    assert [repr(left[p]) for p in (EvictionPolicy.LOOK_AHEAD, EvictionPolicy.LRU, EvictionPolicy.FIFO)] == [
        "c0",
        "b0",
        "a0",
    ]


def test_in_fifo_order_a_session_that_grows_does_not_become_younger() -> None:
    bench = Bench(4, policy=EvictionPolicy.FIFO)
    old, other = bench.path("o"), bench.path("x")
    assert bench.save(*old, *other)
    grown = bench.path("g", parent=old[0])
    assert bench.save(*grown)
    assert grown[0].arrived == old[0].arrived < other[0].arrived
    branch = bench.path("b", parent=old[0])
    assert bench.save(*branch)
    assert branch[0].arrived > other[0].arrived
