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
from seeds import seeds
from torch import Tensor
from worker.tier_driver import (
    BACK,
    LAYERS,
    OUT,
    TARGETS,
    Background,
    HeldKernels,
    Traveller,
    moves,
    wait_until,
)

from trunkline.kernels.load import load_kernels
from trunkline.kernels.ops import KvPool
from trunkline.kvstore.chunks import NAME_BYTES, Int32Array, pack_int32
from trunkline.worker.errors import CopyError, PlanError, WorkerConfigError
from trunkline.worker.messages import StepPlan
from trunkline.worker.tiers.copier import Copier
from trunkline.worker.tiers.copy_lane import COMPUTE, LATE_SAVE, LOAD, SAVE, CopyOptions, LayerSpan
from trunkline.worker.tiers.host_pool import HostPool

BY_LAYER = CopyOptions(link_bytes_per_s=1e12)
"""Copies then go one layer at a time, and no slower."""
Travel = Callable[..., Traveller]


@pytest.fixture
def travel(deep: Path) -> Iterator[Travel]:
    made: list[Traveller] = []

    def make(copying: CopyOptions = CopyOptions(), **config: Any) -> Traveller:  # noqa: B008
        made.append(Traveller(deep, copying, **config))
        return made[-1]

    yield make
    for traveller in made:
        traveller.close()


def of_kind(spans: list[LayerSpan], kind: str) -> dict[int, LayerSpan]:
    """By layer."""
    return {layer: span for span in spans if span.kind == kind for layer in span.layers}


# --- loads


def test_each_layer_waits_for_its_own(travel: Travel, expected: list[Any]) -> None:
    """CachedAttention §3.2: layer l is computed while layer l + 1 is loaded."""
    traveller = travel(BY_LAYER)
    traveller.swap_out()
    trace = traveller.runner.trace_layers()
    held = HeldKernels.hold(traveller.copier.loads)
    counters = traveller.runner.kernels.counters
    before = counters.calls["write_kv"]
    step = Background(traveller.swap_in)
    for layer in range(LAYERS):
        wait_until(lambda layer=layer: held.asked == layer + 1)  # type: ignore[misc]
        # Everything before this layer was computed without it.
        wait_until(lambda layer=layer: counters.calls["write_kv"] - before == layer)  # type: ignore[misc]
        assert not step.is_over
        held.let(1)
    result = step.join()
    assert result.waited_us > 0
    spans = list(trace)
    computed, loaded = of_kind(spans, COMPUTE), of_kind(spans, LOAD)
    assert computed.keys() == loaded.keys() == set(range(LAYERS))
    for layer in range(LAYERS):
        assert loaded[layer].stop_ns <= computed[layer].start_ns
        assert computed[layer].start_ns < loaded[min(layer + 1, LAYERS - 1)].stop_ns or layer == LAYERS - 1
    traveller.check_end(expected)


def test_whole_preload_waits_for_everything_first(travel: Travel, expected: list[Any]) -> None:
    """With a step that saves, which ends with everything saved: for comparison."""
    traveller = travel(CopyOptions(2e6, is_layerwise=False, saves_beside=False))
    assert traveller.prefill(late_saves=moves((3, 7, 1))).moved_blocks == 1
    result = traveller.driver.send(leaves=pack_int32([1]), saves=moves((4, 8, 1), (9, 2, 1)))
    assert result is not None
    assert result.moved_blocks == 2
    assert result.waited_us > 0
    traveller.wipe()
    trace = traveller.runner.trace_layers()
    traveller.swap_in()
    spans = list(trace)
    assert of_kind(spans, LOAD)[LAYERS - 1].stop_ns <= of_kind(spans, COMPUTE)[0].start_ns
    traveller.check_end(expected)


def test_a_step_without_its_fence_reads_too_early(travel: Travel, expected: list[Any]) -> None:
    """The other tests' judge is not blind."""
    traveller = travel()
    traveller.swap_out()
    held = HeldKernels.hold(traveller.copier.loads)
    traveller.come_back(TARGETS, loads=BACK)
    assert traveller.results[1] != expected[1]
    held.let_all()


def test_other_sequences_do_not_wait(travel: Travel, expected: list[Any]) -> None:
    """Blocks are loaded ahead: the step that needs them names the plan that ordered them."""
    traveller = travel()
    traveller.swap_out()
    held = HeldKernels.hold(traveller.copier.loads)
    traveller.driver.send(loads=BACK)
    ordered = traveller.driver.step
    for _ in range(3):
        result = traveller.driver.send()
        assert result is not None
        assert result.waited_us == 0
    assert held.done == 0
    held.release_when_asked(lambda: traveller.come_back(TARGETS, load_fence=ordered))
    traveller.check_end(expected)


def test_a_fence_holds_for_plans_that_compute_nothing(travel: Travel) -> None:
    """What a fence has named once is done for all later plans, which do not name it again."""
    traveller = travel()
    traveller.swap_out()
    held = HeldKernels.hold(traveller.copier.loads)
    held.release_when_asked(lambda: traveller.driver.send(loads=BACK, load_fence=traveller.driver.step + 1))
    assert held.done == held.asked > 0


def test_copies_wait_for_their_blocks(travel: Travel, expected: list[Any]) -> None:
    """A block that is loaded and copied by the same plan."""
    traveller = travel()
    traveller.swap_out()
    held = HeldKernels.hold(traveller.copier.loads)
    fields = {"loads": BACK, "copies": pack_int32([12, 20, 0, 8]), "load_fence": traveller.driver.step + 1}
    held.release_when_asked(lambda: traveller.come_back([10, 11, 20], **fields))
    traveller.check_end(expected)


def test_a_load_waits_for_the_save_of_its_block(travel: Travel) -> None:
    """The save still reads the block, and the plan of the load names no fence."""
    traveller = travel()
    traveller.swap_out()
    saves = HeldKernels.hold(traveller.copier.saves)
    loads = HeldKernels.hold(traveller.copier.loads)
    loads.let_all()
    traveller.driver.send(saves=moves((3, 5, 1)))
    traveller.driver.send(loads=moves((3, 7, 1)))
    wait_until(lambda: saves.asked == 1)
    time.sleep(0.02)
    assert not loads.asked
    saves.let_all()
    wait_until(lambda: loads.done == 1)


# --- saves


def test_saves_do_not_stop_the_steps(travel: Travel, expected: list[Any]) -> None:
    """Steps go on; only the one that writes into the blocks waits, and what was saved is what was there."""
    traveller = travel()
    traveller.prefill()
    held = HeldKernels.hold(traveller.copier.saves)
    traveller.leave(saves=OUT)
    ordered = traveller.driver.step
    for _ in range(3):
        traveller.driver.send()
    overwrite = pack_int32([20, 3, 0, 8, 20, 4, 0, 8, 20, 9, 0, 8])
    result = held.release_when_asked(lambda: traveller.driver.send(copies=overwrite, save_fence=ordered))
    assert result.waited_us > 0
    assert result.moved_blocks == 3
    traveller.swap_in()
    traveller.check_end(expected)


def test_late_saves_follow_the_computation(travel: Travel, expected: list[Any]) -> None:
    """CachedAttention §3.2: prefill saves what it fills, layer by layer, while it goes on."""
    traveller = travel(BY_LAYER)
    trace = traveller.runner.trace_layers()
    traveller.prefill(late_saves=moves((3, 7, 1), (4, 8, 1)))
    # The block that is not full is saved when the sequence leaves.
    traveller.leave(saves=moves((9, 2, 1)), save_fence=traveller.driver.step + 1)
    spans = list(trace)
    computed, saved = of_kind(spans, COMPUTE), of_kind(spans, LATE_SAVE)
    assert saved.keys() == of_kind(spans, SAVE).keys() == set(range(LAYERS))
    for layer in range(LAYERS):
        assert computed[layer].start_ns < saved[layer].start_ns
    traveller.wipe()
    traveller.swap_in()
    traveller.check_end(expected)


def test_late_saves_begin_before_the_step_ends(travel: Travel) -> None:
    """Each layer is asked for as soon as it is stored: computation waits for a later one here, and it has come."""
    traveller = travel(BY_LAYER)
    traveller.swap_out()
    loads = HeldKernels.hold(traveller.copier.loads)
    saves = HeldKernels.hold(traveller.copier.saves)
    # Two of the three blocks come back; the prompt's last tokens are computed again, into block 20.
    fields = {
        "joins": [traveller._join(2, [10, 11, 20])],
        "prefill": pack_int32([2, 16, 5, 16, 0]),
        "loads": moves((10, 7, 1), (11, 8, 1)),
        "load_fence": traveller.driver.step + 1,
        "late_saves": moves((20, 5, 1)),
    }
    step = Background(lambda: traveller.driver.send(**fields))
    saves.let_all()
    for layer in range(LAYERS):
        wait_until(lambda layer=layer: loads.asked == layer + 1)  # type: ignore[misc]
        wait_until(lambda layer=layer: saves.done == layer)  # type: ignore[misc]
        loads.let(1)
    step.join()
    traveller.copier.saves.wait_for(traveller.copier.saves.submitted)
    assert saves.done == LAYERS


def test_a_small_late_save_is_told_of_the_steps_end_only(
    travel: Travel, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step runs as one range of ops: to tell a thread of each layer would take longer than the copy."""
    traveller = travel()
    runner, ranges = traveller.runner._decoder.runner, []
    run = runner.run

    def watched(start: int, stop: int) -> None:
        ranges.append((start, stop))
        run(start, stop)

    monkeypatch.setattr(runner, "run", watched)
    traveller.prefill(late_saves=moves((3, 7, 1), (4, 8, 1)))
    assert ranges == [(0, len(runner.program.ops))]
    traveller.leave(saves=moves((9, 2, 1)), save_fence=traveller.driver.step + 1)
    traveller.wipe()
    traveller.swap_in()
    traveller.check_end(expected)


def test_a_small_late_save_is_ordered_when_its_step_has_been_answered(
    travel: Travel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To order it, and its thread, would take the processor from the step for whose token a client waits."""
    traveller = travel()
    runner, saves, submitted = traveller.runner, traveller.copier.saves, list[int]()
    launch, before = runner.launch, saves.submitted

    def watched(plan: StepPlan) -> None:
        launch(plan)
        submitted.append(saves.submitted - before)

    monkeypatch.setattr(runner, "launch", watched)
    traveller.prefill(late_saves=moves((3, 7, 1)))
    assert submitted == [0]
    assert saves.submitted == before + 1
    saves.wait_for(before + 1)
    early, name, names = bytes([1]) * NAME_BYTES, bytes(NAME_BYTES), traveller.copier.host.names
    early_saves, late_saves = moves((3, 5, 1)), moves((4, 8, 1))
    runner.launch(StepPlan(2, 1, saves=early_saves, late_saves=late_saves, save_names=early + name))
    assert names.find(name) is None, "who asks for the chunk must see what it waits for"
    runner.launch(StepPlan(3, 1, leaves=pack_int32([1])))  # orders it in any case
    saves.wait_for(before + 3)
    assert traveller.copier.is_saved(8)
    assert [use and use.slot for use in map(names.find, (early, name))] == [5, 8]


def test_a_small_late_save_of_no_block_ends_the_rank(travel: Travel) -> None:
    traveller = travel()
    traveller.runner.launch(StepPlan(1, 1, late_saves=moves((1 << 20, 7, 1))))
    with pytest.raises(PlanError, match="blocks 1048576"):
        traveller.copier.settle()


# --- failures


def test_a_failed_copy_ends_the_rank(travel: Travel) -> None:
    """Nobody waits for what will not come, in this step or later."""
    traveller = travel()
    traveller.swap_out()

    class Broken:
        def scatter_slots(self, *_: object) -> None:
            raise RuntimeError("no such memory")

    traveller.copier.loads.kernels = Broken()  # type: ignore[assignment]
    with pytest.raises(CopyError, match="no such memory"):
        Background(traveller.swap_in).join()
    wait_until(lambda: traveller.copier.saves.gate._failure is not None)
    with pytest.raises(CopyError, match="no such memory"):
        traveller.runner.check()


def test_closing_does_not_wait_for_what_never_comes(travel: Travel) -> None:
    """A late save whose step is never computed."""
    traveller = travel()
    traveller.prefill()
    traveller.copier.begin(StepPlan(2, 1, late_saves=moves((3, 7, 1))))
    assert not Background(traveller.close).join()


def test_copies_do_not_use_the_runners_kernels(travel: Travel) -> None:
    """Ops of one instance run on one thread. Without a host pool there are none, and no traces of them."""
    runner, copier = travel().runner, travel().copier
    assert len({id(kernels) for kernels in (runner.kernels, copier.saves.kernels, copier.loads.kernels)}) == 3
    with pytest.raises(WorkerConfigError, match="without a host pool"):
        travel(host_memory_bytes=0).runner.trace_layers()


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


@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("seed", seeds(2))
def test_random_plans_equal_plans_in_order(seed: int, layerwise: bool) -> None:
    check_random_plans(seed, layerwise, steps=100)


@pytest.mark.soak
@pytest.mark.parametrize("seed", seeds(20))
def test_long_random_plans_equal_plans_in_order(seed: int) -> None:
    check_random_plans(seed, bool(seed % 2), steps=1000)


def check_random_plans(seed: int, layerwise: bool, steps: int) -> None:
    model = Model(seed)
    pool, jitter = model.pool, iter((seed + 100, seed + 200))
    host = HostPool(model.SLOTS, pool)
    options = BY_LAYER if layerwise else CopyOptions(is_layerwise=False)
    copier = Copier(host, pool.data.device, pool.blocks, lambda: Jittery(next(jitter)), options)  # type: ignore[arg-type, return-value]
    kernels = load_kernels("auto", "cpu", 1)
    with torch.inference_mode():
        for step in range(1, steps):
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
            if model.random.random() < 0.5:  # else the next plan does
                copier.settle()
        copier.settle()
        for lane in (copier.saves, copier.loads):
            lane.wait_for(lane.submitted)
        for slot, (generation, content) in model.slots.items():
            assert host.generation(slot) == generation
            assert bytes(host.view(slot)) == content.numpy().tobytes()
        found = torch.empty_like(pool.data)
        kernels.gather_blocks(pool, np.arange(model.BLOCKS, dtype=np.int32), range(model.LAYERS), found)
        assert torch.equal(found, model.blocks)
    copier.close()
