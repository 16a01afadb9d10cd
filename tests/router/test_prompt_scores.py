"""What is told of prompts and tokens besides text: echo, prompt log-probabilities, token ids."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion
from router.api_calls import payloads
from router.fake_controller import FakeController, score_prompt
from router.harness import ANSWER, EOS, MESSAGES

from trunkline.controller.messages import Submit
from trunkline.controller.reports import PromptLogprobs
from trunkline.kvstore.chunks import pack_int32
from trunkline.router.api.answer_fields import join_prompt_logprobs
from trunkline.router.text.tokenizer import Tokenizer
from trunkline.worker.messages import Sampling

CHAT: dict[str, Any] = {"messages": MESSAGES}
TEXT = "import os, wörld"


def scored(length: int, count: int) -> Submit:
    tokens = pack_int32([50 + index for index in range(length)])
    return Submit(1, tokens, length, 1, Sampling(prompt_logprobs=count))


@settings(max_examples=60, deadline=None)
@given(length=st.integers(1, 30), count=st.integers(0, 5), data=st.data())
def test_pieces_may_come_in_any_cut_and_twice(length: int, count: int, data: st.DataObject) -> None:
    whole = join_prompt_logprobs(score_prompt(scored(length, count)), length, count)
    assert whole.logprobs[1:] == [-position / 8 for position in range(1, length)]
    assert whole.ranks[1:] == [2] * (length - 1)
    for position in range(1, length):
        expected = [(50 + position + 1 + i, -position / 16 - i) for i in range(count)]
        assert whole.top(position, count) == expected
        assert whole.top(position, count - 1 if count else 0) == expected[:-1]
    pieces = score_prompt(scored(length, count))
    again = data.draw(st.lists(st.sampled_from(pieces), max_size=3)) if pieces else []
    assert join_prompt_logprobs([*again, *pieces, *again], length, count) == whole


def test_a_missing_or_misshapen_piece_is_noticed() -> None:
    first, second = score_prompt(scored(9, 2))
    for pieces in ([first], [second], []):
        with pytest.raises(ValueError, match="not scored"):
            join_prompt_logprobs(pieces, 9, 2)
    misshapen = PromptLogprobs(1, b"\0" * 4, pack_int32([1]), pack_int32([1, 2, 3]), b"\0" * 12)
    with pytest.raises(ValueError, match="reshape"):
        join_prompt_logprobs([misshapen, second], 9, 2)
    with pytest.raises(ValueError, match="broadcast"):
        join_prompt_logprobs([second], 6, 2)


@pytest.mark.parametrize("count", [0, 2])
def test_prompt_logprobs(http: httpx.Client, fake: FakeController, tokenizer: Tokenizer, count: int) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=True)
    answer = http.post("/v1/completions", json={"prompt": TEXT, "prompt_logprobs": count}).json()
    Completion.model_validate(answer)
    [choice] = answer["choices"]
    listed = choice["prompt_logprobs"]
    assert len(listed) == len(ids)
    assert listed[0] is None
    for position, entry in enumerate(listed[1:], 1):
        text = tokenizer.vocabulary.token_text(ids[position])
        assert entry[str(ids[position])] == {"logprob": -position / 8, "rank": 2, "decoded_token": text}
        tops = {str(ids[position] + 1 + i): (-position / 16 - i, i + 1) for i in range(count)}
        found = {token: (top["logprob"], top["rank"]) for token, top in entry.items() if token in tops}
        assert found == tops
        assert len(entry) == 1 + count
    assert choice["text"]
    assert fake.behaviour.submits[0].sampling.prompt_logprobs == count
    chat = http.post("/v1/chat/completions", json=CHAT | {"prompt_logprobs": count}).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert chat["choices"][0]["message"]["content"] == ANSWER


def test_echo(client: openai.OpenAI, http: httpx.Client, fake: FakeController, tokenizer: Tokenizer) -> None:
    answer = client.completions.create(model="demo", prompt=TEXT, echo=True, max_tokens=4)
    output = tokenizer.decode(tokenizer.encode(ANSWER, add_special_tokens=False)[:4])
    assert answer.choices[0].text == TEXT + output
    assert answer.choices[0].logprobs is None
    assert fake.behaviour.submits[0].sampling.prompt_logprobs == -1
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    both = http.post("/v1/completions", json={"prompt": [ids, ids[:3]], "echo": True, "max_tokens": 4}).json()
    assert [choice["text"] for choice in both["choices"]] == [TEXT + output, tokenizer.decode(ids[:3]) + output]
    for prompt in (TEXT, ids):
        body = {"prompt": prompt, "echo": True, "max_tokens": 4, "stream": True}
        texts = [part["choices"][0]["text"] for part in payloads(http.post("/v1/completions", json=body))]
        assert (texts[0], "".join(texts)) == (TEXT, TEXT + output)


@pytest.mark.parametrize(("stream", "max_tokens"), [(False, 0), (True, 0), (True, 1), (False, 3)])
def test_echo_with_logprobs_scores_a_text(
    http: httpx.Client, fake: FakeController, tokenizer: Tokenizer, max_tokens: int, stream: bool
) -> None:
    """The way evaluation harnesses ask for likelihoods."""
    ids = tokenizer.encode(TEXT, add_special_tokens=True)
    body = {"prompt": ids, "echo": True, "logprobs": 2, "max_tokens": max_tokens, "stream": stream}
    response = http.post("/v1/completions", json=body | {"skip_special_tokens": False, "temperature": 0})
    answers = payloads(response) if stream else [response.json()]
    choices = [answer["choices"][0] for answer in answers]
    text = "".join(choice["text"] for choice in choices)
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
    logprobs: dict[str, list[Any]] = {name: [entry for part in parts for entry in part[name]] for name in names}
    count = len(ids) + max_tokens
    assert [len(logprobs[name]) for name in names] == [count] * 4
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1 : len(ids)] == [-position / 8 for position in range(1, len(ids))]
    assert logprobs["token_logprobs"][len(ids) :] == [-0.25] * max_tokens
    assert len(logprobs["top_logprobs"][1]) == 3, "two and the prompt's own"
    assert text.startswith(tokenizer.decode(ids, skip_special_tokens=False))
    for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        if "\ufffd" not in token:
            assert text[offset:].startswith(token)
    assert choices[-1]["finish_reason"] == "length"
    if not stream:
        assert answers[0]["usage"]["completion_tokens"] == max_tokens
        assert answers[0]["usage"]["total_tokens"] == count
    [submit] = fake.behaviour.submits
    assert (submit.max_tokens, submit.sampling.prompt_logprobs) == (max(max_tokens, 1), 2)


def test_a_prompt_of_one_token_has_no_scores(http: httpx.Client) -> None:
    body = {"prompt": [50], "echo": True, "logprobs": 1, "max_tokens": 0, "prompt_logprobs": 1}
    [choice] = http.post("/v1/completions", json=body).json()["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None]
    assert choice["prompt_logprobs"] == [None]


def test_token_ids(http: httpx.Client, fake: FakeController, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(TEXT, add_special_tokens=True)
    output = [*tokenizer.encode(ANSWER, add_special_tokens=False), EOS]
    body = {"prompt": TEXT, "n": 2, "max_tokens": 100, "return_token_ids": True}
    whole = http.post("/v1/completions", json=body).json()
    Completion.model_validate(whole)
    for choice in whole["choices"]:
        assert (choice["prompt_token_ids"], choice["token_ids"]) == (prompt, output)
    parts = payloads(http.post("/v1/completions", json=body | {"stream": True}))
    for index in range(2):
        mine = [part["choices"][0] for part in parts if part["choices"][0]["index"] == index]
        assert [token for choice in mine for token in choice.get("token_ids", [])] == output
        assert [choice["prompt_token_ids"] for choice in mine if "prompt_token_ids" in choice] == [prompt]
    chat = http.post("/v1/chat/completions", json=CHAT | {"return_token_ids": True}).json()
    assert chat["choices"][0]["token_ids"] == output
    assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
    stream = payloads(http.post("/v1/chat/completions", json=CHAT | {"return_token_ids": True, "stream": True}))
    assert stream[0]["prompt_token_ids"] == chat["prompt_token_ids"]
    assert all("prompt_token_ids" not in part for part in stream[1:])
    tokens = [t for part in stream for choice in part["choices"] for t in choice.get("token_ids", [])]
    assert tokens == output


def test_token_ids_end_with_a_stop_string(http: httpx.Client, tokenizer: Tokenizer) -> None:
    body = {"prompt": "x", "max_tokens": 100, "return_token_ids": True, "stop": "STOP"}
    for stream in (False, True):
        response = http.post("/v1/completions", json=body | {"stream": stream})
        parts = payloads(response) if stream else [response.json()]
        ids = [token for part in parts for token in part["choices"][0].get("token_ids", [])]
        shown = tokenizer.decode(ids)
        assert "STOP" in shown
        assert ANSWER.startswith(shown)
        assert len(shown) < len(ANSWER)
