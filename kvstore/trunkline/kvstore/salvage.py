"""Read the rows of a damaged SQLite file that can still be read.

SQLite ends a query at the first damaged page. Rows have numbers, so a query can go on behind the damage: the
distance is doubled until a row can be read again, then halved to find the first such row. So a damaged page costs
only its own rows (a damaged inner page those of all pages below it), not the whole table.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

Row = tuple[Any, ...]

UNREADABLE: Final = (sqlite3.Error, UnicodeDecodeError)
"""Exceptions of a query on a damaged file; the second one if SQLite's message quotes bytes that are no text."""
_ROWID_MAX: Final = (1 << 63) - 1
_PAGES_AT: Final = 28
"""Offset, in a file's first page, of the number of its pages."""


class Table(NamedTuple):
    """A table whose rows are worth saving."""

    name: str
    columns: str
    """Names of the columns, separated by commas."""
    is_sound: Callable[[Row], bool]
    """Returns whether a row is as it was written: whether its digest is right."""
    key: str = ""
    """The primary key of a table WITHOUT ROWID; "" for other tables."""


class Salvaged(NamedTuple):
    """How many rows of a table were saved from a damaged file, and how many were lost."""

    kept: int
    lost: int | None
    """None if it is not known how many rows there were."""


def readable_rows(connection: sqlite3.Connection, table: Table) -> Iterator[Row]:
    """Yield all rows of a table that can be read, sound or not. SQLite's errors never reach the caller."""
    if table.key:
        yield from _from_both_ends(connection, table)
        return
    after: int | None = -1
    while after is not None:
        query = f"SELECT rowid, {table.columns} FROM {table.name} NOT INDEXED WHERE rowid > ? ORDER BY rowid"
        try:
            for number, *row in connection.execute(query, (after,)):
                if number > after:  # damaged numbers must not lead back: the same rows would come again for ever
                    after = number
                    yield tuple(row)
            return
        except UNREADABLE:
            after = _beyond_damage(connection, table, after)


def save_rows(
    damaged: Path, into: sqlite3.Connection, tables: tuple[Table, ...], first_page: bytes
) -> dict[str, Salvaged]:
    """Copy the sound rows of a damaged file's tables; return how many were kept and lost, by table.

    Args:
        into: A database with the same tables, empty, in a transaction.
        first_page: First page of a new file. It says where the tables are, and replaces the damaged file's own
            first page if nothing of a table is found by that.

    Raises:
        sqlite3.Error: `into` cannot be written.
        OSError: There is no room for a copy.
    """
    found = _save_rows(damaged, into, tables)
    if all(rows.kept or rows.lost == 0 for rows in found.values()):
        return found
    copy = damaged.with_name(f"{damaged.name}.copy")
    try:
        shutil.copy(damaged, copy)  # with its mode
        with copy.open("r+b") as file:
            pages = file.seek(0, 2) // len(first_page)
            file.seek(0)
            file.write(first_page[:_PAGES_AT] + pages.to_bytes(4, "big") + first_page[_PAGES_AT + 4 :])
        return _save_rows(copy, into, tables)
    finally:
        copy.unlink(missing_ok=True)


def _save_rows(damaged: Path, into: sqlite3.Connection, tables: tuple[Table, ...]) -> dict[str, Salvaged]:
    found: dict[str, Salvaged] = {}
    with closing(sqlite3.connect(damaged, isolation_level=None)) as connection:
        with suppress(*UNREADABLE):
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            connection.execute("PRAGMA writable_schema = ON")  # else a file that was cut short is not read at all
        for table in tables:
            expected = _count(connection, table.name)
            for row in readable_rows(connection, table):
                if table.is_sound(row):
                    marks = ", ".join("?" * len(row))
                    into.execute(f"INSERT OR IGNORE INTO {table.name} ({table.columns}) VALUES ({marks})", row)
            kept = int(into.execute(f"SELECT count(*) FROM {table.name}").fetchone()[0])
            found[table.name] = Salvaged(kept, None if expected is None else max(0, expected - kept))
    return found


def _from_both_ends(connection: sqlite3.Connection, table: Table) -> Iterator[Row]:
    """Yield the rows of a table WITHOUT ROWID from both ends, each up to the first damage."""
    seen: set[Any] = set()
    for order in ("ASC", "DESC"):
        query = f"SELECT {table.key}, {table.columns} FROM {table.name} ORDER BY {table.key} {order}"
        try:
            for key, *row in connection.execute(query):
                if key not in seen:
                    seen.add(key)
                    yield tuple(row)
            return
        except UNREADABLE:
            continue


def _beyond_damage(connection: sqlite3.Connection, table: Table, after: int) -> int | None:
    """Return the row number behind which rows can be read again; None if there is none."""
    step = 1
    while not _reads_behind(connection, table, after + step):
        step *= 2
        if after + step > _ROWID_MAX:
            return None
    fails = step // 2
    while step - fails > 1:
        middle = (fails + step) // 2
        if _reads_behind(connection, table, after + middle):
            step = middle
        else:
            fails = middle
    return after + step


def _reads_behind(connection: sqlite3.Connection, table: Table, number: int) -> bool:
    query = f"SELECT rowid, {table.columns} FROM {table.name} NOT INDEXED WHERE rowid > ? ORDER BY rowid LIMIT 1"
    try:
        row = connection.execute(query, (number,)).fetchone()
    except UNREADABLE:
        return False
    return row is None or row[0] > number


def _count(connection: sqlite3.Connection, table: str) -> int | None:
    """Return the number of rows of a table; None if it cannot be read.

    The smallest index is tried first: it may be sound where the table is damaged. Then the table is tried.
    """
    for way in ("", " NOT INDEXED"):
        with suppress(*UNREADABLE):
            return int(connection.execute(f"SELECT count(*) FROM {table}{way}").fetchone()[0])
    return None
