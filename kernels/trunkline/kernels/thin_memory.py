"""Memory for a KV pool whose blocks can be thin: without memory for layers that have a window.

A chunk is one region of the pool, layer by layer, so what a block keeps of layers with a window are a few
stretches of it. They are given back to the system page by page (`madvise`), and come back, as zeros, with the
next write. Addresses, kernels and copies know nothing of it.

      block     │ layer 0 │ layer 1 … 5 │ layer 6 │ layer 7 … 11 │
      thin      │█████████│             │█████████│              │     █: memory

The pool takes room in the address space for all blocks, and memory only for what is written. It has small pages: a
large one would be given back only as a whole. Where a layer's part is not whole pages, the pages at both ends of a
stretch stay.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from trunkline.kernels.ops import KvPool
from trunkline.kvstore.chunk_format import ChunkFormat
from trunkline.kvstore.chunks import Int32Array
from trunkline.kvstore.window_share import given_back_bytes, windowed_stretches

_MAP_NORESERVE: Final = 0x4000
"""Linux's number for a mapping of which the system does not check that it could be memory as a whole."""


class ThinMemoryError(ValueError):
    """A pool whose blocks cannot be thin; the message says why, and what can be done."""


class ThinMemory:
    """A pool's memory on a CPU."""

    def __init__(self, blocks: int, part: ChunkFormat, windowed: Sequence[bool]) -> None:
        """
        Args:
            part: what a chunk is on this rank.
            windowed: for each layer, whether it has a window.

        Raises:
            ThinMemoryError: the system, or the format, does not allow it.
        """
        if sys.platform != "linux":
            raise ThinMemoryError("memory behind windows is given back on Linux only; use window_share 1")
        if not given_back_bytes(part, windowed, mmap.PAGESIZE):
            raise ThinMemoryError(
                f"a layer's KV of a chunk is {part.layer_bytes} bytes, which may hold no whole page of "
                f"{mmap.PAGESIZE} bytes to give back: use window_share 1, or a larger chunk_size"
            )
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._map = mmap.mmap(-1, blocks * part.chunk_bytes, flags=flags)
        self._map.madvise(mmap.MADV_NOHUGEPAGE)
        self._chunk_bytes = part.chunk_bytes
        size = part.layer_bytes
        self.stretches = [(first * size, (stop - first) * size) for first, stop in windowed_stretches(windowed)]
        """(first byte, bytes) of what a thin block has no memory for."""
        data: Tensor = torch.frombuffer(self._map, dtype=getattr(torch, part.element))
        pool = KvPool.wrap(data.view(blocks, *part.shape), part)
        self.pool = replace(pool, thin=self.thin, windowed=tuple(windowed))

    def thin(self, blocks: Int32Array) -> None:
        """Give back the memory of these blocks for layers with a window, as far as it is whole pages."""
        for block in blocks.tolist():
            for start, length in self.stretches:
                begin = block * self._chunk_bytes + start
                first, stop = -(-begin // mmap.PAGESIZE), (begin + length) // mmap.PAGESIZE
                if first < stop:
                    self._map.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (stop - first) * mmap.PAGESIZE)
