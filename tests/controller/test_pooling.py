"""Prompts whose hidden states are pooled: what of them is cached, and how they survive preemption and losses."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from simulation.driver import Simulation
from simulation.streams import Options

from trunkline.controller.engine.validation import problem_of_request, problem_of_submit
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import BeamSearch, PromptLayout, Submit
from trunkline.controller.sequences.sequence import Request
from trunkline.kvstore.chunks import pack_int32
from trunkline.worker.messages import POOL_LAST, POOL_MEAN, Sampling

CONFIG = EngineConfig(num_blocks=96, chunk_size=4, max_context=96, token_budget=24, max_rows=12, host_slots=60)
PROMPT = [(3 * i) % 29 for i in range(30)]
KINDS: dict[str, Options] = {
    "last": {"pooling": POOL_LAST},
    "mean": {"pooling": POOL_MEAN},
    "mean and scores": {"pooling": POOL_MEAN, "prompt_logprobs": 1},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("after", range(1, 12))
def test_a_preempted_prompt_is_pooled_once_and_whole(kind: str, preemption: str, after: int) -> None:
    """Between its parts, and with its result on the way; what it had computed is in the cache then."""
    simulation = Simulation(msgspec.structs.replace(CONFIG, preemption=preemption))
    request = simulation.submit(PROMPT, 1, **KINDS[kind])
    simulation.submit(PROMPT[:27], 4, seed=1)
    simulation.events(after)
    taken = simulation.preempt(request)
    simulation.finish()
    assert simulation.streams[request].pooled
    assert simulation.scheduler.counters.preemptions == taken


def test_it_is_preempted_while_its_result_is_on_the_way() -> None:
    """What the test above covers by some of its numbers: all of the prompt was planned, and no token came."""
    simulation = Simulation(CONFIG)
    request = simulation.submit(PROMPT, 1, pooling=POOL_MEAN)
    simulation.step_until(lambda: any(s.request_id == request for s in simulation.scheduler.rows.sequences if s))
    assert simulation.streams[request].pooled is None
    computed = simulation.workers.computed_tokens
    assert simulation.preempt(request)
    simulation.finish()
    assert simulation.workers.computed_tokens == computed + len(PROMPT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", range(1, 9))
def test_lost_workers(kind: str, after: int) -> None:
    simulation = Simulation(CONFIG)
    request = simulation.submit(PROMPT, 1, **KINDS[kind])
    simulation.events(after)
    simulation.lose_workers()
    simulation.replace_workers()
    simulation.finish()
    assert simulation.streams[request].pooled


def test_what_is_cached() -> None:
    """The last token's state needs the KV of the others only; a mean needs all states, which no cache has."""
    simulation = Simulation(CONFIG)
    simulation.ask(PROMPT, 3)
    last = simulation.ask(PROMPT, 1, pooling=POOL_LAST)
    assert last.cached_tokens == len(PROMPT) - 1
    mean = simulation.ask(PROMPT, 1, pooling=POOL_MEAN)
    assert mean.cached_tokens == 0
    assert mean.started is not None
    assert mean.started.miss == "off"
    again = simulation.ask([*PROMPT, 7], 1, pooling=POOL_LAST)
    assert again.cached_tokens == len(PROMPT)


def test_prompts_that_come_together_compute_what_they_share_once() -> None:
    """A query and its documents."""
    simulation = Simulation(CONFIG)
    rests = [[index, *range(5)] for index in range(6)]
    for rest in rests:
        simulation.submit(PROMPT[:28] + rest, 1, pooling=POOL_LAST)
    simulation.finish()
    assert simulation.workers.computed_tokens == 28 + sum(map(len, rests))
    assert [stream.cached_tokens for stream in simulation.streams.values()] == [0, *[28] * 5]


def test_a_mean_stores_no_chunk_twice() -> None:
    simulation = Simulation(CONFIG)
    simulation.ask(PROMPT, 1, pooling=POOL_MEAN)
    written = simulation.workers.written_tokens
    simulation.ask(PROMPT[:28], 1, pooling=POOL_MEAN)
    assert simulation.workers.written_tokens - written == 0
    assert simulation.workers.computed_tokens == 30 + 28


LAYOUT = PromptLayout([], pack_int32([0, 4]))


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({}, ""),
        ({"max_tokens": 2}, "one output token"),
        ({"n": 2}, "one sample"),
        ({"beam": BeamSearch(2), "n": 2}, "one sample"),
        ({"drops": pack_int32([0, 2])}, "seen whole"),
        ({"layout": LAYOUT}, "plain"),
    ],
)
@pytest.mark.parametrize("pooling", [POOL_LAST, POOL_MEAN])
def test_what_cannot_be_pooled(fields: dict[str, Any], word: str, pooling: int) -> None:
    submit = Submit(1, pack_int32([1, 2, 3, 4]), 4, 1, Sampling(pooling=pooling))
    submit = msgspec.structs.replace(submit, **fields)
    assert not problem_of_submit(submit, 100)
    problem, _ = problem_of_request(Request.of(1, submit), CONFIG)
    assert (word in problem) if word else not problem
    unknown = msgspec.structs.replace(submit, sampling=Sampling(pooling=3))
    assert "pooling is 3" in problem_of_submit(unknown, 100)
