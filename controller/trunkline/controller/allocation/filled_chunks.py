"""Chunks that sequences have filled, and how they enter the radix tree (ChunkAttention §3.1, append). Pure.

In a large batch some rows fill their chunks in every step. Nearly always nothing is in the tree yet behind such a
sequence's path, and `append_filled` is all that happens; `KVCacheManager.enter_tree` decides the other cases.
"""

from __future__ import annotations

from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.cache.radix_tree import Node
from trunkline.controller.sequences.sequence import Sequence


def append_filled(tree: RadixCache, sequence: Sequence, key: bytes, now: float) -> bool:
    """Move a sequence's first private block into the tree, if it holds the last whole chunk of the sequence's
    tokens and nothing is behind the sequence's path yet. Return whether that was so.

    Args:
        tree: not one with a window.
        key: the chunk's tokens, as `Node.key`.
    """
    path, stem = sequence.path, sequence.stem
    anchor = path[-1] if len(path) > stem.base else stem.root
    if anchor.children or (len(path) + 1) * tree.chunk_size != sequence.tokens.count:
        return False
    append_chunk(tree, sequence, anchor, key, now)
    return True


def append_chunk(tree: RadixCache, sequence: Sequence, anchor: Node, key: bytes, now: float) -> None:
    """Move a sequence's first private block, which is full and computed, into the tree below its last chunk."""
    node = tree.append(anchor, key, sequence.private.pop(0), now, sequence.stem.marker)
    set_ttl(tree, sequence, node, now)
    tree.computed(node, 0)
    sequence.path.append(node)


def set_ttl(tree: RadixCache, sequence: Sequence, node: Node, now: float) -> None:
    """Set how long a new chunk is kept at least, if its request has a time of its own: the remote tier is told
    when the chunk is written (`TierMove.kept_s`), which may be before the request ends."""
    if ttl := sequence.group.request.submit.ttl:
        tree.tiers.keep([node], now + ttl)
