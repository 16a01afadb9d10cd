"""Tool calls in chat completions: from the request to the prompt and the grammar, and back from text to calls."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from router.api_calls import last_prompt, named_events, payloads, say
from router.fake_controller import FakeController, prompt_of
from router.harness import MESSAGES

from trunkline.router.text.tokenizer import Tokenizer

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    }
]
BODY: dict[str, Any] = {"messages": MESSAGES, "tools": TOOLS}
ARGUMENTS = {"a": 17}
CALL = f'<tool_call>\n{{"name": "add", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>'


def test_a_call(client: openai.OpenAI, http: httpx.Client, fake: FakeController, tokenizer: Tokenizer) -> None:
    say(fake, tokenizer, CALL)
    answer = client.chat.completions.create(model="demo", messages=MESSAGES, tools=TOOLS)
    ChatCompletion.model_validate(answer.model_dump())
    [choice] = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", ARGUMENTS)
    assert call.id
    prompt = last_prompt(fake, tokenizer)
    assert "Adds two numbers." in prompt
    shown = http.post("/tokenize", json={"messages": MESSAGES, "tools": TOOLS}).json()
    assert shown["tokens"] == prompt_of(fake.behaviour.submits[0])


@pytest.mark.parametrize("logprobs", [False, True])
def test_calls_in_a_stream(http: httpx.Client, fake: FakeController, tokenizer: Tokenizer, logprobs: bool) -> None:
    fake.behaviour.seconds_per_token = 0.001
    say(fake, tokenizer, f"Let me see.\n{CALL}\n{CALL}", "Nothing.")
    body = BODY | {"n": 2, "stream": True, "logprobs": logprobs, "return_token_ids": logprobs}
    parts = payloads(http.post("/v1/chat/completions", json=body))
    for part in parts:
        ChatCompletionChunk.model_validate(part)
    choices = [choice for part in parts for choice in part["choices"]]
    mine = [choice for choice in choices if choice["index"] == 0]
    assert mine[0]["delta"]["role"] == "assistant"
    assert mine[-1]["finish_reason"] == "tool_calls"
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    pieces = 0
    for choice in mine:
        for call in choice["delta"].get("tool_calls", []):
            if "id" in call:
                names[call["index"]] = call["function"]["name"]
            arguments[call["index"]] = arguments.get(call["index"], "") + call["function"]["arguments"]
            pieces += 1
    assert names == {0: "add", 1: "add"}
    assert [json.loads(text) for text in arguments.values()] == [ARGUMENTS, ARGUMENTS]
    assert pieces > 4, "arguments come as they are written"
    assert "".join(choice["delta"].get("content") or "" for choice in mine).strip() == "Let me see."
    others = [choice for choice in choices if choice["index"] == 1]
    assert "".join(choice["delta"].get("content") or "" for choice in others) == "Nothing."
    assert others[-1]["finish_reason"] == "stop"
    if logprobs:
        count = len(fake.behaviour.sample_script(fake.behaviour.submits[0], 0))  # type: ignore[misc]
        assert sum(len(choice["logprobs"]["content"]) for choice in mine if choice["logprobs"]) == count
        assert sum(len(choice.get("token_ids", [])) for choice in mine) == count


PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": BODY,
    "/v1/messages": {
        "messages": MESSAGES,
        "max_tokens": 100,
        "tools": [{"name": "add", "input_schema": TOOLS[0]["function"]["parameters"]}],
    },
    "/v1/responses": {"input": "Hello", "tools": [{"type": "function", **TOOLS[0]["function"]}]},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_the_engine_is_told_which_tools_an_answer_calls(
    http: httpx.Client, fake: FakeController, tokenizer: Tokenizer, path: str, stream: bool
) -> None:
    for text in (
        f"{CALL}\n{CALL}",
        "Nothing.",
    ):  # messages arrive in order, so the first is told by the second's end
        say(fake, tokenizer, text)
        assert http.post(path, json=PATHS[path] | {"stream": stream}).status_code == 200
    asked = [submit.request for submit in fake.behaviour.submits]
    told = [(end.request, end.ended) for end in fake.behaviour.ends if end.request in asked]
    assert told == [(asked[0], "calls add")]  # what the test before this one asked may end as late as now


def test_a_demanded_call_is_held_to_its_grammar(http: httpx.Client, fake: FakeController) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        assert http.post("/v1/chat/completions", json=BODY | {"tool_choice": choice}).status_code == 200
    for submit in fake.behaviour.submits:
        assert submit.grammar is not None
        assert "add" in submit.grammar.text
        assert submit.sampling.stop_ids
    both = BODY | {"tool_choice": "required", "response_format": {"type": "json_object"}}
    assert http.post("/v1/chat/completions", json=both).status_code == 200
    first, _, last = (submit.grammar for submit in fake.behaviour.submits)
    assert last == first, "a call has a form of its own"


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_left_of_a_demanded_call_is_no_text(
    http: httpx.Client, fake: FakeController, tokenizer: Tokenizer, stream: bool
) -> None:
    say(fake, tokenizer, CALL + '\n<tool_call>\n{"name": "add", "argu')
    body = BODY | {"tool_choice": "required", "stream": stream}
    answer = http.post("/v1/chat/completions", json=body)
    key = "delta" if stream else "message"
    parts = [choice for event in (payloads(answer) if stream else [answer.json()]) for choice in event["choices"]]
    assert sum(len(part[key].get("tool_calls", [])) > 0 for part in parts) >= 1
    assert not any(part[key].get("content") for part in parts)


SCHEMA: Any = {"type": "object", "properties": {"say": {"type": "string"}}, "required": ["say"]}
NAMED: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
FLAT: Any = [{"type": "function", **TOOLS[0]["function"]}]
EITHER: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", BODY | {"response_format": NAMED}),
    (
        "/v1/responses",
        {"input": "Hi", "tools": FLAT, "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
    ),
    (
        "/v1/messages",
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 200,
            "tools": [{"name": "add", "input_schema": TOOLS[0]["function"]["parameters"]}],
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
    ),
]


def shown(answer: httpx.Response, path: str, *, stream: bool) -> tuple[str, str]:
    """The text and the arguments of calls in an answer."""
    assert answer.status_code == 200, answer.text
    texts, arguments = "", ""
    chat = path == "/v1/chat/completions"
    parts = [answer.json()] if not stream else payloads(answer) if chat else named_events(answer)
    for part in parts:
        match part:
            case {"choices": choices}:
                for choice in choices:
                    piece = choice.get("delta") or choice.get("message") or {}
                    texts += piece.get("content") or ""
                    arguments += "".join(call["function"]["arguments"] for call in piece.get("tool_calls") or [])
            case {"type": "response.output_text.delta", "delta": delta}:
                texts += delta
            case {"type": "response.function_call_arguments.delta", "delta": delta}:
                arguments += delta
            case {"type": "content_block_delta", "delta": delta}:
                texts += delta.get("text", "")
                arguments += delta.get("partial_json", "")
            case {"object": "response", "output": items}:
                texts += "".join(item["content"][0]["text"] for item in items if item["type"] == "message")
                arguments += "".join(item["arguments"] for item in items if item["type"] == "function_call")
            case {"type": "message", "content": blocks}:
                texts += "".join(block["text"] for block in blocks if block["type"] == "text")
                arguments += "".join(json.dumps(block["input"]) for block in blocks if block["type"] == "tool_use")
    return texts, arguments


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), EITHER)
def test_a_call_or_json_in_one_answer(
    http: httpx.Client, fake: FakeController, tokenizer: Tokenizer, path: str, body: dict[str, Any], stream: bool
) -> None:
    form = json.dumps({"say": CALL})
    say(fake, tokenizer, form)
    assert shown(http.post(path, json=body | {"stream": stream}), path, stream=stream) == (form, "")
    say(fake, tokenizer, CALL)
    assert shown(http.post(path, json=body | {"stream": stream}), path, stream=stream) == (
        "",
        json.dumps(ARGUMENTS),
    )
    for submit in fake.behaviour.submits:
        assert submit.grammar is not None
        assert submit.grammar.kind == "structural_tag"
        assert "add" in submit.grammar.text
        assert "say" in submit.grammar.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [path for path, _ in EITHER])
def test_a_call_within_a_form_is_text(
    http: httpx.Client, fake: FakeController, tokenizer: Tokenizer, path: str, stream: bool
) -> None:
    text = f"Write {CALL}"
    body = dict(EITHER)[path] | {"guided_choice": [text, "no"], "stream": stream}
    for name in ("response_format", "text", "output_config"):
        body.pop(name, None)
    say(fake, tokenizer, text)
    assert shown(http.post(path, json=body), path, stream=stream) == (text, "")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), EITHER)
def test_half_a_call_is_no_text(
    http: httpx.Client, fake: FakeController, tokenizer: Tokenizer, path: str, body: dict[str, Any], stream: bool
) -> None:
    for text, arguments in (('<tool_call>\n{"name": "ad', ""), (CALL[:-16], '{"a": 1')):
        [ids] = say(fake, tokenizer, text)
        limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        answer = http.post(path, json=body | {"stream": stream, limit: len(ids) - 1})
        texts, found = shown(answer, path, stream=stream)
        assert texts == ""
        if path == "/v1/messages" and not stream:  # whose input is an object
            assert found in ("", "{}")
        else:
            assert found == arguments
        assert re.search(r'"(length|max_tokens|max_output_tokens)"', answer.text)


def test_no_calls_are_wanted(http: httpx.Client, fake: FakeController, tokenizer: Tokenizer) -> None:
    say(fake, tokenizer, CALL)
    answer = http.post("/v1/chat/completions", json=BODY | {"tool_choice": "none"}).json()
    assert answer["choices"][0]["message"]["content"] == CALL
    assert answer["choices"][0]["finish_reason"] == "stop"
