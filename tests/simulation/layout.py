"""Where the tokens of a simulated sequence lie, and at which positions their keys were rotated.

Written from the description of `trunkline.kvstore.chunks.Extent` alone, token by token, so that it shares no
arithmetic with the engine or the real workers.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from simulation.model import prefix_hash
from simulation.pool import Entry

from trunkline.kvstore.chunks import OPEN_COUNT, PLAIN_LAYOUT, Extent, unpack_int32


class Cell(NamedTuple):
    """Where a token is."""

    entry: int
    """Index of its block in the table."""
    offset: int
    """In the block."""
    frame: int
    """Position at which its key was rotated."""
    acting: int
    """Position at which it acts."""


class Layout:
    """The extents of one sequence. Tokens are counted through them, one extent behind the other."""

    def __init__(self, packed: bytes = b"", chunk_size: int = 1, *, modules: bool = False) -> None:
        """
        Args:
            modules: extents may act at any positions, if only they are different and the open one's are the
                last; else each acts where the one before it ends.
        """
        rows = unpack_int32(packed, 5).tolist()
        self.extents = tuple(Extent(*row) for row in rows) if rows else PLAIN_LAYOUT
        self.is_plain = not rows and not modules
        self.has_modules = modules
        self._chunk_size = chunk_size
        assert [extent.token_count for extent in self.extents].count(OPEN_COUNT) == 1
        assert self.extents[-1].token_count == OPEN_COUNT, "an extent that is not the last one grows"
        self._closed = [
            self._cell(extent, place) for extent in self.extents[:-1] for place in range(extent.token_count)
        ]
        self._by_position = sorted(enumerate(self._closed), key=lambda numbered: numbered[1].acting)
        acting = [cell.acting for _, cell in self._by_position]
        first_open = self._cell(self.extents[-1], 0).acting
        if modules:
            assert all(a < b for a, b in pairwise([-1, *acting, first_open])), "two tokens act at one position"
        else:
            assert [cell.acting for cell in self._closed] == list(range(first_open)), (
                "an extent does not act where the one before ends"
            )

    def _cell(self, extent: Extent, place: int) -> Cell:
        entry, offset = divmod(extent.first_token + place, self._chunk_size)
        frame = extent.base_position + place
        return Cell(extent.table_start + entry, offset, frame, frame + extent.shift)

    @property
    def open_start(self) -> int:
        """Number of the first token of the extent that grows."""
        return len(self._closed)

    def cell(self, number: int) -> Cell:
        """Where token `number` is."""
        if number < len(self._closed):
            return self._closed[number]
        return self._cell(self.extents[-1], number - len(self._closed))

    def cells(self, count: int) -> list[Cell]:
        """`cell` of the first `count` tokens."""
        return [self.cell(number) for number in range(count)]

    def by_position(self, count: int) -> list[tuple[int, Cell]]:
        """The first `count` tokens, with their numbers, in the order in which they act."""
        closed = [numbered for numbered in self._by_position if numbered[0] < count]
        return closed + [(number, self.cell(number)) for number in range(len(self._closed), count)]


def seen_hash(entries: list[Entry]) -> bytes:
    """The hash of a context with parts cut out: of its tokens, as if there had never been others.

    So a sequence that goes on with KV it kept and one that computes what is left again say the same.
    """
    for position, entry in enumerate(entries):
        assert entry.saw >= position, "KV is kept that was computed while less could be seen than now"
    return prefix_hash([entry.token for entry in entries])
