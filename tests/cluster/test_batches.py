"""A batch in a real cluster: shared prefixes are computed once, and a killed router costs nothing."""

from __future__ import annotations

import json
import os
import random
import signal
from typing import Any

import openai
import pytest
from cluster.chaos import View
from cluster.harness import Cluster, wait_for
from seeds import seeds

pytestmark = [pytest.mark.processes, pytest.mark.area("survival")]

MODEL = "trunkline-demo"
GROUPS, LINES = 5, 12


def lines_of(rng: random.Random) -> list[dict[str, Any]]:
    """Requests over a few long prefixes, shuffled."""
    words = [f"def function_{rng.randrange(10**6)}(value): return value\n" for _ in range(GROUPS * 24)]
    prefixes = ["".join(words[group * 24 : (group + 1) * 24]) for group in range(GROUPS)]
    lines = [
        {
            "custom_id": f"{group}-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": MODEL, "prompt": f"{prefix}# {number}\n", "max_tokens": 4, "temperature": 0},
        }
        for group, prefix in enumerate(prefixes)
        for number in range(LINES)
    ]
    rng.shuffle(lines)
    return lines


def run(client: openai.OpenAI, lines: list[dict[str, Any]]) -> str:
    """Begin a batch, and return its id."""
    content = "\n".join(json.dumps(line) for line in lines).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h").id


def answers_of(client: openai.OpenAI, batch: str) -> dict[str, dict[str, Any]]:
    """The answers of a batch that is over, by the names of their requests."""
    output = client.batches.retrieve(batch).output_file_id
    assert output is not None
    found = [json.loads(line) for line in client.files.content(output).text.splitlines()]
    answers = {line["custom_id"]: line["response"]["body"] for line in found}
    assert len(answers) == len(found), "a request was answered twice"
    return answers


@pytest.mark.parametrize("seed", seeds(1))
def test_shared_prefixes_are_computed_once_and_a_killed_router_costs_nothing(seed: int) -> None:
    lines = lines_of(random.Random(seed))
    with Cluster("--tp", "1", "--dtype", "float32", "--threads", "1") as cluster, cluster.client() as client:
        batch = run(client, lines)
        wait_for(lambda: client.batches.retrieve(batch).status == "completed", 90)
        first = answers_of(client, batch)
        assert set(first) == {line["custom_id"] for line in lines}
        usages = [answer["usage"] for answer in first.values()]
        computed = sum(
            usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] for usage in usages
        )
        longest = max(usage["prompt_tokens"] for usage in usages)
        assert computed < GROUPS * longest + len(lines) * 80, "each prefix once, and each line's own tokens"
        batch = run(client, lines)
        view = View(cluster)
        victim = view.pid("router")
        os.kill(victim, signal.SIGKILL)
        view.wait_replaced("router", victim)
        wait_for(lambda: client.batches.retrieve(batch).status == "completed", 90)
        second = answers_of(client, batch)
        assert {name: answer["choices"][0]["text"] for name, answer in second.items()} == {
            name: answer["choices"][0]["text"] for name, answer in first.items()
        }
        assert cluster.stop() == 0
