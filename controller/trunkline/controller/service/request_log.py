"""What a controller tells people of its requests: a log line for each that is over, spans of those that are
traced.

      dispatch (the router's)
      └─ generate      the request in this controller
         ├─ queue      until its admission
         ├─ prefill    until its first token; an event for each step that computes a part of it
         └─ decode     until its last

Times of the engine are the monotonic clock's.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Final

import structlog

from trunkline.controller.engine.engine import Engine
from trunkline.controller.engine.timeline import Journey
from trunkline.controller.service.tier_warnings import TierWarnings
from trunkline.controller.trace_ids import TraceIds
from trunkline.kvstore.tier import TierKind
from trunkline.router.messages import FinishReason
from trunkline.runtime.spans import SPAN_BYTES, Kind, Span, Value, unpack_context
from trunkline.runtime.tracing import Tracer

_REGULAR: Final = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)
log = structlog.get_logger()


def draw_ids(packed: bytes) -> TraceIds | None:
    """Draw the ids of a request's spans below the router's span (`Submit.trace`); None: it is not traced."""
    context = unpack_context(packed)
    if context is None:
        return None
    drawn = secrets.token_bytes(4 * SPAN_BYTES)
    return TraceIds(context, *(drawn[at : at + SPAN_BYTES] for at in range(0, len(drawn), SPAN_BYTES)))


class Teller:
    """Tells it."""

    def __init__(self, tracer: Tracer, group: int) -> None:
        self._tracer = tracer
        self._group = group
        self._tier_warnings = TierWarnings()

    def ids(self, packed: bytes) -> TraceIds | None:
        """Of a request that comes with this context (`Submit.trace`); None: nothing is to be told of it."""
        return draw_ids(packed) if packed and self._tracer.is_on else None

    def look(self, engine: Engine, ended: Iterable[Journey], now: float) -> None:
        """Log what a step of the engine has brought: tiers that fail, requests that have ended."""
        self._tier_warnings.look(engine)
        for journey in ended:
            self._log(journey, now)
            if (ids := journey.request.trace) is not None:
                for span in spans_of(journey, ids, self._group, now):
                    self._tracer.emit(span)

    def refused(self, request_id: str, reason: str, detail: str) -> None:
        """A request was not taken on."""
        log.info("request_refused", request_id=request_id, reason=reason, detail=detail)

    def close(self) -> None:
        """Send what has not been sent."""
        self._tracer.close()

    def _log(self, journey: Journey, now: float) -> None:
        request = journey.request
        fields = {"trace_id": request.trace.router.trace_id.hex()} if request.trace is not None else {}
        is_failure = journey.reason == FinishReason.ENGINE_FAILED
        write = log.debug if journey.reason in _REGULAR else log.warning if is_failure else log.info
        write(
            "request_over",
            request_id=request.request_id,
            **fields,
            reason=str(journey.reason),
            prompt_tokens=prompt_tokens(journey),
            cached_tokens=journey.cached_tokens,
            output_tokens=journey.output_tokens,
            duration_s=round(now - journey.came, 4),
        )


def prompt_tokens(journey: Journey) -> int:
    """Tokens of a request's prompt, without its modules'."""
    request = journey.request
    return request.prompt_len if request.prompt_len >= 0 else len(request.tokens)


def spans_of(journey: Journey, ids: TraceIds, group: int, now: float) -> Iterable[Span]:
    """The spans of a request that ends now. Phases that it never came to have none."""
    reason = str(journey.reason)
    is_failure = journey.reason not in _REGULAR
    about: dict[str, Value] = {
        "trunkline.group": group,
        "trunkline.request_id": journey.request.request_id,
        "trunkline.finish": reason,
        "trunkline.prompt_tokens": prompt_tokens(journey),
        "trunkline.output_tokens": journey.output_tokens,
        "trunkline.returns": journey.returns,
    }
    yield Span(
        "generate",
        ids.context(ids.generate),
        ids.router.span_id,
        journey.came,
        now,
        about,
        Kind.SERVER,
        [(at, "workers_lost", {}) for at in journey.losses],
        error=reason if is_failure else "",
    )
    admitted = journey.admitted if journey.admitted >= 0 else now
    yield Span("queue", ids.context(ids.queue), ids.generate, journey.came, admitted, {"trunkline.group": group})
    if journey.admitted < 0:
        return
    computed = journey.first_token if journey.first_token >= 0 else now
    yield _prefill(journey, ids, group, computed)
    if journey.first_token >= 0:
        decode: dict[str, Value] = {"trunkline.group": group, "trunkline.output_tokens": journey.output_tokens}
        yield Span("decode", ids.context(ids.decode), ids.generate, journey.first_token, now, decode)


def _prefill(journey: Journey, ids: TraceIds, group: int, end: float) -> Span:
    attributes: dict[str, Value] = {
        "trunkline.group": group,
        "trunkline.cached_tokens": journey.cached_tokens,
        "trunkline.computed_tokens": journey.computed_tokens,
        "trunkline.steps": journey.chunk_count,
    }
    for kind, tokens in zip(TierKind, journey.tier_tokens, strict=False):
        if tokens:
            attributes[f"trunkline.cached_tokens.{kind.name.lower()}"] = tokens
    events: list[tuple[float, str, dict[str, Value]]] = [
        (at, "chunk", {"trunkline.step": step, "trunkline.tokens": tokens}) for at, step, tokens in journey.chunks
    ]
    return Span(
        "prefill",
        ids.context(ids.prefill),
        ids.generate,
        journey.admitted,
        max(end, journey.admitted),
        attributes,
        events=list(events),
    )
