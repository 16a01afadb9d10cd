"""Every record store against the model, and what the model does not tell."""

from __future__ import annotations

import asyncio
import random

import pytest
from kvstore.records.labs import stores
from kvstore.records.records_model import Lab, Model
from seeds import seeds

from trunkline.kvstore.records import (
    HEADER_BYTES_MAX,
    PASSING_KIND,
    SEGMENT_BYTES_MAX,
    BusyError,
    Change,
    ConflictError,
    MissingError,
    RecordKey,
    RecordStore,
    open_records,
    problem_of_records,
)

STEPS = 1500
KEY = RecordKey("session", "ann", "sess_1")


@pytest.mark.parametrize("seed", seeds(3))
def test_random_steps_do_what_the_model_does(lab: Lab, seed: int) -> None:
    async def test() -> None:
        rng = random.Random(seed)
        async with stores(lab, 2) as opened:
            model = Model(lab, rng)
            for _ in range(STEPS):
                await model.step(rng.choice(opened))
            await model.tend(opened[0])

    asyncio.run(test())


@pytest.mark.parametrize("seed", seeds(2))
def test_a_store_stays_below_its_size_and_deletes_what_was_not_used_longest(lab: Lab, seed: int) -> None:
    async def test() -> None:
        rng = random.Random(seed)
        async with stores(lab, 2, bytes_max=40_000) as opened:
            model = Model(lab, rng, bytes_max=40_000)
            for _ in range(STEPS):
                await model.step(rng.choice(opened))
            await model.tend(opened[0])

    asyncio.run(test())


def test_kept_answers_push_no_session_out(lab: Lab) -> None:
    async def test() -> None:
        async with stores(lab, bytes_max=20 * 1024) as (store,):
            await store.create(KEY, Change(bytes(4000)))
            for number in range(100):
                lab.advance(1.0)
                await store.create(RecordKey(PASSING_KIND, "ann", f"{number:03}"), Change(bytes(512), 600.0))
            await _tend(store)
            assert (await store.get(KEY)).record.version == 1
            kept = [record.key.id for record in await store.page(PASSING_KIND, "ann")]
            assert kept == [f"{number:03}" for number in range(100 - len(kept), 100)]
            assert len(kept) == 15

    asyncio.run(test())


def test_records_are_there_when_the_store_is_opened_again(lab: Lab) -> None:
    async def test() -> None:
        async with stores(lab) as (store,):
            made = await store.create(KEY, Change(b"header", segments=[b"one", b"two"]))
        async with stores(lab) as (store,):
            found = await store.get(KEY, use=False)
            assert found.record == made
            assert [segment.content for segment in found.segments] == [b"one", b"two"]

    asyncio.run(test())


def test_a_long_chain_is_read_whole_and_removed_bit_by_bit(lab: Lab) -> None:
    async def test() -> None:
        async with stores(lab) as (store,):
            contents = [b"%d" % number for number in range(2000)]
            record = await store.create(KEY, Change(b"", segments=contents[:1000]))
            record = await store.put(KEY, 1, Change(b"", base=record.head, segments=contents[1000:]))
            found = await store.get(KEY)
            assert [segment.content for segment in found.segments] == contents
            fork = KEY._replace(id="fork")
            middle = found.segments[600].name
            await store.create(fork, Change(b"", base=middle))
            await store.delete(KEY)
            await _tend(store)
            forked = await store.get(fork)
            assert [segment.content for segment in forked.segments] == contents[:601]
            assert (await store.usage("ann")).bytes == forked.owner_bytes
            await store.delete(fork)
            await _tend(store)
            assert await store.usage() == (0, 0)

    asyncio.run(test())


async def _tend(store: RecordStore) -> None:
    while not (await store.tend()).is_done:
        pass


def test_of_many_turns_at_the_same_time_one_wins_each_version(lab: Lab) -> None:
    async def turn(store: RecordStore, name: bytes) -> int:
        for refused in range(1000):
            found = await store.get(KEY)
            change = Change(name, base=found.record.head, segments=[name])
            try:
                await store.put(KEY, found.record.version, change)
                return refused
            except ConflictError:
                continue
        raise AssertionError("never")

    async def test() -> None:
        async with stores(lab, 3) as opened:
            await opened[0].create(KEY, Change(b""))
            names = [b"%d" % number for number in range(30)]
            await asyncio.gather(*(turn(opened[i % 3], name) for i, name in enumerate(names)))
            found = await opened[0].get(KEY)
            assert found.record.version == 31
            assert sorted(segment.content for segment in found.segments) == sorted(names)

    asyncio.run(test())


def test_a_lease_keeps_others_out_until_it_ends(lab: Lab) -> None:
    async def test() -> None:
        async with stores(lab, 2) as (mine, theirs):
            await mine.create(KEY, Change(b""))
            await mine.acquire(KEY, "mine", 100.0)
            with pytest.raises(BusyError):
                await theirs.acquire(KEY, "theirs", 100.0)
            lab.advance(60.0)
            assert await mine.renew(KEY, "mine", 100.0)
            lab.advance(60.0)
            with pytest.raises(BusyError):
                await theirs.delete(KEY)
            lab.advance(60.0)
            assert not await mine.renew(KEY, "mine", 100.0)
            await theirs.acquire(KEY, "theirs", 100.0)
            with pytest.raises(BusyError):
                await mine.put(KEY, 1, Change(b""), lease="mine")

    asyncio.run(test())


def test_what_is_too_large_is_refused(lab: Lab) -> None:
    async def test() -> None:
        async with stores(lab) as (store,):
            with pytest.raises(ValueError, match="header"):
                await store.create(KEY, Change(bytes(HEADER_BYTES_MAX + 1)))
            await store.create(KEY, Change(bytes(HEADER_BYTES_MAX)))
            with pytest.raises(ValueError, match="segment"):
                await store.put(KEY, 1, Change(b"", segments=[bytes(SEGMENT_BYTES_MAX + 1)]))
            record = await store.put(KEY, 1, Change(b"", segments=[bytes(SEGMENT_BYTES_MAX)]))
            assert record.version == 2
            assert len((await store.get(KEY)).segments[0].content) == SEGMENT_BYTES_MAX

    asyncio.run(test())


def test_an_operation_whose_caller_went_away_harms_no_other(lab: Lab) -> None:
    async def test() -> None:
        async with stores(lab) as (store,):
            await store.create(KEY, Change(b""))
            tasks = [asyncio.ensure_future(store.get(KEY)) for _ in range(20)]
            await asyncio.sleep(0)
            for task in tasks[::2]:
                task.cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(each, asyncio.CancelledError) for each in found[::2])
            assert not any(isinstance(each, BaseException) for each in found[1::2])
            with pytest.raises(MissingError):
                await store.get(KEY._replace(id="none"))

    asyncio.run(test())


def test_urls_are_checked_without_a_connection() -> None:
    good = ("sqlite:a.sqlite", "sqlite:/a/b.sqlite", "sqlite::memory:", "redis://h:6379/0", "unix:///run/r.sock")
    assert [problem_of_records(url) for url in good] == [""] * len(good)
    for bad in ("", "sqlite:", "sqlite:/a/", "a.sqlite", "http://host/", "redis://host/secret@"):
        assert problem_of_records(bad).endswith(".")
        assert "secret" not in problem_of_records(bad)
        with pytest.raises(ValueError, match="URL"):
            open_records(bad)
