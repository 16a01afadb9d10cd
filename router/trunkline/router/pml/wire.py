"""What controllers are told about schemas and prompts (`trunkline.controller.messages`)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from trunkline.controller.messages import ModuleText, PromptLayout
from trunkline.kvstore.layout import pack_int32
from trunkline.router.pml.compiled import CompiledPrompt, CompiledSchema, Span


def texts_message(schema: CompiledSchema) -> list[ModuleText]:
    """All texts of a schema, scaffolds' versions included, in the order of `schema.texts`."""
    return [ModuleText(pack_int32(text.tokens), text.position, text.parent) for text in schema.texts]


def to_layout(prompt: CompiledPrompt, ttl: float = 0.0) -> PromptLayout:
    """Where a prompt's tokens stand (`Submit.layout`); `Submit.tokens` are `prompt.own`.

    `ttl`: seconds for which the texts are kept; 0: as the controller is set.
    """
    texts = [
        ModuleText(pack_int32(text.tokens), text.position, text.parent, _pack_spans(text.seen))
        for text in prompt.texts
    ]
    return PromptLayout(texts, _pack_spans(prompt.runs), ttl)


def hint_layout(schema: CompiledSchema, indexes: Iterable[int]) -> PromptLayout:
    """Some texts of a schema (`likely_texts`) and those behind which they were computed, for a `Prefetch` without
    tokens."""
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
