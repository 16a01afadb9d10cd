"""Sums through symmetric memory: which way a message takes, who can have such memory, what is done with a message.

No GPU is at hand where this runs. Torch's three operations are stood in for on the CPU, behind their real
signatures; so nothing here says that the real ones do what their description says.
"""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from seeds import seeds
from torch import Tensor
from worker.driver import run_config

from trunkline.worker import tensor_parallel
from trunkline.worker.errors import WorkerError
from trunkline.worker.symmetric_sums import (
    BUFFER_BYTES,
    ONE_SHOT_BYTES,
    Place,
    SymmetricSums,
    Way,
    changes_atomically,
    way_of,
    why_apart,
)
from trunkline.worker.tensor_parallel import TensorParallel

BF16, F32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("size", "dtype", "ranks", "multicast", "way"),
    [
        (8192, BF16, 2, False, Way.ONE_SHOT),
        (8192, BF16, 8, True, Way.ONE_SHOT),
        (ONE_SHOT_BYTES, BF16, 2, True, Way.ONE_SHOT),
        (ONE_SHOT_BYTES + 16, BF16, 2, False, Way.TWO_SHOT),
        (ONE_SHOT_BYTES, F32, 8, True, Way.MULTIMEM),
        (ONE_SHOT_BYTES, F32, 8, False, Way.TWO_SHOT),
        (BUFFER_BYTES, BF16, 2, False, Way.TWO_SHOT),
        (BUFFER_BYTES + 16, BF16, 2, True, None),
        (8192, torch.float16, 2, True, None),
        (8200, BF16, 2, True, None),
        (0, BF16, 2, True, None),
    ],
)
def test_the_way_of_a_message(size: int, dtype: torch.dtype, ranks: int, multicast: bool, way: Way | None) -> None:
    assert way_of(size, dtype, ranks, multicast=multicast) is way


@pytest.mark.parametrize(
    ("places", "may_share", "reason"),
    [
        ([Place("a", "0", ("1",)), Place("a", "1", ("0",))], False, ""),
        ([Place("a", "0", ("1",)), Place("b", "1", ("0",))], False, "not on one host"),
        ([Place("", "0", ("1",)), Place("", "1", ("0",))], False, "not on one host"),
        (
            [Place("a", "0", ("1",)), Place("a", "1", ())],
            False,
            "GPU of rank 1 cannot read and atomically change the memory of rank 0's",
        ),
        ([Place("a", "0", ()), Place("a", "0", ())], False, "two ranks use one GPU"),
        ([Place("a", "0", ()), Place("a", "0", ())], True, ""),
    ],
)
def test_who_can_share_memory(places: list[Place], may_share: bool, reason: str) -> None:
    found = why_apart(places, may_share=may_share)
    assert reason in found
    assert bool(found) == bool(reason)


DRIVER = """
int cuDeviceGet(int *device, int index) { *device = 10 + index; return index > 2 ? 101 : 0; }
int cuDeviceGetP2PAttribute(int *value, int attribute, int own, int other) {
  *value = attribute == 3 && own == 10 && other == 12;
  return own == other ? 101 : 0;
}
"""
"""The driver's functions: GPUs 0 to 2, of which the first changes memory of the last atomically."""


@pytest.mark.processes
def test_the_driver_says_who_changes_memory_atomically(tmp_path: Path) -> None:
    """GPUs over PCIe read each other's memory; torch's kernels would wait there for ever."""
    source, library = tmp_path / "driver.c", str(tmp_path / "driver.so")
    source.write_text(DRIVER)
    subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", library, str(source)], check=True)
    pairs = [(own, other) for own in range(4) for other in range(4)]
    assert [pair for pair in pairs if changes_atomically(*pair, library)] == [(0, 2)]
    assert not changes_atomically(0, 2, str(tmp_path / "none.so"))
    source.write_text("int cuDeviceGet(int *device, int index) { *device = index; return 0; }")
    old = str(tmp_path / "old.so")
    subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", old, str(source)], check=True)
    assert not changes_atomically(0, 2, old)


RANKS = 3
"""Ranks of the group that is stood in for: all have the same message."""


class StandIn:
    """Torch's operations on a CPU. Which were called, and whether they do what they should."""

    def __init__(self) -> None:
        self.called: list[Way] = []
        self.is_right = True

    def one_shot(self, shared: Tensor, own: Tensor, op: str, group: str, out: Tensor) -> Tensor:
        assert (op, group, shared.shape, shared.dtype) == ("sum", "some ranks", own.shape, own.dtype)
        self.called.append(Way.ONE_SHOT)
        shared.copy_(own)
        out.copy_(shared * RANKS)
        return out

    def in_place(self, shared: Tensor, op: str, group: str, way: Way) -> Tensor:
        assert (op, group) == ("sum", "some ranks")
        self.called.append(way)
        return shared.mul_(RANKS) if self.is_right else shared


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    made = StandIn()
    with torch.library._scoped_library("symm_mem", "IMPL") as library:
        library.impl("one_shot_all_reduce_copy_out", lambda *given: made.one_shot(*given), "CPU")
        library.impl("two_shot_all_reduce_", lambda x, op, group: made.in_place(x, op, group, Way.TWO_SHOT), "CPU")
        library.impl("multimem_all_reduce_", lambda x, op, group: made.in_place(x, op, group, Way.MULTIMEM), "CPU")
        yield made


def make_sums(*, multicast: bool) -> SymmetricSums:
    return SymmetricSums(torch.zeros(BUFFER_BYTES, dtype=torch.uint8), "some ranks", RANKS, multicast=multicast)


@pytest.mark.parametrize("seed", seeds(2))
def test_messages_are_summed_in_place(seed: int, stand_in: StandIn) -> None:
    rng = random.Random(seed)
    for multicast in (False, True):
        sums = make_sums(multicast=multicast)
        for _ in range(15):
            dtype = rng.choice((BF16, F32, torch.float16))
            width = rng.choice((3, 8, 64, 1000))
            rows = rng.choice((1, 5, 300, 1024))
            before = torch.randint(-9, 9, (rows + 2, width)).to(dtype)
            whole = before.clone()
            message = whole[1:-1]
            stand_in.called.clear()
            way = way_of(message.nbytes, dtype, RANKS, multicast=multicast)
            is_aligned = width * dtype.itemsize % 16 == 0
            assert sums.add(message) == (way is not None and is_aligned)
            assert stand_in.called == ([way] if way is not None and is_aligned else [])
            expected = before[1:-1] * RANKS if stand_in.called else before[1:-1]
            assert torch.equal(message, expected)
            assert torch.equal(whole[[0, -1]], before[[0, -1]])


@pytest.mark.parametrize("multicast", [False, True])
def test_a_way_that_sums_wrongly_is_found(multicast: bool, stand_in: StandIn) -> None:
    """Of three equal ranks' messages only the middle rank's sum to what those of ranks 0, 1 and 2 would."""
    sums = make_sums(multicast=multicast)
    assert sums.wrong_way(1) == ""
    assert set(stand_in.called) == {Way.ONE_SHOT, Way.MULTIMEM if multicast else Way.TWO_SHOT}
    stand_in.is_right = False
    assert f"by {Way.MULTIMEM if multicast else Way.TWO_SHOT} is wrong" in sums.wrong_way(1)


def test_what_it_does_not_take_goes_the_other_way(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    group = TensorParallel(0, RANKS, torch.device("cpu"), backend="nccl")
    group._symmetric = make_sums(multicast=False)
    others: list[Tensor] = []
    monkeypatch.setattr(torch.distributed, "all_reduce", others.append)
    taken, left = torch.ones(8), torch.ones(8, dtype=torch.float16)
    assert group.all_reduce(taken) is taken
    assert taken.tolist() == [RANKS] * 8
    assert group.all_reduce(left) is left
    assert [x is left for x in others] == [True]


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("fails", "reason"), [("", ""), ("sum", "no kernel"), ("meet", "no memory")])
def test_what_torch_refuses_leaves_the_other_way(
    fails: str, reason: str, stand_in: StandIn, group_of_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is the memory or one of the kernels: a worker starts all the same."""
    sums = SymmetricSums(torch.zeros(BUFFER_BYTES, dtype=torch.uint8), "some ranks", 1, multicast=False)

    def meet(device: torch.device, ranks: int) -> SymmetricSums:
        if fails == "meet":
            raise RuntimeError("no memory of this kind")
        return sums

    def add(shared: Tensor, own: Tensor, op: str, group: str, out: Tensor) -> Tensor:
        if fails == "sum":
            raise RuntimeError("no kernel for this GPU")
        return out

    monkeypatch.setattr(tensor_parallel, "place_of", lambda device, host: Place("a", "0", ()))
    monkeypatch.setattr(SymmetricSums, "meet", meet)
    monkeypatch.setattr(stand_in, "one_shot", add)
    monkeypatch.setattr(stand_in, "in_place", lambda shared, *_: shared)
    group = TensorParallel(0, 1, torch.device("cpu"), backend="gloo")
    found, problem = tensor_parallel._join_symmetric_sums(group, "bfloat16")
    assert (found is sums) == (not fails)
    assert reason in problem
    assert bool(problem) == bool(fails)


def test_types_that_it_does_not_sum_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(tensor_parallel, "place_of", refuse)
    monkeypatch.setattr(SymmetricSums, "meet", refuse)
    group = TensorParallel(0, 2, torch.device("cpu"), backend="nccl")
    group._share_gpu_memory("float16", required=False)
    assert group._symmetric is None
    with pytest.raises(WorkerError, match=r"torch.bfloat16 and torch.float32, and the model is in float16"):
        group._share_gpu_memory("float16", required=True)


def test_it_is_for_gpus(tmp_path: Path) -> None:
    config = run_config(tmp_path, collectives="symmetric", rendezvous=f"file://{tmp_path}/rendezvous")
    with pytest.raises(WorkerError, match="'symmetric', which is for GPU ranks; device is 'cpu'"):
        TensorParallel.connect(config, torch.device("cpu"))
