"""Calls in the forms of other families, demanded of the demo model on real processes: the engine's grammar makes
the model write the form, and the router reads it back."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from cluster.harness import Cluster

pytestmark = pytest.mark.processes

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["os", "sys"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "count"],
}
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Tell me of a module."}],
    "tools": [{"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}],
    "tool_choice": "required",
    "max_tokens": 160,
    "thinking_budget": 12,
    "seed": 1,
}


@pytest.mark.parametrize(("parser", "thinks"), [("qwen3_xml", False), ("pythonic", True)])
def test_a_demanded_call(parser: str, thinks: bool) -> None:
    options = ("--reasoning-parser", "deepseek_r1") if thinks else ()  # whose answers begin within a thought
    with Cluster("--tp", "1", "--tool-call-parser", parser, *options) as cluster:
        url = f"{cluster.url}/v1/chat/completions"
        answer = httpx.post(url, json=BODY, timeout=90.0).json()
        whole = answer["choices"][0]
        assert bool(whole["message"].get("reasoning_content")) == thinks
        if thinks:  # the model would never end it by itself
            mark = 8
            assert (
                answer["usage"]["completion_tokens_details"]["reasoning_tokens"] <= BODY["thinking_budget"] + mark
            )
        assert whole["finish_reason"] == "tool_calls"
        assert whole["message"]["content"] is None
        [call] = whole["message"]["tool_calls"]
        assert call["function"]["name"] == "look_up"
        found = json.loads(call["function"]["arguments"])
        assert found.keys() == {"name", "count"}
        assert found["name"] in ("os", "sys")
        assert found["count"] in range(10)
        streamed = httpx.post(url, json=BODY | {"stream": True}, timeout=90.0).text
        events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
        parts = [
            part
            for event in events
            for choice in event["choices"]
            for part in choice["delta"].get("tool_calls", [])
        ]
        assert json.loads("".join(part["function"]["arguments"] for part in parts)) == found
