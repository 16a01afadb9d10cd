"""Models in which some layers have a window, with host memory below blocks that may be thin, through the real
engine and a real runner: what was spilled and comes back gives the texts of `transformers`.

What becomes thin, or is loaded into a thin block, has large numbers in the layers with a window, so that nothing
counts it unnoticed.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from simulation.driver import Simulation
from worker.checkpoints import Models, assert_greedy, transformers_logits
from worker.cuts import CHUNK
from worker.module_group import ENGINE, Answer, ModuleGroup
from worker.redis_server import RedisServer
from worker.thin_driver import (
    FAMILIES,
    LARGE,
    SHARE,
    WINDOW,
    random_tokens,
    runner_of,
    small,
    spoil,
    windowed_layers,
    with_windows,
)

from trunkline.controller.reports import StepResult
from trunkline.controller.tiers.costs import StepCosts
from trunkline.kvstore.chunks import unpack_int32
from trunkline.kvstore.tier import TierKind
from trunkline.kvstore.window_share import LoadedLayers
from trunkline.worker.messages import StepPlan

HOST = 4 << 20


def loads_of(simulation: Simulation) -> Counter[LoadedLayers]:
    """Spoil what nothing may read (`spoil`), also in blocks that stay thin; return the counts of the loads."""
    spoil(simulation)
    runner, counts = runner_of(simulation), Counter[LoadedLayers]()
    execute = runner.execute
    layers = windowed_layers(runner)

    def step(plan: StepPlan) -> StepResult | None:
        assert runner.copier is not None
        runner.copier.saves.wait_for(runner.copier.saves.submitted)  # of blocks that are spoilt now
        result = execute(plan)
        loads = unpack_int32(plan.loads, columns=3)
        for (block, _, _), which in zip(loads.tolist(), plan.load_layers or bytes(len(loads)), strict=True):
            counts[LoadedLayers(which)] += 1
            if which == LoadedLayers.PLAIN:
                held = runner.pool.data[block, layers]
                assert ((held == LARGE) | held.isnan()).all(), "a thin block was loaded as a whole"
        return result

    runner.execute = step  # type: ignore[method-assign]
    return counts


@pytest.fixture(scope="module", params=FAMILIES)
def mixed(models: Models, request: pytest.FixtureRequest) -> Path:
    return with_windows(models, request.param)


def ask(simulation: Simulation, prompt: list[int], tokens: int = 12) -> tuple[list[int], int]:
    """Return the prompt with its output, and how many of the prompt's tokens were found."""
    stream = simulation.streams[simulation.submit(prompt, tokens, temperature=0.0)]
    simulation.run()
    assert stream.cached_tokens is not None
    return stream.prompt + stream.output, stream.cached_tokens


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_kv_in_8_bits(models: Models, kv_dtype: str) -> None:
    """Texts are those of blocks that are all whole. What lies behind windows is given back for real, of layers
    that are no whole pages."""
    folder = models("gemma3", sliding_window=WINDOW, num_attention_heads=8, num_key_value_heads=8, head_dim=64)
    said = []
    for share in (SHARE, 1.0):
        rng = np.random.default_rng(8)
        simulation = small(
            folder, 60, host_memory_bytes=4 * HOST, preemption="swap", window_share=share, kv_dtype=kv_dtype
        )
        assert simulation.engine.config.whole_blocks == (12 if share < 1 else 0)
        session, _ = ask(simulation, random_tokens(rng, 250))
        midway, _ = ask(simulation, [*session[:150], 5, 6, 7])
        others = [ask(simulation, random_tokens(rng, 200))[0] for _ in range(3)]
        turn, found = ask(simulation, [*session, 1, 2, 3])
        assert found == len(session) - 1
        said.append([session, midway, *others, turn])
    assert said[0] == said[1]


@pytest.mark.processes
@pytest.mark.usefixtures("patience")
def test_texts_come_back_from_every_tier(models: Models, redis_server: RedisServer, tmp_path: Path) -> None:
    """Nothing is computed but what follows, and no token differs; midway, too, where the tiers' copies give layers
    with a window what they need."""
    folder = models("gemma3", sliding_window=WINDOW, head_dim=32)
    tiers: dict[str, Any] = {
        "host_memory_bytes": HOST,
        "disk_path": str(tmp_path / "slab"),
        "disk_bytes": 2 * HOST,
    }
    settings = replace(ENGINE, num_blocks=90, max_context=400)
    group = ModuleGroup(folder, settings, window_share=SHARE, remote_url=redis_server.url, **tiers)
    try:
        rng = np.random.default_rng(9)
        session = group.ask(random_tokens(rng, 300), 20)
        prompts = [[*text_of(session), 1, 2, 3], [*text_of(session)[:150], 5, 6, 7]]
        expected = [group.ask(prompt) for prompt in prompts]
        for tier in (TierKind.HOST, TierKind.DISK, TierKind.REMOTE):
            for prompt, before in zip(prompts, expected, strict=True):
                group.settle()
                group.sink(tier)
                computed = group.engine.computed_tokens
                again = group.ask(prompt)
                assert again.tokens == before.tokens
                assert again.found[tier] > len(prompt) // 2
                assert group.engine.computed_tokens - computed <= 2 * CHUNK
    finally:
        group.close()
    for answer in (session, *expected):
        assert isinstance(answer.prompt, list)
        logits = transformers_logits(folder, text_of(answer))
        assert logits[len(answer.prompt) - 1 : -1].argmax(dim=-1).tolist() == answer.tokens[0]


@pytest.mark.usefixtures("patience")
def test_what_has_become_thin_comes_back_from_disk(models: Models, tmp_path: Path) -> None:
    """Where a prompt leaves a text midway, the last window comes from disk, and all before it is on the device."""
    folder = models("gemma3", sliding_window=WINDOW, head_dim=32)
    tiers: dict[str, Any] = {
        "host_memory_bytes": HOST,
        "disk_path": str(tmp_path / "slab"),
        "disk_bytes": 2 * HOST,
    }
    group = ModuleGroup(folder, replace(ENGINE, num_blocks=60, max_context=400), window_share=SHARE, **tiers)
    try:
        session = group.ask(random_tokens(np.random.default_rng(9), 300), 20)
        group.settle()
        tree = group.engine.scheduler.kv.tree
        for node in tree.nodes():
            if node.host_ready:
                tree.tiers.mover.drop_host(node)
        thin = [node for node in tree.nodes() if 5 < node.depth <= 7 and tree.is_thin(node)]
        assert thin, "a query at 112 sees the sixth and seventh chunk"
        computed = group.engine.computed_tokens
        midway = group.ask([*text_of(session)[:112], 5, 6, 7])
        assert midway.found[TierKind.DISK] == CHUNK * len(thin)
        assert sum(midway.found) == 112
        assert group.engine.computed_tokens - computed == 3
    finally:
        group.close()
    logits = transformers_logits(folder, text_of(midway))
    assert logits[114:-1].argmax(dim=-1).tolist() == midway.tokens[0]


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading always pays: computing seems to take far longer."""
    monkeypatch.setattr(StepCosts, "token_us", 1e6)


def text_of(answer: Answer) -> list[int]:
    assert isinstance(answer.prompt, list)
    return answer.prompt + answer.tokens[0]


def test_texts_are_spilled_and_come_back(mixed: Path) -> None:
    """A session that has left the device is loaded, into thin blocks but for its last window; one whose blocks
    stayed and became thin gets back what layers with a window need where a request leaves it midway."""
    rng = np.random.default_rng(7)
    simulation = small(mixed, 60, host_memory_bytes=HOST, preemption="swap")
    loads = loads_of(simulation)
    assert (simulation.engine.config.whole_blocks, simulation.engine.config.host_slots > 200) == (12, True)
    session, _ = ask(simulation, random_tokens(rng, 250))
    midway = [*session[:150], 5, 6, 7]
    _, found = ask(simulation, midway)
    assert found == 144
    assert loads[LoadedLayers.WINDOWED] > 0
    for _ in range(3):
        ask(simulation, random_tokens(rng, 200))
    before = loads.copy()
    turn = simulation.streams[simulation.submit([*session, 1, 2, 3], 12, temperature=0.0)]
    simulation.run()
    assert turn.cached_tokens == len(session) - 1
    assert_greedy(mixed, turn)
    assert loads[LoadedLayers.PLAIN] - before[LoadedLayers.PLAIN] > 20
    assert loads[LoadedLayers.ALL] - before[LoadedLayers.ALL] >= 3
    again = simulation.streams[simulation.submit(midway, 12, temperature=0.0)]
    simulation.run()
    assert_greedy(mixed, again)
    assert simulation.engine.scheduler.kv.tree.totals.lost_chunks == 0
