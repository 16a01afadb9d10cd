"""What an answer has besides its text if a request asks for it: usage on the way, timings, stop reasons, names of
tokens, the text that it continues, and documents in the prompt."""

from __future__ import annotations

from typing import Any, Final

import httpx
import pytest
from router.api_calls import last_prompt, payloads, say
from router.fake_controller import FakeController
from router.harness import ANSWER, MESSAGES, RunningRouter

from trunkline.router.text.chat_template import ChatRenderer
from trunkline.router.text.tokenizer import Tokenizer
from trunkline.router.text.tool_styles import ToolStyle

CHAT: Final = "/v1/chat/completions"
TEXT: Final = "/v1/completions"
BODIES: Final[dict[str, dict[str, Any]]] = {
    CHAT: {"messages": MESSAGES, "max_tokens": 100},
    TEXT: {"prompt": "Once upon", "max_tokens": 100},
}
BEGUN: Final = [*MESSAGES, {"role": "assistant", "content": "So "}]
each_path = pytest.mark.parametrize("path", [CHAT, TEXT])


def ends(http: httpx.Client, path: str, **fields: Any) -> list[tuple[str, Any]]:
    """The finish reason and the stop reason of an answer, whole and streamed."""
    whole = http.post(path, json=BODIES[path] | fields)
    assert whole.status_code == 200, whole.text
    parts = payloads(http.post(path, json=BODIES[path] | fields | {"stream": True}))
    last = [part["choices"][0] for part in parts if part["choices"]]
    assert all("stop_reason" not in choice for choice in last[:-1])
    return [(choice["finish_reason"], choice["stop_reason"]) for choice in (whole.json()["choices"][0], last[-1])]


@each_path
def test_what_ended_an_answer(http: httpx.Client, tokenizer: Tokenizer, path: str) -> None:
    assert ends(http, path) == [("stop", None)] * 2
    assert ends(http, path, max_tokens=3) == [("length", None)] * 2
    assert ends(http, path, stop=["no", "STOP"]) == [("stop", "STOP")] * 2
    assert ends(http, path, stop="STOP", include_stop_str_in_output=True) == [("stop", "STOP")] * 2
    third = tokenizer.encode(ANSWER, add_special_tokens=False)[2]
    assert ends(http, path, stop_token_ids=[third]) == [("stop", third)] * 2
    assert ends(http, path, stop_token_ids=[third], max_tokens=2) == [("length", None)] * 2


@each_path
@pytest.mark.parametrize("count", [1, 2])
def test_usage_on_the_way(http: httpx.Client, fake: FakeController, path: str, count: int) -> None:
    fake.behaviour.seconds_per_token = 0.003

    def usages(**options: Any) -> list[Any]:
        body = BODIES[path] | {"stream": True, "stream_options": options, "n": count, "return_token_ids": True}
        parts = payloads(http.post(path, json=body))
        seen = 0
        for part in parts:
            ids = [token for choice in part["choices"] for token in choice.get("token_ids", [])]
            seen += len(ids)
            if ids and part.get("usage") and count == 1:
                assert part["usage"]["completion_tokens"] == seen, "counted as the tokens come"
        return [part.get("usage") for part in parts]

    total = usages(include_usage=True)[-1]
    for options in ({"include_usage": True}, {}):
        along = usages(continuous_usage_stats=True, **options)
        assert along[-1] == total
        tokens = [usage["completion_tokens"] for usage in along]
        assert tokens == sorted(tokens)
        assert (tokens[0] == 0) == (path == "/v1/chat/completions"), "the role comes before all tokens"
        assert {usage["prompt_tokens"] for usage in along} == {total["prompt_tokens"]}
        assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in along)
    assert not any(usages(continuous_usage_stats=True, include_usage=False))
    before = usages(include_usage=True, continuous_usage_stats=False)[:-1]
    assert before == [None] * len(before)


@each_path
def test_timings(http: httpx.Client, fake: FakeController, path: str) -> None:
    fake.behaviour.cached_tokens = 3
    assert "timings" not in http.post(path, json=BODIES[path]).json()
    whole = http.post(path, json=BODIES[path] | {"return_timings": True}).json()
    parts = payloads(http.post(path, json=BODIES[path] | {"return_timings": True, "stream": True}))
    assert all("timings" not in part for part in parts[:-1])
    for timings in (whole["timings"], parts[-1]["timings"]):
        usage = whole["usage"]
        assert timings["cache_n"] == usage["prompt_tokens_details"]["cached_tokens"] == 3
        assert timings["cache_n"] + timings["prompt_n"] == usage["prompt_tokens"]
        assert timings["predicted_n"] == usage["completion_tokens"]
        assert min(timings[name] for name in ("queue_ms", "prompt_ms", "predicted_ms")) >= 0
        for tokens, name in ((timings["prompt_n"], "prompt"), (timings["predicted_n"] - 1, "predicted")):
            rate, spent = timings[f"{name}_per_second"], timings[f"{name}_ms"]
            assert rate is None or spent == 0 or abs(rate * spent / 1e3 - tokens) < tokens * (0.001 / spent) + 0.1


def test_tokens_are_named_by_their_ids(http: httpx.Client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(ANSWER, add_special_tokens=False)[:4]
    named = [f"token_id:{token}" for token in ids]
    asked = {"return_tokens_as_token_ids": True, "max_tokens": 4}
    chat = http.post(CHAT, json=BODIES[CHAT] | asked | {"logprobs": True, "top_logprobs": 2}).json()
    content = chat["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == named
    assert [bytes(entry["bytes"]) for entry in content] == list(map(tokenizer.vocabulary.token_bytes, ids))
    assert all(top["token"].startswith("token_id:") for entry in content for top in entry["top_logprobs"])
    body = BODIES[TEXT] | asked | {"logprobs": 2, "echo": True, "return_token_ids": True}
    [choice] = http.post(TEXT, json=body).json()["choices"]
    every = [*choice["prompt_token_ids"], *choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in every]
    assert all(name.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"][1:] for name in top)
    parts = payloads(http.post(TEXT, json=body | {"stream": True, "echo": False}))
    told = [part["choices"][0]["logprobs"] or {"tokens": []} for part in parts]
    assert [name for logprobs in told for name in logprobs["tokens"]] == named


@pytest.mark.parametrize("count", [1, 2])
def test_a_chat_repeats_what_it_continues(
    http: httpx.Client, fake: FakeController, tokenizer: Tokenizer, count: int
) -> None:
    say(fake, tokenizer, "it is.", "it was.")
    body = {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False, "n": count}
    for echo, begin in ((True, "So "), (False, "")):
        whole = http.post(CHAT, json=body | {"echo": echo}).json()
        texts = [f"{begin}it is.", f"{begin}it was."][:count]
        assert [choice["message"]["content"] for choice in whole["choices"]] == texts
        assert last_prompt(fake, tokenizer).endswith("So ")
        streamed = [""] * count
        for part in payloads(http.post(CHAT, json=body | {"echo": echo, "stream": True})):
            for choice in part["choices"]:
                streamed[choice["index"]] += choice["delta"].get("content", "")
        assert streamed == texts
    for wrong in ({"messages": MESSAGES, "echo": True}, {"messages": BEGUN, "echo": True}):
        answer = http.post(CHAT, json=wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "echo")


WITH_DOCUMENTS: Final = (
    "{% for d in documents or [] %}[{{ d.title }}: {{ d.text }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)


def test_documents_reach_the_template(
    http: httpx.Client,
    router: RunningRouter,
    fake: FakeController,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "documents": [{"title": "A", "text": "b"}]}
    refused = http.post(CHAT, json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "documents")
    assert http.post(CHAT, json=body | {"documents": []}).status_code == 200
    monkeypatch.setattr(router.service.tokenizer, "_chat", ChatRenderer(WITH_DOCUMENTS, {}, ToolStyle()))
    for documents, shown in ((body["documents"], "[A: b]"), ([], ""), (None, "")):
        assert http.post(CHAT, json=body | {"documents": documents}).status_code == 200
        assert last_prompt(fake, tokenizer) == f"{shown}<user>Hi"
    plain, tools = WITH_DOCUMENTS.replace("documents", "others"), WITH_DOCUMENTS
    for sources in ((plain, tools), (tools, plain)):
        assert not ChatRenderer(sources[0], {}, ToolStyle(), tool_source=sources[1]).uses_documents


def test_messages_without_content_and_with_refusals(
    http: httpx.Client, fake: FakeController, tokenizer: Tokenizer
) -> None:
    no = "I cannot."
    for message, content in (
        ({"content": None}, ""),
        ({"content": None, "refusal": no}, no),
        ({"content": [{"type": "refusal", "refusal": no}]}, no),
        ({}, ""),
    ):
        turns: list[Any] = [*MESSAGES, {"role": "assistant", **message}, *MESSAGES]
        assert http.post(CHAT, json={"messages": turns}).status_code == 200
        turns[1] = {"role": "assistant", "content": content}
        assert last_prompt(fake, tokenizer) == tokenizer.render_chat(turns)
    bad = http.post(CHAT, json={"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": 5}]}]})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "messages[0].content")
