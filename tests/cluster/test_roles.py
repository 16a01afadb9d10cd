"""Groups with roles: long prompts are computed by one group, and their streams go on at another one. Texts are
compared in float32."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from cluster.chaos import View
from cluster.harness import Cluster, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.area("survival")]

OPTIONS = ("--tp", "1", "--dtype", "float32", "--threads", "1", "--disk-tier", "0")
ROLES = ("--groups", "2", "--role", "prefill,decode")
TEXT = " ".join(f"Item {number} costs {number * 7 % 101} coins." for number in range(115))
PROMPTS = 4
NUMBERS = itertools.count()
"""Of prompts that no group has yet: what the decode group has, it does not let the other one compute."""
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
def alone() -> Iterator[Cluster]:
    """One group that computes everything."""
    with Cluster("--groups", "1", *OPTIONS) as cluster:
        yield cluster
        assert cluster.stop() == 0


@pytest.fixture(scope="module")
def parted() -> Iterator[Cluster]:
    with Cluster(*ROLES, *OPTIONS) as cluster:
        wait_for(lambda: roles_of(cluster) == ["prefill", "decode"], 60)
        yield cluster
        assert cluster.stop() == 0


def roles_of(cluster: Cluster) -> list[str]:
    groups = httpx.get(f"{cluster.url}/health", timeout=60).json()["controllers"]
    return [group["role"] for group in groups if group["ready"]]


def went_on(cluster: Cluster) -> int:
    return cluster.metric("planned_continuations_total", outcome="went_on")


def tokens(cluster: Cluster, kind: str) -> list[int]:
    return [cluster.metric(f"controller_{kind}_tokens_total", controller=str(group)) for group in range(2)]


def test_texts_are_those_of_one_group(parted: Cluster, alone: Cluster) -> None:
    """How many prompts are computed apart depends on measured times; of several at once some are."""
    bodies = [body_of(next(NUMBERS)) for _ in range(PROMPTS)]
    with ThreadPoolExecutor(PROMPTS) as pool:
        answers = list(pool.map(lambda body: answer(parted, body), bodies))
    assert answers == [answer(alone, body) for body in bodies]
    wait_for(lambda: went_on(parted) > 0 or not answer(parted, body_of(next(NUMBERS))), 60)
    wait_for(lambda: tokens(parted, "output")[1] >= 39 * PROMPTS, 10)
    assert tokens(parted, "output")[0] < 39, "it computes first tokens, and those of probes"
    assert tokens(parted, "cached")[1] > 600, "most of a prompt's KV came from the prefill group"
    number = next(NUMBERS)
    for more in REQUESTS:
        assert answer(parted, body_of(number, **more)) == answer(alone, body_of(number, **more)), more


@pytest.mark.parametrize("killed", ["prefill", "decode"])
@pytest.mark.parametrize("when", ["while the prompt is computed", "later"])
def test_either_group_is_killed(parted: Cluster, alone: Cluster, killed: str, when: str) -> None:
    """Requests go on at the other group, with the same texts; a group that comes back has its role again."""
    view, name = View(parted), "controller-0" if killed == "prefill" else "controller-1"
    victim = view.pid(name)

    def is_killed() -> bool:
        """Ask until a prompt is computed apart, and kill then: again if all were quicker computed at one place."""
        bodies, before = [body_of(next(NUMBERS)) for _ in range(PROMPTS)], went_on(parted)

        def is_time() -> bool:
            if when == "later":
                return went_on(parted) > before
            return parted.metric("controller_inflight", controller="0") > 0

        with ThreadPoolExecutor(PROMPTS) as pool:
            asked = [pool.submit(answer, parted, body) for body in bodies]
            wait_for(lambda: is_time() or all(each.done() for each in asked), 60)
            if has_come := is_time():
                os.kill(victim, signal.SIGKILL)
            answers = [each.result() for each in asked]
        assert answers == [answer(alone, body) for body in bodies]
        return has_come

    wait_for(is_killed, 60)
    view.wait_replaced(name, victim)
    wait_for(lambda: sorted(roles_of(parted)) == ["decode", "prefill"], 60)
    wait_for(parted.is_idle, 20)
