"""What is counted of generations: how long their phases took, how long they are, how they ended, for whom."""

from __future__ import annotations

from typing import Final

from trunkline.router.telemetry.metric_families import FamilyRegistry
from trunkline.router.telemetry.request_record import Ended
from trunkline.router.tenancy.auth import KEY_PREFIX

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
        """The label of a tenant."""
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
