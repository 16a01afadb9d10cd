"""The modules of a schema are computed once in the cluster: groups have them from each other. Texts are compared
with those of a cluster that does not pull."""

from __future__ import annotations

from typing import Any

import pytest
from cluster.harness import Cluster, wait_for
from cluster.module_calls import ask, post, prompt_source, schema_source, text_of

pytestmark = [pytest.mark.processes, pytest.mark.area("survival")]

OPTIONS = ("--tp", "1", "--dtype", "float32", "--threads", "1", "--disk-tier", "0")
NAMES = ("harbour", "village", "castle")
FOUND_LEAST = 0.9
"""Part of the modules' tokens that must be found after a group has left."""


def make(cluster: Cluster) -> None:
    for name in NAMES:
        post(cluster, schema_source(name))


def ask_all(cluster: Cluster, question: str) -> list[dict[str, Any]]:
    return [ask(cluster, prompt_source(name, question=question)) for name in NAMES]


def are_saved(cluster: Cluster) -> bool:
    """Most of the schemas' chunks are in host memory."""
    return sum(cluster.metric("controller_blocks_saved_total", controller=str(group)) for group in (0, 1)) > 20


def test_modules_of_a_drained_group_are_found_elsewhere() -> None:
    with Cluster("--groups", "1", *OPTIONS, "--peers", "off") as alone:
        make(alone)
        expected = [ask_all(alone, "What is it?"), ask_all(alone, "Who is there?")]
        assert alone.stop() == 0
    with Cluster("--groups", "2", *OPTIONS) as cluster:
        make(cluster)
        first = ask_all(cluster, "What is it?")
        assert list(map(text_of, first)) == list(map(text_of, expected[0]))
        wait_for(lambda: are_saved(cluster), 10)
        blocks = [cluster.metric("controller_blocks_saved_total", controller=str(group)) for group in (0, 1)]
        cluster.command("drain", str(blocks.index(max(blocks))))
        second = ask_all(cluster, "Who is there?")
        assert list(map(text_of, second)) == list(map(text_of, expected[1]))
        details = [answer["usage"]["prompt_tokens_details"] for answer in second]
        seen = sum(each["module_tokens"] for each in details)
        assert sum(min(each["cached_tokens"], each["module_tokens"]) for each in details) >= FOUND_LEAST * seen > 0
        assert cluster.stop() == 0


def test_the_first_prompt_at_another_group_pulls_its_modules() -> None:
    with Cluster("--groups", "2", *OPTIONS, "--policy", "round-robin") as cluster:
        make(cluster)
        wait_for(lambda: are_saved(cluster), 10)
        answers = [ask_all(cluster, "What is it?") for _ in range(2)]
        assert list(map(text_of, answers[0])) == list(map(text_of, answers[1]))
        pulled = [answer["cache"]["tiers"].get("peer", 0) for both in answers for answer in both]
        assert sum(pulled) > 0, "all modules were computed once more"
        assert cluster.stop() == 0
