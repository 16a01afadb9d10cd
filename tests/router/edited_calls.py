"""Conversations with calls of tools, whose results edits clear."""

from __future__ import annotations

from typing import Any

from router.api_calls import CITY

TOOLS: Any = [
    {"name": name, "description": "The weather.", "input_schema": CITY} for name in ("get_weather", "get_tides")
]
FUNCTIONS: Any = [
    {"type": "function", "function": {"name": tool["name"], "description": "The weather.", "parameters": CITY}}
    for tool in TOOLS
]
EVERY_TURN: Any = {
    "type": "clear_tool_uses_20250919",
    "trigger": {"type": "tool_uses", "value": 1},
    "keep": {"type": "tool_uses", "value": 1},
}


def report(number: int) -> str:
    return f"Report {number}:" + f" wind from {number} and rain on the {number}th;" * 3


def step(number: int, tool: str = "get_weather") -> list[Any]:
    """A call of a tool and its result, in Anthropic's form."""
    call = {"type": "tool_use", "id": f"toolu_{number}", "name": tool, "input": {"city": f"Place number {number}"}}
    result = {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": report(number)}
    return [
        {"role": "assistant", "content": [{"type": "text", "text": f"Step {number}."}, call]},
        {"role": "user", "content": [result]},
    ]


def conversation(steps: int) -> list[Any]:
    messages: list[Any] = [{"role": "user", "content": "How is the weather everywhere?"}]
    for number in range(steps):
        messages += step(number, "get_tides" if number == 1 else "get_weather")
    return messages
