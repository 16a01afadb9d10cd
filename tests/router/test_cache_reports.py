"""What answers and metrics say of the cache: where a prompt's KV was found, and why not all of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from router.fake_controller import FakeController
from router.harness import MESSAGES, RunningRouter, wait_until

from trunkline.controller.messages import Submit
from trunkline.router.messages import MissReason, Started, TierState

CHAT: dict[str, Any] = {"messages": MESSAGES}
FOUND: list[tuple[Callable[[Submit], Started], dict[str, Any]]] = [
    (
        lambda submit: Started(submit.request, 11, [4, 0, 7, 0]),
        {"status": "hit", "tier": "disk", "tiers": {"device": 4, "disk": 7}, "reason": None, "miss_token": None},
    ),
    (
        lambda submit: Started(submit.request, 3, [0, 3], MissReason.DIVERGED, 3, exact=False),
        {"status": "partial", "tier": "host", "tiers": {"host": 3}, "reason": "diverged", "miss_token": 3},
    ),
    (
        lambda submit: Started(submit.request, 0, [], MissReason.NEW, 0),
        {"status": "miss", "tier": None, "tiers": {}, "reason": "new", "miss_token": 0},
    ),
    (
        lambda submit: Started(submit.request, 2, [1, 0, 0, 1], MissReason.SLOW, 2),
        {
            "status": "partial",
            "tier": "remote",
            "tiers": {"device": 1, "remote": 1},
            "reason": "slow",
            "miss_token": 2,
        },
    ),
]


def last_chunk(response: httpx.Response) -> tuple[Any, list[Any]]:
    """The last chunk of a stream, and those before it."""
    *others, last, done = [part.removeprefix("data: ") for part in response.text.split("\n\n") if part]
    assert done == "[DONE]"
    return json.loads(last), [json.loads(other) for other in others]


@pytest.mark.parametrize(("found", "told"), FOUND)
def test_answers(
    http: httpx.Client, fake: FakeController, found: Callable[[Submit], Started], told: dict[str, Any]
) -> None:
    fake.behaviour.found = found
    told = {**told, "exact": told["status"] != "partial" or told["reason"] != "diverged"}
    for path, body in (
        ("chat/completions", CHAT),
        ("completions", {"prompt": "x"}),
        ("responses", {"input": "x"}),
    ):
        assert http.post(f"/v1/{path}", json=body).json()["cache"] == told
    for path, body in (("chat/completions", CHAT), ("completions", {"prompt": "x"})):
        for options in ({}, {"stream_options": {"include_usage": True}}):
            last, others = last_chunk(http.post(f"/v1/{path}", json={**body, "stream": True, **options}))
            assert last["cache"] == told
            assert ("usage" in last) == bool(options)
            assert not any("cache" in other for other in others)


def test_once_in_a_stream_of_several_choices(http: httpx.Client) -> None:
    last, others = last_chunk(http.post("/v1/chat/completions", json=CHAT | {"n": 3, "stream": True}))
    assert "cache" in last
    assert not any("cache" in other for other in others)
    body = {"prompt": ["x", "y"], "n": 2, "stream": True}
    last, others = last_chunk(http.post("/v1/completions", json=body))
    assert "cache" in last
    assert not any("cache" in other for other in others)


def test_several_prompts_together(http: httpx.Client, fake: FakeController) -> None:
    def found(submit: Submit) -> Started:
        if submit.prompt_len == 1:
            return Started(submit.request, 0, [], MissReason.EVICTED, 0)
        return Started(submit.request, 3, [1, 2])

    fake.behaviour.found = found
    answer = http.post("/v1/completions", json={"prompt": [[5, 6, 7, 8], [5], [5, 6, 7, 9]]}).json()
    assert answer["cache"] == {
        "status": "partial",
        "tier": "host",
        "tiers": {"device": 2, "host": 4},
        "exact": True,
        "reason": "evicted",
        "miss_token": 0,
    }
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 6


def values_of(http: httpx.Client) -> dict[tuple[str, ...], float]:
    """Values of metrics by name and labels, but for the controller's."""
    return {
        (
            sample.name,
            *(value for label, value in sorted(sample.labels.items()) if label != "controller"),
        ): sample.value
        for family in text_string_to_metric_families(http.get("/metrics").text)
        for sample in family.samples
    }


def test_metrics(http: httpx.Client, fake: FakeController, router: RunningRouter) -> None:
    fake.behaviour.tiers = [
        TierState("host", 100, 40, 1000, 50, 20, 10, 0),
        TierState("disk", 900, 300, 77, 60, 30, 5, 2, "no space left"),
    ]
    fake.behaviour.misses = {"new": 8, "ttl": 3}
    for link in router.service.links:
        router.spawn(_ping(link))
    wait_until(lambda: bool(router.service.links[0].state and router.service.links[0].state.tiers))
    kept = values_of(http).get(("trunkline_truncations_total", "kept"), 0)  # other tests use the router, too
    truncated = {"prompt": [7] * 3000, "truncation": "auto"}
    assert http.post("/v1/completions", json=truncated).status_code == 200
    values = values_of(http)
    expected = {
        ("trunkline_tier_up", "host"): 1,
        ("trunkline_tier_up", "disk"): 0,
        ("trunkline_tier_slots", "disk"): 900,
        ("trunkline_tier_slots_used", "host"): 40,
        ("trunkline_tier_hit_tokens_total", "host"): 1000,
        ("trunkline_tier_writes_total", "host"): 50,
        ("trunkline_tier_reads_total", "disk"): 30,
        ("trunkline_tier_evictions_total", "disk"): 5,
        ("trunkline_tier_failures_total", "disk"): 2,
        ("trunkline_prefix_miss_total", "new"): 8,
        ("trunkline_prefix_miss_total", "ttl"): 3,
        ("trunkline_truncations_total", "kept"): kept + 1,
    }
    assert {name: values.get(name) for name in expected} == expected
    http.get("/v1/sessions/sess_x")
    http.post("/v1/sessions/sess_x/fork")
    text = http.get("/metrics").text
    assert 'endpoint="/v1/sessions/{session}",status="404"' in text
    assert 'endpoint="/v1/sessions/{session}/fork",status="404"' in text


async def _ping(link: Any) -> None:
    link.ping()
