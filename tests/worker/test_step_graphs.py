"""Decode steps as graphs, captured and replayed on the emulated device, with the engine's plans.

`emulated_graphs` says what a capture and a replay are there. What a graph would read on the host while it is
captured, or leave in memory that another graph overwrites, shows here as a wrong token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernels.cuda_emulated import CXX
from kernels.emulated_graphs import CaptureError, EmulatedGraphs
from seeds import seeds
from simulation.drafts import draft_from
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from worker.checkpoints import Models
from worker.graph_driver import KnownDrafts, Traffic, make_runner, make_simulation

from trunkline.kernels.library_attention import FLASH_ON_CPU, LibraryPrefill
from trunkline.kernels.reference_sampling import ReferenceSampling, largest_sums, token_keys
from trunkline.kernels.sampling import Draws
from trunkline.kvstore.chunk_format import KV_DTYPES
from trunkline.kvstore.chunks import pack_int32, unpack_int32
from trunkline.worker.messages import Join, Sampling, StepPlan
from trunkline.worker.runner import Runner
from trunkline.worker.step_graphs import buckets, first_largest

pytestmark = pytest.mark.skipif(CXX is None, reason="no C++ compiler for the emulation")


@pytest.fixture(scope="session")
def small(models: Models) -> Path:
    """A Llama so small that emulated steps are quick."""
    return models(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)


def check_traffic(folder: Path, seed: int, steps: int, blocks: int = 90, **fields: Any) -> None:
    """The same requests op by op, as graphs, and as graphs with drafts; `fields` of the runner's configuration."""
    settings: dict[str, Any] = {"max_context": 150, "fields": fields}
    traffic = Traffic(seed, steps)
    plain = make_simulation(folder, blocks, graphs=False, **settings)
    expected = traffic.run(plain)
    replayed = make_simulation(folder, blocks, graphs=True, **settings)
    assert traffic.run(replayed) == expected
    assert replayed.replayed_steps > 0.3 * replayed.runner.steps
    assert plain.replayed_steps == 0
    drafted = make_simulation(folder, blocks, graphs=True, **settings)
    draft_from(drafted, lambda simulation: KnownDrafts(simulation, expected))
    assert traffic.run(drafted) == expected
    assert drafted.engine.counters.accepted_drafts > 0


def test_prompts_that_a_library_computes_draw_the_same_tokens(small: Path) -> None:
    """Beside cuts and modules, which stay with our kernel. One seed: the last places of float32 differ."""
    traffic = Traffic(3, 25)
    expected = traffic.run(make_simulation(small, 90, graphs=True, max_context=150))
    prefill = LibraryPrefill(FLASH_ON_CPU, operations_min=0)
    given = make_simulation(small, 90, graphs=True, prefill=prefill, max_context=150)
    assert traffic.run(given) == expected
    calls = given.runner.kernels.counters.calls
    assert 0 < calls["library_attention"] <= calls["prefill_attention"]


@pytest.mark.parametrize("seed", seeds(1))
def test_replayed_steps_draw_the_same_tokens(small: Path, seed: int) -> None:
    """Joins, leaves, growth over chunks' borders, beams, cuts, modules, penalties, preemption, drafts."""
    check_traffic(small, seed, 25)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES[1:])
def test_steps_over_kv_in_8_bits_are_replayed(small: Path, kv_dtype: str) -> None:
    """Rounded where a step writes it, read by the same step, copied where sequences part."""
    check_traffic(small, 4, 12, kv_dtype=kv_dtype)


def test_a_mixture_of_experts_is_replayed(models: Models) -> None:
    """Which experts have tokens is another choice in each replay."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    check_traffic(models("qwen3-moe", **sizes), 2, 12)


def test_a_mixture_of_experts_in_codes_is_replayed(models: Models) -> None:
    """By products of our own. What torch computes in 16 bits may depend on the number of rows, so one seed."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    folder = models("qwen3-moe", moe_intermediate_size=32, **sizes)
    check_traffic(folder, 1, 12, dtype="bfloat16", quantisation="int8")


def test_experts_that_wait_for_the_device_are_not_captured(models: Models) -> None:
    """Widths that grouped products do not take."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    folder = models("qwen3-moe", moe_intermediate_size=22, **sizes)
    assert make_runner(folder, 20, graphs=True).launched.graphs is None


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("pool", "kv_dtype"), [(90, "auto"), (40, "auto"), (90, "int8"), (40, "fp8")])
def test_replayed_steps_draw_the_same_tokens_for_long(small: Path, pool: int, kv_dtype: str) -> None:
    check_traffic(small, pool, 2000, pool, kv_dtype=kv_dtype)


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts tensors that are allocated."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {
            x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        if any(x.untyped_storage().data_ptr() not in before for x in made):
            self.names.append(func.name())
        return result


def decoding(runner: Runner, rows: int, room: int, sampling: Sampling) -> None:
    """Let rows join that decode from here on, with blocks for so many tokens."""
    runner.pool.data.zero_()
    tables = [pack_int32(range(row * room, (row + 1) * room)) for row in range(rows)]
    joins = [Join(row + 1, pack_int32([row]), 299 + row, 300 + row, tables[row], sampling) for row in range(rows)]
    ids = pack_int32(range(1, rows + 1))
    result = runner.execute(StepPlan(1, 1, joins=joins, rows=ids, runs=b""))
    assert result is not None
    assert result.replayed


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_steady_step_sends_and_allocates_nothing(small: Path, temperature: float) -> None:
    """Nor is it waited for: the next step is launched before its tokens are read."""
    runner = make_runner(small, 150, graphs=True)
    # So long that what 20 steps add is not cut anew.
    decoding(runner, 3, 45, Sampling(temperature=temperature, seed=3))
    graphs = runner.launched.graphs
    assert graphs is not None
    for step in (2, 3):
        runner.execute(StepPlan(step, 1))
    sent, captures = graphs.uploaded_words, graphs.captures
    with Allocations() as allocations:
        for step in range(4, 24):  # over two chunks' borders
            runner.launch(StepPlan(step, 1))
            if step % 2:
                assert runner.launched.count == 2
                assert [runner.launched.take() is not None for _ in range(2)] == [True, True]
    assert allocations.names == []
    assert graphs.uploaded_words == sent
    assert graphs.captures == captures == len(graphs.buckets)


def test_a_row_that_joins_or_leaves_is_a_few_words(small: Path) -> None:
    runner = make_runner(small, 150, graphs=True)
    decoding(runner, 3, 45, Sampling(seed=3))
    graphs = runner.launched.graphs
    assert graphs is not None
    sent = graphs.uploaded_words
    runner.execute(StepPlan(2, 1, leaves=pack_int32([2]), rows=pack_int32([3, 1]), runs=b""))
    assert 0 < graphs.uploaded_words - sent < 60
    sent = graphs.uploaded_words
    join = Join(9, pack_int32([5]), 6, 7, pack_int32([140, 141, 142]), Sampling(seed=8))
    result = runner.execute(StepPlan(3, 1, joins=[join], rows=pack_int32([3, 9, 1]), runs=b""))
    assert 0 < graphs.uploaded_words - sent < 120
    assert result is not None
    assert result.replayed


def test_a_plan_that_outgrows_its_room_makes_graphs_be_captured_again(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trunkline.worker.step_graphs.RESERVED_WORDS_MAX", 1)
    monkeypatch.setattr("trunkline.kernels.cuda_work.MIN_WORDS", 1)
    runner, plain = make_runner(small, 200, graphs=True), make_runner(small, 200, graphs=False)
    outputs = []
    for each in (runner, plain):
        each.pool.data.zero_()
        tokens = []
        for step in range(1, 7):
            join = Join(
                step, pack_int32([step]), 99, 100, pack_int32(range(step * 20, step * 20 + 14)), Sampling()
            )
            rows = pack_int32(range(1, step + 1))
            result = each.execute(StepPlan(step, 1, joins=[join], rows=rows, runs=b""))
            assert result is not None
            tokens.append(unpack_int32(result.tokens).tolist())
        outputs.append(tokens)
    assert outputs[0] == outputs[1]
    assert runner.launched.graphs is not None
    assert runner.launched.graphs.captures > len(runner.launched.graphs.buckets)


def test_what_a_graph_cannot_hold_is_refused(small: Path) -> None:
    """The emulation does what CUDA would: without that the tests above could not fail."""
    runner = make_runner(small, 40, graphs=False)
    graphs: Any = EmulatedGraphs(runner.kernels)  # type: ignore[arg-type]
    x = torch.ones(3)
    for read in (lambda: x.sum().item(), lambda: x.numpy(), lambda: bool(x.any()), lambda: torch.tensor([1])):
        with pytest.raises(CaptureError):
            graphs.capture(read)
    seen: list[torch.Tensor] = []
    number = 2.0
    replay = graphs.capture(lambda: seen.append(x * number + 1))
    number = 3.0  # was read on the host while the graph was captured
    x.fill_(5)
    replay.replay()
    assert seen[0].tolist() == [11.0, 11.0, 11.0]


def test_buckets_have_room_for_the_largest_step() -> None:
    assert buckets(1) == [1]
    assert buckets(5) == [1, 2, 4, 8]
    assert buckets(20) == [1, 2, 4, 8, 16, 24]
    assert buckets(256)[-2:] == [248, 256]
    assert len(buckets(256)) == 35


@pytest.mark.parametrize("seed", seeds(2))
def test_parts_of_a_vocabulary_draw_what_all_of_it_draws(seed: int) -> None:
    """Each rank finds the largest sum in its columns; nothing else is exchanged."""
    rng = np.random.default_rng(seed)
    rows, size = 9, 300
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, size, generator=generator).round(decimals=1)  # with ties
    logits[rng.integers(rows), :] = float("-inf")
    logits[rng.integers(rows), rng.integers(size)] = float("nan")
    seeds_, index = (torch.from_numpy(rng.integers(0, 1 << 40, rows)) for _ in range(2))
    factors = torch.ones(3, rows)
    factors[0] = torch.from_numpy(rng.choice([0.0, 0.7, 1.0], rows))
    factors[2] = float("-inf")
    draws = Draws(seeds_, index, torch.zeros(rows, dtype=torch.int32), factors, limited=False)
    expected = ReferenceSampling().draw(logits, draws)
    for ranks in (1, 3):
        columns = size // ranks
        pairs = []
        for start in range(0, size, columns):
            part = logits[:, start : start + columns]
            sums, found = largest_sums(part, draws, token_keys(torch.arange(start, start + columns)))
            pairs.append(torch.stack([sums, (found + start).double()]))
        assert torch.equal(first_largest(torch.stack(pairs)), expected)
