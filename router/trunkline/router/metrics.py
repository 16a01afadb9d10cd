"""What Prometheus gets to see. One registry per service, so that tests can have several in a process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trunkline.router.link import ControllerLink
from trunkline.router.routing.request import Decision
from trunkline.router.token_metrics import TokenMetrics

_LATENCY_BUCKETS: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
_TOKEN_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)

_GAUGES: Final = (
    ("running", "requests_running", "Requests in the controller's batch."),
    ("waiting", "requests_waiting", "Requests waiting for admission."),
    ("blocks_total", "blocks_total", "Device blocks of the KV pool."),
    ("blocks_free", "blocks_free", "Device blocks that hold nothing."),
    ("blocks_cached", "blocks_cached", "Device blocks with reusable KV that no running request holds."),
    ("blocks_logical", "blocks_logical", "Device blocks that running sequences would hold if they shared none."),
    ("host_slots", "host_slots", "Blocks that the host pool holds."),
    ("host_slots_free", "host_slots_free", "Of these, slots that hold nothing."),
    ("texts_encoding", "texts_encoding", "Texts of modules that are being computed, or wait for it."),
    ("chunks_pinned", "chunks_pinned", "Chunks of schemas that are pinned."),
    ("max_rows", "max_rows", "Sequences that can decode at once."),
    ("max_context", "max_context_tokens", "Longest prompt + output this group can hold, in tokens."),
)
_COUNTERS: Final = (
    ("prompt_tokens", "prompt_tokens", "Prompt tokens admitted."),
    ("cached_tokens", "cached_tokens", "Prompt tokens whose KV was found."),
    ("output_tokens", "output_tokens", "Tokens sampled."),
    ("preemptions", "preemptions", "Requests that lost their blocks for a while."),
    ("steps", "steps", "Forward passes."),
    ("plan_copies", "plan_copies", "Forward passes for which the decode plan was rebuilt."),
    ("kv_bytes_read", "kv_read_bytes", "KV read by decode attention on rank 0."),
    ("forks", "forks", "Samples and beams that came out of another's prompt."),
    ("swapped", "swapped", "Preemptions that chose the host pool."),
    ("blocks_saved", "blocks_saved", "Device blocks copied to the host pool."),
    ("texts_encoded", "texts_encoded", "Texts of modules that were computed."),
    ("text_tokens_encoded", "text_tokens_encoded", "Their tokens."),
    ("blocks_loaded", "blocks_loaded", "Device blocks copied back from the host pool."),
    ("evicted_blocks", "evicted_blocks", "Cached blocks given up for others."),
)
_TIERS: Final[tuple[tuple[type[GaugeMetricFamily] | type[CounterMetricFamily], str, str, str], ...]] = (
    (GaugeMetricFamily, "problem", "up", "1 if the tier is used at present."),
    (GaugeMetricFamily, "slots", "slots", "Chunks that the tier can hold; 0: not known."),
    (GaugeMetricFamily, "used", "slots_used", "Chunks that it holds."),
    (CounterMetricFamily, "hit_tokens", "hit_tokens", "Prompt tokens found there."),
    (CounterMetricFamily, "writes", "writes", "Chunks moved into it."),
    (CounterMetricFamily, "reads", "reads", "Chunks moved out of it towards the device."),
    (CounterMetricFamily, "evictions", "evictions", "Chunks that made room or whose time was over."),
    (CounterMetricFamily, "failures", "failures", "Moves that failed, and reads that did not verify."),
)


class _ControllerCollector(Collector):
    """The controllers' last `State`, read when Prometheus asks."""

    def __init__(self, links: Callable[[], Sequence[ControllerLink]]) -> None:
        self._links = links

    def collect(self) -> Iterable[Metric]:
        ready = GaugeMetricFamily(
            "trunkline_controller_ready", "1 if the controller takes requests.", labels=["controller"]
        )
        inflight = GaugeMetricFamily(
            "trunkline_controller_inflight", "Requests of this router at the controller.", labels=["controller"]
        )
        links = self._links()
        for link in links:
            ready.add_metric([str(link.index)], float(link.ready))
            inflight.add_metric([str(link.index)], float(link.inflight))
        yield ready
        yield inflight
        for field, name, text in _GAUGES:
            yield self._family(GaugeMetricFamily, field, name, text, links)
        for field, name, text in _COUNTERS:
            yield self._family(CounterMetricFamily, field, name, text, links)
        yield from _tier_families(links)

    @staticmethod
    def _family(
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        field: str,
        name: str,
        text: str,
        links: Sequence[ControllerLink],
    ) -> Metric:
        family = kind(f"trunkline_controller_{name}", text, labels=["controller"])
        for link in links:
            if link.state is not None:
                family.add_metric([str(link.index)], float(getattr(link.state, field)))
        return family


def _tier_families(links: Sequence[ControllerLink]) -> Iterable[Metric]:
    """What the controllers say of their tiers, and why prompts were not found in them."""
    states = [(str(link.index), link.state) for link in links if link.state is not None]
    for kind, field, name, text in _TIERS:
        family = kind(f"trunkline_tier_{name}", text, labels=["controller", "tier"])
        for controller, state in states:
            for tier in state.tiers:
                value = not tier.problem if field == "problem" else getattr(tier, field)
                family.add_metric([controller, tier.name], float(value))
        yield family
    misses = CounterMetricFamily(
        "trunkline_prefix_miss",
        "Requests part of whose prompt was in no tier, by the reason.",
        labels=["controller", "reason"],
    )
    for controller, state in states:
        for reason, count in sorted(state.misses.items()):
            misses.add_metric([controller, reason], float(count))
    yield misses


class AdmissionMetrics:
    """What happens to requests before an endpoint sees them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.refused = Counter(
            "trunkline_rate_limited",
            "Requests that were refused because of a limit of their tenant, by limit.",
            ["limit"],
            registry=registry,
        )
        self.keys = Counter(
            "trunkline_idempotent_requests",
            "Requests with an Idempotency-Key: new, replayed, refused, unavailable (answered without a record).",
            ["result"],
            registry=registry,
        )


class RoutingMetrics:
    """Where requests go, and where they go on."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.decisions = Counter(
            "trunkline_routing_decisions",
            "Requests sent to a controller, by it and by the reason for choosing it.",
            ["controller", "reason"],
            registry=registry,
        )
        self.expected = Counter(
            "trunkline_routing_expected_tokens",
            "Prompt tokens of them, by whether the index had them at that controller.",
            ["kv"],
            registry=registry,
        )
        self.events = Counter(
            "trunkline_dispatches",
            "Streams that lost their controller or found none: resumed (with tokens), retried (without), waited, "
            "gave_up.",
            ["event"],
            registry=registry,
        )

    def chose(self, decision: Decision) -> None:
        """A request was sent."""
        self.decisions.labels(str(decision.controller), decision.reason).inc()
        self.expected.labels("cached").inc(decision.cached_tokens)
        self.expected.labels("new").inc(decision.new_tokens)


class Metrics:
    """The router's own numbers. Times in seconds."""

    def __init__(
        self, links: Callable[[], Sequence[ControllerLink]], schemas: Callable[[], int] = lambda: 0
    ) -> None:
        """At the time of a scrape, `links` gives the controllers and `schemas` how many are ready for use."""
        self._registry = registry = CollectorRegistry()
        registry.register(_ControllerCollector(links))
        self.admission = AdmissionMetrics(registry)
        self.requests = Counter(
            "trunkline_requests",
            "HTTP requests answered, by route and status (499: the client left).",
            ["endpoint", "status"],
            registry=registry,
        )
        self.generations = Counter(
            "trunkline_generations",
            "Prompts given to a controller, by decoding method and kind of grammar, if any.",
            ["method", "grammar"],
            registry=registry,
        )
        self.routing = RoutingMetrics(registry)
        self.first_token = Histogram(
            "trunkline_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.per_token = TokenMetrics(_TOKEN_BUCKETS)
        registry.register(self.per_token)
        self.end_to_end = Histogram(
            "trunkline_request_duration_seconds",
            "From a generation request's arrival to its regular end.",
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "trunkline_prompt_tokens", "Prompt tokens of requests that started.", registry=registry
        )
        self.cached_tokens = Counter(
            "trunkline_cached_prompt_tokens", "Of these, tokens whose KV was found.", registry=registry
        )
        self.truncations = Counter(
            "trunkline_truncations",
            "Requests of which a part of the prompt was left out, by what became of the KV behind it.",
            ["kv"],
            registry=registry,
        )
        self.module_requests = Counter(
            "trunkline_module_requests", "Prompts with modules that were given to a controller.", registry=registry
        )
        self.module_tokens = Counter(
            "trunkline_module_prompt_tokens",
            "Prompt tokens of requests that started that are modules'.",
            registry=registry,
        )
        self.pml_errors = Counter(
            "trunkline_pml_errors", "Schemas and prompts that were refused, by code.", ["code"], registry=registry
        )
        Gauge(
            "trunkline_schemas_cached", "Schemas that this router has compiled.", registry=registry
        ).set_function(lambda: float(schemas()))

    def scrape(self) -> bytes:
        """Everything in Prometheus' text form."""
        return generate_latest(self._registry)
