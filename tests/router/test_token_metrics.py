"""Values that are noted and counted later: what Prometheus gets is what its own client would have told."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Histogram

from trunkline.router.telemetry.metrics import TokenMetrics

BOUNDS = (0.001, 0.005, 0.02, 0.1, 1.0)


def test_as_the_client_library_counts() -> None:
    draw = random.Random(1)
    registry = CollectorRegistry()
    library = Histogram("trunkline_inter_token_latency_seconds", "x", buckets=BOUNDS, registry=registry)
    mine = TokenMetrics(BOUNDS)
    own_registry = CollectorRegistry()
    own_registry.register(mine)
    for _ in range(10_000):
        value = draw.choice([*BOUNDS, draw.random() * 2, draw.random() / 100, 0.0])
        count = draw.choice([1, 1, 1, 3])
        mine.between(value, count)
        mine.tokens += count
        for _ in range(count):
            library.observe(value)
        if draw.random() < 0.001:
            _compare(own_registry, registry)
    _compare(own_registry, registry)
    assert own_registry.get_sample_value("trunkline_output_tokens_total") == mine.tokens


def _compare(mine: CollectorRegistry, library: CollectorRegistry) -> None:
    name = "trunkline_inter_token_latency_seconds"
    for bound in [*map(str, BOUNDS), "+Inf"]:
        bucket = f"{name}_bucket", {"le": bound}
        assert mine.get_sample_value(*bucket) == library.get_sample_value(*bucket)
    assert mine.get_sample_value(f"{name}_count") == library.get_sample_value(f"{name}_count")
    total, expected = mine.get_sample_value(f"{name}_sum"), library.get_sample_value(f"{name}_sum")
    assert total is not None
    assert expected is not None
    assert abs(total - expected) < 1e-6 * max(1.0, expected)
