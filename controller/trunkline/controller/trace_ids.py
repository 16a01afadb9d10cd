"""The ids of a traced request's spans, drawn when it comes: workers' spans are children of some that still grow.

dispatch (the router's)
└─ generate         from its coming to its end
   ├─ queue         until its admission
   ├─ prefill       until its first token       ─► `forward` of each rank, per step that computes a part of it
   └─ decode        until its last              ─► `decode_steps` of each rank
"""

from __future__ import annotations

import secrets
from typing import NamedTuple

from trunkline.runtime.tracing import SPAN_BYTES, SpanContext, unpack_context


class TraceIds(NamedTuple):
    """Of one request in one controller."""

    router: SpanContext
    """Of the dispatch."""
    generate: bytes
    queue: bytes
    prefill: bytes
    decode: bytes

    def context(self, span: bytes) -> SpanContext:
        """Of one of its spans."""
        return SpanContext(self.router.trace_id, span)


def draw_ids(packed: bytes) -> TraceIds | None:
    """Fresh ids below a router's span (`Submit.trace`); None: it is not traced."""
    context = unpack_context(packed)
    if context is None:
        return None
    drawn = secrets.token_bytes(4 * SPAN_BYTES)
    return TraceIds(context, *(drawn[at : at + SPAN_BYTES] for at in range(0, len(drawn), SPAN_BYTES)))
