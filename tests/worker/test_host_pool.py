"""The host pool: what is saved comes back bit by bit, and never anything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from worker.driver import Driver, run_config

from trunkline.kernels.load import load_kernels
from trunkline.kernels.ops import KvPool
from trunkline.kvstore.chunks import Int32Array, SlotId, pack_int32
from trunkline.worker.errors import PlanError, WorkerConfigError
from trunkline.worker.loading import load_runner
from trunkline.worker.messages import StepPlan
from trunkline.worker.tiers.copier import Copier
from trunkline.worker.tiers.host_pool import HostPool

SHAPES = {"small": (40, 2, 2, 2, 4, 8), "large": (12, 4, 2, 4, 64, 64)}
"""Of device pools: blocks of 1 KiB, and of 512 KiB, whose loads come layer by layer."""


class Moves:
    """A host pool, and its copies one plan at a time."""

    def __init__(self, pool: KvPool, kernels: str, slots: int) -> None:
        self.host = HostPool(slots, pool)
        self.copier = Copier(self.host, pool.data.device, pool.blocks, lambda: load_kernels(kernels, "cpu", 1))
        self._step = 0

    def save(self, rows: Int32Array) -> None:
        self._run(saves=pack_int32(rows))

    def load(self, rows: Int32Array, layers: bytes = b"") -> None:
        self._run(loads=pack_int32(rows), load_layers=layers)

    def _run(self, **fields: bytes) -> None:
        """Both fences at the plan itself: what it orders is done when it is."""
        self._step += 1
        gate = self.copier.begin(
            StepPlan(self._step, 1, save_fence=self._step, load_fence=self._step, **fields)  # type: ignore[arg-type]
        )
        for layer in range(self.host.layers):
            gate.enter(layer)
        self.copier.finish(gate)


MakePool = Callable[..., tuple[KvPool, Moves]]


@pytest.fixture
def make_pool() -> Iterator[MakePool]:
    made: list[Moves] = []

    def make(shape: str, kernels: str, slots: int = 30) -> tuple[KvPool, Moves]:
        torch.manual_seed(1)
        pool = KvPool.wrap(torch.randn(SHAPES[shape]))
        made.append(Moves(pool, kernels, slots))
        return pool, made[-1]

    yield make
    for moves in made:
        moves.copier.close()


def contents(pool: KvPool, kernels: str = "auto") -> torch.Tensor:
    """Of all blocks, in plain order: kernels may hold them in another."""
    out = torch.empty_like(pool.data)
    blocks = np.arange(pool.blocks, dtype=np.int32)
    load_kernels(kernels, "cpu", 1).gather_blocks(pool, blocks, range(pool.data.shape[1]), out)
    return out


def moves(*rows: tuple[int, int, int]) -> Int32Array:
    return np.array(rows, dtype=np.int32).reshape(-1, 3)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_blocks_come_back(make_pool: MakePool, shape: str, kernels: str) -> None:
    """Into other blocks than they came from; slots side by side and scattered, in any order."""
    pool, host = make_pool(shape, kernels)
    blocks = [3, 0, 7, 5, 9, 11]
    slots = [4, 5, 6, 20, 2, 29]
    before = contents(pool, kernels)
    host.save(moves(*((block, slot, 1) for block, slot in zip(blocks, slots, strict=True))))
    assert torch.equal(contents(pool, kernels), before)
    pool.data.fill_(float("nan"))
    targets = [1, 2, 3, 4, 5, 6]
    order = [5, 0, 3, 1, 4, 2]
    host.load(moves(*((targets[i], slots[i], 1) for i in order)))
    after = contents(pool, kernels)
    assert torch.equal(after[targets], before[blocks])
    untouched = sorted(set(range(pool.blocks)) - set(targets))
    assert after[untouched].isnan().all()


def test_few_calls_move_many_blocks(make_pool: MakePool) -> None:
    """One for all blocks of a plan; of large ones, for each layer, since somebody may wait for it."""
    for shape, loads in (("small", 1), ("large", 4)):
        _, host = make_pool(shape, "auto")
        host.save(moves(*((i, i if i < 5 else i + 3, 1) for i in range(10))))
        assert host.copier.saves.kernels.counters.calls == {"gather_slots": 1}
        host.load(moves(*((i, i if i < 5 else i + 3, 1) for i in range(10))))
        assert host.copier.loads.kernels.counters.calls == {"scatter_slots": loads}


def test_only_the_generation_asked_for_is_read(make_pool: MakePool) -> None:
    pool, host = make_pool("small", "auto")
    host.save(moves((0, 5, 2)))
    before = contents(pool)
    for rows, message in (
        ([(1, 5, 1)], "load of generation 1 from slot 5: it holds generation 2"),
        ([(1, 5, 2), (2, 6, 0)], "load of generation 0 from slot 6: it holds nothing"),
    ):
        with pytest.raises(PlanError, match=message):
            host.load(moves(*rows))
    assert torch.equal(contents(pool), before)
    with pytest.raises(PlanError, match="generation 1: it holds generation 2"):
        host.save(moves((0, 5, 1)))
    host.save(moves((3, 5, 3)))
    host.load(moves((8, 5, 3)))
    assert torch.equal(contents(pool)[8], before[3])
    host.host.discard(SlotId(5))
    with pytest.raises(PlanError, match="it holds nothing"):
        host.load(moves((8, 5, 3)))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(40, 0, 1)], "blocks 40 to 40 moved; there are 40"),
        ([(-1, 0, 1)], "blocks -1 to -1"),
        ([(0, 30, 1)], "slots 30 to 30 moved; there are 30"),
        ([(0, 3, 1), (1, 3, 1)], "a slot is written twice"),
    ],
)
def test_malformed_saves(make_pool: MakePool, rows: list[tuple[int, int, int]], message: str) -> None:
    _, host = make_pool("small", "auto")
    with pytest.raises(PlanError, match=message):
        host.save(moves(*rows))


def test_a_block_is_loaded_once(make_pool: MakePool) -> None:
    _, host = make_pool("small", "auto")
    host.save(moves((0, 3, 1), (1, 4, 1)))
    with pytest.raises(PlanError, match="a block is written twice"):
        host.load(moves((7, 3, 1), (7, 4, 1)))


def test_parts_of_chunks_are_for_pools_with_thin_blocks(make_pool: MakePool) -> None:
    _, host = make_pool("small", "auto")
    host.save(moves((0, 3, 1)))
    with pytest.raises(PlanError, match=r"1 loads of layers \[1\]"):
        host.load(moves((7, 3, 1)), layers=b"\x01")


def test_bytes_of_a_slot_are_those_of_its_block(make_pool: MakePool) -> None:
    """In plain order, whatever the kernels hold a block in: the tiers below read and write them."""
    pool, host = make_pool("small", "auto")
    data = np.random.default_rng(0).bytes(host.host.slot_bytes)
    host.host.view(7)[:] = data
    host.host.set_generation(7, 4)
    host.load(moves((2, 7, 4)))
    assert contents(pool)[2].numpy().tobytes() == data
    host.save(moves((2, 5, 1)))
    assert bytes(host.host.view(5)) == data
    host.copier.close()
    assert host.host.capacity_slots == 0


def test_memory_is_taken_when_it_is_used(make_pool: MakePool) -> None:
    """16 GiB of address space cost nothing; blocks that were saved do."""
    process = psutil.Process()
    before = process.memory_info().rss
    pool, host = make_pool("large", "auto", slots=(16 << 30) // (512 << 10))
    assert process.memory_info().rss - before < 64 << 20
    host.save(moves(*((i, host.host.capacity_slots - 1 - i, 1) for i in range(12))))
    host.load(moves((0, host.host.capacity_slots - 12, 1)))
    found = contents(pool)
    assert torch.equal(found[0], found[11])


def test_impossible_sizes_are_refused(make_pool: MakePool) -> None:
    with pytest.raises(WorkerConfigError, match="no memory for a host pool of"):
        make_pool("large", "auto", slots=1 << 35)


def test_measuring_changes_nothing(make_pool: MakePool) -> None:
    pool, host = make_pool("large", "auto")
    before = contents(pool)
    assert 0.1 < host.copier.measure() < 1e5
    assert torch.equal(contents(pool), before)
    with pytest.raises(PlanError, match="it holds nothing"):
        host.load(moves((0, 0, 0)))


# --- in a runner


def test_a_runner_without_a_host_pool_moves_nothing(folder: Path) -> None:
    runner = load_runner(run_config(folder), lambda *_: None)
    assert (runner.host_slots, runner.swap_us_per_block) == (0, 0.0)
    with pytest.raises(PlanError, match="no host pool"):
        Driver(runner.execute, num_blocks=64, chunk_size=8).send(saves=pack_int32([0, 0, 1]))


def test_too_little_memory_is_refused(folder: Path) -> None:
    with pytest.raises(WorkerConfigError, match="no room for a single block"):
        load_runner(run_config(folder, host_memory_bytes=100), lambda *_: None)
