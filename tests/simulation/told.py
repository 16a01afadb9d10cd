"""What routers should know of a controller's chunks, worked out from the tree alone, and one that is told it."""

from __future__ import annotations

from trunkline.controller.cache.kv_events import KvEventLog
from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.cache.radix_tree import Node
from trunkline.kvstore.chunks import NAME_BYTES, NO_BLOCK, chain
from trunkline.kvstore.root_keys import TEXT_ROOT


def truth(tree: RadixCache) -> dict[bytes, int]:
    """Name → tiers, of all that is to be told."""
    found: dict[bytes, int] = {}
    for root in tree.roots():
        is_text = root.key.startswith(TEXT_ROOT)
        stack: list[tuple[Node, bytes]] = [(child, child.key) for child in root.children.values()]
        while stack:
            node, tokens = stack.pop()
            stack += [(child, tokens + child.key) for child in node.children.values()]
            name: bytes = node.name
            if is_text:
                name = chain(root.key[1 : 1 + NAME_BYTES], tokens, tree.chunk_size)[-1]
            elif node.token_count != tree.chunk_size:
                continue
            tiers = (node.block != NO_BLOCK) | node.host_ready << 1 | node.disk_ready << 2
            if tree.window and node.children and not tiers:
                tiers = 1  # the way to others leads over it
            if tiers:
                found[name] = found.get(name, 0) | tiers
    return found


class Mirror:
    """An index of one controller's chunks (`trunkline.router.streams.kv_feed.ChunkMap`), as simple as it can
    be."""

    def __init__(self) -> None:
        self.tiers: dict[bytes, int] = {}
        self.snapshots = 0
        self._coming: dict[bytes, int] | None = None

    def apply(self, names: bytes, tiers: bytes) -> None:
        _put(self.tiers, names, tiers)

    def begin_snapshot(self) -> None:
        self._coming = {}

    def add_snapshot(self, names: bytes, tiers: bytes) -> None:
        assert self._coming is not None, "a page of a snapshot that did not begin"
        before = len(self._coming)
        _put(self._coming, names, tiers)
        assert len(self._coming) == before + len(tiers), "a page comes twice, or says that a chunk is nowhere"

    def end_snapshot(self) -> None:
        assert self._coming is not None, "the end of a snapshot that did not begin"
        self.tiers, self._coming = self._coming, None
        self.snapshots += 1

    def forget(self) -> None:
        self.tiers, self._coming = {}, None


class Listener(Mirror):
    """Hears all that a controller tells, and asserts that it is the truth."""

    def __init__(self) -> None:
        super().__init__()
        self.log = KvEventLog(b"simulate", page_chunks=16)
        self.told: set[int] = set()
        """Values of tiers that came."""

    def follow(self, tree: RadixCache) -> None:
        for batch in self.log.follow(tree):
            self.apply(batch.names, batch.tiers)
            self.told.update(batch.tiers)
        assert self.tiers == truth(tree), "routers were not told where chunks are"


def _put(into: dict[bytes, int], names: bytes, tiers: bytes) -> None:
    assert len(names) == NAME_BYTES * len(tiers)
    for at, value in enumerate(tiers):
        name = names[at * NAME_BYTES : (at + 1) * NAME_BYTES]
        if value:
            into[name] = value
        else:
            into.pop(name, None)
