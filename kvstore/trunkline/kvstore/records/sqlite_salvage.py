"""Repair a damaged file of records: keep what can be read and belongs together.

A segment is sound if its name is the digest of its parent's name and its content; a record, if its digest is right
and its whole chain is sound. Counts and sizes are not read but counted again.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

from trunkline.kvstore.asides import unused_name
from trunkline.kvstore.records.sqlite_tables import create_tables, digest_of
from trunkline.kvstore.records.store import RECORD_BYTES, SEGMENT_BYTES, Record, RecordKey, segment_name
from trunkline.kvstore.salvage import Row, Table, save_rows

_DAMAGE: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_DETAILED: Final = (
    *(sqlite3.SQLITE_IOERR_SHORT_READ, sqlite3.SQLITE_IOERR_CORRUPTFS),
    *(sqlite3.SQLITE_CONSTRAINT_UNIQUE, sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY, sqlite3.SQLITE_CONSTRAINT_ROWID),
)
"""The last ones: an index lacks what its table has, for nothing is stored twice."""
_RECORD_COLUMNS: Final = "number, kind, owner, id, version, head, created, used, ttl, digest, header"
_COUNT_AGAIN: Final = f"""
INSERT INTO counts
    SELECT number, (SELECT count(*) FROM needs WHERE needed = number) AS n FROM segments WHERE n <> 1;
INSERT INTO owners
    SELECT owner, sum(records), sum(bytes) FROM (
        SELECT owner, 1 AS records, {RECORD_BYTES} + length(header) AS bytes FROM records
        UNION ALL SELECT owner, 0, {SEGMENT_BYTES} + length(content) FROM segments)
    GROUP BY owner;
DROP TABLE needs
"""


class Found(NamedTuple):
    """Number of records that were kept and lost."""

    kept: int
    lost: int | None
    """None: it is not known how many there were."""


def is_damage(error: Exception) -> bool:
    """Return whether an error means that the file is damaged, rather than that it cannot be used at the moment."""
    if isinstance(error, UnicodeDecodeError):  # a message that quotes bytes which are no text
        return True
    code = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF in _DAMAGE or code in _DETAILED


def salvage(damaged: Path, into: Path) -> Found:
    """Make a new file of what can be read of a damaged one.

    Raises:
        sqlite3.Error: The new file cannot be written.
        OSError: Likewise.
    """
    _remove(into)
    try:
        return _salvage(damaged, into)
    except BaseException:
        _remove(into)  # the disk may be full
        raise


def _remove(path: Path) -> None:
    for ending in ("", "-journal"):
        Path(f"{path}{ending}").unlink(missing_ok=True)


def _salvage(damaged: Path, into: Path) -> Found:
    os.close(os.open(into, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    with closing(sqlite3.connect(into, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        create_tables(connection)
        rows = save_rows(damaged, connection, _TABLES, _first_page())
        _drop_torn_chains(connection)
        kept = int(connection.execute("SELECT count(*) FROM records").fetchone()[0])
        connection.execute("COMMIT")
    lost = rows["records"].lost
    return Found(kept, None if lost is None else rows["records"].kept + lost - kept)


def put_aside(path: Path) -> Path:
    """Rename a file and its log to a name that no file has yet; return the new name."""
    aside = unused_name(path, "damaged")
    for part in ("-wal", ""):  # the file last: without it, its log is worth nothing
        if Path(f"{path}{part}").exists():
            os.replace(f"{path}{part}", f"{aside}{part}")
    Path(f"{path}-shm").unlink(missing_ok=True)
    return aside


def _drop_torn_chains(connection: sqlite3.Connection) -> None:
    """Delete segments that are damaged or follow a missing one, and the records that need them."""
    query = """SELECT s.number, s.owner, s.name, s.parent, p.name, s.content FROM segments s
        LEFT JOIN segments p ON p.number = s.parent WHERE s.number > ? ORDER BY s.number LIMIT 1"""
    after = -1
    while (row := connection.execute(query, (after,)).fetchone()) is not None:  # a parent has the smaller number
        after, owner, name, parent, parent_name, content = row
        is_whole = parent is None or parent_name is not None
        if not is_whole or name != segment_name(owner, parent_name or b"", content):
            connection.execute("DELETE FROM segments WHERE number = ?", (after,))
    connection.execute("DELETE FROM records WHERE head IS NOT NULL AND head NOT IN (SELECT number FROM segments)")
    rows = connection.execute(f"SELECT {_RECORD_COLUMNS} FROM records").fetchall()
    names = "SELECT name FROM segments WHERE number = ?"
    for row in rows:
        head = connection.execute(names, (row[5],)).fetchone()[0] if row[5] is not None else b""
        record = Record(RecordKey(*row[1:4]), row[4], row[10], head, row[6], row[7], row[8])
        if digest_of(record) != row[9]:
            connection.execute("DELETE FROM records WHERE number = ?", (row[0],))
    connection.execute("CREATE TEMP TABLE needs (needed INTEGER)")
    connection.execute("INSERT INTO needs SELECT parent FROM segments WHERE parent IS NOT NULL")
    connection.execute("INSERT INTO needs SELECT head FROM records WHERE head IS NOT NULL")
    connection.execute("CREATE INDEX temp.needed ON needs (needed)")
    for statement in _COUNT_AGAIN.split(";"):
        connection.execute(statement)


def _first_page() -> bytes:
    """Return the first page of a new file."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        create_tables(connection)
        size = int(connection.execute("PRAGMA page_size").fetchone()[0])
        return connection.serialize()[:size]


def _has_types(row: Row, types: tuple[type | tuple[type, ...], ...]) -> bool:
    return all(map(isinstance, row, types))


_OPTIONAL: Final = (int, type(None))
_RECORD_TYPES: Final = (int, str, str, str, int, _OPTIONAL, float, float, float, bytes, bytes)
_SEGMENT_TYPES: Final = (int, str, bytes, _OPTIONAL, bytes)
_TABLES: Final = (
    Table("records", _RECORD_COLUMNS, lambda row: _has_types(row, _RECORD_TYPES)),
    Table("segments", "number, owner, name, parent, content", lambda row: _has_types(row, _SEGMENT_TYPES)),
)
