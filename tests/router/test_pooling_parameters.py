"""Every parameter of embeddings, scores and rankings has an effect or is refused; unknown ones are named. What is
sent again with the same `Idempotency-Key` is answered again."""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

import httpx
import numpy as np
import pytest
from router.fake_controller import FakeController, prompt_of

from trunkline.controller.messages import Submit
from trunkline.controller.reports import TopLogprobs
from trunkline.kvstore.chunks import pack_int32, unpack_int32
from trunkline.router.jobs.parameter_table import Endpoint
from trunkline.router.jobs.pooling_models import EMBEDDINGS, RERANK, SCORE
from trunkline.router.text.tokenizer import Tokenizer

TABLE: Final[dict[str, Endpoint[Any]]] = {"/v1/embeddings": EMBEDDINGS, "/score": SCORE, "/v2/rerank": RERANK}
PAIRS: Final = ["one", "another one", "a third text"]
BODIES: Final[dict[str, dict[str, Any]]] = {
    "/v1/embeddings": {"input": "Once upon a time"},
    "/score": {"text_1": "numbers", "text_2": PAIRS},
    "/v2/rerank": {"query": "numbers", "documents": PAIRS},
}
each_path = pytest.mark.parametrize("path", sorted(TABLE))


class Probe(NamedTuple):
    """A value of a parameter, and what else is in the request, with it and without it."""

    value: Any
    beside: dict[str, Any] = {}  # noqa: RUF012 (a NamedTuple's default, never changed)


COSINE: Final = {"scoring": "cosine"}
PROBES: Final[dict[str, Probe]] = {
    "model": Probe("none"),
    "pooling": Probe("mean"),
    "priority": Probe(5),
    "cache_salt": Probe("s"),
    "input": Probe("Twice upon a time"),
    "encoding_format": Probe("base64"),
    "dimensions": Probe(7),
    "normalize": Probe(value=False),
    "add_special_tokens": Probe(value=False),
    "truncate_prompt_tokens": Probe(2),
    "truncation_side": Probe("right", {"truncate_prompt_tokens": 2}),
    "scoring": Probe("cosine"),
    "instruction": Probe("Find fruit"),
    "max_tokens_per_doc": Probe(1),
    "text_1": Probe("fruit"),
    "text_2": Probe([*PAIRS, "more"]),
    "query": Probe("fruit"),
    "documents": Probe(PAIRS[:2]),
    "top_n": Probe(2),
    "return_documents": Probe(value=True),
}
BESIDE: Final = {"/score": {"pooling": COSINE}, "/v2/rerank": {"pooling": COSINE}}
"""What a parameter needs beside it at one endpoint only."""


class Seen(NamedTuple):
    """What comes of a request: the answer, and what went to the engine."""

    status: int
    reply: str
    asked: list[Any]
    """Of each prompt its tokens, sampling parameters, priority and salt."""


def reports(submit: Submit) -> TopLogprobs:
    """Numbers that depend on all of the prompt and on the kind of pooling."""
    rng = np.random.default_rng([*prompt_of(submit), submit.sampling.pooling])
    if submit.sampling.pooling:
        return TopLogprobs(0.0, b"", b"", rng.normal(0, 3, 16).astype("<f4").tobytes())
    allowed = unpack_int32(submit.sampling.allowed_ids).tolist()
    values = np.sort(-rng.random(len(allowed)).astype("<f4"))[::-1]
    return TopLogprobs(float(values[0]), pack_int32(allowed), values.tobytes())


@pytest.fixture(autouse=True)
def pools(fake: FakeController, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller pools prompts, and answers with yes or no. The tokenizer has a special token to add, unlike
    that of the demo model."""
    fake.behaviour.report_of = reports
    encode = Tokenizer.encode_async

    async def encoded(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        ids = await encode(tokenizer, text, add_special_tokens=add_special_tokens)
        return [1, *ids] if add_special_tokens else ids

    monkeypatch.setattr(Tokenizer, "encode_async", encoded)


_CHANGING: Final = re.compile(r'"(id|created)":\s*("[^"]*"|\d+)')


def send(http: httpx.Client, fake: FakeController, path: str, fields: dict[str, Any]) -> Seen:
    fake.behaviour.submits.clear()
    answer = http.post(path, json=fields)
    asked = [(prompt_of(each), each.sampling, each.priority, each.salt) for each in fake.behaviour.submits]
    return Seen(answer.status_code, _CHANGING.sub("", answer.text), asked)


def body_of(path: str, name: str) -> tuple[dict[str, Any], Probe]:
    probe = PROBES[name]
    return BODIES[path] | probe.beside | BESIDE.get(path, {}).get(name, {}), probe


@each_path
def test_each_parameter_has_an_effect(http: httpx.Client, fake: FakeController, path: str) -> None:
    for parameter in TABLE[path].parameters:
        assert parameter.meaning, f"{parameter.name} needs a meaning in the documentation"
        body, probe = body_of(path, parameter.name)
        without = send(http, fake, path, body)
        assert without.status == 200, without.reply
        assert send(http, fake, path, body) == without, "nothing is drawn"
        with_it = send(http, fake, path, body | {parameter.name: probe.value})
        assert with_it != without, f"{parameter.name} has no effect at {path}"
        assert with_it.status == (404 if parameter.name == "model" else 200), with_it


@each_path
def test_other_spellings_mean_the_same_and_errors_name_them(
    http: httpx.Client, fake: FakeController, path: str
) -> None:
    for spelling, key in TABLE[path].spellings.items():
        body, probe = body_of(path, key)
        body.pop(key, None)
        own = send(http, fake, path, body | {key: probe.value})
        assert own.status == 200, own.reply
        assert send(http, fake, path, body | {spelling: probe.value}) == own, (spelling, key)
        both = http.post(path, json=body | {key: probe.value, spelling: probe.value}).json()["error"]
        assert both["param"] == spelling
        bad = http.post(path, json=body | {spelling: {}})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, spelling), bad.text


@each_path
def test_what_is_known_and_not_applied(http: httpx.Client, fake: FakeController, path: str) -> None:
    """It is refused if it asks for something, and else it changes nothing."""
    without = send(http, fake, path, BODIES[path])
    for spelling, entry in TABLE[path].known:
        if entry.neutral is None:
            assert send(http, fake, path, BODIES[path] | {spelling: {"a": [1]}}) == without, spelling
            continue
        error = http.post(path, json=BODIES[path] | {spelling: {"a": 1}}).json()["error"]
        assert (error["param"], error["code"]) == (spelling, "unsupported_parameter")
        for neutral in (None, [], *entry.neutral):
            assert send(http, fake, path, BODIES[path] | {spelling: neutral}) == without, (spelling, neutral)


@each_path
def test_unknown_parameters_are_named(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json=BODIES[path] | {"novel": 1, "other": None})
    assert [text.split("`")[1] for text in answer.json()["warnings"]] == ["novel", "other"]


@pytest.mark.parametrize("path", [*TABLE, "/v1/score", "/rerank", "/v1/rerank"])
def test_a_request_that_is_sent_again_is_not_computed_again(
    http: httpx.Client, fake: FakeController, path: str
) -> None:
    body = BODIES.get(path) or BODIES["/score" if "score" in path else "/v2/rerank"]
    first, again = [http.post(path, json=body, headers={"Idempotency-Key": f"again{path}"}) for _ in range(2)]
    assert first.status_code == 200
    assert (again.content, again.headers["Idempotent-Replayed"]) == (first.content, "true")
    assert len(fake.behaviour.submits) == len(body.get("documents", body.get("text_2", [1])))
