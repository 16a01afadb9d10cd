"""A sink of spans for tests."""

from __future__ import annotations

from trunkline.runtime.spans import Span


class KeptSpans:
    """Keeps the spans that it is given."""

    exported = dropped = 0

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def put(self, span: Span) -> None:
        self.spans.append(span)

    def close(self, seconds_max: float) -> None:
        pass
