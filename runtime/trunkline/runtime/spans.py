"""Spans as data: contexts, their forms on the wire, and the steps of a traced prompt. Pure; see `tracing.py`."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

TRACE_BYTES: Final = 16
SPAN_BYTES: Final = 8
CONTEXT_BYTES: Final = TRACE_BYTES + SPAN_BYTES
_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED: Final = 1
_STEP: Final = struct.Struct("<16s8s8sii")

Value = str | bool | int | float | Sequence[str] | Sequence[int]
"""The value of a span's attribute."""


class SpanContext(NamedTuple):
    """The trace that a span belongs to, and its id there."""

    trace_id: bytes
    span_id: bytes

    def pack(self) -> bytes:
        """Return the bytes that travel between processes."""
        return self.trace_id + self.span_id

    @property
    def traceparent(self) -> str:
        """The span's `traceparent` header (W3C), which says that the span is sampled."""
        return f"00-{self.trace_id.hex()}-{self.span_id.hex()}-{_SAMPLED:02x}"


def unpack_context(packed: bytes) -> SpanContext | None:
    """Return the context that `pack` made bytes of; None for other bytes."""
    if len(packed) != CONTEXT_BYTES:
        return None
    return SpanContext(packed[:TRACE_BYTES], packed[TRACE_BYTES:])


def parse_traceparent(header: str) -> tuple[SpanContext, bool] | None:
    """Return the caller's span and whether the span is sampled; None for a header that is missing or malformed."""
    match = _TRACEPARENT.fullmatch(header.strip())
    if match is None:
        return None
    version, trace, span, flags, more = match.groups()
    if version == "ff" or (version == "00" and more) or not int(trace, 16) or not int(span, 16):
        return None
    return SpanContext(bytes.fromhex(trace), bytes.fromhex(span)), bool(int(flags, 16) & _SAMPLED)


def is_chosen(trace_id: bytes, ratio: float) -> bool:
    """Return whether a trace is among the part `ratio` of all traces; every process decides alike."""
    return int.from_bytes(trace_id[-8:], "big") < ratio * (1 << 64)


class Kind(StrEnum):
    """The side of a call between processes that a span describes."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"


@dataclass(slots=True)
class Span:
    """A finished piece of work. Times in seconds of the monotonic clock."""

    name: str
    context: SpanContext
    parent: bytes
    """Id of the parent span in the same trace; b"" for the first span."""
    start: float
    end: float
    attributes: Mapping[str, Value]
    kind: Kind = Kind.INTERNAL
    events: list[tuple[float, str, Mapping[str, Value]]] = field(default_factory=list)
    links: list[SpanContext] = field(default_factory=list)
    error: str = ""
    """The error in a word or two; "" if there was none."""


class StepTrace(NamedTuple):
    """The part of a traced prompt that a step computes, as ranks are told (`StepPlan.traces`)."""

    prefill: SpanContext
    """The parent of the prefill spans."""
    decode: bytes
    """Id of the parent of the decode spans, in the same trace."""
    batch_seq_id: int
    """The sequence's id in the workers' batch."""
    tokens: int
    """Number of tokens of the prompt that the step computes."""


def pack_steps(steps: Iterable[StepTrace]) -> bytes:
    """Return the bytes that travel to the workers."""
    return b"".join(_STEP.pack(*step.prefill, step.decode, step.batch_seq_id, step.tokens) for step in steps)


def unpack_steps(packed: bytes) -> Iterator[StepTrace]:
    """Yield what `pack_steps` packed; of damaged bytes, the whole entries at the beginning."""
    whole = len(packed) - len(packed) % _STEP.size
    for trace, prefill, decode, batch_seq_id, tokens in _STEP.iter_unpack(packed[:whole]):
        yield StepTrace(SpanContext(trace, prefill), decode, batch_seq_id, tokens)
