"""Metrics of handovers: what groups that leave hand to others, and what new groups get before requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from trunkline.router.routing.handover import HandoverCounts
from trunkline.router.telemetry.metric_families import FamilyRegistry

Occasion = Literal["drain", "warm_up"]
_SECONDS_BUCKETS: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass(frozen=True)
class Totals:
    """Handovers of one kind since the start; the fields as those of `HandoverCounts`."""

    count: int = 0
    paths: int = 0
    chunks: int = 0
    given_up: int = 0
    seconds: float = 0.0


class HandoverMetrics:
    """What this router has handed over. Another router may do other handovers of the same cluster."""

    def __init__(self, registry: FamilyRegistry) -> None:
        self._paths = registry.counter(
            "trunkline_handover_paths",
            "Paths of chunks that a group was to get because another one drains (drain) or because it is new "
            "(warm_up): handed, or given_up, which are computed again when they are needed.",
            ["occasion", "result"],
        )
        self._chunks = registry.counter(
            "trunkline_handover_chunks",
            "Chunks that groups have fetched from others because of that. One with which several paths begin may "
            "count more than once.",
            ["occasion"],
        )
        self._seconds = registry.histogram(
            "trunkline_handover_seconds", "Duration of handovers.", _SECONDS_BUCKETS, ["occasion"]
        )
        self.totals: dict[Occasion, Totals] = {"drain": Totals(), "warm_up": Totals()}

    def ended(self, occasion: Occasion, handed: HandoverCounts, seconds: float) -> None:
        """Count a handover that is over."""
        self._paths.labels(occasion, "handed").inc(handed.paths)
        self._paths.labels(occasion, "given_up").inc(handed.given_up)
        self._chunks.labels(occasion).inc(handed.chunks)
        self._seconds.labels(occasion).observe(seconds)
        before = self.totals[occasion]
        self.totals[occasion] = Totals(
            before.count + 1,
            before.paths + handed.paths,
            before.chunks + handed.chunks,
            before.given_up + handed.given_up,
            before.seconds + seconds,
        )
