"""A group that leaves hands its conversations over, and a group that is new begins warm: with real workers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from cluster.chaos import View
from cluster.conversations import QUESTIONS, Conversations, body_of, expected_of
from cluster.harness import Cluster, soon, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.area("survival")]

OPTIONS = ("--tp", "1", "--dtype", "float32", "--threads", "1")
SESSIONS = 12
FOUND_LEAST = 0.8
"""Part of the tokens that were computed for the last turn that the next one must find. A third is moved, of which
a busy machine may give up some."""
LATE = SESSIONS // 4
"""Sessions that may have to be computed again."""


def last_turn(cluster: Cluster, ids: list[str], number: int) -> tuple[list[str], list[int], list[int]]:
    """What sessions answer to a question; their prompt tokens, and those that were cached."""

    def ask(session: str) -> tuple[str, int, int]:
        answer = client.post("/v1/chat/completions", json=body_of(session, QUESTIONS[number]))
        assert answer.status_code == 200, answer.text
        body = answer.json()
        usage = body["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return body["choices"][0]["message"]["content"], usage["prompt_tokens"], cached

    with httpx.Client(base_url=cluster.url, timeout=90.0) as client, ThreadPoolExecutor(4) as pool:
        texts, prompts, cached = zip(*pool.map(ask, ids), strict=True)
    return list(texts), list(prompts), list(cached)


def served_by(cluster: Cluster, groups: int) -> list[int]:
    return [cluster.metric("controller_prompt_tokens_total", controller=str(group)) for group in range(groups)]


def handed(cluster: Cluster) -> int:
    return cluster.metric("handover_paths_total", occasion="warm_up", result="handed")


def test_conversations_of_a_drained_group_are_found_elsewhere(plain: Cluster) -> None:
    expected = expected_of(plain, "handed", count=SESSIONS)
    with Cluster("--groups", "3", "--routers", "2", *OPTIONS) as cluster:
        conversations = Conversations(cluster, "handed", SESSIONS)
        assert [conversations.turn(cluster, number) for number in range(2)] == expected[:2]
        wait_for(lambda: min(served_by(cluster, 3)) > 0, 10)
        cluster.command("drain", "0")
        texts, prompts, cached = last_turn(cluster, conversations.ids, 2)
        assert texts == expected[2]
        # One of the routers has done it, and a look leaves out a router that is slow to answer.
        wait_for(lambda: cluster.metric("handover_paths_total", occasion="drain", result="handed") > 0, 10)
        # The last turn's own tokens are new to all groups, and so is a chunk that was not full.
        missing = [prompt - found for prompt, found in zip(prompts, cached, strict=True)]
        print("prompts", prompts, "missing", missing)
        assert sorted(missing)[-1 - LATE] < 2 * 64 + 32
        assert sum(cached) > FOUND_LEAST * (sum(prompts) - SESSIONS * 64)
        assert cluster.stop() == 0


def test_a_new_group_has_what_is_shared_before_it_gets_requests() -> None:
    shared = "The library has the following rules, which all of its functions keep. " * 30
    with Cluster("--groups", "2", "--routers", "1", *OPTIONS) as cluster:

        def ask(number: int) -> int:
            messages = [{"role": "system", "content": shared}, {"role": "user", "content": f"{number}. Why?"}]
            body = {"model": "trunkline-demo", "messages": messages, "max_tokens": 4, "temperature": 0}
            answer = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        for number in range(6):
            ask(number)
        for groups in (3, 4, 5):
            cluster.command("scale", str(groups))
            was_handed = soon(lambda: handed(cluster) > 0, 20)
            wait_for(View(cluster).is_healthy, 30)
            with ThreadPoolExecutor(12) as pool:
                found = list(pool.map(ask, range(24 * groups, 24 * groups + 24)))
            if was_handed:
                break  # else another new group: a busy machine may give up what it would hand over
        assert min(found) > 0
        wait_for(lambda: served_by(cluster, groups)[-1] > 0, 10)
        assert cluster.stop() == 0
