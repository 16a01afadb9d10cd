"""Sessions belong to the cluster: they go on whatever becomes of groups, disks, options and routers.

Texts are compared with a server that no fault disturbs, in float32.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from cluster.chaos import View
from cluster.conversations import QUESTIONS, Conversations, body_of, expected_of, messages_of, sessions_of
from cluster.harness import Cluster, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.area("survival")]

FLOAT32 = ("--dtype", "float32", "--threads", "1")
LEASE_SECONDS_MAX = 30.0
"""After so long a session is free at the latest whose router was killed; the lease itself is shorter."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    disk = tmp_path_factory.mktemp("served") / "kv"
    options = ("--groups", "2", "--routers", "2", "--tp", "1", "--disk-tier", f"{disk}:200MiB", *FLOAT32)
    with Cluster(*options) as cluster:
        yield cluster
        assert cluster.stop() == 0


def disk_of(served: Cluster, group: int) -> Path:
    """The folder of a group's disk tier."""
    pid = View(served).pid(f"worker-{group}.0")
    slabs: set[str] = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed by now
            slabs.add(os.readlink(link))
    [slab] = [Path(path) for path in slabs if path.endswith("rank-0.slab")]
    return slab.parent


def prompt_tokens(served: Cluster) -> list[int]:
    """Prompt tokens that each group has served so far."""
    return [served.metric("controller_prompt_tokens_total", controller=str(group)) for group in range(2)]


def test_sessions_of_a_drained_group_are_answered_by_another(served: Cluster, plain: Cluster) -> None:
    expected = expected_of(plain, "drained")
    before = prompt_tokens(served)
    conversations = Conversations(served, "drained")
    assert [conversations.turn(served, number) for number in range(2)] == expected[:2]
    wait_for(lambda: all(now > then for now, then in zip(prompt_tokens(served), before, strict=True)), 10)
    served.command("drain", "0")
    try:
        assert conversations.turn(served, 2) == expected[2]
    finally:
        served.command("undrain", "0")
    wait_for(View(served).is_healthy, 30)


@pytest.mark.soak
def test_sixty_sessions_when_one_of_three_groups_is_drained(plain: Cluster) -> None:
    expected = expected_of(plain, "sixty", count=60)
    with Cluster("--groups", "3", "--routers", "2", "--tp", "1", *FLOAT32) as cluster:
        view, conversations = View(cluster), Conversations(cluster, "sixty", 60)
        routers = view.pids("router")
        assert [conversations.turn(cluster, number) for number in range(2)] == expected[:2]
        cluster.command("drain", "0")
        assert conversations.turn(cluster, 2) == expected[2]
        assert view.pids("router") == routers
        assert sessions_of(cluster) == set(conversations.ids)
        assert cluster.stop() == 0


def test_a_group_that_loses_memory_and_disk_loses_no_session(served: Cluster, plain: Cluster) -> None:
    """Its host has burnt down: its processes are killed, and its folder is gone."""
    expected, view = expected_of(plain, "burnt", turns=4), View(served)
    conversations = Conversations(served, "burnt")
    assert [conversations.turn(served, number) for number in range(2)] == expected[:2]
    folder = disk_of(served, 0)
    victims = [view.pid(name) for name in ("controller-0", "worker-0.0")]
    shutil.rmtree(folder)
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    assert conversations.turn(served, 2) == expected[2]
    view.wait_replaced("controller-0", victims[0])
    assert conversations.turn(served, 3) == expected[3]


def test_a_router_that_dies_in_a_turn_keeps_its_session_for_a_moment_only(served: Cluster) -> None:
    """The turn is lost, as its client sees; what was stored before is there, and the next turn follows it."""
    view = View(served)
    [session] = (conversations := Conversations(served, "robbed", 1)).ids
    conversations.turn(served, 0)
    before = messages_of(served, session)
    # Known before, and many tokens: the turn must not end before the routers do.
    killed = [view.pid(f"router-{index}") for index in range(2)]
    turn = body_of(session, QUESTIONS[1], stream=True, max_tokens=1400)
    with (
        httpx.Client(base_url=served.url, timeout=60.0) as client,
        client.stream("POST", "/v1/chat/completions", json=turn) as response,
    ):
        assert response.status_code == 200
        lines = response.iter_lines()
        next(line for line in lines if line.startswith("data: ") and json.loads(line[6:])["choices"])
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            list(lines)
    # Each look meets one of the routers.
    wait_for(lambda: all(served.health() == 200 for _ in range(16)), 30)
    assert messages_of(served, session) == before
    again: list[httpx.Response] = []

    def is_answered() -> bool:
        again.append(
            httpx.post(f"{served.url}/v1/chat/completions", json=body_of(session, QUESTIONS[1]), timeout=60)
        )
        return again[-1].status_code == 200

    wait_for(is_answered, LEASE_SECONDS_MAX)
    assert {answer.status_code for answer in again} <= {200, 409}, [answer.text for answer in again]
    assert len(messages_of(served, session)) == len(before) + 2


def test_sessions_stay_with_other_options(tmp_path: Path, plain: Cluster) -> None:
    """Their KV is named by these options and is computed again; what was said is named by the tokenizer only."""
    expected = expected_of(plain, "options", turns=2, count=4)
    kept = ("--records", f"sqlite:{tmp_path / 'records.sqlite'}", "--disk-tier", "0")
    with Cluster("--tp", "1", *FLOAT32, *kept) as cluster:
        conversations = Conversations(cluster, "options", 4)
        assert conversations.turn(cluster, 0) == expected[0]
        assert cluster.stop() == 0
    with Cluster("--tp", "2", "--chunk-size", "32", *FLOAT32, *kept) as cluster:
        assert sessions_of(cluster) == set(conversations.ids)
        assert conversations.turn(cluster, 1) == expected[1]
        for session in conversations.ids:
            assert len(messages_of(cluster, session)) == 1 + 2 * 2
        assert cluster.stop() == 0
