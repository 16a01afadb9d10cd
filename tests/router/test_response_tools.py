"""Tools of `/v1/responses`: every kind is accepted, and a call comes back as the client knows the tool."""

from __future__ import annotations

import json
import random
from typing import Any, Final

import httpx
import openai
import pytest
from router.api_calls import Say, last_prompt, named_events
from router.fake_controller import FakeController
from seeds import seeds

from trunkline.router.errors import ApiError
from trunkline.router.text.tokenizer import Tokenizer
from trunkline.router.tools.response_tools import (
    OwnTool,
    custom_arguments,
    custom_input,
    function_name,
    read_response_choice,
    read_response_tools,
)

PLAIN: Final = {"type": "function", "name": "run", "parameters": {"type": "object", "properties": {}}}
CUSTOM: Final = {"type": "custom", "name": "apply_patch", "description": "Changes files."}
AGENTS: Final = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [{**PLAIN, "name": "close"}, {**CUSTOM, "name": "tell"}],
}
FOREIGN: Final = [
    {"type": "web_search", "external_web_access": False},
    {"type": "local_shell"},
    {"type": "mcp", "x": 1},
]
ALL: Final = [PLAIN, CUSTOM, AGENTS, *FOREIGN, FOREIGN[0]]
PATCH: Final = '*** Begin\n+say "hello" \\n ü\n*** End'


def call_of(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_each_kind_of_tool() -> None:
    tools = read_response_tools(ALL)
    assert [function.name for function in tools.functions] == [
        "run",
        "apply_patch",
        "agents__close",
        "agents__tell",
    ]
    assert tools.own["agents__close"] == OwnTool("close", "agents")
    assert tools.own["agents__tell"] == OwnTool("tell", "agents", is_custom=True)
    assert tools.own["apply_patch"] == OwnTool("apply_patch", is_custom=True)
    assert tools.unavailable == ("web_search", "local_shell", "mcp")
    assert tools.of_call("unheard") == OwnTool("unheard")
    assert tools.functions[1].schema["required"] == ["input"]
    assert read_response_tools(None).functions == []


def test_names_that_a_function_cannot_have() -> None:
    assert function_name("a.b", "my server") == "my_server__a_b"
    assert function_name("n" * 60, "space") == "n" * 60
    tools = read_response_tools([{**AGENTS, "tools": [{**PLAIN, "name": "a.b"}]}])
    assert tools.own == {"agents__a_b": OwnTool("a.b", "agents")}


def test_formats_of_custom_tools() -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"}
    [function] = read_response_tools([{**CUSTOM, "format": form}]).functions
    assert function.strict
    assert function.schema["properties"]["input"]["pattern"] == "^(?:[0-9]+)$"
    [function] = read_response_tools([{**CUSTOM, "format": {**form, "syntax": "lark"}}]).functions
    assert not function.strict
    assert function.description == "Changes files.\nThe input follows this grammar (Lark):\n[0-9]+"
    [function] = read_response_tools([{**CUSTOM, "format": {"type": "text"}}]).functions
    assert (function.strict, function.description) == (False, "Changes files.")


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ("x", "tools"),
        ([1], "tools[0]"),
        ([{"type": "namespace"}], "tools[0].name"),
        ([{"type": "namespace", "name": "n"}], "tools[0].tools"),
        ([{"type": "namespace", "name": "n", "tools": [{}]}], "tools[0].tools[0]"),
        ([{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}], "tools[0].tools[0].name"),
        ([{**CUSTOM, "format": {"type": "grammar", "syntax": "bnf"}}], "tools[0].format"),
        ([CUSTOM, CUSTOM], "tools[1]"),
        ([AGENTS] * 129, "tools"),
    ],
)
def test_what_is_refused(tools: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_response_tools(tools)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_choices() -> None:
    tools = read_response_tools(ALL)
    assert read_response_choice(None, tools).kind == "auto"
    assert read_response_choice("required", tools).kind == "required"
    assert read_response_choice({"type": "custom", "name": "apply_patch"}, tools).name == "apply_patch"
    assert (
        read_response_choice({"type": "function", "name": "close", "namespace": "agents"}, tools).name
        == "agents__close"
    )
    with pytest.raises(ApiError, match="not available here"):
        read_response_choice({"type": "web_search"}, tools)


@pytest.mark.parametrize("seed", seeds(20))
def test_inputs_survive_their_way_through_arguments(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice('a"\\\n\t{}ü🌍\u2028') for _ in range(rng.randrange(40)))
    assert custom_input(custom_arguments(text)) == text


def test_arguments_that_are_no_input() -> None:
    for arguments in ('{"input": 3}', "[1]", '{"input": "cut of', "", '{"other": "x"}'):
        assert custom_input(arguments) == arguments


@pytest.mark.parametrize("stream", [False, True])
def test_calls_come_back_as_the_client_knows_them(
    http: httpx.Client, fake: FakeController, tokenizer: Tokenizer, say: Say, stream: bool
) -> None:
    said = [
        call_of("apply_patch", json.dumps({"input": PATCH}, ensure_ascii=False)),
        call_of("agents__close", "{}"),
    ]
    say("Well.\n" + "\n".join(said))
    answer = http.post("/v1/responses", json={"input": "Hi", "tools": ALL, "stream": stream})
    events = named_events(answer) if stream else []
    response = events[-1]["response"] if stream else answer.json()
    text, custom, spaced = response["output"]
    assert text["type"] == "message"
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "apply_patch", PATCH)
    assert "arguments" not in custom
    assert (spaced["type"], spaced["name"], spaced["namespace"]) == ("function_call", "close", "agents")
    assert response["unavailable_tools"] == ["web_search", "local_shell", "mcp"]
    assert response["tools"] == ALL
    if stream:
        kinds = [event["type"].removeprefix("response.") for event in events]
        begin = kinds.index("custom_tool_call_input.delta")
        assert kinds[begin : begin + 3] == [
            *("custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done")
        ]
        assert events[begin]["delta"] == events[begin + 1]["input"] == PATCH
    outputs = [
        {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "done"}
        for item in (custom, spaced)
    ]
    again = http.post("/v1/responses", json={"input": [*response["output"], *outputs], "tools": ALL})
    assert again.status_code == 200, again.text
    prompt = last_prompt(fake, tokenizer)
    assert all(one in prompt for one in said)
    assert prompt.count("<tool_response>\ndone\n</tool_response>") == 2
    items = {"input": outputs, "previous_response_id": response["id"], "tools": ALL}
    stored = http.post("/v1/responses", json=items)
    assert stored.status_code == 200, stored.text
    assert all(one in last_prompt(fake, tokenizer) for one in said)


FOREIGN_ITEMS: Final = [
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
    {"type": "local_shell_call", "id": "l", "call_id": "c1", "status": "completed", "action": {"command": ["ls"]}},
    {"type": "local_shell_call_output", "call_id": "c1", "output": {"stdout": "a.txt"}},
    {"type": "compaction", "encrypted_content": "of another server"},
    {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA", "content": None},
    {"type": "function_call", "call_id": "c2", "name": "run", "arguments": "{}"},
    {
        "type": "function_call_output",
        "call_id": "c2",
        "output": [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": "data:"}],
    },
    {"type": "something_new", "x": 1},
]


def test_items_of_other_servers(http: httpx.Client, fake: FakeController, tokenizer: Tokenizer) -> None:
    given = [{"role": "user", "content": "Hi"}, *FOREIGN_ITEMS]
    answer = http.post("/v1/responses", json={"input": given, "tools": [PLAIN]})
    assert answer.status_code == 200, answer.text
    prompt = last_prompt(fake, tokenizer)
    assert '{"name": "local_shell", "arguments": {"action": {"command": ["ls"]}}}' in prompt
    assert '<tool_response>\n{"stdout": "a.txt"}\n</tool_response>' in prompt
    assert "see\n[an image, which this model cannot see]" in prompt
    assert "another server" not in prompt
    assert "gAAAA" not in prompt
    stored = http.post("/v1/responses", json={"input": "And?", "previous_response_id": answer.json()["id"]})
    assert stored.status_code == 200, stored.text
    assert '<tool_response>\n{"stdout": "a.txt"}\n</tool_response>' in last_prompt(fake, tokenizer)
    items = http.get(f"/v1/responses/{answer.json()['id']}/input_items").json()["data"]
    assert {item["type"] for item in items} >= {"web_search_call", "something_new", "compaction"}
    warnings = "\n".join(answer.json()["warnings"])
    assert (
        "`input[8]` was left out: its type 'something_new' is not known; known are message, reasoning, "
        in warnings
    )
    assert "web_search_call" not in warnings


@pytest.mark.parametrize(
    ("given", "param", "index"),
    [
        (
            [{"role": "user", "content": "Hi"}, {"type": "mesage", "role": "user", "content": "More"}],
            "input[1].type",
            1,
        ),
        ([{"type": "mesage", "content": "Hi"}], "input", 0),
        ([{"type": "web_search_call", "id": "w"}, {"type": "a b", "x": 1}], "input", 1),
    ],
)
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/input_tokens"])
def test_items_that_would_be_missed(
    given: list[Any], param: str, index: int, path: str, http: httpx.Client
) -> None:
    answer = http.post(path, json={"input": given})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert f"`input[{index}]`" in error["message"]
    assert repr(given[index]["type"]) in error["message"]
    assert "known are message, reasoning, function_call, " in error["message"]


@pytest.mark.parametrize("seconds_per_token", [0.0, 0.005])
@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities(
    client: openai.OpenAI, http: httpx.Client, fake: FakeController, stream: bool, seconds_per_token: float
) -> None:
    """Also of the token that ends the answer, which has no text, and comes with the last of it or alone."""
    fake.behaviour.seconds_per_token = seconds_per_token
    body: dict[str, Any] = {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = http.post("/v1/responses", json=body | {"stream": stream})
    events = named_events(answer) if stream else []
    response = events[-1]["response"] if stream else answer.json()
    part = response["output"][0]["content"][0]
    written = b"".join(bytes(entry["bytes"]) for entry in part["logprobs"]).decode()
    assert written == part["text"] + "<|end|>"
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
    assert response["top_logprobs"] == 2
    if stream:
        told = [entry for event in events if event["type"].endswith("text.delta") for entry in event["logprobs"]]
        assert told == part["logprobs"]
    without = http.post("/v1/responses", json={"input": "Hi"}).json()
    assert without["output"][0]["content"][0]["logprobs"] == []
    parsed = client.responses.create(model="demo", input="Hi", include=["message.output_text.logprobs"])
    assert parsed.output_text == part["text"]
