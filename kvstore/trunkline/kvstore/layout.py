"""Where a sequence's KV is and at which positions it acts: blocks, slots and extents.

A sequence's *layout* is its ordered list of extents over its block table. A plain sequence has one open
extent from position 0. Truncation, token discards and prompt modules make more of them (design.md, ideas
1 and 5): the KV stays where it is and only the extents change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, NewType

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]

BlockId = NewType("BlockId", int)
"""A physical slot of the device pool that can hold one chunk (all layers), the same id on every rank."""

SlotId = NewType("SlotId", int)
"""A physical slot of a tier below the device; allocated by the controller, the same id on every rank."""

NO_BLOCK: Final = BlockId(-1)
"""No physical slot: as a block, "not resident"; as a slot in `write_kv`, "do not store this token's KV"."""

NO_SLOT: Final = SlotId(-1)
"""Not in that tier."""

OPEN_COUNT: Final = -1
"""Token count of an extent that grows with its sequence."""


class Extent(NamedTuple):
    """A part of a sequence's context: a token range of some consecutive entries of its block table.

    A key of the extent was rotated at the position at which it was computed; `shift` says how many
    positions later it acts now, so its position in this sequence is `base_position + i + shift`.
    """

    table_start: int
    """Index of the first block-table entry."""
    first_token: int
    """Offset of the first selected token in that entry's block, in tokens."""
    token_count: int
    """Selected tokens; `OPEN_COUNT` for the one extent (the last) that grows."""
    base_position: int
    """Position at which the first selected token was computed."""
    shift: int
    """Positions by which the extent acts later than it was computed; 0 is the fast path."""


PLAIN_LAYOUT: Final = (Extent(0, 0, OPEN_COUNT, 0, 0),)
"""The layout of an ordinary sequence: everything, from position 0, unshifted."""


def pack_int32(values: Int32Array | Sequence[int]) -> bytes:
    """Little-endian int32 bytes: how arrays travel (an int per msgpack element costs 60 times more)."""
    return np.ascontiguousarray(values, dtype="<i4").tobytes()


def unpack_int32(data: bytes, columns: int = 0) -> Int32Array:
    """The array that `pack_int32` packed; shape `[n]`, or `[n, columns]`. Read-only view of `data`.

    Raises:
        ValueError: the length of `data` does not fit.
    """
    flat = np.frombuffer(data, dtype="<i4")
    return flat.reshape(-1, columns) if columns else flat


def blocks_for(token_count: int, chunk_size: int) -> int:
    """Blocks that hold `token_count` tokens."""
    return -(-token_count // chunk_size)
