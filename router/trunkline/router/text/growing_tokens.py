"""Token ids to which more are appended turn by turn, in one memory. Pure.

A conversation's prompts begin alike, and each is a little longer than the one before. To copy 200,000 ids for each
turn takes longer than all else that is done with them, so prompts share memory as far as they agree:

      memory     ids of turn 1 ─┤ of turn 2 ─┤ of turn 3 ─┤ free ─┤
      prompts    ───────────────┘            │            │          each sees its first ids, which never change
                 ────────────────────────────┘            │
                 ─────────────────────────────────────────┘
"""

from __future__ import annotations

from typing import Final

import numpy as np

from trunkline.kvstore.chunks import Int32Array

_SPARE_SHARE: Final = 8
"""One part in so many of the ids is kept free behind them …"""
_SPARE_LEAST: Final = 256
"""… and so many at least."""


class GrowingTokens:
    """Ids that never change, with free memory behind them. One thread uses it."""

    __slots__ = ("_array", "_count")

    def __init__(self, ids: Int32Array) -> None:
        """`ids`: int32 `[n]`, which are copied."""
        self._count = len(ids)
        self._array = np.empty(self._count + max(_SPARE_LEAST, self._count // _SPARE_SHARE), np.int32)
        self._array[: self._count] = ids

    @property
    def nbytes(self) -> int:
        """Bytes of memory, the free ones included."""
        return self._array.nbytes

    def first(self, count: int) -> Int32Array:
        """Return the first `count` ids, int32 `[count]`, as a view."""
        assert count <= self._count, "so many were never written"
        return self._array[:count]

    def extended(self, count: int, more: Int32Array) -> GrowingTokens:
        """Return a memory that begins with the first `count` ids of this one and those of `more`, int32 `[n]`.

        It is this one, if what stands behind its first ids is the same or free.
        """
        known = min(self._count - count, len(more))
        stop = count + len(more)
        if stop > len(self._array) or not np.array_equal(self._array[count : count + known], more[:known]):
            return GrowingTokens(np.concatenate((self._array[:count], more)))
        if stop > self._count:
            self._array[self._count : stop] = more[known:]
            self._count = stop
        return self
