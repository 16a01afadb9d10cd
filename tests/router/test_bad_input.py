"""Nothing a client sends does harm: a clear 4xx in OpenAI's form, naming the parameter."""

from __future__ import annotations

import json
import re
import socket
from typing import Any

import httpx
import pytest
from router.fake_controller import FakeController
from router.harness import MESSAGES, VOCAB_SIZE, RunningRouter

from trunkline.router.api.common import TOKENIZE_CHARACTERS_MAX

CHAT: dict[str, Any] = {"messages": MESSAGES}
PLAIN: dict[str, Any] = {"prompt": "x"}
DEEP = json.loads("[" * 150 + "]" * 150)
TOO_LONG = "a" * (TOKENIZE_CHARACTERS_MAX + 1)


def _names(table: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in table.items() for value in values]


BOTH = _names(
    {
        "temperature": [-0.1, 2.1, "1", 1e999, True, [], {}],
        "top_p": [0, -1, 1.01, "x"],
        "top_k": [-2, 1.5, 2**40, "5", 10**30],
        "min_p": [-0.1, 1.1],
        "seed": [2**63, -(2**63) - 1, 1.5, "1", 10**40],
        "max_tokens": [0, -1, 1.5, "5", True, 2**31, 10**100],
        "stop": ["", [""], ["a"] * 17, 5, [5], {"a": 1}, "x" * 2000],
        "stop_token_ids": [[-1], [VOCAB_SIZE], ["a"], 5, [1.5], [10**30], list(range(300))],
        "ignore_eos": ["yes", 1],
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
        "best_of": [0, -1, "2", 257, 1025],
        "use_beam_search": ["yes", 1],
        "beam_width": [0, -1, 2, "4", True, 65],
        "length_penalty": [2, -11, 11, "1", 1e999],
        "early_stopping": [True, "never", "always", 1],
        "min_tokens": [-1, 1.5, "5", True, 2**31, 2**31 - 1],
        "bad_words": [5, "x", [""], ["  "], [5], ["a"] * 129, ["a" * 257]],
        "allowed_token_ids": [[], 5, [-1], [VOCAB_SIZE], ["a"], [True], [1.5], [10**30]],
        "prompt_logprobs": [-1, 21, 1.5, "1", True],
        "truncate_prompt_tokens": [0, -1, 1.5, "5", True, 10**20],
        "return_token_ids": ["yes", 1],
        "priority": [2**31, -(2**31) - 1, 1.5, "high", True],
        "response_format": [
            5,
            {},
            {"type": "xml"},
            {"type": "json_schema"},
            {"type": "json_schema", "json_schema": {}},
        ],
        "structured_outputs": [5, {}, {"regex": ""}, {"regex": "a", "grammar": "b"}, {"nonsense": 1}],
        "guided_json": [5, [], "{", DEEP],
        "guided_regex": ["", 5, {"a": 1}],
        "guided_choice": [[], [""], "a", [5], 5],
        "guided_grammar": ["", 5],
        "logits_processors": [["a.b"]],
        "return_tokens_as_token_ids": [True],
        "prompt_embeds": ["x"],
    }
)
CHAT_ONLY = _names(
    {
        "messages": [[], None, "hi", 5, {}, DEEP],
        "messages[0]": [["hi"], [5]],
        "messages[0].content": [
            [{"role": "user"}],
            [{"role": "user", "content": None}],
            [{"role": "user", "content": 5}],
        ],
        "messages[0].role": [[{"content": "x"}], [{"role": 5, "content": "x"}]],
        "logprobs": [5, "true"],
        "top_logprobs": [5, 21, -1],
        "max_completion_tokens": [0, "1", 1e999],
        "echo": [True],
        "tools": [5, [5], [{"type": "function"}], [{"type": "web_search"}]],
        "tool_choice": ["required", "maybe", 5, {"type": "function"}],
        "parallel_tool_calls": ["yes", 1],
        "functions": [[{"name": "f"}]],
        "audio": [{"voice": "x"}],
        "modalities": [["audio"]],
        "chat_template": ["{{ 1 }}"],
        "chat_template_kwargs": [5],
    }
)
PLAIN_ONLY = _names(
    {
        "prompt": [None, "", [], [[]], [""], ["a", ""], [[1], []], ["a", [1]], [[1], [VOCAB_SIZE]], ["a"] * 1025,
                   [VOCAB_SIZE], [-1], [1.5], ["a", 1], 5, {}, [True], [10**30], DEEP],
        "echo": ["yes", 1],
        "logprobs": [True, 21, -1, "5"],
        "suffix": ["x"],
    }
)  # fmt: skip


@pytest.mark.parametrize(
    ("path", "base", "cases"),
    [
        ("/v1/chat/completions", CHAT, BOTH),
        ("/v1/completions", PLAIN, BOTH),
        ("/v1/chat/completions", CHAT, CHAT_ONLY),
        ("/v1/completions", PLAIN, PLAIN_ONLY),
    ],
    ids=["chat", "plain", "chat-only", "plain-only"],
)
def test_bad_values_name_their_parameter(
    http: httpx.Client, fake: FakeController, path: str, base: dict[str, Any], cases: list[tuple[str, Any]]
) -> None:
    for param, value in cases:
        field = param.split("[")[0]
        body = json.dumps({**base, field: value}, allow_nan=True).replace("Infinity", "1e999")
        response = http.post(path, content=body)
        given = (param, str(value)[:60], response.text)
        assert response.status_code == 400, given
        error = response.json()["error"]
        assert (error["param"] or "").startswith(param.split("[")[0]), given
        if "[" in param:
            assert error["param"] == param, given
        assert not re.search(r"\.(bool|int|str|literal|list)\b", error["param"]), given
        assert not re.search("instance of|validation|dictionary", error["message"]), given
        assert error["type"] == "invalid_request_error"
        assert field in error["message"], given
    assert not fake.behaviour.submits


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content"),
        ([*MESSAGES, {"role": "user", "content": [{"type": "text"}]}], "messages[1].content"),
        ([*MESSAGES, {"role": "tool", "content": "x"}], "messages[1]"),
        ([{"role": "assistant", "content": "", "tool_calls": [{}]}], "messages[0].tool_calls[0].id"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([{"role": "pirate", "content": "x"}], "messages"),
    ],
)
def test_bad_messages(http: httpx.Client, messages: list[Any], param: str) -> None:
    response = http.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "neutral",
    [
        *[
            {"n": 1},
            {"best_of": 1},
            {"use_beam_search": False, "beam_width": 1, "length_penalty": 1.0, "early_stopping": False},
            {"min_tokens": 0, "bad_words": [], "prompt_logprobs": False, "echo": False, "priority": 0},
            {"structured_outputs": None, "guided_json": None, "allowed_token_ids": None},
            {"tools": []},
            {"tools": None},
            {"response_format": {"type": "text"}},
            {"tool_choice": "none"},
        ],
        *[
            {"user": "me"},
            {"store": True},
            {"metadata": {"a": "b"}},
            {"nonsense": [1]},
            {"parallel_tool_calls": True},
        ],
        *[
            {"temperature": 0},
            {"top_p": 1},
            {"stop": None},
            {"logit_bias": {}},
            {"seed": None},
            {"max_tokens": None},
        ],
        *[{"temperature": 2, "top_k": 0, "repetition_penalty": 2, "min_p": 1}, {"seed": -(2**63)}],
    ],
)
def test_neutral_and_unknown_fields_pass(http: httpx.Client, neutral: dict[str, Any]) -> None:
    assert http.post("/v1/chat/completions", json=CHAT | neutral).status_code == 200


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


def test_context_length(http: httpx.Client, fake: FakeController) -> None:
    for path, param, body in (
        ("/v1/completions", "prompt", {"prompt": [5] * 2048}),
        ("/v1/completions", "prompt", {"prompt": "word " * 5000}),
        ("/v1/completions", "prompt", {"prompt": "word " * 500_000}),
        ("/v1/chat/completions", "messages", {"messages": [{"role": "user", "content": "word " * 5000}]}),
    ):
        error = http.post(path, json=body).json()["error"]
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")
        assert "2048" in error["message"]
    response = http.post("/v1/completions", json={"prompt": [5] * 2000, "max_tokens": 49})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "max_tokens"
    assert "48" in response.json()["error"]["message"]
    chat = http.post("/v1/chat/completions", json=CHAT | {"max_completion_tokens": 2047}).json()
    assert chat["error"]["param"] == "max_completion_tokens"
    assert http.post("/v1/completions", json={"prompt": [5] * 2000, "max_tokens": 48}).status_code == 200
    assert http.post("/v1/completions", json={"prompt": [5] * 2047}).status_code == 200
    assert [submit.max_tokens for submit in fake.behaviour.submits] == [48, 1]


def test_unknown_model_paths_and_methods(http: httpx.Client) -> None:
    response = http.post("/v1/chat/completions", json=CHAT | {"model": "gpt-5"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert response.json()["error"]["param"] == "model"
    assert http.get("/v1/nothing").json()["error"]["message"]
    wrong = http.get("/v1/completions")
    assert wrong.status_code == 405
    assert wrong.json()["error"]["message"]


def test_body_too_large(http: httpx.Client, router: RunningRouter) -> None:
    limit = router.service.config.max_body_bytes
    with socket.create_connection(("127.0.0.1", int(router.url.rsplit(":", 1)[1]))) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % (limit + 1)
        )
        assert connection.recv(64).startswith(b"HTTP/1.1 413")

    def endless() -> Any:
        for _ in range(limit // 65536 + 2):
            yield b" " * 65536

    assert http.post("/v1/completions", content=endless()).status_code == 413


@pytest.mark.parametrize(
    "raw",
    [
        *[
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
            b"GET / HTTP/9.9\r\n\r\n",
            b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        ],
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"a" * 200_000,
    ],
)
def test_broken_http(router: RunningRouter, http: httpx.Client, raw: bytes) -> None:
    with socket.create_connection(("127.0.0.1", int(router.url.rsplit(":", 1)[1])), timeout=5) as connection:
        try:
            connection.sendall(raw)
            assert connection.recv(64).startswith(b"HTTP/1.1 4")
        except ConnectionError:
            pass  # closed while it was still sent
    assert http.get("/version").status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": TOO_LONG}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": TOO_LONG}]}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "5"}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
    ],
    ids=lambda value: str(value)[:60],  # an id with millions of characters helps nobody
)
def test_bad_tokenizer_requests(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    response = http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
