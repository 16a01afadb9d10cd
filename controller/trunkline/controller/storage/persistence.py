"""The two files that a controller reads after a restart: the index of the disk tier's chunks, and the records.

The engine reports what has changed on disk (verified writes, freed slots, chunks that moved behind a cut), and the
index follows a moment later. At the start the radix tree is built again from the index, with nodes whose chunks
are on disk only (`engine/disk_chunks.py`).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

import structlog

from trunkline.controller.engine.disk_chunks import DiskChange, StoredChunks
from trunkline.controller.storage.database import APPLICATION_ID, Database, DatabaseUnavailableError
from trunkline.controller.storage.records import RECORDS, RecordStore
from trunkline.controller.storage.salvage import UNREADABLE, readable_rows
from trunkline.controller.storage.tier_index import INDEX, TierIndex

_VERSION_WITH_RECORDS: Final = 1
"""Version of indexes that held the records, too."""

log = structlog.get_logger()


class Persistence:
    """Both files and their contents. Without paths, records are kept in memory only and there is no index."""

    def __init__(
        self, index_path: str, fingerprint: bytes, wall: float, monotonic: float, records_path: str = ""
    ) -> None:
        """
        Args:
            index_path: Path of the index's file; "" for none.
            fingerprint: The tiers' fingerprint.
            wall: Seconds since the epoch, now.
            monotonic: The same moment by the controller's clock.
            records_path: Path of the records' file; "" for none.

        Raises:
            DatabaseUnavailableError: A file cannot be used.
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
        """Return the number above which this run's generations of disk slots begin."""
        return self.index.first_generation if self.index is not None else 0

    def wall(self, now: float) -> float:
        """Return a time of the controller's clock as seconds since the epoch."""
        return now + self._offset

    def load(self, slots: int, now: float) -> StoredChunks | None:
        """Return the chunks that an earlier run, or earlier workers, left on disk; None if there is no disk tier.

        Args:
            slots: Number of slots that the disk tier has now.
        """
        if self.index is None or not slots:
            return None
        self.index.flush()  # changes that an earlier group of workers made may still be on their way into the file
        stored = self.index.load(slots, now)
        if stored.chunks:
            log.info("chunks found on disk", chunks=len(stored.chunks), dropped=stored.dropped)
        return stored

    def note(self, changes: Sequence[DiskChange]) -> None:
        """Write changes of the disk tier into the index."""
        if self.index is not None and changes:
            self.index.note(changes)

    def close(self) -> None:
        """Write all pending changes, and release both files."""
        if self.index is not None:
            self.index.close()
        if self._records_file is not None:
            self._records_file.close()


def move_records(index: Path, records: Database) -> int:
    """Move the records that an earlier version kept in the index to a file of their own; return their number.

    If this is interrupted, the next start does it again: no request is served before it is done.

    Raises:
        DatabaseUnavailableError: The records cannot be written to the new file, or not be deleted in the old one.
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
