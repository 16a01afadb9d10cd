"""Sessions in a store of records that several routers share: turns, undoing them, forks, limits."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from router.harness import STORES, shared_records
from router.session_turns import acquired, after_turn, content, discard, on, refused, turn
from seeds import seeds

from trunkline.kvstore.chunks import pack_int32
from trunkline.kvstore.records import Change, Reading, RecordKey, RecordStore, open_records
from trunkline.router.errors import ApiError
from trunkline.router.request_context import RequestRandom, known
from trunkline.router.stores.session_history import History
from trunkline.router.stores.session_memory import SessionMemory, StoredSession
from trunkline.router.stores.session_state import SessionState, pack_header
from trunkline.router.stores.session_store import SessionStore


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("memory_bytes", [0, 60_000, 1 << 30])
@pytest.mark.parametrize("seed", seeds(2))
def test_two_routers_and_many_sessions(seed: int, memory_bytes: int, kind: str) -> None:
    """Turns, turns made again, discards and forks, at either router: both see what a dictionary has, too."""
    rng = random.Random(seed)

    async def work(records: RecordStore) -> None:
        routers = [SessionStore(records, memory=SessionMemory(memory_bytes)) for _ in range(2)]
        expected: dict[str, Any] = {}
        before: dict[str, tuple[bytes, Any]] = {}
        for number in range(300):
            store = rng.choice(routers)
            session = rng.choice([*expected, ""]) if len(expected) > 8 else ""
            if not session:
                session = store.draw_id()
                history = rng.choice([History(), after_turn(History(), rng)])
                state = SessionState(model="m", metadata={"n": str(number)}, history=history)
                expected[session] = content((await store.create(session, state)).session)
                continue
            kind = rng.random()
            if kind < 0.4:
                name = rng.choice([b"", f"request {number}".encode()])
                before[session] = name, expected[session]
                expected[session] = content((await turn(store, session, rng, name)).session)
                assert expected[session][3] == before[session][1][3] + 1
            elif kind < 0.6 and before.get(session, (b"",))[0]:
                name, old = before[session]
                made = (await turn(store, session, rng, name)).session
                assert made.turns == old[3] + 1, "it is the same turn again"
                assert made.history.messages[:-1] == old[5].messages
                assert made.history.text[: max(0, len(old[5].text) - 3)] == old[5].text[:-3]
                expected[session] = content(made)
            elif kind < 0.75:
                source = await store.get(session)
                fork = store.draw_id()
                state = replace(source.session, parent=session, last_turn=None)
                expected[fork] = content((await store.create(fork, state, source.base)).session)
            elif kind < 0.85:
                expected[session] = content((await discard(store, session)).session)
            elif kind < 0.9:
                await store.delete(session)
                del expected[session]
                before.pop(session, None)
                with refused(404, "session_not_found"):
                    await rng.choice(routers).get(session)
            else:
                assert content((await store.get(session)).session) == expected[session]
        for session, state in expected.items():
            for store in (*routers, SessionStore(records)):
                assert content((await store.peek(session)).session) == state
        listed = await routers[0].page([""], "", 1000)
        assert [record.key.id for record in listed] == sorted(expected)

    with shared_records(kind) as url:
        on(work, open_records(url))


@pytest.mark.parametrize("kind", STORES)
def test_a_turn_writes_what_it_adds(kind: str) -> None:
    """Whether a session is short or long, and a fork adds a header."""

    async def added(records: RecordStore, work: Coroutine[Any, Any, Any]) -> int:
        before = await records.usage()
        await work
        return (await records.usage()).bytes - before.bytes

    async def work(records: RecordStore) -> None:
        store = SessionStore(records)
        sizes, forks = [], []
        for size in (100, 100_000):
            history = History(text="word " * size, tokens=pack_int32(range(size)), vocabulary="v", form="chat")
            state = SessionState(model="m", history=history)
            session = store.draw_id()
            await store.create(session, state)
            sizes.append(await added(records, turn(store, session, random.Random(1))))
            source = await store.get(session)
            fork = store.create(store.draw_id(), source.session, source.base)
            forks.append(await added(records, fork))
        assert abs(sizes[0] - sizes[1]) < 50
        assert sizes[1] < 1000
        assert max(forks) < 800

    with shared_records(kind) as url:
        on(work, open_records(url))


def test_what_another_router_added_is_read_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(records: RecordStore) -> None:
        here, there = SessionStore(records), SessionStore(records)
        read: list[int] = []
        real = records.acquire

        async def watched(*asked: Any) -> Any:
            reading = await real(*asked)
            read.append(len(reading.segments))
            return reading

        monkeypatch.setattr(records, "acquire", watched)
        session, rng = here.draw_id(), random.Random(2)
        await here.create(session, SessionState(model="m"))
        for store in (here, here, there, there, here, here):
            await turn(store, session, rng)
        assert read == [0, 0, 2, 0, 2, 0]

    on(work)


def test_a_turn_is_undone_behind_later_changes() -> None:
    """A discard, and what a request changed besides: the turn's request comes again all the same."""

    async def work(records: RecordStore) -> None:
        store, rng = SessionStore(records), random.Random(3)
        session = store.draw_id()
        await store.create(session, SessionState(model="m"))
        first = await turn(store, session, rng)
        await turn(store, session, rng, b"named")
        await discard(store, session)
        again = await turn(SessionStore(records), session, rng, b"named")
        assert again.session.turns == 2
        assert again.session.history.messages[:1] == first.session.history.messages
        assert len(again.session.history.messages) == 2
        third = await turn(store, session, rng, b"another")
        assert third.session.turns == 3

    on(work)


def test_leases() -> None:
    async def work(records: RecordStore) -> None:
        here, there = SessionStore(records), SessionStore(records)
        session = here.draw_id()
        await here.create(session, SessionState(model="m"))
        lease = await here.acquire(session)
        with refused(409, "session_busy"):
            await there.acquire(session)
        with refused(409, "session_busy"):
            await there.delete(session)
        assert (await there.get(session)).session.turns == 0
        lease.close()
        lease.close()
        (await acquired(there, session)).close()
        await (await acquired(here, session)).put()
        (await there.acquire(session)).close()  # at once

    on(work)


def test_a_fork_waits_for_the_turn_that_is_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """At another router, and also if the next turn begins at once."""

    async def work(records: RecordStore) -> None:
        here, there, rng = SessionStore(records), SessionStore(records), random.Random(4)
        session = here.draw_id()
        await here.create(session, SessionState(model="m"))
        assert (await there.get_settled(session, 0.0)).session.turns == 0
        lease = await here.acquire(session)
        with refused(409, "session_busy"):
            await there.get_settled(session, 0.0)
        get, read = records.get, list[str]()

        async def noted(key: RecordKey, known: Sequence[bytes] = (), *, use: bool = True) -> Reading:
            found = await get(key, known, use=use)
            read.append(key.id)
            return found

        monkeypatch.setattr(records, "get", noted)
        forks = [asyncio.create_task(store.get_settled(session, 30.0)) for store in (here, there)]
        while len(read) < 6:
            await asyncio.sleep(0.002)
        assert not any(fork.done() for fork in forks)
        lease.session.history = after_turn(lease.session.history, rng)
        stored = await lease.put(b"")
        after = await acquired(here, session)
        found = await asyncio.gather(*forks)
        assert [content(each.session) for each in found] == [content(stored.session)] * 2
        after.close()

    on(work)


def test_a_turn_that_is_lost_keeps_no_fork_waiting() -> None:
    """A router takes the lease and dies: what is stored is the history before."""

    async def work(records: RecordStore) -> None:
        store, rng = SessionStore(records), random.Random(5)
        session = store.draw_id()
        await store.create(session, SessionState(model="m"))
        before = await turn(store, session, rng)
        await records.acquire(before.record.key, "of a router that dies", 0.1)
        found = await store.get_settled(session, 30.0)
        assert content(found.session) == content(before.session)
        with pytest.raises(ApiError):
            await store.get_settled(store.draw_id(), 30.0)

    on(work)


def test_quotas() -> None:
    async def work(records: RecordStore) -> None:
        free, limited, rng = SessionStore(records), SessionStore(records, lambda _: 2000), random.Random(9)
        session = limited.draw_id()
        stored = await limited.create(session, SessionState(model="m"))
        await turn(limited, session, rng)
        lease = await limited.acquire(session, extends=True)
        lease.session.history = after_turn(lease.session.history, rng, 2000)
        await lease.put(b"")  # it was generated before the limit was reached
        full = 429, "records_quota"
        with refused(*full):
            await turn(limited, session, rng)
        with refused(*full):
            await limited.create(limited.draw_id(), SessionState(model="m"))
        with refused(*full):
            await limited.create(limited.draw_id(), stored.session, (await free.get(session)).base)
        await (await acquired(limited, session)).put()
        await turn(free, session, rng)
        await limited.delete(session)
        await limited.create(limited.draw_id(), SessionState(model="m"))

    on(work)


@pytest.mark.parametrize("kind", STORES)
def test_a_fork_outlives_its_source(kind: str) -> None:
    async def work(records: RecordStore) -> None:
        store, rng = SessionStore(records), random.Random(10)
        source = store.draw_id()
        await store.create(source, SessionState(model="m"))
        await turn(store, source, rng)
        seen = await store.get(source)
        fork, late = store.draw_id(), store.draw_id()
        await store.create(fork, seen.session, seen.base)
        await store.delete(source)
        for other in (store, SessionStore(records)):
            assert (await other.get(fork)).session.history == seen.session.history
        await store.delete(fork)
        while not (await records.tend()).is_done:
            pass
        await store.create(late, seen.session, seen.base)  # nothing is left that it could share
        assert (await SessionStore(records).get(late)).session.history == seen.session.history

    with shared_records(kind) as url:
        on(work, open_records(url))


@pytest.mark.parametrize("is_long", [False, True], ids=["short", "long"])
def test_sessions_of_earlier_versions(is_long: bool) -> None:
    async def work(records: RecordStore) -> None:
        rng = random.Random(11)
        history = after_turn(History(), rng)
        fields = msgspec.to_builtins(history, builtin_types=(bytes,))
        old = {"model": "m", "turns": 1, "metadata": {"a": "b"}, **fields}
        key = RecordKey("session", "", "sess_old")
        value = msgspec.msgpack.encode(old)
        await records.create(key, Change(b"", 60.0, segments=[value]) if is_long else Change(value, 60.0))
        store = SessionStore(records)
        assert (await store.get(key.id)).session.history == history
        fork = store.draw_id()
        source = await store.get(key.id)
        assert source.rewrites
        await store.create(fork, source.session)
        assert (await SessionStore(records).get(fork)).session.history == history
        made = await turn(store, key.id, rng, b"name")
        assert (made.session.turns, made.session.metadata) == (2, {"a": "b"})
        assert len((await records.get(key)).record.header) < 200
        again = await turn(SessionStore(records), key.id, rng, b"name")
        assert again.session.turns == 2
        assert again.session.history.messages[:-1] == history.messages
        assert content((await store.get(key.id)).session) == content(again.session)

    on(work)


def test_the_same_request_makes_one_session() -> None:
    async def work(records: RecordStore) -> None:
        store = SessionStore(records)
        ids = []
        for _ in range(2):
            with known(random=RequestRandom(b"name", 0)):
                session = store.draw_id()
                ids.append((await store.create(session, SessionState(model="m"))).record.key.id)
        assert ids[0] == ids[1]
        with refused(409, "session_conflict"):
            await store.create(ids[0], SessionState(model="m"))

    on(work)


def test_the_memory_is_bounded() -> None:
    async def work(records: RecordStore) -> None:
        memory = SessionMemory(100_000)
        history = History(text="x" * 1000, tokens=bytes(4000), messages=[{"content": "x"}])
        for number in range(100):
            key = RecordKey("session", "", str(number))
            state = SessionState(model="m", history=history)
            record = await records.create(key, Change(pack_header(state)))
            memory.keep(StoredSession(record, state))
            memory.keep(StoredSession(record, state))
            assert memory.bytes <= 100_000
            assert memory.find(RecordKey("session", "", "0")) is not None, "it is used again and again"
        assert 5 < len(memory) < 50
        for number in range(100):
            memory.forget(RecordKey("session", "", str(number)))
        assert (memory.bytes, len(memory)) == (0, 0)

    on(work)
