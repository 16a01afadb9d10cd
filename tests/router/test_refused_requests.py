"""What clients get wrong is refused with a 4xx that names the parameter, before anything reaches an engine."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest
from router.fake_controller import FakeController
from router.harness import MESSAGES, VOCAB_SIZE
from router.schema_calls import PLAN, PLAN_OBJECT, TRIP, post
from router.session_calls import error_of

from trunkline.router.api.requests import TOKENIZE_CHARACTERS_MAX

DEEP = json.loads("[" * 150 + "]" * 150)
TOO_LONG = "a" * (TOKENIZE_CHARACTERS_MAX + 1)
WORDS = "word " * 30_000
LONG = [7] * 3000


class Also(dict[str, Any]):
    """Several fields of a body, where one does not make the mistake."""


class Endpoint(NamedTuple):
    """Where to send what is wrong, and what is right about it."""

    path: str
    body: dict[str, Any]


CHAT = Endpoint("/v1/chat/completions", {"messages": MESSAGES})
TEXT = Endpoint("/v1/completions", {"prompt": "x"})
BEAMS = {"use_beam_search": True, "beam_width": 2}
CUT = {"truncation": "auto", "prompt": LONG}
USER = {"role": "user", "content": "x"}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}


def said(**message: Any) -> list[Any]:
    """Messages of which the second is like this."""
    return [*MESSAGES, message]


def called(**changes: Any) -> list[Any]:
    """Messages with a call that has these changes."""
    return said(role="assistant", content=None, tool_calls=[CALL | changes])


STRUCTURED: dict[str, list[Any]] = {
    "nonsense": [1], "regex": ["", 5, "a" * 65_537], "choice": [[], ["a", ""], [1]], "grammar": [""],
    "json": ["{", 5], "structural_tag": [[1]], "whitespace_pattern": ["a"],
}  # fmt: skip
BOTH: dict[str, list[Any]] = {
    "temperature": [-0.1, 2.1, "1", 1e999, True, [], {}],
    "top_p": [0, -1, 1.01, "x"],
    "top_k": [-2, 1.5, 2**40, "5", 10**30],
    "min_p": [-0.1, 1.1],
    "seed": [2**63, -(2**63) - 1, 1.5, "1", 10**40],
    "max_tokens": [0, -1, 1.5, "5", True, 2**31, 10**100],
    "stop": ["", [""], ["a"] * 17, 5, [5], {"a": 1}, "x" * 2000],
    "stop_token_ids": [[-1], [VOCAB_SIZE], ["a"], 5, [1.5], [10**30], list(range(300))],
    "ignore_eos": ["yes", 1, Also(guided_regex="a", ignore_eos=True)],
    "presence_penalty": [-2.1, 2.1, "1"],
    "frequency_penalty": [-2.1, 2.1],
    "repetition_penalty": [0, -1, 1e-300, 2.1],
    "logit_bias": [{"a": 1}, {"5": 101}, {"5": "1"}, {"5": True}, {"99999": 1}, {"-1": 1}, [1], {"5": 1e999}],
    "skip_special_tokens": ["no"],
    "include_stop_str_in_output": [3],
    "stream": ["yes", 1],
    "stream_options": [{"include_usage": True}, 5],
    "model": [5, ["demo"]],
    "n": [0, -1, 1.5, "1", True, 257, 1025, 10**20],
    "best_of": [0, -1, "2", 257, 1025, Also(n=3, best_of=2), Also(n=1, best_of=2, stream=True)],
    "use_beam_search": ["yes", 1],
    "beam_width": [0, -1, 2, "4", True, 65, Also(use_beam_search=True)],
    "length_penalty": [2, -11, 11, "1", 1e999],
    "early_stopping": [True, "never", "always", 1],
    "min_tokens": [-1, 1.5, "5", True, 2**31, 2**31 - 1, Also(min_tokens=30, max_tokens=20)],
    "bad_words": [5, "x", [""], ["  "], [5], ["a"] * 129, ["a" * 257]],
    "allowed_token_ids": [[], 5, [-1], [VOCAB_SIZE], ["a"], [True], [1.5], [10**30]],
    "prompt_logprobs": [-1, 21, 1.5, "1", True, Also(prompt_logprobs=1, stream=True)],
    "truncate_prompt_tokens": [0, -1, 1.5, "5", True, 10**20],
    "return_token_ids": ["yes", 1],
    "priority": [2**31, -(2**31) - 1, 1.5, "high", True],
    "response_format": [5, "json", {"type": "structural_tag"}],
    "response_format.type": [{}, {"type": "xml"}],
    "response_format.json_schema": [{"type": "json_schema"}],
    "response_format.json_schema.name": [{"type": "json_schema", "json_schema": {}}],
    "response_format.json_schema.schema": [
        {"type": "json_schema", "json_schema": {"name": "s", **bad}} for bad in ({}, {"schema": [1]})],
    "structured_outputs": [5, {}, {"json_object": False}, {"regex": "a", "grammar": "b"}],
    **{f"structured_outputs.{name}": [{name: bad} for bad in values] for name, values in STRUCTURED.items()},
    "guided_json": [5, [], "{", DEEP, {"title": "x" * 300_000}, "[" * 100_000],
    "guided_regex": ["", 5, {"a": 1}, Also(guided_regex="a", response_format={"type": "json_object"})],
    "guided_choice": [[], [""], "a", [5], 5, Also(guided_regex="a", guided_choice=["a"])],
    "guided_whitespace_pattern": ["a"],
    "guided_grammar": ["", 5],
    "logits_processors": [["a.b"]],
    "return_tokens_as_token_ids": ["yes", 1],
    "return_timings": ["yes", 1],
    "prompt_embeds": ["x"],
    "truncation": [5],
    "truncation.type": ["sometimes", {}],
    "truncation.retention_ratio": [{"type": "retention_ratio", "retention_ratio": bad} for bad in (0, 1)],
    "truncation.keep.sink_tokens": [{"type": "retention_ratio", "keep": {"sink_tokens": -1}}],
    "truncation.keep.sinks": [{"type": "retention_ratio", "keep": {"sinks": 4}}],
}  # fmt: skip
CHAT_ONLY: dict[str, list[Any]] = {
    "messages": [[], None, "hi", 5, {}, DEEP, [{"role": "pirate", "content": "x"}]],
    "messages[0]": [["hi"], [5], [USER | {"tool_calls": [CALL]}], [{"role": "function", "content": ""}]],
    "messages[0].content": [
        *[[{"role": "user", **content}] for content in ({}, {"content": None}, {"content": 5})],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    ],
    "messages[0].role": [[{"content": "x"}], [{"role": 5, "content": "x"}]],
    "messages[1].content": [said(role="user", content=[{"type": "text"}])],
    "messages[1]": [said(role="tool", content="x")],
    "messages[1].tool_calls[0].id": [called(id=5), said(role="assistant", content="", tool_calls=[{}])],
    "messages[1].tool_calls[0].type": [called(type="code")],
    "messages[1].tool_calls[0].function.name": [called(function={"arguments": "{}"})],
    "messages[1].tool_calls[0].function.arguments": [called(function={"name": "f", "arguments": {}})],
    "logprobs": [5, "true"],
    "top_logprobs": [5, 21, -1],
    "max_completion_tokens": [0, "1", 1e999, 2047],
    "max_tokens": [0],
    "echo": [True, "yes"],
    "tools": [5, [5], [{"type": "function"}], [{"type": "web_search"}],
              Also(BEAMS, tools=[{"type": "function", "function": {"name": "f"}}])],
    "tool_choice": ["required", "maybe", 5, {"type": "function"}],
    "parallel_tool_calls": ["yes", 1],
    "functions": [[{"name": "f"}]],
    "audio": [{"voice": "x"}],
    "modalities": [["audio"]],
    "chat_template": ["{{ 1 }}"],
    "chat_template_kwargs": [5],
    "prompt": ["x"],
    "documents": [5, [5], [{"text": 5}], [{"text": "x"}] * 1025, [{"text": "no use in this template"}]],
    "reasoning": [5, "low"],
    "reasoning.effort": [{"effort": "huge"}],
    "reasoning.max_tokens": [{"max_tokens": -1}],
}  # fmt: skip
TEXT_ONLY: dict[str, list[Any]] = {
    "prompt": [None, "", [], [[]], [""], ["a", ""], [[1], []], ["a", [1]], [[1], [VOCAB_SIZE]], ["a"] * 1025,
               [VOCAB_SIZE], [-1], [1.5], ["a", 1], 5, {}, [True], [10**30], DEEP, {"modules": []},
               {"schema": "trip", "modules": 5}, Also(prompt=["x"] * 40, n=30),
               Also(CUT, max_tokens=2046)],
    "prompt[1]": [[[5], bad, [6]] for bad in ([5] * 2048, [10**6], [])],
    "echo": ["yes", 1, Also(CUT, echo=True)],
    "logprobs": [True, 21, -1, "5"],
    "suffix": ["x"],
    "max_tokens": [0, Also(prompt=[5] * 2000, max_tokens=49), Also(CUT, max_tokens=2048)],
    "trailing": ["compact"],
    "session_id": ["", 5],
    "pml": [5, Also(pml=PLAN, prompt="x"), Also(pml=PLAN, prompt=PLAN_OBJECT)],
    "n": [Also(use_beam_search=True, n=65), Also(BEAMS, n=3)],
    "beam_width": [Also(BEAMS, beam_width=30, stop_token_ids=list(range(5, 205)), max_tokens=50)],
    "truncation": [Also(CUT, **BEAMS), Also(CUT, prompt=[LONG, LONG]), {"type": "auto", "retention_ratio": 0.3}],
    "prompt_logprobs": [Also(CUT, prompt_logprobs=0)],
    "truncate_prompt_tokens": [Also(CUT, truncate_prompt_tokens=5)],
    **{name: [Also(BEAMS, **{name: value})] for name, value in {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": 1,
        "repetition_penalty": 1.1, "logit_bias": {"5": 1}, "stop": "x", "min_tokens": 3, "bad_words": ["x"],
        "allowed_token_ids": [5], "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"},
    }.items()},
}  # fmt: skip
OF_MODULES: dict[str, list[Any]] = {
    "echo": [True], "prompt_logprobs": [1], "suffix": ["x"], "truncation": ["x"], "truncate_prompt_tokens": [9],
    "trailing": ["x"], "max_tokens": [2047], "session_id": ["sess_x"],
}  # fmt: skip
SESSION: dict[str, list[Any]] = {
    "ttl": [0, "5", 10**9],
    "metadata": [{"a": 5}, {str(i): "x" for i in range(17)}, {"k" * 65: "x"}, {"k": "x" * 513}],
    "truncation.type": ["perhaps"],
    "messages": [[], [{"role": "wizard", "content": "x"}]],
    "messages[0].content": [[{"role": "user", "content": 5}]],
    "schema": [5, "none", Also(pml=PLAN, schema="trip")],
    "prompt": ["s", {"schema": "none"}],
    "trailing": ["compact"],
    "pml": ["<"],
    "cache_salt": ["x"],
}
SCHEMA: dict[str, list[Any]] = {
    "json": [Also(pml=None, json={})],
    "pml": [
        None,
        '<schema name="x">a</schem>',
        '<schema name="x"><module name="m"><param name="p" len="99999999"/></module></schema>',
        Also(json={}),
    ],
    "warm": [Also(pin=True, warm=False)],
    "encode_scope": ["all"],
    "ttl": [-1],
}
RESPONSE: dict[str, list[Any]] = {
    "input": [None, "", [], 5, WORDS, [{"type": "function_call_output", "call_id": "none", "output": "x"}]],
    "input[0]": [["x"]],
    "input[0].role": [[{"role": "robot", "content": "x"}]],
    "input[0].content": [[{"role": "user"}]],
    "input[0].content[0]": [[{"role": "user", "content": ["x"]}]],
    "input[0].content[0].type": [[{"role": "user", "content": [{"type": "input_image"}]}]],
    "input[0].content[0].text": [[USER | {"content": [{"type": "input_text", **t}]}] for t in ({}, {"text": 3})],
    "input[0].type": [[{"type": kind}] for kind in (3, None)],
    "input[0].id": [[{"type": "item_reference"}], [{"type": "item_reference", "id": 3}]],
    "input[0].call_id": [[{"type": "function_call", "name": "f", "arguments": "{}"}]],
    "max_output_tokens": [0, 100_000],
    "temperature": [3],
    "tools[0]": [[5], [{"type": 3}]],
    "tools[0].name": [[{"type": "function"}], [{"type": "function", "name": 3}]],
    "tool_choice": ["required"],
    "text.format.type": [{"format": {"type": "xml"}}],
    "text.format.schema": [{"format": {"type": "json_schema", "name": "x"}}],
    "text.format": [{"format": 5}],
    "previous_response_id": [3],
    "conversation": [3, {}, {"id": 3}, Also(conversation="conv_1", previous_response_id="resp_1")],
    "truncation": ["sometimes"],
    "reasoning.effort": [Also(reasoning={"effort": "huge"})],
    "top_logprobs": [-1, 99],
    "include": [5, [5]],
    "metadata.a": [{"a": 1}],
    "stream": ["yes"],
    "session_id": ["sess_x"],
    "prompt": [PLAN_OBJECT],
    "pml": [5, "<"],
}  # fmt: skip
TOKENIZE: dict[str, list[Any]] = {
    "prompt": [None, 5, TOO_LONG, Also(messages=MESSAGES)],
    "messages": [Also(prompt=None, messages=[]), Also(prompt=None, messages=[USER | {"content": TOO_LONG}])],
}
DETOKENIZE: dict[str, list[Any]] = {"tokens": [None, [VOCAB_SIZE], [-1], "5"], "tokens[0]": [[1.5]]}

TABLES: list[tuple[Endpoint, dict[str, list[Any]]]] = [
    (CHAT, BOTH),
    (TEXT, BOTH),
    (CHAT, CHAT_ONLY),
    (TEXT, TEXT_ONLY),
    (Endpoint("/v1/completions", {"pml": PLAN}), OF_MODULES),
    (Endpoint("/v1/sessions", {}), SESSION),
    (Endpoint("/v1/schemas", {"pml": TRIP}), SCHEMA),
    (Endpoint("/v1/responses", {"input": "Hi"}), RESPONSE),
    (Endpoint("/tokenize", {"prompt": "x"}), TOKENIZE),
    (Endpoint("/detokenize", {}), DETOKENIZE),
]


def cases(endpoint: Endpoint, table: dict[str, list[Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(parameter, whole body) of each row."""
    for param, values in table.items():
        for value in values:
            fields = value if isinstance(value, Also) else {re.split(r"[.\[]", param)[0]: value}
            yield param, {**endpoint.body, **fields}


@pytest.mark.parametrize(("endpoint", "table"), TABLES, ids=lambda value: getattr(value, "path", ""))
def test_bad_values_name_their_parameter(
    http: httpx.Client, fake: FakeController, endpoint: Endpoint, table: dict[str, list[Any]]
) -> None:
    post(http)
    for param, body in cases(endpoint, table):
        sent = json.dumps(body, allow_nan=True).replace("Infinity", "1e999")
        answer = http.post(endpoint.path, content=sent)
        told = (param, sent[:300], answer.text)
        assert answer.status_code in (400, 404), told
        error = answer.json()["error"]
        found = error["param"] or ""
        assert found == param or ("." not in param and re.match(re.escape(param) + r"[.\[]", found)), told
        assert not re.search(r"\.(bool|int|str|literal|list)\b", found), told
        assert not re.search("instance of|validation|dictionary", error["message"]), told
        assert error["type"] in ("invalid_request_error", "not_found_error"), told
        assert param.partition(".")[0] in error["message"] or table is not BOTH, told
    assert not fake.behaviour.submits


@pytest.mark.parametrize(
    "neutral",
    [
        {"n": 1, "best_of": 1, "tool_choice": "none", "tools": [], "response_format": {"type": "text"}},
        {"use_beam_search": False, "beam_width": 1, "length_penalty": 1.0, "early_stopping": False},
        {"min_tokens": 0, "bad_words": [], "prompt_logprobs": False, "echo": False, "priority": 0},
        {"structured_outputs": None, "guided_json": None, "allowed_token_ids": None, "tools": None},
        {"user": "me", "store": True, "metadata": {"a": "b"}, "nonsense": [1], "parallel_tool_calls": True},
        {"temperature": 0, "top_p": 1, "stop": None, "logit_bias": {}, "seed": None, "max_tokens": None},
        {"temperature": 2, "top_k": 0, "repetition_penalty": 2, "min_p": 1, "seed": -(2**63)},
    ],
)
def test_neutral_and_unknown_fields_pass(http: httpx.Client, neutral: dict[str, Any]) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": MESSAGES, **neutral})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("name", "sent", "message"),
    [
        ("temperature", "9", "`temperature` is 9; it should be less than or equal to 2"),
        ("temperature", "1e999", "`temperature` is inf; it should be"),
        ("n", "1.5", "`n` is 1.5; it should be a valid integer"),
        ("n", "9" * 4000, "`n` is a number of many digits; it should be"),
        ("n", "[1]", "`n` is a list; it should be a valid integer"),
        ("logprobs", '"yes"', "`logprobs` is 'yes'; it should be a valid boolean"),
        ("cache_salt", "false", "`cache_salt` is false; it should be a valid string"),
        ("seed", f'"{"s" * 5000}"', "`seed` is a string of 5000 characters; it should be a valid integer"),
        ("response_format", '{"type": "yaml"}', "`response_format.type` is 'yaml'; it should be 'text', "),
        ("messages", "{}", "`messages` is an object; it should be a valid list"),
    ],
)
def test_errors_say_what_was_given(name: str, sent: str, message: str, http: httpx.Client) -> None:
    said = "" if name == "messages" else f', "messages": {json.dumps(MESSAGES)}'
    answer = http.post("/v1/chat/completions", content=f'{{"{name}": {sent}{said}}}')
    assert (answer.status_code, answer.json()["error"]["message"][: len(message)]) == (400, message)


@pytest.mark.parametrize(
    "body",
    [
        *[b"", b"{", b"[]", b"5", b"null", b'{"a":NaN}', b'{"prompt":"\\ud800"}', b"\xff\xfe", b"[" * 100_000],
        *[b'{"prompt":"a\x00"}', b'{"prompt":' + b"9" * 5000 + b"}", b'{"a":Infinity}', b'{"prompt":"x"} y'],
    ],
)
def test_bad_json(http: httpx.Client, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        response = http.post(path, content=body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["type"] == "invalid_request_error"


def test_bodies_with_an_encoding(http: httpx.Client) -> None:
    """A compressed one is called so, not JSON with an error at its start. Of others the header says nothing."""
    body = json.dumps({"prompt": "Hi", "max_tokens": 2}).encode()
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    refused = http.post("/v1/completions", content=gzip.compress(body), headers=headers)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (415, "unsupported_media_type")
    assert "'gzip'" in error["message"]
    assert http.post("/v1/completions", content=body, headers=headers).status_code == 200
    for plain in ({}, {"Content-Encoding": "identity"}):
        wrong = http.post("/v1/completions", content=b"[]", headers={"Content-Type": "application/json", **plain})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "invalid_json")


def test_context_length(http: httpx.Client, fake: FakeController) -> None:
    chat = {"messages": [{"role": "user", "content": "word " * 5000}]}
    for endpoint, param, body in (
        (TEXT, "prompt", {"prompt": [5] * 2048}),
        (TEXT, "prompt", {"prompt": "word " * 5000}),
        (TEXT, "prompt", {"prompt": "word " * 500_000}),
        (CHAT, "messages", chat),
        (CHAT, "messages", chat | {"truncation": "disabled"}),
    ):
        answer = http.post(endpoint.path, json=body)
        assert error_of(answer) == (400, "context_length_exceeded", param)
        assert "2048" in answer.json()["error"]["message"]
    assert "48" in http.post(TEXT.path, json={"prompt": [5] * 2000, "max_tokens": 49}).json()["error"]["message"]
    assert not fake.behaviour.submits
    assert http.post(TEXT.path, json={"prompt": [5] * 2000, "max_tokens": 48}).status_code == 200
    assert http.post(TEXT.path, json={"prompt": [5] * 2047}).status_code == 200
    assert [submit.max_tokens for submit in fake.behaviour.submits] == [48, 1]


@pytest.mark.parametrize(
    ("path", "body"),
    [CHAT, TEXT, ("/v1/sessions", {}), ("/v1/schemas", {"pml": TRIP}), ("/v1/responses", {"input": "Hi"})],
)
def test_other_models(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    assert error_of(http.post(path, json=body | {"model": "gpt-5"})) == (404, "model_not_found", "model")
