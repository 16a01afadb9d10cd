"""Which copy goes first: the scheduler-aware policy of CachedAttention §3.3.2, and LRU and FIFO beside it.

A policy is a sort key, smallest first out. Look-ahead puts what no waiting job will use before all else, by least
recent use; of what is wanted, the chunk whose earliest job is farthest from the head of the queue goes first. That
*is* the paper's window of (C_mem + C_disk) / S_kv, by actual sizes: the chunks wanted first stay, as many as fit.
A newcomer ranks by the same key, so an unwanted chunk never pushes out a wanted one.

In each order a path's end goes before its beginning, because a chunk is of no use without those above it: it is
never used later, nor wanted earlier, nor older than its parent, and ties go by depth.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from trunkline.kvstore.chunks import TieredChunk


class EvictionPolicy(StrEnum):
    """How victims are chosen."""

    LOOK_AHEAD = "look-ahead"
    LRU = "lru"
    FIFO = "fifo"


VictimKey = tuple[float, ...]
"""Of two chunks the one with the smaller key goes first."""


def _look_ahead(chunk: TieredChunk) -> VictimKey:
    if chunk.wants:
        return (1.0, *[-part for part in chunk.wants[0][0]], -chunk.depth)
    return (0.0, chunk.last_use, -chunk.depth)


def _lru(chunk: TieredChunk) -> VictimKey:
    return (chunk.last_use, -chunk.depth)


def _fifo(chunk: TieredChunk) -> VictimKey:
    return (chunk.arrived, -chunk.depth)


def victim_key(policy: EvictionPolicy) -> Callable[[TieredChunk], VictimKey]:
    """The sort key of a policy."""
    return {EvictionPolicy.LOOK_AHEAD: _look_ahead, EvictionPolicy.LRU: _lru, EvictionPolicy.FIFO: _fifo}[policy]
