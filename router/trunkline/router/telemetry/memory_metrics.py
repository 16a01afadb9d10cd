"""Metrics of the memory for prompts: its size, and how much of the prompts was known."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from trunkline.router.telemetry.metric_families import Family, FamilyCollector
from trunkline.router.text.prompt_memory import PromptMemory

_BYTES: Final = Family(
    "trunkline_prompt_memory_bytes", "gauge", "Memory of the prompts that this router remembers."
)
_TOKENS: Final = Family(
    "trunkline_prompt_memory_tokens",
    "counter",
    "Tokens of conversations' prompts, by where they came from: prompt (remembered from one before), answer (a "
    "remembered answer that came back), encoded (new text).",
    ("source",),
)


class MemoryMetrics(FamilyCollector):
    """Reads a memory at each scrape."""

    def __init__(self, memory: Callable[[], PromptMemory]) -> None:
        self._memory = memory

    def families(self) -> Iterable[Family]:
        """Return all families that `collect` may give."""
        return (_BYTES, _TOKENS)

    def collect(self) -> Iterable[Metric]:
        """Yield the present values of these metrics for Prometheus."""
        memory = self._memory()
        yield GaugeMetricFamily(_BYTES.name, _BYTES.text, float(memory.bytes))
        counter = CounterMetricFamily(_TOKENS.name, _TOKENS.text, labels=_TOKENS.labels)
        counts = memory.counts
        for source, count in (
            ("prompt", counts.remembered),
            ("answer", counts.answers),
            ("encoded", counts.encoded),
        ):
            counter.add_metric([source], float(count))
        yield counter
