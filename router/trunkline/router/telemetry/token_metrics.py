"""What is measured of every token. The client library takes locks and walks buckets for each value: a fifth of
what a token costs a router. Here values are only noted, and counted by the thousand or when somebody asks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from trunkline.router.telemetry.metric_families import Family, FamilyCollector

_LATENCY: Final = Family(
    "trunkline_inter_token_latency_seconds", "histogram", "Between consecutive tokens of a sequence."
)
_TOKENS: Final = Family("trunkline_output_tokens", "counter", "Output tokens delivered.")
_NOTED_MAX: Final = 4096


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
        """So much time lay between a token and the one before it; or, if several came together, before each."""
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
        """All that `collect` ever gives."""
        return (_LATENCY, _TOKENS)

    def collect(self) -> Iterable[Metric]:
        """What Prometheus gets."""
        self._count()
        ends = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        totals = np.cumsum(self._counts).tolist()
        histogram = HistogramMetricFamily(_LATENCY.name, _LATENCY.text)
        histogram.add_metric([], list(zip(ends, map(float, totals), strict=True)), self._sum)
        yield histogram
        tokens = CounterMetricFamily(_TOKENS.name, _TOKENS.text)
        tokens.add_metric([], float(self.tokens))
        yield tokens
