"""Several samples of one prompt: they share its blocks, part at their tails, and say what each says alone."""

from __future__ import annotations

import msgspec
import pytest
from simulation.driver import Simulation
from simulation.oracle import expected_output
from simulation.streams import Options

from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import BeamSearch
from trunkline.controller.sequences.beam_search import sample_seed
from trunkline.kvstore.chunks import blocks_for

SMALL = EngineConfig(num_blocks=64, chunk_size=4, max_context=96, token_budget=24, max_rows=8)


@pytest.fixture
def simulation() -> Simulation:
    return Simulation(SMALL)


@pytest.mark.parametrize(("chunk_size", "length"), [(1, 3), (4, 1), (4, 8), (4, 17), (16, 16), (16, 30)])
def test_each_sample_is_what_its_seed_gives(chunk_size: int, length: int) -> None:
    """With full and partial tails; and the prompt is computed once."""
    simulation = Simulation(msgspec.structs.replace(SMALL, chunk_size=chunk_size, num_blocks=400 // chunk_size))
    prompt = [(5 * i) % 37 for i in range(length)]
    simulation.ask(prompt, 9, n=3, seed=11)
    stream = simulation.streams[1]
    assert stream.outputs == [expected_output(prompt, sample_seed(11, i), 9) for i in range(3)]
    assert stream.outputs[1] != stream.outputs[2]
    assert stream.reasons == dict.fromkeys(range(3), "length")
    assert simulation.workers.computed_tokens == length + 3 * 8
    assert simulation.workers.copied_tokens == 2 * (length % chunk_size)


@pytest.mark.parametrize(("n", "length"), [(2, 32), (4, 33), (6, 35)])
def test_memory_is_the_prompt_once_and_a_tail_each(simulation: Simulation, n: int, length: int) -> None:
    """PagedAttention's Figure 15a: what n samples hold against what they would hold apart."""
    held: list[tuple[int, int]] = []
    simulation.workers.observer = lambda _: held.append(simulation.workers.blocks_held)
    simulation.submit(list(range(length)), 4, n=n, seed=3)
    simulation.step_until(lambda: simulation.streams[1].outputs[0])
    tails = n * (blocks_for(length + 1, 4) - length // 4)
    assert held[-1] == (length // 4 + tails, n * blocks_for(length + 1, 4))
    pool = simulation.scheduler.kv.pool
    assert pool.num_blocks - pool.free_count <= length // 4 + 2 * n
    simulation.finish()


def test_samples_end_one_by_one() -> None:
    prompt = [9, 8, 7]
    outputs = [expected_output(prompt, sample_seed(0, i), 30) for i in range(4)]
    stop = outputs[2][6]
    lengths = [output.index(stop) + 1 if stop in output else 30 for output in outputs]
    assert len(set(lengths)) > 1
    simulation = Simulation(SMALL)
    simulation.ask(prompt, 30, n=4, stop_ids=(stop,))
    stream = simulation.streams[1]
    assert [len(output) for output in stream.outputs] == lengths
    assert stream.reasons == {i: "length" if length == 30 else "stop" for i, length in enumerate(lengths)}
    simulation.finish()


def test_equal_samples_merge_their_chunks(simulation: Simulation) -> None:
    """Samples part in one of four tokens only: those that have not yet parted hold one chunk."""
    prompt = list(range(20, 28))
    simulation.ask(prompt, 24, n=6, seed=1)
    stream = simulation.streams[1]
    contexts = [prompt + output[:-1] for output in stream.outputs]
    chunks = {tuple(context[:stop]) for context in contexts for stop in range(4, len(context) + 1, 4)}
    full = [node for node in simulation.tree.nodes() if node.token_count == 4]
    assert len(full) == len(chunks) < 6 * (31 // 4)


@pytest.mark.parametrize("options", [{"n": 3}, {"beam": BeamSearch(4)}], ids=["samples", "beams"])
@pytest.mark.parametrize("after", range(12))
def test_abort_at_any_moment_frees_everything(simulation: Simulation, options: Options, after: int) -> None:
    """Between any two events of a group's life."""
    request = simulation.submit(list(range(30)), 6, **options)
    simulation.events(after)
    simulation.abort(request)
    other = simulation.ask(list(range(29)), 6, n=2)
    assert other.reason == "length"
    assert simulation.tree.active_count == 0
    assert not simulation.scheduler.forks.searches
    simulation.flush_cache()
    assert simulation.scheduler.kv.pool.free_count == 64


def test_the_last_sample_that_is_given_up_ends_the_request(simulation: Simulation) -> None:
    request = simulation.submit(list(range(10)), 20, seed=3, n=2)
    simulation.step_until(lambda: simulation.streams[request].outputs[1])
    for sample in (0, 0):  # the second time it is not there any more
        simulation.abort(request, sample)
        assert list(simulation.engine.requests()) == [request]
        assert simulation.scheduler.running_count == 1
    simulation.abort(request, sample=1)
    assert list(simulation.engine.requests()) == []
    simulation.finish()
