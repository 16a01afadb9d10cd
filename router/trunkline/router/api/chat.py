"""`POST /v1/chat/completions`."""

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
    encode_messages,
    make_head,
    service_of,
    start,
    usage_of,
)
from trunkline.router.api.connection import EventStream, while_connected
from trunkline.router.api.logprobs import chat_logprobs
from trunkline.router.api.models import ChatRequest
from trunkline.router.api.responses import (
    DONE_EVENT,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    JsonResponse,
    Usage,
    event,
)
from trunkline.router.api.unsupported import check_supported
from trunkline.router.generation import Generation
from trunkline.router.sampling import Job, make_job
from trunkline.router.service import RouterService

routes = APIRouter()


@routes.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """Answer a conversation, streamed or not."""
    service = service_of(request)
    arrived_at = asyncio.get_running_loop().time()
    service.check_admission()
    body = await read_request(
        request, ChatRequest, service.config.max_body_bytes, lambda fields: check_supported(fields, chat=True)
    )
    check_model(service, body.model)
    limits = service.limits
    prompt = await encode_messages(
        service,
        body.messages,
        limits,
        add_generation_prompt=body.add_generation_prompt,
        extra=body.chat_template_kwargs,
        add_special_tokens=body.add_special_tokens,
    )
    job = make_job(body, prompt, limits, draw_seed)
    head = make_head("chatcmpl", service, body.model)
    if body.stream:
        generation = await while_connected(request, start(service, job, arrived_at))
        return EventStream(generation, _events(service, generation, head, include_usage=body.include_usage))
    return await while_connected(request, _whole(service, job, head, arrived_at))


async def _whole(service: RouterService, job: Job, head: Head, arrived_at: float) -> Response:
    generation, answer = await collect(service, job, arrived_at)
    vocabulary = service.tokenizer.vocabulary
    choice = ChatChoice(
        message=ChatMessage(content=answer.text),
        logprobs=chat_logprobs(answer.logprobs, job.sampling.logprobs, vocabulary),
        finish_reason=answer.finish,
    )
    return JsonResponse(
        ChatCompletion(
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

    def chunk(*choices: ChatChunkChoice, usage: Usage | None = None) -> bytes:
        return event(
            ChatChunk(
                id=head.id,
                created=head.created,
                model=head.model,
                choices=list(choices),
                system_fingerprint=service.fingerprint,
                usage=usage if include_usage else UNSET,
            )
        )

    # The role goes out with the first text, not before: clients time their first chunk.
    opening = chunk(ChatChunkChoice(delta=ChatDelta(role="assistant", content="")))
    async for delta in generation.deltas():
        parts, opening = opening, b""
        logprobs = chat_logprobs(delta.logprobs, count, vocabulary)
        if delta.text or logprobs is not None:
            parts += chunk(ChatChunkChoice(delta=ChatDelta(content=delta.text), logprobs=logprobs))
        if delta.finish is not None:
            parts += chunk(ChatChunkChoice(delta=ChatDelta(), finish_reason=delta.finish))
        if parts:
            yield parts
    if include_usage:
        yield chunk(usage=usage_of(generation))
    yield DONE_EVENT
