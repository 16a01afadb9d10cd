"""Which part of a chunk's KV each rank of a group holds, and how parts of one group become those of another one.

In a chunk's bytes all heads of a layer's band lie side by side (`trunkline.kvstore.chunk_format`). The ranks of a
group divide the KV heads among them and nothing else, so parts of groups with other numbers of ranks differ in
their heads only:

      heads           0   1   2   3   4   5   6   7
      2 ranks        ├───── 0 ─────┼───── 1 ─────┤
      4 ranks        ├── 0 ─┼─ 1 ──┼─ 2 ──┼─ 3 ──┤         rank 1 of 2 joins the parts of ranks 2 and 3 of 4,
                                                            rank 3 of 4 takes half of the part of rank 1 of 2

If there are more ranks than heads, each head is on as many neighbouring ranks (PagedAttention §4.6).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trunkline.kvstore.chunk_format import ChunkFormat


class ShardError(ValueError):
    """KV heads that cannot be divided in this way; the text has the numbers."""


class Piece(NamedTuple):
    """Consecutive KV heads that a rank takes from one rank of another group."""

    rank: int
    """The rank that has them."""
    source: range
    """Where they are in that rank's part: indices of its KV heads."""
    target: range
    """Where they go in the part that is made of them."""


class HeadShard(NamedTuple):
    """A rank's share of a model's KV heads."""

    kv_heads: int
    """Number of KV heads of the whole model."""
    rank: int = 0
    tp: int = 1
    """Number of ranks of the group."""

    @property
    def heads(self) -> range:
        """The model's KV heads that the rank holds.

        Raises:
            ShardError: So many ranks cannot divide the heads, or there is no such rank.
        """
        kv_heads, rank, tp = self
        if kv_heads < 1 or tp < 1 or (kv_heads % tp and tp % kv_heads):
            raise ShardError(
                f"{kv_heads} KV heads cannot be divided among {tp} ranks: one number must divide the other"
            )
        if not 0 <= rank < tp:
            raise ShardError(f"there is no rank {rank} of {tp}")
        first = rank * kv_heads // tp
        return range(first, first + max(1, kv_heads // tp))

    @property
    def copy(self) -> int:
        """The rank's number among those that hold the same heads; 0 where each head is on one rank only."""
        return self.rank % max(1, self.tp // self.kv_heads)

    def pieces(self, tp: int) -> tuple[Piece, ...]:
        """Return what the rank takes from the ranks of a group of `tp`, in the order of the heads.

        Of ranks that hold the same heads, those that ask are spread over all. For an equal number of ranks the
        piece is the whole part of the same rank.

        Raises:
            ShardError: One of the two numbers of ranks cannot divide the heads.
        """
        wanted = self.heads
        width = len(HeadShard(self.kv_heads, 0, tp).heads)
        copies, own_copies = max(1, tp // self.kv_heads), max(1, self.tp // self.kv_heads)
        found = []
        head = wanted.start
        while head < wanted.stop:
            rank = head // width * copies + self.copy * copies // own_copies
            start = head // width * width
            stop = min(start + width, wanted.stop)
            found.append(
                Piece(rank, range(head - start, stop - start), range(head - wanted.start, stop - wanted.start))
            )
            head = stop
        return tuple(found)


def rows_of(data: memoryview, part: ChunkFormat) -> NDArray[np.uint8]:
    """Return a part's bytes as `[stretches, KV heads, bytes of a head]`, a view: `rows[:, first:last]` are heads.

    Args:
        part: Format of the part, with the number of its KV heads.

    Raises:
        ShardError: The number of bytes is not that of the format.
    """
    if len(data) != part.chunk_bytes:
        raise ShardError(f"{len(data)} bytes are no part of {part.chunk_bytes} bytes ({part.text})")
    return np.frombuffer(data, dtype=np.uint8).reshape(part.stretches, part.heads, part.head_bytes)
