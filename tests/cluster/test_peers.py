"""Groups pull from each other what they have not computed themselves. Texts are compared in float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cluster.harness import Cluster, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.area("survival")]

OPTIONS = ("--groups", "2", "--tp", "1", "--dtype", "float32", "--threads", "1", "--disk-tier", "0")
IN_TURN = ("--policy", "round-robin")
"""The second of two equal requests goes to the other group."""
TEXT = " ".join(f"Item {number} costs {number * 7 % 101} coins." for number in range(120))
PROMPTS = 4


@pytest.fixture(scope="module")
def served() -> Iterator[Cluster]:
    with Cluster(*OPTIONS, *IN_TURN) as cluster:
        yield cluster
        assert cluster.stop() == 0


def prompt_of(label: str) -> str:
    return f"{label}. {TEXT}"


def answer(served: Cluster, prompt: str, path: str = "/v1/completions") -> dict[str, Any]:
    body: dict[str, Any] = {"temperature": 0}
    match path:
        case "/v1/completions":
            body |= {"prompt": prompt, "max_tokens": 8}
        case "/v1/responses":
            body |= {"input": prompt, "max_output_tokens": 16, "store": False}
        case _:
            body |= {"messages": [{"role": "user", "content": prompt}], "max_tokens": 8}
    return served.post(path, body)


def saved(served: Cluster) -> list[int]:
    return [served.metric("controller_blocks_saved_total", controller=str(group)) for group in range(2)]


def twice(served: Cluster, prompt: str, path: str = "/v1/completions") -> list[dict[str, Any]]:
    """The answers of both groups, the second one after the first has the prompt in host memory."""
    before = saved(served)
    first = answer(served, prompt, path)
    wait_for(lambda: max(now - then for now, then in zip(saved(served), before, strict=True)) >= 10, 10)
    return [first, answer(served, prompt, path)]


def pulled(reply: dict[str, Any]) -> int:
    return int(reply["cache"]["tiers"].get("peer", 0))


def in_metrics(served: Cluster) -> int:
    return sum(served.metric("tier_hit_tokens_total", controller=str(group), tier="peer") for group in range(2))


def test_what_one_group_has_computed_another_one_pulls(served: Cluster) -> None:
    before = in_metrics(served)
    answers = [twice(served, prompt_of(f"Prompt {number}")) for number in range(PROMPTS)]
    for first, second in answers:
        assert not pulled(first)
        assert first["choices"][0]["text"] == second["choices"][0]["text"]
    tokens = sum(pulled(second) for _, second in answers)
    assert tokens > 0
    wait_for(lambda: in_metrics(served) == before + tokens, 10)
    assert served.metric("routing_expected_tokens_total", kv="peer") >= tokens


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_answers_say_what_came_from_a_peer(served: Cluster, path: str) -> None:
    replies = [twice(served, prompt_of(f"{path} {number}"), path)[1] for number in range(PROMPTS)]
    assert any(pulled(reply) and reply["cache"]["tier"] == "peer" for reply in replies)


def test_without_peers_nothing_is_pulled() -> None:
    with Cluster(*OPTIONS, *IN_TURN, "--peers", "off") as cluster:
        first, second = twice(cluster, prompt_of("Off"))
        assert not pulled(second)
        assert first["choices"][0]["text"] == second["choices"][0]["text"]
        assert cluster.metric("routing_expected_tokens_total", kv="peer") == 0
        assert cluster.stop() == 0
