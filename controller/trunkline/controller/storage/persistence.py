"""What a controller finds again after a restart: the disk tier's chunks, and records, in two files.

The tree tells what changed on disk (verified writes, freed slots, chunks that moved behind a cut), the index
follows a moment behind. At the start the tree is built again from it: nodes that are on disk only. What a slot
really holds is known when it is read; anything else than what the index says is a miss.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

import structlog

from trunkline.controller.cache.node import Node
from trunkline.controller.cache.radix_cache import ChunkTree
from trunkline.controller.cache.radix_tree import SALT_ROOT
from trunkline.controller.storage.database import APPLICATION_ID, Database, DatabaseUnavailableError
from trunkline.controller.storage.records import RECORDS, RecordStore
from trunkline.controller.storage.salvage import UNREADABLE, readable_rows
from trunkline.controller.storage.tier_index import INDEX, DiskChunk, TierIndex
from trunkline.kvstore.directory import IndexEvent
from trunkline.kvstore.extents import NO_BLOCK, SlotId
from trunkline.kvstore.names import ChunkName, chunk_name

_VERSION_WITH_RECORDS: Final = 1
"""Of indexes that held the records, too."""
_LONG_AGO: Final = 1e-9
"""A time, in seconds, that is over on any controller's clock."""

log = structlog.get_logger()


class Persistence:
    """Both files and what is in them; without a path, records in memory and no index."""

    def __init__(
        self, index_path: str, fingerprint: bytes, wall: float, monotonic: float, records_path: str = ""
    ) -> None:
        """
        Args:
            index_path: of the index's file; "": none.
            fingerprint: of the tiers.
            wall: seconds since the epoch, now.
            monotonic: the same moment by the controller's clock.
            records_path: of the records' file; "": none.

        Raises:
            DatabaseUnavailableError: a file cannot be used.
        """
        self._offset = wall - monotonic
        self._records_file = Database(Path(records_path), b"", RECORDS) if records_path else None
        if self._records_file is not None and index_path:
            move_records(Path(index_path), self._records_file)
        self.index = (
            TierIndex(Database(Path(index_path), fingerprint, INDEX), self._offset) if index_path else None
        )
        self.records = RecordStore(self._records_file, wall)

    def wake(self, wake: Callable[[], None]) -> None:
        """Have `wake` called, by another thread, when a change of a record is in the file or has failed."""
        if self._records_file is not None:
            self._records_file.on_round = wake

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
        if self.index is not None:
            self.index.close()
        if self._records_file is not None:
            self._records_file.close()


def move_records(index: Path, records: Database) -> int:
    """Move the records that an earlier version kept in the index to the file of their own; how many.

    Whenever this is interrupted, the next start does it (again): nothing is served before it is done.

    Raises:
        DatabaseUnavailableError: they cannot be written to the new file, or not be removed from the old one.
    """
    if not index.is_file():
        return 0
    try:
        with closing(sqlite3.connect(index, isolation_level=None)) as old:
            old.execute("PRAGMA locking_mode = EXCLUSIVE")
            found = [old.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
            if found != [APPLICATION_ID, _VERSION_WITH_RECORDS]:
                return 0
            rows = list(readable_rows(old, RECORDS.tables[0]))
            records.import_rows(RECORDS.tables[0], rows)
            for statement in ("BEGIN IMMEDIATE", "DROP TABLE records", f"PRAGMA user_version = {INDEX.version}"):
                old.execute(statement)
            old.execute("COMMIT")
    except UNREADABLE as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return 0  # opened as an index, it is moved aside, and nothing of it is deleted
        raise DatabaseUnavailableError(
            f"the records in {index} cannot be moved to {records.path}: {error}"
        ) from error
    if rows:
        log.info("records were moved to a file of their own", records=len(rows), path=str(records.path))
    return len(rows)


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
