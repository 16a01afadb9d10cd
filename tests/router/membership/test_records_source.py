"""The source `records`: groups that register in a record store of SQLite."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from router.membership.following import eventually, following

from trunkline.kvstore.records import Change, Reading, Record, RecordKey, RecordStore, StoreAwayError, open_records
from trunkline.router.membership.member import Caution, Member
from trunkline.router.membership.records_source import KIND, RecordsSource, registrations
from trunkline.router.membership.registrar import Registrar


def member(name: str, epoch: str = "1") -> Member:
    return Member(name, f"tcp://{name}:7400", epoch=epoch)


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[RecordStore]:
    store = open_records(f"sqlite:{folder}/records.sqlite")
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def registered(store: RecordStore, who: Member, ttl_seconds: float = 60.0) -> AsyncIterator[Registrar]:
    registrar = Registrar(store, who, ttl_seconds=ttl_seconds)
    task = asyncio.create_task(registrar.run())
    try:
        yield registrar
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def source(store: RecordStore, hold_seconds: float = 60.0) -> RecordsSource:
    return RecordsSource(store, check_seconds=0.005, caution=Caution(hold_seconds))


def test_groups_join_and_leave(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as store, following(source(store)) as follower:
            await follower.until_ids()
            async with registered(store, member("a")) as first, registered(store, member("b")):
                present = await follower.until_ids("a", "b")
                assert present.members["a"] == member("a")
                await first.leave()
                await follower.until_ids("b")
            async with registered(store, member("a", "2")):
                present = await follower.until_ids("a", "b")
                assert present.members["a"].epoch == "2"

    asyncio.run(scenario())


def test_what_is_not_renewed_ends(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as store, following(source(store)) as follower:
            for name in "abc":
                async with registered(store, member(name), ttl_seconds=0.05 if name == "c" else 60.0):
                    await follower.until(lambda present, it=name: it in present.members)  # type: ignore[misc]
            async with asyncio.timeout(60):
                while "c" in follower.ids:
                    await store.tend()
                    await asyncio.sleep(0.005)
            await follower.until_ids("a", "b")

    asyncio.run(scenario())


def test_a_registration_is_renewed_and_made_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as store, registered(store, member("a"), ttl_seconds=0.03):
            key = RecordKey(KIND, "", "a")
            await eventually_registered(store, "a")
            await store.delete(key)
            await eventually_registered(store, "a")

    asyncio.run(scenario())


def test_the_later_of_two_groups_has_the_id(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as store, registered(store, member("a", "1"), ttl_seconds=0.03) as first:
            await eventually_registered(store, "a")
            async with registered(store, member("a", "2"), ttl_seconds=0.03) as second:
                await eventually(lambda: first.is_superseded)
                assert (await registrations(store))["a"].member.epoch == "2"
                await first.leave()
                assert not (await registrations(store))["a"].left, "it is not the first one's any more"
                assert not second.is_superseded

    asyncio.run(scenario())


def test_a_malformed_registration_hides_no_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as store:
            wrong = {"member": {"id": "x", "address": "nowhere"}}
            for name, header in (("w", b"\0"), ("x", msgspec.json.encode(wrong)), ("y", b"{}")):
                await store.create(RecordKey(KIND, "", name), Change(header))
            other = {"member": {"id": "a", "address": "tcp://evil:1"}}
            await store.create(RecordKey(KIND, "", "z"), Change(msgspec.json.encode(other)))
            async with registered(store, member("a")), following(source(store)) as follower:
                present = await follower.until_ids("a")
                assert present.members["a"].address == "tcp://a:7400"
            async with registered(store, member("w")):
                await eventually_registered(store, "w")

    asyncio.run(scenario())


class Flaky:
    """A store that may be away."""

    def __init__(self, store: RecordStore) -> None:
        self._store = store
        self.is_away = False

    def _check(self) -> None:
        if self.is_away:
            raise StoreAwayError("the store is away")

    async def get(self, key: RecordKey, known: Sequence[bytes] = (), *, use: bool = True) -> Reading:
        self._check()
        return await self._store.get(key, known, use=use)

    async def create(self, key: RecordKey, change: Change) -> Record:
        self._check()
        return await self._store.create(key, change)

    async def put(self, key: RecordKey, version: int, change: Change) -> Record:
        self._check()
        return await self._store.put(key, version, change)

    async def page(self, kind: str, owner: str, after: str, limit: int, *, headers: bool) -> list[Record]:
        self._check()
        return await self._store.page(kind, owner, after, limit, headers=headers)


def test_a_store_that_is_away_takes_no_member_away(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as real:
            store = Flaky(real)
            async with following(source(store)) as follower:  # type: ignore[arg-type]
                async with registered(store, member("a"), 0.03), registered(store, member("b"), 0.03):  # type: ignore[arg-type]
                    await follower.until_ids("a", "b")
                    store.is_away = True
                    present = await follower.until(lambda present: "the store is away" in present.problem)
                    assert sorted(present.members) == ["a", "b"]
                    # Meanwhile the registrations have ended.
                    for name in "ab":
                        await real.delete(RecordKey(KIND, "", name))
                    store.is_away = False
                    await follower.until_ids("a", "b")
                counts = [len(present.members) for present in follower.told]
                assert set(counts[counts.index(2) :]) == {2}, "both were there all the time"

    asyncio.run(scenario())


def test_a_group_without_an_epoch_cannot_register(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as store:
            with pytest.raises(ValueError, match="'a' has no epoch"):
                Registrar(store, Member("a", "tcp://a:1"))
            with pytest.raises(ValueError, match="no endpoint"):
                Registrar(store, Member("a", "a:1", epoch="1"))

    asyncio.run(scenario())


async def eventually_registered(store: RecordStore, name: str) -> None:
    async with asyncio.timeout(60):
        while name not in await registrations(store):
            await asyncio.sleep(0.002)
