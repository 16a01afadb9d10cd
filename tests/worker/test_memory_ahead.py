"""Memory that an idle rank takes ahead of the blocks that are written: as much as wanted, where it comes next."""

from __future__ import annotations

import ctypes
import mmap
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from seeds import seeds

from trunkline.kernels.large_pages import LARGE_PAGE_BYTES
from trunkline.kernels.ops import KvPool
from trunkline.kernels.thin_memory import ThinMemory
from trunkline.kvstore.chunk_format import kv_format
from trunkline.kvstore.chunks import pack_int32
from trunkline.worker.messages import Fork, Join, Sampling, StepPlan
from trunkline.worker.model.decoder import make_kv_pool
from trunkline.worker.pool_memory import AHEAD_BYTES, MOST_AHEAD_BYTES, MemoryAhead
from trunkline.worker.tiers.host_pool import HostPool

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the system's pages are Linux's")
PART = kv_format((4, 2, 64, 64), "bfloat16")
BLOCKS = 2 * AHEAD_BYTES // PART.chunk_bytes + 37


def make_pool(blocks: int = BLOCKS) -> KvPool:
    pool = make_kv_pool(blocks, PART, torch.device("cpu"))
    give_back(pool.data)
    return pool


def give_back(memory: torch.Tensor) -> None:
    """Let the system have the whole pages of a tensor: the test before may have written to the same memory."""
    start, size = memory.data_ptr(), memory.numel() * memory.element_size()
    first, stop = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    assert madvise(first, stop - first, mmap.MADV_DONTNEED) == 0


def present(pool: KvPool) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return pages_of(pool.data)


def pages_of(memory: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """For each page that belongs to a tensor alone, whether the system has given it."""
    start, size = memory.data_ptr(), memory.numel() * memory.element_size()
    first, stop = -(-start // mmap.PAGESIZE), (start + size) // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb") as pages:
        pages.seek(8 * first)
        return np.frombuffer(pages.read(8 * (stop - first)), dtype=np.uint64) >> np.uint64(63) > 0


def plan(*, joins: tuple[int, ...] = (), blocks: tuple[int, ...] = (), forks: tuple[int, ...] = ()) -> StepPlan:
    """A plan that gives these blocks to one sequence each, by each way in which plans do."""
    return StepPlan(
        1,
        1,
        joins=[Join(block + 1, pack_int32([5]), 0, 1, pack_int32([0, block]), Sampling()) for block in joins],
        blocks=pack_int32(np.array([[1, 1, block] for block in blocks], dtype=np.int32)),
        forks=[Fork(1, 1000 + block, pack_int32([0, block]), 0) for block in forks],
    )


def take_all(ahead: MemoryAhead) -> int:
    """Touch until enough is ahead; return how often."""
    count = 0
    while ahead.is_short:
        assert ahead.patience_ms(250) < 250
        ahead.touch()
        count += 1
    assert ahead.patience_ms(250) == 250
    return count


def test_what_is_ahead_is_there_and_nothing_else() -> None:
    pool = make_pool()
    assert present(pool).mean() < 0.05
    ahead = MemoryAhead(pool, None)
    count = take_all(ahead)
    assert AHEAD_BYTES // LARGE_PAGE_BYTES <= count <= AHEAD_BYTES // LARGE_PAGE_BYTES + 1
    pages = present(pool)
    margin = (AHEAD_BYTES + LARGE_PAGE_BYTES) // mmap.PAGESIZE
    assert pages[: AHEAD_BYTES // mmap.PAGESIZE].all()
    assert not pages[margin:].any()
    ahead.touch()  # nothing is lacking
    assert (present(pool) == pages).all()


@pytest.mark.parametrize("way", ["joins", "blocks", "forks"])
def test_blocks_of_a_plan_move_it_on(way: str) -> None:
    pool, highest = make_pool(), BLOCKS // 4
    ahead = MemoryAhead(pool, None)
    take_all(ahead)
    pool.data[: highest + 1] = 3.0
    ahead.note(plan(**{way: (highest, 2)}))
    ahead.note(plan())
    ahead.note(plan(joins=(1,)))  # again a low one
    take_all(ahead)
    stop = (highest + 1) * PART.chunk_bytes + AHEAD_BYTES
    pages = present(pool)
    assert pages[: stop // mmap.PAGESIZE].all()
    assert not pages[(stop + LARGE_PAGE_BYTES) // mmap.PAGESIZE + 1 :].any()
    assert bool((pool.data[: highest + 1] == 3.0).all())


@pytest.mark.parametrize("seed", seeds(3))
def test_written_blocks_stay_as_they_are_up_to_the_last(seed: int) -> None:
    rng = random.Random(seed)
    pool = make_pool()
    words = pool.data.view(torch.int32).flatten(1)[:, :: mmap.PAGESIZE // 4]  # one of each page
    ahead, written = MemoryAhead(pool, None), 0
    while written < BLOCKS:
        for _ in range(rng.randrange(4)):
            ahead.touch()
        before, written = written, min(BLOCKS, written + rng.randrange(1, BLOCKS // 6))
        words[before:written] = torch.arange(before, written, dtype=torch.int32)[:, None]
        ahead.note(plan(joins=(rng.randrange(written), written - 1)))
    take_all(ahead)
    assert present(pool).all()
    assert bool((words == torch.arange(BLOCKS, dtype=torch.int32)[:, None]).all())


def test_slots_of_the_host_pool_are_ahead_too() -> None:
    pool, slot = make_pool(), BLOCKS // 5
    host = HostPool(BLOCKS, pool)
    ahead = MemoryAhead(pool, host)
    take_all(ahead)
    assert pages_of(host.memory)[: AHEAD_BYTES // mmap.PAGESIZE].all()
    moves = pack_int32(np.array([[0, 3, 1], [1, slot, 2]], dtype=np.int32))
    ahead.note(StepPlan(1, 1, saves=moves))
    assert ahead.is_short
    take_all(ahead)
    stop = (slot + 1) * PART.chunk_bytes + AHEAD_BYTES
    pages = pages_of(host.memory)
    assert pages[slot * PART.chunk_bytes // mmap.PAGESIZE + 8 : stop // mmap.PAGESIZE].all()
    assert not pages[(stop + LARGE_PAGE_BYTES) // mmap.PAGESIZE + 1 :].any()
    assert not present(pool)[(AHEAD_BYTES + LARGE_PAGE_BYTES) // mmap.PAGESIZE + 1 :].any()
    ahead.note(StepPlan(2, 1, late_saves=pack_int32(np.array([[0, BLOCKS - 1, 1]], dtype=np.int32))))
    assert not ahead.is_short  # nothing is behind the last slot
    host.close()


def test_behind_a_step_the_next_block_is_there_at_once() -> None:
    pool, highest = make_pool(), BLOCKS // 5
    host = HostPool(BLOCKS, pool)
    ahead = MemoryAhead(pool, host)
    ahead.note(plan(joins=(highest,)))
    ahead.note(StepPlan(1, 1, late_saves=pack_int32(np.array([[0, highest, 1]], dtype=np.int32))))
    ahead.cover()
    start = (highest + 1) * PART.chunk_bytes
    for pages in (present(pool), pages_of(host.memory)):
        given = np.flatnonzero(pages[start // mmap.PAGESIZE + 1 :])
        assert LARGE_PAGE_BYTES // mmap.PAGESIZE - 2 <= len(given) <= 2 * LARGE_PAGE_BYTES // mmap.PAGESIZE
        assert given[-1] == len(given) - 1, "from the end of the block on"
    before = present(pool)
    ahead.cover()
    assert (present(pool) == before).all()
    host.close()


@pytest.mark.parametrize("seed", seeds(3))
def test_as_much_is_ahead_as_ever_came_into_use_at_once(seed: int) -> None:
    rng, step = random.Random(seed), LARGE_PAGE_BYTES // PART.chunk_bytes
    pool = make_pool(8 * BLOCKS)
    ahead, used, burst = MemoryAhead(pool, None), 0, 0
    take_all(ahead)
    while used + 40 * step < 8 * BLOCKS:
        grown = rng.randrange(1, 40) * step
        used, burst = used + grown, max(burst, grown)
        ahead.note(plan(joins=(used - 1,)))
        take_all(ahead)
        wanted = min(max(burst * PART.chunk_bytes, AHEAD_BYTES), MOST_AHEAD_BYTES)
        stop = min(used * PART.chunk_bytes + wanted, pool.data.numel() * 2) // mmap.PAGESIZE
        pages = present(pool)
        assert pages[used * PART.chunk_bytes // mmap.PAGESIZE + 1 : stop].all()
        most = used * PART.chunk_bytes + MOST_AHEAD_BYTES + LARGE_PAGE_BYTES
        assert not pages[most // mmap.PAGESIZE + 1 :].any()


def test_nothing_is_taken_where_it_would_be_of_no_use() -> None:
    memory = ThinMemory(BLOCKS, PART, (True, False, True, True))  # it gives memory back
    assert not MemoryAhead(memory.pool, None).is_short
    device = torch.empty((4, *PART.shape), dtype=torch.bfloat16, device="meta")  # as a GPU's, it is no host memory
    assert not MemoryAhead(KvPool.wrap(device, PART), None).is_short


def test_a_pool_without_a_whole_page_is_left_alone() -> None:
    part = kv_format((1, 1, 4, 8), "bfloat16")
    ahead = MemoryAhead(make_kv_pool(3, part, torch.device("cpu")), None)
    ahead.touch()
    assert not ahead.is_short
