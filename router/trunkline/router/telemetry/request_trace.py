"""The router's spans of a traced request.

    POST /v1/chat/completions     from the first byte to the last
    ├─ tokenize                   per text
    ├─ route                      per choice of a controller
    └─ dispatch                   per sending to one, and so its continuation elsewhere; the controller's spans are
                                  its children

Names of attributes are OpenTelemetry's where it has some (`http.*`, `gen_ai.*`), else `trunkline.*`. Nothing of
what was asked or answered is among them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from trunkline.router.routing.request import Decision
from trunkline.runtime.spans import Kind, Span, SpanContext, Value
from trunkline.runtime.tracing import Tracer, child_of

TEXTS_MAX: Final = 32
"""Of more texts of a request there are no spans."""
ROUTES_MAX: Final = 32
PROVIDER: Final = "trunkline"
_OPERATIONS: Final = {"/v1/completions": "text_completion"}
"""By endpoint; the others that generate are chats."""


@dataclass(slots=True)
class AttemptTrace:
    """A dispatch that is not over."""

    context: SpanContext
    """Travels with it."""
    start: float
    group: int
    sample: int
    """-1: all."""
    continues: list[SpanContext]
    """The dispatches before it that were lost."""
    output_tokens: int
    """That the stream had before."""


class RequestTrace:
    """Of one request. Times are of `time.monotonic`."""

    def __init__(self, tracer: Tracer, context: SpanContext, parent: bytes) -> None:
        """
        Args:
            context: of the request's own span.
            parent: the caller's span in the same trace; b"": there is none.
        """
        self.context = context
        self._tracer = tracer
        self._parent = parent
        self._start = time.monotonic()
        self._texts = 0
        self._routes = 0

    def tokenized(self, start: float, characters: int, tokens: int) -> None:
        """A text has become tokens, since `start`."""
        self._texts += 1
        if self._texts <= TEXTS_MAX:
            self._child("tokenize", start, {"trunkline.characters": characters, "trunkline.tokens": tokens})

    def routed(self, start: float, decision: Decision | None, why: str = "") -> None:
        """A controller was chosen, or None, since `start`."""
        self._routes += 1
        if self._routes > ROUTES_MAX:
            return
        if decision is None:
            self._child("route", start, {"trunkline.reason": why})
            return
        attributes: dict[str, Value] = {
            "trunkline.group": decision.controller,
            "trunkline.reason": decision.reason,
            "trunkline.matched_tokens": decision.cached_tokens,
            "trunkline.new_tokens": decision.new_tokens,
        }
        weighed = decision.weighed
        if weighed is not None and len(weighed.candidates) and 0 <= decision.controller < len(weighed.costs):
            attributes["trunkline.cost"] = round(float(weighed.costs[decision.controller]), 6)
            attributes["trunkline.candidates"] = len(weighed.candidates)
        self._child("route", start, attributes)

    def attempt(self, group: int, sample: int, continues: list[SpanContext], output_tokens: int) -> AttemptTrace:
        """It is sent to a controller.

        Args:
            continues: dispatches that were lost, and whose work this one goes on with.
            output_tokens: those that it has already.
        """
        context = child_of(self.context)
        return AttemptTrace(context, time.monotonic(), group, sample, continues, output_tokens)

    def attempted(self, attempt: AttemptTrace, reason: str, *, is_failure: bool, has_started: bool) -> None:
        """It is over."""
        attributes: dict[str, Value] = {
            "trunkline.group": attempt.group,
            "trunkline.finish": reason,
            "trunkline.started": has_started,
        }
        if attempt.sample >= 0:
            attributes["trunkline.sample"] = attempt.sample
        if attempt.continues:
            attributes["trunkline.continued_tokens"] = attempt.output_tokens
        self._tracer.emit(
            Span(
                "dispatch",
                attempt.context,
                self.context.span_id,
                attempt.start,
                time.monotonic(),
                attributes,
                Kind.CLIENT,
                links=attempt.continues,
                error=reason if is_failure else "",
            )
        )

    def finish(self, method: str, route: str, status: int, attributes: dict[str, Value], error: str = "") -> None:
        """The request is over."""
        about: dict[str, Value] = {
            "http.request.method": method,
            "http.route": route,
            "http.response.status_code": status,
            "url.scheme": "http",
            **attributes,
        }
        self._tracer.emit(
            Span(
                f"{method} {route}",
                self.context,
                self._parent,
                self._start,
                time.monotonic(),
                about,
                Kind.SERVER,
                error=error or (str(status) if status >= 500 else ""),
            )
        )

    def _child(self, name: str, start: float, attributes: dict[str, Value]) -> None:
        context = child_of(self.context)
        self._tracer.emit(Span(name, context, self.context.span_id, start, time.monotonic(), attributes))


def operation_of(route: str) -> str:
    """What an endpoint does, as `gen_ai.operation.name`."""
    return _OPERATIONS.get(route, "chat")
