"""A radix cache in which a chunk's place and its KV in layers with a window are two things.

`active` says that a chunk's place is needed, as in other trees; `readers` says that its KV in layers with a
window is: the number of holders in whose window it is. A chunk that has come to lie behind a window is *spent*
if the tree has no branch from which it could be seen: then only a request that leaves this path midway would
need it, and it goes first. At a branch two requests have parted, so a third may part there, too; what is seen
from there keeps its place in the order.

A prompt is found up to a chunk if what its next query sees is there (`usable_length`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf

from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.cache.radix_tree import ALL_CHUNKS, Node
from trunkline.kvstore.windows import chunks_behind, stride_chunks


def _upward(node: Node, chunks: int) -> Iterator[Node]:
    """Iterate over a chunk and those above it, `chunks` in all at most."""
    current = node
    while chunks > 0 and current.parent is not None:
        yield current
        current = current.parent
        chunks -= 1


class ReaderCache(RadixCache):
    """A radix cache that counts who reads what in layers with a window."""

    seen_tokens: int = 0
    """Number of tokens that a query sees in the layers with the widest window, its own included; set once after
    the cache was made."""
    blocks_max: int = 0
    """Largest number of blocks with KV of these layers that a plain sequence holds at once."""

    def behind(self, position: int) -> int:
        """Return how many chunks of a path no query from `position` on sees in a layer with a window."""
        return chunks_behind(position, self.seen_tokens, self.chunk_size)

    def _now_read(self, node: Node) -> None:
        """Account for a chunk that has its first reader."""

    def _now_unread(self, node: Node) -> None:
        """Account for a chunk that has lost its last reader."""

    def hold(self, node: Node, chunks: int = ALL_CHUNKS) -> None:
        super().hold(node)
        top = node
        for top in _upward(node, chunks):
            top.readers += 1
            if top.readers == 1:
                top.spent = False
                self._now_read(top)
        if chunks > 0 and top.parent is not None:
            self._note_idle(top.parent)  # nothing below it may be idle any more

    def release(self, node: Node, now: float, chunks: int = ALL_CHUNKS) -> None:
        super().release(node, now)
        for each in _upward(node, chunks):
            self._unread(each)
        if not chunks:
            self._note_idle(node)  # others may stand below it, and its last use is another one now

    def move_window(self, path: Sequence[Node], start: int, stop: int) -> None:
        """Note that a holder of the last chunk of a path does not read the chunks `path[start:stop]` any more,
        which were the first that it read."""
        # From a chunk on, the chunks at whose end a query still sees it.
        reach = -(-self.seen_tokens // self.chunk_size) + stride_chunks(self.seen_tokens, self.chunk_size)
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
            self._now_unread(node)

    def _spent_first(self, node: Node) -> float:
        """Return the wait of a chunk in the order in which chunks lose what only its readers need."""
        return inf if node.spent else RadixCache._wait_of(self, node)

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
