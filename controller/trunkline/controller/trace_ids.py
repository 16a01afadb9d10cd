"""The ids of a traced request's spans, drawn when it comes: workers' spans are children of some that still grow.

dispatch (the router's)
└─ generate         from its coming to its end
   ├─ queue         until its admission
   ├─ prefill       until its first token       ─► `forward` of each rank, per step that computes a part of it
   └─ decode        until its last              ─► `decode_steps` of each rank
"""

from __future__ import annotations

from typing import NamedTuple

from trunkline.runtime.spans import SpanContext


class TraceIds(NamedTuple):
    """The span ids of one request in one controller."""

    router: SpanContext
    """The router's dispatch span, the parent of `generate`."""
    generate: bytes
    queue: bytes
    prefill: bytes
    decode: bytes

    def context(self, span: bytes) -> SpanContext:
        """Return the context of one of these spans."""
        return SpanContext(self.router.trace_id, span)
