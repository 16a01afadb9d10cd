"""Where a sequence's KV lies and at which positions it acts: blocks, slots and extents.

A sequence's *layout* is its ordered list of extents over its block table. A plain sequence has one open
extent from position 0. Truncation, token discards and prompt modules make more of them (design.md, ideas
1 and 5): the KV stays where it is and only the extents change.
"""

from __future__ import annotations

from typing import Final, NamedTuple, NewType

BlockId = NewType("BlockId", int)
"""A block of the device pool: room for one chunk of all layers. It has the same id on every rank."""

SlotId = NewType("SlotId", int)
"""A slot of a tier below the device. The controller hands it out, and it has the same id on every rank."""

NO_BLOCK: Final = BlockId(-1)
"""No block: of a chunk, "not on the device"; as a slot in `write_kv`, "do not store this token's KV"."""

NO_SLOT: Final = SlotId(-1)
"""The chunk has no slot in that tier."""

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
    """Number of selected tokens; `OPEN_COUNT` for the last extent, which grows."""
    base_position: int
    """Position at which the first selected token was computed."""
    shift: int
    """Positions by which the extent acts later than it was computed; 0 is the fast path."""


PLAIN_LAYOUT: Final = (Extent(0, 0, OPEN_COUNT, 0, 0),)
"""The layout of an ordinary sequence: everything, from position 0, unshifted."""


def blocks_for(token_count: int, chunk_size: int) -> int:
    """Return how many blocks hold `token_count` tokens."""
    return -(-token_count // chunk_size)
