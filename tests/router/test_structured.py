"""Structured output and other wishes about single tokens: what reaches the engine, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from router.fake_controller import UNSATISFIABLE, FakeController, prompt_of
from router.harness import EOS, MESSAGES, RunningRouter

from trunkline.kvstore.chunks import unpack_int32
from trunkline.router.text.tokenizer import Tokenizer

CHAT: dict[str, Any] = {"messages": MESSAGES}
PLAIN: dict[str, Any] = {"prompt": "x"}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
SCHEMA_TEXT = json.dumps(SCHEMA, separators=(",", ":"))
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}
OLDER_TAG = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"},
        {"begin": "<f=b>", "schema": SCHEMA_TEXT, "end": "</f>"},
    ],
    "triggers": ["<f="],
}
TRIGGERED = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f="],
        "tags": [
            {
                "type": "tag",
                "begin": f"<f={name}>",
                "content": {"type": "json_schema", "json_schema": SCHEMA},
                "end": "</f>",
            }
            for name in "ab"
        ],
    },
}


@pytest.mark.parametrize(
    ("given", "kind", "text", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", "", "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
            "json_schema",
            SCHEMA_TEXT,
            "response_format.json_schema.schema",
        ),
        ({"response_format": TAG}, "structural_tag", TAG, "response_format"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA_TEXT, "structured_outputs.json"),
        ({"structured_outputs": {"json": SCHEMA_TEXT}}, "json_schema", SCHEMA_TEXT, "structured_outputs.json"),
        ({"structured_outputs": {"json": True}}, "json_schema", "true", "structured_outputs.json"),
        ({"structured_outputs": {"regex": "[ab]+"}}, "regex", "[ab]+", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["ja", "né"]}}, "choice", '["ja","né"]', "structured_outputs.choice"),
        (
            {"structured_outputs": {"grammar": 'root ::= "a"'}},
            "ebnf",
            'root ::= "a"',
            "structured_outputs.grammar",
        ),
        ({"structured_outputs": {"json_object": True}}, "json_object", "", "structured_outputs.json_object"),
        (
            {"structured_outputs": {"structural_tag": TAG}},
            "structural_tag",
            TAG,
            "structured_outputs.structural_tag",
        ),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA_TEXT, "guided_json"),
        ({"guided_regex": "a|b"}, "regex", "a|b", "guided_regex"),
        ({"guided_choice": ["a", "b"]}, "choice", '["a","b"]', "guided_choice"),
        ({"guided_grammar": "root ::= x"}, "ebnf", "root ::= x", "guided_grammar"),
        ({"json_schema": SCHEMA_TEXT}, "json_schema", SCHEMA_TEXT, "guided_json"),
        ({"json_schema": SCHEMA}, "json_schema", SCHEMA_TEXT, "guided_json"),
        ({"regex": "a|b"}, "regex", "a|b", "guided_regex"),
        ({"ebnf": "root ::= x"}, "ebnf", "root ::= x", "guided_grammar"),
        ({"response_format": OLDER_TAG}, "structural_tag", TRIGGERED, "response_format"),
        (
            {"structured_outputs": {"structural_tag": json.dumps(OLDER_TAG)}},
            "structural_tag",
            TRIGGERED,
            "structured_outputs.structural_tag",
        ),
    ],
)
def test_grammars_reach_the_engine(
    http: httpx.Client, fake: FakeController, given: Any, kind: str, text: Any, param: str
) -> None:
    for path, base in (("/v1/chat/completions", CHAT), ("/v1/completions", PLAIN)):
        response = http.post(path, json=base | given | {"stop_token_ids": [9]})
        assert response.status_code == 200, response.text
    for submit in fake.behaviour.submits:
        grammar = submit.grammar
        assert grammar is not None
        assert (grammar.kind, grammar.param) == (kind, param)
        assert (json.loads(grammar.text) if isinstance(text, dict) else grammar.text) == text
        assert unpack_int32(submit.sampling.stop_ids).tolist() == [EOS, 9], "the engine must know what ends a text"


@pytest.mark.parametrize("given", [{}, {"response_format": {"type": "text"}}, {"response_format": None}])
def test_free_text(http: httpx.Client, fake: FakeController, given: Any) -> None:
    assert http.post("/v1/chat/completions", json=CHAT | given).status_code == 200
    [submit] = fake.behaviour.submits
    assert (submit.grammar, submit.sampling.stop_ids) == (None, b"")


TOOL_FUNCTION: Any = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
IN_EVERY_API: Any = [
    ("/v1/completions", PLAIN | {"guided_json": SCHEMA}),
    ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_object"}}),
    ("/v1/chat/completions", CHAT | {"response_format": TAG}),
    (
        "/v1/chat/completions",
        CHAT | {"tools": [{"type": "function", "function": TOOL_FUNCTION}], "tool_choice": "required"},
    ),
    ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_object"}}}),
    ("/v1/responses", {"input": "x", "tools": [{"type": "function", **TOOL_FUNCTION}], "tool_choice": "required"}),
    (
        "/v1/messages",
        {
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 9,
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
    ),
]


@pytest.mark.parametrize(("path", "body"), IN_EVERY_API)
def test_white_space_in_json_is_asked_for(http: httpx.Client, fake: FakeController, path: str, body: Any) -> None:
    for choice in (None, "compact", "any"):
        assert http.post(path, json=body | {"whitespace": choice}).status_code == 200
    spaced = [submit.grammar is not None and submit.grammar.spaced for submit in fake.behaviour.submits]
    assert spaced == [False, False, True]
    answer = http.post(path, json=body | {"whitespace": "none"})
    assert answer.status_code == 400
    assert "whitespace" in answer.text
    assert "compact" in answer.text


def test_what_has_no_json_parts_takes_no_white_space(http: httpx.Client, fake: FakeController) -> None:
    assert http.post("/v1/completions", json=PLAIN | {"guided_regex": "a", "whitespace": "any"}).status_code == 200
    assert http.post("/v1/completions", json=PLAIN | {"whitespace": "any"}).status_code == 200
    first, second = fake.behaviour.submits
    assert first.grammar is not None
    assert not first.grammar.spaced
    assert second.grammar is None


def test_a_grammar_says_whose_it_is(http: httpx.Client, fake: FakeController) -> None:
    """By a digest of the tenant's name, whatever salt a request chooses for itself: else a client could take
    several turns at the compiler."""
    for who, salt in (("a", "x"), ("a", "y"), ("b", "x")):
        body = PLAIN | {"guided_regex": "a", "cache_salt": salt}
        answer = http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {who}"})
        assert answer.status_code == 200
    tenants = [submit.grammar and submit.grammar.tenant for submit in fake.behaviour.submits]
    assert tenants[0] == tenants[1] != tenants[2]
    assert all(tenant and len(tenant) == 8 for tenant in tenants)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"structured_outputs": {"regex": UNSATISFIABLE}}, "structured_outputs.regex"),
        ({"guided_json": {"title": UNSATISFIABLE}}, "guided_json"),
    ],
)
def test_what_the_engine_cannot_compile_names_its_parameter(
    http: httpx.Client, given: Any, param: str, stream: bool
) -> None:
    response = http.post("/v1/chat/completions", json=CHAT | given | {"stream": stream})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert response.json()["error"]["code"] == "invalid_request"
    assert http.post("/v1/chat/completions", json=CHAT).status_code == 200


# -- single tokens


def test_what_reaches_the_sampler(http: httpx.Client, fake: FakeController, tokenizer: Tokenizer) -> None:
    body = {
        "min_tokens": 4,
        "bad_words": ["return", "os.path"],
        "allowed_token_ids": [9, 5, 9],
        "priority": -3,
        "stop_token_ids": [7],
        "max_tokens": 8,
    }
    assert http.post("/v1/completions", json=PLAIN | body).status_code == 200
    [submit] = fake.behaviour.submits
    sampling = submit.sampling
    assert (sampling.min_tokens, submit.priority) == (4, -3)
    assert unpack_int32(sampling.stop_ids).tolist() == [EOS, 7]
    assert unpack_int32(sampling.allowed_ids).tolist() == [5, 9]
    written = [tokenizer.decode(word) for word in sampling.bad_words]
    assert written == ["return", " return", "os.path", " os.path"]


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, "a b"), (2, "a b"), (3, "a b c d e f")])
def test_stop_strings_before_min_tokens_do_not_count(
    http: httpx.Client, fake: FakeController, tokenizer: Tokenizer, min_tokens: int, expected: str
) -> None:
    ids = tokenizer.encode("a b c d e f", add_special_tokens=False)
    fake.behaviour.script = lambda submit: [*ids, *ids[2:]]
    body = {"stop": " c", "min_tokens": min_tokens, "max_tokens": 20, "prompt": "x"}
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == expected
    streamed = http.post("/v1/completions", json=body | {"stream": True}).text
    parts = [json.loads(part.removeprefix("data: ")) for part in streamed.split("\n\n")[:-2]]
    assert "".join(part["choices"][0]["text"] for part in parts) == expected


def test_only_the_last_tokens_of_a_prompt(
    http: httpx.Client, fake: FakeController, tokenizer: Tokenizer, router: RunningRouter
) -> None:
    long = "word " * 5000
    for prompt in (long, tokenizer.encode(long, add_special_tokens=True)):
        response = http.post("/v1/completions", json={"prompt": prompt, "truncate_prompt_tokens": 12})
        assert response.status_code == 200, response.text
    chat = {"messages": [{"role": "user", "content": long}], "truncate_prompt_tokens": 10}
    assert http.post("/v1/chat/completions", json=chat).json()["usage"]["prompt_tokens"] == 10
    expected = tokenizer.encode(long, add_special_tokens=True)[-12:]
    assert [prompt_of(submit) for submit in fake.behaviour.submits[:2]] == [expected, expected]
    too_long = {"prompt": "x" * 5_000_000, "truncate_prompt_tokens": 12}
    assert http.post("/v1/completions", json=too_long).json()["error"]["code"] == "string_above_max_length"
