"""A model in which some layers have a window and others see everything: what lies behind the window gives back the
memory of the former, and hits need it where their next query sees it.

The simulated workers keep KV of both kinds of layers apart. A token attends to everything in the one and to its
window in the other; there is memory for so many blocks of the latter and no more, and what a plan thins is gone.
`check_integrity` counts who reads what after every step.
"""

from __future__ import annotations

import random

import pytest
from controller.kv_harness import tokens_of
from controller.window_harness import WindowBench
from msgspec.structs import replace
from seeds import seeds
from simulation.driver import Simulation
from simulation.traffic import Mix, Traffic

from trunkline.controller.cache.radix_tree import Node
from trunkline.controller.cache.thin_blocks import ThinPool
from trunkline.controller.cache.thin_cache import ThinCache
from trunkline.controller.engine.integrity import check_integrity, check_kv_cache
from trunkline.controller.engine_config import ConfigError, EngineConfig
from trunkline.kvstore.chunks import BlockId, unpack_int32
from trunkline.kvstore.tier import TierKind
from trunkline.kvstore.window_share import LoadedLayers
from trunkline.worker.messages import StepPlan

CHUNK = 4
QUICK_S = 1e-5
"""Time from step to step, so short that what is read from disk is waited for."""
SMALL = EngineConfig(
    num_blocks=60, chunk_size=CHUNK, max_context=200, token_budget=16, max_rows=6, part_window=12, whole_blocks=18
)
ENGINES = {
    "all kinds": (SMALL, Mix(prompt_max=120, output_max=40, samples=0.1, beams=0.1, preempts=0.005)),
    "long prompts only": (SMALL, Mix(prompt_max=180, output_max=20, samples=0, beams=0, scored=0, grammars=0)),
    "cuts": (replace(SMALL, num_blocks=90), Mix(prompt_max=120, output_max=40, cuts=0.2, ttl=0.1, preempts=0.005)),
    "few blocks": (replace(SMALL, num_blocks=26, part_window=9), Mix(prompt_max=60, preempts=0.02)),
    "modules": (
        replace(SMALL, num_blocks=90, whole_blocks=40),
        Mix(prompt_max=100, modules=0.5, calls=0.05, schemas=6, ttl=0.1, preempts=0.01),
    ),
    "modules, few blocks, tiers": (
        replace(SMALL, num_blocks=48, whole_blocks=26, host_slots=30, disk_slots=60, preemption="swap"),
        Mix(prompt_max=80, modules=0.6, calls=0.05, schemas=6, preempts=0.02),
    ),
    "lost workers": (SMALL, Mix(prompt_max=60, losses=0.01)),
    "host tier": (
        replace(SMALL, host_slots=70),
        Mix(prompt_max=120, output_max=40, samples=0.1, beams=0.1, cuts=0.05, ttl=0.1, preempts=0.02),
    ),
    "disk tier": (
        replace(SMALL, num_blocks=40, host_slots=24, disk_slots=150),
        Mix(prompt_max=120, output_max=40, ttl=0.1, preempts=0.02, losses=0.003),
    ),
    "few slots": (
        replace(SMALL, num_blocks=44, host_slots=9, disk_slots=12, preemption="swap"),
        Mix(prompt_max=120, output_max=20, preempts=0.03),
    ),
    "one token a chunk": (
        replace(SMALL, chunk_size=1, num_blocks=160, part_window=17, whole_blocks=60),
        Mix(prompt_max=100),
    ),
}


@pytest.mark.parametrize("seed", seeds(1, always=(676,)))
@pytest.mark.parametrize("name", ENGINES)
def test_traffic(name: str, seed: int) -> None:
    config, mix = ENGINES[name]
    Traffic(config, mix, seed, check=True).run(16)
    traffic = Traffic(config, mix, seed, check=False)
    traffic.simulation.pace_s = QUICK_S
    traffic.run(50)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", seeds(4))
@pytest.mark.parametrize("name", ENGINES)
def test_much_traffic(name: str, seed: int) -> None:
    config, mix = ENGINES[name]
    traffic = Traffic(config, mix, seed, check=False)
    traffic.simulation.pace_s = (QUICK_S, 1.0)[seed % 2]
    traffic.run(3000)


class Bench(WindowBench):
    """A manager of blocks that may be thin, without an engine."""

    pool: ThinPool
    tree: ThinCache

    def __init__(self, num_blocks: int = 60, whole_blocks: int = 24) -> None:
        super().__init__(
            replace(SMALL, num_blocks=num_blocks, whole_blocks=whole_blocks, max_context=1000, token_budget=80)
        )

    def thin(self, path: list[Node]) -> list[bool]:
        return [self.tree.is_thin(node) for node in path]


def test_a_prompt_much_longer_than_the_whole_blocks_runs_in_them() -> None:
    config = replace(SMALL, num_blocks=400, max_context=1500)
    assert (config.longest_plain, config.longest_sequence) == (1500, 72)
    simulation = Simulation(config, check=False)
    stream = simulation.ask(tokens_of(0, 1000), 300)
    assert len(stream.output) == 300
    pool = simulation.engine.scheduler.kv.pool
    assert isinstance(pool, ThinPool)
    assert pool.whole_count == 18
    assert simulation.engine.counters.preemptions == 0
    check_integrity(simulation.engine.scheduler)


def test_the_next_turn_finds_everything() -> None:
    simulation = Simulation(replace(SMALL, num_blocks=80, max_context=400))
    first = simulation.ask(tokens_of(0, 200), 20)
    thin = [node for node in simulation.tree.nodes() if simulation.tree.is_thin(node)]
    assert len(thin) > 30
    second = simulation.ask(first.prompt + first.output + tokens_of(3, 10), 10)
    assert second.cached_tokens is not None
    assert second.cached_tokens >= 219  # all but the last sampled token, whose KV was never computed


def test_what_lies_behind_the_window_becomes_thin_first() -> None:
    """Also before the chunks of a session that was used earlier; idle or not, blocks and places stay."""
    bench = Bench()
    old = bench.cache([40, 41, 42, 43] * 2, request=1)
    path = bench.cache(tokens_of(0, 32), request=2)
    assert bench.tree.thin(5) == 5
    assert bench.thin(path) == [True] * 5 + [False] * 3
    assert bench.tree.thin(2) == 2
    assert bench.thin(old) == [True] * 2, "the old session comes next"
    assert all(node.on_device for node in old + path)
    check_kv_cache(bench.kv, [], [])


def test_a_hit_falls_back_to_where_its_window_is_whole() -> None:
    bench = Bench()
    tokens = tokens_of(0, 64)
    path = bench.cache(tokens)
    for node in (*path[:5], path[11]):  # 16 chunks
        bench.pool.thin(node.block)
        bench.tree._thinnable -= 1
    sequence = bench.admit([*tokens, 1, 2], request=2)
    assert sequence.cached_tokens == 64, "a query at 64 sees chunks 13 to 15"
    assert sequence.block_table()[:16] == [node.block for node in path]
    bench.leave(sequence)
    sequence = bench.admit([*tokens[:50], 3], request=3)
    assert sequence.cached_tokens == 44, "behind chunk 12 chunk 11 is seen; behind chunk 10 chunks 8 to 10"
    assert sequence.path[:11] == path[:11]


def test_a_thin_chunk_is_computed_again_in_its_place() -> None:
    """It gets the new block and keeps what is below it; if others use it, the new block stays private."""
    bench = Bench()
    tokens = tokens_of(0, 64)
    path = bench.cache(tokens)
    assert bench.tree.thin(13) == 13
    before = [node.block for node in path]
    sequence = bench.admit([*tokens[:30], 1], request=2)
    assert sequence.cached_tokens == 0
    assert sequence.path == path[:7]
    assert all(node.block != block for node, block in zip(path[:7], before, strict=False))
    bench.leave(sequence)
    longer = bench.admit([*tokens, 1, 2], request=3)
    assert longer.cached_tokens == 64, "what is below has stayed"
    assert bench.tree.thin(100) > 6
    other = bench.admit([*tokens[:22], 9], request=4)
    assert other.cached_tokens == 0
    assert other.path == [], "its blocks are its own while another reads those of the tree"
    assert len(other.private) == 6
    check_kv_cache(bench.kv, [longer, other], [])
    bench.kv.leave(longer, 66, 9.0)
    bench.leave(other)
    assert bench.thin(path[:5]) == [False] * 5, "then the tree has them"


def test_a_text_comes_back_from_host_memory() -> None:
    """Where it left its blocks, into thin ones but for its last window; where these stayed and became thin, what
    layers with a window need comes back into them."""
    simulation = Simulation(replace(SMALL, max_context=400, host_slots=300, preemption="swap"))
    kinds: list[bytes] = []
    simulation.workers.observer = lambda plan: kinds.append(plan.load_layers or bytes(len(plan.loads) // 12))
    first = simulation.ask(tokens_of(0, 200), 12)
    midway = simulation.ask([*first.prompt[:150], 5, 6, 7], 12)
    assert midway.cached_tokens == 150
    assert b"".join(kinds) == bytes([LoadedLayers.WINDOWED] * 2), "the third of its window has stayed whole"
    for start in (1, 2):  # others
        simulation.ask(tokens_of(start, 200), 12)
    kinds.clear()
    turn = simulation.ask([*first.prompt, *first.output, 1, 2], 12)
    assert turn.cached_tokens == 211
    loads = b"".join(kinds)
    assert 2 <= loads.count(LoadedLayers.ALL) <= 4, "a query at 211 sees chunks 50 to 52"
    assert loads.count(LoadedLayers.PLAIN) > 30
    check_integrity(simulation.engine.scheduler)


@pytest.mark.parametrize("remote", [False, True])
def test_a_thin_chunk_comes_back_from_below_host_memory(remote: bool) -> None:
    """Its place on the device does not hide that layers with a window need it; nothing else is read for them."""
    config = replace(SMALL, num_blocks=90, max_context=400, host_slots=12, disk_slots=400 * (not remote))
    simulation = Simulation(replace(config, remote=remote, preemption="swap"))
    simulation.pace_s = QUICK_S
    first = simulation.ask(tokens_of(0, 280), 12)
    chunks = list(simulation.tree.nodes())
    thin = [node for node in chunks if simulation.tree.is_thin(node) and not node.host_ready]
    assert len(thin) > 25
    assert all(node.on_device and (node.remote if remote else node.disk_ready) for node in thin)
    totals = simulation.tree.totals.tiers[TierKind.REMOTE if remote else TierKind.DISK]
    before = totals.reads
    kinds: list[bytes] = []
    simulation.workers.observer = lambda plan: kinds.append(plan.load_layers or bytes(len(plan.loads) // 12))
    midway = simulation.ask([*first.prompt[:160], 5, 6, 7], 12)
    assert midway.cached_tokens == 160
    assert b"".join(kinds) == bytes([LoadedLayers.WINDOWED] * 3), "a query at 160 sees chunks 37 to 39"
    assert totals.reads - before == sum(37 < node.depth <= 40 for node in thin) > 0
    check_integrity(simulation.engine.scheduler)


def test_two_prompts_of_one_plan_load_a_chunk_once() -> None:
    """The longer one has it behind its window, the other one within: it is loaded as a whole then."""
    config = replace(
        SMALL, num_blocks=120, whole_blocks=36, max_context=400, token_budget=64, host_slots=300, preemption="swap"
    )
    simulation = Simulation(config)
    first = simulation.ask(tokens_of(0, 200), 12)
    for start in range(1, 5):  # others, until nothing of it is left on the device
        simulation.ask(tokens_of(start, 200), 12)
    loads: list[list[int]] = []
    layers: list[bytes] = []

    def observe(plan: StepPlan) -> None:
        loads.append([int(block) for block in unpack_int32(plan.loads, 3)[:, 0]])
        layers.append(plan.load_layers)

    simulation.workers.observer = observe
    longer = simulation.submit([*first.prompt, *first.output, 1, 2], 8)
    shorter = simulation.submit([*first.prompt[:148], 5, 6, 7], 8)
    simulation.finish()
    assert simulation.streams[longer].cached_tokens == 211
    assert simulation.streams[shorter].cached_tokens == 148
    step = max(range(len(loads)), key=lambda index: len(loads[index]))
    assert len(set(loads[step])) == len(loads[step]) > 50, "both are loaded with one plan"
    assert layers[step].count(LoadedLayers.ALL) > 4, "the windows of both"


def test_a_release_that_reads_nothing_leaves_chunks_to_be_found() -> None:
    """It makes a chunk younger that others still stand below: what is counted can be had all the same."""
    bench = Bench()
    path = bench.cache(tokens_of(0, 32))
    bench.tree.hold(path[7], 1)
    bench.tree.hold(path[5], 0)
    bench.tree.release(path[5], 100.0, 0)
    assert bench.tree.thinnable == 7
    assert bench.tree.thin(7) == 7
    bench.tree.release(path[7], 101.0, 1)
    check_kv_cache(bench.kv, [], [])


def test_a_pool_counts_what_is_whole() -> None:
    """Many random steps: no more is whole than there is memory for, and each block is free or held once."""
    rng = random.Random(3)
    pool = ThinPool(12, 5)
    held: list[BlockId] = []
    for _ in range(3000):
        action = rng.randrange(5)
        thin = [block for block in held if not pool.is_whole(block)]
        whole = [block for block in held if pool.is_whole(block)]
        if action == 0 and pool.free_count and pool.whole_free:
            held.append(pool.allocate())
            assert pool.is_whole(held[-1])
        elif action == 1 and pool.free_count:
            held.append(pool.allocate_thin())
            assert not pool.is_whole(held[-1])
        elif action == 2 and thin and pool.whole_free:
            pool.widen(rng.choice(thin))
        elif action == 3 and whole:
            pool.thin(rng.choice(whole))
        elif action == 4 and held:
            pool.release(held.pop(rng.randrange(len(held))))
        assert len(set(held)) == len(held)
        assert set(held).isdisjoint(pool.free_blocks())
        assert len(held) + pool.free_count == 12
        assert pool.whole_count <= 5
        pool.take_thinned()


def test_settings_that_cannot_work_are_refused() -> None:
    for fields, reason in (
        ({"whole_blocks": 61}, "the pool has 60 blocks"),
        ({"whole_blocks": 9}, "need"),
        ({"part_window": 0}, "no layers with a window"),
        ({"prefix_cache": False}, "with the prefix cache only"),
    ):
        with pytest.raises(ConfigError, match=reason):
            replace(SMALL, **fields).validate()
    SMALL.validate()
    replace(SMALL, whole_blocks=0, host_slots=4).validate()
