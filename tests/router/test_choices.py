"""Several choices of one request: parallel samples, the best of many, beams, batches of prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from router.api_calls import payloads, say
from router.fake_controller import FakeController, prompt_of
from router.harness import MESSAGES, RunningRouter, running, wait_until
from router.session_calls import error_of

from trunkline.controller.messages import BeamSearch, Submit
from trunkline.router.messages import Finished, FinishReason
from trunkline.router.text.tokenizer import Tokenizer

CHAT: dict[str, Any] = {"messages": MESSAGES}
PLAIN: dict[str, Any] = {"prompt": "x"}
TEXTS = ("one two three", "four five STOP six seven", "eight", "nine ten eleven twelve thirteen fourteen")


@pytest.fixture
def texts(fake: FakeController, tokenizer: Tokenizer) -> list[list[int]]:
    """Every sample or beam has a text of its own."""
    return say(fake, tokenizer, *TEXTS)


def by_index(chunks: Sequence[Any], text_of: Callable[[Any], str]) -> dict[int, str]:
    """The text of each choice of a stream."""
    found: dict[int, str] = defaultdict(str)
    for chunk in chunks:
        for choice in chunk["choices"]:
            found[choice["index"]] += text_of(choice)
    return dict(found)


def test_samples_in_a_stream(
    client: openai.OpenAI, http: httpx.Client, fake: FakeController, texts: list[list[int]]
) -> None:
    fake.behaviour.seconds_per_token = 0.003
    body = CHAT | {"n": 4, "stream": True, "stream_options": {"include_usage": True}}
    parts = payloads(http.post("/v1/chat/completions", json=body))
    for part in parts:
        ChatCompletionChunk.model_validate(part)
    contents = by_index(parts, lambda choice: choice["delta"].get("content", ""))
    assert contents == dict(enumerate(TEXTS))
    for index in range(4):
        mine = [choice for part in parts for choice in part["choices"] if choice["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert [choice["finish_reason"] for choice in mine].count("stop") == 1
        assert mine[-1]["finish_reason"] == "stop"
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"]["completion_tokens"] == sum(map(len, texts))
    chunks = client.completions.create(model="demo", prompt="x", n=3, max_tokens=50, stream=True)
    found: dict[int, str] = defaultdict(str)
    for chunk in chunks:
        found[chunk.choices[0].index] += chunk.choices[0].text
    assert found == dict(enumerate(TEXTS[:3]))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_answers_do_not_depend_on_how_many_tokens_come_at_once(
    http: httpx.Client, fake: FakeController, texts: list[list[int]], stream: bool, n: int
) -> None:
    """Texts, stop strings and log-probabilities: with accepted drafts a message has several tokens of a sample."""
    body = {"prompt": "x", "n": n, "stop": ["STOP"], "logprobs": 2, "stream": stream, "max_tokens": 50}
    found = []
    for burst in (1, 2, 5, 50):
        fake.behaviour.burst = burst
        response = http.post("/v1/completions", json=body)
        assert response.status_code == 200
        parts = payloads(response) if stream else [response.json()]
        pieces: dict[int, list[Any]] = defaultdict(lambda: ["", [], None])
        for part in parts:
            for choice in part["choices"]:
                piece = pieces[choice["index"]]
                piece[0] += choice["text"]
                piece[1] += (choice["logprobs"] or {}).get("tokens", [])
                piece[2] = choice["finish_reason"] or piece[2]
        found.append(dict(pieces))
    assert found[0][n - 1][0]
    assert found[1:] == found[:1] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_one_sample_only(
    http: httpx.Client, fake: FakeController, texts: list[list[int]], stream: bool
) -> None:
    fake.behaviour.seconds_per_token = 0.002
    response = http.post("/v1/chat/completions", json=CHAT | {"n": 4, "stop": ["STOP"], "stream": stream})
    expected = {0: TEXTS[0], 1: "four five ", 2: TEXTS[2], 3: TEXTS[3]}
    if stream:
        contents = by_index(payloads(response), lambda choice: choice["delta"].get("content", ""))
        assert contents == expected
    else:
        answer = ChatCompletion.model_validate(response.json())
        assert {choice.index: choice.message.content for choice in answer.choices} == expected
        assert answer.usage is not None
        assert answer.usage.completion_tokens < sum(map(len, texts)), "tokens behind the stop string do not count"
    assert fake.behaviour.aborts == [], "it went on until the last sample was over"


def test_the_last_sample_that_stops_aborts_the_request(
    http: httpx.Client, fake: FakeController, router: RunningRouter, tokenizer: Tokenizer
) -> None:
    counts = (80, 40, 1)  # far apart: tokens that come together are read together
    said = [tokenizer.encode("a " * n + "STOP" + " b" * 400, add_special_tokens=False) for n in counts]
    behaviour = fake.behaviour
    behaviour.sample_script = lambda _, index: said[index]
    stops = [len(tokenizer.encode("a " * n + "STOP", add_special_tokens=False)) for n in counts]
    behaviour.pause_after = stops[2] + 5
    body = PLAIN | {"n": 3, "stop": "STOP", "max_tokens": 500}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(http.post, "/v1/completions", json=body)
        wait_until(lambda: len(behaviour.dropped) == 1)
        behaviour.pause_after = stops[1] + 5
        wait_until(lambda: len(behaviour.dropped) == 2)
        behaviour.pause_after = None
        answer = asked.result().json()
    assert [choice["text"] for choice in answer["choices"]] == ["a " * n for n in counts]
    [submit] = fake.behaviour.submits
    wait_until(lambda: fake.behaviour.aborts == [submit.request] and router.inflight == 0)
    # Those that stopped before it were ended one by one, so that no token is computed in vain.
    assert sorted(fake.behaviour.dropped) == [(submit.request, 1), (submit.request, 2)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_ends_all_samples(
    http: httpx.Client, fake: FakeController, router: RunningRouter, stream: bool
) -> None:
    fake.behaviour.fail_after, fake.behaviour.fail_when = 3, router.has_begun
    response = http.post("/v1/completions", json=PLAIN | {"n": 3, "stream": stream})
    assert response.status_code == (200 if stream else 503)
    assert "worker 1 died" in response.text
    assert "[DONE]" not in response.text
    wait_until(lambda: router.inflight == 0)


def test_best_of(http: httpx.Client, fake: FakeController, texts: list[list[int]]) -> None:
    fake.behaviour.token_logprob = [-2.0, -0.5, -3.0, -1.0].__getitem__
    body = PLAIN | {"n": 2, "best_of": 4, "max_tokens": 50}
    answer = Completion.model_validate(http.post("/v1/completions", json=body).json())
    assert [choice.text for choice in answer.choices] == [TEXTS[1], TEXTS[3]], "best first"
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.logprobs for choice in answer.choices] == [None, None], "nobody asked for them"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(map(len, texts)), "all that were drawn count"
    [submit] = fake.behaviour.submits
    assert (submit.n, submit.sampling.logprobs) == (4, 0)
    shown = Completion.model_validate(http.post("/v1/completions", json=body | {"logprobs": 2}).json())
    assert shown.choices[0].logprobs is not None
    assert set(shown.choices[0].logprobs.token_logprobs or []) == {-0.5}
    assert fake.behaviour.submits[1].sampling.logprobs == 2
    assert http.post("/v1/completions", json=PLAIN | {"n": 2, "best_of": 2, "stream": True}).status_code == 200
    assert fake.behaviour.submits[2].sampling.logprobs == -1


BEAMS: dict[str, Any] = {"use_beam_search": True, "max_tokens": 50}


@pytest.mark.parametrize(
    ("given", "n", "search"),
    [
        ({"beam_width": 4}, 4, BeamSearch(4)),
        ({"n": 3}, 3, BeamSearch(3)),
        ({"n": 2, "beam_width": 4, "length_penalty": 0.5, "early_stopping": True}, 2, BeamSearch(4, 0.5, True)),
        ({"n": 1, "best_of": 3, "early_stopping": "never"}, 1, BeamSearch(3, 1.0, None)),
    ],
)
def test_beams(
    http: httpx.Client, fake: FakeController, texts: list[list[int]], given: Any, n: int, search: BeamSearch
) -> None:
    answer = http.post("/v1/completions", json=PLAIN | BEAMS | given).json()
    Completion.model_validate(answer)
    [submit] = fake.behaviour.submits
    assert (submit.n, submit.beam, submit.sampling.temperature) == (n, search, 0.0)
    assert [choice["text"] for choice in answer["choices"]] == list(TEXTS[:n])
    assert [choice["cumulative_logprob"] for choice in answer["choices"]] == [-1.5, -2.5, -3.5, -4.5][:n]
    for choice, ids in zip(answer["choices"], texts, strict=False):
        assert choice["score"] == pytest.approx(choice["cumulative_logprob"] / len(ids))
        assert choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == sum(map(len, texts[:n]))


def test_beams_in_chats_and_streams(http: httpx.Client, fake: FakeController, texts: list[list[int]]) -> None:
    whole = http.post("/v1/chat/completions", json=CHAT | BEAMS | {"beam_width": 2}).json()
    ChatCompletion.model_validate(whole)
    assert [choice["message"]["content"] for choice in whole["choices"]] == list(TEXTS[:2])
    assert whole["choices"][1]["score"] < 0
    parts = payloads(http.post("/v1/chat/completions", json=CHAT | BEAMS | {"beam_width": 2, "stream": True}))
    assert by_index(parts, lambda choice: choice["delta"].get("content", "")) == dict(enumerate(TEXTS[:2]))
    ends = [choice for part in parts for choice in part["choices"] if choice["finish_reason"]]
    assert [end["cumulative_logprob"] for end in ends] == [-1.5, -2.5]
    plain = payloads(http.post("/v1/completions", json=PLAIN | BEAMS | {"beam_width": 3, "stream": True}))
    assert [part["choices"][0]["text"] for part in plain] == list(TEXTS[:3])
    assert all(submit.beam is not None for submit in fake.behaviour.submits)


def test_what_does_not_contradict_a_beam_search(http: httpx.Client) -> None:
    neutral = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "seed": 5, "presence_penalty": 0, "stop": [],
               "repetition_penalty": 1, "stop_token_ids": [9], "echo": True, "return_token_ids": True}  # fmt: skip
    assert http.post("/v1/completions", json=PLAIN | BEAMS | {"beam_width": 2} | neutral).status_code == 200


def test_a_search_without_results_is_the_engines_failure(http: httpx.Client, fake: FakeController) -> None:
    fake.behaviour.problem_of = lambda submit: Finished(submit.request, FinishReason.STOP)
    response = http.post("/v1/completions", json=PLAIN | BEAMS | {"n": 2})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_failed")


# -- batches of prompts


@pytest.fixture
def mirror(fake: FakeController) -> FakeController:
    """The output of a prompt is the prompt again, and the sample's number."""
    fake.behaviour.sample_script = lambda submit, index: [*prompt_of(submit), 100 + index]
    return fake


@pytest.mark.parametrize("stream", [False, True])
def test_a_batch_of_prompts(
    http: httpx.Client, mirror: FakeController, tokenizer: Tokenizer, stream: bool
) -> None:
    prompts: list[Any] = [[50, 51], [60], [70, 71, 72]] if stream else ["one", "two and more", "three"]
    body = {"prompt": prompts, "n": 2, "max_tokens": 40, "stream": stream, "add_special_tokens": False}
    options = {"stream_options": {"include_usage": True}} if stream else {}
    response = http.post("/v1/completions", json=body | options)
    assert response.status_code == 200, response.text
    ids = prompts if stream else [tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
    expected = [tokenizer.decode([*prompt, 100 + sample]) for prompt in ids for sample in range(2)]
    parts = payloads(response) if stream else [Completion.model_validate(response.json()).model_dump()]
    usage = parts[-1]["usage"]
    assert by_index(parts, lambda choice: choice["text"]) == dict(enumerate(expected))
    assert usage["prompt_tokens"] == sum(map(len, ids))
    assert usage["completion_tokens"] == sum(2 * (len(prompt) + 1) for prompt in ids)
    assert len(mirror.behaviour.submits) == 3


def test_prompts_of_a_batch_draw_from_seeds_of_their_own(http: httpx.Client, fake: FakeController) -> None:
    body = {"prompt": [[5], [6], [7]], "bad_words": ["x"], "logit_bias": {"9": 1}}
    assert http.post("/v1/completions", json=body).status_code == 200
    assert http.post("/v1/completions", json=body | {"seed": 4}).status_code == 200
    samplings = [submit.sampling for submit in fake.behaviour.submits]
    assert len({sampling.seed for sampling in samplings[:3]}) == 3
    assert [sampling.seed for sampling in samplings[3:]] == [4, 4, 4]
    assert all(sampling.bad_words and sampling.logit_bias == {9: 1.0} for sampling in samplings)


def test_limits_that_depend_on_the_engine(http: httpx.Client, fake: FakeController, router: RunningRouter) -> None:
    fake.behaviour.max_rows = 32
    wait_until(lambda: router.service.limits.max_rows == 32)
    for fields, param in (
        ({"n": 33}, "n"),
        ({"best_of": 33}, "best_of"),
        (BEAMS | {"beam_width": 33}, "beam_width"),
        ({"prompt": [[5]] * 400, "guided_grammar": "root ::= " + "x" * 100_000}, "prompt"),
    ):
        error = http.post("/v1/completions", json=PLAIN | fields).json()["error"]
        assert error["param"] == param
        assert param in error["message"]
    assert "at most 167 fit" in error["message"], "what is large is not sent with each of many prompts"
    assert not fake.behaviour.submits


def test_too_many_for_the_pool_names_what_the_client_gave(http: httpx.Client, fake: FakeController) -> None:
    def problem(submit: Submit) -> Finished:
        name = "n" if submit.beam is None else "beam_width"
        return Finished(submit.request, FinishReason.INVALID, f"{name} = 8 sequences need 16 blocks", param=name)

    fake.behaviour.problem_of = problem
    beams = {"use_beam_search": True}
    for fields, param in (
        ({"n": 8}, "n"),
        ({"n": 2, "best_of": 8}, "best_of"),
        (beams | {"n": 2, "beam_width": 8}, "beam_width"),
        (beams | {"n": 8}, "n"),
        (beams | {"n": 2, "best_of": 8}, "best_of"),
    ):
        answer = http.post("/v1/completions", json=PLAIN | fields)
        assert error_of(answer) == (400, "invalid_request", param)
        assert answer.json()["error"]["message"] == f"{param} = 8 sequences need 16 blocks"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reason", [FinishReason.INVALID, FinishReason.QUEUE_FULL])
def test_a_batch_is_all_or_nothing(
    http: httpx.Client, fake: FakeController, router: RunningRouter, stream: bool, reason: FinishReason
) -> None:
    def problem(submit: Submit) -> Finished | None:
        return Finished(submit.request, reason, "no room") if prompt_of(submit) == [77] else None

    fake.behaviour.problem_of = problem
    fake.behaviour.hold = True
    response = http.post("/v1/completions", json={"prompt": [[5], [6], [77], [8]], "stream": stream})
    if response.status_code == 200:  # a stream that had begun before the refusal came
        assert stream
        assert "no room" in response.text
    else:
        assert response.status_code == (400 if reason == FinishReason.INVALID else 429)
        expected = "prompt[2]" if reason == FinishReason.INVALID else None
        assert response.json()["error"]["param"] == expected
    wait_until(lambda: len(fake.behaviour.aborts) == 3 and fake.live == 0 and router.inflight == 0)


def test_a_batch_whose_client_leaves(http: httpx.Client, fake: FakeController, router: RunningRouter) -> None:
    fake.behaviour.seconds_per_token = 0.005
    body = {"prompt": [[5], [6], [7]], "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        chunks = response.iter_bytes()  # kept: without it the connection would be let go of
        next(chunks)
    wait_until(lambda: len(fake.behaviour.aborts) == 3 and fake.live == 0 and router.inflight == 0)


def test_a_batch_beyond_the_routers_limit(place: Path, tokenizer: Tokenizer) -> None:
    with running(place, tokenizer, max_inflight=10) as (router, [fake]), router.client() as http:
        refused = http.post("/v1/completions", json={"prompt": [[5]] * 11})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert not fake.behaviour.submits, "all or nothing"
        assert len(http.post("/v1/completions", json={"prompt": [[5]] * 10}).json()["choices"]) == 10
        wait_until(lambda: router.inflight == 0)
