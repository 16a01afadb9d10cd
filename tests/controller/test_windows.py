"""A model whose layers all have a window: what lies behind it costs no blocks, and hits need the window only.

The simulated workers read exactly what the window lets a query see, and fail if any of it is not there, is of
another past, or is written by someone else meanwhile; `check_integrity` counts who reads what after every step.
"""

from __future__ import annotations

import pytest
from controller.kv_harness import tokens_of
from controller.window_harness import WindowBench
from msgspec.structs import replace
from seeds import seeds
from simulation.driver import Simulation
from simulation.traffic import Mix, Traffic

from trunkline.controller.engine.integrity import check_integrity, check_kv_cache
from trunkline.controller.engine_config import EngineConfig

CHUNK = 4
SMALL = EngineConfig(num_blocks=18, chunk_size=CHUNK, max_context=200, token_budget=16, max_rows=6, window=12)
TIERS = replace(SMALL, host_slots=20, disk_slots=60, remote=True, ranks=2)
ENGINES = {
    "device only": (SMALL, Mix(prompt_max=120, output_max=40, samples=0.1, beams=0.1, preempts=0.005)),
    "long prompts only": (SMALL, Mix(prompt_max=180, output_max=20, samples=0, beams=0, scored=0, grammars=0)),
    "tiers, cuts": (TIERS, Mix(prompt_max=120, output_max=40, beams=0.1, cuts=0.2, ttl=0.1, preempts=0.005)),
    "swapping": (
        replace(SMALL, num_blocks=24, window=9, host_slots=20, preemption="swap"),
        Mix(prompt_max=60, preempts=0.02),
    ),
    "recomputing": (
        replace(SMALL, num_blocks=24, window=9, host_slots=20, preemption="recompute"),
        Mix(prompt_max=60, preempts=0.02),
    ),
    "modules": (replace(TIERS, num_blocks=40, window=13), Mix(modules=0.5, calls=0.05, schemas=6)),
    "lost workers": (replace(TIERS, num_blocks=30), Mix(prompt_max=60, losses=0.01)),
    "one token a chunk": (replace(SMALL, chunk_size=1, num_blocks=60, window=17), Mix(prompt_max=100)),
}


@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize("name", ENGINES)
def test_traffic(name: str, seed: int) -> None:
    config, mix = ENGINES[name]
    Traffic(config, mix, seed, check=True).run(16)
    Traffic(config, mix, seed, check=False).run(50)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", seeds(4))
@pytest.mark.parametrize("name", ENGINES)
def test_much_traffic(name: str, seed: int) -> None:
    config, mix = ENGINES[name]
    Traffic(config, mix, seed, check=False).run(3000)


def test_a_sequence_many_times_as_long_as_the_pool_runs_in_a_window() -> None:
    config = replace(SMALL, num_blocks=14, max_context=4000)
    assert config.longest_sequence == 56
    assert config.longest_plain == 4000
    simulation = Simulation(config, check=False)
    held: list[int] = []

    def observe(_: object) -> None:
        read = {node.block for s in simulation.engine.scheduler.running() for node in s.path[s.stem.behind :]}
        held.append(len(read - {-1}))

    simulation.workers.observer = observe
    stream = simulation.ask(tokens_of(0, 1000), 300)
    assert len(stream.output) == 300
    check_integrity(simulation.engine.scheduler)
    assert max(held) <= config.blocks_max <= 12
    assert simulation.engine.counters.preemptions == 0


def test_prompts_that_wait_for_each_other_fit_beside_each_other() -> None:
    simulation = Simulation(replace(SMALL, num_blocks=26, max_context=1000), check=False)
    for start in range(4):
        simulation.submit(tokens_of(start, 400), 30)
    simulation.submit(tokens_of(0, 400), 30)  # the same as the first: it waits for what that one computes
    simulation.finish()
    assert simulation.workers.computed_tokens < 4 * 430 + 2 * 30 + 400
    check_integrity(simulation.engine.scheduler)


def test_the_next_turn_needs_only_the_window_of_the_last_one() -> None:
    simulation = Simulation(replace(SMALL, num_blocks=16, max_context=1000))
    first = simulation.ask(tokens_of(0, 200), 20)
    tree = simulation.engine.scheduler.kv.tree
    hollow = [node for node in tree.nodes() if not node.on_device]
    assert len(hollow) > 30
    prompt = first.prompt + first.output + tokens_of(3, 10)
    second = simulation.ask(prompt, 10)
    assert second.cached_tokens is not None
    assert second.cached_tokens >= 219  # all but the last sampled token, whose KV was never computed
    assert second.started is not None
    assert second.started.exact


def make_bench(num_blocks: int) -> WindowBench:
    return WindowBench(replace(SMALL, num_blocks=num_blocks, window=12, max_context=1000, token_budget=80))


def test_chunks_behind_the_window_leave_first() -> None:
    """Also before those of a session that was used earlier."""
    bench = make_bench(24)
    bench.cache([40, 41, 42, 43] * 2, request=1)  # an old session
    path = bench.cache(tokens_of(0, 32), request=2)
    assert [node.spent for node in path] == [True] * 5 + [False] * 3
    bench.tree.evict(5)
    assert [node.on_device for node in path] == [False] * 5 + [True] * 3
    assert all(node.parent is not None for node in path)
    bench.tree.evict(1)
    assert [node.on_device for node in path] == [False] * 5 + [True] * 3, "the old session comes next"


def test_what_is_seen_from_a_branch_stays() -> None:
    """Two requests have parted behind 16 tokens, so a third may part there, too."""
    bench = make_bench(40)
    head = tokens_of(0, 16)
    bench.cache([*head, *tokens_of(3, 4)], request=1)
    path = bench.cache([*head, *tokens_of(20, 40)], request=2)
    seen_from_there = [1, 2, 3]  # a query at position 16 sees positions 5 to 16
    assert [i for i, node in enumerate(path[: path[0].depth + 10]) if not node.spent][:3] == seen_from_there


def test_a_gap_in_the_window_shortens_the_hit() -> None:
    bench = make_bench(40)
    tokens = tokens_of(0, 48)
    path = bench.cache(tokens)
    for node in path[:5]:  # 12 chunks; without 0 to 4, and later 9
        bench.pool.release(bench.tree.unplace(node))
    sequence = bench.admit([*tokens, 1, 2], request=2)
    assert sequence.cached_tokens == 48
    assert sequence.stem.behind == 9
    assert sequence.block_table()[:9] == [-1] * 9
    bench.kv.leave(sequence, 48, 9.0)
    bench.pool.release(bench.tree.unplace(path[9]))
    sequence = bench.admit([*tokens, 1, 2], request=3)
    assert sequence.cached_tokens == 36, "chunks 6 to 8 are what a query at position 36 sees"
    # Chunks 10 and 11 are computed again, in blocks of the sequence's own, and found equal in the end.
    assert sequence.path == path[:10]
    bench.kv.leave(sequence, 50, 10.0)
    assert all(node.on_device for node in path[6:])
    check_kv_cache(bench.kv, [], [])


def test_a_release_that_reads_nothing_leaves_chunks_to_be_found() -> None:
    """It makes a chunk younger that others still stand below: what is counted can be had all the same."""
    bench = make_bench(20)
    path = bench.cache(tokens_of(0, 32))
    assert bench.tree.evict(1) == 1
    assert not path[4].on_device
    bench.tree.hold(path[7], 1)
    bench.tree.hold(path[3], 0)
    bench.tree.release(path[3], 100.0, 0)
    assert bench.tree.evictable == 6
    assert bench.tree.evict(6) == 6
    bench.tree.release(path[7], 101.0, 1)
    check_kv_cache(bench.kv, [], [])


def test_hollow_chunks_are_forgotten_with_the_last_chunk_below_them() -> None:
    bench = make_bench(24)
    bench.cache(tokens_of(0, 60))
    assert bench.tree.node_count == 15
    bench.tree.evict(24)
    assert bench.tree.node_count == 0
    assert bench.pool.free_count == 24


def test_capacity_is_the_window_only_where_the_request_is_plain() -> None:
    config = replace(SMALL, num_blocks=14, max_context=400)
    simulation = Simulation(config)
    assert simulation.ask(tokens_of(0, 100), 5).reason == "length"
    cut = simulation.submit(tokens_of(0, 100), 5, drops=((4, 8),))  # it becomes a plain prompt of what is left
    simulation.run()
    assert simulation.streams[cut].reason == "length"
    samples = simulation.submit(tokens_of(0, 100), 5, n=2)
    scored = simulation.submit(tokens_of(0, 100), 5, prompt_logprobs=0)
    simulation.run()
    for request in (samples, scored):
        ended = simulation.streams[request].ended
        assert ended is not None
        assert "this group holds 56" in ended.detail
    assert replace(config, prefix_cache=False).longest_plain == 56
    assert replace(config, num_blocks=9).longest_plain == 36, "less than a window and a step"
