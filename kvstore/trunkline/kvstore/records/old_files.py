"""Take over the records that controllers of earlier versions kept.

Each controller had a file of its own, `group-N.sqlite`; before that, its records were in the index of its disk
tier, `index.sqlite`. Each value becomes the header of a record without segments; a value that is too long for that
is the only segment of a record without header. Who reads them, knows old values.
Kept answers are passed over: they are of use for minutes only.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Final

from xxhash import xxh3_64_digest

from trunkline.kvstore.records.store import HEADER_BYTES_MAX, Change, ExistsError, RecordKey, RecordStore
from trunkline.kvstore.salvage import UNREADABLE, Row, Table, readable_rows

_APPLICATION_ID: Final = 0x54726B6C
"""The number in the headers of all files of earlier controllers."""
_INDEX_VERSION: Final = 2
"""Version of an index without records."""
_BATCH: Final = 64
"""Records that are stored at the same time."""
_NEW: Final = "are new"
_WAIT_S: Final = 1.0
"""Time in seconds for which a file is waited for that another process uses."""


def _is_sound(row: Row) -> bool:
    kind, id_, version, value, used, ttl, digest = row
    types = (str, str, int, bytes, float, float, bytes)
    return (
        all(map(isinstance, row, types))
        and xxh3_64_digest(f"{kind}\0{id_}\0{version}\0".encode() + value) == digest
        and used >= 0
        and ttl >= 0
    )


_TABLE: Final = Table("records", "kind, id, version, value, used, ttl, digest", _is_sound)


async def import_old_files(store: RecordStore, paths: Sequence[Path], log: Callable[[str], None]) -> int:
    """Copy the records of old files into a store. Each file is then renamed to `….imported`; an index stays, and
    only its records are removed. If this is interrupted, it can be done again.

    Args:
        paths: The files, which no other process uses.
        log: Called with sentences about what was taken over, and what could not be.

    Returns:
        The number of records that the store did not have before.

    Raises:
        StoreAwayError: The store cannot be used.
    """
    owners = {owner for path in paths for owner in _owners(path)}
    count = 0
    for path in paths:
        try:
            count += await _import_file(store, path, owners, log)
        except (OSError, sqlite3.Error) as error:
            log(f"The sessions and schemas in {path} were not taken over: {error}.")
    return count


async def _import_file(store: RecordStore, path: Path, owners: Iterable[str], log: Callable[[str], None]) -> int:
    names = {_schema_kind(owner): owner for owner in owners}
    outcomes: Counter[str] = Counter()
    with closing(sqlite3.connect(path, timeout=_WAIT_S, isolation_level=None)) as connection:
        _lock(connection)
        if not _is_ours(connection):
            log(f"{path} is not a file of records, so it is passed over.")
            return 0
        rows = (row for row in readable_rows(connection, _TABLE) if _is_wanted(row))
        while batch := list(islice(rows, _BATCH)):
            outcomes.update(await asyncio.gather(*(_take(store, row, names) for row in batch)))
        is_index = _forget_records(connection)
    if not is_index:
        for part in ("-wal", ""):
            if Path(f"{path}{part}").exists():
                os.replace(f"{path}{part}", f"{path}.imported{part}")
        Path(f"{path}-shm").unlink(missing_ok=True)
    rest = "".join(f"; {count} {what}" for what, count in outcomes.items() if what != _NEW)
    log(f"{outcomes[_NEW]} sessions and schemas were taken over from {path}{rest}.")
    return outcomes[_NEW]


async def _take(store: RecordStore, row: Row, owners: dict[str, str]) -> str:
    """Store an old record; return what came of it."""
    if not _is_sound(row):
        return "are damaged"
    kind, id_, _, value, used, ttl, _ = row
    if ttl and used + ttl < time.time():
        return "were not used for their time to live"
    change = Change(value, ttl) if len(value) <= HEADER_BYTES_MAX else Change(b"", ttl, segments=[value])
    try:
        await store.create(_key(kind, id_, owners), change)
    except ExistsError:
        return "were there already"
    except ValueError:
        return "are larger than records may be"
    return _NEW


def _lock(connection: sqlite3.Connection) -> None:
    """Keep other processes from a file until the connection is closed. A controller of an earlier version may
    still use it; without the lock, what cannot be read because of that would count as damaged.

    Raises:
        sqlite3.OperationalError: Another process uses the file.
    """
    try:
        for statement in ("PRAGMA locking_mode = EXCLUSIVE", "BEGIN EXCLUSIVE", "COMMIT"):
            connection.execute(statement)
    except UNREADABLE as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise


def _is_ours(connection: sqlite3.Connection) -> bool:
    """Return whether a file is of an earlier controller, or too damaged to tell."""
    try:
        number: int = connection.execute("PRAGMA application_id").fetchone()[0]
    except UNREADABLE:
        return True
    return number == _APPLICATION_ID


def _is_wanted(row: Row) -> bool:
    return not isinstance(row[0], str) or row[0].split(":")[0] in ("session", "schema")


def _owners(path: Path) -> set[str]:
    """Return the owners of the sessions in a file."""
    try:
        with closing(sqlite3.connect(path, timeout=_WAIT_S, isolation_level=None)) as connection:
            rows = connection.execute("SELECT DISTINCT kind FROM records WHERE kind LIKE 'session:%'").fetchall()
    except UNREADABLE:
        return set()
    return {kind.removeprefix("session:") for (kind,) in rows}


def _key(kind: str, id_: str, owners: dict[str, str]) -> RecordKey:
    """Return the key of an old record.

    Args:
        owners: Owners by the kind of their schemas without a salt. Where an owner and a salt were hashed together,
            neither can be told: such a schema keeps its old kind.
    """
    if kind.startswith("session:"):
        return RecordKey("session", kind.removeprefix("session:"), id_)
    return RecordKey("schema", owners[kind], id_) if kind in owners else RecordKey(kind, "", id_)


def _schema_kind(owner: str) -> str:
    """Return the kind that an owner's schemas had, if they had no salt."""
    return f"schema:{hashlib.blake2b(f'{chr(0)}{owner}{chr(0)}'.encode(), digest_size=16).hexdigest()}"


def _forget_records(connection: sqlite3.Connection) -> bool:
    """Remove the records from an index; return whether the file is an index that goes on being used."""
    try:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not tables - {"meta", "records"}:
            return False
        for statement in ("BEGIN IMMEDIATE", "DROP TABLE records", f"PRAGMA user_version = {_INDEX_VERSION}"):
            connection.execute(statement)
        connection.execute("COMMIT")
    except UNREADABLE:
        return False
    return True
