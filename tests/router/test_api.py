"""The endpoints, with OpenAI's own client where it has them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema_rs
import openai
import pytest
from router.fake_controller import FakeController, prompt_of
from router.harness import ADMIN, ANSWER, MESSAGES, RunningRouter, wait_until

from trunkline.router.text.tokenizer import Tokenizer
from trunkline.worker.messages import Sampling


def events(response: httpx.Response) -> list[Any]:
    """The payloads of a stream; "[DONE]" as it is."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_chat(client: openai.OpenAI, fake: FakeController, tokenizer: Tokenizer) -> None:
    fake.behaviour.cached_tokens = 3
    answer = client.chat.completions.create(model="demo", messages=MESSAGES)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "demo"
    assert answer.system_fingerprint
    [submit] = fake.behaviour.submits
    prompt = prompt_of(submit)
    assert tokenizer.decode(prompt, skip_special_tokens=False) == (
        "<|bos|><|user|>What does os.path.join do?<|end|><|assistant|>"
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt) == submit.prompt_len
    assert answer.usage.completion_tokens == len(tokenizer.encode(ANSWER, add_special_tokens=False)) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert submit.max_tokens == 2048 - len(prompt)
    assert submit.stop_token_ids == [1]


def test_chat_stream(client: openai.OpenAI, fake: FakeController) -> None:
    fake.behaviour.seconds_per_token = 0.002
    stream = client.chat.completions.create(
        model="demo",
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == ANSWER
    assert sum(bool(text) for text in texts) > 3, "it came in pieces"
    assert all("\ufffd" not in text for text in texts)
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 3
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 0
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_stream_form_on_the_wire(http: httpx.Client) -> None:
    body = {"messages": MESSAGES, "stream": True}
    parts = events(http.post("/v1/chat/completions", json=body))
    assert parts[-1] == "[DONE]"
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert parts[-2]["choices"] == [{"delta": {}, "logprobs": None, "finish_reason": "stop", "index": 0}]
    assert all("usage" not in part for part in parts[:-1])
    with_usage = events(http.post("/v1/chat/completions", json=body | {"stream_options": {"include_usage": True}}))
    assert all(part["usage"] is None for part in with_usage[:-2])


def test_completion(client: openai.OpenAI, fake: FakeController, tokenizer: Tokenizer) -> None:
    answer = client.completions.create(model="org/demo-alias", prompt="import os", max_tokens=5)
    assert answer.choices[0].finish_reason == "length"
    ids = tokenizer.encode(ANSWER, add_special_tokens=False)[:5]
    assert answer.choices[0].text == tokenizer.decode(ids)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert answer.id.startswith("cmpl-")
    assert answer.model == "org/demo-alias"
    pieces = list(client.completions.create(model="demo", prompt="import os", max_tokens=5, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == answer.choices[0].text
    assert pieces[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]]])
def test_prompt_as_token_ids(http: httpx.Client, fake: FakeController, prompt: object) -> None:
    assert http.post("/v1/completions", json={"prompt": prompt}).status_code == 200
    assert prompt_of(fake.behaviour.submits[0]) == [5, 6, 7]
    assert fake.behaviour.submits[0].max_tokens == 16


def test_sampling_reaches_the_engine(http: httpx.Client, fake: FakeController) -> None:
    wanted: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "seed": -2,
        "presence_penalty": 1,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"12": -100, "13": 2.5},
    }
    extra = {"stop_token_ids": [9], "ignore_eos": True, "max_completion_tokens": 4, "user": "u", "metadata": {}}
    response = http.post("/v1/chat/completions", json={"messages": MESSAGES, **wanted, **extra})
    assert response.status_code == 200
    [submit] = fake.behaviour.submits
    expected = {**wanted, "seed": 2**64 - 2, "logit_bias": {12: -100.0, 13: 2.5}}
    assert submit.sampling == Sampling(**expected)
    assert submit.stop_token_ids == [9]
    assert submit.max_tokens == 4


def test_defaults_and_drawn_seeds(http: httpx.Client, fake: FakeController, tokenizer: Tokenizer) -> None:
    for _ in range(2):
        assert http.post("/v1/completions", json={"prompt": "x", "top_k": -1}).status_code == 200
    first, second = (submit.sampling for submit in fake.behaviour.submits)
    assert (first.top_p, first.top_k, first.logprobs) == (1.0, 0, -1)
    assert first.temperature == tokenizer.files.defaults.temperature
    assert first.seed != second.seed
    assert 0 <= first.seed < 2**64


@pytest.mark.parametrize("tiny", [5e-324, 1e-38, 9e-6])
def test_a_temperature_too_small_to_divide_by_is_greedy(
    http: httpx.Client, fake: FakeController, tiny: float
) -> None:
    assert http.post("/v1/completions", json={"prompt": "x", "temperature": tiny}).status_code == 200
    [submit] = fake.behaviour.submits
    assert submit.sampling.temperature == 0


def test_stop_strings(http: httpx.Client, fake: FakeController) -> None:
    fake.behaviour.seconds_per_token = 0.01
    body = {"messages": MESSAGES, "stop": [", or", "STOP"], "stream": False}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == "Hello, wörld 😀! "
    assert answer["choices"][0]["finish_reason"] == "stop"
    parts = events(http.post("/v1/chat/completions", json=body | {"stream": True}))
    text = "".join(part["choices"][0]["delta"].get("content", "") for part in parts[:-1])
    assert text == "Hello, wörld 😀! "
    included = http.post("/v1/chat/completions", json=body | {"include_stop_str_in_output": True}).json()
    assert included["choices"][0]["message"]["content"] == "Hello, wörld 😀! STOP"
    assert included["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]


def test_a_stop_string_aborts_the_rest(http: httpx.Client, fake: FakeController, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a b c d e f g h i j k l m n", add_special_tokens=False)
    fake.behaviour.script = lambda submit: ids * 20
    fake.behaviour.seconds_per_token = 0.005
    answer = http.post("/v1/completions", json={"prompt": "x", "stop": " d", "max_tokens": 200}).json()
    assert answer["choices"][0]["text"] == "a b c"
    assert answer["usage"]["completion_tokens"] < 10
    [submit] = fake.behaviour.submits
    wait_until(lambda: fake.behaviour.aborts == [submit.request])


def test_skip_special_tokens(http: httpx.Client, fake: FakeController) -> None:
    fake.behaviour.script = lambda submit: [3, 4, 1, 2]
    base: dict[str, Any] = {"prompt": "x", "max_tokens": 4}
    assert http.post("/v1/completions", json=base).json()["choices"][0]["text"] == ""
    shown = http.post("/v1/completions", json=base | {"skip_special_tokens": False}).json()
    assert shown["choices"][0]["text"] == "<|user|><|assistant|>"
    assert shown["usage"]["completion_tokens"] == 3
    both = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    assert http.post("/v1/completions", json=base | both).json()["choices"][0]["text"] == (
        "<|user|><|assistant|><|end|>"
    )
    ignoring = {"skip_special_tokens": False, "ignore_eos": True}
    assert http.post("/v1/completions", json=base | ignoring).json()["choices"][0]["text"] == (
        "<|user|><|assistant|><|end|><|system|>"
    )


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo",
        messages=MESSAGES,
        logprobs=True,
        top_logprobs=2,
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert answer.usage is not None
    assert len(content) == answer.usage.completion_tokens
    assert b"".join(bytes(entry.bytes or []) for entry in content[:-1]).decode() == ANSWER
    assert [entry.logprob for entry in content] == [-0.25] * len(content)
    assert content[0].top_logprobs[0].token == content[0].token
    assert [top.logprob for top in content[0].top_logprobs] == [-0.25, -1.25]
    assert content[-1].token == "<|end|>"


def test_completion_logprobs(http: httpx.Client, fake: FakeController) -> None:
    body = {"prompt": "x", "max_tokens": 4, "logprobs": 0}
    [choice] = http.post("/v1/completions", json=body).json()["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert all(
        choice["text"][offset:].startswith(token)
        for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)
    )
    assert logprobs["top_logprobs"][0] == {logprobs["tokens"][0]: -0.25}
    streamed = events(http.post("/v1/completions", json=body | {"stream": True}))
    tokens = [
        token for part in streamed[:-1] for token in (part["choices"][0]["logprobs"] or {}).get("tokens", [])
    ]
    assert tokens == logprobs["tokens"]


def test_content_parts_and_roles(http: httpx.Client, fake: FakeController, tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    assert http.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
    assert tokenizer.decode(prompt_of(fake.behaviour.submits[0]), skip_special_tokens=False) == (
        "<|bos|><|system|>Be brief.<|end|><|user|>a\nb<|end|><|assistant|>"
    )


def test_models(client: openai.OpenAI, http: httpx.Client) -> None:
    assert [model.id for model in client.models.list()] == ["demo", "org/demo-alias"]
    assert client.models.retrieve("org/demo-alias").id == "org/demo-alias"
    missing = http.get("/v1/models/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


NUL = "a\x00b\x00"
IN_EVERY_FIELD: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": NUL}),
    ("/v1/completions", {"prompt": [NUL, "\x00"]}),
    ("/v1/completions", {"prompt": "x", "stop": [NUL], "bad_words": [NUL]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": NUL}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": NUL}]}]}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": {"name": "f", "description": NUL}}],
        },
    ),
    ("/v1/responses", {"input": NUL, "instructions": NUL}),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": NUL}]}]}),
    ("/v1/messages", {"system": NUL, "messages": [{"role": "user", "content": NUL}], "max_tokens": 4}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": NUL}]}),
    ("/tokenize", {"prompt": NUL}),
]


@pytest.mark.parametrize(("path", "body"), IN_EVERY_FIELD)
def test_texts_may_have_nul_characters(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    """Benchmarks send random bytes; a tokenizer knows this one as any other."""
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text


def test_a_nul_reaches_the_engine_and_comes_back(
    http: httpx.Client, fake: FakeController, tokenizer: Tokenizer
) -> None:
    made = http.post("/v1/completions", json={"prompt": NUL, "echo": True, "max_tokens": 1}).json()
    assert made["choices"][0]["text"].startswith(NUL)
    assert tokenizer.decode(prompt_of(fake.behaviour.submits[-1])).endswith(NUL)
    ids = tokenizer.encode(NUL, add_special_tokens=False)
    assert http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == NUL


def test_tokenize_and_back(http: httpx.Client, tokenizer: Tokenizer) -> None:
    text = "def wörld(): 😀"
    answer = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == tokenizer.encode(text, add_special_tokens=True)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 2048
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}
    chat = http.post("/tokenize", json={"messages": MESSAGES, "add_generation_prompt": False}).json()
    assert tokenizer.decode(chat["tokens"], skip_special_tokens=False) == (
        "<|bos|><|user|>What does os.path.join do?<|end|>"
    )
    assert chat["token_strs"] is None
    assert http.post("/tokenize", json={"prompt": ""}).json()["count"] == 0


def test_version_openapi_and_cache(http: httpx.Client) -> None:
    assert http.get("/version").json()["version"]
    schema = http.get("/openapi.json").json()
    reference = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert reference["schema"]["$ref"].rsplit("/", 1)[1] in schema["components"]["schemas"]
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            assert "422" not in operation["responses"], "errors have other forms here"
            error = operation["responses"]["default"]["content"]["application/json"]["schema"]
            if path != "/health" and "{" not in path:
                validator = jsonschema_rs.validator_for({**error, "components": schema["components"]})
                validator.validate(http.delete(path).json())
                if method == "post" and "requestBody" in operation:
                    validator.validate(http.post(path, content=b"[]").json())
    for path in ("/reset_prefix_cache", "/flush_cache"):
        assert http.post(path).status_code == 401, "not without an admin's key"
        assert http.post(path, headers=ADMIN).json() == {"blocks_freed": 7}


def test_what_can_be_read_answers_get_and_head(http: httpx.Client) -> None:
    for path in ("/", "/v1/models", "/health", "/version", "/metrics"):
        assert [http.get(path).status_code, http.head(path).status_code] == [200, 200]
        assert http.head(path).content == b""
    assert http.get("/").json()["models"][0] == "demo"


def test_metrics(http: httpx.Client, router: RunningRouter) -> None:
    http.post("/v1/completions", json={"prompt": "x"})
    http.get("/does/not/exist")
    text = http.get("/metrics").text
    for line in (
        'trunkline_requests_total{endpoint="other",status="404"}',
        'trunkline_requests_total{endpoint="/v1/completions",status="200"}',
        'trunkline_controller_ready{controller="0"} 1.0',
        'trunkline_controller_blocks_free{controller="0"} 90.0',
        'trunkline_controller_output_tokens_total{controller="0"} 17.0',
        "trunkline_time_to_first_token_seconds_bucket",
        "trunkline_inter_token_latency_seconds_count",
        "trunkline_cached_prompt_tokens_total",
    ):
        assert line in text


def test_request_ids(http: httpx.Client) -> None:
    assert http.get("/version", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    for bad in ("x" * 200, "a b"):
        made = http.get("/version", headers={"X-Request-Id": bad}).headers["x-request-id"]
        assert made != bad
        assert len(made) == 32


def test_long_prompts_are_tokenised_beside_the_loop(http: httpx.Client, fake: FakeController) -> None:
    fake.behaviour.max_context = 2048
    answer = http.post("/tokenize", json={"prompt": "word " * 30_000}).json()
    assert answer["count"] > 25_000
