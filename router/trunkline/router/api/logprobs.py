"""Log-probabilities from the engine's arrays to OpenAI's two forms. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from trunkline.router.api.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    TokenLogprobContent,
    TopLogprob,
)
from trunkline.router.detokenizer import Vocabulary
from trunkline.router.text import TokenLogprob

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say (OpenAI's own convention)."""


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


def chat_logprobs(entries: Sequence[TokenLogprob], count: int, vocabulary: Vocabulary) -> ChatLogprobs | None:
    """Chat form; None for no tokens. `count`: alternatives per position at most."""
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
    entries: Sequence[TokenLogprob], count: int, vocabulary: Vocabulary
) -> CompletionLogprobs | None:
    """Plain form; None for no tokens. The sampled token is always among the alternatives."""
    if not entries:
        return None
    tops = []
    for entry in entries:
        top = {vocabulary.token_text(token): value for token, value in reversed(_top(entry, count))}
        top.setdefault(vocabulary.token_text(entry.token), _own(entry))
        tops.append(dict(sorted(top.items(), key=lambda item: -item[1])))
    return CompletionLogprobs(
        text_offset=[entry.text_offset for entry in entries],
        token_logprobs=[_own(entry) for entry in entries],
        tokens=[vocabulary.token_text(entry.token) for entry in entries],
        top_logprobs=tops,
    )
