"""The real engine's plans with adapters, executed by the real runner: prefix hits, preemption, host memory,
drafts, cuts and samples change no text, and KV of one adapter is never another's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulation.drafts import KnownDrafts, draft_from
from simulation.driver import Simulation
from worker.driver import VOCAB_SIZE
from worker.engine_driver import RealWorkers, make_simulation
from worker.peft_folders import PeftFolder, load

from trunkline.kvstore.adapters import adapter_salt


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [PeftFolder(root / str(seed), folder, seed=seed, r=2 + seed).folder for seed in range(2)]


def start(folder: Path, adapters: list[Path], blocks: int, **settings: Any) -> tuple[Simulation, list[bytes]]:
    """A group with two adapters; the salts of requests for the base model and for them."""
    simulation = make_simulation(folder, blocks, **settings)
    workers: Any = simulation.workers
    assert isinstance(workers, RealWorkers)
    keys = [load(workers.runner, f"adapter-{number}", path).key for number, path in enumerate(adapters)]
    return simulation, [b"", *(adapter_salt(key, b"") for key in keys)]


def outputs(
    folder: Path,
    adapters: list[Path],
    prompts: list[list[int]],
    blocks: int,
    known: list[list[list[int]]] | None = None,
    **settings: Any,
) -> tuple[list[list[list[int]]], Simulation]:
    """What all prompts give, in turn of the base model and of the adapters.

    Args:
        known: what they have given before, which is drafted, among other tokens; None: there are no drafts.
    """
    simulation, salts = start(folder, adapters, blocks, **settings)
    if known is not None:
        draft_from(simulation, lambda simulation: KnownDrafts(simulation, dict(enumerate(known, 1))))
    found = [
        simulation.submit(prompt, 16, seed=index, salt=salts[index % 3], n=1 + index % 2)
        for index, prompt in enumerate(prompts)
    ]
    simulation.run()
    return [simulation.streams[request].outputs for request in found], simulation


def make_prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    prefix = rng.integers(VOCAB_SIZE, size=40).tolist()
    return [prefix + rng.integers(VOCAB_SIZE, size=1 + index).tolist() for index in range(9)]


@pytest.mark.parametrize("settings", [{}, {"host_memory_bytes": 1 << 20}], ids=["plain", "host"])
def test_text_does_not_depend_on_what_the_engine_does(
    folder: Path, adapters: list[Path], settings: dict[str, Any]
) -> None:
    prompts = make_prompts()
    roomy, simulation = outputs(folder, adapters, prompts, 400, **settings)
    assert simulation.engine.counters.cached_tokens > 0
    tight, simulation = outputs(folder, adapters, prompts, 26, **settings)
    assert simulation.engine.scheduler.counters.preemptions > 0
    assert tight == roomy
    drafted, simulation = outputs(folder, adapters, prompts, 26, roomy, **settings)
    counters = simulation.engine.counters
    assert counters.drafted_tokens > counters.accepted_drafts > 10
    assert counters.preemptions > 0
    assert drafted == roomy
    alone = []
    for index, prompt in enumerate(prompts):
        simulation, salts = start(folder, adapters, 60)
        request = simulation.submit(prompt, 16, seed=index, salt=salts[index % 3], n=1 + index % 2)
        simulation.run()
        alone.append(simulation.streams[request].outputs)
    assert roomy == alone


def test_adapters_share_nothing(folder: Path, adapters: list[Path]) -> None:
    """The same prompt of the base model and of each adapter; then each again, which finds its own KV."""
    simulation, salts = start(folder, adapters, 200)
    prompt = make_prompts()[0][:33]
    first = []
    for salt in salts:
        before = simulation.engine.counters.cached_tokens
        first.append(simulation.submit(prompt, 8, salt=salt))
        simulation.run()
        assert simulation.engine.counters.cached_tokens == before
    texts = [simulation.streams[request].output for request in first]
    assert len({tuple(text) for text in texts}) == 3
    for salt, text in zip(salts, texts, strict=True):
        before = simulation.engine.counters.cached_tokens
        again = simulation.submit(prompt, 8, salt=salt)
        simulation.run()
        assert simulation.engine.counters.cached_tokens == before + 32
        assert simulation.streams[again].output == text


def test_cuts(folder: Path, adapters: list[Path]) -> None:
    """A prompt with dropped ranges, on top of what was computed with all of it."""
    simulation, salts = start(folder, adapters, 200)
    rng = np.random.default_rng(4)
    prompt = rng.integers(VOCAB_SIZE, size=60).tolist()
    found = []
    for salt in (*salts, *salts):
        simulation.submit(prompt[:48], 4, salt=salt)
        simulation.run()
        found.append(simulation.submit(prompt, 8, salt=salt, drops=((8, 24),)))
        simulation.run()
    texts = [simulation.streams[request].output for request in found]
    assert texts[:3] == texts[3:]
    assert len({tuple(text) for text in texts}) == 3
