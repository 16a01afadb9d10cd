"""Log a line for each request of a controller that has ended, and emit spans for requests that are traced.

      dispatch (the router's)
      └─ generate      the request in this controller
         ├─ queue      until its admission
         ├─ prefill    until its first token; an event for each step that computes a part of it
         └─ decode     until its last

The engine's times are those of the monotonic clock.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Final

import structlog

from trunkline.controller.engine.engine import Engine
from trunkline.controller.engine.events import RequestTimeline
from trunkline.controller.sequences.sequence import TraceIds
from trunkline.kvstore.tier import TierKind
from trunkline.router.messages import FinishReason
from trunkline.runtime.spans import SPAN_BYTES, Kind, Span, Value, unpack_context
from trunkline.runtime.tracing import Tracer

_REGULAR: Final = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)
log = structlog.get_logger()


def draw_ids(packed: bytes) -> TraceIds | None:
    """Draw ids for a request's spans, below the router's span (`Submit.trace`); None if it is not traced."""
    context = unpack_context(packed)
    if context is None:
        return None
    drawn = secrets.token_bytes(4 * SPAN_BYTES)
    return TraceIds(context, *(drawn[at : at + SPAN_BYTES] for at in range(0, len(drawn), SPAN_BYTES)))


class RequestLog:
    """Logs the requests that end and the tiers that fail; emits the spans of traced requests."""

    def __init__(self, tracer: Tracer, group: str) -> None:
        """`group`: the group's name."""
        self._tracer = tracer
        self._group = group
        self._tier_problems: dict[TierKind, str] = {}
        """The problem that each tier had at the last look; "": it had none."""
        self._said_lost = False

    def ids(self, packed: bytes) -> TraceIds | None:
        """Return span ids for a request with this trace context (`Submit.trace`); None if it is not traced."""
        return draw_ids(packed) if packed and self._tracer.is_on else None

    def look(self, engine: Engine, ended: Iterable[RequestTimeline], now: float) -> None:
        """Log the tiers that fail and the requests that have ended since the last step of the engine."""
        self._look_at_tiers(engine)
        for timeline in ended:
            self._log(timeline, now)
            if (ids := timeline.request.trace) is not None:
                for span in spans_of(timeline, ids, self._group, now):
                    self._tracer.emit(span)

    def _look_at_tiers(self, engine: Engine) -> None:
        """Log each new problem of a tier once."""
        for tier, health in engine.scheduler.kv.tree.tiers.health.items():
            before, self._tier_problems[tier] = self._tier_problems.get(tier, ""), health.problem
            if health.problem and not before:
                log.warning(
                    "a tier fails; it is left alone for a while", tier=tier.name.lower(), problem=health.problem
                )
            elif before and not health.problem:
                log.info("a tier works again", tier=tier.name.lower())
        if engine.counters.lost_chunks and not self._said_lost:
            self._said_lost = True
            log.warning("a tier did not hold a chunk whole, which is computed again; from now on only counted")

    def refused(self, request_id: str, reason: str, detail: str) -> None:
        """Log that a request was refused."""
        log.info("request_refused", request_id=request_id, reason=reason, detail=detail)

    def close(self) -> None:
        """Send the spans that have not been sent yet."""
        self._tracer.close()

    def _log(self, timeline: RequestTimeline, now: float) -> None:
        request = timeline.request
        fields = {"trace_id": request.trace.router.trace_id.hex()} if request.trace is not None else {}
        is_failure = timeline.reason == FinishReason.ENGINE_FAILED
        write = log.debug if timeline.reason in _REGULAR else log.warning if is_failure else log.info
        write(
            "request_over",
            request_id=request.submit.request_id,
            **fields,
            reason=str(timeline.reason),
            prompt_tokens=request.submit.prompt_len,
            cached_tokens=timeline.cached_tokens,
            output_tokens=timeline.output_tokens,
            duration_s=round(now - timeline.came, 4),
        )


def spans_of(timeline: RequestTimeline, ids: TraceIds, group: str, now: float) -> Iterable[Span]:
    """Return the spans of a request that ends now. Phases that it did not reach have no span."""
    reason = str(timeline.reason)
    is_failure = timeline.reason not in _REGULAR
    about: dict[str, Value] = {
        "trunkline.group": group,
        "trunkline.request_id": timeline.request.submit.request_id,
        "trunkline.finish": reason,
        "trunkline.prompt_tokens": timeline.request.submit.prompt_len,
        "trunkline.output_tokens": timeline.output_tokens,
        "trunkline.returns": timeline.returns,
    }
    yield Span(
        "generate",
        ids.context(ids.generate),
        ids.router.span_id,
        timeline.came,
        now,
        about,
        Kind.SERVER,
        [(at, "workers_lost", {}) for at in timeline.losses],
        error=reason if is_failure else "",
    )
    admitted = timeline.admitted if timeline.admitted >= 0 else now
    yield Span("queue", ids.context(ids.queue), ids.generate, timeline.came, admitted, {"trunkline.group": group})
    if timeline.admitted < 0:
        return
    computed = timeline.first_token if timeline.first_token >= 0 else now
    yield _prefill(timeline, ids, group, computed)
    if timeline.first_token >= 0:
        decode: dict[str, Value] = {"trunkline.group": group, "trunkline.output_tokens": timeline.output_tokens}
        yield Span("decode", ids.context(ids.decode), ids.generate, timeline.first_token, now, decode)


def _prefill(timeline: RequestTimeline, ids: TraceIds, group: str, end: float) -> Span:
    attributes: dict[str, Value] = {
        "trunkline.group": group,
        "trunkline.cached_tokens": timeline.cached_tokens,
        "trunkline.computed_tokens": timeline.computed_tokens,
        "trunkline.steps": timeline.chunk_count,
    }
    for kind, tokens in zip(TierKind, timeline.tier_tokens, strict=False):
        if tokens:
            attributes[f"trunkline.cached_tokens.{kind.name.lower()}"] = tokens
    events: list[tuple[float, str, dict[str, Value]]] = [
        (at, "chunk", {"trunkline.step": step, "trunkline.tokens": tokens}) for at, step, tokens in timeline.chunks
    ]
    return Span(
        "prefill",
        ids.context(ids.prefill),
        ids.generate,
        timeline.admitted,
        max(end, timeline.admitted),
        attributes,
        events=list(events),
    )
