"""Send spans to a collector: a bounded queue, and a thread that makes OpenTelemetry's spans of them.

Imported only where tracing is on. Whatever the collector does, the process that emits spans only appends to a
queue; spans that do not fit, or that no collector takes, are dropped and counted.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import threading
import time
from collections import deque
from typing import Final

import structlog
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Link, NonRecordingSpan, SpanKind, Status, StatusCode, TraceFlags

from trunkline.runtime.spans import Kind, Span, SpanContext

QUEUE_MAX: Final = 8192
"""Largest number of spans that wait to be sent: those of a busy router for some seconds, in a few megabytes."""
BATCH_MAX: Final = 512
EVERY_SECONDS: Final = 1.0
_WARN_SECONDS: Final = 60.0
_KINDS: Final = {Kind.INTERNAL: SpanKind.INTERNAL, Kind.SERVER: SpanKind.SERVER, Kind.CLIENT: SpanKind.CLIENT}
_log = structlog.get_logger("trunkline.tracing")


class _GivenIds(IdGenerator):
    """An OpenTelemetry id generator that returns the ids in `next`, which Trunkline drew when the span began."""

    def __init__(self) -> None:
        self.next = SpanContext(b"", b"")

    def generate_span_id(self) -> int:
        return int.from_bytes(self.next.span_id, "big")

    def generate_trace_id(self) -> int:
        return int.from_bytes(self.next.trace_id, "big")


class _Batch(SpanProcessor):
    """Collects spans that are sent together."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


class SpanExport:
    """The queue of spans, and the thread that sends them."""

    def __init__(self, url: str | None, role: str, instance: str, wall_offset_ns: int) -> None:
        """
        Args:
            url: The URL that spans are sent to; None: the one in OpenTelemetry's environment variables.
            role: The process's role, which with `instance` names it in the collector.
            wall_offset_ns: Nanoseconds to add to the monotonic clock's time to get Unix time.
        """
        self.exported = 0
        """Number of spans that a collector has accepted."""
        self._refused = 0
        self._lost = 0
        self._queue: deque[Span] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._offset_ns = wall_offset_ns
        self._ids = _GivenIds()
        self._batch = _Batch()
        # Its own lines would be plain text among ours; the counts, and a line a minute, say the same.
        logging.getLogger("opentelemetry").addHandler(logging.NullHandler())
        logging.getLogger("opentelemetry").propagate = False
        self._exporter = OTLPSpanExporter(endpoint=url)
        provider = TracerProvider(
            sampler=ALWAYS_ON, resource=_resource(role, instance), shutdown_on_exit=False, id_generator=self._ids
        )
        provider.add_span_processor(self._batch)
        self._tracer = provider.get_tracer("trunkline", importlib.metadata.version("trunkline"))
        self._warned_at = float("-inf")
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Number of spans that were lost: too many waited, or no collector accepted them."""
        return self._refused + self._lost

    def put(self, span: Span) -> None:
        """Take a span, or drop it if too many wait. Never wait; from any thread."""
        if len(self._queue) >= QUEUE_MAX or self._closing:
            self._refused += 1
            return
        self._queue.append(span)
        if len(self._queue) == BATCH_MAX:
            self._wake.set()

    def close(self, seconds_max: float) -> None:
        """Send the spans that wait, for `seconds_max` at most, and drop the rest."""
        self._closing = True
        self._wake.set()
        self._thread.join(seconds_max)
        self._refused += len(self._queue)
        self._queue.clear()

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(EVERY_SECONDS)
            self._wake.clear()
            self._send_all()
        self._send_all()

    def _send_all(self) -> None:
        while self._queue:
            for _ in range(min(len(self._queue), BATCH_MAX)):
                self._make(self._queue.popleft())
            self._send()

    def _send(self) -> None:
        spans, self._batch.spans = self._batch.spans, []
        try:
            is_sent = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception as error:  # noqa: BLE001 (whatever a collector answers, this thread goes on)
            _log.debug("export_failed", error=type(error).__name__)
            is_sent = False
        if is_sent:
            self.exported += len(spans)
            return
        self._lost += len(spans)
        now = time.monotonic()
        if now - self._warned_at >= _WARN_SECONDS:
            self._warned_at = now
            _log.warning("spans_dropped", dropped=self.dropped, exported=self.exported)

    def _make(self, span: Span) -> None:
        self._ids.next = span.context
        parent = trace.set_span_in_context(NonRecordingSpan(_outer(span.context.trace_id, span.parent)))
        made = self._tracer.start_span(
            span.name,
            context=parent if span.parent else None,
            kind=_KINDS[span.kind],
            attributes=span.attributes,
            links=[Link(_outer(link.trace_id, link.span_id)) for link in span.links],
            start_time=self._wall_ns(span.start),
        )
        for at, name, attributes in span.events:
            made.add_event(name, attributes, self._wall_ns(at))
        if span.error:
            made.set_attribute("error.type", span.error)
            made.set_status(Status(StatusCode.ERROR, span.error))
        made.end(self._wall_ns(max(span.start, span.end)))

    def _wall_ns(self, monotonic: float) -> int:
        return self._offset_ns + int(monotonic * 1e9)


def _outer(trace_id: bytes, span_id: bytes) -> trace.SpanContext:
    return trace.SpanContext(
        int.from_bytes(trace_id, "big"),
        int.from_bytes(span_id, "big"),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )


def _resource(role: str, instance: str) -> Resource:
    """Return the description of this process; the environment's values go first."""
    own: dict[str, str | int] = {
        "service.name": f"trunkline-{role}",
        "service.namespace": "trunkline",
        "service.version": importlib.metadata.version("trunkline"),
        "service.instance.id": instance,
        "process.pid": os.getpid(),
        "trunkline.role": role,
    }
    return Resource.create(own).merge(OTELResourceDetector().detect())
