"""The sharing plan: rows in tree order, and the runs of blocks that several of them read.

ChunkAttention §3.1: in depth-first order of the tree each chunk is shared by a contiguous range [i, j) of
rows, so that a kernel can read it once for all of them. Chunks with the same range form one *run* (planning
per run instead of per chunk saves partial results). Computed from the block tables alone: two rows share
a chunk exactly if their tables agree up to it. Only done when rows join, leave or change a shared block.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trunkline.kvstore.int32_codec import Int32Array


def tree_order(tables: Int32Array) -> NDArray[np.intp]:
    """Order of rows that puts equal prefixes of their block tables side by side.

    Args:
        tables: `[rows, blocks]`, padded with -1.

    Returns:
        `[rows]` indices. Rows are compared as byte strings, without the columns that all of them share
        (docs/decisions/0002-tree-order.md).
    """
    rows, width = tables.shape
    if rows < 2 or width == 0:
        return np.arange(rows)
    differs = (tables != tables[0]).any(axis=0)
    common = int(differs.argmax()) if differs.any() else width - 1
    keys = np.ascontiguousarray(tables[:, common:], dtype=">i4").view(f"S{4 * (width - common)}").reshape(rows)
    return np.argsort(keys, kind="stable")


def shared_runs(tables: Int32Array, block_counts: Int32Array) -> Int32Array:
    """Runs shared by at least two rows that are in tree order.

    Args:
        tables: `[rows, blocks]` in tree order.
        block_counts: `[rows]`, entries of each table that count.

    Returns:
        `[runs, 4]`: row_start, row_stop, table_start, table_stop; outer runs before the runs within them.
    """
    rows = len(tables)
    if rows < 2:
        return np.empty((0, 4), dtype=np.int32)
    different = tables[1:] != tables[:-1]
    agreed = np.where(different.any(axis=1), different.argmax(axis=1), tables.shape[1])
    agreed = np.minimum(agreed, np.minimum(block_counts[1:], block_counts[:-1]))
    runs: list[tuple[int, int, int, int]] = []
    open_runs: list[tuple[int, int]] = []  # (first row, depth in blocks), depths strictly growing
    for row, depth in enumerate([*agreed.tolist(), 0]):
        first = row
        while open_runs and open_runs[-1][1] > depth:
            first, stop = open_runs.pop()
            start = max(depth, open_runs[-1][1] if open_runs else 0)
            runs.append((first, row + 1, start, stop))
        if depth > (open_runs[-1][1] if open_runs else 0):
            open_runs.append((first, depth))
    runs.sort(key=lambda run: (run[0], -run[1]))
    return np.array(runs, dtype=np.int32).reshape(-1, 4)


def text_runs(text_blocks: Int32Array) -> Int32Array:
    """Runs that cover the texts of modules: any rows may share any of these blocks, wherever in their tables, so
    that the workers look for equal ones among all of them (`trunkline.kernels.plan.build_decode_plan`).

    Args:
        text_blocks: `[rows]`, entries of texts at the beginning of each table.

    Returns:
        `[runs, 4]` as `shared_runs`; none if fewer than two rows have texts.
    """
    rows = np.flatnonzero(text_blocks)
    if len(rows) < 2:
        return np.empty((0, 4), dtype=np.int32)
    return np.stack([rows, rows + 1, np.zeros_like(rows), text_blocks[rows]], axis=1).astype(np.int32)
