"""How a KV pool is divided where some layers have a window: all blocks hold the KV of the layers without one,
a share of them that of all layers (docs/decisions/0021-windows.md). Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from enum import IntEnum

from trunkline.kvstore.chunk_format import ChunkFormat


class LoadedLayers(IntEnum):
    """The layers whose KV is loaded from a copy, which has that of all layers."""

    ALL = 0
    PLAIN = 1
    """Those without a window: the block stays thin."""
    WINDOWED = 2
    """Those with a window: the block was thin, and has the others."""


def windowed_stretches(windowed: Sequence[bool]) -> list[tuple[int, int]]:
    """Return the (first, stop) of runs of layers that have a window."""
    stops = list(itertools.accumulate(len(list(run)) for _, run in itertools.groupby(windowed)))
    return [(first, stop) for first, stop in zip([0, *stops], stops, strict=False) if windowed[first]]


def given_back_bytes(part: ChunkFormat, windowed: Sequence[bool], page_bytes: int) -> int:
    """Return how much memory a block gives back, at least, when it becomes thin. Only whole pages can be.

    Args:
        windowed: for each layer, whether it has a window.
        page_bytes: size of a page of memory.
    """
    sizes = [(stop - first) * part.layer_bytes for first, stop in windowed_stretches(windowed)]
    if part.layer_bytes % page_bytes == 0:
        return sum(sizes)
    # A stretch of layers may begin and end anywhere within a page.
    return sum(max(0, size - page_bytes + 1) // page_bytes * page_bytes for size in sizes)


def blocks_within(
    memory_bytes: int, part: ChunkFormat, windowed: Sequence[bool], share: float, page_bytes: int
) -> int:
    """Return how many blocks fit into this memory if `share` of them hold the KV of all layers at once.

    Args:
        windowed: for each layer, whether it has a window.
        page_bytes: size of a page of memory.
    """
    given = given_back_bytes(part, windowed, page_bytes)

    def needed(count: int) -> int:
        return count * (part.chunk_bytes - given) + whole_blocks(count, share) * given

    blocks = int(memory_bytes // (part.chunk_bytes - (1 - share) * given))
    while blocks and needed(blocks) > memory_bytes:
        blocks -= 1
    while needed(blocks + 1) <= memory_bytes:
        blocks += 1
    return blocks


def whole_blocks(blocks: int, share: float) -> int:
    """Return how many of `blocks` blocks can hold the KV of all layers at once."""
    return max(1, int(blocks * share))
