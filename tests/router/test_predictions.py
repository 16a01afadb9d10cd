"""What a client expects of its answer reaches the engine as tokens."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from trunkline.kvstore.chunks import pack_int32
from trunkline.router.jobs.job import Job
from trunkline.router.jobs.predictions import PREDICTION_CHARACTERS_MAX
from trunkline.router.jobs.request_models import ChatRequest
from trunkline.router.streams.streams import continuation, submission
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
