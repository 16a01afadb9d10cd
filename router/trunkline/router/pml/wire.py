"""Turn schemas and prompts into messages for controllers (`trunkline.controller.messages`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from trunkline.controller.messages import ModuleText, PromptLayout
from trunkline.kvstore.chunks import pack_int32
from trunkline.router.pml.compiled import CompiledPrompt, CompiledSchema, Span
from trunkline.router.pml.pml_error import ErrorCode, PmlError

ENCODE_TOKENS_MAX: Final = 1 << 20
"""Most tokens that are computed in one call."""
TEXT_TOKENS_MIN: Final = 64
"""Shorter texts count as this many tokens: each takes a row of a step and a block."""


def texts_message(schema: CompiledSchema) -> list[ModuleText]:
    """Return all texts of a schema, including versions for scaffolds, in the order of `schema.texts`."""
    return [ModuleText(pack_int32(text.tokens), text.position, text.parent) for text in schema.texts]


def check_encoding(schema: CompiledSchema) -> None:
    """Refuse to compute a schema in one call if no client would wait that long.

    Raises:
        PmlError: E_SCHEMA_TOO_LONG, with the numbers (`got`, `limit`).
    """
    work = sum(max(len(text.tokens), TEXT_TOKENS_MIN) for text in schema.texts)
    if work > ENCODE_TOKENS_MAX:
        count, scaffolds = len(schema.texts), len(schema.scaffolds)
        message = (
            f"its {count} texts (of modules, and once more of {scaffolds} scaffolds) are work for {work} tokens, "
            f"each counted as {TEXT_TOKENS_MIN} at least; {ENCODE_TOKENS_MAX} are allowed in one call. Use fewer "
            'or smaller scaffolds, or several schemas; or send `"warm": false`: requests compute what they need'
        )
        raise PmlError(ErrorCode.SCHEMA_TOO_LONG, message, extra={"got": work, "limit": ENCODE_TOKENS_MAX})


def to_layout(prompt: CompiledPrompt, ttl: float = 0.0) -> PromptLayout:
    """Return the layout of a prompt (`Submit.layout`); `Submit.tokens` are `prompt.own`.

    `ttl`: seconds for which the texts are kept; 0: as the controller is set.
    """
    texts = [
        ModuleText(pack_int32(text.tokens), text.position, text.parent, _pack_spans(text.seen))
        for text in prompt.texts
    ]
    return PromptLayout(texts, _pack_spans(prompt.runs), ttl)


def hint_layout(schema: CompiledSchema, indexes: Iterable[int]) -> PromptLayout:
    """Return the layout of some texts of a schema (`likely_texts`) and their ancestors, for a `Prefetch`."""
    wanted = set(indexes)
    order = schema.with_parents(wanted)
    places = {index: place for place, index in enumerate(order)}
    texts = []
    for index in order:
        text = schema.texts[index]
        seen = _pack_spans(text.segment.seen) if index in wanted else b""
        parent = places[text.parent] if text.parent >= 0 else -1
        texts.append(ModuleText(pack_int32(text.tokens), text.position, parent, seen))
    return PromptLayout(texts, b"")


def _pack_spans(spans: tuple[Span, ...]) -> bytes:
    return pack_int32(np.array(spans, dtype=np.int32).reshape(-1))
