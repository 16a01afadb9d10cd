"""The endpoints, with OpenAI's own client where it has them."""

from __future__ import annotations

from typing import Any

import httpx
import jsonschema_rs
import openai
from router.api_calls import last_prompt, payloads
from router.fake_controller import FakeController, prompt_of
from router.harness import ADMIN, ANSWER, EOS, MESSAGES

from trunkline.router.text.tokenizer import Tokenizer
from trunkline.worker.messages import Sampling


def test_chat(client: openai.OpenAI, fake: FakeController, tokenizer: Tokenizer) -> None:
    fake.behaviour.cached_tokens = 3
    answer = client.chat.completions.create(model="demo", messages=MESSAGES)
    [choice] = answer.choices
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (ANSWER, "assistant", "stop")
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "demo"
    assert answer.system_fingerprint
    [submit] = fake.behaviour.submits
    prompt = prompt_of(submit)
    assert last_prompt(fake, tokenizer) == "<|bos|><|user|>What does os.path.join do?<|end|><|assistant|>"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt) == submit.prompt_len
    assert answer.usage.completion_tokens == len(tokenizer.encode(ANSWER, add_special_tokens=False)) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert submit.max_tokens == 2048 - len(prompt)
    assert submit.stop_token_ids == [1]


def test_stream_form_on_the_wire(http: httpx.Client) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "stream": True}
    parts = payloads(http.post("/v1/chat/completions", json=body))
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    end: dict[str, Any] = {"logprobs": None, "finish_reason": "stop", "stop_reason": None, "matched_stop": EOS}
    [last] = parts[-1]["choices"]
    assert last == {"index": 0, "delta": last["delta"], **end}
    assert "".join(part["choices"][0]["delta"].get("content", "") for part in parts) == ANSWER
    assert all("usage" not in part for part in parts)
    with_usage = payloads(
        http.post("/v1/chat/completions", json=body | {"stream_options": {"include_usage": True}})
    )
    assert [part["usage"] is None for part in with_usage] == [True] * (len(with_usage) - 1) + [False]


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


def test_sampling_reaches_the_engine(http: httpx.Client, fake: FakeController) -> None:
    wanted: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": -2, "presence_penalty": 1,
        "frequency_penalty": -1.5, "repetition_penalty": 1.1, "logit_bias": {"12": -100, "13": 2.5},
    }  # fmt: skip
    extra = {"stop_token_ids": [9], "ignore_eos": True, "max_completion_tokens": 4, "user": "u", "metadata": {}}
    response = http.post("/v1/chat/completions", json={"messages": MESSAGES, **wanted, **extra})
    assert response.status_code == 200
    [submit] = fake.behaviour.submits
    assert submit.sampling == Sampling(**{**wanted, "seed": 2**64 - 2, "logit_bias": {12: -100.0, 13: 2.5}})
    assert submit.stop_token_ids == [9]
    assert submit.max_tokens == 4


def test_defaults_and_drawn_seeds(http: httpx.Client, fake: FakeController, tokenizer: Tokenizer) -> None:
    for fields in ({"top_k": -1}, {"top_k": -1}, {"temperature": 5e-324}, {"temperature": 9e-6}):
        assert http.post("/v1/completions", json={"prompt": "x", **fields}).status_code == 200
    assert {submit.max_tokens for submit in fake.behaviour.submits} == {16}
    first, second, *tiny = (submit.sampling for submit in fake.behaviour.submits)
    assert (first.top_p, first.top_k, first.logprobs) == (1.0, 0, -1)
    assert first.temperature == tokenizer.files.defaults.temperature
    assert first.seed != second.seed
    assert 0 <= first.seed < 2**64
    assert [sampling.temperature for sampling in tiny] == [0, 0], "too small to divide by"


def test_stop_strings(http: httpx.Client, fake: FakeController) -> None:
    fake.behaviour.seconds_per_token = 0.01
    body = {"messages": MESSAGES, "stop": [", or", "STOP"], "stream": False}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == "Hello, wörld 😀! "
    assert answer["choices"][0]["finish_reason"] == "stop"
    parts = payloads(http.post("/v1/chat/completions", json=body | {"stream": True}))
    assert "".join(part["choices"][0]["delta"].get("content", "") for part in parts) == "Hello, wörld 😀! "
    included = http.post("/v1/chat/completions", json=body | {"include_stop_str_in_output": True}).json()
    assert included["choices"][0]["message"]["content"] == "Hello, wörld 😀! STOP"
    assert included["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]


def test_special_tokens(http: httpx.Client, fake: FakeController) -> None:
    fake.behaviour.script = lambda submit: [3, 4, 1, 2]
    for fields, text, count in (
        ({}, "", 3),
        ({"skip_special_tokens": False}, "<|user|><|assistant|>", 3),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "<|user|><|assistant|><|end|>", 3),
        ({"skip_special_tokens": False, "ignore_eos": True}, "<|user|><|assistant|><|end|><|system|>", 4),
    ):
        answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 4, **fields}).json()
        assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == (text, count)


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=MESSAGES, logprobs=True, top_logprobs=2)
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


def test_content_parts_and_roles(http: httpx.Client, fake: FakeController, tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    assert http.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
    expected = "<|bos|><|system|>Be brief.<|end|><|user|>a\nb<|end|><|assistant|>"
    assert last_prompt(fake, tokenizer) == expected


def test_models(client: openai.OpenAI, http: httpx.Client) -> None:
    assert [model.id for model in client.models.list()] == ["demo", "org/demo-alias"]
    assert client.models.retrieve("org/demo-alias").id == "org/demo-alias"
    missing = http.get("/v1/models/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


NUL = "a\x00b\x00"


def test_texts_may_have_nul_characters(http: httpx.Client, fake: FakeController, tokenizer: Tokenizer) -> None:
    """Benchmarks send random bytes; a tokenizer knows this one as any other."""
    chat = {"messages": [{"role": "user", "content": NUL}], "stop": [NUL], "bad_words": [NUL], "max_tokens": 4}
    for path, body in (("/v1/chat/completions", chat), ("/v1/messages", chat), ("/v1/responses", {"input": NUL})):
        answer = http.post(path, json=body)
        assert answer.status_code == 200, (path, answer.text)
    made = http.post("/v1/completions", json={"prompt": NUL, "echo": True, "max_tokens": 1}).json()
    assert made["choices"][0]["text"].startswith(NUL)
    assert last_prompt(fake, tokenizer).endswith(NUL)
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
    written = tokenizer.decode(chat["tokens"], skip_special_tokens=False)
    assert written == "<|bos|><|user|>What does os.path.join do?<|end|>"
    assert chat["token_strs"] is None
    assert http.post("/tokenize", json={"prompt": ""}).json()["count"] == 0


def test_the_api_document(http: httpx.Client) -> None:
    schema = http.get("/openapi.json").json()
    known, checked = schema["components"]["schemas"], 0
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            assert "422" not in operation["responses"], "errors have other forms here"
            error = operation["responses"]["default"]["content"]["application/json"]["schema"]
            if path != "/health" and "{" not in path:
                validator = jsonschema_rs.validator_for({**error, "components": schema["components"]})
                validator.validate(http.delete(path).json())
                if method == "post" and "requestBody" in operation:
                    validator.validate(http.post(path, content=b"[]").json())
                    checked += 1
    assert checked > 7
    for path, method in (("/v1/schemas/{schema_id}", "patch"), ("/v1/sessions/{session_id}", "patch")):
        assert "requestBody" in schema["paths"][path][method]
    answer = schema["paths"]["/v1/sessions/{session_id}"]["get"]["responses"]["200"]
    name = answer["content"]["application/json"]["schema"]["$ref"].split("/")[-1]
    assert {"id", "turns", "discards"} <= set(known[name]["properties"])
    references = {part.split('"')[0] for part in http.get("/openapi.json").text.split("#/components/schemas/")[1:]}
    assert references <= set(known)


def test_what_can_be_read_answers_get_and_head(http: httpx.Client) -> None:
    for path in ("/", "/v1/models", "/health", "/version", "/metrics"):
        assert [http.get(path).status_code, http.head(path).status_code] == [200, 200]
        assert http.head(path).content == b""
    assert http.get("/").json()["models"][0] == "demo"
    assert http.get("/version").json()["version"]
    for path in ("/reset_prefix_cache", "/flush_cache"):
        assert http.post(path).status_code == 401, "not without an admin's key"
        assert http.post(path, headers=ADMIN).json() == {"blocks_freed": 7}


def test_metrics_and_request_ids(http: httpx.Client) -> None:
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
    assert http.get("/version", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    for bad in ("x" * 200, "a b"):
        made = http.get("/version", headers={"X-Request-Id": bad}).headers["x-request-id"]
        assert made != bad
        assert len(made) == 32
