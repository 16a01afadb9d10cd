"""What a rank tells of traced requests: parts of prompts, each, and decode steps, together."""

from __future__ import annotations

from runtime.kept_spans import KeptSpans

from trunkline.kvstore.chunks import pack_int32
from trunkline.runtime.spans import SpanContext, StepTrace, pack_steps
from trunkline.runtime.tracing import OFF, Tracer
from trunkline.worker.messages import StepPlan
from trunkline.worker.step_traces import StepTraces


def part(batch_seq_id: int, tokens: int) -> bytes:
    letter = bytes([batch_seq_id])
    return pack_steps([StepTrace(SpanContext(letter * 16, letter * 8), b"d" * 8, batch_seq_id, tokens)])


def plan(step: int, *, traces: bytes | None = None, leaves: tuple[int, ...] = ()) -> StepPlan:
    return StepPlan(step, 9, traces=traces, leaves=pack_int32(list(leaves)) if leaves else b"")


def test_parts_of_prompts_and_what_came_after() -> None:
    kept = KeptSpans()
    traces = StepTraces(Tracer(kept), 1, "0", 9)
    traces.step(plan(1, traces=part(5, 64)), 10.0, 11.0)
    traces.step(plan(2, traces=part(5, 30) + part(6, 8)), 11.5, 12.0)
    for step in range(3, 7):
        traces.step(plan(step), 10.0 + step, 10.25 + step)
    traces.step(plan(7, leaves=(5, 77)), 20.0, 21.0)
    first, second, other, decoded = kept.spans
    assert [span.name for span in kept.spans] == ["forward", "forward", "forward", "decode_steps"]
    assert (first.start, first.end, first.parent) == (10.0, 11.0, b"\5" * 8)
    assert first.attributes == {
        "trunkline.group": "0",
        "trunkline.rank": 1,
        "trunkline.epoch": 9,
        "trunkline.step": 1,
        "trunkline.tokens": 64,
    }
    assert (second.attributes["trunkline.tokens"], other.attributes["trunkline.tokens"]) == (30, 8)
    assert other.context.trace_id == b"\6" * 16
    assert (decoded.start, decoded.end, decoded.parent) == (12.0, 16.25, b"d" * 8)
    assert decoded.context.trace_id == b"\5" * 16
    assert decoded.attributes["trunkline.steps"] == 4
    assert decoded.attributes["trunkline.busy_s"] == 1.0
    traces.idle()
    assert [span.context.trace_id for span in kept.spans[4:]] == [b"\6" * 16], "no plan will say that it has left"
    assert kept.spans[4].attributes["trunkline.steps"] == 5
    traces.close()
    assert len(kept.spans) == 5


def test_a_prompt_without_a_step_behind_it_has_no_decoding() -> None:
    kept = KeptSpans()
    traces = StepTraces(Tracer(kept), 0, "0", 9)
    traces.step(plan(1, traces=part(5, 64)), 1.0, 2.0)
    traces.close()
    assert [span.name for span in kept.spans] == ["forward"]


def test_nothing_is_kept_where_nobody_listens() -> None:
    traces = StepTraces(OFF, 0, "0", 9)
    traces.step(plan(1, traces=part(5, 64)), 1.0, 2.0)
    assert not traces._decoding
    traces.close()
