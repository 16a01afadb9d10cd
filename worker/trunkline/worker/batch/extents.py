"""Where the tokens of a sequence lie and at which positions they act, found by token index.

A sequence's *index space* is the concatenation of its extents: what it sees of other computations' KV, then its
own tokens, of which the last extent's grow in number. In a plain sequence, and behind cuts (CachedAttention §3.4),
a token's index is the position at which it acts. A prompt with modules (Prompt Cache §3.4) has its own tokens at
scattered positions, between and behind the modules':

      extents     module A │ module B │ own, closed │ own, open
      indices     0 … 9    │ 10 … 29  │ 30 … 33     │ 34, 35, …
      positions   0 … 9    │ 20 … 39  │ 10 … 13     │ 40, 41, …

New tokens are computed in the *frame* of the open extent: a query and its key are rotated at `base_position` plus
the token's place in its extent, and the shifts of other extents count relative to the open one's. So own extents
have the open one's shift, and truncation, which shifts all that it keeps alike, stays on the fast path. Own tokens
are computed in the order of their indices, so that is also the order of their positions.

Invariant: extents act at different positions, the open one behind all others. So whatever a decoding row's layout
names, its query may see; within a prefill the kernels hide the keys that act later than the query.
"""

from __future__ import annotations

import itertools
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trunkline.kvstore.extents import OPEN_COUNT, PLAIN_LAYOUT, Extent
from trunkline.kvstore.int32_codec import Int32Array
from trunkline.worker.errors import PlanError

_UNBOUNDED: Final = np.iinfo(np.int32).max
"""Token count of an extent that grows."""

_Numbers = NDArray[np.int64] | int
"""The extent of each of some tokens, or of all of them."""


class ContextLayout:
    """The extents of one sequence. Does not change; forks share it."""

    __slots__ = ("_frames", "_own_start", "_starts", "is_plain", "open_start", "spans")

    def __init__(self, extents: tuple[Extent, ...]) -> None:
        """
        Raises:
            PlanError: extents that are empty or negative, act at the same positions, or do not end with the one
                that grows and acts last.
        """
        _check(extents)
        shift = extents[-1].shift
        counts = [extent.token_count for extent in extents[:-1]]
        starts = np.cumsum([0, *counts], dtype=np.int32)
        self._starts = starts
        """int32 `[extents]`: index of each one's first token."""
        self._frames = np.array([extent.base_position for extent in extents], dtype=np.int32)
        """int32 `[extents]`: position at which each one's first token was rotated."""
        rows = [(e.table_start, e.first_token, e.base_position, e.shift - shift) for e in extents]
        self.spans = np.array(
            [(*row, count, start) for row, count, start in zip(rows, [*counts, _UNBOUNDED], starts, strict=True)],
            dtype=np.int32,
        ).T
        """int32 `[6, extents]`: table entry, first token, base position, relative shift, count, first index."""
        self._own_start = int(starts[_first_own(extents)])
        """Tokens from this index on may be computed, in the order of their indices."""
        self.open_start = int(starts[-1])
        """Index of the first token of the open extent."""
        self.is_plain = extents == PLAIN_LAYOUT

    def frame_positions(self, start: int, stop: int) -> Int32Array:
        """Positions at which the queries and keys of new tokens with indices `[start, stop)` are rotated.

        Raises:
            PlanError: some of them can only be read.
        """
        number, offset = self._cells(start, stop)
        positions: Int32Array = self._frames[number] + offset
        return positions

    def cells(self, start: int, stop: int, chunk_size: int) -> tuple[Int32Array, Int32Array]:
        """Entries of the block table, and offsets in their blocks, of new tokens with indices `[start, stop)`.

        Raises:
            PlanError: as `frame_positions`.
        """
        number, offset = self._cells(start, stop)
        token = self.spans[1][number] + offset
        return self.spans[0][number] + token // chunk_size, token % chunk_size

    def _cells(self, start: int, stop: int) -> tuple[_Numbers, Int32Array]:
        """Which extents tokens lie in, and their places there."""
        if start < self._own_start:
            raise PlanError(
                f"tokens with indices [{start}, {stop}) are to be computed; those before index {self._own_start} "
                f"can only be read: what is computed has the open extent's shift and ascending positions"
            )
        if start >= self.open_start:
            return -1, np.arange(start - self.open_start, stop - self.open_start, dtype=np.int32)
        index = np.arange(start, stop, dtype=np.int32)
        number = self._starts.searchsorted(index, side="right") - 1
        return number, index - self._starts[number]


def _check(extents: tuple[Extent, ...]) -> None:
    if not extents or extents[-1].token_count != OPEN_COUNT or any(e.token_count <= 0 for e in extents[:-1]):
        counts = [extent.token_count for extent in extents]
        raise PlanError(
            f"exactly the last extent of a layout must be open ({OPEN_COUNT} tokens), the others not empty; "
            f"the token counts are {counts}"
        )
    for extent in extents:
        acts_at = extent.base_position + extent.shift
        if min(extent.table_start, extent.first_token, extent.base_position, acts_at) < 0:
            raise PlanError(f"{extent} has a negative place or position")
    if len(extents) == 1:
        return
    places = sorted((e.base_position + e.shift, e.token_count) for e in extents[:-1])
    places.append((extents[-1].base_position + extents[-1].shift, 0))
    for (position, count), (following, _) in itertools.pairwise(places):
        if position + count > following:
            raise PlanError(
                f"extents must act at different positions, the open one behind all others; one acts at "
                f"[{position}, {position + count}), another from {following} on"
            )


def _first_own(extents: tuple[Extent, ...]) -> int:
    """Number of the first extent from which on all have the open one's shift and ascending positions."""
    number = len(extents) - 1
    while number:
        before, after = extents[number - 1], extents[number]
        if before.shift != after.shift or before.base_position > after.base_position:
            break
        number -= 1
    return number


PLAIN: Final = ContextLayout(PLAIN_LAYOUT)
"""Of an ordinary sequence."""
