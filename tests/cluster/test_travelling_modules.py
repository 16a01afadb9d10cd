"""The modules of a schema are computed once in the cluster: groups have them from each other. Texts are compared
with those of a cluster that does not pull."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from cluster.harness import Cluster, wait_for
from cluster.module_calls import ask, post, prompt_source, schema_source, text_of

pytestmark = [pytest.mark.processes, pytest.mark.area("survival")]

OPTIONS = ("--tp", "1", "--dtype", "float32", "--threads", "1", "--disk-tier", "0")
NAMES = ("harbour", "village", "castle")
OTHERS = ("bridge", "market", "tower")
FOUND_LEAST = 0.9
"""Part of the modules' tokens that must be found after a group has left."""


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """What prompts of each schema are answered by one group that has nobody to pull from."""
    with Cluster("--groups", "1", *OPTIONS, "--peers", "off") as alone:
        make(alone, NAMES + OTHERS)
        texts = dict(zip(NAMES + OTHERS, map(text_of, ask_all(alone, NAMES + OTHERS)), strict=True))
        assert alone.stop() == 0
    return texts


@pytest.fixture(scope="module")
def served() -> Iterator[Cluster]:
    """Two groups that take turns."""
    with Cluster("--groups", "2", *OPTIONS, "--policy", "round-robin") as cluster:
        yield cluster
        assert cluster.stop() == 0


def make(cluster: Cluster, names: Sequence[str]) -> None:
    for name in names:
        post(cluster, schema_source(name))


def ask_all(cluster: Cluster, names: Sequence[str]) -> list[dict[str, Any]]:
    return [ask(cluster, prompt_source(name, question="What is it?")) for name in names]


def saved(cluster: Cluster) -> list[int]:
    """Chunks that each group has saved in host memory so far."""
    return [cluster.metric("controller_blocks_saved_total", controller=str(group)) for group in (0, 1)]


def test_the_first_prompt_at_another_group_pulls_its_modules(served: Cluster, expected: dict[str, str]) -> None:
    make(served, NAMES)
    wait_for(lambda: sum(saved(served)) > 20, 10)
    answers = [*ask_all(served, NAMES), *ask_all(served, NAMES)]
    assert list(map(text_of, answers)) == [expected[name] for name in NAMES] * 2
    pulled = [answer["cache"]["tiers"].get("peer", 0) for answer in answers]
    assert sum(pulled) > 0, "all modules were computed once more"


def test_modules_of_a_drained_group_are_found_elsewhere(served: Cluster, expected: dict[str, str]) -> None:
    """None of them was asked for before, so each is at one group only."""
    before = saved(served)
    make(served, OTHERS)
    wait_for(lambda: sum(saved(served)) > sum(before) + 20, 10)
    more = [now - then for now, then in zip(saved(served), before, strict=True)]
    served.command("drain", str(more.index(max(more))))
    answers = ask_all(served, OTHERS)
    assert list(map(text_of, answers)) == [expected[name] for name in OTHERS]
    details = [answer["usage"]["prompt_tokens_details"] for answer in answers]
    seen = sum(each["module_tokens"] for each in details)
    assert sum(min(each["cached_tokens"], each["module_tokens"]) for each in details) >= FOUND_LEAST * seen > 0
