"""The index of the disk tier: the chunks that a restarted controller finds (CachedAttention §3.3).

The ranks' slabs hold KV by slot. The index says which chunk is in which slot, what its tokens are and below which
chunk it stands, so that a controller can build its radix tree again. The index follows the directory in memory, a
moment behind. Where it disagrees with a slot after a crash, the slot is right: each slot says whose KV it holds,
and a read of any other chunk is a miss.

Times are monotonic, the caller's, in all methods, and wall-clock times in the file: a restart resets the former.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import msgspec
import structlog
from xxhash import xxh3_64_digest

from trunkline.controller.engine.disk_chunks import (
    ChunkReparented,
    ChunkTouched,
    DiskChange,
    DiskChunk,
    RootNoted,
    SlotFreed,
    StoredChunks,
)
from trunkline.controller.storage.database import Database, Form
from trunkline.kvstore.salvage import Row, Table

_SCHEMA: Final = """
CREATE TABLE roots (name BLOB PRIMARY KEY, key BLOB NOT NULL, digest BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE chunks (
    slot INTEGER PRIMARY KEY, generation INTEGER NOT NULL, name BLOB NOT NULL UNIQUE, parent BLOB NOT NULL,
    tokens BLOB NOT NULL, digest BLOB NOT NULL, last_use REAL NOT NULL, expires REAL NOT NULL
);
"""
INDEX_VERSION: Final = 2
"""Version of the index's schema."""

log = structlog.get_logger()


class _Root(NamedTuple):
    name: bytes
    key: bytes

    @property
    def digest(self) -> bytes:
        return xxh3_64_digest(self.name + self.key)


RowT = TypeVar("RowT", DiskChunk, _Root)


class TierIndex:
    """The tables of chunks and roots. Only `open`, `load`, `flush` and `close` wait for the disk."""

    def __init__(self, database: Database, wall_offset: float = 0.0) -> None:
        """
        Args:
            database: A database of the form `INDEX`; `close` closes it.
            wall_offset: Seconds to add to a time of the caller's to get wall-clock time (`time.time() -
                time.monotonic()` at the start).
        """
        self.database = database
        self._wall_offset = wall_offset

    @classmethod
    def open(cls, path: Path, fingerprint: bytes, wall_offset: float = 0.0) -> TierIndex:
        """Open the index at `path`, or create an empty one. Of a damaged index the readable rows are kept.

        Raises:
            DatabaseUnavailableError: The folder is missing or read-only, or another process has the index.
        """
        return cls(Database(path, fingerprint, INDEX), wall_offset)

    @property
    def first_generation(self) -> int:
        """Return the first generation of this run's disk slots; it is greater than those of all earlier runs."""
        return self.database.boot << 32

    @property
    def problem(self) -> str:
        """Return why the index cannot be written at present; "" if it can."""
        return self.database.problem

    def load(self, slots: int, now: float) -> StoredChunks:
        """Return all chunks in the index, parents before their children, and forget those without a parent.

        Call this before anything is written, or after a `flush`.

        Args:
            slots: Number of slots that the disk tier has now.
            now: The caller's time.
        """
        keys: dict[bytes, bytes] = {}
        for fields in self.database.table(_ROOTS):
            root = _root_of(fields)
            if root is not None:
                keys[root.name] = root.key
        below: defaultdict[bytes, list[DiskChunk]] = defaultdict(list)
        found: set[int] = set()
        for fields in self.database.table(_CHUNKS):
            found.add(fields[0])
            row = _chunk_of(fields)
            if row is not None and 0 <= row.slot < slots:
                below[row.parent].append(self._in_callers_time(row, now))
        chunks = [chunk for name in keys for chunk in below.pop(name, ())]
        for chunk in chunks:  # grows while it is read: each level follows the one above
            chunks.extend(below.pop(chunk.name, ()))
        gone = found.difference(chunk.slot for chunk in chunks)
        for slot in gone:
            self.freed(slot)
        if gone:
            log.info("chunks on disk that cannot be reached were dropped", chunks=len(gone), kept=len(chunks))
        used = {chunk.parent for chunk in chunks}
        for name in keys.keys() - used:
            self.database.write(("root", name), "DELETE FROM roots WHERE name = ?", (name,))
        return StoredChunks({name: key for name, key in keys.items() if name in used}, chunks, len(gone))

    def note(self, changes: Iterable[DiskChange]) -> None:
        """Write changes of the disk tier into the index, in order."""
        for change in changes:
            match change:
                case DiskChunk():
                    self.stored(change)
                case SlotFreed(slot):
                    self.freed(slot)
                case ChunkTouched(name, last_use, expires):
                    self.touch([name], last_use, expires)
                case RootNoted(name, key):
                    self.root(name, key)
                case ChunkReparented(name, parent):
                    self.reparented(name, parent)

    def root(self, name: bytes, key: bytes) -> None:
        """Note a root of the tree. It may be noted again; a root without chunks is forgotten at the next start.

        Args:
            name: The name that the chunks below have as their `parent`.
            key: Data from which the caller can make the root again, such as the salt.
        """
        statement = "INSERT OR REPLACE INTO roots VALUES (?, ?, ?)"
        self.database.write(("root", name), statement, (name, key, _Root(name, key).digest))

    def stored(self, chunk: DiskChunk) -> None:
        """Note that all ranks have the chunk in its slot. A slot that had it before must have been `freed`."""
        wall, expires = self._wall(chunk.last_use), self._wall_or_never(chunk.expires)
        self.database.write(
            ("slot", chunk.slot),
            "INSERT OR REPLACE INTO chunks (slot, generation, name, parent, tokens, digest, last_use, expires) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (*chunk[:5], chunk.digest, wall, expires),
        )

    def freed(self, slot: int) -> None:
        """Note that the slot is empty. Call this when the order to overwrite it is given, not after it is done."""
        self.database.write(("slot", slot), "DELETE FROM chunks WHERE slot = ?", (slot,))

    def reparented(self, name: bytes, parent: bytes) -> None:
        """Note that a chunk has a new parent, a chunk or a root."""
        self.database.write(("parent", name), "UPDATE chunks SET parent = ? WHERE name = ?", (parent, name))

    def touch(self, names: Iterable[bytes], last_use: float, expires: float | None = None) -> None:
        """Note that chunks were used; with `expires` None the time at which they expire stays the same."""
        wall = self._wall(last_use)
        until = None if expires is None else self._wall_or_never(expires)
        statement = "UPDATE chunks SET last_use = ?, expires = coalesce(?, expires) WHERE name = ?"
        for name in names:
            self.database.write(("use", name), statement, (wall, until, name), freshens=True)

    def flush(self) -> bool:
        """Wait until all changes are in the file; return False if it cannot be written."""
        return self.database.flush()

    def close(self) -> None:
        """Write all pending changes and release the file."""
        self.database.close()

    def _wall(self, time_s: float) -> float:
        return time_s + self._wall_offset

    def _wall_or_never(self, expires: float) -> float:
        return self._wall(expires) if expires else 0.0

    def _in_callers_time(self, row: DiskChunk, now: float) -> DiskChunk:
        last_use = min(row.last_use - self._wall_offset, now)  # the wall clock may have been set back
        # An expiry of exactly 0.0 would mean never; -1.0 is long past just as well.
        expires = (row.expires - self._wall_offset) or -1.0 if row.expires else 0.0
        return row._replace(last_use=last_use, expires=expires)


def _sound(fields: Row, kind: type[RowT]) -> RowT | None:
    """Return the row as a `kind`; None if a column has a wrong type, or the digest in the last column is wrong.

    A damaged file may have values of any type.
    """
    try:
        row = msgspec.convert(fields[:-1], kind)
    except msgspec.ValidationError:
        return None
    return row if row.digest == fields[-1] else None


def _chunk_of(fields: Row) -> DiskChunk | None:
    return _sound(fields, DiskChunk)


def _root_of(fields: Row) -> _Root | None:
    return _sound(fields, _Root)


_ROOTS: Final = Table("roots", "name, key, digest", lambda row: _root_of(row) is not None, key="name")
_CHUNKS: Final = Table(
    "chunks",
    "slot, generation, name, parent, tokens, last_use, expires, digest",
    lambda row: _chunk_of(row) is not None,
)
INDEX: Final = Form("the disk tier's index", INDEX_VERSION, _SCHEMA, (_ROOTS, _CHUNKS))
