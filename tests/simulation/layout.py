"""Where the tokens of a simulated sequence lie, and at which positions their keys were rotated.

Written from the description of `trunkline.kvstore.layout.Extent` alone, token by token, so that it shares no
arithmetic with the engine or the real workers.
"""

from __future__ import annotations

from simulation.model import prefix_hash
from simulation.pool import Entry

from trunkline.kvstore.layout import OPEN_COUNT, PLAIN_LAYOUT, Extent, unpack_int32


class Layout:
    """The extents of one sequence."""

    def __init__(self, packed: bytes = b"", chunk_size: int = 1) -> None:
        rows = unpack_int32(packed, 5).tolist()
        self.extents = tuple(Extent(*row) for row in rows) if rows else PLAIN_LAYOUT
        self.is_plain = not rows
        self._chunk_size = chunk_size
        assert [extent.token_count for extent in self.extents].count(OPEN_COUNT) == 1
        assert self.extents[-1].token_count == OPEN_COUNT, "an extent that is not the last one grows"
        acting = 0
        for extent in self.extents:
            assert extent.base_position + extent.shift == acting, (
                "an extent does not act where the one before ends"
            )
            acting += max(0, extent.token_count)

    def cell(self, position: int) -> tuple[int, int, int]:
        """(table entry, offset in its block, position of rotation) of the token that acts at `position`."""
        before = 0
        for extent in self.extents:
            if extent.token_count == OPEN_COUNT or position < before + extent.token_count:
                offset = extent.first_token + position - before
                entry = extent.table_start + offset // self._chunk_size
                return entry, offset % self._chunk_size, extent.base_position + position - before
            before += extent.token_count
        raise AssertionError("the last extent is open")

    def cells(self, count: int) -> list[tuple[int, int, int]]:
        """`cell` of the first `count` positions."""
        return [self.cell(position) for position in range(count)]


def seen_hash(entries: list[Entry]) -> bytes:
    """The hash of a context with parts cut out: of its tokens, as if there had never been others.

    So a sequence that goes on with KV it kept and one that computes what is left again say the same.
    """
    for position, entry in enumerate(entries):
        assert entry.saw >= position, "KV is kept that was computed while less could be seen than now"
    return prefix_hash([entry.token for entry in entries])
