"""Records on a Redis server that dies, restarts, is slow, fails over, loses changes or is set up badly."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from kvstore.records.cutting_proxy import CuttingProxy
from kvstore.records.redis_lab import RedisLab
from seeds import seeds
from worker.redis_server import RedisServer

from trunkline.kvstore.records import (
    BaseMissingError,
    BusyError,
    Change,
    ConflictError,
    MissingError,
    QuotaError,
    RecordKey,
    StoreAwayError,
)
from trunkline.kvstore.records import redis_script as script_module
from trunkline.kvstore.records.redis_store import RedisRecords

pytestmark = pytest.mark.processes

LASTING = ("--save", "", "--appendonly", "yes", "--appendfsync", "always")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., RedisServer]]:
    """Starts a server with options of its command line."""
    started = []

    def start(*options: str) -> RedisServer:
        server = RedisServer(tmp_path_factory.mktemp("redis"), *options)
        started.append(server)
        server.start()
        return server

    yield start
    for server in started:
        server.kill()


@pytest.fixture(scope="module")
def shared(servers: Callable[..., RedisServer]) -> RedisServer:
    return servers(*LASTING)


@pytest.fixture
def lasting(shared: RedisServer) -> RedisServer:
    shared.begin_anew()
    return shared


def key(name: str, owner: str = "o") -> RecordKey:
    return RecordKey("session", owner, name)


def run_with(
    url: str, body: Callable[[RedisRecords], Coroutine[Any, Any, None]], patience_s: float = 30.0
) -> None:
    async def run() -> None:
        records = RedisRecords(url, patience_s=patience_s)
        try:
            await body(records)
        finally:
            await records.close()

    asyncio.run(run())


# --- death and restart


@pytest.mark.parametrize("seed", seeds(1))
def test_a_server_that_is_killed_again_and_again_keeps_all_changes(lasting: RedisServer, seed: int) -> None:
    draw = random.Random(seed)
    kills = 3
    done: list[int] = []

    async def append(records: RedisRecords, name: str) -> list[bytes]:
        record = await records.create(key(name), Change(b"0", 60.0))
        texts: list[bytes] = []
        while len(done) < kills:
            texts.append(draw.randbytes(draw.randrange(1, 3000)))
            change = Change(b"%d" % len(texts), 60.0, record.head, texts[-1:])
            record = await records.put(key(name), record.version, change)
            assert record.version == len(texts) + 1
        return texts

    async def kill() -> None:
        for _ in range(kills):
            await asyncio.sleep(draw.random() * 0.3)
            await asyncio.to_thread(lasting.kill)
            await asyncio.to_thread(lasting.start)
            done.append(1)

    async def body(records: RedisRecords) -> None:
        names = [f"r{number}" for number in range(4)]
        *written, _ = await asyncio.gather(*(append(records, name) for name in names), kill())
        size = 0
        for name, texts in zip(names, written, strict=True):
            reading = await records.get(key(name))
            assert [segment.content for segment in reading.segments] == texts
            assert reading.record.header == b"%d" % len(texts)
            size += 512 + len(reading.record.header) + sum(128 + len(text) for text in texts)
        assert await records.usage() == (len(names), size)

    run_with(lasting.url, body)


def test_a_change_whose_answer_is_lost_is_made_once(lasting: RedisServer) -> None:
    async def body() -> None:
        async with CuttingProxy(lasting.port) as proxy:
            records = RedisRecords(proxy.url)
            await records.usage()  # connects

            def cut() -> None:
                proxy.cuts = 1

            cut()
            first = await records.create(key("a"), Change(b"1", 60.0, b"", [b"x", b"y"]), owner_bytes_max=1)
            assert (first.version, first.header) == (1, b"1")
            with pytest.raises(QuotaError):
                await records.create(key("b"), Change(b"1"), owner_bytes_max=1)
            cut()
            second = await records.put(key("a"), 1, Change(b"2", 60.0, first.head, [b"z"]))
            assert second.version == 2
            cut()
            taken = await records.acquire(key("a"), "token", 60.0)
            assert [segment.content for segment in taken.segments] == [b"x", b"y", b"z"]
            assert taken.record == second
            cut()
            third = await records.put(key("a"), 2, Change(b"3", 0.001, second.head), lease="token", release=True)
            assert third._replace(header=b"") == (await records.page("session", "o"))[0]
            cut()
            tended = await records.tend()
            assert tended.deleted == [key("a")]
            await records.create(key("a"), Change(b"1"))
            cut()
            await records.delete(key("a"))
            with pytest.raises(MissingError):
                await records.delete(key("a"))
            assert await records.usage() == (0, 0)
            await records.close()

    asyncio.run(body())


def test_a_change_that_another_followed_is_still_told_as_made(lasting: RedisServer) -> None:
    async def body() -> None:
        async with CuttingProxy(lasting.port) as proxy:
            cut, other = RedisRecords(proxy.url), RedisRecords(lasting.url)
            await cut.create(key("a"), Change(b"1"))
            proxy.cuts = 1_000_000

            async def follow() -> None:
                while True:
                    reading = await other.get(key("a"))
                    if reading.record.header == b"2":
                        break
                await other.put(key("a"), 2, Change(b"3"))
                proxy.cuts = 0

            put = asyncio.create_task(cut.put(key("a"), 1, Change(b"2")))
            await follow()
            assert (await put).version == 2
            assert (await other.get(key("a"))).record.version == 3
            await cut.close()
            await other.close()

    asyncio.run(body())


# --- a slow server


def test_a_server_that_is_stopped_is_waited_for(lasting: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries that were given up lie in its sockets and are carried out late."""
    monkeypatch.setattr(script_module, "_ANSWER_S", 0.2)
    tries = 0

    async def body(records: RedisRecords) -> None:
        await records.create(key("a"), Change(b"1"))
        once = script_module.RedisScript._once

        async def counted(*args: Any) -> Any:
            nonlocal tries
            tries += 1
            if tries == 3:
                lasting.resume()
            return await once(*args)

        monkeypatch.setattr(script_module.RedisScript, "_once", counted)
        lasting.pause()
        assert (await records.put(key("a"), 1, Change(b"2"))).version == 2
        assert tries >= 3
        assert (await records.get(key("a"))).record.version == 2
        assert (await records.put(key("a"), 2, Change(b"3"))).version == 3

    run_with(lasting.url, body)


def test_a_server_that_does_not_answer_is_away(lasting: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_module, "_IDLE_S", 0.0)

    async def body(records: RedisRecords) -> None:
        await records.usage()
        monkeypatch.setattr(script_module, "_ANSWER_S", 0.1)
        lasting.pause()
        try:
            with pytest.raises(StoreAwayError, match=rf"127\.0\.0\.1:{lasting.port} is away: it does not answer"):
                await records.usage()
        finally:
            lasting.resume()

    run_with(lasting.url, body, patience_s=0.0)


@pytest.mark.parametrize("seed", seeds(1))
def test_cancelled_calls_leave_no_answer_for_the_next_ones(lasting: RedisServer, seed: int) -> None:
    draw = random.Random(seed)

    async def body(records: RedisRecords) -> None:
        for number in range(8):
            await records.create(key(f"{number}"), Change(b"%d" % number * 40_000))
        for turn in range(60):
            if turn % 20 == 0:
                lasting.pause()
            calls = [asyncio.create_task(records.get(key(f"{number}"))) for number in range(8)]
            for _ in range(draw.randrange(12)):
                await asyncio.sleep(0)
            for call in draw.sample(calls, 8 if turn % 20 == 0 else 5):
                call.cancel()
            lasting.resume()
            for number, reading in enumerate(await asyncio.gather(*calls, return_exceptions=True)):
                if not isinstance(reading, asyncio.CancelledError):
                    assert not isinstance(reading, BaseException)
                    assert reading.record.header == b"%d" % number * 40_000

    run_with(lasting.url, body)


# --- failover and lost changes


def test_a_replica_is_not_asked_and_becomes_the_server(servers: Callable[..., RedisServer]) -> None:
    first, second = servers(*LASTING, "--repl-diskless-sync-delay", "0"), servers(*LASTING)

    async def body(records: RedisRecords) -> None:
        before = RedisRecords(first.url)
        await before.create(key("a"), Change(b"1"))
        await before.close()
        client = second.client()
        client.replicaof("127.0.0.1", first.port)
        while (second.client().info("replication"))["master_link_status"] != "up":
            await asyncio.sleep(0.01)
        for ask in (lambda: records.get(key("a")), lambda: records.page("session", "o")):
            with pytest.raises(StoreAwayError, match="read only replica"):
                await ask()
        assert "it is a replica" in await records.check()
        patient = RedisRecords(second.url, patience_s=30.0)
        put = asyncio.create_task(patient.put(key("a"), 1, Change(b"2")))
        await asyncio.sleep(0)
        first.kill()
        client.replicaof("NO", "ONE")
        assert (await put).version == 2
        await patient.close()

    run_with(second.url, body, patience_s=0.0)


def test_lost_changes_are_told_from_conflicts(servers: Callable[..., RedisServer]) -> None:
    server = servers("--save", "3600 1", "--appendonly", "no")

    async def body(records: RedisRecords) -> None:
        first = await records.create(key("a"), Change(b"1", 0.0, b"", [b"x"]))
        await asyncio.to_thread(server.client().save)
        second = await records.put(key("a"), 1, Change(b"2", 0.0, first.head, [b"y"]))
        await records.create(key("b"), Change(b"1"))
        server.kill()
        await asyncio.to_thread(server.start)
        with pytest.raises(ConflictError) as conflict:
            await records.put(key("a"), 2, Change(b"3", 0.0, second.head, [b"z"]))
        assert conflict.value.version == 1
        with pytest.raises(BaseMissingError):
            await records.put(key("a"), 1, Change(b"3", 0.0, second.head, [b"z"]))
        with pytest.raises(MissingError):
            await records.put(key("b"), 1, Change(b"2"))
        # The whole state, written anew:
        third = await records.put(key("a"), 1, Change(b"3", 0.0, b"", [b"x", b"y", b"z"]))
        assert [segment.content for segment in (await records.get(key("a"))).segments] == [b"x", b"y", b"z"]
        assert third.version == 2

    run_with(server.url, body)


def test_a_record_whose_segment_was_evicted_is_gone(lasting: RedisServer) -> None:
    async def body(records: RedisRecords) -> None:
        record = await records.create(key("a"), Change(b"1", 0.0, b"", [b"x", b"y"]))
        lasting.client().delete(b"tl:r:s:o\0" + record.head)
        with pytest.raises(MissingError):
            await records.get(key("a"))
        await records.create(key("a"), Change(b"1", 0.0, b"", [b"x", b"y"]))
        assert [segment.content for segment in (await records.get(key("a"))).segments] == [b"x", b"y"]

    run_with(lasting.url, body)


def test_a_clock_that_is_put_back_locks_nothing(lasting: RedisServer) -> None:
    lab = RedisLab(lasting, is_lazy=False)

    async def test() -> None:
        records = lab.open()
        lab.advance(100_000.0)
        await records.create(key("a"), Change(b"1", 1000.0))
        await records.acquire(key("a"), "mine", 100.0)
        lab.advance(-50_000.0)
        await records.acquire(key("a"), "theirs", 100.0)
        with pytest.raises(BusyError) as busy:
            await records.put(key("a"), 1, Change(b"2"), lease="mine")
        assert busy.value.seconds <= 100.0
        reading = await records.get(key("a"))
        assert reading.record.used < reading.record.created  # its time to live begins anew, too
        lab.advance(1_100.0)
        assert (await records.tend()).deleted == [key("a")]
        await records.close()

    asyncio.run(test())


# --- settings


def test_a_password_is_checked_and_never_shown(servers: Callable[..., RedisServer]) -> None:
    server = servers(*LASTING)
    server.client().config_set("requirepass", "right")

    async def works(records: RedisRecords) -> None:
        await records.create(key("a"), Change(b"1"))
        assert await records.check() == ""

    async def fails(records: RedisRecords) -> None:
        with pytest.raises(StoreAwayError) as told:
            await records.get(key("a"))
        assert f"127.0.0.1:{server.port} refuses" in str(told.value)
        assert "wrong" not in str(told.value)

    run_with(f"redis://:right@127.0.0.1:{server.port}/0", works)
    run_with(f"redis://:wrong@127.0.0.1:{server.port}/0", fails)
    run_with(server.url, fails)
    server.kill()


def test_a_url_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^(?!.*secret)"):
        RedisRecords("http://:secret@localhost:6379/0")


def test_a_database_that_does_not_exist_is_told_at_once(lasting: RedisServer) -> None:
    async def body(records: RedisRecords) -> None:
        with pytest.raises(StoreAwayError, match="out of range"):
            await records.usage()

    run_with(f"redis://127.0.0.1:{lasting.port}/99", body)


def test_a_full_server_refuses_new_records_only(servers: Callable[..., RedisServer]) -> None:
    server = servers(*LASTING)

    async def body(records: RedisRecords) -> None:
        await records.create(key("a"), Change(b"1"))
        await records.create(key("b"), Change(b"1", 0.001))
        server.client().config_set("maxmemory", 1)
        with pytest.raises(StoreAwayError, match="maxmemory"):
            await records.create(key("c"), Change(b"1"))
        assert (await records.get(key("a"))).record.version == 1
        assert len(await records.page("session", "o")) == 2
        await records.delete(key("a"))
        assert (await records.tend()).deleted == [key("b")]
        server.client().config_set("maxmemory", 0)
        await records.create(key("c"), Change(b"1"))

    run_with(server.url, body)


def test_the_check_says_what_endangers_records(servers: Callable[..., RedisServer]) -> None:
    server = servers("--save", "", "--appendonly", "no")

    async def body(records: RedisRecords) -> None:
        client: Any = server.client()
        assert await records.check() == "it keeps records in memory only (appendonly no, no snapshots)"
        client.config_set("save", "60 1")
        assert "since its last snapshot" in await records.check()
        client.config_set("maxmemory-policy", "allkeys-lru")
        assert "evicts records" in await records.check()
        client.execute_command(*"ACL SETUSER default -config".split())
        assert "unknown" in await records.check()
        assert "evicts records" in await records.check()
        client.execute_command(*"ACL SETUSER default +config".split())
        client.config_set("maxmemory-policy", "volatile-lru")
        client.config_set("appendonly", "yes")
        assert await records.check() == ""
        client.config_set("appendfsync", "no")
        assert "appendfsync no" in await records.check()
        client.config_set("appendfsync", "everysec")
        client.config_set("maxmemory", 1 << 30)
        roomy = RedisRecords(server.url, bytes_max=2 << 30)
        assert "less than" in await roomy.check()
        await roomy.close()

    run_with(server.url, body)
    server.kill()


# --- bounded work


def test_a_long_chain_is_read_and_removed_in_parts(lasting: RedisServer) -> None:
    texts = [b"%d" % number for number in range(2500)]

    async def body(records: RedisRecords) -> None:
        record = await records.create(key("a"), Change(b"1", 0.0, b"", texts))
        reading = await records.get(key("a"))
        assert [segment.content for segment in reading.segments] == texts
        known = [segment.name for segment in reading.segments[:400]]
        reading = await records.get(key("a"), known)
        assert reading.after == known[-1]
        assert [segment.content for segment in reading.segments] == texts[400:]
        await records.create(key("fork"), Change(b"1", 0.0, known[9]))
        await records.delete(key("a"))
        calls = 0
        while not (await records.tend()).is_done:
            calls += 1
        assert calls > 2
        assert [segment.content for segment in (await records.get(key("fork"))).segments] == texts[:10]
        assert (await records.usage()).bytes == 513 + sum(128 + len(text) for text in texts[:10])
        with pytest.raises(BaseMissingError):
            await records.create(key("b"), Change(b"1", 0.0, record.head))

    run_with(lasting.url, body)


def test_large_answers_come_in_parts(lasting: RedisServer) -> None:
    async def body(records: RedisRecords) -> None:
        texts = [bytes([number]) * (3 << 20) for number in range(5)]
        for number, text in enumerate(texts):
            await records.create(key(f"{number}"), Change(text))
        page = await records.page("session", "o", headers=True)
        assert [record.header for record in page] == texts
        assert [record.key.id for record in await records.page("session", "o", "1", 2)] == ["2", "3"]
        record = await records.create(key("chain"), Change(b"", 0.0, b"", texts))
        taken = await records.acquire(key("chain"), "token", 60.0)
        assert [segment.content for segment in taken.segments] == texts
        assert (await records.acquire(key("chain"), "token", 60.0, [record.head])).segments == []
        with pytest.raises(BusyError):
            await records.acquire(key("chain"), "other", 60.0)

    run_with(lasting.url, body)


def test_all_keys_have_one_prefix_and_go(lasting: RedisServer) -> None:
    """The remote tier's keys begin with `tl:` and a fingerprint in hexadecimal digits."""

    async def body(records: RedisRecords) -> None:
        for owner in ("", "o"):
            await records.create(key("a", owner), Change(b"1", 60.0, b"", [b"x"]))
            await records.acquire(key("a", owner), "token", 60.0)
        assert all(name.startswith(b"tl:r:") for name in lasting.places())
        for owner in ("", "o"):
            await records.delete(key("a", owner), lease="token")
        kept = [name for name in lasting.places() if not name.startswith(b"tl:r:x:")]
        assert kept == [b"tl:r:a"]
        assert all(lasting.client().pttl(name) > 0 for name in lasting.places() if name not in kept)

    run_with(lasting.url, body)
