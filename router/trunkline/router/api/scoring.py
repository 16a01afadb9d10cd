"""`/score` and `/rerank`: how relevant documents are to a query, as numbers or as an order.

A model that was made for embeddings compares those ("cosine"). Any other one is asked ("yes_no"): after an
instruction, the query and a document, how likely is "yes", of "yes" and "no"? This is how decoders that were
trained to rank are used (Qwen3-Reranker), in the words that they were trained with. The query comes first, so
its KV is computed once for all documents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from trunkline.controller.reports import TopLogprobs
from trunkline.kvstore.chunks import pack_int32, unpack_int32
from trunkline.router.api.answer_fields import cache_use
from trunkline.router.api.loop_budget import LoopBudget
from trunkline.router.api.prompt_reports import (
    PromptReport,
    PromptUsage,
    optional_warnings,
    pooled_sampling,
    read_reports,
    report_job,
    vector_of,
)
from trunkline.router.api.prompting import Rendering, encode_text
from trunkline.router.api.requests import check_length, check_model, read_parameters, service_of
from trunkline.router.api.responses import CacheUse
from trunkline.router.errors import ApiError, bad_value
from trunkline.router.http.answers import JsonResponse, while_connected
from trunkline.router.jobs.job import Job, Prompt
from trunkline.router.jobs.pooling_models import (
    INSTRUCTION,
    RERANK,
    SCORE,
    RerankRequest,
    ScoreRequest,
    Scoring,
    ScoringRequest,
)
from trunkline.router.jobs.request_models import Message
from trunkline.router.request_context import created_at, draw_hex
from trunkline.router.service import RouterService
from trunkline.router.text.tokenizer import Tokenizer
from trunkline.worker.messages import Sampling

routes = APIRouter()
_TASK: Final = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that "
    'the answer can only be "yes" or "no".'
)
_WORDS: Final = ("no", "yes")
_NO_THOUGHT: Final = {"enable_thinking": False, "thinking": False}
_CUT_CHARACTER: Final = "\ufffd"


class Score(msgspec.Struct, kw_only=True):
    """The score of one pair of texts."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(msgspec.Struct, kw_only=True):
    """The answer to `POST /score`."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: Sequence[Score]
    usage: PromptUsage
    cache: CacheUse | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


class RankedDocument(msgspec.Struct):
    """The text of a document."""

    text: str


class Ranked(msgspec.Struct, kw_only=True):
    """A document's place."""

    index: int
    """Index of the document in the request."""
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class Ranking(msgspec.Struct, kw_only=True):
    """The answer to `POST /v1/rerank`."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    results: Sequence[Ranked]
    """The documents, the most relevant first."""
    usage: PromptUsage
    cache: CacheUse | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


class Pair(NamedTuple):
    """A query and a document."""

    query: str
    document: str
    param: str
    """The document, as errors name it."""


class Scores(NamedTuple):
    """The scores of pairs, in their order, and what they were made of."""

    values: list[float]
    reports: list[PromptReport]

    def fields(self, service: RouterService, body: ScoringRequest, kind: str) -> dict[str, Any]:
        """Return what both kinds of answers have. `kind`: the beginning of the answer's id."""
        generations = [generation for generation, _ in self.reports]
        return {
            "id": f"{kind}-{draw_hex('id', 16)}",
            "created": created_at(),
            "model": body.model or service.model_name,
            "usage": PromptUsage.of(generations),
            "cache": cache_use(*generations),
            "warnings": optional_warnings(body),
        }


@routes.post("/score")
@routes.post("/v1/score")
async def score(request: Request) -> Response:
    """Return the scores of pairs of texts."""
    service = service_of(request)
    service.check_admission()
    body = await read_parameters(request, SCORE)
    service = check_model(service, body.model)
    pairs = _pairs(body)
    found = await while_connected(request, _scores(service, body, pairs))
    data = [Score(index=index, score=value) for index, value in enumerate(found.values)]
    return JsonResponse(ScoreList(data=data, **found.fields(service, body, "score")))


@routes.post("/rerank")
@routes.post("/v1/rerank")
@routes.post("/v2/rerank")
async def rerank(request: Request) -> Response:
    """Return documents in the order of their relevance to a query."""
    service = service_of(request)
    service.check_admission()
    body = await read_parameters(request, RERANK)
    service = check_model(service, body.model)
    pairs = [Pair(body.query, text, f"documents[{index}]") for index, text in enumerate(body.documents)]
    found = await while_connected(request, _scores(service, body, pairs))
    return JsonResponse(Ranking(results=_ranked(body, found.values), **found.fields(service, body, "rerank")))


def _pairs(body: ScoreRequest) -> list[Pair]:
    """Return the pairs of a request: one query with all documents, or each query with its document.

    Raises:
        ApiError: 400, the texts do not go together.
    """
    queries, documents = body.text_1, body.text_2
    if len(queries) not in (1, len(documents)):
        raise bad_value(
            "text_1",
            f"`text_1` has {len(queries)} texts and `text_2` {len(documents)}; `text_1` has one, or as many as "
            "`text_2`",
        )
    queries = queries * len(documents) if len(queries) == 1 else queries
    params = [f"text_2[{index}]" for index in range(len(documents))] if len(documents) > 1 else ["text_2"]
    return [Pair(*pair) for pair in zip(queries, documents, params, strict=True)]


def _ranked(body: RerankRequest, scores: Sequence[float]) -> list[Ranked]:
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    return [
        Ranked(
            index=index,
            relevance_score=scores[index],
            document=RankedDocument(body.documents[index]) if body.return_documents else UNSET,
        )
        for index in order[: body.top_n]
    ]


async def _scores(service: RouterService, body: ScoringRequest, pairs: Sequence[Pair]) -> Scores:
    """Return the scores of pairs.

    Raises:
        ApiError: 400, a text is too long or a parameter has no meaning for this way of scoring.
    """
    way: Scoring = body.scoring or ("cosine" if service.tokenizer.files.embedder.is_declared else "yes_no")
    for name, of in (("instruction", "yes_no"), ("pooling", "cosine")):
        if getattr(body, name) is not None and of != way:
            raise bad_value(name, f'`{name}` means nothing with `scoring: "{way}"`; it belongs to "{of}"')
    if body.max_tokens_per_doc is not None:
        pairs = [await _cut(service.tokenizer, pair, body.max_tokens_per_doc) for pair in pairs]
    if way == "cosine":
        return await _cosines(service, body, pairs)
    return await _likelihoods(service, body, pairs)


async def _cut(tokenizer: Tokenizer, pair: Pair, tokens: int) -> Pair:
    """Return a pair with only the first tokens of its document."""
    check_length(len(pair.document), pair.param)
    ids = await tokenizer.encode_async(pair.document, add_special_tokens=False)
    if len(ids) <= tokens:
        return pair
    text = tokenizer.decode(ids[:tokens], skip_special_tokens=False)
    return pair._replace(document=text.rstrip(_CUT_CHARACTER))


# By embeddings


async def _cosines(service: RouterService, body: ScoringRequest, pairs: Sequence[Pair]) -> Scores:
    """Compare embeddings. A text that is in several pairs is read once."""
    sampling = pooled_sampling(service, body)
    texts: dict[str, str] = {}
    for pair in pairs:
        texts.setdefault(pair.query, "query" if isinstance(body, RerankRequest) else "text_1")
        texts.setdefault(pair.document, pair.param)
    budget = LoopBudget()
    jobs = []
    for text, param in texts.items():
        tokens = await encode_text(service.tokenizer, text, service.limits, add_special_tokens=True, param=param)
        jobs.append(report_job(service, body, Prompt(tokens, param), sampling))
        await budget.yield_if_spent()
    reports = await read_reports(service, jobs, list(texts.values()))
    vectors = {text: vector_of(found.report) for text, found in zip(texts, reports, strict=True)}
    values = [float(np.dot(vectors[pair.query], vectors[pair.document])) for pair in pairs]
    return Scores(values, reports)


# By the likelihood of "yes"


class _Words(NamedTuple):
    """The tokens by which a model answers."""

    no: int
    yes: int
    before: list[int]
    """The tokens with which both words begin."""

    def sampling(self) -> Sampling:
        """Return the sampling parameters that ask for the likelihoods of both."""
        return Sampling(temperature=0.0, logprobs=2, allowed_ids=pack_int32(sorted((self.no, self.yes))))

    def likelihood(self, report: TopLogprobs) -> float:
        """Return how likely "yes" is, of both."""
        values = np.frombuffer(report.top_logprobs, "<f4").tolist()
        by_token = dict(zip(unpack_int32(report.top_ids).tolist(), values, strict=False))
        no, yes = (by_token.get(token, -math.inf) for token in (self.no, self.yes))
        return 1.0 / (1.0 + math.exp(min(no - yes, 700.0))) if yes > -math.inf else 0.0


async def _likelihoods(service: RouterService, body: ScoringRequest, pairs: Sequence[Pair]) -> Scores:
    template = _Template(service, body.instruction or INSTRUCTION)
    budget = LoopBudget()
    jobs: list[Job] = []
    words: _Words | None = None
    sampling = Sampling()
    for pair in pairs:
        text = await template.text(pair)
        if words is None:
            words = await _words(service.tokenizer, "" if template.is_chat else " ")
            sampling = words.sampling()
        tokens = await encode_text(
            service.tokenizer, text, service.limits, add_special_tokens=not template.is_chat, param=pair.param
        )
        jobs.append(report_job(service, body, Prompt(tokens + words.before, pair.param), sampling))
        await budget.yield_if_spent()
    assert words is not None
    reports = await read_reports(service, jobs, [pair.param for pair in pairs])
    return Scores([words.likelihood(found.report) for found in reports], reports)


async def _words(tokenizer: Tokenizer, space: str) -> _Words:
    """Return the tokens by which a model answers.

    Args:
        space: What comes before the words: nothing in a chat, whose template writes what opens an answer.

    Raises:
        ApiError: 400, the tokenizer writes both words alike.
    """
    no, yes = [await tokenizer.encode_rest(space + word) for word in _WORDS]
    for index, pair in enumerate(zip(no, yes, strict=False)):
        if pair[0] != pair[1]:
            return _Words(*pair, before=no[:index])
    raise bad_value("scoring", 'this model\'s tokenizer writes "yes" and "no" alike; use `scoring: "cosine"`')


class _Template:
    """Writes a query and a document for the model, as a chat if it has a template for those."""

    def __init__(self, service: RouterService, instruction: str) -> None:
        self.is_chat = service.tokenizer.has_chat_template
        self._service = service
        self._instruction = instruction
        self._has_system = True
        self._rendering = Rendering(add_generation_prompt=True, extra=_NO_THOUGHT)

    async def text(self, pair: Pair) -> str:
        """Return the prompt of a pair, whose end differs from those of other documents only.

        Raises:
            ApiError: 400, a text is too long, or the model's template cannot write a user's message.
        """
        check_length(len(pair.query) + len(pair.document), pair.param)
        said = f"<Instruct>: {self._instruction}\n<Query>: {pair.query}\n<Document>: {pair.document}"
        if not self.is_chat:
            return f"{_TASK}\n\n{said}\n\nAnswer:"
        if self._has_system:
            try:
                return await self._chat(Message(role="system", content=_TASK), Message(role="user", content=said))
            except ApiError:
                self._has_system = False  # some templates refuse system messages
        return await self._chat(Message(role="user", content=f"{_TASK}\n\n{said}"))

    async def _chat(self, *messages: Message) -> str:
        return await self._rendering.text(self._service, list(messages))
