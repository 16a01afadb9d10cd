"""`/v1/embeddings`: inputs in all forms, vectors in both, limits, and what goes to the engine."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router.fake_controller import FakeController, prompt_of
from router.harness import VOCAB_SIZE, RunningRouter, wait_until

from trunkline.controller.messages import Submit
from trunkline.controller.reports import TopLogprobs
from trunkline.router.api import prompt_reports
from trunkline.router.api.prompt_reports import vector_of
from trunkline.router.errors import ApiError
from trunkline.router.messages import Finished, FinishReason, Started
from trunkline.router.text.embedding_files import Embedder, read_embedder
from trunkline.router.text.tokenizer import Tokenizer
from trunkline.worker.messages import POOL_LAST, POOL_MEAN

PATH = "/v1/embeddings"
SIZE = 256
"""Of the demo model's hidden states."""


def state(tokens: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """What the controller of these tests makes of a prompt."""
    return np.random.default_rng(tokens).normal(0, 3, SIZE).astype("<f4")


def unit(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = values / np.linalg.norm(values)
    return found


@pytest.fixture(autouse=True)
def pools(fake: FakeController) -> None:
    """The controller pools prompts."""
    fake.behaviour.report_of = lambda submit: TopLogprobs(0.0, b"", b"", state(prompt_of(submit)).tobytes())


def error_of(response: httpx.Response) -> dict[str, Any]:
    return dict(response.json()["error"])


def embed(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post(PATH, json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_through_the_client(client: openai.OpenAI, fake: FakeController, tokenizer: Tokenizer) -> None:
    """It asks for base64, and shows numbers."""
    fake.behaviour.found = lambda submit: Started(submit.request, 2, [2, 0, 0, 0, 0], "new", 2)
    texts = ["What is a radix tree?", "Ein Baum.", "What is a radix tree?"]
    answer = client.embeddings.create(model="demo", input=texts, user="someone")
    tokens = [tokenizer.encode(text, add_special_tokens=True) for text in texts]
    assert [item.index for item in answer.data] == [0, 1, 2]
    for item, ids in zip(answer.data, tokens, strict=True):
        np.testing.assert_allclose(item.embedding, unit(state(ids)), atol=1e-6)
    count = sum(map(len, tokens))
    assert (answer.object, answer.model, answer.data[0].object) == ("list", "demo", "embedding")
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (count, count)
    extra = answer.model_extra or {}
    assert extra["cache"]["tiers"] == {"device": 6}
    assert "warnings" not in extra
    for submit, ids in zip(fake.behaviour.submits, tokens, strict=True):
        assert prompt_of(submit) == ids
        assert (submit.max_tokens, submit.sampling.pooling, submit.sampling.temperature) == (1, POOL_LAST, 0)
        assert not submit.stop_token_ids


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
        ("import os", None),
        (["import os"], None),
    ],
)
def test_forms_of_inputs(http: httpx.Client, tokenizer: Tokenizer, given: Any, expected: Any) -> None:
    prompts = expected or [tokenizer.encode("import os", add_special_tokens=True)]
    answer = embed(http, input=given)
    assert [item["index"] for item in answer["data"]] == list(range(len(prompts)))
    for item, prompt in zip(answer["data"], prompts, strict=True):
        np.testing.assert_allclose(item["embedding"], unit(state(prompt)), atol=1e-6)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert "completion_tokens" not in answer["usage"]


def test_both_encodings_have_the_same_bits(http: httpx.Client) -> None:
    numbers = embed(http, input=[7, 8], encoding_format="float")["data"][0]["embedding"]
    text = embed(http, input=[7, 8], encoding_format="base64")["data"][0]["embedding"]
    assert np.array(numbers, "<f4").tobytes() == base64.b64decode(text)


def test_dimensions_and_length(http: httpx.Client) -> None:
    """Truncated embeddings have length 1 again."""
    [short] = embed(http, input=[5, 6], dimensions=10)["data"]
    np.testing.assert_allclose(short["embedding"], unit(state([5, 6])[:10]), atol=1e-6)
    [raw] = embed(http, input=[5, 6], dimensions=10, normalize=False)["data"]
    np.testing.assert_array_equal(np.array(raw["embedding"], "<f4"), state([5, 6])[:10])
    assert len(embed(http, input=[5, 6], dimensions=SIZE)["data"][0]["embedding"]) == SIZE


def test_parameters_reach_the_engine(http: httpx.Client, fake: FakeController) -> None:
    body = {"pooling": "mean", "priority": 3, "cache_salt": "x", "truncate_prompt_tokens": 2}
    answer = embed(http, input=[5, 6, 7], **body, user="u", wholly_new=1)
    embed(http, input=[5, 6, 7], truncate_prompt_tokens=2, truncation_side="right")
    embed(http, input="import os", add_special_tokens=False)
    first, second, third = fake.behaviour.submits
    assert first.sampling.pooling == POOL_MEAN
    assert (prompt_of(first), prompt_of(second)) == ([6, 7], [5, 6])
    assert first.priority == 3
    assert first.salt != second.salt
    assert len(prompt_of(third)) < len("import os")
    assert answer["warnings"] == ["`wholly_new` is not a known parameter and was ignored"]


LONG = [7] * 3000
_NO_INPUTS: list[Any] = [None, "", [], 5, {}, ["a", [1]], [5, "a"]]
_NO_ITEMS: list[Any] = [5.5, True, None, {}, ""]
_NO_COUNTS: list[Any] = [0, -1, "5", 1.5, True]
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("input", {}),
    *[("input", {"input": value}) for value in _NO_INPUTS],
    ("input", {"input": ["x"] * 2049}),
    ("input", {"input": [VOCAB_SIZE]}),
    ("input", {"input": LONG}),
    ("input", {"input": "word " * 30_000}),
    *[("input[0]", {"input": [value]}) for value in _NO_ITEMS],
    ("input[1]", {"input": ["a", ""]}),
    ("input[1]", {"input": [[1], []]}),
    ("input[1]", {"input": [[1], ["a"]]}),
    ("input[2]", {"input": [[1], [2], LONG]}),
    ("input[1]", {"input": ["a", "word " * 30_000]}),
    ("input[1]", {"input": [[1], [VOCAB_SIZE]]}),
    ("dimensions", {"input": "x", "dimensions": SIZE + 1}),
    *[("dimensions", {"input": "x", "dimensions": value}) for value in _NO_COUNTS],
    ("encoding_format", {"input": "x", "encoding_format": "hex"}),
    ("pooling", {"input": "x", "pooling": "max"}),
    ("normalize", {"input": "x", "normalize": "yes"}),
    ("truncate_prompt_tokens", {"input": "x", "truncate_prompt_tokens": 0}),
    ("truncate", {"input": "x", "truncate": "END"}),
    ("input_type", {"input": "x", "input_type": "query"}),
    ("embedding_types", {"input": "x", "embedding_types": ["int8"]}),
    ("messages", {"messages": [{"role": "user", "content": "x"}]}),
    ("cache_salt", {"input": "x", "cache_salt": ""}),
]


@pytest.mark.parametrize(("param", "body"), WRONG)
def test_what_is_refused(http: httpx.Client, fake: FakeController, param: str, body: dict[str, Any]) -> None:
    response = http.post(PATH, json=body)
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["param"] == param
    assert f"`{param}`" in error["message"] or param in error["message"]
    assert not fake.behaviour.submits


def test_an_answer_has_a_limit(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trunkline.router.api.embeddings.VALUES_MAX", 2 * SIZE)
    error = error_of(http.post(PATH, json={"input": [[5], [6], [7]]}))
    assert (error["param"], f"{3 * SIZE} values" in error["message"]) == ("input", True)
    assert len(embed(http, input=[[5], [6], [7]], dimensions=8)["data"]) == 3


def test_many_inputs_come_in_parts(
    http: httpx.Client, fake: FakeController, router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more are with the engine at once than `TOGETHER_MAX`; answers keep the order of inputs."""
    monkeypatch.setattr(prompt_reports, "TOGETHER_MAX", 7)
    most = 0

    def report(submit: Submit) -> TopLogprobs:
        nonlocal most
        most = max(most, router.inflight)
        return TopLogprobs(0.0, b"", b"", state(prompt_of(submit)).tobytes())

    fake.behaviour.report_of = report
    answer = embed(http, input=[[index, 9] for index in range(40)], encoding_format="float")
    for index, item in enumerate(answer["data"]):
        np.testing.assert_allclose(item["embedding"], unit(state([index, 9])), atol=1e-6)
    assert 1 <= most <= 7


def test_an_error_in_a_later_part_names_its_input(
    http: httpx.Client, fake: FakeController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_reports, "TOGETHER_MAX", 3)
    fake.behaviour.problem_of = lambda submit: (
        Finished(submit.request, FinishReason.INVALID, "it is 9", param="prompt")
        if prompt_of(submit) == [9]
        else None
    )
    error = error_of(http.post(PATH, json={"input": [[1], [2], [3], [4], [9], [5], [6]]}))
    assert (error["param"], error["message"]) == ("input[4]", "`input[4]`: it is 9")


def test_2048_inputs(http: httpx.Client) -> None:
    answer = embed(http, input=[[index, 5] for index in range(2048)], encoding_format="base64")
    assert answer["usage"]["prompt_tokens"] == 2 * 2048
    for index in (0, 511, 512, 2047):
        vector = np.frombuffer(base64.b64decode(answer["data"][index]["embedding"]), "<f4")
        np.testing.assert_allclose(vector, unit(state([index, 5])), atol=1e-6)


def test_one_refused_input_ends_all(http: httpx.Client, fake: FakeController, router: RunningRouter) -> None:
    def problem(submit: Submit) -> Finished | None:
        if prompt_of(submit) != [6]:
            return None
        return Finished(submit.request, FinishReason.INVALID, "the prompt has 1 tokens", param="prompt")

    fake.behaviour.problem_of, fake.behaviour.hold = problem, True
    response = http.post(PATH, json={"input": [[5], [6], [7]]})
    assert response.status_code == 400
    assert error_of(response)["param"] == "input[1]"
    wait_until(lambda: router.inflight == 0)


@pytest.mark.parametrize(
    "report",
    [None, TopLogprobs(0.0, b"", b""), TopLogprobs(0.0, b"", b"", np.full(8, np.nan, "<f4").tobytes())],
    ids=["nothing", "no state", "no numbers"],
)
def test_an_engine_that_reports_no_state(
    http: httpx.Client, fake: FakeController, report: TopLogprobs | None
) -> None:
    """One of an earlier version knows nothing of pooling."""
    fake.behaviour.report_of = lambda submit: report
    response = http.post(PATH, json={"input": "x"})
    assert response.status_code == 503
    assert error_of(response)["code"] == "engine_failed"


def test_a_batch_of_embeddings(client: openai.OpenAI, fake: FakeController) -> None:
    lines = [
        {"custom_id": f"c{i}", "method": "POST", "url": PATH, "body": {"input": [5, i], "model": "demo"}}
        for i in range(1, 6)
    ]
    file = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    wait_until(lambda: client.batches.retrieve(made.id).status == "completed")
    output = client.batches.retrieve(made.id).output_file_id
    assert output is not None
    for line in map(json.loads, client.files.content(output).text.splitlines()):
        [item] = line["response"]["body"]["data"]
        number = int(line["custom_id"][1:])
        np.testing.assert_allclose(item["embedding"], unit(state([5, number])), atol=1e-6)


# The vectors themselves


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40),
    dimensions=st.integers(1, 40),
)
def test_vectors(values: list[float], dimensions: int) -> None:
    report = TopLogprobs(0.0, b"", b"", np.array(values, "<f4").tobytes())
    if dimensions > len(values):
        with pytest.raises(ApiError) as caught:
            vector_of(report, dimensions)
        assert caught.value.param == "dimensions"
        return
    vector = vector_of(report, dimensions)
    assert vector.dtype == np.dtype("<f4")
    assert vector.shape == (dimensions,)
    length = float(np.linalg.norm(vector.astype(np.float64)))
    assert length == pytest.approx(1.0, abs=1e-5) if any(values[:dimensions]) else length == 0
    np.testing.assert_array_equal(vector_of(report, normalize=False), np.array(values, "<f4"))


# What a checkpoint says

TRANSFORMER = {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
LAST = {"word_embedding_dimension": 8, "pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}
MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}


@pytest.mark.parametrize(
    ("modules", "pooling", "expected"),
    [
        (None, None, Embedder()),
        ([TRANSFORMER, POOLING, NORMALIZE], LAST, Embedder("last", is_declared=True)),
        ([TRANSFORMER, POOLING], MEAN, Embedder("mean", is_declared=True)),
        (None, MEAN, Embedder("mean", is_declared=True)),
        (None, {"pooling_mode": "mean"}, Embedder("mean", is_declared=True)),
        ([TRANSFORMER], None, Embedder(is_declared=True)),
    ],
)
def test_what_a_checkpoint_says(
    tmp_path: Path, modules: list[Any] | None, pooling: dict[str, Any] | None, expected: Embedder
) -> None:
    write(tmp_path, modules, pooling)
    assert read_embedder(tmp_path) == expected


@pytest.mark.parametrize(
    ("modules", "pooling", "problem"),
    [
        ([TRANSFORMER, POOLING, DENSE], LAST, "Dense"),
        ([TRANSFORMER, POOLING], {"pooling_mode_cls_token": True}, "pooling_mode_cls_token"),
        ([TRANSFORMER, POOLING], {**LAST, **MEAN, "pooling_mode_lasttoken": True}, "mean"),
        ([TRANSFORMER, POOLING], {}, "none"),
    ],
)
def test_a_checkpoint_that_embeds_in_another_way(
    tmp_path: Path, modules: list[Any], pooling: dict[str, Any], problem: str
) -> None:
    write(tmp_path, modules, pooling)
    found = read_embedder(tmp_path)
    assert found.is_declared
    assert problem in found.problem


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[")
    with pytest.raises(ValueError, match=r"modules\.json is not valid JSON"):
        read_embedder(tmp_path)


def write(folder: Path, modules: list[Any] | None, pooling: dict[str, Any] | None) -> None:
    if modules is not None:
        (folder / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))


@pytest.fixture
def embedder(router: RunningRouter, monkeypatch: pytest.MonkeyPatch) -> Callable[[Embedder], None]:
    """Sets what the served checkpoint says."""
    tokenizer = router.service.tokenizer

    def say(found: Embedder) -> None:
        monkeypatch.setattr(tokenizer, "files", msgspec.structs.replace(tokenizer.files, embedder=found))

    return say


def test_the_checkpoint_s_pooling_is_the_default(
    http: httpx.Client, fake: FakeController, embedder: Callable[[Embedder], None]
) -> None:
    embedder(Embedder("mean", is_declared=True))
    embed(http, input="x")
    embed(http, input="x", pooling="last")
    assert [submit.sampling.pooling for submit in fake.behaviour.submits] == [POOL_MEAN, POOL_LAST]
    embedder(Embedder(is_declared=True, problem="it needs `Dense`"))
    error = error_of(http.post(PATH, json={"input": "x"}))
    assert (error["param"], "Dense" in error["message"]) == ("pooling", True)
    assert embed(http, input="x", pooling="last")["data"]
