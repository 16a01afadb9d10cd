"""The order of rows in a step, and the runs of blocks that they share. Pure.

Rows are put in tree order, where each shared chunk belongs to a contiguous range [i, j) of rows (ChunkAttention
§3.1): a kernel reads it once for all of them. Chunks with the same range form one *run*. Working run by run, the
kernel has fewer partial results to merge than chunk by chunk. Runs follow from the block tables alone: two rows
share a chunk exactly if their tables agree up to it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from trunkline.kvstore.chunks import Int32Array, all_of, any_of, least

LARGE_TABLES: Final = 8192
"""Number of entries of block tables from which on rows are sorted branching by branching."""
BRANCHINGS_MAX: Final = 4
"""Number of branchings, one below the other, up to which rows are sorted so."""


def tree_order(tables: Int32Array) -> tuple[NDArray[np.intp], int]:
    """Return an order of rows that puts equal prefixes of their block tables side by side.

    Args:
        tables: `[rows, blocks]`, padded with -1.

    Returns:
        `[rows]` indices, and a number of columns beyond which no two rows agree. The order is that of the rows as
        byte strings (docs/decisions/0002-tree-order.md).
    """
    rows, width = tables.shape
    if rows < 2 or width == 0:
        return np.arange(rows), width
    common = 0
    if tables[0, 0] == tables[1, 0]:  # else not even the first column is shared
        differs = any_of(tables != tables[0], axis=0)
        common = int(differs.argmax()) if any_of(differs) else width - 1
    heads = tables[:, common].view(np.uint32)  # in the order of bytes, -1 is the largest
    order = heads.argsort(kind="stable")
    heads = heads[order]
    begins = heads[1:] != heads[:-1]
    if all_of(begins):  # below what all share, no two rows share a block, as in most batches
        return order, common
    if rows * width >= LARGE_TABLES and (found := _order_by_branchings(tables, order, begins, common + 1)):
        return found
    keys = np.ascontiguousarray(tables[:, common:], dtype=">i4").view(f"S{4 * (width - common)}").reshape(rows)
    return keys.argsort(kind="stable"), width


def _order_by_branchings(
    tables: Int32Array, order: NDArray[np.intp], begins: NDArray[np.bool_], depth: int
) -> tuple[NDArray[np.intp], int] | None:
    """Return what `tree_order` does; None if rows branch off from each other too often, one below the other.

    Rows that agree so far form groups. The rows of a group are sorted by the first column in which one of them
    differs, so no column is sorted by that a group shares.

    Args:
        order: the rows in the order of their first `depth` columns.
        begins: `[rows - 1]`, whether the rows behind the first one, in this order, differ from those before them.
    """
    rows, width = tables.shape
    for _ in range(BRANCHINGS_MAX):
        ordered = tables[order]
        agreed = (ordered[1:] != ordered[:-1]).argmax(axis=1)
        agreed[begins | (agreed == 0)] = width  # these are not in one group, or equal
        starts = np.concatenate(([0], begins.nonzero()[0] + 1))
        columns = np.minimum.reduceat(np.append(agreed, width), starts)
        if least(columns) == width:
            return order, width  # only equal rows are left in groups
        depth = max(depth, int(columns[columns < width].max()) + 1)
        group = np.concatenate(([0], begins.cumsum()))
        heads = ordered[np.arange(rows), np.minimum(columns, width - 1)[group]].view(np.uint32)
        within = np.lexsort((heads, group))
        order, heads = order[within], heads[within]
        begins = begins | (heads[1:] != heads[:-1])
        if all_of(begins):
            return order, depth
    return None


def shared_runs(tables: Int32Array, block_counts: Int32Array) -> Int32Array:
    """Return the runs of blocks that at least two rows share.

    Args:
        tables: `[rows, blocks]` in tree order.
        block_counts: `[rows]`, entries of each table that are in use.

    Returns:
        `[runs, 4]`: row_start, row_stop, table_start, table_stop; outer runs before the runs within them.
    """
    rows, width = tables.shape
    if rows < 2 or not width:
        return np.empty((0, 4), dtype=np.int32)
    different = tables[1:] != tables[:-1]
    agreed = np.where(different.any(axis=1), different.argmax(axis=1), width)
    agreed = np.minimum(agreed, np.minimum(block_counts[1:], block_counts[:-1]))
    runs: list[tuple[int, int, int, int]] = []
    open_runs: list[tuple[int, int]] = []  # (first row, depth in blocks), depths strictly growing
    depths = np.append(agreed, 0)
    changes = [0, *((depths[1:] != depths[:-1]).nonzero()[0] + 1).tolist()]
    for row, depth in zip(changes, depths[changes].tolist(), strict=True):  # at equal depths nothing opens or ends
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
    """Return the runs that cover texts of modules. Any rows may share these blocks, at any entries, so the workers
    look for equal ones among all of them (`trunkline.kernels.plan.build_decode_plan`).

    Args:
        text_blocks: `[rows]`, how many entries at the beginning of each table belong to texts.

    Returns:
        `[runs, 4]` as `shared_runs`; none if fewer than two rows have texts.
    """
    rows = text_blocks.nonzero()[0]
    if len(rows) < 2:
        return np.empty((0, 4), dtype=np.int32)
    return np.stack([rows, rows + 1, np.zeros_like(rows), text_blocks[rows]], axis=1).astype(np.int32)
