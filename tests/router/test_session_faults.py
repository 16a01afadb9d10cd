"""Stored sessions whose router dies, or whose store of records is away or loses changes."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from router.harness import STORES, shared_records
from router.session_turns import acquired, after_turn, content, on, refused, turn
from worker.redis_server import RedisServer

from trunkline.kvstore.records import RecordStore, StoreAwayError, open_records
from trunkline.kvstore.records.sqlite_store import SqliteRecords
from trunkline.router.request_context import RequestRandom, known
from trunkline.router.stores import session_lease, session_store
from trunkline.router.stores.session_lease import Lease
from trunkline.router.stores.session_memory import StoredSession
from trunkline.router.stores.session_state import SessionState
from trunkline.router.stores.session_store import SessionStore


@pytest.mark.parametrize("kind", STORES)
def test_a_client_that_leaves_while_the_lease_is_acquired_leaves_no_lease(kind: str) -> None:
    async def work(records: RecordStore) -> None:
        store, other = SessionStore(records), SessionStore(records)
        session = store.draw_id()
        await store.create(session, SessionState(model="m"))
        for steps in range(8):
            leaving = asyncio.create_task(store.acquire(session))
            for _ in range(steps):
                await asyncio.sleep(0)
            leaving.cancel()
            [done] = await asyncio.gather(leaving, return_exceptions=True)
            if isinstance(done, Lease):
                done.close()
            (await acquired(other, session)).close()

    with shared_records(kind) as url:
        on(work, open_records(url))


@pytest.mark.parametrize("kind", STORES)
def test_a_client_that_leaves_while_its_turn_is_stored_leaves_no_lease(kind: str) -> None:
    async def work(records: RecordStore) -> None:
        store, other, rng = SessionStore(records), SessionStore(records), random.Random(14)
        session = store.draw_id()
        await store.create(session, SessionState(model="m"))
        for steps in range(8):
            lease = await acquired(store, session)
            before = lease.session.turns
            lease.session.history = after_turn(lease.session.history, rng)
            leaving = asyncio.create_task(lease.put(b""))
            for _ in range(steps):
                await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            lease.close()
            (await acquired(other, session)).close()
            stored = (await other.get(session)).session
            assert stored.turns in (before, before + 1)
            assert len(stored.history.messages) == stored.turns, "all of a turn, or nothing"

    with shared_records(kind) as url:
        on(work, open_records(url))


def test_a_lease_ends_if_its_router_dies() -> None:
    now = [1000.0]

    async def work(records: RecordStore) -> None:
        here, there = SessionStore(records), SessionStore(records)
        session, rng = here.draw_id(), random.Random(4)
        await here.create(session, SessionState(model="m"))
        lease = await here.acquire(session)
        lease._stop()  # its router does nothing any more
        with refused(409, "session_busy"):
            await there.acquire(session)
        now[0] += session_lease.LEASE_SECONDS + 0.01
        assert (await turn(there, session, rng)).session.turns == 1
        lease.session.history = after_turn(lease.session.history, rng)
        with refused(409, "session_conflict"):
            await lease.put(b"")  # it lived, and was only slow
        assert (await here.get(session)).session.turns == 1
        lease = await acquired(here, session)
        now[0] += session_lease.LEASE_SECONDS + 0.01
        await there.delete(session)
        lease._held_until = 0.0  # the same on this router's clock
        with refused(404, "session_not_found"):
            await lease.put(b"")

    on(work, SqliteRecords(":memory:", clock=lambda: now[0], steady=lambda: now[0]))


DYING_ROUTER = """
import asyncio, sys
from trunkline.kvstore.records.sqlite_store import SqliteRecords
from trunkline.router.stores import session_lease, session_store

async def work():
    session_lease.LEASE_SECONDS = session_store.LEASE_SECONDS = 0.5
    lease = await session_store.SessionStore(SqliteRecords(sys.argv[1])).acquire(sys.argv[2])
    print("acquired", flush=True)
    await asyncio.sleep(600)

asyncio.run(work())
"""


@pytest.mark.processes
def test_the_lease_of_a_killed_process_ends(tmp_path: Path) -> None:
    path = str(tmp_path / "records.sqlite")

    async def work(records: RecordStore) -> None:
        store, rng = SessionStore(records), random.Random(12)
        session = store.draw_id()
        await store.create(session, SessionState(model="m"))
        command = [sys.executable, "-c", DYING_ROUTER, path, session]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        assert await process.stdout.readline() == b"acquired\n"
        process.kill()
        await process.wait()
        (await acquired(store, session)).close()
        await (await acquired(store, session)).put()
        assert (await turn(store, session, rng)).session.turns == 1

    on(work, open_records(f"sqlite:{path}"))


def test_a_repeated_request_takes_over_the_lease_of_its_dead_router() -> None:
    async def work(records: RecordStore) -> None:
        here, there = SessionStore(records), SessionStore(records)
        session, rng = here.draw_id(), random.Random(5)
        await here.create(session, SessionState(model="m"))
        with known(random=RequestRandom(b"name", 0)):
            lease = await here.acquire(session)
        lease._stop()
        assert (await turn(there, session, rng, b"name")).session.turns == 1

    on(work)


@contextmanager
def lost(path: Path) -> Iterator[None]:
    """What happens inside is lost: afterwards the file is as it was before."""
    with closing(sqlite3.connect(":memory:")) as before:
        with closing(sqlite3.connect(path)) as file:
            file.backup(before)
        yield
        with closing(sqlite3.connect(path)) as file:
            before.backup(file)


@pytest.mark.parametrize("turns", [-1, 0, 1, 3])
def test_a_store_that_lost_changes_gets_the_session_anew(tmp_path: Path, turns: int) -> None:
    """A turn that was answered is stored, although the store went back in time while it ran: to when the session
    had 0, 1 or 3 turns, or was not there."""
    path = tmp_path / "records.sqlite"

    async def work(records: RecordStore) -> None:
        store, rng = SessionStore(records), random.Random(6)
        session = store.draw_id()
        await records.usage()  # makes the file
        made: list[StoredSession] = []

        async def until(turns: int) -> None:
            while len(made) <= turns:
                new = SessionState(model="m")
                made.append(await (turn(store, session, rng) if made else store.create(session, new)))

        await until(turns)
        with lost(path):
            await until(4)
            lease = await store.acquire(session)
        lease.session.history = after_turn(lease.session.history, rng)
        stored = await lease.put(b"name")
        assert stored.session.turns == 5
        for router in (store, SessionStore(records)):
            assert content((await router.get(session)).session) == content(stored.session)
        again = await turn(SessionStore(records), session, rng, b"name")
        assert again.session.turns == 5, "it can still be undone"
        assert again.session.history.messages[:-1] == made[-1].session.history.messages

    on(work, open_records(f"sqlite:{path}"))


@pytest.mark.processes
def test_a_server_that_keeps_nothing_gets_the_session_anew(tmp_path: Path) -> None:
    """Redis is killed and starts empty while a turn's answer is generated."""
    server = RedisServer(tmp_path)
    server.start()

    async def work(records: RecordStore) -> None:
        store, rng = SessionStore(records), random.Random(13)
        session = store.draw_id()
        await store.create(session, SessionState(model="m"))
        before = await turn(store, session, rng)
        lease = await store.acquire(session)
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        lease.session.history = after_turn(before.session.history, rng)
        stored = await lease.put(b"")
        assert stored.session.turns == 2
        assert content((await SessionStore(records).get(session)).session) == content(stored.session)

    try:
        on(work, open_records(server.url))
    finally:
        server.kill()


def test_a_router_restores_what_the_store_has_lost(tmp_path: Path) -> None:
    path = tmp_path / "records.sqlite"

    async def work(records: RecordStore) -> None:
        store, rng = SessionStore(records), random.Random(7)
        session = store.draw_id()
        await store.create(session, SessionState(model="m"))
        await turn(store, session, rng)
        with lost(path):
            second = await turn(store, session, rng)
        assert (await SessionStore(records).get(session)).session.turns == 1
        assert content((await store.get(session)).session) == content(second.session)
        third = await turn(store, session, rng)
        assert third.session.turns == 3
        assert third.session.history.messages[:-1] == second.session.history.messages
        assert content((await SessionStore(records).get(session)).session) == content(third.session)

    on(work, open_records(f"sqlite:{path}"))


def test_a_store_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*asked: Any, **also: Any) -> Any:
        raise StoreAwayError("it is gone")

    async def work(records: RecordStore) -> None:
        store, rng = SessionStore(records), random.Random(8)
        session = store.draw_id()
        await store.create(session, SessionState(model="m"))
        await turn(store, session, rng)
        before = await turn(store, session, rng, b"name")
        unavailable = 503, "records_unavailable"
        with monkeypatch.context() as patch:
            for name in ("create", "get", "acquire", "delete", "page", "release"):
                patch.setattr(records, name, away)
            for call in (
                store.create(store.draw_id(), SessionState(model="m")),
                store.get(session),
                store.peek(session),
                store.acquire(session),
                store.delete(session),
                store.page([""], "", 10),
            ):
                with refused(*unavailable):
                    await call
        with monkeypatch.context() as patch:
            patch.setattr(records, "get", away)
            with refused(*unavailable):
                await turn(store, session, rng, b"name")  # what is to be undone cannot be read
        with monkeypatch.context() as patch:
            patch.setattr(records, "put", away)
            lease = await acquired(store, session)
            lease.session.history = after_turn(lease.session.history, rng)
            with refused(503, "session_not_stored"):
                await lease.put(b"")
        (await acquired(store, session)).close()
        assert content((await store.get(session)).session) == content(before.session)

    on(work)


def test_renewals_go_on_while_the_store_is_away_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (session_lease, session_store):
        monkeypatch.setattr(module, "LEASE_SECONDS", 0.06)

    async def work(records: RecordStore) -> None:
        store = SessionStore(records)
        session = store.draw_id()
        await store.create(session, SessionState(model="m"))
        answers: list[Any] = [StoreAwayError("for a moment"), True, StoreAwayError("again"), True, False]
        asked = asyncio.Event()

        async def renew(*args: Any) -> bool:
            answer = answers.pop(0)
            if not answers:
                asked.set()
            if isinstance(answer, Exception):
                raise answer
            return bool(answer)

        monkeypatch.setattr(records, "renew", renew)
        lease = await store.acquire(session)
        await asked.wait()
        assert not answers
        lease.close()

    on(work)
