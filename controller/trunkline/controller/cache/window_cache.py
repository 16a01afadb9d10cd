"""The radix cache of a model whose layers all have a window: chunks behind it need not be there.

A sequence reads the last chunks of its path only, those that its next query sees. The chunks before them keep
their places in the tree, because the path leads over them, but their blocks may be given up while the sequence
runs: a chunk without a block and without a copy is *hollow*.

      root─( )─( )─[x]─[x]─[▪]─[▪]─[▪]─[▪]       a running sequence
           hollow  spent   └─── read ────┘
                            (its window)

Blocks of chunks that are not read (`trunkline.controller.cache.reader_cache`) may be evicted, leaf first as in
other trees, but spent chunks go first.
"""

from __future__ import annotations

from trunkline.controller.cache.block_pool import BlockPool
from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.cache.radix_tree import ALL_CHUNKS, PENDING, Node, RadixTree
from trunkline.controller.cache.reader_cache import ReaderCache
from trunkline.controller.cache.thin_blocks import ThinPool
from trunkline.controller.cache.thin_cache import ThinCache
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.totals import Totals
from trunkline.kvstore.chunks import NO_BLOCK, BlockId
from trunkline.router.messages import MissReason


def make_cache(pool: BlockPool, config: EngineConfig, first_generation: int, totals: Totals | None) -> RadixCache:
    """Return the radix cache of an engine.

    Args:
        first_generation: generations of disk slots begin above this number.
        totals: totals from which to count on; None: count from zero.
    """
    tiers = config.tiers(first_generation)
    settings = config.chunk_size, config.model_fingerprint, config.dtype, tiers, totals
    cache: ReaderCache
    if config.whole_blocks:
        assert isinstance(pool, ThinPool)
        cache = ThinCache(pool, *settings)
        cache.seen_tokens, cache.blocks_max = config.part_window, config.whole_max
    elif config.blocks_max:
        cache = WindowCache(pool, *settings)
        cache.window = cache.seen_tokens = config.window
        cache.blocks_max = config.blocks_max
    else:
        return RadixCache(pool, *settings)
    return cache


def make_pool(config: EngineConfig) -> BlockPool:
    """Return the pool of an engine's blocks."""
    return (
        ThinPool(config.num_blocks, config.whole_blocks) if config.whole_blocks else BlockPool(config.num_blocks)
    )


class WindowCache(ReaderCache):
    """The radix cache with a window, set once after it was made."""

    # Reading

    def release(self, node: Node, now: float, chunks: int = ALL_CHUNKS) -> None:
        super().release(node, now, chunks)
        self._prune(node)

    def _now_read(self, node: Node) -> None:
        self.evictable -= node.on_device

    def _now_unread(self, node: Node) -> None:
        self.evictable += node.on_device
        self._note_idle(node)

    def _now_active(self, node: Node) -> None:
        RadixTree._now_active(self, node)

    def _now_idle(self, node: Node) -> None:
        RadixTree._now_idle(self, node)

    def is_read(self, node: Node) -> bool:
        return node.readers > 0

    def expect(self, parent: Node, key: bytes, now: float, marker: bytes = b"") -> Node:
        """Add a chunk that a running sequence will compute, and that has no block yet; `parent` must not have such
        a child."""
        node = self.attach(parent, key, NO_BLOCK, PENDING, marker)
        node.last_use = now
        return node

    # Finding

    def path_of(self, root: Node, tokens: bytes) -> list[Node]:
        """Return the whole chunks of `tokens` (int32 bytes) that have places in the tree below `root`."""
        path, node, size = list[Node](), root, self.chunk_bytes
        for offset in range(0, len(tokens) - size + 1, size):
            child = node.children.get(tokens[offset : offset + size])
            if child is None:
                break
            path.append(child)
            node = child
        return path

    # Leaving

    def _is_idle_leaf(self, node: Node) -> bool:
        if not node.on_device or node.readers or node.parent is None:
            return False
        if node.spent or not node.device_children:
            return True
        return all(child.readers or not child.on_device for child in node.children.values())

    def _wait_of(self, node: Node) -> float:
        return self._spent_first(node)

    def leads_on(self, node: Node) -> bool:
        return bool(node.children or node.active)

    def unplace(self, node: Node) -> BlockId:
        if not node.is_stored:
            self.remember(node, MissReason.EVICTED)
        return super().unplace(node)

    def _wants_copy(self, node: Node) -> bool:
        # Requests find a chunk also where the one above it has no copy: it may be behind their windows.
        return node.parent is not None and node.on_device and not node.is_stored

    def _drop(self, node: Node, reason: MissReason | None = None) -> None:
        parent = node.parent
        super()._drop(node, reason)
        if parent is not None:
            self._prune(parent)

    def drop_below(self, node: Node) -> None:
        for child in list(node.children.values()):
            super()._drop(child)

    def graft(self, node: Node, root: Node) -> None:
        parent = node.parent
        super().graft(node, root)
        if parent is not None:
            self._prune(parent)

    def _prune(self, node: Node) -> None:
        """Forget a chunk that is nowhere and leads nowhere, and those above it of which that is true then."""
        while (parent := node.parent) is not None:
            if node.on_device or node.is_stored or node.ready_step == PENDING or self.leads_on(node):
                return  # pending: its producer takes it back
            self.remove(node)
            node = parent

    # Hollow chunks count as on the device for routers while they lead to others.

    def _link(self, parent: Node, node: Node) -> None:
        super()._link(parent, node)
        self.changed.note(parent)

    def _unlink(self, node: Node) -> Node:
        parent = super()._unlink(node)
        self.changed.note(parent)
        return parent
