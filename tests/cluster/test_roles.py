"""Groups with roles: long prompts are computed by one group, and their streams go on at another one. Texts are
compared in float32."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from cluster.harness import Cluster, soon, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.area("survival")]

OPTIONS = ("--tp", "1", "--dtype", "float32", "--threads", "1", "--disk-tier", "0")
ROLES = ("--groups", "2", "--role", "prefill,decode")
TEXT = " ".join(f"Item {number} costs {number * 7 % 101} coins." for number in range(115))
PROMPTS = 4
REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "logprobs": 2, "presence_penalty": 0.4},
    {"temperature": 0.9, "stop": ["coins"]},
    {"temperature": 0.7, "response_format": {"type": "json_object"}},
    {"temperature": 0.9, "n": 2},
    {"temperature": 0.9, "max_tokens": 1},
]


def body_of(number: int, **more: Any) -> dict[str, Any]:
    return {"prompt": f"List {number}. {TEXT}", "max_tokens": 40, "seed": number} | more


def answer(cluster: Cluster, body: dict[str, Any]) -> Any:
    return cluster.post("/v1/completions", body)["choices"]


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """The answers of one group that computes everything."""
    with Cluster("--groups", "1", *OPTIONS) as cluster:
        of_kind = {str(more): answer(cluster, body_of(100, **more)) for more in REQUESTS}
        return of_kind | {str(number): answer(cluster, body_of(number)) for number in range(PROMPTS)}


@pytest.fixture
def parted() -> Iterator[Cluster]:
    with Cluster(*ROLES, *OPTIONS) as cluster:
        wait_for(lambda: roles_of(cluster) == ["prefill", "decode"], 60)
        yield cluster
        assert cluster.stop() == 0


def roles_of(cluster: Cluster) -> list[str]:
    groups = httpx.get(f"{cluster.url}/health", timeout=10).json()["controllers"]
    return [group["role"] for group in groups if group["ready"]]


def planned(cluster: Cluster, **labels: str) -> int:
    return cluster.metric("planned_continuations_total", **labels)


def tokens(cluster: Cluster, kind: str) -> list[int]:
    return [cluster.metric(f"controller_{kind}_tokens_total", controller=str(group)) for group in range(2)]


def test_texts_are_those_of_one_group(parted: Cluster, expected: dict[str, Any]) -> None:
    """How many prompts are computed apart depends on measured times; of several at once some are."""
    with ThreadPoolExecutor(PROMPTS) as pool:
        answers = list(pool.map(lambda number: answer(parted, body_of(number)), range(PROMPTS)))
    assert answers == [expected[str(number)] for number in range(PROMPTS)]
    for number in range(PROMPTS, 10 * PROMPTS):
        if soon(lambda: planned(parted, outcome="went_on") > 0, 2):
            break
        answer(parted, body_of(number))
    assert planned(parted, outcome="went_on") > 0
    wait_for(lambda: tokens(parted, "output")[1] >= 39 * PROMPTS, 10)
    assert tokens(parted, "output")[0] < 39, "it computes first tokens, and those of probes"
    assert tokens(parted, "cached")[1] > 600, "most of a prompt's KV came from the prefill group"
    for more in REQUESTS:
        assert answer(parted, body_of(100, **more)) == expected[str(more)], more


@pytest.mark.parametrize("killed", ["prefill", "decode"])
@pytest.mark.parametrize("when", ["while the prompt is computed", "later"])
def test_either_group_is_killed(parted: Cluster, expected: dict[str, Any], killed: str, when: str) -> None:
    """Requests go on at the other group, with the same texts; a group that comes back has its role again."""
    controllers = sorted(name for name in parted.pids if name.startswith("controller"))
    doomed = controllers[0 if killed == "prefill" else 1]
    with ThreadPoolExecutor(PROMPTS) as pool:
        asked = [pool.submit(answer, parted, body_of(number)) for number in range(PROMPTS)]
        if when == "later":
            wait_for(lambda: planned(parted, outcome="went_on") > 0, 60)
        else:
            wait_for(lambda: parted.metric("controller_requests_running", controller="0") > 0, 30)
        os.kill(parted.pids[doomed], signal.SIGKILL)
        answers = [each.result() for each in asked]
    assert answers == [expected[str(number)] for number in range(PROMPTS)]
    wait_for(lambda: sorted(roles_of(parted)) == ["decode", "prefill"], 60)
    wait_for(parted.is_idle, 20)
