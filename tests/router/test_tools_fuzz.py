"""Random requests with tools to the endpoints that translate: any answer will do but 500 or a hang."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

_KEYS = [
    *["type", "role", "content", "text", "name", "id", "call_id", "arguments", "input", "output", "tool_use_id"],
    *[
        "function",
        "parameters",
        "input_schema",
        "properties",
        "required",
        "strict",
        "description",
        "format",
        "schema",
    ],
]
_WORDS = [
    *["message", "user", "assistant", "system", "text", "input_text", "output_text", "function_call", "function"],
    *[
        "function_call_output",
        "tool_use",
        "tool_result",
        "object",
        "auto",
        "any",
        "tool",
        "required",
        "json_schema",
    ],
    *["f", "c1", "", "{}", "\x00", "é\u2028"],
]
_leaf = st.one_of(
    st.sampled_from(_WORDS), st.none(), st.booleans(), st.sampled_from([0, -1, 0.5, 10**30, 2**64, 1e308])
)
_value = st.recursive(
    _leaf,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(_KEYS), inner, max_size=5)
    ),
    max_leaves=12,
)
_tool = st.fixed_dictionaries(
    {"type": st.just("function"), "name": st.sampled_from(["f", "g"])},
    optional={"parameters": _value, "input_schema": _value, "description": _value, "strict": _value},
)
_OPENAI_ITEMS: Any = [
    {"role": "user", "content": "x"},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 100000000000000000000000}'},
    {"type": "function_call_output", "call_id": "c1", "output": "y"},
]
_ANTHROPIC_TURNS: Any = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {"x": 10**30}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "y"}]},
]


def _mixed(items: list[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.one_of(st.sampled_from(items), _value), max_size=5)


_BODIES: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "/v1/responses": st.fixed_dictionaries(
        {"input": st.one_of(st.just("x"), st.just(_OPENAI_ITEMS), _mixed(_OPENAI_ITEMS))},
        optional={
            "tools": st.one_of(_value, st.lists(_tool, max_size=3)),
            "tool_choice": _value,
            "text": st.one_of(_value, st.fixed_dictionaries({"format": _value})),
            "instructions": _value,
            "stream": st.booleans(),
            "metadata": _value,
        },
    ),
    "/v1/messages": st.fixed_dictionaries(
        {
            "max_tokens": st.just(5),
            "messages": st.one_of(st.just(_ANTHROPIC_TURNS), _mixed(_ANTHROPIC_TURNS)),
        },
        optional={
            "tools": st.one_of(_value, st.lists(_tool.map(lambda tool: {**tool, "type": "custom"}), max_size=3)),
            "tool_choice": _value,
            "system": _value,
            "stream": st.booleans(),
            "stop_sequences": _value,
            "output_config": _value,
        },
    ),
}
_BODIES["/v1/messages/count_tokens"] = _BODIES["/v1/messages"]


@pytest.mark.parametrize("path", _BODIES)
@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_random_bodies(http: httpx.Client, path: str, data: st.DataObject) -> None:
    body = data.draw(_BODIES[path])
    answer = http.post(path, content=json.dumps(body))
    assert answer.status_code in (200, 400), (body, answer.text)
    if answer.status_code == 400:
        assert answer.json()["error"]["message"]
    else:
        assert "error" not in [line.partition(": ")[2] for line in answer.text.splitlines()]


def test_what_the_random_bodies_start_from_is_good(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"x": {"maximum": 10**30}}}
    tool = {"type": "function", "name": "f", "parameters": schema, "strict": True}
    answer = http.post("/v1/responses", json={"input": _OPENAI_ITEMS, "tools": [tool]})
    assert answer.status_code == 200
    assert answer.json()["tools"] == [tool]
    claude = {"name": "f", "input_schema": schema, "strict": True}
    body = {"max_tokens": 5, "messages": _ANTHROPIC_TURNS, "tools": [claude]}
    assert http.post("/v1/messages", json=body).status_code == 200
