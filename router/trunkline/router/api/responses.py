"""The answers to chats and plain completions, in OpenAI's form.

They are structs rather than pydantic models, because a stream encodes one for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from trunkline.router.streams.generation import FinishName

ChatFinishName = FinishName | Literal["tool_calls"]


class CachedTokens(msgspec.Struct):
    """`usage.prompt_tokens_details`."""

    cached_tokens: int
    session_tokens: int = 0
    """Tokens of a stored session's history."""
    module_tokens: int = 0
    """Tokens of a schema's modules."""


class CompletionTokens(msgspec.Struct):
    """`usage.completion_tokens_details`."""

    reasoning_tokens: int | UnsetType = UNSET
    """Left out for models that do not think."""
    accepted_prediction_tokens: int | UnsetType = UNSET
    """Drafts from the request's `prediction` that were the tokens drawn …"""
    rejected_prediction_tokens: int | UnsetType = UNSET
    """… and those that were tried and were not. They are no output tokens."""
    drafted_tokens: int | UnsetType = UNSET
    """Drafts that were tried, from whatever text."""
    accepted_drafts: int | UnsetType = UNSET
    """Drafts among these that were the tokens drawn."""


class Usage(msgspec.Struct):
    """The field `usage`: token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionTokens | UnsetType = UNSET
    """Left out if it would say nothing."""


class CacheUse(msgspec.Struct, kw_only=True):
    """The field `cache`: how much of a prompt's KV was found, in which tiers, and why the rest was not."""

    status: Literal["hit", "partial", "miss"]
    """"hit": everything but the last token, which is always computed, was found."""
    tier: str | None
    """The slowest tier in which KV of the prompt was found."""
    tiers: dict[str, int]
    """Number of prompt tokens whose KV was found, by tier."""
    exact: bool
    """Whether all KV was computed behind the tokens that precede it in the prompt. False: some KV was not, because
    tokens before it were dropped since, or because it belongs to a module."""
    reason: str | None
    """Why the KV of the rest of the prompt was not found."""
    miss_token: int | None
    """Index in the prompt of the first token that was not found."""


class Timings(msgspec.Struct, kw_only=True):
    """The field `timings`: where a request's time went, in llama.cpp's form. Of several prompts or choices, tokens
    are added up, and times are the longest."""

    cache_n: int
    """Prompt tokens whose KV was found."""
    prompt_n: int
    """Prompt tokens that were computed."""
    queue_ms: float
    """Milliseconds in the engine's queue."""
    prompt_ms: float
    """Milliseconds from there to the first token."""
    prompt_per_second: float | None
    """Null if no time has passed, as in `predicted_per_second`."""
    predicted_n: int
    """Output tokens."""
    predicted_ms: float
    """Milliseconds from the first token to the last."""
    predicted_per_second: float | None
    """Output tokens behind each choice's first one, by `predicted_ms`."""


class TruncationResult(msgspec.Struct, kw_only=True):
    """The field `truncation`: tokens of a prompt that the model did not see."""

    occurred: bool
    prompt_tokens_before: int
    """Tokens of the whole prompt; `usage.prompt_tokens` counts the tokens that the model saw."""
    dropped_tokens: int
    kept: Literal["cached", "recomputed"] | None
    """Whether the KV after a cut was found in the cache or computed again."""


class TopLogprob(msgspec.Struct):
    """An alternative to one token, in the form of chat completions."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobContent(msgspec.Struct):
    """Log-probabilities of one token, in the form of chat completions."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """`choices[].logprobs` of chat completions."""

    content: list[TokenLogprobContent]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """`choices[].logprobs` of plain completions."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    """Log-probability of each token; None for the first token of an echoed prompt."""
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct):
    """Score of a token at one position of a prompt, in vLLM's form."""

    logprob: float
    rank: int
    """Rank among all tokens; 1 is the likeliest."""
    decoded_token: str


PromptLogprobList = list[dict[str, PromptLogprob] | None]
"""Scores by position and token id; the first position has none."""


class CalledFunction(msgspec.Struct):
    """The function of a call, whole or in part."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallPart(msgspec.Struct, kw_only=True):
    """A call in an answer, whole or in part. Whole calls have no `index`."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: CalledFunction


class ChatMessage(msgspec.Struct, kw_only=True):
    """The message of an answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    """The text in which the model thought before it answered."""
    reasoning: str | UnsetType = UNSET
    """The same under vLLM's newer name."""
    tool_calls: list[ToolCallPart] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """A choice of a chat completion."""

    index: int = 0
    message: ChatMessage
    finish_reason: ChatFinishName
    stop_reason: str | int | None = None
    """The stop string or expression, or the token of `stop_token_ids`, that ended the choice; None: none did."""
    matched_stop: str | int | None = None
    """The same in SGLang's form, where the model's own end token counts, too."""
    logprobs: ChatLogprobs | None = None
    token_ids: Sequence[int] | UnsetType = UNSET
    score: float | UnsetType = UNSET
    """Score of a beam search's result."""
    cumulative_logprob: float | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The answer to `POST /v1/chat/completions` without streaming."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[msgspec.Raw]
    """`ChatChoice` structs that are already encoded."""
    usage: Usage
    system_fingerprint: str
    prompt_logprobs: PromptLogprobList | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    cache: CacheUse | UnsetType = UNSET
    truncation: TruncationResult | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET
    """What the client should know about its request, such as the names of unknown parameters."""


class ChatDelta(msgspec.Struct):
    """The part that a chunk adds to the message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallPart] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """A choice of a chunk."""

    index: int = 0
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishName | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    matched_stop: str | int | UnsetType | None = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET
    score: float | UnsetType = UNSET
    cumulative_logprob: float | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    """Token counts, if the request has `include_usage`: null in all chunks but the last."""
    prompt_token_ids: list[int] | UnsetType = UNSET
    """Token ids of the prompt, in the first chunk only."""
    cache: CacheUse | UnsetType = UNSET
    truncation: TruncationResult | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET
    """What the client should know about its request, such as the names of unknown parameters."""


class CompletionChoice(msgspec.Struct, kw_only=True):
    """A choice of a plain completion, whole or in part."""

    index: int = 0
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishName | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    """The stop string or expression, or the token of `stop_token_ids`, that ended the choice; None: none did.
    Left out as long as the choice has not ended."""
    matched_stop: str | int | UnsetType | None = UNSET
    """The same in SGLang's form, where the model's own end token counts, too."""
    token_ids: Sequence[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobList | UnsetType | None = UNSET
    score: float | UnsetType = UNSET
    """Score of a beam search's result."""
    cumulative_logprob: float | UnsetType = UNSET


class TextCompletion(msgspec.Struct, kw_only=True):
    """The answer to `POST /v1/completions`, and each event of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: Sequence[CompletionChoice | msgspec.Raw]
    """Raw choices are already encoded."""
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    cache: CacheUse | UnsetType = UNSET
    truncation: TruncationResult | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET
    """What the client should know about its request, such as the names of unknown parameters."""
