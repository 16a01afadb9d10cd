"""Traces: which requests have one, and the way of their spans to a collector that may be slow, wrong or gone."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from otlp_collector import Collector
from runtime.kept_spans import KeptSpans

from trunkline.runtime import tracing, tracing_export
from trunkline.runtime.spans import (
    Kind,
    Span,
    SpanContext,
    StepTrace,
    is_chosen,
    pack_steps,
    parse_traceparent,
    unpack_context,
    unpack_steps,
)
from trunkline.runtime.tracing import (
    OFF,
    Tracer,
    TracingError,
    child_of,
    is_wanted,
    problem_of_endpoint,
    ratio_of,
    traces_url,
)
from trunkline.runtime.tracing_export import SpanExport

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def span(name: str = "x") -> Span:
    context = SpanContext(secrets.token_bytes(16), secrets.token_bytes(8))
    return Span(name, context, b"", 1.0, 2.0, {"a": 1})


# -- who is traced


@pytest.mark.parametrize(
    ("header", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),
        (f"  00-{TRACE}-{SPAN}-01 ", True),
        (f"42-{TRACE}-{SPAN}-01-what-later-versions-add", True),
    ],
)
def test_callers_that_say_whether_they_are_traced(header: str, sampled: bool) -> None:
    assert parse_traceparent(header) == (SpanContext(bytes.fromhex(TRACE), bytes.fromhex(SPAN)), sampled)
    begun = Tracer(KeptSpans(), ratio=0.0).begin(header)
    assert (begun is not None) == sampled
    if begun is not None:
        context, parent = begun
        assert context.trace_id.hex() == TRACE
        assert parent.hex() == SPAN != context.span_id.hex()


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-0g",
        "00-" * 10_000,
    ],
)
def test_callers_that_say_nothing_that_can_be_used(header: str) -> None:
    assert parse_traceparent(header) is None
    assert Tracer(KeptSpans(), ratio=0.0).begin(header) is None
    begun = Tracer(KeptSpans(), ratio=1.0).begin(header)
    assert begun is not None
    assert begun[1] == b""


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=8, max_size=8))
def test_contexts_travel_as_they_are(trace: bytes, own: bytes) -> None:
    context = SpanContext(trace, own)
    assert unpack_context(context.pack()) == context
    if any(trace) and any(own):
        assert parse_traceparent(context.traceparent) == (context, True)


@given(
    st.lists(st.tuples(st.binary(min_size=16, max_size=16), st.integers(0, 2**31 - 1)), max_size=5), st.binary()
)
def test_parts_of_steps_travel_as_they_are(parts: list[tuple[bytes, int]], rest: bytes) -> None:
    steps = [StepTrace(SpanContext(trace, trace[:8]), trace[8:], number, number) for trace, number in parts]
    assert list(unpack_steps(pack_steps(steps))) == steps
    assert list(unpack_steps(pack_steps(steps) + rest[:39])) == steps, "what is damaged is left out"


@pytest.mark.parametrize("packed", [b"", b"x", bytes(23), bytes(25)])
def test_what_is_no_context(packed: bytes) -> None:
    assert unpack_context(packed) is None


def test_as_many_are_chosen_as_were_asked_for() -> None:
    traces = [((number * 0x9E3779B97F4A7C15) % 2**64).to_bytes(16, "big") for number in range(4096)]
    for ratio in (0.0, 0.1, 0.5, 1.0):
        count = sum(is_chosen(trace, ratio) for trace in traces)
        assert abs(count - ratio * len(traces)) < 100
    assert {t for t in traces if is_chosen(t, 0.1)} <= {t for t in traces if is_chosen(t, 0.5)}


def test_nothing_is_traced_where_nobody_listens() -> None:
    assert OFF.begin(f"00-{TRACE}-{SPAN}-01") is None
    OFF.emit(span())
    OFF.close()
    assert (OFF.is_on, OFF.exported, OFF.dropped) == (False, 0, 0)


# -- settings


def test_where_spans_go() -> None:
    variable = "OTEL_EXPORTER_OTLP_ENDPOINT"
    assert not is_wanted("", {})
    assert is_wanted("http://h:1", {})
    assert is_wanted("", {variable: "http://h:1"})
    assert is_wanted("", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://h:1"})
    assert not is_wanted("", {variable: "http://h:1", "OTEL_TRACES_EXPORTER": "none"})
    assert not is_wanted("http://h:1", {"OTEL_SDK_DISABLED": "TRUE"})
    assert traces_url("http://h:4318") == traces_url("http://h:4318/") == "http://h:4318/v1/traces"
    assert traces_url("http://h:4318/my/path") == "http://h:4318/my/path"


@pytest.mark.parametrize("endpoint", ["h:4318", "ftp://h", "http://", "http://[::1", "http://h:0", "http://h:x"])
def test_addresses_that_are_none(endpoint: str) -> None:
    assert "is no URL of a collector" in problem_of_endpoint(endpoint)


def test_opentelemetry_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_has_exporter", lambda: False)
    assert "pip install 'trunkline[otel]'" in problem_of_endpoint("http://127.0.0.1:4318")
    with pytest.raises(TracingError, match="not installed"):
        tracing.start("http://127.0.0.1:4318", "router", "r")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    assert tracing.start("", "router", "r") is OFF, "the variable may be meant for others"


def test_how_many_are_traced() -> None:
    name, value = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"
    assert ratio_of(0.25, {name: "always_off"}) == 0.25
    assert ratio_of(None, {}) == 1.0
    assert ratio_of(None, {name: "always_off"}) == 0.0
    assert ratio_of(None, {name: "parentbased_traceidratio", value: "0.5"}) == 0.5
    for wrong in ({name: "jaeger_remote"}, {name: "traceidratio", value: "2"}, {name: "traceidratio", value: "x"}):
        with pytest.raises(TracingError, match="OTEL_TRACES_SAMPLER"):
            ratio_of(None, wrong)


# -- to the collector


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def test_spans_arrive_as_they_were(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=mine,team=harbor")
    tracer = tracing.start(collector.endpoint, "router", "router-7")
    begun = tracer.begin(f"00-{TRACE}-{SPAN}-01")
    assert begun is not None
    context, parent = begun
    child = child_of(context)
    events = [(1.5, "half", {"n": 1})]
    other = SpanContext(bytes(15) + b"\1", bytes(7) + b"\2")
    tracer.emit(Span("inner", child, context.span_id, 1.25, 1.75, {"b": True, "f": 0.5, "l": ["x", "y"]}))
    outermost = Span("outer", context, parent, 1.0, 2.0, {"n": 3}, Kind.SERVER, [*events], [other], error="no")
    tracer.emit(outermost)
    tracer.close(10.0)
    assert (tracer.exported, tracer.dropped) == (2, 0)
    inner, outer = collector.of(TRACE)
    assert (inner.service, inner.instance) == ("mine", "router-7")
    assert (inner.id, inner.parent) == (child.span_id, context.span_id)
    assert inner.attributes == {"b": True, "f": 0.5, "l": ["x", "y"]}
    assert (outer.id, outer.parent.hex()) == (context.span_id, SPAN)
    assert outer.attributes == {"n": 3, "error.type": "no"}
    assert outer.is_error
    assert outer.span.kind == 2, "a server's"
    assert [link.trace_id for link in outer.span.links] == [other.trace_id]
    start, [event] = outer.span.start_time_unix_nano, outer.span.events
    assert outer.span.end_time_unix_nano - start == 1_000_000_000
    assert event.time_unix_nano - start == 500_000_000
    assert abs(start - 1_000_000_000 - tracing.wall_offset_ns()) < 10**9


@pytest.mark.parametrize("path", [None, "/nowhere"], ids=["not there", "answers with an error"])
def test_a_collector_that_takes_nothing_costs_spans_only(
    path: str | None, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}" if path is None else f"{collector.endpoint}{path}"
    tracer = tracing.start(endpoint, "router", "r")
    for _ in range(3):
        tracer.emit(span())
    tracer.close(10.0)
    assert (tracer.exported, tracer.dropped) == (0, 3)
    tracer.emit(span())
    assert tracer.dropped == 4, "what comes after the end is counted, too"


def test_a_collector_that_hangs_costs_spans_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes connections and never answers. What comes meanwhile waits, up to a limit; then it is dropped."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "10")
    monkeypatch.setattr(tracing_export, "QUEUE_MAX", 100)
    monkeypatch.setattr(tracing_export, "EVERY_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        export = SpanExport(f"http://127.0.0.1:{frozen.getsockname()[1]}/v1/traces", "router", "r", 0)
        export.put(span())
        connection, _ = frozen.accept()  # it is being sent
        with connection:
            for _ in range(250):
                export.put(span())
            assert export.dropped == 150
            export.close(0.05)
            assert export.exported == 0
            assert export.dropped >= 150 + 100


def test_many_threads_may_emit(collector: Collector) -> None:
    tracer = tracing.start(collector.endpoint, "router", "r")

    def emit() -> None:
        for _ in range(300):
            tracer.emit(span())

    threads = [threading.Thread(target=emit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tracer.close(20.0)
    assert (tracer.exported, tracer.dropped) == (1200, 0)
    assert len({seen.id for seen in collector.spans}) == 1200
