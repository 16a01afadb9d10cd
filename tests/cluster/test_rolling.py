"""A cluster that is restarted, drained and robbed of a router while clients ask all the time and never try again.

Two groups, two routers on one port. Commands are those that a person would type.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import pytest
from cluster.chaos import View
from cluster.crowd import COMPLETIONS, Answer, Crowd, events, scripts, take
from cluster.harness import Cluster, wait_for
from cluster.traffic import CLIENTS, Traffic

pytestmark = [pytest.mark.processes, pytest.mark.area("survival")]

OPTIONS = ("--groups", "2", "--routers", "2", "--tp", "1", "--dtype", "float32", "--threads", "1")
SCRIPTS = scripts(9, 24, 60, ("greedy", "sampled", "several", "shared", "session"))
LONG = {"prompt": "The function os.path.join", "max_tokens": 600, "temperature": 1.0, "ignore_eos": True}


@dataclass
class Served:
    """The cluster and what it says in peace."""

    cluster: Cluster
    view: View
    expected: Crowd


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Cluster(*OPTIONS) as cluster:
        expected = Crowd(cluster.url)
        asyncio.run(expected.all(SCRIPTS, CLIENTS))
        assert {answer.error for answer in expected.answers.values()} == {""}
        yield Served(cluster, View(cluster), expected)
        assert cluster.stop() == 0


def test_a_rolling_restart_is_not_noticed(served: Served) -> None:
    before = served.view.pids("worker", "controller", "router")
    assert len(before) == 6
    traffic = Traffic(served.cluster, SCRIPTS)
    try:
        said = served.cluster.command("restart")
    finally:
        traffic.stop()
    after = served.view.pids("worker", "controller", "router")
    assert all(after[name] not in (0, pid) for name, pid in before.items()), (before, after)
    assert said.count("ready again") == 4, said
    print(f"{traffic.streams} streams during the restart")
    traffic.check(served.expected)
    wait_for(served.view.is_healthy, 30)


def test_a_group_is_drained_and_comes_back(served: Served) -> None:
    pid = served.view.pid("controller-0")
    traffic = Traffic(served.cluster, SCRIPTS)
    try:
        wait_for(lambda: traffic.streams > CLIENTS, 60)
        assert "group 0 is down" in served.cluster.command("drain", "0")
        assert not psutil.pid_exists(pid)
        assert served.view.pid("worker-0.0") == 0
        streams = traffic.streams
        wait_for(lambda: traffic.streams > streams + CLIENTS, 60)
        assert "group 0 is ready" in served.cluster.command("undrain", "0")
    finally:
        traffic.stop()
    print(f"{traffic.streams} streams during drain and undrain")
    traffic.check(served.expected)
    wait_for(served.view.is_healthy, 10)


class Stream:
    """An answer that is read bit by bit."""

    def __init__(self, response: httpx.Response) -> None:
        self.answer = Answer()
        self.is_whole = False
        self.headers = response.headers
        self._port = response.extensions["network_stream"].get_extra_info("client_addr")[1]
        self._events = events(response)

    async def read(self, characters: int = 1 << 30) -> None:
        """Until there are so many characters, or to the end."""
        async for event in self._events:
            if event is None:
                self.is_whole = True
            else:
                take(self.answer, event)
            if len(self.answer.texts.get(0, "")) >= characters:
                return

    def is_served_by(self, pid: int) -> bool:
        """Whether a process has the other end of the connection."""
        connections = psutil.Process(pid).net_connections("tcp")
        return any(c.raddr and c.raddr.port == self._port for c in connections)


@asynccontextmanager
async def streaming(cluster: Cluster, key: str, **more: Any) -> AsyncIterator[Stream]:
    """A long stream on a connection of its own."""
    headers = {"Idempotency-Key": key}
    async with (
        httpx.AsyncClient(base_url=cluster.url, timeout=90.0) as client,
        client.stream("POST", COMPLETIONS, json={**LONG, **more, "stream": True}, headers=headers) as response,
    ):
        assert response.status_code == 200, await response.aread()
        yield Stream(response)


def check_whole(stream: Stream) -> None:
    """It ended as it should."""
    assert stream.answer.error == ""
    assert stream.is_whole
    assert stream.answer.reasons == {0: "length"}


async def one_router_dies(cluster: Cluster, view: View) -> None:
    pids = [view.pid(name) for name in ("router-0", "router-1")]

    @asynccontextmanager
    async def at(index: int, key: str) -> AsyncIterator[Stream]:
        """A stream through this router: the other one stands still, and neither accepts anybody nor goes on."""
        os.kill(pids[1 - index], signal.SIGSTOP)
        os.kill(pids[index], signal.SIGCONT)
        try:
            async with streaming(cluster, key) as stream:
                await stream.read(10)
                yield stream
        finally:
            if psutil.pid_exists(pids[1 - index]):
                os.kill(pids[1 - index], signal.SIGCONT)

    async with at(0, "breaks") as broken, at(1, "lives") as other:
        assert broken.is_served_by(pids[0])
        assert other.is_served_by(pids[1])
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            await broken.read()
        async with streaming(cluster, "breaks") as again:  # at once: no router knows yet that the first has died
            await again.read()
        await other.read()
    for stream in (other, again):
        check_whole(stream)
    assert 10 <= len(broken.answer.texts[0]) < len(again.answer.texts[0])
    assert again.answer.texts[0].startswith(broken.answer.texts[0])
    async with streaming(cluster, "breaks") as replayed:
        await replayed.read()
    assert replayed.headers["Idempotent-Replayed"] == "true"
    assert replayed.answer == again.answer


def test_a_routers_death_breaks_its_own_connections_only(served: Served) -> None:
    asyncio.run(one_router_dies(served.cluster, served.view))
    wait_for(lambda: served.view.pid("router-0") != 0, 20)
    wait_for(served.view.is_healthy, 30)
    # The first try's request has been given up by the controller, who has not heard of that router since.
    served.view.wait_for_no_leaks()
