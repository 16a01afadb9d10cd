"""The engine over simulated workers that verify every token's context."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from simulation.driver import Simulation
from simulation.oracle import expected_output
from simulation.streams import Stream, verify

from trunkline.controller.allocation.kv_manager import Admission
from trunkline.controller.engine.engine import Engine
from trunkline.controller.engine.events import AbortRequest
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import Submit
from trunkline.controller.reports import StepResult, TopLogprobs
from trunkline.controller.sequences.sequence import Request, Sequence
from trunkline.kvstore.chunks import pack_int32
from trunkline.worker.messages import Sampling

SMALL = EngineConfig(num_blocks=64, chunk_size=4, max_context=96, token_budget=24, max_rows=8)


def verify_streams(simulation: Simulation) -> None:
    for stream in simulation.streams.values():
        if stream.ended is not None:
            verify(stream, simulation.engine.config.longest_sequence)


@pytest.mark.parametrize("length", [1, 4, 5, 11, 60])
def test_same_prompt_again_computes_one_token(length: int) -> None:
    simulation = Simulation(SMALL)
    prompt = [(7 * i) % 31 for i in range(length)]
    simulation.submit(prompt, 1)
    simulation.run()
    before = simulation.workers.computed_tokens
    simulation.submit(prompt, 1)
    simulation.run()
    assert simulation.workers.computed_tokens - before == 1
    assert simulation.streams[2].cached_tokens == length - 1
    verify_streams(simulation)


def test_next_turn_reuses_prompt_and_reply() -> None:
    simulation = Simulation(SMALL)
    first = list(range(9))
    simulation.submit(first, 6)
    simulation.run()
    second = first + simulation.streams[1].output + [40, 41]
    copied = simulation.workers.copied_tokens
    simulation.submit(second, 3)
    simulation.run()
    # All but the last sampled token, which was never computed, is known; the tail changes hands, uncopied.
    assert simulation.streams[2].cached_tokens == 9 + 5
    assert simulation.workers.copied_tokens == copied
    verify_streams(simulation)


@pytest.mark.parametrize("ahead", [0, 3])
def test_a_turn_and_forks_of_its_history_read_it_in_one_run(ahead: int) -> None:
    """The run has all whole chunks; the tail is the turn's. `ahead`: tokens of its answer when the forks come."""
    simulation = Simulation(SMALL)
    history = list(range(32))
    simulation.submit(history, 7)
    simulation.run()
    history += simulation.streams[1].output
    before = simulation.workers.computed_tokens
    turn = simulation.submit([*history, 40], 12)
    simulation.step_until(lambda: len(simulation.streams[turn].output) >= ahead)
    requests = [turn, *(simulation.submit([*history, 41 + i], 12, seed=i) for i in range(3))]
    streams = [simulation.streams[request] for request in requests]
    simulation.step_until(lambda: all(stream.output for stream in streams))
    known = [stream.cached_tokens or 0 for stream in streams]
    assert known[0] == len(history) - 1, "its last token was never computed with"
    assert min(known) >= 36, "a fork may find none of the tail"
    assert [0, 4, 0, 9] in simulation.workers.runs.tolist(), "rows 0 to 3, chunks 0 to 8"
    simulation.finish()
    computed = sum(len(history) + 1 - cached for cached in known)
    assert simulation.workers.computed_tokens - before == computed + 4 * 11, "and their answers"


def test_diverging_prompt_copies_the_common_head() -> None:
    simulation = Simulation(SMALL)
    simulation.submit([1, 2, 3, 4, 5, 6, 7, 8, 9], 4)
    simulation.run()
    simulation.submit([1, 2, 3, 4, 5, 6, 30, 31, 32], 4)
    simulation.run()
    assert simulation.streams[2].cached_tokens == 6
    assert simulation.workers.copied_tokens == 2
    verify_streams(simulation)


def test_salts_do_not_share_and_leave_no_trace() -> None:
    simulation = Simulation(SMALL)
    simulation.submit([1, 2, 3, 4, 5], 2, salt=b"a")
    simulation.run()
    simulation.submit([1, 2, 3, 4, 5], 2, salt=b"b")
    simulation.run()
    assert simulation.streams[2].cached_tokens == 0
    simulation.flush_cache()
    assert list(simulation.engine.scheduler.kv.tree.roots()) == []


def test_preempted_prompt_does_not_count_its_own_work_as_cached() -> None:
    simulation = Simulation(SMALL)
    simulation.submit(list(range(60)), 3)
    simulation.plan()
    simulation.answer()
    scheduler = simulation.engine.scheduler
    scheduler.preempt(scheduler.prefilling[0].group, simulation.now)
    simulation.run()
    assert simulation.streams[1].cached_tokens == 0
    assert simulation.workers.computed_tokens == 60 + 2  # what it had computed was found again
    verify_streams(simulation)


def test_matching_is_spread_over_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many long prompts that wait for one prefix do not hold up a plan, and all of them come to run."""
    monkeypatch.setattr("trunkline.controller.scheduling.scheduler.MATCHED_TOKENS_MAX", 50)
    simulation = Simulation(SMALL)
    looked_up: list[int] = []
    admit = simulation.engine.scheduler.kv.admit

    def counting(sequence: Sequence, *args: Any, **options: Any) -> Admission:
        looked_up.append(sequence.tokens.count)
        return admit(sequence, *args, **options)

    monkeypatch.setattr(simulation.engine.scheduler.kv, "admit", counting)
    for i in range(7):
        simulation.submit([*range(20), 20 + i], 2)
    while not simulation.engine.is_idle:
        looked_up.clear()
        simulation.plan()
        assert sum(looked_up) <= 2 * (50 + 21)  # two plans at most
        simulation.answer()
    verify_streams(simulation)
    assert all(stream.reason == "length" for stream in simulation.streams.values())


@pytest.mark.parametrize(
    "change",
    [{"tokens": b"\x01\x00\x00"}, {"tokens": b""}, {"logprobs": {1: TopLogprobs(0.0, b"", b"")}}, {"step": 2}],
)
def test_impossible_results_are_refused(change: dict[str, Any]) -> None:
    engine = Engine(SMALL)
    request = Request.of(1, Submit(1, pack_int32([1, 2, 3]), 3, 2, Sampling()))
    assert engine.step([request], 0.0).plan is not None
    result = StepResult(step=1, epoch=1, tokens=pack_int32([7]), elapsed_us=1)
    ready = engine.step([msgspec.structs.replace(result, **change)], 0.0)
    assert ready.problem
    assert ready.plan is None


@pytest.mark.parametrize("gone", [{1}, {3}, {2, 4}])
def test_log_probabilities_stay_with_their_rows_if_others_have_gone(gone: set[int]) -> None:
    engine = Engine(SMALL)
    engine.step([Request.of(i, Submit(i, pack_int32([i]), 1, 9, Sampling(logprobs=0))) for i in range(1, 5)], 0.0)
    for step, aborted in ((1, set[int]()), (2, gone)):
        tokens = [10 * step + row for row in range(4)]
        logprobs = {row: TopLogprobs(-float(token), b"", b"") for row, token in enumerate(tokens)}
        engine.step([AbortRequest(request) for request in aborted], 0.0)
        outputs = engine.step([StepResult(step, 1, pack_int32(tokens), 1, logprobs)], 0.0).outputs
        assert outputs is not None
        assert sorted(outputs.requests[0].tolist()) == sorted(set(range(1, 5)) - aborted)
        (told,) = outputs.logprobs
        assert told is not None
        assert {index: -report.token_logprob for index, report in told.items()} == dict(
            enumerate(outputs.tokens[0])
        )


def test_starts_come_with_first_tokens_that_come_soon() -> None:
    """A router that hears of a start takes the processor from the step, so it hears with the result of a short
    one; of a long one, and what else there is to say, at once."""
    config = EngineConfig(num_blocks=80, chunk_size=16, max_context=600, token_budget=512, max_rows=4)

    def submit(request: int, tokens: int) -> Request:
        return Request.of(request, Submit(request, pack_int32(range(tokens)), tokens, 2, Sampling()))

    for tokens, waits in ((3, True), (500, False)):  # 2 and 27 ms, before any step was measured
        engine = Engine(config)
        first = engine.step([submit(1, tokens)], 0.0)
        assert (first.plan is not None, first.again, first.outputs is None) == (True, True, waits)
        assert engine.holds_starts == waits
        assert engine.step((), 0.0).outputs is None  # the row's next step is planned
        result = StepResult(step=1, epoch=1, tokens=pack_int32([7]), elapsed_us=1)
        then = engine.step([result], 0.0).outputs
        assert then is not None
        assert not engine.holds_starts
        told = [start.request for outputs in (first.outputs, then) if outputs for start in outputs.started]
        assert told == [1]
        assert then.tokens[0].tolist() == [7]

    engine = Engine(config)
    engine.step([submit(1, 3)], 0.0)
    refused = engine.step([submit(2, 600)], 0.0).outputs
    assert refused is not None
    assert ([start.request for start in refused.started], refused.finished[0].request) == ([1], 2)


@pytest.mark.parametrize("given", [0, 1, 5, 11])
def test_resumed_stream_continues_the_same_text(given: int) -> None:
    simulation = Simulation(SMALL)
    prompt = [1, 2, 3, 4, 5, 6]
    text = expected_output(prompt, 0, 12)
    submit = Submit(1, pack_int32(prompt + text[:given]), len(prompt), 12, Sampling())
    simulation.streams[1] = Stream(prompt, 0, 12, ())
    simulation.receive(Request.of(1, submit))
    simulation.run()
    assert simulation.streams[1].output == text[given:]
    assert simulation.streams[1].reason == "length"


def test_chunk_that_somebody_else_still_computes_is_not_taken() -> None:
    """A's output fills the chunks that B, whose prompt foresaw it, is about to compute."""
    simulation = Simulation(msgspec.structs.replace(SMALL, chunk_size=16, token_budget=3, max_rows=2))
    prompt = [1, 2, 3, 4, 5, 6]
    foreseen = prompt + expected_output(prompt, 0, 50)
    simulation.submit(prompt, 40)
    while len(simulation.streams[1].output) < 8:
        simulation.step()
    simulation.submit(foreseen, 5)  # eight steps for its first chunk, which A fills in two
    simulation.run()
    verify_streams(simulation)
