"""Pooled hidden states against `transformers`, of one rank and of several, in pieces and beside other rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulation.driver import Simulation
from worker.checkpoints import KINDS, Models, assert_greedy, with_kernels
from worker.driver import VOCAB_SIZE, Stream, run_config
from worker.engine_driver import make_simulation
from worker.pooling_driver import expected, pool_on_rank, pool_prompts, pooled
from worker.ranks import run_ranks
from worker.variants import FAMILIES

from trunkline.kvstore.chunks import pack_int32
from trunkline.worker.errors import PlanError
from trunkline.worker.loading import load_runner
from trunkline.worker.messages import POOL_LAST, POOL_MEAN, Join, Sampling, StepPlan


def check(folder: Path, streams: list[Stream]) -> None:
    for stream in streams:
        np.testing.assert_allclose(pooled(stream), expected(folder, stream), atol=1e-4, err_msg=folder.name)
        if not stream.sampling.temperature:
            assert_greedy(folder, stream)


@with_kernels(FAMILIES, soak=set(FAMILIES) - {*KINDS, "mixtral", "gemma2", "falcon-7b", "qwen3"})
def test_states_equal_those_of_transformers(name: str, kernels: str, models: Models) -> None:
    runner = load_runner(run_config(models(name), kernels=kernels), lambda *_: None)
    runner.pool.data.fill_(float("nan"))
    check(models(name), pool_prompts(runner))
    runner.close()


@pytest.mark.processes
def test_ranks_give_the_same(models: Models) -> None:
    """They sum parts of the states; the first rank reports."""
    folders = [models(name) for name in ("gqa", "opt-350m", "falcon-7b", "gemma3")]
    first, second = run_ranks(pool_on_rank, 2, folders)
    for folder, streams in zip(folders, first, strict=True):
        check(folder, streams)
    assert not any(stream.logprobs for streams in second for stream in streams)


def test_a_mean_without_its_first_tokens(folder: Path) -> None:
    """A controller that takes the cached part for granted would get a wrong mean."""
    runner = load_runner(run_config(folder), lambda *_: None)
    join = Join(1, pack_int32(range(8)), 0, 8, pack_int32([3]), Sampling(pooling=POOL_MEAN))
    with pytest.raises(PlanError, match="5 of its prompt's 8 tokens"):
        runner.execute(StepPlan(1, 1, joins=[join], prefill=pack_int32([1, 3, 5, 3, 1])))


def test_half_precision_stays_close(folder: Path) -> None:
    runner = load_runner(run_config(folder, dtype="bfloat16"), lambda *_: None)
    for stream in pool_prompts(runner):
        ours, theirs = pooled(stream), expected(folder, stream)
        assert ours.dtype == np.float32
        assert np.linalg.norm(ours - theirs) < 0.05 * np.linalg.norm(theirs)


KINDS_OF_REQUESTS: list[dict[str, Any]] = [
    {"max_tokens": 1, "pooling": POOL_LAST},
    {"max_tokens": 1, "pooling": POOL_MEAN},
    {"max_tokens": 14},
    {"max_tokens": 1, "pooling": POOL_MEAN, "prompt_logprobs": 0},
]


def states(simulation: Simulation, prompts: list[list[int]], *, together: bool) -> list[bytes | None]:
    requests = []
    for index, prompt in enumerate(prompts):
        requests.append(simulation.submit(prompt, seed=index, **KINDS_OF_REQUESTS[index % 4]))
        if not together:
            simulation.run()
    for _ in range(12 * together):
        simulation.events(4)
        simulation.preempt()
    simulation.run()
    assert all(simulation.streams[request].reason == "length" for request in requests)
    return [simulation.streams[request].pooled for request in requests]


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_states_do_not_depend_on_what_the_engine_does(folder: Path, preemption: str) -> None:
    """Alone; and together, on cached prefixes, in a small pool, while all that runs is preempted often."""
    rng = np.random.default_rng(3)
    prefix = rng.integers(VOCAB_SIZE, size=30).tolist()
    heads = [prefix[: int(rng.integers(0, 31))] for _ in range(24)]
    prompts = [head + rng.integers(VOCAB_SIZE, size=int(rng.integers(1, 20))).tolist() for head in heads]
    alone = states(make_simulation(folder, 100, prefix_cache=False), prompts, together=False)
    tight = make_simulation(folder, 22, preemption=preemption, host_memory_bytes=1 << 20)
    found = states(tight, prompts, together=True)
    assert tight.engine.scheduler.counters.preemptions > 5
    assert tight.engine.counters.cached_tokens > 0
    for one, other in zip(alone, found, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            np.testing.assert_allclose(np.frombuffer(one, "<f4"), np.frombuffer(other, "<f4"), atol=1e-4)
