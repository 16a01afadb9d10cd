"""Metrics of the record store: its size, and the operations of this router."""

from __future__ import annotations

from typing import Final

from trunkline.kvstore.records import (
    BaseMissingError,
    BusyError,
    ConflictError,
    ExistsError,
    MissingError,
    QuotaError,
    RecordError,
    StoreAwayError,
    Usage,
)
from trunkline.router.telemetry.metric_families import FamilyRegistry

_BUCKETS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0)
_REASONS: Final[dict[type[RecordError], str]] = {
    MissingError: "missing",
    ExistsError: "exists",
    BusyError: "busy",
    ConflictError: "conflict",
    BaseMissingError: "base_missing",
    QuotaError: "quota",
    StoreAwayError: "away",
}


class RecordMetrics:
    """Size of the record store, and durations and failures of operations."""

    def __init__(self, registry: FamilyRegistry, shared: FamilyRegistry) -> None:
        """`shared`: for what is the same in every router process."""
        self.bytes_max = 0
        """See `open_records`."""
        self._usage = Usage(0, 0)
        shared.gauge(
            "trunkline_records",
            "Stored sessions, schemas and kept answers in the record store, as of some seconds ago.",
            lambda: float(self._usage.records),
        )
        shared.gauge("trunkline_record_bytes", "Their size in bytes.", lambda: float(self._usage.bytes))
        shared.gauge(
            "trunkline_record_limit_bytes",
            "Size above which the records that were not used for the longest time are deleted; 0: there is none.",
            lambda: float(self.bytes_max),
        )
        self._seconds = registry.histogram(
            "trunkline_record_operation_seconds",
            "Duration of an operation of the record store, whether it was carried out or not.",
            _BUCKETS,
            ["operation"],
        )
        self._failures = registry.counter(
            "trunkline_record_failures",
            "Operations that were not carried out: away (the store did not answer), quota, busy (another request "
            "has the lease), conflict, missing, exists, base_missing.",
            ["operation", "reason"],
        )

    def noted(self, usage: Usage) -> None:
        """Note the present size of all records."""
        self._usage = usage

    def measured(self, operation: str, seconds: float, failure: RecordError | None) -> None:
        """Count an operation."""
        self._seconds.labels(operation).observe(seconds)
        if failure is not None:
            self._failures.labels(operation, _REASONS.get(type(failure), "other")).inc()
