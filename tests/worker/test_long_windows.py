"""Texts many windows long, through the real engine and a real runner: they equal those of `transformers`.

The pool begins with NaN, and holds a fraction of what the texts would need without a window, so blocks are given
up and used again all the time.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from simulation.driver import Simulation
from worker.checkpoints import Models, assert_greedy, transformers_logits
from worker.driver import VOCAB_SIZE, run_config
from worker.engine_driver import make_simulation, replay
from worker.ranks import run_ranks

from trunkline.controller.reports import StepResult
from trunkline.kvstore.chunk_format import KV_DTYPES
from trunkline.worker.loading import load_runner
from trunkline.worker.messages import StepPlan

WINDOW = 20
BLOCKS = 26


@pytest.fixture(scope="module")
def windowed(models: Models) -> Path:
    return models("mistral", sliding_window=WINDOW)


def small(folder: Path, blocks: int = BLOCKS, **settings: object) -> Simulation:
    """An engine whose pool holds 208 tokens, with steps of 32."""
    return make_simulation(folder, blocks, **{"token_budget": 32, "max_rows": 8, **settings})


def test_only_models_whose_layers_all_have_a_window_have_one(models: Models, windowed: Path) -> None:
    windows = {
        folder: load_runner(
            run_config(models(folder) if folder != "windowed" else windowed), lambda *_: None
        ).window
        for folder in ("windowed", "gqa", "gemma2", "qwen2-windows")
    }
    assert windows == {"windowed": WINDOW, "gqa": 0, "gemma2": 0, "qwen2-windows": 0}


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_turns_of_long_texts(windowed: Path, preemption: str) -> None:
    """Prompts with a common beginning, some of which are preempted, then the next turns."""
    rng = np.random.default_rng(1)
    head = rng.integers(VOCAB_SIZE, size=70).tolist()
    prompts = [head + rng.integers(VOCAB_SIZE, size=int(rng.integers(20, 160))).tolist() for _ in range(4)]
    simulation = small(windowed, 17, preemption=preemption, host_memory_bytes=1 << 20)
    engine = simulation.engine
    assert engine.config.window == WINDOW
    requests = [simulation.submit(prompt, 40, temperature=0.0) for prompt in prompts]
    for _ in range(4):
        for _ in range(12):
            simulation.step()
        if running := engine.scheduler.running():
            engine.scheduler.preempt(running[-1].group, simulation.now)
    simulation.run()
    first = [simulation.streams[request] for request in requests]
    following = [
        simulation.submit(s.prompt + s.output + rng.integers(VOCAB_SIZE, size=9).tolist(), 40, temperature=0.0)
        for s in first
    ]
    simulation.run()
    second = [simulation.streams[request] for request in following]
    for stream in first + second:
        assert len(stream.output) == 40
        assert_greedy(windowed, stream)
    assert any(stream.cached_tokens for stream in second)
    assert max(len(stream.prompt) for stream in second) > 208 > 17 * 8
    assert engine.counters.preemptions > 0


def test_a_hit_needs_no_more_than_the_window(windowed: Path) -> None:
    """With nothing else on the device, a long conversation is continued from its last window."""
    rng = np.random.default_rng(2)
    simulation = small(windowed)
    prompt = rng.integers(VOCAB_SIZE, size=300).tolist()
    first = simulation.streams[simulation.submit(prompt, 30, temperature=0.0)]
    simulation.run()
    turn = simulation.submit(first.prompt + first.output + [1, 2, 3], 20, temperature=0.0)
    simulation.run()
    second = simulation.streams[turn]
    assert second.cached_tokens == 329
    assert_greedy(windowed, second)


@pytest.mark.processes
def test_two_ranks_say_the_same(windowed: Path) -> None:
    """They are given the plans of a long prompt and its next turn."""
    rng = np.random.default_rng(5)
    simulation = small(windowed)
    runner = simulation.workers.runner  # type: ignore[attr-defined]
    execute, plans, tokens = runner.execute, [], []

    def record(plan: StepPlan) -> StepResult:
        result: StepResult = execute(plan)
        plans.append(plan)
        tokens.append(result.tokens)
        return result

    runner.execute = record
    prompt = rng.integers(VOCAB_SIZE, size=250).tolist()
    first = simulation.streams[simulation.submit(prompt, 30, temperature=0.0)]
    simulation.run()
    turn = simulation.submit(first.prompt + first.output + [1, 2, 3], 20, temperature=0.0)
    simulation.run()
    assert simulation.streams[turn].cached_tokens == 279
    assert run_ranks(replay, 2, windowed, BLOCKS, plans)[0] == tokens


def test_samples_cuts_and_scores(windowed: Path) -> None:
    """What keeps all its KV is the same beside what does not."""
    rng = np.random.default_rng(3)
    prompt = rng.integers(VOCAB_SIZE, size=130).tolist()
    found = []
    for window in (WINDOW, 0):  # the controller of the second one gives nothing up
        simulation = small(windowed, 100, window=window)
        plain = simulation.submit(prompt, 30, seed=1)
        samples = simulation.submit(prompt, 30, seed=2, n=3)
        simulation.run()
        cut = simulation.submit(prompt, 30, seed=3, drops=((16, 64),))
        scored = simulation.submit(prompt[:80], 10, seed=4, prompt_logprobs=1)
        simulation.run()
        found.append([simulation.streams[request].outputs for request in (plain, samples, cut, scored)])
    assert found[0] == found[1]
    expected = transformers_logits(windowed, prompt[:80]).log_softmax(dim=-1)
    for position, row in simulation.streams[scored].scored.items():
        assert abs(row[0] - float(expected[position - 1, prompt[position]])) < 1e-4


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_no_stale_block_is_read(windowed: Path, kv_dtype: str) -> None:
    """Free blocks and cached chunks that no sequence reads are filled with NaN before every step."""
    rng = np.random.default_rng(4)
    simulation = small(windowed, 60, kv_dtype=kv_dtype)
    runner = simulation.workers.runner  # type: ignore[attr-defined]
    execute, spoilt = runner.execute, 0

    def spoil(plan: object) -> object:
        nonlocal spoilt
        scheduler = simulation.engine.scheduler
        used = {block for sequence in scheduler.running() for block in [*sequence.block_table(), *sequence.tails]}
        used |= {node.block for node in scheduler.kv.tree.nodes() if not node.spent}
        unused = sorted(set(range(60)) - used)
        spoilt += len(unused)
        for block in unused:
            runner.pool.data[block].view(torch.uint8).fill_(255)
        return execute(plan)

    runner.execute = spoil
    prompts = [rng.integers(VOCAB_SIZE, size=90).tolist() for _ in range(2)]
    requests = [simulation.submit(prompt, 60, temperature=0.0) for prompt in prompts]
    simulation.run()
    assert spoilt > 1000
    for request in requests:
        assert len(simulation.streams[request].output) == 60
        if kv_dtype == "auto":
            assert_greedy(windowed, simulation.streams[request])
