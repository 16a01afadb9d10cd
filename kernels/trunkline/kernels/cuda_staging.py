"""Sizes of a pool's parts, and how much of them is staged on the device on its way to and from main memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from trunkline.kernels.ops import KvPool

STAGING_BYTES: Final = 64 << 20
"""Most bytes that are staged at once; a single larger piece is staged whole."""


def layer_bytes(pool: KvPool) -> int:
    """Return the bytes of one layer of one block."""
    return int(np.prod(pool.data.shape[2:])) * pool.data.element_size()


def block_bytes(pool: KvPool) -> int:
    """Return the bytes of all layers of one block."""
    return int(pool.data.shape[1]) * layer_bytes(pool)


def staged(pool: KvPool, count: int, layers: range) -> Iterator[tuple[int, int]]:
    """Yield ranges of `count` blocks whose layers are staged at once."""
    size = max(1, STAGING_BYTES // (len(layers) * layer_bytes(pool)))
    yield from ((start, min(start + size, count)) for start in range(0, count, size))
