"""What a controller finds again after a restart: the disk tier's chunks, and records.

The tree tells what changed on disk (verified writes, freed slots, chunks that moved behind a cut), the index
follows a moment behind. At the start the tree is built again from it: nodes that are on disk only. What a slot
really holds is known when it is read; anything else than what the index says is a miss.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import structlog

from trunkline.controller.database import Database
from trunkline.controller.forest import SALT_ROOT
from trunkline.controller.index import DiskChunk, TierIndex
from trunkline.controller.node import Node
from trunkline.controller.records import RecordStore
from trunkline.controller.tree import ChunkTree
from trunkline.kvstore.directory import IndexEvent
from trunkline.kvstore.layout import NO_BLOCK, SlotId
from trunkline.kvstore.names import ChunkName, chunk_name

_LONG_AGO: Final = 1e-9
"""A time, in seconds, that is over on any controller's clock."""

log = structlog.get_logger()


class Persistence:
    """The database and what is in it; without a path, records in memory and no index."""

    def __init__(self, path: str, fingerprint: bytes, wall: float, monotonic: float) -> None:
        """
        Args:
            path: of the SQLite file; "": none.
            fingerprint: of the tiers.
            wall: seconds since the epoch, now.
            monotonic: the same moment by the controller's clock.

        Raises:
            DatabaseUnavailableError: the file cannot be used.
        """
        self.database = Database(Path(path), fingerprint) if path else None
        """What both are written to."""
        self._offset = wall - monotonic
        self.index = TierIndex(self.database, self._offset) if self.database is not None else None
        self.records = RecordStore(self.database, wall)

    @property
    def first_generation(self) -> int:
        """Generations of disk slots begin above it."""
        return self.index.first_generation if self.index is not None else 0

    def wall(self, now: float) -> float:
        """Seconds since the epoch at a moment of the controller's clock."""
        return now + self._offset

    def restore(self, tree: ChunkTree, now: float) -> int:
        """Put the chunks that an earlier run, or earlier workers, left on disk into an empty tree; how many."""
        slots = tree.tiers.config.disk_slots
        if self.index is None or not slots:
            return 0
        self.index.flush()  # what an earlier group of workers left behind may still be on its way into the file
        loaded = self.index.load(slots, now)
        nodes: dict[bytes, Node] = {}
        for name, key in loaded.roots.items():
            above = tree.restore_root(key)
            if above is not None and above.name == name:  # else the file is wrong: nothing would match
                nodes[name] = above
        restored = 0
        for chunk in loaded.chunks:
            found = _restored(tree, nodes.get(chunk.parent), chunk)
            last_use = min(chunk.last_use, now)
            if found is None:
                self.index.freed(chunk.slot)
            elif not tree.tiers.restore(found, SlotId(chunk.slot), chunk.generation, last_use):
                self.index.freed(chunk.slot)
                tree.remove(found)
            else:
                nodes[chunk.name] = found
                # What was over before this machine started is over: 0 would say never.
                tree.tiers.keep([found], max(chunk.expires, _LONG_AGO) if chunk.expires else math.inf)
                restored += 1
        _keep_above(tree, list(nodes.values()))
        for root in list(tree.roots()):
            tree.prune_root(root)
        if restored:
            log.info("chunks found on disk", chunks=restored, dropped=loaded.dropped)
        return restored

    def follow(self, tree: ChunkTree) -> None:
        """Write down what has changed on disk since the last call."""
        events = tree.tiers.index_events()
        grafted, tree.grafted = tree.grafted, []
        touched, tree.touched = tree.touched, {}
        if self.index is None:
            return
        for node in grafted:
            if node.parent is not None and node.disk_ready:
                self._note_root(node.parent)
                self.index.reparented(node.name, node.parent.name)
        for event in events:
            stored = event.item
            if stored is None or stored.parent is None:
                self.index.freed(event.slot)
            else:
                self._note_root(stored.parent)
                self.index.stored(_row(stored, stored.parent, event))
        for node in touched:
            if node.disk_ready:
                self.index.touch([node.name], node.last_use, _expiry(node))

    def _note_root(self, node: Node) -> None:
        if node.parent is None and self.index is not None:
            self.index.root(node.name, node.key)

    def close(self) -> None:
        """Write what is left."""
        if self.database is not None:
            self.database.close()


def _row(node: Node, parent: Node, event: IndexEvent[Node]) -> DiskChunk:
    return DiskChunk(
        slot=int(event.slot),
        generation=event.generation,
        name=node.name,
        parent=parent.name,
        tokens=node.key,
        last_use=node.last_use,
        expires=_expiry(node),
    )


def _expiry(node: Node) -> float:
    """For the index: 0 is never."""
    return node.expires if math.isfinite(node.expires) else 0.0


def _keep_above(tree: ChunkTree, nodes: list[Node]) -> None:
    """What is above a chunk was used no less recently than it, and is wanted as long.

    Args:
        nodes: all there are, parents before their children.
    """
    for node in reversed(nodes):
        parent = node.parent
        if parent is not None and parent.parent is not None:
            parent.last_use = max(parent.last_use, node.last_use)
            tree.tiers.keep([parent], node.expires)


def _restored(tree: ChunkTree, parent: Node | None, chunk: DiskChunk) -> Node | None:
    """The node of a chunk, if it is what its name says and stands where that can be."""
    if parent is None or chunk.tokens in parent.children or len(chunk.tokens) > tree.chunk_bytes:
        return None
    exact = chunk.name == chunk_name(parent.name, chunk.tokens)
    if not exact and _sees_all(parent):
        return None  # it must not be found by who sees everything
    node = tree.attach(parent, chunk.tokens, NO_BLOCK, 0)
    node.name, node.exact = ChunkName(chunk.name), exact
    return node


def _sees_all(node: Node) -> bool:
    while node.parent is not None:
        node = node.parent
    return node.key.startswith(SALT_ROOT)
