"""Streams of all kinds while workers and controllers are killed, one after the other: nobody notices.

Two groups share the streams. What each is to say was said by the same cluster before, in peace.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from cluster.chaos import Audience, Chaos, View, flush
from cluster.crowd import ALL_KINDS, Crowd, Script, compare, scripts
from cluster.harness import Cluster

pytestmark = [pytest.mark.processes, pytest.mark.area("survival")]

CONCURRENCY = 20
HITS_MIN = 3
ROUNDS_MAX = 8
OPTIONS = ("--groups", "2", "--dtype", "float32", "--threads", "1", "--kv-memory", "48MiB", "--host-tier", "8MiB")


def in_peace(cluster: Cluster, played: Sequence[Script]) -> Crowd:
    crowd = Crowd(cluster.url)
    asyncio.run(crowd.all(played, CONCURRENCY))
    flush(cluster)
    return crowd


def in_chaos(cluster: Cluster, played: Sequence[Script], chaos: Chaos, hits_min: int) -> list[Crowd]:
    """Play the scripts; on a fast machine again and again, until enough kills have hit a stream."""
    audience = Audience()

    async def play() -> None:
        try:
            while len(audience.crowds) < ROUNDS_MAX and (not audience.crowds or chaos.hits < hits_min):
                audience.crowds.append(Crowd(cluster.url))
                await audience.crowds[-1].all(played, CONCURRENCY)
        finally:
            audience.is_done = True

    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(play())
            group.create_task(chaos.reign(audience))

    asyncio.run(both())
    return audience.crowds


def check(cluster: Cluster, seed: int, played: Sequence[Script], hits_min: int, kills_max: int) -> None:
    view = View(cluster)
    expected = in_peace(cluster, played)
    restarts = view.restarts()
    chaos = Chaos(view, seed, kills_max, hits_min)
    crowds = in_chaos(cluster, played, chaos, hits_min)
    events = {
        event: cluster.metric("dispatches_total", event=event)
        for event in ("resumed", "retried", "waited", "gave_up")
    }
    streams = sum(len(crowd.answers) for crowd in crowds)
    print(f"seed {seed}: {streams} streams, {chaos.hits} of {len(chaos.kills)} kills hit; {events}")
    print(*chaos.kills, sep="\n")
    wrong = [line for got in crowds for line in compare(played, expected, got)]
    assert not wrong, f"seed {seed}: {len(wrong)} of {streams} are wrong:\n" + "\n".join(wrong)
    assert streams == len(crowds) * sum(len(script.bodies) for script in played)
    view.wait_for_no_leaks()
    assert view.restarts() - restarts >= len(chaos.kills)
    assert events["gave_up"] == 0
    assert chaos.hits >= hits_min, f"seed {seed}: too few kills hit a stream: {chaos.kills}"


def test_streams_survive_the_deaths_of_workers_and_controllers() -> None:
    with Cluster(*OPTIONS, "--tp", "1") as cluster:
        check(cluster, 1, scripts(1, 100, 40), HITS_MIN, 2 * HITS_MIN)
        assert cluster.stop() == 0


@pytest.mark.soak
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_streams_survive_many_deaths(tp: int, seed: int) -> None:
    with Cluster(*OPTIONS, "--tp", str(tp)) as cluster:
        check(cluster, seed, scripts(seed, 200, 150, ALL_KINDS), 3 * HITS_MIN, 6 * HITS_MIN)
        assert cluster.stop() == 0
