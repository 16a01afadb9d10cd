"""The record store in SQLite: what only a file has."""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import threading
from contextlib import closing
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
from kvstore.records.labs import SqliteLab, counted_again, stores
from kvstore.records.records_model import Model
from seeds import seeds

from trunkline.kvstore.records import (
    LEASE_S_MAX,
    BusyError,
    Change,
    ExistsError,
    MissingError,
    RecordKey,
    StoreAwayError,
    open_records,
    sqlite_thread,
)
from trunkline.kvstore.records.sqlite_store import SqliteRecords
from trunkline.kvstore.records.sqlite_tables import VERSION, Clocks, NeedsWriteError, RecordTables, create_tables

KEY = RecordKey("session", "", "sess_1")
PAGE = 4096


@pytest.fixture
def lab(tmp_path: Path) -> SqliteLab:
    return SqliteLab(str(tmp_path / "records.sqlite"))


# --- time


def test_leases_end_with_the_machines_start(lab: SqliteLab) -> None:
    async def test() -> None:
        async with stores(lab) as (store,):
            await store.create(KEY, Change(b""))
            await store.acquire(KEY, "before", LEASE_S_MAX)
        lab.steady = 3.0  # less than when the lease was taken
        lab.boot = "second"
        async with stores(lab) as (store,):
            assert not await store.renew(KEY, "before", 60.0)
            await store.acquire(KEY, "after", 60.0)
            with pytest.raises(BusyError):
                await store.acquire(KEY, "before", 60.0)

    asyncio.run(test())


def test_leases_do_not_heed_the_wall_clock(lab: SqliteLab) -> None:
    async def test() -> None:
        async with stores(lab) as (store,):
            await store.create(KEY, Change(b""))
            await store.acquire(KEY, "mine", 60.0)
            for jump in (1e9, -2e9):
                lab.wall += jump
                with pytest.raises(BusyError) as caught:
                    await store.acquire(KEY, "theirs", 60.0)
                assert caught.value.seconds == 60.0

    asyncio.run(test())


def test_a_clock_that_jumps_and_is_put_right_costs_no_record(lab: SqliteLab) -> None:
    async def test() -> None:
        async with stores(lab) as (store,):
            await store.create(KEY, Change(b"", 3600.0))
            assert await store.tend() == ([], True)
            lab.wall += 1e8
            assert await store.tend() == ([], True)
            lab.advance(60.0)
            assert await store.tend() == ([], True)
            lab.wall -= 1e8
            assert await store.tend() == ([], True)
            lab.advance(3600.0)
            assert (await store.tend()).deleted == [KEY]

    asyncio.run(test())


def test_a_time_of_use_in_the_future_is_put_right(lab: SqliteLab) -> None:
    async def test() -> None:
        lab.wall += 1e8
        async with stores(lab) as (store,):
            await store.create(KEY, Change(b"", 3600.0))
            lab.wall -= 1e8
            assert (await store.get(KEY)).record.used == lab.wall

    asyncio.run(test())


# --- a busy file


def test_reads_go_on_while_another_process_writes(lab: SqliteLab) -> None:
    async def test() -> None:
        async with stores(lab) as (store,):
            await store.create(KEY, Change(b"header"))
        hasty = lab.open(patience_s=0.0)
        patient = lab.open()
        with closing(sqlite3.connect(lab.path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreAwayError, match="locked"):
                await hasty.put(KEY, 1, Change(b"new"))
            waiting = asyncio.ensure_future(patient.put(KEY, 1, Change(b"new")))
            lab.advance(1000.0)  # the use would be written
            assert (await hasty.get(KEY)).record.header == b"header"
            assert (await patient.get(KEY, use=False)).record.header == b"header"
            assert not waiting.done()
            other.execute("COMMIT")
        assert (await waiting).version == 2
        await hasty.close()
        await patient.close()

    asyncio.run(test())


def test_all_that_wait_share_a_transaction(lab: SqliteLab) -> None:
    async def test() -> None:
        statements: list[str] = []
        is_free = threading.Event()
        store = lab.open()

        def trace(tables: RecordTables) -> None:
            tables.connection.set_trace_callback(statements.append)
            is_free.wait()

        first = asyncio.ensure_future(store._thread.carry_out(trace, writes=False))
        keys = [KEY._replace(id=str(number)) for number in range(50)]
        made = [asyncio.ensure_future(store.create(key, Change(b"", segments=[b"x"]))) for key in keys]
        again = asyncio.ensure_future(store.create(keys[7], Change(b"")))
        await asyncio.sleep(0)
        is_free.set()
        await first
        await asyncio.gather(*made)
        with pytest.raises(ExistsError):
            await again
        assert statements.count("BEGIN IMMEDIATE") == 1
        await store.close()

    asyncio.run(test())


# --- files that cannot be used


@pytest.mark.parametrize("problem", ["later", "other", "folder"])
def test_a_file_that_is_not_for_us_is_left_alone(lab: SqliteLab, problem: str) -> None:
    async def test() -> None:
        message = {"later": "later version", "other": "other program", "folder": "directory"}[problem]
        if problem == "folder":
            Path(lab.path).mkdir()
        else:
            with closing(sqlite3.connect(lab.path)) as connection:
                if problem == "later":
                    create_tables(connection)
                    connection.execute(f"PRAGMA user_version = {VERSION + 1}")
                else:
                    connection.execute("CREATE TABLE records (number)")
            before = Path(lab.path).read_bytes()
        async with stores(lab) as (store,):
            with pytest.raises(StoreAwayError, match=message):
                await store.get(KEY)
        if problem != "folder":
            assert Path(lab.path).read_bytes()[100:] == before[100:]

    asyncio.run(test())


def test_no_error_ends_the_thread_for_which_operations_wait(
    lab: SqliteLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither an unforeseen one, as of code that reads damaged files, nor a lack of room for threads."""

    def fail(*_: object) -> NoReturn:
        raise RuntimeError("surprise")

    async def test() -> None:
        store = lab.open()
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fail)
            with pytest.raises(RuntimeError):
                await store.get(KEY)
        with monkeypatch.context() as patched:
            patched.setattr(store._thread, "_open", fail)
            with pytest.raises(StoreAwayError, match="surprise"):
                await asyncio.wait_for(store.create(KEY, Change(b"")), 60.0)
        made = await store.create(KEY, Change(b"header"))
        with monkeypatch.context() as patched:
            patched.setattr(store._thread._file, "is_current", fail)
            reads = [store.get(KEY), store.get(KEY)]
            found = await asyncio.wait_for(asyncio.gather(*reads, return_exceptions=True), 60.0)
        assert [type(each) for each in found] == [StoreAwayError] * 2
        assert (await store.get(KEY)).record == made
        await store.close()

    asyncio.run(test())


def test_a_file_that_was_deleted_begins_anew_for_all(lab: SqliteLab) -> None:
    async def test() -> None:
        async with stores(lab, 2) as (one, other):
            await one.create(KEY, Change(b""))
            await other.get(KEY)
            for name in os.listdir(Path(lab.path).parent):
                (Path(lab.path).parent / name).unlink()
            with pytest.raises(MissingError):
                await one.get(KEY)
            made = await one.create(KEY, Change(b"second"))
            assert (await other.get(KEY)).record == made

    asyncio.run(test())


def test_a_full_disk_loses_nothing_and_reads_go_on(lab: SqliteLab) -> None:
    async def test() -> None:
        async with stores(lab) as (opened,):
            store = lab.open()
            record = await store.create(KEY, Change(b"header", segments=[b"first"]))

            def limit(tables: RecordTables, more: int = 8) -> None:
                pages = tables.connection.execute("PRAGMA page_count").fetchone()[0]
                tables.connection.execute(f"PRAGMA max_page_count = {pages + more}")

            await store._thread.carry_out(limit, writes=False)
            large = Change(b"new", base=record.head, segments=[bytes(40 * PAGE)])
            small = Change(b"new", base=record.head, segments=[b"second"])
            other = KEY._replace(id="other")
            refused, done = await asyncio.gather(
                store.put(KEY, 1, large), store.create(other, Change(b"small")), return_exceptions=True
            )
            assert isinstance(refused, StoreAwayError)
            assert "full" in str(refused)
            assert not isinstance(done, BaseException)
            assert (await store.get(KEY)).record == record
            lab.advance(1000.0)
            await store._thread.carry_out(lambda tables: limit(tables, 0), writes=False)
            assert (await store.get(KEY)).segments[0].content == b"first"
            await store._thread.carry_out(lambda tables: limit(tables, 1000), writes=False)
            assert (await store.put(KEY, 1, small)).version == 2
            assert (await opened.put(KEY, 2, large._replace(base=b""))).version == 3
            await store.close()
        assert counted_again(lab.path)[""].records == 2

    asyncio.run(test())


# --- damage


async def filled(lab: SqliteLab, seed: int) -> Model:
    """Fill a file by random steps, and return what is in it."""
    model = Model(lab, random.Random(seed))
    async with stores(lab) as (store,):
        for _ in range(400):
            await model.step(store)
        await model.tend(store)
    return model


async def drop_lost(lab: SqliteLab, model: Model) -> None:
    """Check that each record is as it was, or missing; take the missing ones from the model."""
    async with stores(lab) as (store,):
        for key in list(model.docs):
            try:
                reading = await store.get(key, use=False)
            except MissingError:
                del model.docs[key]
                continue
            model.docs[key].token = ""
            model.check_reading(reading._replace(owner_bytes=model.size(key.owner).bytes), key, [])


@pytest.mark.parametrize("seed", seeds(6))
def test_of_a_damaged_file_what_can_be_read_is_kept(lab: SqliteLab, seed: int) -> None:
    async def test() -> None:
        rng = random.Random(seed)
        model = await filled(lab, seed)
        content = bytearray(Path(lab.path).read_bytes())
        pages = len(content) // PAGE
        for page in rng.sample(range(pages), rng.choice((1, 1, 2, 5))):
            place = page * PAGE + rng.choice((0, 0, 8, 100, 2000))
            size = rng.choice((16, 200, PAGE - place % PAGE))
            content[place : place + size] = rng.choice((bytes(size), rng.randbytes(size)))
        Path(lab.path).write_bytes(content)
        lost = deepcopy(model)
        await drop_lost(lab, lost)  # whatever the damage, what is read is right
        Path(f"{lab.path}.damage").touch()
        await drop_lost(lab, model)
        async with stores(lab) as (store,):  # and all works on
            await model.tend(store)  # removes segments of lost records
            for _ in range(200):
                await model.step(store)
            await model.tend(store)
        counted_again(lab.path)

    asyncio.run(test())


@pytest.mark.parametrize("page", ["first", "last", "cut"])
def test_one_damaged_page_costs_few_records(lab: SqliteLab, page: str) -> None:
    async def test() -> None:
        keys = [KEY._replace(id=f"sess_{number}") for number in range(200)]
        async with stores(lab) as (store,):
            for number, key in enumerate(keys):
                await store.create(key, Change(b"header %d" % number, segments=[bytes([number]) * 3000]))
        content = bytearray(Path(lab.path).read_bytes())
        if page == "cut":
            del content[-5 * PAGE :]
        else:
            place = 0 if page == "first" else len(content) - PAGE
            content[place : place + PAGE] = os.urandom(PAGE)
        Path(lab.path).write_bytes(content)
        async with stores(lab) as (store,):
            found = await store.page("session", "", limit=1000)
            assert len(found) >= 180
            for record in found:
                number = int(record.key.id.removeprefix("sess_"))
                reading = await store.get(record.key)
                assert reading.record.header == b"header %d" % number
                assert reading.segments[0].content == bytes([number]) * 3000
        assert len(list(Path(lab.path).parent.glob("*.damaged"))) == 1
        counted_again(lab.path)

    asyncio.run(test())


def test_damage_met_while_several_have_the_file_is_repaired(
    lab: SqliteLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        keys = [KEY._replace(id=f"sess_{number}") for number in range(200)]
        async with stores(lab) as (store,):
            for key in keys:
                await store.create(key, Change(b"", segments=[bytes(3000)]))
        monkeypatch.setattr("trunkline.kvstore.records.sqlite_file.CHECKED_BYTES_MAX", 0)
        async with stores(lab, 2) as (one, other):
            await one.usage()
            await other.usage()
            with open(lab.path, "r+b") as file:
                for page in (10, 20, 30):
                    file.seek(page * PAGE)
                    file.write(os.urandom(PAGE))
            both = [store.get(key) for key in keys for store in (one, other)]
            found = await asyncio.gather(*both, return_exceptions=True)
            assert all(not isinstance(each, BaseException) or isinstance(each, MissingError) for each in found)
            assert sum(not isinstance(each, BaseException) for each in found) >= 300
            assert await one.usage() == await other.usage()

    asyncio.run(test())


def test_records_without_segments_survive_a_repair(lab: SqliteLab) -> None:
    async def test() -> None:
        async with stores(lab) as (store,):
            made = await store.create(KEY, Change(b"header"))
        Path(f"{lab.path}.damage").touch()
        async with stores(lab) as (store,):
            assert (await store.get(KEY)).record == made

    asyncio.run(test())


def test_a_repair_for_which_there_is_no_room_is_not_tried_for_each_operation(
    lab: SqliteLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with stores(lab) as (store,):
            made = await store.create(KEY, Change(b"header"))
        now, tries = 0.0, 0

        def full(*_: object) -> NoReturn:
            nonlocal now, tries
            now, tries = now + 1.0, tries + 1
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error

        monkeypatch.setattr(sqlite_thread, "time", SimpleNamespace(monotonic=lambda: now))
        Path(f"{lab.path}.damage").touch()
        async with stores(lab) as (store,):
            with monkeypatch.context() as patched:
                patched.setattr("trunkline.kvstore.records.sqlite_salvage.save_rows", full)
                found = await asyncio.gather(*(store.get(KEY) for _ in range(20)), return_exceptions=True)
                assert all(isinstance(each, StoreAwayError) and "full" in str(each) for each in found)
                assert tries == 1
                assert not Path(f"{lab.path}.salvaged").exists()
            now += sqlite_thread.OPENING_REST + 1.0
            assert (await store.get(KEY)).record == made

    asyncio.run(test())


# --- cost


def test_a_turn_writes_as_much_as_it_adds(lab: SqliteLab) -> None:
    """Measured by the growth of SQLite's log, which holds each changed page of each transaction."""

    async def test() -> None:
        log = Path(f"{lab.path}-wal")
        async with stores(lab) as (store,):
            assert isinstance(store, SqliteRecords)
            record = await store.create(KEY, Change(bytes(300), segments=[bytes(2000)] * 10))
            sizes = {}
            for history in (10, 3000):
                missing = history - len((await store.get(KEY)).segments)
                change = Change(bytes(300), base=record.head, segments=[bytes(2000)] * missing)
                record = await store.put(KEY, record.version, change)
                await store._thread.carry_out(_empty_log, writes=False)
                before = log.stat().st_size
                for _ in range(5):
                    await store.acquire(KEY, "token", 60.0, [record.head])
                    change = Change(bytes(300), base=record.head, segments=[os.urandom(2000)])
                    record = await store.put(KEY, record.version, change, lease="token", release=True)
                sizes[history] = (log.stat().st_size - before) / 5
            assert sizes[3000] < 16 * PAGE
            assert sizes[3000] <= sizes[10] + 3 * PAGE

    asyncio.run(test())


def _empty_log(tables: RecordTables) -> None:
    tables.connection.execute("COMMIT")
    assert tables.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
    tables.connection.execute("BEGIN")


def test_no_operation_reads_or_sorts_a_whole_table() -> None:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        create_tables(connection)
        tables = RecordTables(connection, Clocks(lambda: 1e9, lambda: 1e3, "boot"), bytes_max=1)
        statements: list[str] = []
        record = tables.create(KEY, Change(b"", 60.0, segments=[b"one", b"two"]), 100)
        connection.set_trace_callback(statements.append)
        tables.create(KEY._replace(id="fork"), Change(b"", base=record.head), 0)
        tables.acquire(KEY, "token", 60.0, [])
        record = tables.put(KEY, 1, Change(b"", base=record.head, segments=[b"three"]), "token", release=True)
        tables.page("session", "", "a", 10, "s", headers=False)
        tables.delete(KEY, "")
        tables.tend()
        connection.set_trace_callback(None)
        plans = [
            (row[3], statement)
            for statement in set(statements)
            if statement.split()[0] in ("SELECT", "UPDATE", "DELETE", "WITH")
            for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}")
        ]
    whole = [plan for plan in plans if plan[0].startswith("SCAN") or "TEMP" in plan[0]]
    allowed = ("leases", "owners", "chain", "r USING INDEX records_by_use", "counts USING")
    assert [plan for plan in whole if not any(name in plan[0] for name in allowed)] == []


def test_an_operation_that_turns_out_to_write_is_repeated() -> None:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        create_tables(connection)
        now = [1e9]
        tables = RecordTables(connection, Clocks(lambda: now[0], lambda: 1e3, "boot"), bytes_max=0)
        tables.create(KEY, Change(b""), 0)
        tables.may_write = False
        now[0] += 59.0
        assert tables.get(KEY, [], use=True).record.used == 1e9
        now[0] += 2.0
        with pytest.raises(NeedsWriteError):
            tables.get(KEY, [], use=True)
        tables.notes_uses = False
        assert tables.get(KEY, [], use=True).record.used == 1e9


def test_what_endangers_records_is_told(lab: SqliteLab) -> None:
    async def test() -> None:
        async with stores(lab) as (store,):
            assert "file system" not in await store.check()
        memory = open_records("sqlite::memory:")
        assert isinstance(memory, SqliteRecords)
        assert "memory" in await memory.check()
        await memory.close()
        with pytest.raises(StoreAwayError, match="closed"):
            await memory.get(KEY)

    asyncio.run(test())
