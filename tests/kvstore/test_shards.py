"""Parts of one group's chunks become those of another one: the same numbers at the same heads."""

from __future__ import annotations

import random

import numpy as np
import pytest
from seeds import seeds

from trunkline.kvstore.chunk_format import kv_format
from trunkline.kvstore.shards import HeadShard, Piece, ShardError, rows_of

FORMAT = kv_format((3, 1, 4, 2), "float32")


def divisors(kv_heads: int) -> list[int]:
    """Numbers of ranks that can share so many heads; some have more ranks than there are heads."""
    return [tp for tp in range(1, 4 * kv_heads + 1) if kv_heads % tp == 0 or tp % kv_heads == 0]


def parts(whole: np.ndarray, kv_heads: int, tp: int) -> list[bytes]:
    """Of a chunk `[layers, 2, heads, chunk_size, head_dim]`, by rank."""
    return [whole[:, :, list(HeadShard(kv_heads, rank, tp).heads)].tobytes() for rank in range(tp)]


def test_ranks_that_agree_meet_their_like() -> None:
    for kv_heads, tp in ((8, 1), (8, 4), (2, 2), (2, 8), (1, 3)):
        for rank in range(tp):
            shard = HeadShard(kv_heads, rank, tp)
            width = len(shard.heads)
            assert shard.pieces(tp) == (Piece(rank, range(width), range(width)),)


def test_named_examples() -> None:
    assert HeadShard(8, 1, 2).pieces(4) == (Piece(2, range(2), range(2)), Piece(3, range(2), range(2, 4)))
    assert HeadShard(8, 3, 4).pieces(2) == (Piece(1, range(2, 4), range(2)),)
    # 2 heads on 4 ranks: ranks 2 and 3 hold head 1, and each is asked by half of the ranks that want it.
    assert [HeadShard(2, rank, 8).pieces(4)[0].rank for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [piece.rank for piece in HeadShard(2, 0, 1).pieces(4)] == [0, 2]


@pytest.mark.parametrize("seed", seeds(40))
def test_pieces_make_the_same_part(seed: int) -> None:
    chance = random.Random(seed)
    kv_heads = chance.choice([1, 2, 3, 4, 6, 8, 12])
    tp, peer_tp = chance.choice(divisors(kv_heads)), chance.choice(divisors(kv_heads))
    size = FORMAT.with_heads(kv_heads).shape
    whole = np.arange(np.prod(size), dtype=np.float32).reshape(size)
    theirs = parts(whole, kv_heads, peer_tp)
    their_part = FORMAT.with_heads(len(HeadShard(kv_heads, 0, peer_tp).heads))
    for rank, expected in enumerate(parts(whole, kv_heads, tp)):
        shard = HeadShard(kv_heads, rank, tp)
        made = bytearray(len(expected))
        rows = rows_of(memoryview(made), FORMAT.with_heads(len(shard.heads)))
        for piece in shard.pieces(peer_tp):
            source = rows_of(memoryview(theirs[piece.rank]), their_part)
            rows[:, piece.target.start : piece.target.stop] = source[:, piece.source.start : piece.source.stop]
        assert bytes(made) == expected


@pytest.mark.parametrize("shard", [HeadShard(8, 0, 3), HeadShard(2, 0, 3), HeadShard(8, 2, 2), HeadShard(0, 0, 1)])
def test_what_cannot_be_divided_is_refused(shard: HeadShard) -> None:
    with pytest.raises(ShardError):
        _ = shard.heads


def test_a_peer_that_cannot_be_is_refused() -> None:
    with pytest.raises(ShardError, match="8 KV heads cannot be divided among 3 ranks"):
        HeadShard(8, 0, 2).pieces(3)
    with pytest.raises(ShardError):
        rows_of(memoryview(bytes(100)), FORMAT)
