"""How a sequence's chunks enter the radix tree: when it is admitted, while it decodes, and when it leaves. Pure.

      admitted   insert_pending      chunks that it will compute, as pending ones, so that others wait for them
      decodes    enter_full_chunks   private blocks that have filled (ChunkAttention §3.1, append)
      leaves     keep_tail           the computed head of its last chunk, as a partial leaf

Another sequence may have put an equal chunk there first. Then the sequence uses that one and gives its block back,
so no KV is stored twice.

In a large batch some rows fill their chunks in every step. Nearly always nothing is in the tree yet behind such a
sequence's path, and `append_full_chunk` is all that happens.
"""

from __future__ import annotations

from trunkline.controller.cache.block_pool import BlockPool
from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.cache.radix_tree import PENDING, Node
from trunkline.controller.cache.reader_cache import ReaderCache
from trunkline.controller.cache.thin_cache import ThinCache
from trunkline.controller.cache.window_cache import WindowCache
from trunkline.controller.sequences.sequence import Sequence
from trunkline.kvstore.chunks import BlockId, chunk_name


def insert_pending(
    tree: RadixCache, pool: BlockPool, sequence: Sequence, full: int, blocks: list[BlockId], now: float
) -> None:
    """Insert the full chunks that a sequence will compute as pending, so that other sequences wait for them; the
    other blocks stay private.

    Args:
        full: number of the sequence's chunks that its prefill fills.
        blocks: its new blocks, in order.
    """
    new = list(blocks)
    while len(sequence.path) < full:
        at = len(sequence.path) * tree.chunk_size
        key = sequence.tokens.to_bytes(at, at + tree.chunk_size)
        node = _next_chunk(tree, sequence, key)
        if node is None and isinstance(tree, WindowCache) and not new:
            node = tree.expect(sequence.anchor, key, now, sequence.stem.marker)
            _set_ttl(tree, sequence, node, now)
        elif node is None:
            node = tree.insert(sequence.anchor, key, new.pop(0), PENDING, now, sequence.stem.marker)
            _set_ttl(tree, sequence, node, now)
        elif node.ready_step != PENDING and tree.may_swap(node):
            pool.release(tree.swap(node, new.pop(0)))
            node.ready_step = PENDING
        elif node.on_device or node.ready_step == PENDING:
            break  # behind a gap in a window: computed again in private blocks, which are found equal later
        else:  # in a tier that is too far away: other sequences wait for this computation instead
            if new:
                tree.place(node, new.pop(0))
            node.ready_step = PENDING
        sequence.path.append(node)
    sequence.private = new
    tree.hold(sequence.anchor, sequence.read_chunks)


def append_full_chunk(tree: RadixCache, sequence: Sequence, key: bytes, now: float) -> bool:
    """Move a sequence's first private block into the tree, if it holds the last whole chunk of the sequence's
    tokens and nothing is behind the sequence's path yet. Return whether that was so; if not, `enter_full_chunks`
    decides.

    Args:
        tree: not one with a window.
        key: the chunk's tokens, as `Node.key`.
    """
    path, stem = sequence.path, sequence.stem
    anchor = path[-1] if len(path) > stem.base else stem.root
    if anchor.children or (len(path) + 1) * tree.chunk_size != sequence.tokens.count:
        return False
    _append_chunk(tree, sequence, anchor, key, now)
    return True


def enter_full_chunks(
    tree: RadixCache, pool: BlockPool, sequence: Sequence, kv_tokens: int, now: float
) -> list[tuple[int, BlockId]]:
    """Move private blocks that are full and computed into the tree.

    If the tree already has an equal chunk on the device, the sequence gives its block back and uses that one. It
    may be the same block: beams of a search share full blocks before the first of them enters them.

    Args:
        kv_tokens: number of the sequence's tokens whose KV is computed.

    Returns:
        (index, block) of the block-table entries that changed by such merging.
    """
    merged: list[tuple[int, BlockId]] = []
    is_beam = sequence.group.request.submit.beam is not None
    while sequence.private and kv_tokens >= (len(sequence.path) + 1) * tree.chunk_size:
        index = len(sequence.path)
        anchor = sequence.anchor
        key = sequence.tokens.to_bytes(index * tree.chunk_size, (index + 1) * tree.chunk_size)
        node = _next_chunk(tree, sequence, key)
        if node is None and not isinstance(tree, ReaderCache):  # as below, in one act: no readers are counted
            _append_chunk(tree, sequence, anchor, key, now)
            continue
        is_shared = pool.holders(sequence.private[0]) > 1
        if node is None and is_shared and not is_beam:
            break  # a fork of the sequence reads the block, too, and nothing in the tree would say so
        if node is None:
            node = tree.insert(anchor, key, sequence.private.pop(0), 0, now, sequence.stem.marker)
            _set_ttl(tree, sequence, node, now)
            tree.computed(node, 0)
        elif node.ready_step == PENDING:
            break  # its producer is not done; this block stays private and is tried again later
        elif not node.on_device:
            if isinstance(tree, ThinCache) and is_shared and not is_beam:
                break  # as above
            tree.place(node, sequence.private.pop(0))
        elif tree.is_thin(node):
            if is_shared or not tree.may_swap(node):
                break  # others use the block, which lacks what this sequence reads; tried again later
            pool.release(tree.swap(node, sequence.private.pop(0)))
        else:
            pool.release(block := sequence.private.pop(0))
            if block != node.block:
                merged.append((index, node.block))
        tree.hold(node, sequence.read_chunks + 1)
        tree.release(anchor, now, sequence.read_chunks)
        sequence.path.append(node)
    return merged


def keep_tail(tree: RadixCache, pool: BlockPool, sequence: Sequence, kv_tokens: int, now: float) -> list[Node]:
    """Make the computed head of a sequence's last, not full chunk a partial leaf; return the node that holds it
    now."""
    start = len(sequence.path) * tree.chunk_size
    stop = min(kv_tokens, start + tree.chunk_size)
    if stop - start >= tree.chunk_size or stop <= start or not sequence.private:
        return []
    key = sequence.tokens.to_bytes(start, stop)
    leaf = tree.covered_by_sibling(sequence.anchor, key)
    shared = pool.holders(sequence.private[0]) > 1
    unusable = leaf is not None and (tree.is_thin(leaf) or not leaf.is_loadable)
    if leaf is not None and leaf.key != key and sequence.group.encodes and unusable:
        leaf = None  # the end of a longer text is thin or far away: this one would be encoded again and again
    if leaf is not None:
        if leaf.key == key and not (leaf.on_device or shared):
            tree.place(leaf, sequence.private.pop(0))
        elif leaf.key == key and tree.may_swap(leaf) and not shared:
            pool.release(tree.swap(leaf, sequence.private.pop(0)))
        return [leaf] if leaf.ready_step != PENDING else []
    if shared:
        return []  # a fork is still to be copied from it, and a chunk's block may have no other holder
    leaf = tree.insert(sequence.anchor, key, sequence.private.pop(0), 0, now, sequence.stem.marker)
    tree.absorb_prefixes(leaf)
    return [leaf]


def _append_chunk(tree: RadixCache, sequence: Sequence, anchor: Node, key: bytes, now: float) -> None:
    """Move a sequence's first private block, which is full and computed, into the tree below its last chunk."""
    node = tree.append(anchor, key, sequence.private.pop(0), now, sequence.stem.marker)
    _set_ttl(tree, sequence, node, now)
    tree.computed(node, 0)
    sequence.path.append(node)


def _next_chunk(tree: RadixCache, sequence: Sequence, key: bytes) -> Node | None:
    """Return the tree's next chunk behind a sequence's path, which the sequence computes itself.

    A chunk that was moved behind the sequence's cut and is too far away is forgotten: it is another one than what
    is computed behind the cut, and has another name.
    """
    above, marker = sequence.anchor, sequence.stem.marker
    node = above.children.get(key)
    if node is None or node.on_device or sequence.group.cut is None:
        return node
    if node.name == chunk_name(above.name, marker + key):
        return node
    tree.drop_below(node)
    tree.remove(node)
    return None


def _set_ttl(tree: RadixCache, sequence: Sequence, node: Node, now: float) -> None:
    """Set how long a new chunk is kept at least, if its request has a time of its own: the remote tier is told
    when the chunk is written (`TierMove.kept_s`), which may be before the request ends."""
    if ttl := sequence.group.request.submit.ttl:
        tree.tiers.keep([node], now + ttl)
