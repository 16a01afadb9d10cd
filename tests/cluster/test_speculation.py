"""Drafts on real processes: two ranks with `--speculation auto` answer what they answer without drafts.

Each request is asked without drafts first, and then with drafts, with the text of its answer as `prediction`,
until enough were accepted: how many there are depends on the machine's times. The prompt leaves much open, so that
tokens drawn with other noise would be others.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from cluster.harness import Cluster, wait_for

pytestmark = pytest.mark.processes

TRIES = 60
ENOUGH = 40
"""Accepted drafts of a kind of request, over all tries."""
BODY: dict[str, Any] = {"prompt": "Topics of today:\n\n1.", "max_tokens": 80, "seed": 5, "ignore_eos": True}
SCHEMA = {
    "type": "object",
    "properties": {"first_name": {"enum": ["Ada", "Grace"]}, "temperature": {"type": "integer", "maximum": 150}},
    "required": ["first_name", "temperature"],
    "additionalProperties": False,
}
GRAMMAR = {"type": "json_schema", "json_schema": {"name": "reading", "schema": SCHEMA}}
KINDS: dict[str, dict[str, Any]] = {
    "greedy, with log-probabilities": {"temperature": 0, "logprobs": 3},
    "drawn, with log-probabilities": {"temperature": 1.0, "logprobs": 2},
    "hot": {"temperature": 1.4, "top_p": 0.9},
    "penalties": {"temperature": 0.7, "presence_penalty": 0.4, "frequency_penalty": 0.2, "logprobs": 1},
    "samples": {"temperature": 1.0, "n": 3},
    "grammar": {"temperature": 1.0, "response_format": GRAMMAR, "ignore_eos": False},
}


@pytest.fixture(scope="module")
def drafting() -> Iterator[Cluster]:
    with Cluster("--tp", "2", "--dtype", "float32", "--speculation", "auto") as cluster:
        yield cluster
        assert cluster.stop() == 0


def complete(cluster: Cluster, body: dict[str, Any]) -> dict[str, Any]:
    return cluster.post("/v1/completions", {"model": "trunkline-demo"} | body)


def counts(answer: dict[str, Any]) -> dict[str, int]:
    return dict(answer["usage"].get("completion_tokens_details", {}))


def with_drafts(cluster: Cluster, body: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same answer again and again, until enough drafts were accepted."""
    body = body | {"prediction": {"type": "content", "content": expected["choices"][0]["text"]}}
    accepted = 0
    for _ in range(TRIES):
        answer = complete(cluster, body)
        assert answer["choices"] == expected["choices"]
        assert answer["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
        found = counts(answer)
        assert found["accepted_drafts"] <= found["drafted_tokens"]
        assert found["accepted_prediction_tokens"] <= found["accepted_drafts"]
        accepted += found["accepted_drafts"]
        if accepted >= ENOUGH:
            return
    pytest.fail(f"{accepted} drafts were accepted")


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_without_drafts(drafting: Cluster, kind: str) -> None:
    """Bit by bit, log-probabilities included."""
    body = BODY | KINDS[kind]
    expected = complete(drafting, body | {"speculation": False})
    assert counts(expected) == {}, "it was asked without drafts"
    with_drafts(drafting, body, expected)


def test_a_stop_string_among_drafts(drafting: Cluster) -> None:
    """It ends in the middle of what one step brings; what was drawn behind it does not count."""
    body = BODY | {"temperature": 1.0}
    whole = complete(drafting, body | {"speculation": False})
    text = whole["choices"][0]["text"]
    body |= {"stop": [text[len(text) // 2 :][:9]]}
    expected = complete(drafting, body | {"speculation": False})
    assert expected["choices"][0]["finish_reason"] == "stop"
    assert text.startswith(expected["choices"][0]["text"])
    with_drafts(drafting, body, expected)


def test_metrics_count_what_answers_count(drafting: Cluster) -> None:
    names = "drafted_tokens_total", "accepted_drafts_total"
    drafting.refresh()
    wait_for(drafting.is_idle, 10)
    before = drafting.gauges(*names)
    expected = [0, 0]
    for _ in range(TRIES):
        found = counts(complete(drafting, BODY | {"temperature": 0}))
        expected = [expected[0] + found.get("drafted_tokens", 0), expected[1] + found.get("accepted_drafts", 0)]
        if expected[1]:
            break
    assert expected[1] > 0
    drafting.refresh()
    after = drafting.gauges(*names)
    assert [now - then for now, then in zip(after, before, strict=True)] == expected


def streamed(cluster: Cluster, body: dict[str, Any], victim: str) -> tuple[str, dict[str, int]]:
    """The text of a stream, and what came of its drafts; a process is killed when its first tokens have come."""
    body = {"model": "trunkline-demo", "stream": True, "stream_options": {"include_usage": True}} | body
    pid: int | None = cluster.pids[victim]
    text, last = "", {}
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=90.0) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            last = json.loads(line.removeprefix("data: "))
            text += "".join(choice["text"] for choice in last["choices"])
            if text and pid is not None:
                os.kill(pid, signal.SIGKILL)
                pid = None
    return text, counts(last)


@pytest.mark.parametrize("victim", ["worker-1", "controller"])
def test_a_stream_with_drafts_outlives_a_process(drafting: Cluster, victim: str) -> None:
    """It goes on behind the tokens that have come, of which several came at once."""
    body = BODY | {"temperature": 1.0, "max_tokens": 400}
    expected = complete(drafting, body | {"speculation": False})["choices"][0]["text"]
    resumed = drafting.metric("dispatches_total", event="resumed")
    body["prediction"] = {"type": "content", "content": expected}
    for _ in range(TRIES):
        text, found = streamed(drafting, body, victim)
        assert text == expected
        drafting.wait_healthy()
        is_resumed = drafting.metric("dispatches_total", event="resumed") > resumed
        if found.get("accepted_drafts") and (is_resumed or victim != "controller"):
            break
    else:
        pytest.fail("no stream with drafts was interrupted")
    assert f"{victim} was killed by SIGKILL" in drafting.log
    wait_for(drafting.is_idle, 10)
