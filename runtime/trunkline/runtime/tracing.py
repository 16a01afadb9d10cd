"""Trace requests: spans say what each process did for a request, and when.

    HTTP `traceparent` ─► router ─ Submit.trace ─► controller ─ StepPlan.traces ─► workers
                            │                         │                              │
                            └────────── Tracer.emit ──┴──────────────────────────────┘
                                            │  a bounded queue; a thread makes OpenTelemetry's spans of it
                                            ▼
                                     OTLP over HTTP (`tracing_export.py`, only if tracing is on)

Whether a request is traced is decided when it arrives: by its `traceparent` header, or at random. A request that
is not traced carries nothing and costs nothing. A span is emitted when it has ended; its id is drawn at its
beginning, so that other spans can be its children meanwhile. Times are of the monotonic clock, in seconds; they
become wall-clock time by one look at both clocks at the start of the process. Spans as data are in `spans.py`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import time
from collections.abc import Mapping
from typing import Final, Protocol
from urllib.parse import urlsplit

import structlog

from trunkline.runtime.spans import SPAN_BYTES, TRACE_BYTES, Span, SpanContext, is_chosen, parse_traceparent

_ENDPOINT_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_TRACES_PATH: Final = "/v1/traces"

_log = structlog.get_logger("trunkline.tracing")


def child_of(context: SpanContext) -> SpanContext:
    """Return a new span of the same trace."""
    return SpanContext(context.trace_id, secrets.token_bytes(SPAN_BYTES))


class Sink(Protocol):
    """Takes the spans of a process: the export to a collector, or a test."""

    @property
    def exported(self) -> int:
        """Number of spans that a collector has accepted."""

    @property
    def dropped(self) -> int:
        """Number of spans that were lost."""

    def put(self, span: Span) -> None:
        """Take a span, or drop it; never wait."""

    def close(self, seconds_max: float) -> None:
        """Send the spans that wait, for `seconds_max` at most."""


class Tracer:
    """Emits the spans of a process. Without a sink it does nothing, and no request is traced."""

    def __init__(self, sink: Sink | None = None, ratio: float = 1.0) -> None:
        """`ratio` is the part of the requests that are traced, among those whose caller has not decided."""
        self._sink = sink
        self._ratio = ratio

    @property
    def is_on(self) -> bool:
        """Whether spans are recorded and passed to a sink."""
        return self._sink is not None

    @property
    def exported(self) -> int:
        """Number of spans that a collector has accepted."""
        return 0 if self._sink is None else self._sink.exported

    @property
    def dropped(self) -> int:
        """Number of spans that were lost: the queue was full, or no collector accepted them."""
        return 0 if self._sink is None else self._sink.dropped

    def begin(self, traceparent: str) -> tuple[SpanContext, bytes] | None:
        """Return the context of a new request's span, and the id of the caller's span; None if the request is not
        traced."""
        if self._sink is None:
            return None
        caller = parse_traceparent(traceparent) if traceparent else None
        if caller is not None:
            context, is_sampled = caller
            return (child_of(context), context.span_id) if is_sampled else None
        context = SpanContext(secrets.token_bytes(TRACE_BYTES), secrets.token_bytes(SPAN_BYTES))
        return (context, b"") if is_chosen(context.trace_id, self._ratio) else None

    def emit(self, span: Span) -> None:
        """Send a span; never wait."""
        if self._sink is not None:
            self._sink.put(span)

    def close(self, seconds_max: float = 1.0) -> None:
        """Send the spans that wait, for `seconds_max` at most."""
        if self._sink is not None:
            self._sink.close(seconds_max)


OFF: Final = Tracer()


class TracingError(ValueError):
    """Tracing was asked for and is not possible; the text says why."""


def problem_of_endpoint(endpoint: str) -> str:
    """Return what is wrong with an `--otlp-endpoint`; "" if it can be used."""
    if not endpoint:
        return ""
    try:
        parts = urlsplit(endpoint)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_right = False
    if not is_right:
        return f"{endpoint!r} is no URL of a collector, as http://127.0.0.1:4318 is (OTLP over HTTP)"
    if importlib.util.find_spec("opentelemetry") is None or not _has_exporter():
        return "needs OpenTelemetry, which is not installed; pip install 'trunkline[otel]'"
    return ""


def _has_exporter() -> bool:
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    return False


def traces_url(endpoint: str) -> str:
    """Return the URL that spans are sent to: the address of the collector, with the usual path if none is
    given."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + _TRACES_PATH


def is_wanted(endpoint: str, environment: Mapping[str, str]) -> bool:
    """Return whether an option or OpenTelemetry's variables name a collector."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if endpoint:
        return True
    is_off = environment.get("OTEL_TRACES_EXPORTER", "otlp").lower() == "none"
    return not is_off and any(environment.get(name) for name in _ENDPOINT_VARIABLES)


def ratio_of(wanted: float | None, environment: Mapping[str, str]) -> float:
    """Return the part of requests that is traced: by the option, else by OpenTelemetry's variables, else all.

    Raises:
        TracingError: The variables cannot be understood.
    """
    if wanted is not None:
        return wanted
    name = environment.get("OTEL_TRACES_SAMPLER", "always_on").lower().removeprefix("parentbased_")
    if name in ("always_on", "always_off"):
        return float(name == "always_on")
    given = environment.get("OTEL_TRACES_SAMPLER_ARG", "1.0")
    try:
        ratio = float(given)
    except ValueError:
        ratio = -1.0
    if name != "traceidratio" or not 0.0 <= ratio <= 1.0:
        raise TracingError(
            f"OTEL_TRACES_SAMPLER={name} with OTEL_TRACES_SAMPLER_ARG={given} is not known; allowed are "
            "always_on, always_off, and traceidratio with a number from 0 to 1, parentbased_ or not"
        )
    return ratio


def start(endpoint: str, role: str, instance: str, ratio: float | None = None) -> Tracer:
    """Return the tracer of a process.

    Args:
        endpoint: The value of `--otlp-endpoint`; "" to follow OpenTelemetry's environment variables.
        role: "router", "controller" or "worker".
        instance: The process's name among those of its role.
        ratio: The value of `--trace-sample`.

    Raises:
        TracingError: Tracing is not possible.
    """
    if not is_wanted(endpoint, os.environ):
        return OFF
    if problem := problem_of_endpoint(endpoint or "http://127.0.0.1"):
        if endpoint:
            raise TracingError(f"--otlp-endpoint: {problem}")
        _log.warning("traces_off", problem=problem)  # the variables may be meant for others on this machine
        return OFF
    from trunkline.runtime.tracing_export import SpanExport  # noqa: PLC0415

    sink = SpanExport(traces_url(endpoint) if endpoint else None, role, instance, wall_offset_ns())
    return Tracer(sink, ratio_of(ratio, os.environ))


def wall_offset_ns() -> int:
    """Return how many nanoseconds to add to the monotonic clock to get Unix time."""
    return time.time_ns() - time.monotonic_ns()
