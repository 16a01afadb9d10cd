"""Samples, beams, grammars, tools and scored prompts on real processes; and the same under pressure.

What each request must say is found out by asking it alone. Then all kinds run at once, on two ranks and in a pool
that is too small for them: preempted by swapping, and with the prompts' pace held back. The texts must be equal.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from cluster.harness import Cluster, wait_for

from trunkline.controller.sequences.beam_search import sample_seed

pytestmark = pytest.mark.processes

PROMPT = "def read_lines(path):\n    with open(path) as file:\n"
PLAIN = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0.9, "seed": 7, "ignore_eos": True}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["os", "sys"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "count"],
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
MIXTURE: list[dict[str, Any]] = [
    PLAIN | {"n": 4},
    PLAIN | {"prompt": PROMPT * 3, "n": 3, "seed": 11, "max_tokens": 90},
    {"prompt": PROMPT, "use_beam_search": True, "beam_width": 4, "n": 4, "max_tokens": 60},
    {"prompt": "import os\n" * 12, "use_beam_search": True, "beam_width": 2, "n": 2, "max_tokens": 70},
    PLAIN | {"temperature": 0, "max_tokens": 150},
    PLAIN
    | {"structured_outputs": {"regex": r"[a-z]{3,8}(, [a-z]{3,8}){4}"}, "ignore_eos": False, "max_tokens": 90},
    PLAIN | {"min_tokens": 30, "bad_words": ["return"], "seed": 3, "ignore_eos": False, "max_tokens": 80},
    PLAIN | {"prompt": PROMPT * 2, "logprobs": 2, "echo": True, "prompt_logprobs": 1, "max_tokens": 50},
]


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def complete(cluster: Cluster, **body: Any) -> dict[str, Any]:
    response = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=90.0)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def all_at_once(cluster: Cluster) -> list[list[str]]:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120.0) as client:
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in MIXTURE))
    assert [answer.status_code for answer in answers] == [200] * len(MIXTURE)
    return [texts(answer.json()) for answer in answers]


@pytest.fixture(scope="module")
def alone(cluster: Cluster) -> list[list[str]]:
    """The mixture's answers, one request after the other."""
    return [texts(complete(cluster, **body)) for body in MIXTURE]


def test_each_sample_is_what_its_seed_gives_alone(cluster: Cluster) -> None:
    together = texts(complete(cluster, **PLAIN, n=3))
    seeds = [sample_seed(7, index) for index in range(3)]
    signed = [seed - (1 << 64) if seed >> 63 else seed for seed in seeds]  # as JSON clients may send it
    apart = [texts(complete(cluster, **PLAIN | {"seed": seed})) for seed in signed]
    assert [[text] for text in together] == apart
    assert len(set(together)) == 3


def test_the_mixture_at_once_says_what_each_says_alone(cluster: Cluster, alone: list[list[str]]) -> None:
    cluster.refresh()
    forks = cluster.gauge("forks_total")
    assert asyncio.run(all_at_once(cluster)) == alone
    cluster.refresh()
    wait_for(cluster.is_idle, 10)
    assert cluster.gauge("forks_total") - forks == 3 + 2 + 3 + 1


@pytest.mark.parametrize(
    "options",
    [
        ("--preemption", "swap", "--host-tier", "64MiB", "--target-itl-ms", "20"),
        ("--preemption", "recompute", "--token-budget", "80", "--max-batch", "20"),
    ],
    ids=["swap", "recompute"],
)
def test_the_mixture_in_a_small_pool_says_the_same(options: tuple[str, ...], alone: list[list[str]]) -> None:
    with Cluster(
        "--tp", "1", "--dtype", "float32", "--chunk-size", "16", "--kv-memory", "4MiB", *options
    ) as small:
        for _ in range(2):
            assert asyncio.run(all_at_once(small)) == alone
        wait_for(lambda: small.gauge("preemptions_total") > 0, 10)
        wait_for(small.is_idle, 10)
        if "swap" in options:
            assert small.gauge("blocks_loaded_total") > 0
        too_wide = PLAIN | {"n": 20, "max_tokens": 400}
        refused = httpx.post(f"{small.url}/v1/completions", json=too_wide, timeout=60.0)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "n"


def test_grammars_and_tools_hold_the_model_to_their_form(cluster: Cluster) -> None:
    chat = {"messages": [{"role": "user", "content": "Tell me of a module."}], "max_tokens": 120, "seed": 1}
    form = {"type": "json_schema", "json_schema": {"name": "module", "schema": SCHEMA}}
    answer = httpx.post(
        f"{cluster.url}/v1/chat/completions", json=chat | {"response_format": form, "n": 2}, timeout=90.0
    ).json()
    for choice in answer["choices"]:
        found = json.loads(choice["message"]["content"])
        assert found["name"] in ("os", "sys")
        assert 0 <= found["count"] <= 9
    answer = httpx.post(
        f"{cluster.url}/v1/chat/completions",
        json=chat | {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        timeout=90.0,
    ).json()
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "look_up"
    assert json.loads(call["function"]["arguments"])["name"] in ("os", "sys")
    # A call, or the form: which of them is up to the model.
    answer = httpx.post(
        f"{cluster.url}/v1/chat/completions",
        json=chat | {"tools": [TOOL], "response_format": form, "n": 2},
        timeout=90.0,
    ).json()
    for choice in answer["choices"]:
        calls = choice["message"].get("tool_calls") or []
        assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
        if calls:
            assert {call["function"]["name"] for call in calls} == {"look_up"}
        else:
            assert json.loads(choice["message"]["content"])["name"] in ("os", "sys")


def test_a_grammar_that_cannot_be_compiled_is_refused_and_harms_nobody(cluster: Cluster) -> None:
    for parameters, name in (
        ({"structured_outputs": {"regex": "a(b"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "root ::= missing"}}, "structured_outputs.grammar"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}},
         "response_format"),
    ):  # fmt: skip
        body = {"prompt": PROMPT, "max_tokens": 20} | parameters
        response = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60.0)
        assert response.status_code == 400, response.text
        assert name in str(response.json()["error"]["param"])
    cluster.wait_healthy()
