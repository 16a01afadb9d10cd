"""Convert log-probabilities from the engine's arrays to OpenAI's two forms and, for prompts, vLLM's. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from trunkline.controller.messages import PromptLogprobs
from trunkline.router.api.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobList,
    TokenLogprobContent,
    TopLogprob,
)
from trunkline.router.streams.choices import TokenLogprob
from trunkline.router.text.detokenizer import TokenVocabulary

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot express (OpenAI's convention)."""


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


def chat_logprobs(entries: Sequence[TokenLogprob], count: int, vocabulary: TokenVocabulary) -> ChatLogprobs | None:
    """Return log-probabilities in the form of chat completions; None for no tokens. `count`: most alternatives."""
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
    entries: Sequence[TokenLogprob], count: int, vocabulary: TokenVocabulary, *, offset: int = 0
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


def _named(top: list[tuple[int, float]], token: int, own: float, vocabulary: TokenVocabulary) -> dict[str, float]:
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
    """`[prompt, count]`, most likely first."""
    top_logprobs: list[list[float]]
    """`[prompt, count]`."""

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
    scores: PromptScores, prompt: Sequence[int], count: int, vocabulary: TokenVocabulary, offsets: list[int]
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
