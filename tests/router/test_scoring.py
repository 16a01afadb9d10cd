"""`/score` and `/rerank`: prompts of pairs, the meaning of scores, orders, and all forms of requests."""

from __future__ import annotations

import math
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from router.fake_controller import FakeController, prompt_of
from router.harness import RunningRouter

from trunkline.controller.messages import Submit
from trunkline.controller.reports import TopLogprobs
from trunkline.kvstore.chunks import pack_int32, unpack_int32
from trunkline.router.text.chat_template import ChatRenderer
from trunkline.router.text.embedding_files import Embedder
from trunkline.router.text.tokenizer import Tokenizer
from trunkline.worker.messages import POOL_LAST, POOL_MEAN

DOCUMENTS = ["Paris is in France.", "A radix tree shares prefixes.", "Bread is baked."]
QUERY = "What shares prefixes?"
RERANK = ("/rerank", "/v1/rerank", "/v2/rerank")
SCORE = ("/score", "/v1/score")


class Judge:
    """What the model thinks: "yes" is so many nats likelier than "no", by a word in the document."""

    def __init__(self, tokenizer: Tokenizer, margins: dict[str, float]) -> None:
        self._tokenizer = tokenizer
        self.margins = margins
        self.texts: list[str] = []

    def report(self, submit: Submit) -> TopLogprobs:
        """The likelihoods of the two allowed tokens, the likelier one first, as workers report them."""
        text = self._tokenizer.decode(prompt_of(submit), skip_special_tokens=False)
        self.texts.append(text)
        margin = next(value for word, value in self.margins.items() if word in text.rpartition("<Document>")[2])
        yes = -math.log1p(math.exp(-margin))
        no = -math.log1p(math.exp(margin))
        word = " yes" if text.endswith("Answer:") else "yes"  # a chat's template opens the answer itself
        first = self._tokenizer.encode(word, add_special_tokens=False)[0]
        allowed = unpack_int32(submit.sampling.allowed_ids).tolist()
        assert len(allowed) == 2
        assert first in allowed
        logprobs = sorted(((yes if token == first else no, token) for token in allowed), reverse=True)
        values = np.array([value for value, _ in logprobs], "<f4")
        return TopLogprobs(float(values[0]), pack_int32([token for _, token in logprobs]), values.tobytes())


@pytest.fixture
def judge(fake: FakeController, tokenizer: Tokenizer) -> Judge:
    made = Judge(tokenizer, {"Paris": -2.0, "radix": 3.0, "Bread": -0.5, "tea": 0.0})
    fake.behaviour.report_of = made.report
    return made


def post(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def likelihood(margin: float) -> float:
    return 1 / (1 + math.exp(-margin))


@pytest.mark.parametrize("path", RERANK)
def test_documents_in_order(http: httpx.Client, judge: Judge, path: str) -> None:
    answer = post(http, path, query=QUERY, documents=DOCUMENTS, model="demo")
    found = [(result["index"], result["relevance_score"]) for result in answer["results"]]
    assert [index for index, _ in found] == [1, 2, 0]
    for (_, score), margin in zip(found, (3.0, -0.5, -2.0), strict=True):
        assert score == pytest.approx(likelihood(margin), abs=1e-6)
    assert not any("document" in result for result in answer["results"])
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 30
    assert (answer["model"], answer["object"]) == ("demo", "list")


def test_the_best_with_their_texts(http: httpx.Client, judge: Judge) -> None:
    documents = [{"text": DOCUMENTS[0], "title": "x"}, DOCUMENTS[1], {"text": DOCUMENTS[2]}]
    answer = post(http, "/v1/rerank", query=QUERY, documents=documents, top_n=2, return_documents=True)
    assert [result["document"] for result in answer["results"]] == [{"text": DOCUMENTS[1]}, {"text": DOCUMENTS[2]}]
    assert len(post(http, "/v1/rerank", query=QUERY, documents=documents, top_n=20)["results"]) == 3


def test_equal_scores_keep_the_order(http: httpx.Client, judge: Judge) -> None:
    answer = post(http, "/rerank", query=QUERY, documents=["tea 1", "tea 2", "tea 3"])
    assert [result["index"] for result in answer["results"]] == [0, 1, 2]
    assert {result["relevance_score"] for result in answer["results"]} == {0.5}


@pytest.mark.parametrize("path", SCORE)
def test_scores_of_pairs(http: httpx.Client, judge: Judge, path: str) -> None:
    answer = post(http, path, text_1=QUERY, text_2=DOCUMENTS)
    assert [(item["index"], item["object"]) for item in answer["data"]] == [(i, "score") for i in range(3)]
    scores = [item["score"] for item in answer["data"]]
    assert scores == pytest.approx([likelihood(margin) for margin in (-2.0, 3.0, -0.5)], abs=1e-6)
    [single] = post(http, path, text_1=QUERY, text_2=DOCUMENTS[1])["data"]
    assert single["score"] == pytest.approx(likelihood(3.0), abs=1e-6)
    each = post(http, path, queries=["a?", "b?", "c?"], items=[{"text": text} for text in DOCUMENTS])
    assert [item["score"] for item in each["data"]] == scores
    assert [text.partition("<Query>: ")[2][:2] for text in judge.texts[-3:]] == ["a?", "b?", "c?"]


def test_the_prompt_is_that_of_the_model_s_training(
    http: httpx.Client, judge: Judge, fake: FakeController, tokenizer: Tokenizer
) -> None:
    """In the words of Qwen3-Reranker, in the model's own chat template; the query before the document."""
    post(http, "/score", text_1=QUERY, text_2=DOCUMENTS, instruction="Find what is about data structures")
    expected = tokenizer.render_chat(
        [
            {
                "role": "system",
                "content": "Judge whether the Document meets the requirements based on the Query and the Instruct "
                'provided. Note that the answer can only be "yes" or "no".',
            },
            {
                "role": "user",
                "content": f"<Instruct>: Find what is about data structures\n<Query>: {QUERY}\n"
                f"<Document>: {DOCUMENTS[0]}",
            },
        ]
    )
    assert judge.texts[0].startswith(expected)
    first, second, third = [prompt_of(submit) for submit in fake.behaviour.submits]
    shared = tokenizer.encode(expected.partition("<Document>")[0], add_special_tokens=False)
    for prompt in (first, second, third):
        assert prompt[: len(shared) - 1] == shared[:-1]
    for submit in fake.behaviour.submits:
        assert (submit.max_tokens, submit.sampling.logprobs, submit.sampling.pooling) == (1, 2, 0)


def test_templates_without_system_messages_and_models_without_templates(
    http: httpx.Client, judge: Judge, router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = router.service.tokenizer
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "[{{ m.role }}] {{ m.content }}\n{% endfor %}[answer]"
    )
    renderer = ChatRenderer(source, tokenizer.files.special_tokens, tokenizer.tool_style)
    monkeypatch.setattr(tokenizer, "_chat", renderer)
    post(http, "/score", text_1=QUERY, text_2=DOCUMENTS)
    assert judge.texts[0].startswith("[user] Judge whether")
    assert f"<Query>: {QUERY}\n<Document>: {DOCUMENTS[0]}\n[answer]" in judge.texts[0]
    monkeypatch.setattr(tokenizer, "_chat", None)
    post(http, "/score", text_1=QUERY, text_2=DOCUMENTS)
    assert f"<Query>: {QUERY}\n<Document>: {DOCUMENTS[0]}\n\nAnswer:" in judge.texts[3]


@pytest.mark.parametrize(("no", "yes", "before"), [([9, 477], [9, 94], [9]), ([477, 3], [94], [])])
def test_words_of_several_tokens(
    http: httpx.Client,
    judge: Judge,
    fake: FakeController,
    monkeypatch: pytest.MonkeyPatch,
    no: list[int],
    yes: list[int],
    before: list[int],
) -> None:
    """The first token in which they differ counts; what both begin with belongs to the prompt."""
    post(http, "/score", text_1=QUERY, text_2=DOCUMENTS[1])
    rest_of(monkeypatch, {"no": no, "yes": yes})
    [item] = post(http, "/score", text_1=QUERY, text_2=DOCUMENTS[1])["data"]
    assert item["score"] == pytest.approx(likelihood(3.0), abs=1e-6)
    plain, continued = map(prompt_of, fake.behaviour.submits)
    assert continued == plain + before
    assert unpack_int32(fake.behaviour.submits[1].sampling.allowed_ids).tolist() == [94, 477]


def test_words_that_are_written_alike(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    rest_of(monkeypatch, {"no": [0], "yes": [0]})
    refused = http.post("/score", json={"text_1": QUERY, "text_2": DOCUMENTS})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "scoring")


def rest_of(monkeypatch: pytest.MonkeyPatch, words: dict[str, list[int]]) -> None:
    """Let the tokenizer write these words so."""

    async def encode_rest(_: Tokenizer, text: str) -> list[int]:
        return words[text]

    monkeypatch.setattr(Tokenizer, "encode_rest", encode_rest)


def test_long_documents_are_cut(http: httpx.Client, judge: Judge, tokenizer: Tokenizer) -> None:
    words = "radix tree " * 3000
    refused = http.post("/rerank", json={"query": QUERY, "documents": ["tea", words]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "documents[1]")
    post(http, "/rerank", query=QUERY, documents=["tea", words], max_tokens_per_doc=20)
    read = judge.texts[-1].rpartition("<Document>: ")[2].partition("<")[0].strip()
    assert words.startswith(read)
    assert 15 <= len(tokenizer.encode(read, add_special_tokens=False)) <= 20


# By embeddings


def vector(tokens: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(tokens).normal(0, 3, 16).astype("<f4")


@pytest.fixture
def embeds(router: RunningRouter, fake: FakeController, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint is made for embeddings, by their mean."""
    tokenizer = router.service.tokenizer
    files = msgspec.structs.replace(tokenizer.files, embedder=Embedder("mean", is_declared=True))
    monkeypatch.setattr(tokenizer, "files", files)
    fake.behaviour.report_of = lambda submit: TopLogprobs(0.0, b"", b"", vector(prompt_of(submit)).tobytes())


@pytest.mark.usefixtures("embeds")
def test_a_model_for_embeddings_compares_them(
    http: httpx.Client, fake: FakeController, tokenizer: Tokenizer
) -> None:
    """A text in several pairs is read once."""
    answer = post(http, "/score", text_1=QUERY, text_2=[*DOCUMENTS, QUERY])
    query, *others = [vector(tokenizer.encode(text, add_special_tokens=True)) for text in (QUERY, *DOCUMENTS)]
    for item, other in zip(answer["data"], [*others, query], strict=True):
        cosine = query @ other / np.linalg.norm(query) / np.linalg.norm(other)
        assert item["score"] == pytest.approx(float(cosine), abs=1e-6)
    assert [submit.sampling.pooling for submit in fake.behaviour.submits] == [POOL_MEAN] * 4
    post(http, "/rerank", query=QUERY, documents=DOCUMENTS, pooling="last")
    assert fake.behaviour.submits[-1].sampling.pooling == POOL_LAST


@pytest.mark.usefixtures("embeds")
def test_the_way_of_scoring_may_be_chosen(http: httpx.Client, fake: FakeController, tokenizer: Tokenizer) -> None:
    judge = Judge(tokenizer, {"Paris": 1.0})
    fake.behaviour.report_of = judge.report
    [item] = post(http, "/score", text_1=QUERY, text_2=DOCUMENTS[0], scoring="yes_no")["data"]
    assert item["score"] == pytest.approx(likelihood(1.0), abs=1e-6)


# What is refused

_RERANK = {"query": "x", "documents": ["a", "b"]}
_SCORE = {"text_1": "x", "text_2": ["a", "b"]}
WRONG: list[tuple[str, str, dict[str, Any]]] = [
    ("/rerank", "query", {"documents": ["a"]}),
    ("/rerank", "query", _RERANK | {"query": ""}),
    ("/rerank", "query", _RERANK | {"query": ["x"]}),
    *[("/rerank", "documents", _RERANK | {"documents": value}) for value in (None, [], "", 5, ["a"] * 2049)],
    ("/rerank", "documents[1]", _RERANK | {"documents": ["a", ""]}),
    ("/rerank", "documents[1]", _RERANK | {"documents": ["a", {"title": "x"}]}),
    ("/rerank", "documents[0]", _RERANK | {"documents": [5]}),
    ("/rerank", "documents[1]", _RERANK | {"documents": ["a", "word " * 30_000]}),
    *[("/rerank", "top_n", _RERANK | {"top_n": value}) for value in (0, -1, "2", True)],
    ("/rerank", "return_documents", _RERANK | {"return_documents": "yes"}),
    ("/rerank", "rank_fields", _RERANK | {"rank_fields": ["title"]}),
    ("/rerank", "return_embeddings", _RERANK | {"return_embeddings": True}),
    ("/rerank", "truncate_prompt_tokens", _RERANK | {"truncate_prompt_tokens": 10}),
    ("/rerank", "max_tokens_per_doc", _RERANK | {"max_tokens_per_doc": 0}),
    ("/rerank", "instruction", _RERANK | {"instruction": ""}),
    ("/rerank", "instruction", _RERANK | {"instruction": "x", "scoring": "cosine"}),
    ("/rerank", "pooling", _RERANK | {"pooling": "mean"}),
    ("/rerank", "scoring", _RERANK | {"scoring": "dot"}),
    ("/score", "text_1", {"text_2": ["a"]}),
    ("/score", "text_2", {"text_1": "a"}),
    ("/score", "text_1", _SCORE | {"text_1": ["x", "y", "z"]}),
    ("/score", "text_1[1]", _SCORE | {"text_1": ["x", ""]}),
    ("/score", "text_2", _SCORE | {"text_2": "word " * 30_000}),
    ("/score", "queries", {"queries": ["a", "b"], "items": ["c"]}),
]


@pytest.mark.parametrize(("path", "param", "body"), WRONG)
def test_what_is_refused(
    http: httpx.Client, fake: FakeController, path: str, param: str, body: dict[str, Any]
) -> None:
    response = http.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert param in error["message"]
    assert not fake.behaviour.submits


def test_hints_and_unknown_names(http: httpx.Client, judge: Judge) -> None:
    answer = post(http, "/v1/rerank", **_RERANK | {"documents": ["tea"]}, max_chunks_per_doc=3, user="u", novel=1)
    assert answer["warnings"] == ["`novel` is not a known parameter and was ignored"]
