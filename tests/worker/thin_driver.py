"""Models in which some layers have a window, over blocks of which few have memory for these layers.

What becomes thin is filled with large numbers instead of being given back, so that nothing counts it unnoticed.
(Not with NaN: kernels read several chunks at a time, and give those behind the window the weight 0.)
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from simulation.driver import Simulation
from worker.checkpoints import Models
from worker.driver import VOCAB_SIZE
from worker.engine_driver import make_simulation

from trunkline.controller.reports import StepResult
from trunkline.kvstore.chunks import Int32Array
from trunkline.worker.messages import StepPlan
from trunkline.worker.runner import Runner

WINDOW = 20
BLOCKS = 80
SHARE = 0.2
LARGE = 1e6
SEEN_ALIKE = (
    *("gemma2", "gemma4", "gemma4-experts", "cohere2", "exaone4", "ministral", "qwen2-windows"),
    "smollm3-windows",
)
"""Families whose windows work in the way of another one's; they are left to long runs."""
FAMILIES = (
    *("gemma3", "gpt-oss", "olmo3", "gemma4-e"),
    *(pytest.param(name, marks=pytest.mark.soak) for name in SEEN_ALIKE),
)


def with_windows(models: Models, name: str) -> Path:
    """Return a checkpoint in which a layer of a chunk is a page."""
    wide = {"global_head_dim": 32} if name.startswith("gemma4") else {}
    return models(name, sliding_window=WINDOW, head_dim=32, **wide)


def small(folder: Path, blocks: int = BLOCKS, **settings: object) -> Simulation:
    """An engine with steps of 32 tokens, over blocks of which a fifth can hold all layers."""
    settings = {"token_budget": 32, "max_rows": 8, "window_share": SHARE, **settings}
    return make_simulation(folder, blocks, **settings)


def runner_of(simulation: Simulation) -> Runner:
    runner: Runner = simulation.workers.runner  # type: ignore[attr-defined]
    return runner


def windowed_layers(runner: Runner) -> list[int]:
    """Return the layers of the pool that have a window."""
    config = runner._decoder.shard.config
    return [layer for layer in range(config.kv_layers) if config.attention[layer].window]


def spoil(simulation: Simulation) -> list[int]:
    """Fill with `LARGE` what plans thin, and with NaN what is free; return the list of the thinned blocks."""
    runner, thinned = runner_of(simulation), list[int]()
    execute = runner.execute
    layers = windowed_layers(runner)
    assert 0 < len(layers) < runner.pool.format.layers

    def fill(blocks: Int32Array) -> None:
        thinned.extend(blocks.tolist())
        for block in blocks.tolist():
            runner.pool.data[block, layers] = LARGE

    def step(plan: StepPlan) -> StepResult | None:
        pool = simulation.engine.scheduler.kv.pool
        taken = set(pool.taken)
        for block in pool.free_blocks() - taken:
            runner.pool.data[block] = torch.nan
        return execute(plan)

    object.__setattr__(runner.pool, "thin", fill)
    runner.execute = step  # type: ignore[method-assign]
    return thinned


def random_tokens(rng: np.random.Generator, count: int) -> list[int]:
    tokens: list[int] = rng.integers(VOCAB_SIZE, size=count).tolist()
    return tokens
