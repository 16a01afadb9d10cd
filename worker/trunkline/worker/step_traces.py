"""Spans of one rank for traced requests: one for each step that computes part of a prompt, one for all decoding.

No work is done per token. Each step is added to two totals; a traced sequence remembers their values from the
step that computed its prompt, and the span has the difference when the sequence leaves or no step comes any more.
"""

from __future__ import annotations

from dataclasses import dataclass

from trunkline.kvstore.chunks import unpack_int32
from trunkline.runtime.spans import Span, SpanContext, StepTrace, Value, unpack_steps
from trunkline.runtime.tracing import Tracer, child_of
from trunkline.worker.messages import StepPlan


@dataclass(slots=True)
class _Decoding:
    """A traced sequence that decodes, with the totals at the time when its prompt had been computed."""

    parent: SpanContext
    since: float
    steps: int
    busy_s: float


class StepTraces:
    """Makes the spans of one rank. Times are in seconds of the monotonic clock."""

    def __init__(self, tracer: Tracer, rank: int, group: str, epoch: int) -> None:
        self._tracer = tracer
        self.is_on = tracer.is_on
        """Whether spans are kept; if not, `step` need not be called."""
        self._about: dict[str, Value] = {
            "trunkline.group": group,
            "trunkline.rank": rank,
            "trunkline.epoch": epoch,
        }
        self._steps = 0
        self._busy_s = 0.0
        self._last_end = 0.0
        self._decoding: dict[int, _Decoding] = {}
        """The traced sequences that decode, by their id in the batch."""

    def step(self, plan: StepPlan, began: float, ended: float) -> None:
        """Note a step that was computed."""
        if self._decoding and plan.leaves:
            for batch_seq_id in unpack_int32(plan.leaves).tolist():
                self._left(batch_seq_id)
        self._steps += 1
        self._busy_s += ended - began
        self._last_end = ended
        if plan.traces and self.is_on:
            for trace in unpack_steps(plan.traces):
                self._computed(trace, plan.step, began, ended)

    def idle(self) -> None:
        """End the spans of all sequences that decode: no step has come for a while."""
        for batch_seq_id in list(self._decoding):
            self._left(batch_seq_id)

    def close(self) -> None:
        """End all spans and send them."""
        self.idle()
        self._tracer.close()

    def _computed(self, trace: StepTrace, step: int, began: float, ended: float) -> None:
        attributes = {**self._about, "trunkline.step": step, "trunkline.tokens": trace.tokens}
        self._tracer.emit(
            Span("forward", child_of(trace.prefill), trace.prefill.span_id, began, ended, attributes)
        )
        parent = SpanContext(trace.prefill.trace_id, trace.decode)
        self._decoding[trace.batch_seq_id] = _Decoding(parent, ended, self._steps, self._busy_s)

    def _left(self, batch_seq_id: int) -> None:
        decoding = self._decoding.pop(batch_seq_id, None)
        if decoding is None or self._steps == decoding.steps:
            return
        attributes = {
            **self._about,
            "trunkline.steps": self._steps - decoding.steps,
            "trunkline.busy_s": round(self._busy_s - decoding.busy_s, 6),
        }
        parent = decoding.parent
        self._tracer.emit(
            Span("decode_steps", child_of(parent), parent.span_id, decoding.since, self._last_end, attributes)
        )
