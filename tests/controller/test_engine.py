"""The engine over simulated workers that verify every token's context."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
from seeds import seeds
from simulation.driver import Simulation
from simulation.oracle import expected_output
from simulation.streams import Stream, verify

from trunkline.controller.allocation.kv_manager import Admission
from trunkline.controller.engine.engine import Engine
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import StepResult, TopLogprobs
from trunkline.controller.sequences.sequence import Request, Sequence
from trunkline.kvstore.int32_codec import pack_int32
from trunkline.worker.messages import Sampling

SMALL = EngineConfig(num_blocks=64, chunk_size=4, max_context=96, token_budget=24, max_rows=8)


def verify_streams(simulation: Simulation) -> None:
    for stream in simulation.streams.values():
        if stream.ended is not None:
            verify(stream, simulation.engine.config.longest_sequence)


def test_single_request() -> None:
    simulation = Simulation(SMALL)
    simulation.submit(list(range(10)), 7)
    simulation.run()
    stream = simulation.streams[1]
    assert (stream.reason, stream.cached_tokens) == ("length", 0)
    verify_streams(simulation)
    assert simulation.workers.computed_tokens == 10 + 6


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


def test_diverging_prompt_copies_the_common_head() -> None:
    simulation = Simulation(SMALL)
    simulation.submit([1, 2, 3, 4, 5, 6, 7, 8, 9], 4)
    simulation.run()
    simulation.submit([1, 2, 3, 4, 5, 6, 30, 31, 32], 4)
    simulation.run()
    assert simulation.streams[2].cached_tokens == 6
    assert simulation.workers.copied_tokens == 2
    verify_streams(simulation)


def test_together_arriving_requests_compute_a_prefix_once() -> None:
    simulation = Simulation(SMALL)
    prefix = list(range(40))
    for i in range(6):
        simulation.submit([*prefix, 41 + i], 4)
    simulation.run()
    verify_streams(simulation)
    assert simulation.workers.computed_tokens == 40 + 6 * (1 + 3)
    assert simulation.workers.max_rows == 6


def test_salts_do_not_share_and_leave_no_trace() -> None:
    simulation = Simulation(SMALL)
    simulation.submit([1, 2, 3, 4, 5], 2, salt=b"a")
    simulation.run()
    simulation.submit([1, 2, 3, 4, 5], 2, salt=b"b")
    simulation.run()
    assert simulation.streams[2].cached_tokens == 0
    simulation.flush_cache()
    assert list(simulation.engine.scheduler.kv.tree.roots()) == []


def test_aborted_producer_is_replaced_by_a_waiter() -> None:
    simulation = Simulation(SMALL)
    prompt = list(range(48))
    first = simulation.submit(prompt, 4)
    simulation.submit(prompt, 4)
    simulation.plan()
    simulation.abort(first)
    simulation.run()
    assert simulation.streams[2].reason == "length"
    verify_streams(simulation)


def test_pool_pressure_preempts_the_newest_and_resumes_it() -> None:
    simulation = Simulation(EngineConfig(num_blocks=12, chunk_size=4, max_context=48, token_budget=24, max_rows=4))
    for i in range(3):
        simulation.submit([100 * i + j for j in range(8)], 24, seed=i)
    simulation.run()
    assert simulation.engine.scheduler.counters.preemptions > 0
    verify_streams(simulation)
    assert [s.reason for s in simulation.streams.values()] == ["length"] * 3


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
    request = Request(id=1, tokens=np.array([1, 2, 3], np.int32), max_tokens=2, sampling=Sampling())
    assert engine.step([request], 0.0).plan is not None
    result = StepResult(step=1, epoch=1, tokens=pack_int32([7]), elapsed_us=1)
    ready = engine.step([msgspec.structs.replace(result, **change)], 0.0)
    assert ready.problem
    assert ready.plan is None


@pytest.mark.parametrize("given", [0, 1, 5, 11])
def test_resumed_stream_continues_the_same_text(given: int) -> None:
    simulation = Simulation(SMALL)
    prompt = [1, 2, 3, 4, 5, 6]
    text = expected_output(prompt, 0, 12)
    request = Request(
        id=1,
        tokens=np.array(prompt + text[:given], np.int32),
        max_tokens=12,
        sampling=Sampling(),
        prompt_len=len(prompt),
    )
    simulation.streams[1] = Stream(prompt, 0, 12, ())
    simulation.receive(request)
    simulation.run()
    assert simulation.streams[1].output == text[given:]
    assert simulation.streams[1].reason == "length"


def test_sequence_that_needs_the_whole_pool() -> None:
    simulation = Simulation(EngineConfig(num_blocks=4, chunk_size=4, max_context=64, token_budget=8, max_rows=2))
    simulation.submit(list(range(8)), 1)
    simulation.run()
    simulation.submit([0, 1, 2, 3, 4, 50, 51, 52, 53], 7)
    simulation.run()
    assert simulation.streams[2].reason == "length"
    verify_streams(simulation)


def test_refusals_name_the_reason() -> None:
    simulation = Simulation(EngineConfig(num_blocks=4, chunk_size=4, token_budget=8, max_rows=2, max_waiting=1))
    too_long = simulation.submit(list(range(16)), 1)
    empty = simulation.submit([], 1)
    no_tokens = simulation.submit([1], 0)
    assert [simulation.streams[i].reason for i in (too_long, empty, no_tokens)] == ["invalid"] * 3
    simulation.submit([1], 1)
    assert simulation.streams[simulation.submit([1], 1)].reason == "queue_full"
    simulation.run()


def test_cache_off_gives_the_same_text() -> None:
    config = EngineConfig(
        num_blocks=40, chunk_size=4, max_context=96, token_budget=24, max_rows=8, prefix_cache=False
    )
    simulation = Simulation(config)
    for _ in range(3):
        simulation.submit(list(range(10)), 9)
    simulation.run()
    verify_streams(simulation)
    assert simulation.workers.computed_tokens == 3 * (10 + 8)
    assert simulation.engine.scheduler.kv.pool.free_count == 40


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


def test_equal_streams_merge_their_chunks() -> None:
    simulation = Simulation(SMALL)
    prompt = [1, 2, 3, 4, 5, 6]
    for _ in range(3):
        simulation.submit(prompt, 21)
    while simulation.streams[1].reason is None:
        simulation.step()
    tree = simulation.engine.scheduler.kv.tree
    simulation.run()
    verify_streams(simulation)
    # 26 tokens have KV (the last sampled one does not): six full chunks and a tail, once for all three.
    assert tree.node_count == 7


def test_leaving_right_after_a_merge() -> None:
    simulation = Simulation(SMALL)
    for _ in range(2):
        simulation.submit([1, 2, 3, 4, 5, 6], 30)
    scheduler = simulation.engine.scheduler
    while not scheduler._pending.merged:
        simulation.plan()
        simulation.answer()
    (batch_seq_id, _, _), *_ = scheduler._pending.merged
    merged = next(s for s in scheduler.rows.sequences if s is not None and s.batch_seq_id == batch_seq_id)
    simulation.abort(merged.request)
    simulation.run()
    verify_streams(simulation)


@pytest.mark.parametrize("chunk_size", [1, 2, 4, 16])
@pytest.mark.parametrize("seed", seeds(1))
def test_random_traffic(seed: int, chunk_size: int) -> None:
    """Submits, aborts, stop tokens, several salts, a pool that is too small: text and invariants hold."""
    rng = random.Random(seed)
    config = EngineConfig(
        num_blocks=rng.choice([160 // chunk_size, 400 // chunk_size]),
        chunk_size=chunk_size,
        max_context=128,
        token_budget=rng.choice([9, 20, 64]),
        max_rows=8,
        max_inflight_steps=rng.choice([1, 2]),
    )
    simulation = Simulation(config)
    live: list[int] = []
    prompts: list[list[int]] = [[rng.randrange(9) for _ in range(rng.randrange(1, 60))] for _ in range(4)]
    for _ in range(600):
        action = rng.random()
        if action < 0.15:
            base = rng.choice(prompts)
            prompt = base[: rng.randrange(1, len(base) + 1)] + [rng.randrange(9) for _ in range(rng.randrange(9))]
            request = simulation.submit(
                prompt,
                rng.randrange(1, 30),
                seed=rng.randrange(3),
                stop_ids=tuple(rng.sample(range(50), rng.choice([0, 1, 12]))),
                salt=rng.choice([b"", b"", b"tenant"]),
            )
            live.append(request)
        elif action < 0.18 and live:
            simulation.abort(live.pop(rng.randrange(len(live))))
        elif action < 0.19:
            simulation.flush_cache()
        elif action < 0.6:
            simulation.plan()
        else:
            simulation.answer()
        finished = [s for s in simulation.streams.values() if s.reason == "length"]
        if finished and rng.random() < 0.1:
            done = rng.choice(finished)
            prompts[rng.randrange(4)] = (done.prompt + done.output)[:90]
    simulation.run()
    verify_streams(simulation)
    assert all(s.reason is not None for s in simulation.streams.values())
    tree = simulation.engine.scheduler.kv.tree
    assert tree.active_count == 0
    simulation.flush_cache()
    assert simulation.engine.scheduler.kv.pool.free_count == config.num_blocks
