"""Clients of all kinds while a process of every kind is killed, one after the other, the records' server included.

When a router dies, its connections break: the clients ask again with the same idempotency key, and no client is
told anything else than in peace.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster.chaos import Reaper, View, flush
from cluster.conversations import messages_of, sessions_of
from cluster.crowd import EVERY_KIND, MODULES, Crowd, Script, compare, scripts
from cluster.harness import Cluster
from cluster.module_calls import post
from worker.redis_server import RedisServer

pytestmark = [pytest.mark.processes, pytest.mark.area("survival")]

CLIENTS = 44
DELAY_SECONDS_MAX = 90.0
OPTIONS = (
    *("--groups", "2", "--routers", "2", "--tp", "1", "--dtype", "float32", "--threads", "1"),
    *("--kv-memory", "48MiB", "--host-tier", "8MiB"),
)


@contextmanager
def served(folder: Path, fsync: str) -> Iterator[tuple[Cluster, RedisServer | None]]:
    """A cluster. `fsync`: when its Redis server writes records to disk; "": they are in SQLite."""
    server = RedisServer(folder, "--save", "", "--appendonly", "yes", "--appendfsync", fsync) if fsync else None
    url = f"sqlite:{folder / 'records.sqlite'}"
    try:
        if server is not None:
            server.start()
            url = server.url
        with Cluster(*OPTIONS, "--records", url) as cluster:
            yield cluster, server
            assert cluster.stop() == 0
    finally:
        if server is not None:
            server.kill()


async def play(cluster: Cluster, played: Sequence[Script], reaper: Reaper, rounds: int) -> list[Crowd]:
    """Play the scripts again and again while processes are killed."""
    crowds: list[Crowd] = []
    reigning = asyncio.create_task(reaper.reign(rounds, lambda: any(crowd.retried for crowd in crowds)))
    while not reigning.done():
        crowds.append(Crowd(cluster.url, f"round {len(crowds)}"))
        await crowds[-1].all(played, CLIENTS)
    await reigning
    return crowds


def check(
    folder: Path, seed: int, streams: int, tokens: int, pause_s: tuple[float, float], rounds: int, fsync: str
) -> None:
    with served(folder, fsync) as (cluster, records):
        post(cluster, MODULES)
        played = scripts(seed, streams, tokens, EVERY_KIND)
        expected = Crowd(cluster.url)
        asyncio.run(expected.all(played, CLIENTS))
        flush(cluster)
        view = View(cluster)
        reaper = Reaper(view, seed, pause_s, records)
        crowds = asyncio.run(play(cluster, played, reaper, rounds))
        retried = sum(crowd.retried for crowd in crowds)
        print(f"seed {seed}: {len(crowds)} crowds, {retried} requests sent again; killed: {reaper.kills}")
        wrong = [line for got in crowds for line in compare(played, expected, got)]
        wrong += [
            f"{name} took {seconds:.0f} s, in peace {expected.seconds[name]:.0f} s"
            for got in crowds
            for name, seconds in got.seconds.items()
            if seconds > expected.seconds[name] + DELAY_SECONDS_MAX
        ]
        assert not wrong, f"seed {seed}: {len(wrong)} are wrong:\n" + "\n".join(wrong)
        assert retried, "no client has noticed that a router died"
        sessions = sessions_of(cluster)
        assert len(sessions) == (1 + len(crowds)) * sum(script.is_session for script in played)
        assert {len(messages_of(cluster, session)) for session in sessions} == {1 + 2 * 3}, "a turn counts once"
        view.wait_for_no_leaks()


@pytest.mark.timeout(400)
def test_a_process_of_every_kind_dies(tmp_path: Path) -> None:
    check(tmp_path, 1, 60, 30, (0.5, 2.0), 1, "always")


@pytest.mark.soak
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("fsync", ["", "always", "everysec"])
@pytest.mark.parametrize("seed", [2, 3])
def test_processes_of_every_kind_die_again_and_again(tmp_path: Path, seed: int, fsync: str) -> None:
    check(tmp_path, seed, 120, 100, (6.0, 12.0), 5, fsync)
