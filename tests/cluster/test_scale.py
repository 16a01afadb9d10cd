"""Groups come and go while clients ask all the time, with stored sessions: no error, no other text.

The commands are those that a person would type.
"""

from __future__ import annotations

import asyncio

import pytest
from cluster.chaos import View
from cluster.crowd import Crowd, scripts
from cluster.harness import Cluster, wait_for
from cluster.traffic import CLIENTS, Traffic

pytestmark = [pytest.mark.processes, pytest.mark.area("survival")]
OPTIONS = ("--routers", "2", "--tp", "1", "--dtype", "float32", "--threads", "1")
KINDS = ("greedy", "sampled", "several", "shared", "session", "session")


def play(first: int, changes: tuple[int, ...], streams: int) -> None:
    """Change the number of groups under load, and compare everything with a cluster that no change disturbs."""
    played = scripts(18, streams, 60, KINDS)
    with Cluster("--groups", str(first), *OPTIONS) as cluster:
        view, expected = View(cluster), Crowd(cluster.url)
        asyncio.run(expected.all(played, CLIENTS))
        assert {answer.error for answer in expected.answers.values()} == {""}
        routers = view.pids("router")
        stayed = view.pid("controller-0" if first > 1 else "controller")
        with pytest.raises(AssertionError, match="N is 300; allowed are 1 to 256"):
            cluster.command("scale", "300")
        traffic = Traffic(cluster, played)
        try:
            for groups in changes:
                said = cluster.command("scale", str(groups))
                assert f"the cluster has {groups} group" in said
                assert len(view.status()["groups"]) == groups
                answered = traffic.streams
                wait_for(lambda count=answered: traffic.streams > count + CLIENTS, 120)  # type: ignore[misc]
                # Two routers: each shows its own links, and either may answer.
                wait_for(lambda number=groups: cluster.gauge("ready") == number, 30)  # type: ignore[misc]
        finally:
            traffic.stop()
        print(f"{traffic.streams} streams while there were {first} → {changes} groups")
        traffic.check(expected)
        assert view.pids("router") == routers
        assert view.pid("controller-0" if first > 1 else "controller") == stayed
        assert view.restarts() == 0
        assert cluster.stop() == 0


def test_groups_come_and_go_under_load() -> None:
    play(1, (2, 1, 2), 12)


@pytest.mark.soak
def test_from_three_to_four_to_two_to_three_groups_under_load() -> None:
    play(3, (4, 2, 3), 60)
