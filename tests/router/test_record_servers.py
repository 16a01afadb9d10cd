"""Stored sessions, seen by clients, while the Redis server of the records is slow, dies, fails over or forgets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import urlsplit

import httpx
import pytest
from router.harness import MESSAGES, RunningRouter, running, wait_until
from router.session_calls import chat, create, error_of, get
from worker.redis_server import RedisServer

from trunkline.router import service
from trunkline.router.stores import metered_records
from trunkline.router.tasks import runner
from trunkline.router.text.tokenizer import Tokenizer

pytestmark = pytest.mark.processes

LASTING = ("--save", "", "--appendonly", "yes", "--appendfsync", "everysec", "--repl-diskless-sync-delay", "0")


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[RedisServer, RedisServer]]:
    """Two that run."""
    both = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        both.append(RedisServer(tmp_path / name, *LASTING))
    try:
        for server in both:
            server.start()
        yield both[0], both[1]
    finally:
        for server in both:
            server.kill()


class Address:
    """The address of a server that may move to another one."""

    def __init__(self, place: Path) -> None:
        self._link = place / "redis.sock"
        self.url = f"unix://{self._link}?db=0"

    def lead_to(self, server: RedisServer) -> None:
        new = self._link.with_suffix(".new")
        new.symlink_to(urlsplit(server.socket_url).path)
        os.replace(new, self._link)


@contextmanager
def answered(http: httpx.Client, session: str, text: str) -> Iterator[Future[httpx.Response]]:
    """A turn that succeeds; inside, it is under way."""
    with ThreadPoolExecutor(1) as pool:
        turn = pool.submit(chat, http, session, text)
        yield turn
        told = turn.result(60)
        assert told.status_code == 200, told.text


def wait_for_store(router: RunningRouter) -> None:
    """Until an operation waits for the store."""
    wait_until(lambda: router.service.records._store._script._under_way > 0)  # type: ignore[attr-defined]


def questions_of(http: httpx.Client, session: str) -> list[str]:
    said = get(http, session, include="messages")["messages"]
    return [message["content"] for message in said if message["role"] == "user"]


def test_a_server_that_is_slow_or_dies(
    servers: tuple[RedisServer, RedisServer], place: Path, tokenizer: Tokenizer
) -> None:
    server = servers[0]
    with running(place, tokenizer, records=server.url) as (router, [fake]), router.client() as http:
        session = create(http)["id"]
        server.pause()
        with answered(http, session, "1"):
            wait_for_store(router)
            server.resume()
        server.kill()
        with answered(http, session, "2"):
            wait_for_store(router)
            server.start()
        fake.behaviour.hold = True
        before = len(fake.behaviour.submits)
        with answered(http, session, "3"):
            wait_until(lambda: len(fake.behaviour.submits) > before)
            server.kill()
            fake.behaviour.hold = False
            wait_for_store(router)
            server.start()
        assert questions_of(http, session) == ["1", "2", "3"]


def test_a_server_that_stays_away(
    servers: tuple[RedisServer, RedisServer], place: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "RECORDS_PATIENCE_S", 0.3)
    monkeypatch.setattr(runner, "PERIOD_SECONDS", 0.1)
    told = Mock()
    monkeypatch.setattr(metered_records, "_rare", told)
    server = servers[0]
    with running(place, tokenizer, records=server.url) as (router, [fake]), router.client() as http:
        session = create(http)["id"]
        assert chat(http, session, "1").status_code == 200
        before = len(fake.behaviour.submits)
        server.kill()
        for answer in (chat(http, session, "2"), chat(http, session, "2", stream=True), http.get("/v1/sessions")):
            assert error_of(answer)[:2] == (503, "records_unavailable")
        assert len(fake.behaviour.submits) == before, "no token was generated"
        assert http.post("/v1/chat/completions", json={"messages": MESSAGES}).status_code == 200
        [said_once] = told.warning.mock_calls
        assert said_once.args[0] == "records_away"
        server.start()
        wait_until(lambda: chat(http, session, "3").status_code == 200)
        assert questions_of(http, session) == ["1", "3"]


def test_a_failover(servers: tuple[RedisServer, RedisServer], place: Path, tokenizer: Tokenizer) -> None:
    """A replica becomes the server. It lacks the last turn, which the router remembers."""
    first, second = servers
    replica = second.client()
    address = Address(place)
    address.lead_to(first)
    with running(place, tokenizer, records=address.url) as (router, _), router.client() as http:
        session = create(http)["id"]
        with answered(http, session, "1"):
            pass
        replica.replicaof("127.0.0.1", first.port)
        wait_until(lambda: replica.info("replication")["master_link_status"] == "up")
        assert first.client().wait(1, 30_000) == 1
        replica.replicaof("127.0.0.1", 1)  # the connection is lost
        with answered(http, session, "2"):
            pass
        first.kill()
        address.lead_to(second)
        with answered(http, session, "3"):
            wait_for_store(router)  # READONLY
            replica.replicaof("NO", "ONE")
        assert questions_of(http, session) == ["1", "2", "3"]
        (place / "other").mkdir()
        with running(place / "other", tokenizer, records=address.url) as (other, _), other.client() as there:
            assert questions_of(there, session) == ["1", "2", "3"]


def test_a_server_that_forgets_the_last_second(
    servers: tuple[RedisServer, RedisServer], place: Path, tokenizer: Tokenizer
) -> None:
    """For the router that had the last turn, nothing is lost; to another one, the session is as it was before."""
    server = servers[0]
    with ExitStack() as work:
        clients = []
        for name in ("one", "two"):
            (place / name).mkdir()
            router, _ = work.enter_context(running(place / name, tokenizer, records=server.url))
            clients.append(work.enter_context(router.client()))
        here, there = clients
        sessions = [create(here)["id"] for _ in range(2)]
        for session in sessions:
            with answered(here, session, "1"):
                pass
        client: Any = server.client()
        kept = [(key, client.dump(key)) for key in server.places()]
        for session in sessions:
            with answered(here, session, "2"):
                pass
        client.flushall()
        for key, value in kept:
            client.restore(key, 0, value)
        assert questions_of(there, sessions[0]) == ["1"]
        assert questions_of(here, sessions[0]) == ["1", "2"]
        for session, http in zip(sessions, clients, strict=True):
            with answered(http, session, "3"):
                pass
        assert questions_of(there, sessions[0]) == ["1", "2", "3"]
        assert questions_of(there, sessions[1]) == ["1", "3"]
