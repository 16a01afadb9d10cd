"""Copies beside the computation: whatever is slow, each side sees what the plans' order says."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from worker.checkpoints import make_checkpoint
from worker.tier_driver import LAYERS, Background, HeldKernels, Traveller, moves, wait_until

from trunkline.kernels.load import load_kernels
from trunkline.kernels.ops import Kernels, KvPool
from trunkline.kvstore.int32_codec import Int32Array, pack_int32
from trunkline.worker.errors import ConfigError, CopyError
from trunkline.worker.messages import StepPlan
from trunkline.worker.runner import Runner
from trunkline.worker.tiers.copier import Copier, CopyOptions
from trunkline.worker.tiers.host_pool import HostPool
from trunkline.worker.tiers.layer_gate import COMPUTE, LATE_SAVE, LOAD, SAVE, LayerSpan

FAST_LINK = 1e12
"""Copies then go one layer at a time, and no slower."""

OUT = moves((3, 7, 1), (4, 8, 1), (9, 2, 1))
BACK = moves((10, 7, 1), (11, 8, 1), (12, 2, 1))
TARGETS = [10, 11, 12]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "model", num_hidden_layers=LAYERS)


@pytest.fixture
def travel(folder: Path) -> Iterator[Callable[..., Traveller]]:
    made: list[Traveller] = []

    def make(**config: Any) -> Traveller:
        made.append(Traveller(folder, **config))
        return made[-1]

    yield make
    for traveller in made:
        traveller.close()


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Any]:
    """What a sequence gives that never leaves the device: its prompt, then three tokens."""
    traveller = Traveller(folder)
    traveller.prefill()
    traveller.leave()
    traveller.come_back(list(Traveller.BLOCKS))
    traveller.decode()
    traveller.decode()
    traveller.close()
    return traveller.results


def swap_out(traveller: Traveller) -> None:
    """Prefill, then everything is in the host pool and nothing on the device."""
    traveller.prefill()
    traveller.leave(saves=OUT, save_fence=traveller.driver.step + 1)
    traveller.wipe()


def of_kind(spans: list[LayerSpan], kind: str) -> dict[int, LayerSpan]:
    """By layer."""
    return {layer: span for span in spans if span.kind == kind for layer in span.layers}


# --- loads


def test_each_layer_waits_for_its_own(travel: Callable[..., Traveller], expected: list[Any]) -> None:
    """CachedAttention §3.2: layer l is computed while layer l + 1 is loaded."""
    traveller = travel(link_bytes_per_s=FAST_LINK)
    swap_out(traveller)
    trace = traveller.runner.trace_layers()
    held = HeldKernels.hold(traveller.copier.loads)
    stored = traveller.runner.kernels.counters.calls
    before = stored["write_kv"]
    step = Background(
        lambda: traveller.come_back(TARGETS, loads=BACK, load_fence=traveller.driver.step + 1),
    )
    for layer in range(LAYERS):
        wait_until(lambda layer=layer: held.asked == layer + 1)  # type: ignore[misc]
        # Everything before this layer was computed without it.
        wait_until(lambda layer=layer: stored["write_kv"] - before == layer)  # type: ignore[misc]
        assert not step.is_over
        held.let(1)
    result = step.join()
    assert result.waited_us > 0
    spans = trace.spans()
    computed, loaded = of_kind(spans, COMPUTE), of_kind(spans, LOAD)
    assert computed.keys() == loaded.keys() == set(range(LAYERS))
    for layer in range(LAYERS):
        assert loaded[layer].stop_ns <= computed[layer].start_ns
        assert computed[layer].start_ns < loaded[min(layer + 1, LAYERS - 1)].stop_ns or layer == LAYERS - 1
    for _ in range(2):
        assert traveller.decode().waited_us == 0
    assert traveller.results == expected


def test_whole_preload_waits_for_everything_first(travel: Callable[..., Traveller], expected: list[Any]) -> None:
    traveller = travel(link_bytes_per_s=2e6, preload="whole")
    swap_out(traveller)
    trace = traveller.runner.trace_layers()
    traveller.come_back(TARGETS, loads=BACK, load_fence=traveller.driver.step + 1)
    spans = trace.spans()
    assert of_kind(spans, LOAD)[LAYERS - 1].stop_ns <= of_kind(spans, COMPUTE)[0].start_ns
    traveller.decode()
    traveller.decode()
    assert traveller.results == expected


def test_a_step_without_its_fence_reads_too_early(travel: Callable[..., Traveller], expected: list[Any]) -> None:
    """The other tests' judge is not blind."""
    traveller = travel()
    swap_out(traveller)
    held = HeldKernels.hold(traveller.copier.loads)
    traveller.come_back(TARGETS, loads=BACK)
    assert traveller.results[1] != expected[1]
    held.let_all()


def test_other_sequences_do_not_wait(travel: Callable[..., Traveller], expected: list[Any]) -> None:
    """Blocks are loaded ahead: the step that needs them names the plan that ordered them."""
    traveller = travel()
    swap_out(traveller)
    held = HeldKernels.hold(traveller.copier.loads)
    traveller.driver.send(loads=BACK)
    ordered = traveller.driver.step
    for _ in range(3):
        result = traveller.driver.send()
        assert result is not None
        assert result.waited_us == 0
    assert held.done == 0
    step = Background(lambda: traveller.come_back(TARGETS, load_fence=ordered))
    wait_until(lambda: held.asked == 1)
    assert not step.is_over
    held.let_all()
    step.join()
    traveller.decode()
    traveller.decode()
    assert traveller.results == expected


def test_a_fence_holds_for_plans_that_compute_nothing(travel: Callable[..., Traveller]) -> None:
    """What a fence has named once is done for all later plans, which do not name it again."""
    traveller = travel()
    swap_out(traveller)
    held = HeldKernels.hold(traveller.copier.loads)
    step = Background(lambda: traveller.driver.send(loads=BACK, load_fence=traveller.driver.step + 1))
    wait_until(lambda: held.asked == 1)
    assert not step.is_over
    held.let_all()
    step.join()
    assert held.done == held.asked > 0


def test_copies_wait_for_their_blocks(travel: Callable[..., Traveller], expected: list[Any]) -> None:
    """A block that is loaded and copied by the same plan."""
    traveller = travel()
    swap_out(traveller)
    held = HeldKernels.hold(traveller.copier.loads)
    copies = pack_int32([12, 20, 0, 8])
    fence = traveller.driver.step + 1
    step = Background(lambda: traveller.come_back([10, 11, 20], loads=BACK, copies=copies, load_fence=fence))
    wait_until(lambda: held.asked == 1)
    assert not step.is_over
    held.let_all()
    step.join()
    traveller.decode()
    traveller.decode()
    assert traveller.results == expected


# --- saves


def test_saves_do_not_stop_the_steps(travel: Callable[..., Traveller], expected: list[Any]) -> None:
    """Steps go on; only the one that writes into the blocks waits, and what was saved is what was there."""
    traveller = travel()
    traveller.prefill()
    held = HeldKernels.hold(traveller.copier.saves)
    traveller.leave(saves=OUT)
    ordered = traveller.driver.step
    for _ in range(3):
        traveller.driver.send()
    overwrite = pack_int32([20, 3, 0, 8, 20, 4, 0, 8, 20, 9, 0, 8])
    step = Background(lambda: traveller.driver.send(copies=overwrite, save_fence=ordered))
    wait_until(lambda: held.asked == 1)
    assert not step.is_over
    held.let_all()
    result = step.join()
    assert result.waited_us > 0
    assert result.moved_blocks == 3
    traveller.come_back(TARGETS, loads=BACK, load_fence=traveller.driver.step + 1)
    traveller.decode()
    traveller.decode()
    assert traveller.results == expected


def test_late_saves_follow_the_computation(travel: Callable[..., Traveller], expected: list[Any]) -> None:
    """CachedAttention §3.2: prefill saves what it fills, layer by layer, while it goes on."""
    traveller = travel(link_bytes_per_s=FAST_LINK)
    trace = traveller.runner.trace_layers()
    traveller.prefill(late_saves=moves((3, 7, 1), (4, 8, 1)))
    # The block that is not full is saved when the sequence leaves.
    traveller.leave(saves=moves((9, 2, 1)), save_fence=traveller.driver.step + 1)
    spans = trace.spans()
    computed, saved = of_kind(spans, COMPUTE), of_kind(spans, LATE_SAVE)
    assert saved.keys() == set(range(LAYERS))
    assert of_kind(spans, SAVE).keys() == set(range(LAYERS))
    for layer in range(LAYERS):
        assert computed[layer].start_ns < saved[layer].start_ns
    traveller.wipe()
    traveller.come_back(TARGETS, loads=BACK, load_fence=traveller.driver.step + 1)
    traveller.decode()
    traveller.decode()
    assert traveller.results == expected


def test_late_saves_begin_before_the_step_ends(travel: Callable[..., Traveller]) -> None:
    """Each layer is asked for as soon as it is stored: computation waits for a later one here, and it has come."""
    traveller = travel(link_bytes_per_s=FAST_LINK)
    swap_out(traveller)
    loads = HeldKernels.hold(traveller.copier.loads)
    saves = HeldKernels.hold(traveller.copier.saves)
    # Two of the three blocks come back; the prompt's last tokens are computed again, into block 20.
    fields = {
        "loads": moves((10, 7, 1), (11, 8, 1)),
        "load_fence": traveller.driver.step + 1,
        "late_saves": moves((20, 5, 1)),
    }
    join = traveller._join(2, [10, 11, 20])
    entry = pack_int32([2, 16, 5, 16, 0])
    step = Background(lambda: traveller.driver.send(joins=[join], prefill=entry, **fields))
    saves.let_all()
    for layer in range(LAYERS):
        wait_until(lambda layer=layer: loads.asked == layer + 1)  # type: ignore[misc]
        wait_until(lambda layer=layer: saves.done == layer)  # type: ignore[misc]
        loads.let(1)
    step.join()
    traveller.copier.saves.wait_for(traveller.copier.saves.submitted)
    assert saves.done == LAYERS


def test_saving_in_step_waits(travel: Callable[..., Traveller]) -> None:
    """`async_saves` off, for comparison: a step that saves ends with everything saved."""
    traveller = travel(link_bytes_per_s=2e6, async_saves=False)
    assert traveller.prefill(late_saves=moves((3, 7, 1))).moved_blocks == 1
    result = traveller.driver.send(saves=moves((4, 8, 1), (9, 2, 1)))
    assert result is not None
    assert result.moved_blocks == 2
    assert result.waited_us > 0


# --- failures


def test_a_failed_copy_ends_the_rank(travel: Callable[..., Traveller]) -> None:
    """Nobody waits for what will not come, in this step or later."""
    traveller = travel()
    swap_out(traveller)

    class Broken:
        def scatter_slots(self, *_: object) -> None:
            raise RuntimeError("no such memory")

    traveller.copier.loads.kernels = Broken()  # type: ignore[assignment]
    step = Background(
        lambda: traveller.come_back(TARGETS, loads=BACK, load_fence=traveller.driver.step + 1),
    )
    with pytest.raises(CopyError, match="no such memory"):
        step.join()
    wait_until(lambda: traveller.copier.saves.gate._failure is not None)
    with pytest.raises(CopyError, match="no such memory"):
        traveller.runner.check()


def test_closing_does_not_wait_for_what_never_comes(travel: Callable[..., Traveller]) -> None:
    """A late save whose step is never computed."""
    traveller = travel()
    traveller.prefill()
    plan = StepPlan(2, 1, late_saves=moves((3, 7, 1)))
    traveller.copier.begin(plan)
    assert not Background(traveller.close).join()


def test_traces_need_a_host_pool(travel: Callable[..., Traveller]) -> None:
    with pytest.raises(ConfigError, match="without a host pool"):
        travel(host_memory_bytes=0).runner.trace_layers()


def test_copies_do_not_use_the_runners_kernels(travel: Callable[..., Traveller]) -> None:
    """Ops of one instance run on one thread."""
    traveller = travel()
    runner: Runner = traveller.runner
    assert len({id(kernels) for kernels in (runner.kernels, *_lane_kernels(traveller))}) == 3


def _lane_kernels(traveller: Traveller) -> tuple[Kernels, Kernels]:
    return traveller.copier.saves.kernels, traveller.copier.loads.kernels


# --- any order of plans


class Jittery:
    """Kernels that take their time, now and then."""

    def __init__(self, seed: int) -> None:
        self._kernels = load_kernels("auto", "cpu", 1)
        self._random = random.Random(seed)

    def gather_slots(
        self, pool: KvPool, blocks: Int32Array, layers: range, host: Tensor, slots: Int32Array
    ) -> None:
        self._sleep()
        self._kernels.gather_slots(pool, blocks, layers, host, slots)

    def scatter_slots(
        self, pool: KvPool, blocks: Int32Array, layers: range, host: Tensor, slots: Int32Array
    ) -> None:
        self._sleep()
        self._kernels.scatter_slots(pool, blocks, layers, host, slots)

    def _sleep(self) -> None:
        if self._random.random() < 0.5:
            time.sleep(self._random.random() * 0.002)


class Model:
    """The same plans, each carried out whole before the next: what every order beside them must come to.

    Fences are the narrowest that the contract of `StepPlan` asks for.
    """

    BLOCKS, SLOTS, LAYERS = 14, 9, 3

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        shape = (self.BLOCKS, self.LAYERS, 2, 1, 4, 8)
        self.pool = KvPool.wrap(torch.randn(shape))
        self.blocks = self.pool.data.clone()
        self.slots: dict[int, tuple[int, Tensor]] = {}
        self.generation = 0
        self.block_saved = dict.fromkeys(range(self.BLOCKS), 0)
        self.block_loaded = dict.fromkeys(range(self.BLOCKS), 0)
        self.slot_saved = dict.fromkeys(range(self.SLOTS), 0)

    def saves(self, step: int, blocks: list[int], into: list[int]) -> bytes:
        rows = []
        for block, slot in zip(blocks, into, strict=True):
            self.generation += 1
            self.slots[slot] = (self.generation, self.blocks[block].clone())
            self.block_saved[block] = self.slot_saved[slot] = step
            rows.append((block, slot, self.generation))
        return moves(*rows)

    def loads(self, step: int, blocks: list[int]) -> tuple[bytes, int]:
        rows, fence = [], 0
        held = self.random.sample(sorted(self.slots), min(len(blocks), len(self.slots)))
        for block, slot in zip(blocks, held, strict=False):
            generation, content = self.slots[slot]
            self.blocks[block] = content
            fence = max(fence, self.slot_saved[slot], self.block_saved[block])
            self.block_loaded[block] = step
            rows.append((block, slot, generation))
        return moves(*rows), fence


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("layerwise", [True, False])
def test_random_plans_equal_plans_in_order(seed: int, layerwise: bool) -> None:
    model = Model(seed)
    pool, seeds = model.pool, iter((seed + 100, seed + 200))
    host = HostPool(model.SLOTS, pool)
    options = CopyOptions(link_bytes_per_s=FAST_LINK if layerwise else 0.0, is_layerwise=layerwise)
    copier = Copier(host, pool.data.device, pool.blocks, lambda: Jittery(next(seeds)), options)  # type: ignore[arg-type, return-value]
    kernels = load_kernels("auto", "cpu", 1)
    with torch.inference_mode():
        for step in range(1, 120):
            order = model.random.sample(range(model.BLOCKS), 8)
            slots = model.random.sample(range(model.SLOTS), 5)
            amount = [model.random.choice((0, 0, 1, 2)) for _ in range(4)]
            save = model.saves(step, order[: amount[0]], slots[: amount[0]])
            load, save_fence = model.loads(step, order[2 : 2 + amount[1]])
            # What is computed: some blocks are written anew, some are read.
            written, read = order[4 : 4 + amount[2]], order[6 : 6 + amount[3]]
            save_fence = max([save_fence, *(model.block_saved[block] for block in written)])
            load_fence = max([0, *(model.block_loaded[block] for block in (*written, *read))])
            fresh = torch.randn(len(written), *pool.data.shape[1:])
            for block, content in zip(written, fresh, strict=True):
                model.blocks[block] = content
            late = model.saves(step, written, slots[2 : 2 + len(written)])
            plan = StepPlan(
                step, 1, saves=save, loads=load, late_saves=late, save_fence=save_fence, load_fence=load_fence
            )
            gate = copier.begin(plan)
            for layer in range(model.LAYERS):
                gate.enter(layer)
                layers = range(layer, layer + 1)
                for block in read:
                    found = torch.empty(1, 1, *pool.data.shape[2:])
                    kernels.gather_blocks(pool, np.array([block], dtype=np.int32), layers, found)
                    assert torch.equal(found[0, 0], model.blocks[block, layer]), (step, block, layer)
                if written:
                    content = fresh[:, layer : layer + 1].contiguous()
                    kernels.scatter_blocks(pool, np.array(written, dtype=np.int32), layers, content)
                gate.stored(layer)
            copier.finish(gate)
        for lane in (copier.saves, copier.loads):
            lane.wait_for(lane.submitted)
        for slot, (generation, content) in model.slots.items():
            assert host.generation(slot) == generation
            assert bytes(host.view(slot)) == content.numpy().tobytes()
        found = torch.empty_like(pool.data)
        kernels.gather_blocks(pool, np.arange(model.BLOCKS, dtype=np.int32), range(model.LAYERS), found)
        assert torch.equal(found, model.blocks)
    copier.close()
