"""All metrics of a router: of its HTTP requests, of generations and their tokens, of tenants and of routing.

docs/metrics.md lists them (`docs/generate_metrics.py`). Each `RouterService` has a `Metrics` with its own
registries, so that tests can run several services in one process.

What is measured of every token is only noted at first, and counted by the thousand or at a scrape. The client
library takes locks and walks buckets for each value: that was a fifth of what a token costs a router.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from trunkline.router.routing.request import Decision
from trunkline.router.telemetry.controller_metrics import ControllerCollector, LinkCollector
from trunkline.router.telemetry.handover_metrics import HandoverMetrics
from trunkline.router.telemetry.memory_metrics import MemoryMetrics
from trunkline.router.telemetry.metric_families import (
    Exposition,
    Family,
    FamilyCollector,
    FamilyRegistry,
    exposition,
    joined,
)
from trunkline.router.telemetry.record_metrics import RecordMetrics
from trunkline.router.tenancy.auth import KEY_PREFIX
from trunkline.router.text.prompt_memory import PromptMemory
from trunkline.runtime.tracing import OFF, Tracer

if TYPE_CHECKING:
    from trunkline.router.streams.generation import Generation
    from trunkline.router.streams.link import ControllerLink

_LATENCY: Final = Family(
    "trunkline_inter_token_latency_seconds", "histogram", "Between consecutive tokens of a sequence."
)
_TOKENS: Final = Family("trunkline_output_tokens", "counter", "Output tokens delivered.")
_NOTED_MAX: Final = 4096
LATENCY_BUCKETS: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
TOKEN_TIME_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_LENGTH_BUCKETS: Final = tuple(float(1 << exponent) for exponent in range(18))
TENANT_SERIES_MAX: Final = 200
"""Largest number of tenants with series of their own. The tokens of all later tenants count as `OTHER`."""
UNNAMED: Final = "unnamed"
"""Label of all tenants that are known only by their keys: their number is not bounded, and the name of each would
reveal a part of its key's digest."""
OTHER: Final = "other"
_PROCESS: Final = (
    Family("process_cpu_seconds", "counter", "Processor time that this router process has used."),
    Family("process_resident_memory_bytes", "gauge", "Its resident memory."),
    Family("process_virtual_memory_bytes", "gauge", "Its virtual memory."),
    Family("process_start_time_seconds", "gauge", "When it was started, in seconds since 1970."),
    Family("process_open_fds", "gauge", "Its open files, sockets and the like."),
    Family("process_max_fds", "gauge", "How many it may have."),
)


class TenantLabels:
    """Labels of tenants in metrics: a bounded number of them."""

    def __init__(self, series_max: int = TENANT_SERIES_MAX) -> None:
        self._known: set[str] = set()
        self._series_max = series_max

    def of(self, tenant: str) -> str:
        """Return the label of a tenant."""
        if tenant.startswith(KEY_PREFIX):
            return UNNAMED
        if tenant not in self._known:
            if len(self._known) >= self._series_max:
                return OTHER
            self._known.add(tenant)
        return tenant


class RequestMetrics:
    """Phases, lengths and ends of generations, and the tokens of each tenant."""

    def __init__(self, registry: FamilyRegistry) -> None:
        self.queued = registry.histogram(
            "trunkline_request_queue_seconds",
            "From a generation's arrival at its controller until it was admitted to the batch.",
            LATENCY_BUCKETS,
        )
        self.prefill = registry.histogram(
            "trunkline_request_prefill_seconds",
            "From then until its first token: loading and computing its prompt.",
            LATENCY_BUCKETS,
        )
        self._decode = registry.histogram(
            "trunkline_request_decode_seconds", "From its first token until its last.", LATENCY_BUCKETS
        )
        self._per_token = registry.histogram(
            "trunkline_time_per_output_token_seconds",
            "The same, divided by its tokens but the first: one value for each generation of two tokens or more. "
            "Of several samples the tokens of the longest count.",
            TOKEN_TIME_BUCKETS,
        )
        self._prompt = registry.histogram(
            "trunkline_request_prompt_tokens",
            "Prompt tokens of generations that got a first token.",
            _LENGTH_BUCKETS,
        )
        self._output = registry.histogram(
            "trunkline_request_output_tokens", "Their output tokens, of all samples.", _LENGTH_BUCKETS
        )
        self._finished = registry.counter(
            "trunkline_generations_finished",
            "Generations that are over: stop, length, client_left, timeout, invalid, queue_full, draining, "
            "aborted, failed.",
            ["reason"],
        )
        self._tenant_tokens = registry.counter(
            "trunkline_tenant_tokens",
            "Tokens of generations that are over, by tenant: prompt (cached ones included), cached, output.",
            ["tenant", "kind"],
        )
        self._tenant_generations = registry.counter(
            "trunkline_tenant_generations",
            f"Generations that are over, by tenant; {UNNAMED}: known by a key only; {OTHER}: of more than "
            f"{TENANT_SERIES_MAX} tenants the last.",
            ["tenant"],
        )
        self.truncations = registry.counter(
            "trunkline_truncations",
            "Requests of which a part of the prompt was left out, by what became of the KV behind it: kept, "
            "recomputed.",
            ["kv"],
        )
        self._labels = TenantLabels()

    def ended(self, generation: Generation, tenant: str) -> None:
        """Count a generation that is over."""
        self._finished.labels(generation.outcome).inc()
        label = self._labels.of(tenant)
        self._tenant_generations.labels(label).inc()
        if not generation.steps:
            return
        prompt_tokens = generation.job.seen_tokens
        self._decode.observe(generation.decode_s)
        if generation.steps > 1:
            self._per_token.observe(generation.decode_s / (generation.steps - 1))
        self._prompt.observe(prompt_tokens)
        self._output.observe(generation.output_tokens)
        tokens = self._tenant_tokens
        tokens.labels(label, "prompt").inc(prompt_tokens)
        tokens.labels(label, "cached").inc(generation.cached_tokens)
        tokens.labels(label, "output").inc(generation.output_tokens)


class TokenMetrics(FamilyCollector):
    """Output tokens, and the time between them, in seconds. All calls from one thread."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: upper ends of the histogram's buckets, ascending, in seconds."""
        self.tokens = 0
        """Number of output tokens delivered since the start."""
        self._bounds = np.array(bounds)
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._sum = 0.0
        self._noted: list[float] = []

    def between(self, seconds: float, tokens: int = 1) -> None:
        """Note the time between consecutive output tokens. `seconds`: time per token since the previous arrival.
        `tokens`: number of tokens that arrived together."""
        self._noted.append(seconds)
        for _ in range(tokens - 1):
            self._noted.append(seconds)
        if len(self._noted) >= _NOTED_MAX:
            self._count()

    def _count(self) -> None:
        values = np.array(self._noted)
        self._noted.clear()
        # A value belongs to the first bucket whose upper end is not below it, as in Prometheus.
        buckets = np.searchsorted(self._bounds, values, side="left")
        self._counts += np.bincount(buckets, minlength=len(self._counts))
        self._sum += float(values.sum())

    def families(self) -> Iterable[Family]:
        """Return all families that `collect` may give."""
        return (_LATENCY, _TOKENS)

    def collect(self) -> Iterable[Metric]:
        """Yield the present values of these metrics for Prometheus."""
        self._count()
        ends = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        totals = np.cumsum(self._counts).tolist()
        histogram = HistogramMetricFamily(_LATENCY.name, _LATENCY.text)
        histogram.add_metric([], list(zip(ends, map(float, totals), strict=True)), self._sum)
        yield histogram
        tokens = CounterMetricFamily(_TOKENS.name, _TOKENS.text)
        tokens.add_metric([], float(self.tokens))
        yield tokens


class LiveGauges(NamedTuple):
    """Functions that return the present value of a gauge; each scrape calls them."""

    schemas: Callable[[], int] = lambda: 0
    """Schemas that this router has compiled."""
    running: Callable[[], int] = lambda: 0
    """Generations that have not ended."""
    waiting: Callable[[], int] = lambda: 0
    """Generations that no controller has at present."""
    prompts: Callable[[], PromptMemory] = lambda: PromptMemory(0)
    """The memory for prompts."""


class AdmissionMetrics:
    """Requests that were refused, or answered again, before an endpoint saw them."""

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
    """Which controllers requests were sent to, and how often a request had to go on at another one."""

    def __init__(self, registry: FamilyRegistry) -> None:
        self.decisions = registry.counter(
            "trunkline_routing_decisions",
            "Requests sent to a controller, by it and by the reason for choosing it: prefix (cheapest, some of "
            "the prompt is cached there), load (cheapest), session (its session's last request went there), tail "
            "(the last, open chunk that it goes on with is there), most (most of it is cached there), home "
            "(the home of its schema), only (no other takes it), prefill (it computes the prompt, and the stream "
            "goes on elsewhere), planned (the stream goes on there), or the name of a --policy other than prefix.",
            ["controller", "reason"],
        )
        self._chosen: dict[str, set[tuple[str, str]]] = {}
        """Labels of the series of `decisions`, by the controller's name."""
        self.expected = registry.counter(
            "trunkline_routing_expected_tokens",
            "Prompt tokens of them, by where the index had them: cached (at that controller), peer (only at "
            "others, from which it can pull them), new. A prompt that one group computes for another counts once.",
            ["kv"],
        )
        self.planned = registry.counter(
            "trunkline_planned_continuations",
            "Prompts given to a prefill group, by what followed: went_on (the stream went on where it was "
            "planned), elsewhere (that group was gone), ended (the first token was the last one, or the client "
            "left), or why the prefill group gave the prompt up: engine_failed, draining, queue_full, and so on.",
            ["outcome"],
        )
        self.events = registry.counter(
            "trunkline_dispatches",
            "Streams that lost their controller or found none: resumed (with tokens), retried (without), waited, "
            "gave_up.",
            ["event"],
        )
        self.handovers = HandoverMetrics(registry)

    def chose(self, decision: Decision) -> None:
        """Count a choice of a controller."""
        labels = (decision.name, decision.reason)
        self._chosen.setdefault(decision.name, set()).add(labels)
        self.decisions.labels(*labels).inc()
        if decision.reason == "planned":
            return  # its prompt was counted when it went to the group that computes it
        self.expected.labels("cached").inc(decision.cached_tokens)
        self.expected.labels("peer").inc(decision.pulled_tokens)
        self.expected.labels("new").inc(decision.new_tokens - decision.pulled_tokens)

    def left(self, controller: str) -> None:
        """End the series of a controller that is gone. `controller`: its name."""
        for labels in self._chosen.pop(controller, ()):
            self.decisions.remove(*labels)


class ModuleMetrics:
    """Prompts made of modules, and the schemas that they use."""

    def __init__(self, registry: FamilyRegistry, live: LiveGauges) -> None:
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
    """The metric `trunkline_build_info`: for each model a constant with the running versions as labels."""

    _FAMILY: Final = Family(
        "trunkline_build_info",
        "gauge",
        "Always 1, for each model; the labels say what runs.",
        ("version", "model", "python"),
    )

    def __init__(self, version: str, models: Sequence[str]) -> None:
        self._labels = [(version, model, platform.python_version()) for model in models]

    def families(self) -> Iterable[Family]:
        """Return all families that `collect` may give."""
        return (self._FAMILY,)

    def collect(self) -> Iterable[Metric]:
        """Yield the present values of these metrics for Prometheus."""
        metric = GaugeMetricFamily(self._FAMILY.name, self._FAMILY.text, labels=self._FAMILY.labels)
        for labels in self._labels:
            metric.add_metric(labels, 1.0)
        yield metric


class _Spans(FamilyCollector):
    """Number of spans that the tracer has exported, and number of spans that it has lost."""

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
    """All metrics of one router process. Times are in seconds."""

    def __init__(
        self,
        links: Callable[[], Collection[ControllerLink]],
        live: LiveGauges = LiveGauges(),  # noqa: B008 (immutable)
        *,
        version: str = "",
        models: Sequence[str] = ("",),
    ) -> None:
        """`links`: returns the connections to the controllers. `version`, `models`: for `trunkline_build_info`."""
        self.registry = registry = FamilyRegistry()
        """Families whose values differ between the router processes."""
        self.shared = FamilyRegistry()
        """Families that have the same values in every router process of the cluster."""
        self.shared.register(_Build(version, models))
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
            "Prompts given to a controller, by decoding method (sampling, parallel_sampling, beam_search; "
            "pooling: an embedding is made) and kind of grammar, if any.",
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
        registry.register(MemoryMetrics(live.prompts))
        self.phases = RequestMetrics(registry)
        self.prompt_tokens = registry.counter("trunkline_prompt_tokens", "Prompt tokens of requests that started.")
        self.cached_tokens = registry.counter(
            "trunkline_cached_prompt_tokens", "Of these, tokens whose KV was found."
        )
        self.modules = ModuleMetrics(registry, live)
        self.records = RecordMetrics(registry, self.shared)
        self.tracer = OFF
        """The router's tracer, which records nothing. If traces are on, `create_app` sets another before the first
        request."""
        registry.register(_Spans(lambda: self.tracer))
        registry.foreign(lambda inner: ProcessCollector(registry=inner), _PROCESS)

    def own(self, labels: dict[str, str]) -> Exposition:
        """Return the values that only this process has, with `labels` at each sample."""
        return exposition(self.registry, labels)

    def scrape(self, own: Iterable[Exposition] | None = None) -> bytes:
        """Return all values in Prometheus' text form.

        Args:
            own: the results of `own` from all router processes; None: this is the only process.
        """
        parts = [self.own({})] if own is None else own
        return joined([exposition(self.shared, {}), *parts])
