"""When what happened to requests, as an engine tells it: times, tokens, spans, and what workers hear of traces."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
from simulation.driver import Simulation
from simulation.engines import ENGINES, MIXES
from simulation.streams import Stream
from simulation.traffic import Mix, Traffic

from trunkline.controller.engine.events import EndAll, Event, RequestTimeline
from trunkline.controller.engine.validation import problem_of_submit
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import BeamSearch, Submit
from trunkline.controller.sequences.sequence import Request, TraceIds
from trunkline.controller.service.request_log import draw_ids, spans_of
from trunkline.kvstore.chunks import pack_int32
from trunkline.router.messages import FinishReason
from trunkline.runtime.spans import Span, SpanContext, unpack_steps
from trunkline.worker.messages import Sampling, StepPlan

SMALL = EngineConfig(num_blocks=40, chunk_size=4, max_context=96, token_budget=24, max_rows=8)
PROMPT = list(range(5, 65))
PACKED = bytes(range(24))


def ids() -> TraceIds:
    drawn = draw_ids(PACKED)
    assert drawn is not None
    return drawn


class Traced:
    """A simulation all of whose requests are traced, and the plans that its workers got."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, config: EngineConfig = SMALL, *, is_traced: bool = True
    ) -> None:
        self.simulation = Simulation(config)
        self.ids = ids() if is_traced else None
        self.plans: list[StepPlan] = []
        receive, execute = self.simulation.engine.receive, self.simulation._execute

        def receive_traced(event: Event, now: float) -> None:
            if isinstance(event, Request):
                submit = msgspec.structs.replace(event.submit, request_id="mine")
                event = dataclasses.replace(event, trace=self.ids, submit=submit)
            receive(event, now)

        def execute_kept(plan: StepPlan) -> Any:
            self.plans.append(plan)
            return execute(plan)

        monkeypatch.setattr(self.simulation.engine, "receive", receive_traced)
        monkeypatch.setattr(self.simulation, "_execute", execute_kept)

    def timeline(self) -> RequestTimeline:
        """The only one that has ended."""
        self.simulation.plan()
        [timeline] = self.simulation.wanted.timelines
        return timeline

    def spans(self, timeline: RequestTimeline) -> dict[str, Span]:
        """By name."""
        assert self.ids is not None
        return {span.name: span for span in spans_of(timeline, self.ids, "a:1", self.simulation.now)}


def test_a_request_from_its_coming_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Traced(monkeypatch)
    simulation = traced.simulation
    simulation.now = 100.0
    request = simulation.submit(PROMPT, 12)
    simulation.run()
    timeline = traced.timeline()
    assert (timeline.came, timeline.admitted, timeline.planned) == (100.0, 101.0, 101.0 + 1)
    assert timeline.first_token > timeline.planned
    assert [tokens for _, _, tokens in timeline.chunks] == [24, 24, 12]
    assert timeline.output_tokens == len(simulation.streams[request].output) == 12
    spans = traced.spans(timeline)
    assert list(spans) == ["generate", "queue", "prefill", "decode"]
    assert (spans["generate"].start, spans["generate"].end) == (100.0, simulation.now)
    assert (spans["queue"].start, spans["queue"].end) == (100.0, 101.0)
    assert (spans["prefill"].start, spans["prefill"].end) == (101.0, timeline.first_token)
    assert (spans["decode"].start, spans["decode"].end) == (timeline.first_token, simulation.now)
    assert traced.ids is not None
    assert spans["generate"].parent == PACKED[16:]
    assert {span.context.trace_id for span in spans.values()} == {PACKED[:16]}
    assert {spans[name].parent for name in ("queue", "prefill", "decode")} == {traced.ids.generate}
    assert spans["prefill"].attributes["trunkline.computed_tokens"] == 60
    assert not any(span.error for span in spans.values())


def test_workers_are_told_of_the_steps_that_compute_its_prompt_only(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Traced(monkeypatch)
    traced.simulation.submit(PROMPT, 12)
    traced.simulation.run()
    told = [list(unpack_steps(plan.traces or b"")) for plan in traced.plans]
    assert [[part.tokens for part in parts] for parts in told[:3]] == [[24], [24], [12]]
    assert not any(told[3:])
    assert len(traced.plans) > 10
    assert traced.ids is not None
    [part] = told[0]
    assert part.prefill == SpanContext(PACKED[:16], traced.ids.prefill)
    assert part.decode == traced.ids.decode
    assert part.batch_seq_id == traced.plans[0].joins[0].sequence


def test_who_is_not_traced_is_told_of_in_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Traced(monkeypatch, is_traced=False)
    traced.simulation.submit(PROMPT, 12)
    traced.simulation.run()
    assert {plan.traces for plan in traced.plans} == {None}
    timeline = traced.timeline()
    assert (timeline.chunks, timeline.batch_seq_ids, timeline.output_tokens) == ([], set(), 12)
    assert msgspec.msgpack.encode(StepPlan(1, 1)).endswith(b"\xc0\xc4\x00\x90\xc4\x00\xc4\x00"), (
        "traces cost such a step a byte"
    )


def test_how_long_it_waited_is_told_to_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for one of them at a time."""
    simulation = Traced(monkeypatch, is_traced=False).simulation
    first = simulation.submit(PROMPT + PROMPT[:30], 6)
    second = simulation.submit([*range(70, 100), *PROMPT], 6)
    simulation.run()
    waited = [simulation.streams[request].started for request in (first, second)]
    assert waited[0] is not None
    assert waited[1] is not None
    assert waited[0].queued_s == 1.0
    assert waited[1].queued_s > 5.0


def test_a_request_of_one_token_has_a_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Traced(monkeypatch)
    traced.simulation.submit(PROMPT[:8], 1)
    traced.simulation.run()
    timeline = traced.timeline()
    assert timeline.first_token > 0
    assert (timeline.output_tokens, timeline.reason) == (1, FinishReason.LENGTH)


def test_one_that_never_began_has_waited_only(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Traced(monkeypatch)
    request = traced.simulation.submit(PROMPT, 4)
    traced.simulation.now = 7.0
    traced.simulation.abort(request)
    spans = traced.spans(traced.timeline())
    assert list(spans) == ["generate", "queue"]
    assert spans["queue"].end == 7.0
    assert not spans["generate"].error, "a client that leaves is no failure"


def test_workers_that_are_lost_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Traced(monkeypatch)
    simulation = traced.simulation
    request = simulation.submit(PROMPT, 12)
    for _ in range(7):
        simulation.step()
    assert simulation.streams[request].output
    simulation.lose_workers()
    lost_at = simulation.now
    simulation.replace_workers()
    simulation.run()
    timeline = traced.timeline()
    assert timeline.losses == [lost_at]
    assert timeline.first_token < lost_at
    assert timeline.output_tokens == 12
    generate = traced.spans(timeline)["generate"]
    assert [(at, name) for at, name, _ in generate.events] == [(lost_at, "workers_lost")]
    assert generate.attributes["trunkline.returns"] == 1


def test_who_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Traced(monkeypatch)
    traced.simulation.submit(PROMPT, 12)
    traced.simulation.step()
    traced.simulation.receive(EndAll("the end"))
    assert traced.spans(traced.timeline())["generate"].error == FinishReason.ENGINE_FAILED


@pytest.mark.parametrize("name", ["tiny, both", "tiers", "modules, tiers"])
def test_each_request_has_one_journey_in_any_traffic(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mix = dataclasses.replace(MIXES.get(name, Mix()), losses=0.02, crowd=20)
    traffic = Traffic(ENGINES[name], mix, seed=5, check=False)
    simulation = traffic.simulation
    streams: dict[int, Stream] = {}
    submit = simulation.submit

    def submit_kept(*arguments: Any, **options: Any) -> int:
        request = submit(*arguments, **options)
        streams[request] = simulation.streams[request]
        return request

    monkeypatch.setattr(simulation, "submit", submit_kept)
    traffic.run(60)
    simulation.plan()
    timelines = {timeline.request.id: timeline for timeline in simulation.wanted.timelines}
    ended = {request: stream for request, stream in streams.items() if stream.ended is not None}
    assert len(timelines) > 20
    assert set(timelines) <= set(ended)
    refused = {ended[request].reason for request in set(ended) - set(timelines)}
    assert refused <= {FinishReason.INVALID, FinishReason.QUEUE_FULL}
    for request, timeline in timelines.items():
        stream = ended[request]
        assert timeline.reason == stream.reason
        assert timeline.came <= timeline.admitted <= timeline.planned or timeline.planned < 0
        if stream.beam is None and stream.reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert timeline.output_tokens == sum(map(len, stream.outputs)), "also of samples that were given up"


def test_what_a_router_says_of_itself_is_bounded() -> None:
    submit = Submit(1, pack_int32([1, 2]), 2, 4, Sampling(), request_id="r" * 128, trace=PACKED)
    assert not problem_of_submit(submit, 100)
    request = Request.of(1, submit, draw_ids(submit.trace))
    assert request.submit.request_id == "r" * 128
    assert request.trace is not None
    assert request.trace.router.pack() == PACKED
    assert "at most 128" in problem_of_submit(msgspec.structs.replace(submit, request_id="r" * 129), 100)
    assert "trace is 23 bytes" in problem_of_submit(msgspec.structs.replace(submit, trace=PACKED[1:]), 100)
    assert draw_ids(b"") is None
    assert len({*ids()[1:], *ids()[1:]}) == 8, "drawn anew each time"


def test_beams_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Traced(monkeypatch)
    traced.simulation.submit(PROMPT[:12], 5, beam=BeamSearch(3), n=2)
    traced.simulation.run()
    timeline = traced.timeline()
    assert timeline.first_token > 0
    assert timeline.chunk_count == 1
