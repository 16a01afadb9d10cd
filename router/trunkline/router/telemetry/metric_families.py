"""Metric families with their descriptions, of which docs/metrics.md is made, and the text that Prometheus reads.

`FamilyRegistry` makes the client library's metrics and remembers the description of each. Trunkline's own
collectors return their descriptions by `families`. `exposition` returns the values as text, family by family, so
that the texts of several processes can be joined without parsing them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_HELP: Final = "# HELP "


class Family(NamedTuple):
    """Description of a metric family."""

    name: str
    """The family's name in Prometheus. The name of a counter is without `_total`."""
    kind: str
    """"counter", "gauge" or "histogram"."""
    text: str
    labels: tuple[str, ...] = ()

    @property
    def series(self) -> str:
        """The family's name in queries. A histogram has three series, with `_bucket`, `_sum` or `_count` behind
        it."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


class FamilyCollector(Collector):
    """Base class of Trunkline's own collectors."""

    def families(self) -> Iterable[Family]:
        """Return all families that `collect` may give."""
        raise NotImplementedError


class FamilyRegistry:
    """A registry of the client library, with a description of each family in it."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._families: list[Family] = []

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        """Return a new counter; `name` without `_total`."""
        self._families.append(Family(name, "counter", text, tuple(labels)))
        return Counter(name, text, labels, registry=self._registry)

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a gauge; each scrape calls `value`."""
        self._families.append(Family(name, "gauge", text))
        Gauge(name, text, registry=self._registry).set_function(value)

    def histogram(self, name: str, text: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> Histogram:
        """Return a new histogram; `buckets` are upper ends, ascending."""
        self._families.append(Family(name, "histogram", text, tuple(labels)))
        return Histogram(name, text, labels, buckets=buckets, registry=self._registry)

    def register(self, collector: FamilyCollector) -> None:
        """Add a collector; each scrape asks it for its metrics."""
        self._families += collector.families()
        self._registry.register(collector)

    def foreign(self, make: Callable[[CollectorRegistry], object], families: Iterable[Family]) -> None:
        """Add one of the client library's collectors.

        Args:
            make: registers it.
            families: all families that it may have.
        """
        make(self._registry)
        self._families += families

    def families(self) -> list[Family]:
        """Return all families, in the order of registration."""
        return list(self._families)

    def collect(self) -> Iterator[Metric]:
        """Yield the present values of these metrics for Prometheus."""
        return iter(self._registry.collect())


Exposition = list[tuple[str, str]]
"""Families in Prometheus' text form: of each the lines with help and type, and the lines with samples."""


class _Collected(Collector):
    """Metrics in the form of a registry, for `generate_latest`."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def exposition(registry: FamilyRegistry, labels: Mapping[str, str]) -> Exposition:
    """Return the present values of a registry; each sample gets `labels` in addition."""
    text = generate_latest(_Collected(_labelled(registry.collect(), labels))).decode()
    blocks: Exposition = []
    for block in text.split(f"\n{_HELP}"):
        about, kind, *samples = block.removeprefix(_HELP).rstrip("\n").split("\n", 2)
        blocks.append((f"{_HELP}{about}\n{kind}\n", "".join(f"{lines}\n" for lines in samples)))
    return blocks


def joined(parts: Iterable[Exposition]) -> bytes:
    """Return the expositions of several processes as one: each family once, with the samples of all."""
    families: dict[str, list[str]] = {}
    for part in parts:
        for head, samples in part:
            families.setdefault(head, []).append(samples)
    lines = (part for head, samples in families.items() for part in (head, *samples))
    return "".join(lines).encode()


def _labelled(metrics: Iterable[Metric], labels: Mapping[str, str]) -> Iterator[Metric]:
    for metric in metrics:
        # Prometheus has no use for a series of the time at which each other series began.
        kept = [sample for sample in metric.samples if not sample.name.endswith("_created")]
        copy = Metric(metric.name, metric.documentation, metric.type, metric.unit)
        copy.samples = [_with(sample, labels) for sample in kept] if labels else kept
        yield copy


def _with(sample: Sample, labels: Mapping[str, str]) -> Sample:
    return sample._replace(labels={**sample.labels, **labels})
