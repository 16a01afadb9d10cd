"""Whom tests give to a library, and prompts that it takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from kernels.forests import Forest, no_runs, one_row

from trunkline.kernels.library_attention import FLASH_ON_CPU, LibraryPrefill

EVERYTHING = LibraryPrefill(FLASH_ON_CPU, operations_min=0)
IN_PARTS = LibraryPrefill(replace(FLASH_ON_CPU, at_end=False), operations_min=0)
"""As cuDNN is asked: what is causal has as many queries as keys."""
WAYS = {"whole": EVERYTHING, "in parts": IN_PARTS}
AMPLE = 1 << 23


def plain_forest(rng: np.random.Generator, chunk_size: int, rows: int) -> tuple[Forest, list[int]]:
    """Rows with and without a context, in blocks in any order; new tokens from one to all."""
    lengths = rng.integers(1, 200, size=rows).tolist()
    counts = [length if rng.random() < 0.3 else int(rng.integers(1, length + 1)) for length in lengths]
    counts[0] = 1
    forest = Forest(chunk_size, [one_row(chunk_size, length) for length in lengths], no_runs())
    blocks = rng.permutation(sum(len(row.ranges) for row in forest.rows)).tolist()
    for row in forest.rows:
        row.ranges = [r._replace(block=blocks.pop()) for r in row.ranges]
        forest.blocks += len(row.ranges)
    return forest, counts
