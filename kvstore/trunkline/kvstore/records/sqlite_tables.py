"""The operations of a record store on SQLite tables. The caller has begun a transaction and ends it.

    records                        segments (`sqlite_segments.py`)
      kind, owner, id  (unique)      number
      version, header                name, parent, content
      head ────────────────────►
      used, ttl

Two more tables have the leases of records, and what the records of each owner take.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from trunkline.kvstore.records.sqlite_segments import DamagedError, SegmentTable
from trunkline.kvstore.records.store import (
    LEASE_S_MAX,
    PAGE_MAX,
    PASSING_KIND,
    RECORD_BYTES,
    BusyError,
    Change,
    ConflictError,
    ExistsError,
    MissingError,
    QuotaError,
    Reading,
    Record,
    RecordKey,
    Tended,
    Usage,
)

USE_S_MAX: Final = 60.0
"""A later use is written when it is so many seconds after the one that is written, or `ttl / USE_PARTS`."""
USE_PARTS: Final = 16
DELETIONS_MAX: Final = 64
"""Records that one call of `tend` deletes for each reason."""

APPLICATION_ID: Final = 0x54726B52
""""TrkR" in the file's header, so that another program's database is not taken for Trunkline's records."""
VERSION: Final = 1
"""Version of the tables, kept in the file's header."""
_PASSES_LAST: Final = f"kind <> '{PASSING_KIND}'"
_SCHEMA: Final = f"""
CREATE TABLE records (
    number INTEGER PRIMARY KEY, kind TEXT NOT NULL, owner TEXT NOT NULL, id TEXT NOT NULL,
    version INTEGER NOT NULL, head INTEGER, created REAL NOT NULL, used REAL NOT NULL, ttl REAL NOT NULL,
    digest BLOB NOT NULL, header BLOB NOT NULL);
CREATE TABLE segments (
    number INTEGER PRIMARY KEY, owner TEXT NOT NULL, name BLOB NOT NULL, parent INTEGER, content BLOB NOT NULL);
CREATE UNIQUE INDEX records_by_key ON records (kind, owner, id);
CREATE INDEX records_by_use ON records ({_PASSES_LAST}, used);
CREATE INDEX records_by_end ON records (used + ttl) WHERE ttl > 0;
CREATE UNIQUE INDEX segments_by_name ON segments (name);
CREATE TABLE counts (segment INTEGER PRIMARY KEY, count INTEGER NOT NULL);
CREATE INDEX unneeded ON counts (segment) WHERE count = 0;
CREATE TABLE leases (record INTEGER PRIMARY KEY, token TEXT NOT NULL, boot TEXT NOT NULL, until REAL NOT NULL);
CREATE TABLE owners (name TEXT PRIMARY KEY, records INTEGER NOT NULL, bytes INTEGER NOT NULL) WITHOUT ROWID
"""

_COLUMNS: Final = "r.number, r.kind, r.owner, r.id, r.version, r.head, s.name, r.created, r.used, r.ttl"
_FIND: Final = f"""
SELECT {_COLUMNS}, r.header, r.digest FROM records r LEFT JOIN segments s ON s.number = r.head
WHERE r.kind = ? AND r.owner = ? AND r.id = ?"""
_PAGE: Final = """
SELECT {} FROM records r LEFT JOIN segments s ON s.number = r.head
WHERE r.kind = ? AND r.owner = ? AND r.id {} ? ORDER BY r.id LIMIT ?"""
_KINDS: Final = """
WITH RECURSIVE k (kind) AS (SELECT min(kind) FROM records UNION ALL
    SELECT (SELECT min(kind) FROM records WHERE kind > k.kind) FROM k WHERE k.kind IS NOT NULL)
SELECT kind FROM k WHERE EXISTS (SELECT 1 FROM records r WHERE r.kind = k.kind AND r.owner = ?)"""
_FREE: Final = "NOT EXISTS (SELECT 1 FROM leases l WHERE l.record = r.number AND l.boot = ? AND l.until > ?)"
_OVERDUE: Final = f"""
SELECT {_COLUMNS}, length(r.header) FROM records r LEFT JOIN segments s ON s.number = r.head
WHERE r.ttl > 0 AND r.used + r.ttl <= ? AND {_FREE} ORDER BY r.used + r.ttl LIMIT ?"""
_LEAST_USED: Final = f"""
SELECT {_COLUMNS}, length(r.header) FROM records r LEFT JOIN segments s ON s.number = r.head
WHERE {_FREE} ORDER BY r.{_PASSES_LAST}, r.used LIMIT ?"""


class NeedsWriteError(Exception):
    """The operation turned out to write; it has to be repeated in a transaction that may."""


class Clocks(NamedTuple):
    """The clocks of a store."""

    wall: Callable[[], float]
    """Return Unix time in seconds. It may jump."""
    steady: Callable[[], float]
    """Return the seconds since the machine started, sleep included: the same in all processes, without jumps."""
    boot: str
    """Names the start of the machine from which `steady` counts."""


class _Row(NamedTuple):
    """A row of the table of records."""

    number: int
    head: int | None
    header_bytes: int
    record: Record


class RecordTables:
    """The tables of an open database. Every method is part of a transaction."""

    def __init__(self, connection: sqlite3.Connection, clocks: Clocks, bytes_max: int) -> None:
        """`bytes_max`: see `open_records`."""
        self.connection = connection
        self._segments = SegmentTable(connection)
        self._clocks = clocks
        self._bytes_max = bytes_max
        self.may_write = True
        """Whether the present transaction may write. If not, an operation that has to raises `NeedsWriteError`."""
        self.notes_uses = True
        """Whether times of use are written. They are not if the file cannot be written; records stay readable."""
        self._trusts_wall_from = 0.0
        self._wall_offset = clocks.wall() - clocks.steady()

    def create(self, key: RecordKey, change: Change, owner_bytes_max: int) -> Record:
        """See `RecordStore.create`."""
        if self._find(key) is not None:
            raise ExistsError(f"{key.kind} {key.id!r} exists")
        base = self._segments.base(key.owner, change)
        if owner_bytes_max and (used := self.usage(key.owner).bytes) >= owner_bytes_max:
            raise QuotaError(used, owner_bytes_max)
        head, name, grown = self._segments.extend(key.owner, change, base, None)
        now = self._clocks.wall()
        record = Record(key, 1, change.header, name, now, now, float(change.ttl))
        self.connection.execute(
            "INSERT INTO records (kind, owner, id, version, head, created, used, ttl, digest, header)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*key, 1, head, now, now, change.ttl, digest_of(record), change.header),
        )
        self._account(key.owner, 1, grown + RECORD_BYTES + len(change.header))
        return record

    def get(self, key: RecordKey, known: Sequence[bytes], *, use: bool) -> Reading:
        """See `RecordStore.get`."""
        row = self._present(key)
        found = self._reading(row, self._used(row) if use else row.record, known)
        _, left = self._lease_of(row.number) or ("", 0.0)
        return found._replace(leased_s=left)

    def acquire(self, key: RecordKey, token: str, seconds: float, known: Sequence[bytes]) -> Reading:
        """See `RecordStore.acquire`."""
        row = self._present(key)
        self._check_lease(row, token)
        self._lease(row.number, token, seconds)
        return self._reading(row, self._used(row), known)

    def renew(self, key: RecordKey, token: str, seconds: float) -> bool:
        """See `RecordStore.renew`."""
        row = self._find(key)
        if row is None or (lease := self._lease_of(row.number)) is None or lease[0] != token:
            return False
        self._lease(row.number, token, seconds)
        return True

    def release(self, key: RecordKey, token: str) -> None:
        """See `RecordStore.release`."""
        row = self._find(key)
        if row is not None:
            self.connection.execute("DELETE FROM leases WHERE record = ? AND token = ?", (row.number, token))

    def put(self, key: RecordKey, version: int, change: Change, lease: str, *, release: bool) -> Record:
        """See `RecordStore.put`."""
        row = self._present(key)
        self._check_lease(row, lease)
        if row.record.version != version:
            raise ConflictError(row.record.version)
        base = self._segments.base(key.owner, change)
        head, name, grown = self._segments.extend(key.owner, change, base, row.head)
        now, before = self._clocks.wall(), row.record
        used = before.used if change.ttl == before.ttl and _is_fresh(before, now) else now
        record = Record(key, version + 1, change.header, name, before.created, float(used), float(change.ttl))
        self.connection.execute(
            "UPDATE records SET version = ?, head = ?, digest = ?, header = ? WHERE number = ?",
            (record.version, head, digest_of(record), change.header, row.number),
        )
        if used != before.used or change.ttl != before.ttl:  # apart, because their indexes change
            self.connection.execute(
                "UPDATE records SET used = ?, ttl = ? WHERE number = ?", (used, change.ttl, row.number)
            )
        self._account(key.owner, 0, grown + len(change.header) - row.header_bytes)
        if release:
            self.connection.execute("DELETE FROM leases WHERE record = ? AND token = ?", (row.number, lease))
        return record

    def delete(self, key: RecordKey, lease: str) -> None:
        """See `RecordStore.delete`."""
        row = self._present(key)
        self._check_lease(row, lease)
        self._delete(row)

    def page(self, kind: str, owner: str, after: str, limit: int, prefix: str, *, headers: bool) -> list[Record]:
        """See `RecordStore.page`."""
        columns = f"{_COLUMNS}, {'r.header, r.digest' if headers else 'NULL, NULL'}"
        query = _PAGE.format(columns, ">" if after >= prefix else ">=")
        values = kind, owner, max(after, prefix), max(0, min(limit, PAGE_MAX))
        rows = self.connection.execute(query, values)
        found = []
        for each in rows:
            record = _row(each).record
            if not record.key.id.startswith(prefix):
                break
            found.append(record)
        return found

    def kinds(self, owner: str) -> list[str]:
        """See `RecordStore.kinds`."""
        return [kind for (kind,) in self.connection.execute(_KINDS, (owner,))]

    def usage(self, owner: str | None) -> Usage:
        """See `RecordStore.usage`."""
        if owner is None:
            query = "SELECT COALESCE(sum(records), 0), COALESCE(sum(bytes), 0) FROM owners"
            return Usage(*self.connection.execute(query).fetchone())
        row = self.connection.execute("SELECT records, bytes FROM owners WHERE name = ?", (owner,)).fetchone()
        return Usage(*row) if row is not None else Usage(0, 0)

    def tend(self) -> Tended:
        """See `RecordStore.tend`."""
        overdue = self._overdue()
        unneeded = self._segments.unneeded()
        too_many = self.usage(None).bytes - self._bytes_max if self._bytes_max else 0
        steady = self._clocks.steady()
        ended = "FROM leases WHERE boot <> ? OR until <= ?", (self._clocks.boot, steady)
        has_ended = self.connection.execute(f"SELECT 1 {ended[0]} LIMIT 1", ended[1]).fetchone() is not None
        victims = self._select(_LEAST_USED) if too_many > 0 else []
        if not self.may_write and (overdue or unneeded or has_ended or victims):
            raise NeedsWriteError
        if has_ended:
            self.connection.execute(f"DELETE {ended[0]}", ended[1])
        for row in overdue:
            self._delete(row)
        for segment, owner in unneeded:
            self._account(owner, 0, -self._segments.remove(segment))
        if overdue or unneeded:  # what they leave decides whether others have to go
            return Tended([row.record.key for row in overdue], is_done=False)
        deleted = []
        for row in victims:
            if too_many > 0:
                too_many -= self._delete(row)
                deleted.append(row.record.key)
        return Tended(deleted, is_done=not deleted)

    def _overdue(self) -> list[_Row]:
        """Return records that were not used for their time to live.

        After the wall clock has jumped, none are for a while: a jump may be a mistake that is put right soon, and
        what was deleted meanwhile would be lost.
        """
        wall, steady = self._clocks.wall(), self._clocks.steady()
        if abs(wall - steady - self._wall_offset) > USE_S_MAX:
            self._trusts_wall_from = steady + LEASE_S_MAX
        self._wall_offset = wall - steady
        return self._select(_OVERDUE, wall) if steady >= self._trusts_wall_from else []

    def _select(self, query: str, *values: float) -> list[_Row]:
        free = self._clocks.boot, self._clocks.steady()
        rows = self.connection.execute(query, (*values, *free, DELETIONS_MAX)).fetchall()
        return [_Row(row[0], row[5], row[10], _row((*row[:10], None, None)).record) for row in rows]

    def _find(self, key: RecordKey) -> _Row | None:
        row = self.connection.execute(_FIND, key).fetchone()
        return _row(row) if row is not None else None

    def _present(self, key: RecordKey) -> _Row:
        row = self._find(key)
        if row is None:
            raise MissingError(f"{key.kind} {key.id!r} does not exist")
        return row

    def _used(self, row: _Row) -> Record:
        now = self._clocks.wall()
        if _is_fresh(row.record, now) or not self.notes_uses:
            return row.record
        if not self.may_write:
            raise NeedsWriteError
        record = row.record._replace(used=now)
        self.connection.execute(
            "UPDATE records SET used = ?, digest = ? WHERE number = ?", (now, digest_of(record), row.number)
        )
        return record

    def _reading(self, row: _Row, record: Record, known: Iterable[bytes]) -> Reading:
        owner_bytes = self.usage(record.key.owner).bytes
        if row.head is None or record.head in (reader_has := frozenset(known)):
            return Reading(record, record.head, [], owner_bytes)
        after, segments = self._segments.end_of_chain(record.key.owner, row.head, reader_has)
        return Reading(record, after, segments, owner_bytes)

    def _lease_of(self, number: int) -> tuple[str, float] | None:
        """Return token and remaining seconds of a record's lease."""
        query = "SELECT token, until FROM leases WHERE record = ? AND boot = ?"
        row = self.connection.execute(query, (number, self._clocks.boot)).fetchone()
        left = row[1] - self._clocks.steady() if row is not None else 0.0
        return (row[0], left) if left > 0 else None

    def _check_lease(self, row: _Row, token: str) -> None:
        lease = self._lease_of(row.number)
        if lease is not None and lease[0] != token:
            raise BusyError(lease[1])

    def _lease(self, number: int, token: str, seconds: float) -> None:
        lease = (number, token, self._clocks.boot, self._clocks.steady() + min(seconds, LEASE_S_MAX))
        self.connection.execute("INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?)", lease)

    def _delete(self, row: _Row) -> int:
        """Delete a record and what only it needs; return the bytes that were removed."""
        self.connection.execute("DELETE FROM records WHERE number = ?", (row.number,))
        self.connection.execute("DELETE FROM leases WHERE record = ?", (row.number,))
        freed = RECORD_BYTES + row.header_bytes + (self._segments.let_go(row.head) if row.head is not None else 0)
        self._account(row.record.key.owner, -1, -freed)
        return freed

    def _account(self, owner: str, records: int, size: int) -> None:
        if records or size:
            self.connection.execute(
                "INSERT INTO owners VALUES (?, ?, ?) ON CONFLICT (name) DO UPDATE"
                " SET records = records + excluded.records, bytes = bytes + excluded.bytes",
                (owner, records, size),
            )
        if size < 0:
            self.connection.execute("DELETE FROM owners WHERE name = ? AND records = 0 AND bytes = 0", (owner,))


def create_tables(connection: sqlite3.Connection) -> None:
    """Create the tables in an empty database."""
    for statement in _SCHEMA.split(";"):
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {VERSION}")


def digest_of(record: Record) -> bytes:
    """Return a digest of a record, by which damage is found."""
    hashed = hashlib.blake2b(digest_size=8)
    parts = (*(part.encode() for part in record.key), record.head)
    for part in (*parts, repr((record.version, *map(float, record[4:]))).encode(), record.header):
        hashed.update(len(part).to_bytes(4, "little"))
        hashed.update(part)
    return hashed.digest()


def _is_fresh(record: Record, now: float) -> bool:
    """Return whether the time of a record's last use is exact enough without a new one."""
    exact = min(USE_S_MAX, record.ttl / USE_PARTS) if record.ttl else USE_S_MAX
    return abs(now - record.used) <= exact


def _row(columns: Iterable[object]) -> _Row:
    """Return a row of a query for `_COLUMNS`, header and digest; None for those that are not asked for."""
    number, kind, owner, id_, version, head, name, created, used, ttl, header, digest = columns
    record = Record(RecordKey(kind, owner, id_), version, header or b"", name or b"", created, used, ttl)  # type: ignore[arg-type]
    if digest is not None and digest != digest_of(record):
        raise DamagedError(f"record {number} is damaged")
    return _Row(number, head, len(record.header), record)  # type: ignore[arg-type]
