"""The record of an HTTP request: what its log line and its trace say. Never the content of a prompt or an answer.

    POST /v1/chat/completions     from the first byte to the last
    ├─ tokenize                   per text
    ├─ route                      per choice of a controller
    └─ dispatch                   per attempt at a controller; the controller's spans are its children

Attributes have OpenTelemetry's names where it defines some (`http.*`, `gen_ai.*`), else names like `trunkline.*`.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from trunkline.router.jobs.job import Job
from trunkline.router.request_context import current
from trunkline.router.routing.request import Decision
from trunkline.runtime.spans import Kind, Span, SpanContext, Value
from trunkline.runtime.tracing import Tracer, child_of

if TYPE_CHECKING:
    from trunkline.router.streams.generation import Generation
TEXTS_MAX: Final = 32
"""Largest number of spans `tokenize` per request. Further texts have no span."""
ROUTES_MAX: Final = 32
"""Largest number of spans `route` per request. Further choices of a controller have no span."""
PROVIDER: Final = "trunkline"
_OPERATIONS: Final = {"/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}
"""`gen_ai.operation.name` by endpoint; all other endpoints that generate are chats."""


@dataclass(slots=True)
class RequestRecord:
    """The record of one HTTP request. Several prompts in one request, and all their samples, are added up."""

    id: str
    """Id of the request, as in `X-Request-Id`."""
    arrived_at: float
    """Loop time in seconds at which the request arrived: before its turn to begin (`LoopTurns`)."""
    trace: RequestTrace | None = None
    """The spans of the request; None: the request is not traced."""
    tenant: str = ""
    model: str = ""
    """The model that generates, or "" before one does."""
    groups: list[str] = field(default_factory=list)
    """Names of the groups that the request was sent to, in the order of the first time."""
    attempts: int = 0
    """Number of times that the request, or one of its samples, was sent to a controller."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_token_s: float | None = None
    """Seconds from the request's arrival to its first token, of several prompts the earliest; None: there was
    none."""
    outcomes: list[str] = field(default_factory=list)
    """How its generations ended: "stop", "length", or what went wrong."""
    job: Job | None = None
    """The job of one of its generations."""

    def sent(self, group: str) -> None:
        """Note that the request was sent to a group, by its name: slots of routing go to others in time."""
        self.attempts += 1
        if group not in self.groups:
            self.groups.append(group)

    def add(self, generation: Generation) -> None:
        """Add a generation that is over."""
        self.job = generation.job
        self.prompt_tokens += generation.job.seen_tokens
        self.cached_tokens += generation.cached_tokens
        self.output_tokens += generation.output_tokens
        self.outcomes.append(generation.outcome)
        first = generation.first_token_s
        if first is not None:
            self.first_token_s = first if self.first_token_s is None else min(self.first_token_s, first)

    def fields(self) -> dict[str, Any]:
        """Return the fields of the request's log line."""
        said: dict[str, Any] = {"tenant": self.tenant} if self.tenant else {}
        if not self.outcomes:
            return said
        said["model"] = self.model
        said["group"] = self.groups[0] if len(self.groups) == 1 else self.groups
        if self.attempts > len(self.outcomes):
            said["attempts"] = self.attempts
        said |= {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "finish": self.outcomes[0] if len(set(self.outcomes)) == 1 else self.outcomes,
        }
        if self.first_token_s is not None:
            said["ttft_s"] = round(self.first_token_s, 4)
        return said


def current_record() -> RequestRecord | None:
    """Return the record of the request at hand; None: the work is for no client, as a health probe."""
    return current().record


def arrival() -> float:
    """Return the loop time in seconds at which the request at hand arrived; without one, the present."""
    record = current().record
    return asyncio.get_running_loop().time() if record is None else record.arrived_at


@dataclass(slots=True)
class AttemptTrace:
    """The span of an attempt that still runs."""

    context: SpanContext
    """Context of the span, sent to the controller with the request."""
    start: float
    group: str
    """Name of the group."""
    sample: int
    """Index of the sample that the attempt computes; -1: all samples."""
    continues: list[SpanContext]
    """The spans of earlier attempts that were lost."""
    output_tokens: int
    """Tokens of the request that had arrived before this attempt began."""


class RequestTrace:
    """The spans of one traced request. Times are of `time.monotonic`."""

    def __init__(self, tracer: Tracer, context: SpanContext, parent: bytes) -> None:
        """
        Args:
            context: the request's own span.
            parent: the client's span in the same trace; b"": there is none.
        """
        self.context = context
        self._tracer = tracer
        self._parent = parent
        self._start = time.monotonic()
        self._texts = 0
        self._routes = 0

    def tokenized(self, start: float, characters: int, tokens: int) -> None:
        """Emit the span of a text that was tokenized since `start`."""
        self._texts += 1
        if self._texts <= TEXTS_MAX:
            self._child("tokenize", start, {"trunkline.characters": characters, "trunkline.tokens": tokens})

    def routed(self, start: float, decision: Decision | None, why: str = "") -> None:
        """Emit the span of a choice of a controller since `start`; None: no controller could be chosen."""
        self._routes += 1
        if self._routes > ROUTES_MAX:
            return
        if decision is None:
            self._child("route", start, {"trunkline.reason": why})
            return
        attributes: dict[str, Value] = {
            "trunkline.group": decision.name,
            "trunkline.reason": decision.reason,
            "trunkline.matched_tokens": decision.cached_tokens,
            "trunkline.new_tokens": decision.new_tokens,
        }
        weighed = decision.weighed
        if weighed is not None and len(weighed.candidates) and 0 <= decision.controller < len(weighed.costs):
            attributes["trunkline.cost"] = round(float(weighed.costs[decision.controller]), 6)
            attributes["trunkline.candidates"] = len(weighed.candidates)
        self._child("route", start, attributes)

    def attempt(self, group: str, sample: int, continues: list[SpanContext], output_tokens: int) -> AttemptTrace:
        """Begin the span of an attempt.

        Args:
            group: the group's name.
            continues: lost attempts whose work this one continues.
            output_tokens: tokens of the request that have arrived before.
        """
        context = child_of(self.context)
        return AttemptTrace(context, time.monotonic(), group, sample, continues, output_tokens)

    def attempted(self, attempt: AttemptTrace, reason: str, *, is_failure: bool, has_started: bool) -> None:
        """End the span of an attempt."""
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
        """Emit the span of the request, which is over."""
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
    """Return the `gen_ai.operation.name` of an endpoint."""
    return _OPERATIONS.get(route, "chat")
