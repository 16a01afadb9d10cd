"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from trunkline.router.api.body import read_request
from trunkline.router.api.common import (
    Head,
    check_model,
    collect,
    draw_seed,
    encode_text,
    make_head,
    service_of,
    start,
    usage_of,
)
from trunkline.router.api.connection import EventStream, while_connected
from trunkline.router.api.logprobs import completion_logprobs
from trunkline.router.api.models import CompletionRequest
from trunkline.router.api.responses import (
    DONE_EVENT,
    Completion,
    CompletionChoice,
    JsonResponse,
    Usage,
    event,
)
from trunkline.router.api.unsupported import check_supported
from trunkline.router.generation import Generation
from trunkline.router.sampling import Job, make_job
from trunkline.router.service import RouterService

routes = APIRouter()


@routes.post("/v1/completions")
async def completions(request: Request) -> Response:
    """Continue a text or a list of token ids, streamed or not."""
    service = service_of(request)
    arrived_at = asyncio.get_running_loop().time()
    service.check_admission()
    body = await read_request(
        request,
        CompletionRequest,
        service.config.max_body_bytes,
        lambda fields: check_supported(fields, chat=False),
    )
    check_model(service, body.model)
    limits = service.limits
    prompt = body.prompt
    if isinstance(prompt, str):
        prompt = await encode_text(
            service.tokenizer, prompt, limits, add_special_tokens=body.add_special_tokens, param="prompt"
        )
    job = make_job(body, prompt, limits, draw_seed)
    head = make_head("cmpl", service, body.model)
    if body.stream:
        generation = await while_connected(request, start(service, job, arrived_at))
        return EventStream(generation, _events(service, generation, head, include_usage=body.include_usage))
    return await while_connected(request, _whole(service, job, head, arrived_at))


async def _whole(service: RouterService, job: Job, head: Head, arrived_at: float) -> Response:
    generation, answer = await collect(service, job, arrived_at)
    logprobs = completion_logprobs(answer.logprobs, job.sampling.logprobs, service.tokenizer.vocabulary)
    choice = CompletionChoice(text=answer.text, logprobs=logprobs, finish_reason=answer.finish)
    return JsonResponse(
        Completion(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=[choice],
            usage=usage_of(generation),
            system_fingerprint=service.fingerprint,
        )
    )


async def _events(
    service: RouterService, generation: Generation, head: Head, *, include_usage: bool
) -> AsyncIterator[bytes]:
    vocabulary = service.tokenizer.vocabulary
    count = generation.job.sampling.logprobs

    def chunk(*choices: CompletionChoice, usage: Usage | None = None) -> bytes:
        return event(
            Completion(
                id=head.id,
                created=head.created,
                model=head.model,
                choices=list(choices),
                system_fingerprint=service.fingerprint,
                usage=usage if include_usage else UNSET,
            )
        )

    async for delta in generation.deltas():
        logprobs = completion_logprobs(delta.logprobs, count, vocabulary)
        if delta.text or logprobs is not None or delta.finish is not None:
            yield chunk(CompletionChoice(text=delta.text, logprobs=logprobs, finish_reason=delta.finish))
    if include_usage:
        yield chunk(usage=usage_of(generation))
    yield DONE_EVENT
