"""Shared-memory collectives. Ranks are threads here, which wait without the interpreter's lock, and processes
where they are killed; `worker/test_parallel.py` has whole processes, and gloo as the reference.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from kernels.pairwise import pairwise
from torch import Tensor

from trunkline.kernels.native import isa_levels, library
from trunkline.kernels.shared_group import (
    CollectiveMismatchError,
    GroupFileError,
    PeerGoneError,
    SharedGroup,
    create_file,
)

pytestmark = [
    pytest.mark.sanitized,
    pytest.mark.skipif(library() is None, reason="the compiled kernels are not installed"),
]

SLOT_BYTES = 8192
"""Small, so that ordinary messages take several rounds; 32 KiB and more go by parts when there are three ranks."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
JOIN_S = 60.0

T = TypeVar("T")


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """Where `run_ranks` puts the file: nothing may be left there."""
    yield tmp_path
    assert not list(tmp_path.iterdir())


def start_ranks(
    folder: Path, bodies: Sequence[Callable[[SharedGroup], T]], *, isa: str | None = None, timeout_s: float = 60.0
) -> list[Future[T]]:
    """A thread per rank; the file is gone once all have joined."""
    size = len(bodies)
    file = create_file(size, slot_bytes=SLOT_BYTES, folder=folder)
    joined = threading.Barrier(size + 1)

    def run(rank: int) -> T:
        group = SharedGroup(file, rank, size, isa=isa, timeout_s=timeout_s)
        joined.wait(JOIN_S)
        try:
            return bodies[rank](group)
        finally:
            group.close()

    executor = ThreadPoolExecutor(size)
    futures = [executor.submit(run, rank) for rank in range(size)]
    joined.wait(JOIN_S)
    file.unlink()
    executor.shutdown(wait=False)
    return futures


def run_ranks(folder: Path, size: int, body: Callable[[SharedGroup], T], *, isa: str | None = None) -> list[T]:
    futures = start_ranks(folder, [body] * size, isa=isa)
    return [future.result(JOIN_S) for future in futures]


def in_order(parts: Tensor) -> Tensor:
    """The specified sum: by rank, in float32 at least, rounded once."""
    total = parts[0].to(torch.promote_types(parts.dtype, torch.float32))
    for part in parts[1:]:
        total = total + part.to(total.dtype)
    return total.to(parts.dtype)


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


@pytest.mark.parametrize("isa", isa_levels())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_those_specified_bit_by_bit(path: Path, dtype: torch.dtype, isa: str) -> None:
    generator = torch.Generator().manual_seed(7)
    scale = torch.finfo(dtype).tiny / 4
    cases = [torch.randn(3, n, generator=generator).to(dtype) for n in (0, 1, 15, 16, 33, 513, 4099, 40001)]
    # Subnormal sums, infinities of both signs, overflow to infinity; NaN is compared apart, for its payload.
    cases.append((torch.randn(3, 257, generator=generator, dtype=torch.float64) * scale).to(dtype))
    cases.append(torch.tensor([[float("inf"), float("-inf"), torch.finfo(dtype).max]] * 3).to(dtype))
    cases.append(torch.tensor([[float("nan"), 1.0]] * 3).to(dtype))

    def body(group: SharedGroup) -> list[Tensor]:
        results = [case[group.rank].clone() for case in cases]
        for result in results:
            group.all_reduce(result)
        return results

    for results in run_ranks(path, 3, body, isa=isa):
        for case, result in zip(cases, results, strict=True):
            expected = in_order(case)
            finite = ~expected.isnan()
            assert torch.equal(result.isnan(), ~finite)
            assert same_bits(result[finite], expected[finite]), (tuple(case.shape), dtype)


def random_calls(group: SharedGroup, seed: int, calls: int) -> int:
    """The same random collectives on every rank, at different paces; returns how many there were."""
    shared, own = random.Random(seed), random.Random(f"{seed} {group.rank}")
    generator = torch.Generator().manual_seed(seed)
    for call in range(calls):
        dtype = shared.choice(DTYPES)
        rows, columns = shared.choice((1, 2, 7)), shared.choice((1, 3, 16, 250, 2049))
        every = torch.randn(group.size, rows, columns, generator=generator).to(dtype)
        mine = every[group.rank].clone()
        if own.random() < 0.05:
            time.sleep(own.random() * 2e-3)
        match shared.choice(("sum", "all", "columns", "broadcast")):
            case "sum":
                group.all_reduce(mine)
                assert same_bits(mine, in_order(every)), call
            case "all":
                assert same_bits(group.all_gather(mine), every), call
            case "columns":
                whole = group.gather_columns(mine)
                assert (whole is None) == (group.rank != 0)
                assert whole is None or same_bits(whole, torch.cat(list(every), dim=1)), call
            case _:
                group.broadcast(mine)
                assert same_bits(mine, every[0]), call
    return calls


@pairwise(size=[1, 2, 3, 4, 8], seeded=True)
def test_random_collectives_at_random_paces(path: Path, size: int, seed: int) -> None:
    assert run_ranks(path, size, lambda group: random_calls(group, seed, 150)) == [150] * size


@pytest.mark.parametrize("size", [2, 4])
def test_calls_that_differ_are_named(path: Path, size: int) -> None:
    def sums(group: SharedGroup) -> None:
        for _ in range(3):
            group.all_reduce(torch.ones(5))

    def broadcasts(group: SharedGroup) -> None:
        group.all_reduce(torch.ones(5))
        group.broadcast(torch.ones(6, dtype=torch.float64))

    futures = start_ranks(path, [sums] * (size - 1) + [broadcasts])
    errors = [future.exception(JOIN_S) for future in futures]
    assert all(isinstance(error, CollectiveMismatchError | PeerGoneError) for error in errors)
    named = [str(error) for error in errors if isinstance(error, CollectiveMismatchError)]
    assert named
    for text in named:
        assert f"rank {size - 1} is in broadcast of 48 bytes (bytes)" in text
        assert "is in all_reduce of 20 bytes (float32)" in text


@pytest.mark.parametrize(("left", "right"), [((4,), (5,)), ((4,), (2, 4))])
def test_sizes_that_differ_are_named(path: Path, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    futures = start_ranks(path, [lambda group: group.all_gather(torch.ones((left, right)[group.rank]))] * 2)
    errors = [future.exception(JOIN_S) for future in futures]
    # Whoever sees it first leaves; the other may see only that.
    assert all(isinstance(error, CollectiveMismatchError | PeerGoneError) for error in errors)
    assert any(isinstance(error, CollectiveMismatchError) for error in errors)


def test_who_leaves_wakes_the_others(path: Path) -> None:
    def leaves(group: SharedGroup) -> None:
        group.all_reduce(torch.ones(5))
        time.sleep(0.05)  # the others sleep by now

    def waits(group: SharedGroup) -> None:
        group.all_reduce(torch.ones(5))
        group.all_reduce(torch.ones(5))

    first, *others = start_ranks(path, [leaves, waits, waits])
    assert first.exception(JOIN_S) is None
    for other in others:
        assert isinstance(other.exception(JOIN_S), PeerGoneError)


def test_what_a_rank_gave_before_it_left_still_counts(path: Path) -> None:
    def leaves(group: SharedGroup) -> Tensor:
        return broadcast(group, 4.0)

    def broadcast(group: SharedGroup, value: float) -> Tensor:
        tensor = torch.full((3000,), value)
        group.broadcast(tensor[:100])
        return tensor

    def late(group: SharedGroup) -> Tensor:
        time.sleep(0.3)
        return broadcast(group, 1.0)

    futures = start_ranks(path, [leaves, late, late])
    assert all(future.result(JOIN_S)[:100].eq(4.0).all() for future in futures)


def test_closing_ends_a_wait_of_the_same_rank(path: Path) -> None:
    waiting = threading.Event()

    def close_when_it_waits(group: SharedGroup, thread: int) -> None:
        while sys._current_frames()[thread].f_code is not SharedGroup.all_reduce.__code__:
            time.sleep(0.01)
        time.sleep(0.1)  # from its last line in Python into the wait
        group.close()

    def waits(group: SharedGroup) -> None:
        threading.Thread(target=close_when_it_waits, args=(group, threading.get_ident())).start()
        group.all_reduce(torch.ones(2))

    def stays(group: SharedGroup) -> None:
        assert waiting.wait(JOIN_S)

    alone, other = start_ranks(path, [waits, stays])
    assert isinstance(alone.exception(JOIN_S), PeerGoneError)
    waiting.set()
    assert other.exception(JOIN_S) is None


def test_a_rank_that_does_not_come_in_time(path: Path) -> None:
    done = threading.Event()
    bodies: list[Callable[[SharedGroup], object]] = [
        lambda group: group.all_reduce(torch.ones(2)),
        lambda _: done.wait(JOIN_S),
    ]
    waits, _ = start_ranks(path, bodies, timeout_s=0.2)
    with pytest.raises(PeerGoneError, match="rank 1 lives, but did not come within 200 ms"):
        waits.result(JOIN_S)
    done.set()


@pytest.mark.processes
@pytest.mark.parametrize("calls", [0, 5])
def test_a_killed_rank_is_noticed_though_nobody_reaps_it(path: Path, calls: int) -> None:
    file = create_file(2, slot_bytes=SLOT_BYTES, folder=path)
    command = [
        sys.executable,
        str(Path(__file__).with_name("shared_group_rank.py")),
        str(file),
        "1",
        "2",
        str(calls),
    ]
    peer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert peer.stdin is not None
    assert peer.stdout is not None
    with peer, ThreadPoolExecutor(1) as executor:
        group: SharedGroup = executor.submit(SharedGroup, file, 0, 2).result(JOIN_S)
        assert peer.stdout.readline() == "joined\n"
        file.unlink()
        peer.stdin.write("go\n")
        peer.stdin.flush()
        for _ in range(calls):
            executor.submit(group.all_reduce, torch.ones(3)).result(JOIN_S)
        assert peer.stdout.readline() == "done\n"
        waiting = executor.submit(group.all_reduce, torch.ones(3))
        assert not wait_for([waiting], timeout=0.3).done  # it lives: no error
        os.kill(peer.pid, signal.SIGKILL)
        with pytest.raises(PeerGoneError, match="rank 1 has died"):
            waiting.result(JOIN_S)
        assert Path(f"/proc/{peer.pid}").exists()  # still a zombie, or on its way to be one
        with pytest.raises(PeerGoneError):
            executor.submit(group.all_reduce, torch.ones(3)).result(JOIN_S)
        executor.submit(group.close).result(JOIN_S)


def test_a_thread_that_ends_is_a_rank_that_died(path: Path) -> None:
    file = create_file(2, slot_bytes=SLOT_BYTES, folder=path)
    group = SharedGroup(file, 0, 2)
    thread = threading.Thread(target=SharedGroup, args=(file, 1, 2))
    thread.start()
    thread.join()
    file.unlink()
    with pytest.raises(PeerGoneError, match="rank 1 has died"):
        group.all_reduce(torch.ones(1))
    group.close()


def test_what_cannot_be_shared_is_refused(path: Path) -> None:
    file = create_file(1, slot_bytes=SLOT_BYTES, folder=path)
    with pytest.raises(ValueError, match="not the file of a group of 2"):
        SharedGroup(file, 0, 2)
    with pytest.raises(ValueError, match="rank is not below size"):
        SharedGroup(file, 1, 1)
    group = SharedGroup(file, 0, 1)
    with pytest.raises(GroupFileError, match="rank 0 has joined"):
        SharedGroup(file, 0, 1)
    file.unlink()
    with pytest.raises(GroupFileError, match="cannot open"):
        SharedGroup(file, 0, 1)
    with pytest.raises(ValueError, match="contiguous"):
        group.all_reduce(torch.ones(4, 4).t())
    with pytest.raises(ValueError, match="sums are of float32"):
        group.all_reduce(torch.ones(4, dtype=torch.int64))
    group.close()
    group.close()
    with pytest.raises(ValueError, match="the group is closed"):
        group.all_reduce(torch.ones(4))
    with pytest.raises(GroupFileError, match="cannot open"):
        create_file(1, folder=path / "missing")
