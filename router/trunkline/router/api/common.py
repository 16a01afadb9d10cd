"""Steps that the generating endpoints share: encode, make a job, start it, collect its choices, count its
usage."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from starlette.requests import Request

from trunkline.router.api.logprobs import PromptScores, join_prompt_logprobs
from trunkline.router.api.responses import CachedTokens, Usage, make_usage
from trunkline.router.errors import ApiError, bad_value, unavailable
from trunkline.router.jobs.decoding import owned
from trunkline.router.jobs.job import Job, Limits, Prompt, bad_word_ids, make_job
from trunkline.router.jobs.request_models import ChatRequest, CompletionRequest, Message
from trunkline.router.request_context import created_at, draw_hex, draw_seed
from trunkline.router.service import RouterService
from trunkline.router.streams.choices import FinishName, TokenLogprob
from trunkline.router.streams.generation import Generation
from trunkline.router.tenancy.auth import cache_salt
from trunkline.router.tenancy.tenants import current_meter
from trunkline.router.text.chat_template import ChatTemplateError
from trunkline.router.text.tokenizer import OFF_LOOP_CHARACTERS, Tokenizer
from trunkline.router.text.truncation import clip_spans, span_tokens
from trunkline.router.tools.plan import ToolPlan

_Value = TypeVar("_Value")

TOKENIZE_CHARACTERS_MAX: Final = 4 << 20
"""Longest text that is tokenised although it cannot fit the context; `TEXT_BYTES_MAX` bounds every text."""
RENDER_CHARACTERS_MAX: Final = 8 << 20
"""Longest conversation: a template joins its texts in single calls, during which no other thread runs."""
LOGPROBS_OFF_LOOP: Final = 20_000
"""An answer with more log-probabilities is written in a thread."""
LOGPROBS_OF_PROMPTS_MAX: Final = 1 << 18
"""Log-probabilities of prompt tokens in one request. Each takes about a hundred bytes until the answer is
written."""
_TURN_S: Final = 0.005
"""How long work may keep the event loop; threads wait as long for Python's lock."""


class Collected(msgspec.Struct):
    """A whole choice of an answer, collected from its deltas."""

    text: str
    logprobs: list[TokenLogprob]
    finish: FinishName = "length"
    tokens: list[int] = []
    score: float | None = None
    """Score by which a beam search ranked this result, …"""
    cumulative_logprob: float | None = None
    """… and the sum of log-probabilities it was computed from."""

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability per token, by which `best_of` ranks; minus infinity without tokens."""
        known = [entry.logprobs.token_logprob for entry in self.logprobs if entry.logprobs is not None]
        mean = sum(known) / len(known) if known else -math.inf
        return mean if math.isfinite(mean) else -math.inf


class LoopTurns:
    """Limits how long a piece of work keeps the event loop: other tasks run in between."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    async def others(self) -> None:
        """Let other tasks run if this one has kept the loop for long; call it between small steps."""
        if time.monotonic() - self._began >= _TURN_S:
            await asyncio.sleep(0)
            self._began = time.monotonic()


def service_of(request: Request) -> RouterService:
    """Return the service of the application that received a request."""
    service = request.app.state.service
    assert isinstance(service, RouterService)
    return service


def make_head(prefix: str, service: RouterService, model: str | None) -> dict[str, Any]:
    """Return the fields that every chunk of an answer repeats: a new id, the time, the model's name, the
    fingerprint."""
    return {
        "id": f"{prefix}-{draw_hex('id', 16)}",
        "created": created_at(),
        "model": model or service.config.model_name,
        "system_fingerprint": service.fingerprint,
    }


def check_length(characters: int, param: str) -> None:
    """Refuse a text that takes too long to tokenise.

    Raises:
        ApiError: 400, naming `param`.
    """
    if characters > TOKENIZE_CHARACTERS_MAX:
        raise bad_value(
            param,
            f"`{param}` has {characters} characters; at most {TOKENIZE_CHARACTERS_MAX} are tokenised at once. "
            "Please send it in parts.",
            code="string_above_max_length",
        )


def check_model(service: RouterService, model: str | None) -> None:
    """Refuse the name of a model that is not served. None stands for the served model.

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
    tokenizer: Tokenizer,
    text: str,
    limits: Limits | None,
    *,
    add_special_tokens: bool,
    param: str,
    keep: int | None = None,
) -> list[int]:
    """Return the token ids of a text; with `keep`, only the last `keep` of them.

    Raises:
        ApiError: 400, the text is so long that it certainly does not fit `limits`; it was not tokenised.
    """
    if keep is not None:
        check_length(len(text), param)
        ids = await tokenizer.encode_async(text, add_special_tokens=add_special_tokens)
        return ids[-keep:]
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


class Rendering(NamedTuple):
    """How a conversation is written for the model: the options of its chat template."""

    add_generation_prompt: bool = False
    add_special_tokens: bool = False
    extra: dict[str, Any] | None = None
    """Extra variables of the template (`chat_template_kwargs`)."""
    tools: list[dict[str, Any]] | None = None
    """Functions to show (`ToolPlan.template_tools`)."""

    async def text(self, service: RouterService, messages: list[Message]) -> str:
        """Return the text of a conversation, in the model's chat template.

        Raises:
            ApiError: 400, the template refuses the messages or they are too long.
        """

        def render() -> str:
            turns = [message.for_template() for message in messages]
            return service.tokenizer.render_chat(
                turns, add_generation_prompt=self.add_generation_prompt, extra=self.extra, tools=self.tools
            )

        try:
            size = sum(len(message.content) for message in messages) + 64 * len(messages)
            if size > RENDER_CHARACTERS_MAX:
                raise bad_value(
                    "messages",
                    f"`messages` have {size} characters; at most {RENDER_CHARACTERS_MAX} are allowed.",
                    code="string_above_max_length",
                )
            return await service.large_requests.run(render) if size > OFF_LOOP_CHARACTERS else render()
        except ChatTemplateError as error:
            raise bad_value("messages", str(error)[:1000]) from None


async def start(service: RouterService, job: Job, arrived_at: float) -> Generation:
    """Submit a job and wait until an engine accepts it. `arrived_at`: loop time of the request, in seconds.

    Raises:
        ApiError: No engine accepted it.
    """
    generation = service.generate(job, arrived_at)
    try:
        await generation.begin()
    except BaseException:  # cancellation included: the client left
        generation.close()
        raise
    return generation


def logprobs_of(answers: Iterable[Collected], count: int) -> int:
    """Return the number of log-probabilities in answers. `count`: alternatives for each token; -1: no
    log-probabilities."""
    return (count + 1) * sum(len(answer.tokens) for answer in answers)


async def collect_choices(generation: Generation) -> list[Collected]:
    """Return all choices of a started generation; if more were drawn than asked for, the best ones, best first.

    Raises:
        ApiError: The generation failed.
    """
    decoding = generation.job.decoding
    answers = [Collected("", [], tokens=[]) for _ in range(decoding.samples)]
    parts: list[list[str]] = [[] for _ in answers]
    async for delta in generation.deltas():
        answer = answers[delta.index]
        parts[delta.index].append(delta.text)
        answer.logprobs.extend(delta.logprobs)
        answer.tokens.extend(delta.tokens)
        answer.finish = delta.finish or answer.finish
        answer.score, answer.cumulative_logprob = delta.score, delta.cumulative_logprob
    for answer, texts in zip(answers, parts, strict=True):
        answer.text = "".join(texts)
    if decoding.samples > decoding.choices:
        answers.sort(key=lambda answer: -answer.mean_logprob)
    return answers[: decoding.choices]


def usage_of(*generations: Generation) -> Usage:
    """Return the token counts of generations so far: each prompt once, and all samples that were drawn."""
    return make_usage(
        sum(generation.job.seen_tokens for generation in generations),
        sum(generation.output_tokens for generation in generations),
        CachedTokens(
            sum(generation.cached_tokens for generation in generations),
            sum(_session_tokens(generation.job) for generation in generations),
            sum(generation.job.module_tokens for generation in generations),
        ),
    )


def _session_tokens(job: Job) -> int:
    return job.session_tokens - span_tokens(clip_spans(job.cut.drops, job.session_tokens))


def prompt_scores_of(generation: Generation) -> PromptScores | None:
    """Return the scores of a prompt's tokens; None if the job did not ask for them. Call it after the first token.

    Raises:
        ApiError: 503, the engine left some out.
    """
    count = generation.job.sampling.prompt_logprobs
    if count < 0:
        return None
    try:
        return join_prompt_logprobs(generation.prompt_logprobs, len(generation.job.prompt), count)
    except ValueError as error:
        raise unavailable(f"the engine did not score the prompt: {error}", code="engine_failed") from None


def check_scores(job: Job, tokens: int) -> None:
    """Refuse a request for too many log-probabilities of prompts that have `tokens` tokens together.

    Raises:
        ApiError: 400.
    """
    count = job.sampling.prompt_logprobs + 1
    if count * tokens > LOGPROBS_OF_PROMPTS_MAX:
        raise bad_value(
            "prompt_logprobs",
            f"`prompt_logprobs` (or `logprobs` with `echo`) asks for {count * tokens} log-probabilities of prompt "
            f"tokens; {LOGPROBS_OF_PROMPTS_MAX} are possible at once. Please ask for fewer, or for fewer prompts.",
        )


def optional(value: _Value | None) -> _Value | UnsetType:
    """Return the value of a field that is left out of the answer if it is None."""
    return UNSET if value is None else value


def job_for(
    service: RouterService,
    body: ChatRequest | CompletionRequest,
    prompt: Prompt,
    *,
    tools: ToolPlan | None = None,
) -> Job:
    """Make the job for a prompt of a request (see `make_job`), with the tenant's salt, priority and grammar owner.

    Raises:
        ApiError: 400, naming the parameter that is wrong.
    """
    job = make_job(
        body,
        prompt,
        service.limits,
        draw_seed,
        bad_words=bad_word_ids(
            body.bad_words, lambda text: service.tokenizer.encode(text, add_special_tokens=False)
        ),
        tools=tools,
    )
    check_scores(job, len(prompt.tokens))
    meter = current_meter()
    return replace(
        job,
        salt=cache_salt(body.cache_salt),
        priority=meter.priority(body.priority),
        grammar=owned(job.grammar, meter.tenant),
    )
