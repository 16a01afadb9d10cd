"""`POST /v1/embeddings`: vectors of texts or lists of token ids, made of the model's final hidden states."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Final, Literal

import msgspec
from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from trunkline.router.api.answer_fields import cache_use
from trunkline.router.api.loop_budget import LoopBudget
from trunkline.router.api.prompt_reports import (
    PromptReport,
    PromptUsage,
    Vector,
    optional_warnings,
    pooled_sampling,
    read_reports,
    report_job,
    too_many_dimensions,
    vector_of,
)
from trunkline.router.api.prompting import encode_text
from trunkline.router.api.requests import check_model, read_parameters, service_of
from trunkline.router.api.responses import CacheUse
from trunkline.router.errors import bad_value
from trunkline.router.http.answers import JsonResponse, encoded, while_connected
from trunkline.router.jobs.job import Job, Prompt
from trunkline.router.jobs.pooling_models import EMBEDDINGS, EmbeddingRequest
from trunkline.router.request_context import created_at, draw_hex
from trunkline.router.service import RouterService

routes = APIRouter()
VALUES_MAX: Final = 1 << 22
"""Largest number of values of all embeddings of an answer together; as JSON numbers they take 80 MiB."""
_OFF_LOOP_VALUES: Final = 1 << 18
"""Number of values above which an answer is put together in a thread."""


class Embedding(msgspec.Struct, kw_only=True):
    """The embedding of one input."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: msgspec.Raw
    """A list of numbers, or a string: float32 in base64."""


class EmbeddingList(msgspec.Struct, kw_only=True):
    """The answer to `POST /v1/embeddings`."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: Sequence[Embedding]
    usage: PromptUsage
    cache: CacheUse | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


@routes.post("/v1/embeddings")
async def embeddings(request: Request) -> Response:
    """Return the embeddings of texts or lists of token ids."""
    service = service_of(request)
    service.check_admission()
    body = await read_parameters(request, EMBEDDINGS)
    service = check_model(service, body.model)

    async def answer() -> Response:
        return await _write(service, body, await pooled(service, body))

    return await while_connected(request, answer())


async def pooled(service: RouterService, body: EmbeddingRequest) -> list[PromptReport]:
    """Return the reports of a request's inputs.

    Raises:
        ApiError: The request is wrong, or no engine answered it.
    """
    _check_size(service, body)
    params = [f"input[{index}]" for index in range(len(body.input))] if len(body.input) > 1 else ["input"]
    jobs = await _jobs(service, body, params)
    return await read_reports(service, jobs, params)


def _check_size(service: RouterService, body: EmbeddingRequest) -> None:
    """Refuse a request whose answer would have too many values, or more dimensions than there are.

    Raises:
        ApiError: 400.
    """
    size = service.tokenizer.files.hidden_size
    if size and body.dimensions is not None and body.dimensions > size:
        raise too_many_dimensions(body.dimensions, size)
    values = len(body.input) * (body.dimensions or size)
    if values > VALUES_MAX:
        raise bad_value(
            "input",
            f"the embeddings of {len(body.input)} inputs have {values} values; {VALUES_MAX} fit in an answer. "
            "Please send fewer inputs, or ask for fewer `dimensions`.",
        )


async def _jobs(service: RouterService, body: EmbeddingRequest, params: Sequence[str]) -> list[Job]:
    sampling = pooled_sampling(service, body)
    budget = LoopBudget()
    jobs = []
    for given, param in zip(body.input, params, strict=True):
        tokens = await _tokens(service, body, given, param)
        jobs.append(report_job(service, body, Prompt(tokens, param), sampling))
        await budget.yield_if_spent()  # many short inputs take as long as a long one
    return jobs


async def _tokens(service: RouterService, body: EmbeddingRequest, given: str | list[int], param: str) -> list[int]:
    keep = body.input_slice
    if not isinstance(given, str):
        return given if keep is None else given[keep]
    return await encode_text(
        service.tokenizer,
        given,
        service.limits,
        add_special_tokens=body.add_special_tokens,
        param=param,
        keep=keep,
    )


async def _write(service: RouterService, body: EmbeddingRequest, reports: Sequence[PromptReport]) -> Response:
    budget = LoopBudget()
    data = []
    values = 0
    for index, (_, report) in enumerate(reports):
        vector = vector_of(report, body.dimensions, normalize=body.normalize)
        values += len(vector)
        data.append(Embedding(index=index, embedding=_encoded(vector, body.encoding_format)))
        await budget.yield_if_spent()
    generations = [generation for generation, _ in reports]
    answer = EmbeddingList(
        id=f"embd-{draw_hex('id', 16)}",
        created=created_at(),
        model=body.model or service.model_name,
        data=data,
        usage=PromptUsage.of(generations),
        cache=cache_use(*generations),
        warnings=optional_warnings(body),
    )
    if values > _OFF_LOOP_VALUES:
        return await service.large_requests.run(lambda: JsonResponse(answer))
    return JsonResponse(answer)


def _encoded(vector: Vector, encoding: str | None) -> msgspec.Raw:
    """Return an embedding as JSON."""
    if encoding == "base64":
        return encoded(base64.b64encode(vector.tobytes()).decode())
    return encoded(vector.tolist())
