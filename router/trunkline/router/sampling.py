"""From a checked request to what the engine is asked: sampling, limits, end tokens. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from trunkline.kvstore.layout import pack_int32
from trunkline.router.api.models import ChatRequest, CompletionRequest, GenerationRequest
from trunkline.router.errors import bad_value
from trunkline.router.model_files import SamplingDefaults
from trunkline.worker.messages import Sampling

_Value = TypeVar("_Value", int, float)

GREEDY_BELOW = 1e-5
"""Lower temperatures mean "always the likeliest token": divided by them, logits would leave float32."""
COMPLETION_TOKENS_DEFAULT = 16
"""`max_tokens` of `/v1/completions` where none is given: OpenAI's and vLLM's."""


class Job(msgspec.Struct, frozen=True):
    """Everything about one generation that does not depend on where it runs."""

    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    eos_ids: frozenset[int]
    """Sampling one of these ends the text."""
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    at_start: bool = True
    """Whether the output is a text of its own (an answer), not the continuation of one."""
    salt: bytes = b""

    def packed_prompt(self) -> bytes:
        """The prompt as it travels."""
        return pack_int32(self.prompt)


class Limits(msgspec.Struct, frozen=True):
    """What the model and the cluster allow."""

    max_context: int
    vocab_size: int
    eos_ids: frozenset[int]
    defaults: SamplingDefaults


def check_prompt(prompt: list[int], limits: Limits, param: str) -> None:
    """Refuse prompts that cannot run.

    Raises:
        ApiError: 400: empty, ids outside the vocabulary, or no room left for a single output token.
    """
    if not prompt:
        raise bad_value(param, f"`{param}` comes to no tokens at all")
    if len(prompt) >= limits.max_context:
        raise bad_value(
            param,
            f"this model's context is {limits.max_context} tokens, prompt and output together; "
            f"`{param}` alone has {len(prompt)} tokens. Please shorten it.",
            code="context_length_exceeded",
        )
    check_ids(prompt, limits.vocab_size, param)


def check_ids(ids: Iterable[int], vocab_size: int, param: str) -> None:
    """Refuse token ids outside the vocabulary.

    Raises:
        ApiError: 400 with the id.
    """
    bad = next((token for token in ids if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise bad_value(param, f"`{param}`: {bad} is not a token id; they are 0 to {vocab_size - 1}")


def make_job(
    request: ChatRequest | CompletionRequest,
    prompt: list[int],
    limits: Limits,
    draw_seed: Callable[[], int],
) -> Job:
    """Put a request together for the engine.

    Raises:
        ApiError: 400 naming the parameter.
    """
    chat = isinstance(request, ChatRequest)
    check_prompt(prompt, limits, "messages" if chat else "prompt")
    stop_ids = frozenset(request.stop_token_ids or ())
    check_ids(stop_ids, limits.vocab_size, "stop_token_ids")
    check_ids(request.logit_bias, limits.vocab_size, "logit_bias")
    return Job(
        prompt=prompt,
        max_tokens=_max_tokens(request, len(prompt), limits.max_context),
        sampling=_sampling(request, limits.defaults, draw_seed),
        eos_ids=stop_ids if request.ignore_eos else stop_ids | limits.eos_ids,
        stops=tuple(request.stop),
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        at_start=chat,
    )


def _max_tokens(request: GenerationRequest, prompt_len: int, max_context: int) -> int:
    param, wanted = "max_tokens", request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        param, wanted = "max_completion_tokens", request.max_completion_tokens
    room = max_context - prompt_len
    if wanted is None:
        return room if isinstance(request, ChatRequest) else min(COMPLETION_TOKENS_DEFAULT, room)
    if wanted > room:
        raise bad_value(
            param,
            f"`{param}` is too large: {wanted}. This model's context is {max_context} tokens and the prompt "
            f"has {prompt_len}, so {room} are left.",
            code="context_length_exceeded",
        )
    return wanted


def _sampling(
    request: ChatRequest | CompletionRequest, defaults: SamplingDefaults, draw_seed: Callable[[], int]
) -> Sampling:
    def given(value: _Value | None, default: _Value) -> _Value:
        return default if value is None else value

    temperature = given(request.temperature, defaults.temperature)
    top_k = given(request.top_k, defaults.top_k)
    return Sampling(
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_p=given(request.top_p, defaults.top_p),
        top_k=max(top_k, 0),
        min_p=given(request.min_p, defaults.min_p),
        seed=(draw_seed() if request.seed is None else request.seed) & 0xFFFF_FFFF_FFFF_FFFF,
        presence_penalty=given(request.presence_penalty, 0.0),
        frequency_penalty=given(request.frequency_penalty, 0.0),
        repetition_penalty=given(request.repetition_penalty, defaults.repetition_penalty),
        logit_bias=request.logit_bias,
        logprobs=_logprob_count(request),
    )


def _logprob_count(request: ChatRequest | CompletionRequest) -> int:
    if isinstance(request, ChatRequest):
        return (request.top_logprobs or 0) if request.logprobs else -1
    return -1 if request.logprobs is None else request.logprobs
