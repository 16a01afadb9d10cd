"""Sliding windows: which chunks lie behind the window, so that no layer sees them any more.

A query at position p of a layer with a window of W tokens sees positions p - W + 1 to p. If all layers have a
window, no query from p on sees what is before p - W + 1, W being the widest window. Controllers and workers use
this one rule: controllers give up the blocks of these chunks, workers leave them out of what a step reads.

      chunks    │ 0 │ 1 │ 2 │ 3 │ 4 │ 5 │ 6 │▪         the query is in chunk 7
                └─ behind ──┘   └─ the window ─┘       chunk 3 is seen in part, or kept for the stride

Whole strides of chunks are given up at once: each time costs the workers a new plan of the row, and a stride is at
most an eighth of the window.
"""

from __future__ import annotations

import numpy as np

from trunkline.kvstore.chunks import Int32Array

_STRIDES_PER_WINDOW = 8


def stride_chunks(window: int, chunk_size: int) -> int:
    """Return how many chunks are given up at once."""
    return max(1, window // (chunk_size * _STRIDES_PER_WINDOW))


def chunks_behind(position: int, window: int, chunk_size: int) -> int:
    """Return the number of chunks at the beginning of a sequence that no query from `position` on sees.

    Args:
        window: number of tokens that a query sees, its own included; 0: all before it.
    """
    if not window or position < window:
        return 0
    behind = (position - window + 1) // chunk_size
    return behind - behind % stride_chunks(window, chunk_size)


def all_chunks_behind(positions: Int32Array, window: int, chunk_size: int) -> Int32Array:
    """Return `chunks_behind` of each position."""
    if not window:
        return np.zeros_like(positions)
    behind = np.maximum(positions - np.int32(window - 1), 0) // np.int32(chunk_size)
    result: Int32Array = behind - behind % np.int32(stride_chunks(window, chunk_size))
    return result


def window_blocks(window: int, step_tokens: int, chunk_size: int) -> int:
    """Return the largest number of blocks that a sequence needs at once, however long it is.

    Args:
        step_tokens: largest number of its tokens that one step computes.
    """
    # The window of the piece's first query and the piece itself, which may begin and end within a chunk; and a
    # chunk whose head was found: it counts as computed, but what lies behind was counted from its beginning.
    tokens = window - 1 + step_tokens
    return tokens // chunk_size + 3 + stride_chunks(window, chunk_size) - 1
