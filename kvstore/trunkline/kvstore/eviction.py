"""Which copy is evicted first: the scheduler-aware policy of CachedAttention §3.3.2, and LRU and FIFO.

A policy is a sort key; the chunk with the smallest key is evicted first. Look-ahead first evicts chunks that no
waiting job will use, the least recently used one first. Of wanted chunks it first evicts the one whose earliest
job is farthest from the head of the queue. That *is* the paper's window of (C_mem + C_disk) / S_kv, by actual
sizes: the chunks wanted first stay, as many as fit. A new chunk ranks by the same key, so an unwanted chunk never
evicts a wanted one.

Every policy evicts the end of a path before its beginning, because a chunk is of no use without those above it. A
chunk is never used later, wanted earlier or older than its parent, and ties go by depth.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from trunkline.kvstore.chunks import TieredChunk


class EvictionPolicy(StrEnum):
    """How the chunk to be evicted is chosen."""

    LOOK_AHEAD = "look-ahead"
    LRU = "lru"
    FIFO = "fifo"


VictimKey = tuple[float, ...]
"""Of two chunks the one with the smaller key is evicted first."""


def _look_ahead(chunk: TieredChunk) -> VictimKey:
    if chunk.wants:
        return (1.0, *[-part for part in chunk.wants[0][0]], -chunk.depth)
    return (0.0, chunk.last_use, -chunk.depth)


def _lru(chunk: TieredChunk) -> VictimKey:
    return (chunk.last_use, -chunk.depth)


def _fifo(chunk: TieredChunk) -> VictimKey:
    return (chunk.arrived, -chunk.depth)


def victim_key(policy: EvictionPolicy) -> Callable[[TieredChunk], VictimKey]:
    """Return the sort key of a policy."""
    return {EvictionPolicy.LOOK_AHEAD: _look_ahead, EvictionPolicy.LRU: _lru, EvictionPolicy.FIFO: _fifo}[policy]
