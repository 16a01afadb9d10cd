"""The fields that answers of chats and plain completions share: choices, usage, cache, truncation and scores.

Scores are log-probabilities. They come from the engine as arrays, and go out in OpenAI's two forms and, for
prompts, in vLLM's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, Protocol, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from trunkline.controller.reports import PromptLogprobs
from trunkline.kvstore.tier import TierKind
from trunkline.router.api.responses import (
    CachedTokens,
    CacheUse,
    ChatLogprobs,
    CompletionLogprobs,
    CompletionTokens,
    PromptLogprob,
    PromptLogprobList,
    Timings,
    TokenLogprobContent,
    TopLogprob,
    TruncationResult,
    Usage,
)
from trunkline.router.errors import unavailable
from trunkline.router.jobs.generation_parameters import GenerationRequest
from trunkline.router.jobs.job import Job
from trunkline.router.request_context import created_at, draw_hex
from trunkline.router.service import RouterService
from trunkline.router.streams.generation import Delta, FinishName, Generation, TokenLogprob
from trunkline.router.text.detokenizer import TokenVocabulary
from trunkline.router.text.truncation import clip_spans, span_tokens

_Value = TypeVar("_Value")


LOGPROBS_OFF_LOOP: Final = 20_000
"""Number of log-probabilities above which an answer is written in a thread."""


class Collected(msgspec.Struct):
    """A whole choice of an answer, collected from its deltas."""

    text: str
    logprobs: list[TokenLogprob]
    finish: FinishName = "length"
    stop: str | None = None
    """The stop string or expression that ended the choice, if one did."""
    tokens: list[int] = []
    score: float | None = None
    """Score by which a beam search ranked this result; None for other choices."""
    cumulative_logprob: float | None = None
    """Sum of the log-probabilities from which a beam search computed this result's score; None for other
    choices."""

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability per token, by which `best_of` ranks; minus infinity without tokens."""
        known = [entry.logprobs.token_logprob for entry in self.logprobs if entry.logprobs is not None]
        mean = sum(known) / len(known) if known else -math.inf
        return mean if math.isfinite(mean) else -math.inf


def make_head(prefix: str, service: RouterService, model: str | None) -> dict[str, Any]:
    """Return the fields that every chunk of an answer repeats: a new id, the time, the model's name, the
    fingerprint."""
    return {
        "id": f"{prefix}-{draw_hex('id', 16)}",
        "created": created_at(),
        "model": model or service.model_name,
        "system_fingerprint": service.fingerprint,
    }


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
        answer.finish, answer.stop = delta.finish or answer.finish, delta.stop
        answer.score, answer.cumulative_logprob = delta.score, delta.cumulative_logprob
    for answer, texts in zip(answers, parts, strict=True):
        answer.text = "".join(texts)
    if decoding.samples > decoding.choices:
        answers.sort(key=lambda answer: -answer.mean_logprob)
    return answers[: decoding.choices]


def usage_of(*generations: Generation, thoughts: int | None = None) -> Usage:
    """Return the token counts of generations so far: each prompt once, and all samples that were drawn.

    Args:
        thoughts: Number of tokens of thoughts; None: the model does not think.
    """
    jobs = [generation.job for generation in generations]
    prompt_tokens = sum(job.seen_tokens for job in jobs)
    output_tokens = sum(generation.output_tokens for generation in generations)
    details = CachedTokens(
        sum(generation.cached_tokens for generation in generations),
        sum(job.session_tokens - span_tokens(clip_spans(job.cut.drops, job.session_tokens)) for job in jobs),
        sum(job.module_tokens for job in jobs),
    )
    counts = draft_details(*generations)
    if thoughts is not None:
        counts["reasoning_tokens"] = thoughts
    output_details = CompletionTokens(**counts) if counts else UNSET
    return Usage(prompt_tokens, output_tokens, prompt_tokens + output_tokens, details, output_details)


def draft_details(*generations: Generation) -> dict[str, int]:
    """Return what came of drafts, by the names of `CompletionTokens`; empty if none was tried and no job has a
    prediction."""
    counts = [generation.drafts for generation in generations]
    tried = sum(each.tried for each in counts)
    if not tried and not any(generation.job.prediction for generation in generations):
        return {}
    accepted = sum(each.predicted_accepted for each in counts)
    return {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": sum(each.predicted for each in counts) - accepted,
        "drafted_tokens": tried,
        "accepted_drafts": sum(each.accepted for each in counts),
    }


def prompt_scores_of(generation: Generation) -> PromptScores | None:
    """Return the scores of a prompt's tokens; None if the job did not ask for them. Call it after the first token.

    Raises:
        ApiError: 503, the engine left some of the scores out.
    """
    count = generation.job.sampling.prompt_logprobs
    if count < 0:
        return None
    try:
        return join_prompt_logprobs(generation.prompt_logprobs, len(generation.job.prompt), count)
    except ValueError as error:
        raise unavailable(f"the engine did not score the prompt: {error}", code="engine_failed") from None


def optional(value: _Value | None) -> _Value | UnsetType:
    """Return the value of a field that is left out of the answer if it is None."""
    return UNSET if value is None else value


def matched_stop(answer: Collected | Delta, job: Job) -> str | int | None:
    """Return what ended a choice: a stop string or expression, or the token that ends texts; None: its length."""
    if answer.finish != "stop" or answer.stop is not None or not answer.tokens:
        return answer.stop
    return answer.tokens[-1] if answer.tokens[-1] in job.eos_ids else None


def stop_reason(answer: Collected | Delta, body: GenerationRequest) -> str | int | None:
    """Return what ended a choice besides the model's own end tokens: a stop string or expression, or a token of
    `stop_token_ids`; None: none of them."""
    if answer.finish != "stop" or answer.stop is not None or not answer.tokens:
        return answer.stop
    return answer.tokens[-1] if answer.tokens[-1] in (body.stop_token_ids or ()) else None


def timings_of(*generations: Generation) -> Timings:
    """Return where the time of generations went, which ran side by side."""
    cached = sum(generation.cached_tokens for generation in generations)
    computed = sum(generation.job.seen_tokens for generation in generations) - cached
    output = sum(generation.output_tokens for generation in generations)
    first = sum(generation.job.decoding.samples for generation in generations)
    queue = max(0.0 if each.started is None else each.started.queued_s for each in generations)
    prefill = max(generation.prefill_s for generation in generations)
    decode = max(generation.decode_s for generation in generations)
    return Timings(
        cache_n=cached,
        prompt_n=computed,
        queue_ms=round(queue * 1e3, 3),
        prompt_ms=round(prefill * 1e3, 3),
        prompt_per_second=round(computed / prefill, 2) if prefill > 0 else None,
        predicted_n=output,
        predicted_ms=round(decode * 1e3, 3),
        predicted_per_second=round(max(0, output - first) / decode, 2) if decode > 0 else None,
    )


_KEPT: dict[str, Literal["cached", "recomputed"]] = {"kept": "cached", "recomputed": "recomputed"}


def cache_use(*generations: Generation) -> CacheUse | UnsetType:
    """Return the KV found for the prompts together; UNSET if no engine has reported it."""
    found = [generation.started for generation in generations]
    known = [started for started in found if started is not None]
    if not known:
        return UNSET
    tiers: dict[str, int] = {}
    for started in known:
        for kind, tokens in zip(TierKind, started.tier_tokens, strict=False):
            if tokens:
                name = kind.name.lower()
                tiers[name] = tiers.get(name, 0) + tokens
    missed = next((started for started in known if started.miss), None)
    cached = sum(started.cached_tokens for started in known)
    status: Literal["hit", "partial", "miss"] = "miss"
    if cached:
        status = "hit" if missed is None else "partial"
    slowest = [kind.name.lower() for kind in TierKind if kind.name.lower() in tiers]
    return CacheUse(
        status=status,
        tier=slowest[-1] if slowest else None,
        tiers=tiers,
        exact=all(started.exact for started in known) and not any(g.job.modules for g in generations),
        reason=None if missed is None else missed.miss,
        miss_token=None if missed is None else missed.miss_token,
    )


def truncation_result(generation: Generation) -> TruncationResult | UnsetType:
    """Return the field `truncation`, which tells what was left out of a prompt; UNSET if the request has no cut
    and allows none."""
    job, started = generation.job, generation.started
    if not (job.cut.asked or job.cut.left_out_tokens):
        return UNSET
    return TruncationResult(
        occurred=job.cut.left_out_tokens > 0,
        prompt_tokens_before=len(job.prompt) + job.module_tokens + job.cut.removed_tokens,
        dropped_tokens=job.cut.left_out_tokens,
        kept="recomputed" if job.cut.removed_tokens else None if started is None else _KEPT.get(started.cut),
    )


_LOWEST = -9999.0
"""Number written in place of minus infinity, which JSON cannot express (OpenAI's convention)."""


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _LOWEST


def _top(entry: TokenLogprob, count: int) -> list[tuple[int, float]]:
    if entry.logprobs is None:
        return []
    ids = np.frombuffer(entry.logprobs.top_ids, dtype="<i4").tolist()
    values = np.frombuffer(entry.logprobs.top_logprobs, dtype="<f4").tolist()
    return [(token, _finite(value)) for token, value in zip(ids, values, strict=False)][:count]


def _own(entry: TokenLogprob) -> float:
    return _LOWEST if entry.logprobs is None else _finite(entry.logprobs.token_logprob)


class TokenNames(Protocol):
    """How log-probabilities name tokens; a `TokenVocabulary` names them by their texts."""

    def token_text(self, token: int) -> str:
        """Return a token's name."""

    def token_bytes(self, token: int) -> bytes:
        """Return a token's bytes."""


class NumberedTokens:
    """Names tokens by their ids (`return_tokens_as_token_ids`), in vLLM's form."""

    def __init__(self, vocabulary: TokenVocabulary) -> None:
        self._vocabulary = vocabulary

    def token_text(self, token: int) -> str:
        """As in `TokenNames`."""
        return f"token_id:{token}"

    def token_bytes(self, token: int) -> bytes:
        """As in `TokenNames`."""
        return self._vocabulary.token_bytes(token)


def token_names(vocabulary: TokenVocabulary, body: GenerationRequest) -> TokenNames:
    """Return how a request's log-probabilities name tokens."""
    return NumberedTokens(vocabulary) if body.return_tokens_as_token_ids else vocabulary


def chat_logprobs(entries: Sequence[TokenLogprob], count: int, vocabulary: TokenNames) -> ChatLogprobs | None:
    """Return log-probabilities in the form of chat completions; None for no tokens. `count`: largest number of
    alternatives."""
    if not entries:
        return None
    return ChatLogprobs(
        [
            TokenLogprobContent(
                vocabulary.token_text(entry.token),
                _own(entry),
                list(vocabulary.token_bytes(entry.token)),
                [
                    TopLogprob(vocabulary.token_text(token), value, list(vocabulary.token_bytes(token)))
                    for token, value in _top(entry, count)
                ],
            )
            for entry in entries
        ]
    )


def completion_logprobs(
    entries: Sequence[TokenLogprob], count: int, vocabulary: TokenNames, *, offset: int = 0
) -> CompletionLogprobs | None:
    """Return log-probabilities in the form of plain completions; None for no tokens. The alternatives always
    include the sampled token.

    Args:
        offset: Characters of the answer before the output, which are those of an echoed prompt.
    """
    if not entries:
        return None
    return CompletionLogprobs(
        text_offset=[offset + entry.text_offset for entry in entries],
        token_logprobs=[_own(entry) for entry in entries],
        tokens=[vocabulary.token_text(entry.token) for entry in entries],
        top_logprobs=[_named(_top(entry, count), entry.token, _own(entry), vocabulary) for entry in entries],
    )


def _named(top: list[tuple[int, float]], token: int, own: float, vocabulary: TokenNames) -> dict[str, float]:
    named = {vocabulary.token_text(other): value for other, value in reversed(top)}
    named.setdefault(vocabulary.token_text(token), own)
    return dict(sorted(named.items(), key=lambda item: -item[1]))


class PromptScores(msgspec.Struct, frozen=True):
    """Scores of a prompt's tokens by position; position 0 has none."""

    logprobs: list[float]
    """`[prompt]`, log-probabilities of the prompt's own tokens."""
    ranks: list[int]
    """`[prompt]`, ranks of the prompt's own tokens; 1 is the likeliest."""
    top_ids: list[list[int]]
    """`[prompt, count]`, ids of the likeliest tokens at each position, the likeliest first."""
    top_logprobs: list[list[float]]
    """`[prompt, count]`, log-probabilities of the tokens in `top_ids`."""

    def top(self, position: int, count: int) -> list[tuple[int, float]]:
        """Return the `count` likeliest tokens at a position."""
        pairs = zip(self.top_ids[position][:count], self.top_logprobs[position][:count], strict=True)
        return [(token, _finite(value)) for token, value in pairs]


def join_prompt_logprobs(pieces: Iterable[PromptLogprobs], length: int, count: int) -> PromptScores:
    """Join the pieces of a prompt's scores. Pieces may overlap.

    Args:
        length: Length of the prompt in tokens.
        count: Alternatives that were asked for.

    Raises:
        ValueError: A position is missing, or a piece has a wrong shape.
    """
    logprobs = np.zeros(length, "<f4")
    ranks = np.zeros(length, "<i4")
    top_ids = np.zeros((length, count), "<i4")
    top_logprobs = np.zeros((length, count), "<f4")
    for piece in pieces:
        own = np.frombuffer(piece.token_logprobs, "<f4")
        there = slice(piece.start, piece.start + len(own))
        logprobs[there] = own
        ranks[there] = np.frombuffer(piece.ranks, "<i4")
        top_ids[there] = np.frombuffer(piece.top_ids, "<i4").reshape(len(own), count)
        top_logprobs[there] = np.frombuffer(piece.top_logprobs, "<f4").reshape(len(own), count)
    missing = np.flatnonzero(ranks[1:] < 1)
    if len(missing):
        raise ValueError(f"{len(missing)} positions of the prompt were not scored, {missing[0] + 1} first")
    return PromptScores(logprobs.tolist(), ranks.tolist(), top_ids.tolist(), top_logprobs.tolist())


def prompt_logprob_list(
    scores: PromptScores, prompt: Sequence[int], count: int, vocabulary: TokenVocabulary
) -> PromptLogprobList:
    """Return scores in vLLM's form: at each position the likeliest tokens and the prompt's own."""
    result: PromptLogprobList = [None]
    for position in range(1, len(prompt)):
        token = prompt[position]
        entries = {
            str(other): PromptLogprob(value, rank, vocabulary.token_text(other))
            for rank, (other, value) in enumerate(scores.top(position, count), 1)
        }
        own = PromptLogprob(
            _finite(scores.logprobs[position]), scores.ranks[position], vocabulary.token_text(token)
        )
        result.append({str(token): own, **{key: entry for key, entry in entries.items() if key != str(token)}})
    return result


def echo_logprobs(
    scores: PromptScores, prompt: Sequence[int], count: int, vocabulary: TokenNames, offsets: list[int]
) -> CompletionLogprobs:
    """Return an echoed prompt's log-probabilities in the form of plain completions. `offsets`: offset of each
    token."""
    return CompletionLogprobs(
        text_offset=offsets,
        token_logprobs=[None, *(_finite(value) for value in scores.logprobs[1:])],
        tokens=[vocabulary.token_text(token) for token in prompt],
        top_logprobs=[
            None,
            *(
                _named(scores.top(position, count), token, _finite(scores.logprobs[position]), vocabulary)
                for position, token in enumerate(prompt[1:], 1)
            ),
        ],
    )


def both_logprobs(first: CompletionLogprobs | None, then: CompletionLogprobs | None) -> CompletionLogprobs | None:
    """Return the log-probabilities of two consecutive texts."""
    if first is None or then is None:
        return first or then
    return CompletionLogprobs(
        first.text_offset + then.text_offset,
        first.token_logprobs + then.token_logprobs,
        first.tokens + then.tokens,
        first.top_logprobs + then.top_logprobs,
    )
