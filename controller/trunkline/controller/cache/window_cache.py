"""The radix cache of a model whose layers all have a window: chunks behind it need not be there.

A sequence reads the last chunks of its path only, those that its next query sees. The chunks before them keep
their places in the tree, because the path leads over them, but their blocks may be given up while the sequence
runs: a chunk without a block and without a copy is *hollow*.

      root─( )─( )─[x]─[x]─[▪]─[▪]─[▪]─[▪]       a running sequence
           hollow  spent   └─── read ────┘
                            (its window)

So `active` says that a chunk's place is needed, and `readers` that its KV is: the number of holders in whose
window it is. Blocks of chunks that are not read may be evicted, leaf first as in other trees, with one exception.
A chunk that has come to lie behind a window is *spent* if the tree has no branch from which it could be seen: then
only a request that leaves this path midway would need it, and it goes first. At a branch two requests have parted,
so a third may part there, too; what is seen from there keeps its place in the order.

A prompt is found up to a chunk if what its next query sees is there (`usable_length`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf

from trunkline.controller.cache.block_pool import BlockPool
from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.cache.radix_tree import ALL_CHUNKS, PENDING, Node, RadixTree
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.totals import Totals
from trunkline.kvstore.chunks import NO_BLOCK, BlockId
from trunkline.kvstore.windows import chunks_behind, stride_chunks
from trunkline.router.messages import MissReason


def _upward(node: Node, chunks: int) -> Iterator[Node]:
    """Iterate over a chunk and those above it, `chunks` in all at most."""
    current = node
    while chunks > 0 and current.parent is not None:
        yield current
        current = current.parent
        chunks -= 1


def make_cache(pool: BlockPool, config: EngineConfig, first_generation: int, totals: Totals | None) -> RadixCache:
    """Return the radix cache of an engine.

    Args:
        first_generation: generations of disk slots begin above this number.
        totals: totals from which to count on; None: count from zero.
    """
    tiers = config.tiers(first_generation)
    if not config.blocks_max:
        return RadixCache(pool, config.chunk_size, config.model_fingerprint, config.dtype, tiers, totals)
    cache = WindowCache(pool, config.chunk_size, config.model_fingerprint, config.dtype, tiers, totals)
    cache.window, cache.blocks_max = config.window, config.blocks_max
    return cache


class WindowCache(RadixCache):
    """The radix cache with a window, set once after it was made."""

    blocks_max: int = 0
    """Largest number of blocks that a plain sequence holds at once."""

    def behind(self, position: int) -> int:
        """Return how many chunks of a path no query from `position` on sees."""
        return chunks_behind(position, self.window, self.chunk_size)

    # Reading

    def hold(self, node: Node, chunks: int = ALL_CHUNKS) -> None:
        super().hold(node)
        top = node
        for top in _upward(node, chunks):
            top.readers += 1
            if top.readers == 1:
                top.spent = False
                self.evictable -= top.on_device
        if chunks > 0 and top.parent is not None:
            self._note_idle(top.parent)  # nothing below it may be idle any more

    def release(self, node: Node, now: float, chunks: int = ALL_CHUNKS) -> None:
        super().release(node, now)
        for each in _upward(node, chunks):
            self._unread(each)
        self._prune(node)

    def move_window(self, path: Sequence[Node], start: int, stop: int) -> None:
        """Note that a holder of the last chunk of a path does not read the chunks `path[start:stop]` any more,
        which were the first that it read."""
        # From a chunk on, the chunks at whose end a query still sees it.
        reach = -(-self.window // self.chunk_size) + stride_chunks(self.window, self.chunk_size)
        branch = len(path) + reach
        for index in range(min(len(path), stop + reach) - 1, start - 1, -1):
            node = path[index]
            if len(node.children) > 1:
                branch = index
            if index < stop:
                node.spent = node.readers == 1 and branch >= index + reach and not node.pins
                self._unread(node)

    def _unread(self, node: Node) -> None:
        node.readers -= 1
        assert node.readers >= 0
        if not node.readers:
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

    def usable_length(
        self, path: Sequence[Node], query: Callable[[int], int], is_there: Callable[[int, Node], bool]
    ) -> tuple[int, int]:
        """Return up to which chunk a path can be used: the largest n so that all of its first n chunks that are
        seen from then on are there.

        Args:
            query: the position of the first query behind so many chunks.
            is_there: says of (index, chunk) whether its KV counts.

        Returns:
            n, and the number of chunks at the beginning that need not be there.
        """
        best = behind = gap = 0
        for index, node in enumerate(path):
            if not is_there(index, node):
                gap = index + 1
            elif (needed := self.behind(query(index + 1))) >= gap:
                best, behind = index + 1, needed
        return best, min(best, behind)

    # Leaving

    def _is_idle_leaf(self, node: Node) -> bool:
        if not node.on_device or node.readers or node.parent is None:
            return False
        if node.spent or not node.device_children:
            return True
        return all(child.readers or not child.on_device for child in node.children.values())

    def _wait_of(self, node: Node) -> float:
        return inf if node.spent else super()._wait_of(node)

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
