"""What is counted of generations: the phases they took, their lengths and ends, whose they are, and their tokens.

What is measured of every token is only noted at first, and counted by the thousand or at a scrape: the client
library takes locks and walks buckets for each value, which was a fifth of what a token costs a router.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from trunkline.router.telemetry.metric_families import Family, FamilyCollector, FamilyRegistry
from trunkline.router.telemetry.request_record import Ended
from trunkline.router.tenancy.auth import KEY_PREFIX

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
"""Tenants that are counted by their names; what comes later counts as `OTHER`."""
UNNAMED: Final = "unnamed"
"""Of tenants that are known by nothing but their key: there may be any number of them, and the name of each says
something of its key."""
OTHER: Final = "other"


class TenantLabels:
    """Names of tenants as labels: a bounded number of them."""

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
    """Counts them."""

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
        self._labels = TenantLabels()

    def ended(self, generation: Ended, tenant: str) -> None:
        """Count a generation."""
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
        """Delivered since the start."""
        self._bounds = np.array(bounds)
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._sum = 0.0
        self._noted: list[float] = []

    def between(self, seconds: float, tokens: int = 1) -> None:
        """Note the time between a token and the one before it; if several came together, the time for each."""
        self._noted.append(seconds)
        for _ in range(tokens - 1):
            self._noted.append(seconds)
        if len(self._noted) >= _NOTED_MAX:
            self._count()

    def _count(self) -> None:
        values = np.array(self._noted)
        self._noted.clear()
        # The first bucket whose upper end is not below the value, as Prometheus has it.
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
