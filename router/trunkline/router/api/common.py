"""What the generating endpoints share: the request's way from a body to a running generation."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

import msgspec
from starlette.requests import Request

from trunkline.router.api.models import Message
from trunkline.router.api.responses import Usage, make_usage
from trunkline.router.chat_template import ChatTemplateError
from trunkline.router.errors import ApiError, bad_value
from trunkline.router.generation import Generation
from trunkline.router.sampling import Job, Limits
from trunkline.router.service import RouterService
from trunkline.router.text import TokenLogprob
from trunkline.router.tokenizer import OFF_LOOP_CHARACTERS, Tokenizer


class Head(msgspec.Struct, frozen=True):
    """What every chunk of an answer repeats."""

    id: str
    created: int
    """Unix time in seconds."""
    model: str


class Collected(msgspec.Struct):
    """A whole answer."""

    text: str
    logprobs: list[TokenLogprob]
    finish: Any


def service_of(request: Request) -> RouterService:
    """The service behind the application that got this request."""
    service = request.app.state.service
    assert isinstance(service, RouterService)
    return service


def draw_seed() -> int:
    """A seed for a request without one, so that a stream can be continued elsewhere."""
    return secrets.randbits(64)


def make_head(prefix: str, service: RouterService, model: str | None) -> Head:
    """A fresh id, the time, and the model's name as the client wrote it."""
    return Head(f"{prefix}-{secrets.token_hex(16)}", int(time.time()), model or service.config.model_name)


def check_model(service: RouterService, model: str | None) -> None:
    """Refuse names of models that are not served; none at all means the one that is.

    Raises:
        ApiError: 404.
    """
    if model is not None and model not in service.config.model_names:
        raise ApiError(
            404,
            f"the model {model[:200]!r} does not exist here; served: {', '.join(service.config.model_names)}",
            param="model",
            code="model_not_found",
        )


async def encode_text(
    tokenizer: Tokenizer, text: str, limits: Limits | None, *, add_special_tokens: bool, param: str
) -> list[int]:
    """Token ids of a text.

    Raises:
        ApiError: 400, it is so long that it need not be tokenised to know that it does not fit.
    """
    if limits is not None:
        fewest = tokenizer.fewest_tokens(text)
        if fewest >= limits.max_context:
            raise bad_value(
                param,
                f"this model's context is {limits.max_context} tokens, prompt and output together; "
                f"`{param}` has {len(text)} characters, more than {fewest} tokens. Please shorten it.",
                code="context_length_exceeded",
            )
    return await tokenizer.encode_async(text, add_special_tokens=add_special_tokens)


async def encode_messages(
    service: RouterService,
    messages: list[Message],
    limits: Limits | None,
    *,
    add_generation_prompt: bool,
    extra: dict[str, Any] | None,
    add_special_tokens: bool = False,
) -> list[int]:
    """Token ids of a conversation, in the model's chat template.

    Raises:
        ApiError: 400, the template refuses the messages or they are far too long.
    """
    tokenizer = service.tokenizer
    turns = [message.for_template() for message in messages]

    def render() -> str:
        return tokenizer.render_chat(turns, add_generation_prompt=add_generation_prompt, extra=extra)

    try:
        size = sum(len(turn["content"]) for turn in turns) + 64 * len(turns)
        text = await asyncio.to_thread(render) if size > OFF_LOOP_CHARACTERS else render()
    except ChatTemplateError as error:
        raise bad_value("messages", str(error)[:1000]) from None
    return await encode_text(tokenizer, text, limits, add_special_tokens=add_special_tokens, param="messages")


async def start(service: RouterService, job: Job, arrived_at: float) -> Generation:
    """Submit a job and wait until it was taken on. `arrived_at`: the request's loop time in seconds.

    Raises:
        ApiError: it was not.
    """
    generation = service.generate(job, arrived_at)
    try:
        await generation.begin()
    except BaseException:  # cancellation included: the client left
        generation.close()
        raise
    return generation


async def collect(service: RouterService, job: Job, arrived_at: float) -> tuple[Generation, Collected]:
    """A job's whole answer. `arrived_at`: the request's loop time in seconds.

    Raises:
        ApiError: it failed; nothing of it is shown.
    """
    generation = await start(service, job, arrived_at)
    parts: list[str] = []
    answer = Collected("", [], "length")
    try:
        async for delta in generation.deltas():
            parts.append(delta.text)
            answer.logprobs.extend(delta.logprobs)
            answer.finish = delta.finish or answer.finish
    finally:
        generation.close()
    answer.text = "".join(parts)
    return generation, answer


def usage_of(generation: Generation) -> Usage:
    """What a generation has used so far."""
    return make_usage(len(generation.job.prompt), generation.output_tokens, generation.cached_tokens)
