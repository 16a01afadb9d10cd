"""The router's metrics. One registry per service, so that tests can have several in a process.

docs/metrics.md lists all of it (`docs/generate_metrics.py`).
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from trunkline.router.routing.request import Decision
from trunkline.router.telemetry.controller_metrics import ControllerCollector, LinkCollector, MeasuredLink
from trunkline.router.telemetry.metric_families import (
    Exposition,
    Family,
    FamilyCollector,
    FamilyRegistry,
    exposition,
    joined,
)
from trunkline.router.telemetry.request_metrics import (
    LATENCY_BUCKETS,
    TOKEN_TIME_BUCKETS,
    RequestMetrics,
    TokenMetrics,
)
from trunkline.runtime.tracing import OFF, Tracer

_PROCESS: Final = (
    Family("process_cpu_seconds", "counter", "Processor time that this router process has used."),
    Family("process_resident_memory_bytes", "gauge", "Its resident memory."),
    Family("process_virtual_memory_bytes", "gauge", "Its virtual memory."),
    Family("process_start_time_seconds", "gauge", "When it was started, in seconds since 1970."),
    Family("process_open_fds", "gauge", "Its open files, sockets and the like."),
    Family("process_max_fds", "gauge", "How many it may have."),
)


class Live(NamedTuple):
    """What is asked for at each scrape."""

    schemas: Callable[[], int] = lambda: 0
    """Schemas that are ready for use."""
    running: Callable[[], int] = lambda: 0
    """Generations that have not ended."""
    waiting: Callable[[], int] = lambda: 0
    """Of them, those that no controller has."""


class AdmissionMetrics:
    """What happens to requests before an endpoint sees them."""

    def __init__(self, registry: FamilyRegistry) -> None:
        self.refused = registry.counter(
            "trunkline_rate_limited",
            "Requests that were refused because of a limit of their tenant, by limit.",
            ["limit"],
        )
        self.keys = registry.counter(
            "trunkline_idempotent_requests",
            "Requests with an Idempotency-Key: new, replayed, refused, unavailable (answered without a record).",
            ["result"],
        )
        self.denied = registry.counter(
            "trunkline_access_refused",
            "Requests that were not let in, by status: 401 (no key that is known), 403 (a key that is not for "
            "this, or a page of somebody else's), 404 (no such endpoint), 400 and 415.",
            ["status"],
        )


class RoutingMetrics:
    """Where requests go, and where they go on."""

    def __init__(self, registry: FamilyRegistry) -> None:
        self.decisions = registry.counter(
            "trunkline_routing_decisions",
            "Requests sent to a controller, by it and by the reason for choosing it: prefix (cheapest, some of "
            "the prompt is cached there), load (cheapest), session (its session's last request went there), home "
            "(its record is there), only (no other takes it), or the name of a --policy other than prefix.",
            ["controller", "reason"],
        )
        self.expected = registry.counter(
            "trunkline_routing_expected_tokens",
            "Prompt tokens of them, by whether the index had them at that controller: cached, new.",
            ["kv"],
        )
        self.events = registry.counter(
            "trunkline_dispatches",
            "Streams that lost their controller or found none: resumed (with tokens), retried (without), waited, "
            "gave_up.",
            ["event"],
        )

    def chose(self, decision: Decision) -> None:
        """Count a choice of a controller."""
        self.decisions.labels(str(decision.controller), decision.reason).inc()
        self.expected.labels("cached").inc(decision.cached_tokens)
        self.expected.labels("new").inc(decision.new_tokens)


class ModuleMetrics:
    """Prompts made of modules."""

    def __init__(self, registry: FamilyRegistry, live: Live) -> None:
        self.requests = registry.counter(
            "trunkline_module_requests", "Prompts with modules that were given to a controller."
        )
        self.tokens = registry.counter(
            "trunkline_module_prompt_tokens", "Prompt tokens of requests that started that are modules'."
        )
        self.errors = registry.counter(
            "trunkline_pml_errors", "Schemas and prompts that were refused, by code.", ["code"]
        )
        registry.gauge(
            "trunkline_schemas_cached",
            "Schemas that this router has compiled.",
            lambda: float(live.schemas()),
        )


class _Build(FamilyCollector):
    """What runs here."""

    _FAMILY: Final = Family(
        "trunkline_build_info", "gauge", "Always 1; the labels say what runs.", ("version", "model", "python")
    )

    def __init__(self, version: str, model: str) -> None:
        self._labels = (version, model, platform.python_version())

    def families(self) -> Iterable[Family]:
        """Return all families that `collect` may give."""
        return (self._FAMILY,)

    def collect(self) -> Iterable[Metric]:
        """Yield the present values of these metrics for Prometheus."""
        metric = GaugeMetricFamily(self._FAMILY.name, self._FAMILY.text, labels=self._FAMILY.labels)
        metric.add_metric(self._labels, 1.0)
        yield metric


class _Spans(FamilyCollector):
    """Of traces."""

    _EXPORTED: Final = Family("trunkline_spans_exported", "counter", "Spans that a collector has taken.")
    _DROPPED: Final = Family(
        "trunkline_spans_dropped", "counter", "Spans that were lost: too many waited, or no collector took them."
    )

    def __init__(self, tracer: Callable[[], Tracer]) -> None:
        self._tracer = tracer

    def families(self) -> Iterable[Family]:
        """Return all families that `collect` may give."""
        return (self._EXPORTED, self._DROPPED)

    def collect(self) -> Iterable[Metric]:
        """Yield the present values of these metrics for Prometheus."""
        tracer = self._tracer()
        yield CounterMetricFamily(self._EXPORTED.name, self._EXPORTED.text, tracer.exported)
        yield CounterMetricFamily(self._DROPPED.name, self._DROPPED.text, tracer.dropped)


class Metrics:
    """The router's own numbers. Times in seconds."""

    def __init__(
        self,
        links: Callable[[], Sequence[MeasuredLink]],
        live: Live = Live(),  # noqa: B008 (immutable)
        *,
        version: str = "",
        model: str = "",
    ) -> None:
        """At the time of a scrape, `links` gives the controllers. `version` and `model` say what runs."""
        self.registry = registry = FamilyRegistry()
        """What this process alone can tell."""
        self.shared = FamilyRegistry()
        """What every router of the cluster tells alike."""
        self.shared.register(_Build(version, model))
        self.shared.register(ControllerCollector(links))
        registry.register(LinkCollector(links))
        self.admission = AdmissionMetrics(registry)
        self.requests = registry.counter(
            "trunkline_requests",
            "HTTP requests answered, by route and status (499: the client left; endpoint other: any other path).",
            ["endpoint", "status"],
        )
        self.generations = registry.counter(
            "trunkline_generations",
            "Prompts given to a controller, by decoding method (sampling, parallel_sampling, beam_search) and "
            "kind of grammar, if any.",
            ["method", "grammar"],
        )
        registry.gauge(
            "trunkline_generations_running",
            "Generations that this router works on.",
            lambda: float(live.running()),
        )
        registry.gauge(
            "trunkline_generations_waiting",
            "Of them, those that no controller has at present: they wait for one.",
            lambda: float(live.waiting()),
        )
        self.routing = RoutingMetrics(registry)
        self.first_token = registry.histogram(
            "trunkline_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            LATENCY_BUCKETS,
        )
        self.per_token = TokenMetrics(TOKEN_TIME_BUCKETS)
        registry.register(self.per_token)
        self.end_to_end = registry.histogram(
            "trunkline_request_duration_seconds",
            "From a generation request's arrival to its regular end.",
            LATENCY_BUCKETS,
        )
        self.phases = RequestMetrics(registry)
        self.prompt_tokens = registry.counter("trunkline_prompt_tokens", "Prompt tokens of requests that started.")
        self.cached_tokens = registry.counter(
            "trunkline_cached_prompt_tokens", "Of these, tokens whose KV was found."
        )
        self.truncations = registry.counter(
            "trunkline_truncations",
            "Requests of which a part of the prompt was left out, by what became of the KV behind it: kept, "
            "recomputed.",
            ["kv"],
        )
        self.modules = ModuleMetrics(registry, live)
        self.tracer = OFF
        """Set by whoever starts one, before the first request."""
        registry.register(_Spans(lambda: self.tracer))
        registry.foreign(lambda inner: ProcessCollector(registry=inner), _PROCESS)

    def own(self, labels: dict[str, str]) -> Exposition:
        """Return this process's own values, with `labels` at each sample."""
        return exposition(self.registry, labels)

    def scrape(self, own: Iterable[Exposition] | None = None) -> bytes:
        """Return all values in Prometheus' text form; `own` of all router processes, or of this one only."""
        parts = [self.own({})] if own is None else own
        return joined([exposition(self.shared, {}), *parts])
