"""Streams of all kinds while workers and controllers are killed, one after the other: nobody notices.

Two groups of two ranks each share the streams. What each is to say was said by the same cluster before, in peace.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from cluster.chaos import Chaos, View, flush
from cluster.crowd import ALL_KINDS, Crowd, Script, compare, scripts
from cluster.harness import Cluster

CONCURRENCY = 20
HITS_MIN = 3
OPTIONS = ("--groups", "2", "--dtype", "float32", "--threads", "1", "--kv-memory", "48MiB", "--host-tier", "8MiB")


def in_peace(cluster: Cluster, played: Sequence[Script]) -> Crowd:
    crowd = Crowd(cluster.url)
    asyncio.run(crowd.all(played, CONCURRENCY))
    flush(cluster.url)
    return crowd


def in_chaos(cluster: Cluster, played: Sequence[Script], chaos: Chaos) -> Crowd:
    async def both(crowd: Crowd) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(crowd.all(played, CONCURRENCY))
            group.create_task(chaos.reign(crowd))

    crowd = Crowd(cluster.url)
    asyncio.run(both(crowd))
    return crowd


def check(cluster: Cluster, seed: int, played: Sequence[Script], hits_min: int) -> None:
    view = View(cluster)
    expected = in_peace(cluster, played)
    before = view.restarts()
    chaos = Chaos(view, seed)
    got = in_chaos(cluster, played, chaos)
    events = {
        event: cluster.metric("dispatches_total", event=event)
        for event in ("resumed", "retried", "waited", "gave_up")
    }
    print(f"seed {seed}: {len(got.answers)} streams, {chaos.hits} of {len(chaos.kills)} kills hit; {events}")
    print(*chaos.kills, sep="\n")
    wrong = asyncio.run(compare(cluster.url, played, expected, got))
    assert not wrong, f"seed {seed}: {len(wrong)} of {len(got.answers)} are wrong:\n" + "\n".join(wrong)
    assert len(got.answers) == sum(len(script.bodies) for script in played)
    view.wait_for_no_leaks()
    assert view.restarts() - before >= len(chaos.kills)
    assert events["gave_up"] == 0
    assert chaos.hits >= hits_min, f"seed {seed}: too few kills hit a stream: {chaos.kills}"


def test_streams_survive_the_deaths_of_workers_and_controllers() -> None:
    with Cluster(*OPTIONS, "--tp", "1") as cluster:
        check(cluster, 1, scripts(1, 200, 50), HITS_MIN)
        assert cluster.stop() == 0


@pytest.mark.soak
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("tp", [1, 2])
def test_streams_survive_many_deaths(tp: int) -> None:
    with Cluster(*OPTIONS, "--tp", str(tp)) as cluster:
        for seed in range(2, 7):
            check(cluster, seed, scripts(seed, 200, 400, ALL_KINDS), 2 * HITS_MIN)
        assert cluster.stop() == 0
