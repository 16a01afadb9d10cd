"""What the disk tier holds, as far as a restart must know it (CachedAttention §3.3, design.md §7).

The slabs of the ranks hold KV by slot; the index says which chunk is in which slot, what its tokens are and below
which chunk it stands, so that a controller that starts can build its tree again. It follows the directory in
memory, a moment behind; where both disagree after a crash, the slots know better: each says whose KV it holds, and
a read of anything else is a miss.

Times are the caller's (monotonic) in all methods and wall-clock time in the file: a restart begins another count.
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
from trunkline.controller.storage.salvage import Row, Table

_SCHEMA: Final = """
CREATE TABLE roots (name BLOB PRIMARY KEY, key BLOB NOT NULL, digest BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE chunks (
    slot INTEGER PRIMARY KEY, generation INTEGER NOT NULL, name BLOB NOT NULL UNIQUE, parent BLOB NOT NULL,
    tokens BLOB NOT NULL, digest BLOB NOT NULL, last_use REAL NOT NULL, expires REAL NOT NULL
);
"""
INDEX_VERSION: Final = 2
"""1 had the records in the same file (`persistence.move_records`)."""

log = structlog.get_logger()


class _Root(NamedTuple):
    name: bytes
    key: bytes

    @property
    def digest(self) -> bytes:
        return xxh3_64_digest(self.name + self.key)


RowT = TypeVar("RowT", DiskChunk, _Root)


class TierIndex:
    """The tables of chunks and roots. No method but `open`, `load`, `flush` and `close` waits for the disk."""

    def __init__(self, database: Database, wall_offset: float = 0.0) -> None:
        """
        Args:
            database: of the form `INDEX`; `close` closes it.
            wall_offset: seconds to add to a time of the caller's to get wall-clock time (`time.time() -
                time.monotonic()` at the start).
        """
        self.database = database
        self._wall_offset = wall_offset

    @classmethod
    def open(cls, path: Path, fingerprint: bytes, wall_offset: float = 0.0) -> TierIndex:
        """The index at `path`, an empty one if there was none; of a damaged one what can be read (one warning).

        Raises:
            DatabaseUnavailableError: the folder is missing or read-only, or another process has the index.
        """
        return cls(Database(path, fingerprint, INDEX), wall_offset)

    @property
    def first_generation(self) -> int:
        """Where the generations of this run's disk slots begin: above those of all earlier runs."""
        return self.database.boot << 32

    @property
    def problem(self) -> str:
        """Why it is not being written at present; "" if it is."""
        return self.database.problem

    def load(self, slots: int, now: float) -> StoredChunks:
        """Everything known, in an order in which a tree can be built. Before anything is written, or after a
        `flush`.

        Args:
            slots: that the disk tier has now.
            now: the caller's time.
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
        """Write changes down, in order."""
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
        """A root that chunks stand below. To say so again does no harm; without chunks it is gone after a restart.

        Args:
            name: what the chunks' `parent` says.
            key: whatever the caller needs to make the root again, such as the salt.
        """
        statement = "INSERT OR REPLACE INTO roots VALUES (?, ?, ?)"
        self.database.write(("root", name), statement, (name, key, _Root(name, key).digest))

    def stored(self, chunk: DiskChunk) -> None:
        """All ranks have the chunk in its slot, and no other slot has it (`freed` was said of one that had)."""
        wall, expires = self._wall(chunk.last_use), self._wall_or_never(chunk.expires)
        self.database.write(
            ("slot", chunk.slot),
            "INSERT OR REPLACE INTO chunks (slot, generation, name, parent, tokens, digest, last_use, expires) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (*chunk[:5], chunk.digest, wall, expires),
        )

    def freed(self, slot: int) -> None:
        """The slot holds nothing any more. Right at the order to overwrite it, not after."""
        self.database.write(("slot", slot), "DELETE FROM chunks WHERE slot = ?", (slot,))

    def reparented(self, name: bytes, parent: bytes) -> None:
        """A chunk stands below another chunk or root than it did."""
        self.database.write(("parent", name), "UPDATE chunks SET parent = ? WHERE name = ?", (parent, name))

    def touch(self, names: Iterable[bytes], last_use: float, expires: float | None = None) -> None:
        """Chunks were used; None: they expire when they would have."""
        wall = self._wall(last_use)
        until = None if expires is None else self._wall_or_never(expires)
        statement = "UPDATE chunks SET last_use = ?, expires = coalesce(?, expires) WHERE name = ?"
        for name in names:
            self.database.write(("use", name), statement, (wall, until, name), freshens=True)

    def flush(self) -> bool:
        """Wait until all that was said is in the file; False: it cannot be written."""
        return self.database.flush()

    def close(self) -> None:
        """Write what is left and release the file."""
        self.database.close()

    def _wall(self, time_s: float) -> float:
        return time_s + self._wall_offset

    def _wall_or_never(self, expires: float) -> float:
        return self._wall(expires) if expires else 0.0

    def _in_callers_time(self, row: DiskChunk, now: float) -> DiskChunk:
        last_use = min(row.last_use - self._wall_offset, now)  # a clock that was set back, or a boot before ours
        # 0.0 would say never; a moment that long past is as good as any.
        expires = (row.expires - self._wall_offset) or -1.0 if row.expires else 0.0
        return row._replace(last_use=last_use, expires=expires)


def _sound(fields: Row, kind: type[RowT]) -> RowT | None:
    """The row, unless its columns are of other types than we write (a damaged file's may be anything), or the last
    one, the digest, is not theirs."""
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
