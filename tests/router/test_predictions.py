"""What a client expects of its answer reaches the engine as tokens; what came of drafts is in `usage`."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from router.api_calls import named_events, payloads
from router.fake_controller import FakeController

from trunkline.kvstore.chunks import pack_int32
from trunkline.router.jobs.job import Job
from trunkline.router.jobs.predictions import PREDICTION_CHARACTERS_MAX
from trunkline.router.jobs.request_models import ChatRequest
from trunkline.router.streams.submissions import continuation, submission
from trunkline.worker.messages import Sampling

MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("def f():", "def f():"),
        ([{"type": "text", "text": "def "}, {"type": "text", "text": "f():"}], "def f():"),
        ([], ""),
        ("a" * PREDICTION_CHARACTERS_MAX + "b", "a" * PREDICTION_CHARACTERS_MAX),
    ],
)
def test_a_prediction_is_a_text_or_parts_of_one(content: Any, text: str) -> None:
    body = {"messages": MESSAGES, "prediction": {"type": "content", "content": content}}
    prediction = ChatRequest.model_validate(body).prediction
    assert prediction is not None
    assert prediction.text == text


@pytest.mark.parametrize("prediction", ["text", {"content": "a"}, {"type": "content", "content": [{"text": "a"}]}])
def test_what_is_no_prediction_is_refused(prediction: Any) -> None:
    with pytest.raises(ValidationError, match="prediction"):
        ChatRequest.model_validate({"messages": MESSAGES, "prediction": prediction})


def test_the_place_of_what_is_wrong_is_named_as_in_the_body() -> None:
    for content, place in ((5, ("content",)), ([{"type": "text", "text": 5}], ("content", 0, "text"))):
        body = {"messages": MESSAGES, "prediction": {"type": "content", "content": content}}
        with pytest.raises(ValidationError) as found:
            ChatRequest.model_validate(body)
        assert found.value.errors()[0]["loc"] == ("prediction", *place)


@pytest.mark.parametrize("prediction", [pack_int32([5, 6]), b"", None])
def test_the_engine_is_told_of_it_also_where_a_stream_goes_on(prediction: bytes | None) -> None:
    job = Job([1, 2], 9, Sampling(), frozenset(), prediction=prediction)
    assert submission(job, 1).prediction == prediction
    assert continuation(job, 1, 0, [5]).prediction == prediction


# Usage

PREDICTED = {"prediction": {"type": "content", "content": "as before"}}
COUNTED = {
    "accepted_prediction_tokens": 10,
    "rejected_prediction_tokens": 4,
    "drafted_tokens": 14,
    "accepted_drafts": 10,
}
PLACES = [
    ("/v1/chat/completions", {"messages": MESSAGES}, "completion_tokens_details"),
    ("/v1/completions", {"prompt": "x"}, "completion_tokens_details"),
    ("/v1/responses", {"input": "x"}, "output_tokens_details"),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 50}, "output_tokens_details"),
]


def details_of(http: httpx.Client, path: str, body: dict[str, Any], field: str) -> dict[str, int]:
    """Return what `usage` says of the output, but for thoughts."""
    answer = http.post(path, json={"model": "demo"} | body)
    assert answer.status_code == 200, answer.text
    details = dict(answer.json()["usage"].get(field, {}))
    details.pop("reasoning_tokens", None)
    return details


@pytest.mark.parametrize(("path", "body", "field"), PLACES)
def test_drafts_are_counted_in_usage(
    http: httpx.Client, fake: FakeController, path: str, body: dict[str, Any], field: str
) -> None:
    fake.behaviour.script = lambda _: [5] * 12
    fake.behaviour.burst = 6  # two messages
    limit = {"max_output_tokens": 12} if "responses" in path else {"max_tokens": 12}
    body = body | limit
    assert details_of(http, path, body, field) == {}, "no drafts, and none were expected"
    fake.behaviour.drafts = (7, 5, True)
    assert details_of(http, path, body, field) == COUNTED
    fake.behaviour.drafts = (7, 5, False)
    others = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert details_of(http, path, body, field) == COUNTED | others
    fake.behaviour.drafts = None
    if not path.endswith("messages"):
        assert details_of(http, path, body | PREDICTED, field) == dict.fromkeys(COUNTED, 0)


@pytest.mark.parametrize(("path", "body", "field"), PLACES)
def test_drafts_are_counted_in_the_usage_of_a_stream(
    http: httpx.Client, fake: FakeController, path: str, body: dict[str, Any], field: str
) -> None:
    fake.behaviour.script = lambda _: [5] * 12
    fake.behaviour.burst = 6
    fake.behaviour.drafts = (7, 5, True)
    limit = {"max_output_tokens": 12} if "responses" in path else {"max_tokens": 12}
    options = {"stream_options": {"include_usage": True}} if path.endswith("completions") else {}
    answer = http.post(path, json={"model": "demo", "stream": True} | body | limit | options)
    if path.endswith("completions"):
        usage = payloads(answer)[-1]["usage"]
    else:
        last = [event for event in named_events(answer) if "usage" in event.get("response", event)][-1]
        usage = last.get("response", last)["usage"]
    assert {name: usage[field][name] for name in COUNTED} == COUNTED


def test_drafts_of_all_samples_are_counted_in_a_stream(http: httpx.Client, fake: FakeController) -> None:
    fake.behaviour.script = lambda _: [5] * 12
    fake.behaviour.burst = 12
    fake.behaviour.drafts = (7, 5, True)
    body = {"model": "demo", "prompt": ["x", "y"], "max_tokens": 12, "stream": True}
    answer = http.post("/v1/completions", json=body | {"stream_options": {"include_usage": True}})
    assert payloads(answer)[-1]["usage"]["completion_tokens_details"] == COUNTED
