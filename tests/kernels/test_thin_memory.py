"""Memory that blocks give back for layers with a window: it is gone, and nothing else is."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from trunkline.kernels.thin_memory import ThinMemory, ThinMemoryError
from trunkline.kvstore.chunk_format import ChunkFormat, kv_format
from trunkline.kvstore.window_share import blocks_within, given_back_bytes, whole_blocks, windowed_stretches

WINDOWED = (True, True, False, True)
PART = kv_format((4, 2, 16, 32), "float32")
LAYER_BYTES = 2 * 2 * 16 * 32 * 4
UNEVEN = kv_format((4, 2, 16, 24), "float32")
"""A layer is a page and a half."""
EIGHT_BITS = kv_format((4, 2, 32, 76), "bfloat16", "int8")
"""A layer is two pages and a half."""


def resident_bytes(memory: ThinMemory) -> int:
    """What the system has given to the pool."""
    start, found = memory.pool.data.data_ptr(), 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            first, stop = (int(word, 16) for word in words[0].split("-"))
            inside = first <= start < stop
        elif inside and words[0] == "Rss:":
            found += 1024 * int(words[1])
    return found


def test_thin_blocks_keep_the_other_layers_and_no_memory_for_these() -> None:
    assert PART.layer_bytes == LAYER_BYTES
    memory = ThinMemory(40, PART, WINDOWED)
    data = memory.pool.data
    assert resident_bytes(memory) <= mmap.PAGESIZE
    for block in range(10):
        data[block] = block + 1.0
    assert resident_bytes(memory) == 10 * 4 * LAYER_BYTES
    memory.pool.thin(np.array([2, 7, 9], dtype=np.int32))  # type: ignore[misc]
    assert resident_bytes(memory) == 10 * 4 * LAYER_BYTES - 3 * 3 * LAYER_BYTES
    for block in range(10):
        kept = 0.0 if block in (2, 7, 9) else block + 1.0
        assert (data[block, [0, 1, 3]] == kept).all()
        assert (data[block, 2] == block + 1.0).all()
    data[7] = 5.0  # whole again
    assert (data[7] == 5.0).all()


def test_stretches_are_runs_of_layers() -> None:
    assert windowed_stretches(WINDOWED) == [(0, 2), (3, 4)]
    assert windowed_stretches([False, True]) == [(1, 2)]
    assert ThinMemory(1, PART, WINDOWED).stretches == [(0, 2 * LAYER_BYTES), (3 * LAYER_BYTES, LAYER_BYTES)]


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25, 0.013])
def test_blocks_fit_exactly(share: float) -> None:
    """One block more would not fit."""

    def needed(blocks: int) -> int:
        return LAYER_BYTES * (blocks + 3 * whole_blocks(blocks, share))

    for memory in range(8 * LAYER_BYTES, 200 * LAYER_BYTES, 1000):
        blocks = blocks_within(memory, PART, WINDOWED, share, mmap.PAGESIZE)
        assert needed(blocks) <= memory < needed(blocks + 1)


@pytest.mark.parametrize(("part", "given"), [(UNEVEN, 2), (EIGHT_BITS, 5)])
def test_parts_of_pages(part: ChunkFormat, given: int) -> None:
    """Where a layer is no whole pages, those within a stretch are given back, and no byte beside it is touched."""
    assert part.layer_bytes % mmap.PAGESIZE
    assert given_back_bytes(part, WINDOWED, mmap.PAGESIZE) == given * mmap.PAGESIZE
    memory = ThinMemory(40, part, WINDOWED)
    data = memory.pool.data
    for block in range(40):
        data[block] = block + 1
    before = resident_bytes(memory)
    thin = np.array([0, 3, 4, 5, 17, 39], dtype=np.int32)
    memory.pool.thin(thin)  # type: ignore[misc]
    for block in range(40):
        assert (data[block, 2] == block + 1).all()
        assert (data[block] == block + 1).all() == (block not in thin)
    assert before - resident_bytes(memory) >= len(thin) * given * mmap.PAGESIZE
    data[4] = 5
    assert (data[4] == 5).all()
    budget = 100 * part.chunk_bytes
    blocks = blocks_within(budget, part, WINDOWED, 0.25, mmap.PAGESIZE)
    whole = whole_blocks(blocks, 0.25)
    assert blocks > 100
    assert blocks * part.chunk_bytes - (blocks - whole) * given * mmap.PAGESIZE <= budget


def test_stretches_without_a_whole_page_are_refused() -> None:
    with pytest.raises(ThinMemoryError, match="KV of a chunk is 2048 bytes, which may hold no whole page"):
        ThinMemory(4, kv_format((4, 1, 16, 16), "float32"), WINDOWED)
