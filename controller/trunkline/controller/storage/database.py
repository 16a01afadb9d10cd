"""An SQLite database of the controller's, read at the start and then written by a thread of its own.

    loop ──write(key, statement)──► pending {key: statement} ──every 50 ms──► one transaction (writer thread)

The loop never waits for the disk. Its statements go into a dictionary in which a later statement of a key
replaces the earlier one; so even while a disk stalls, it has no more entries than there are slots. Statements are
applied in the order in which each key was written last. A transaction that fails is tried again.

The index of the disk tier (`tier_index.py`) is such a file. It is only a hint, because every slot itself says what
it holds. But without it the KV on disk is not found, so a damaged file is read as far as possible
(`kvstore/salvage.py`), and a file that cannot be used is never deleted: it is moved aside.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Hashable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import structlog

from trunkline.kvstore.asides import unused_name
from trunkline.kvstore.salvage import UNREADABLE, Table, readable_rows, save_rows

COMMIT_S: Final = 0.05
"""Statements are collected for this long and committed together: one commit costs as much as a thousand rows."""
_RETRY_S: Final = 1.0
"""Time from a failed commit to the next attempt."""
_FRESHENING_MAX: Final = 1 << 16
"""From this many pending statements on, those that only update a row's time of use are left out."""
_WAIT_S_MAX: Final = 5.0
"""The longest wait for a disk that does not answer, or for another process."""

APPLICATION_ID: Final = 0x54726B6C
""""Trkl" in the file's header, so that another program's database is not taken for Trunkline's."""
_META: Final = "CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID"
_DAMAGE: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
"""Error codes of a damaged file, which a new file would not give. The last one: a table has a wrong form."""
_UNREADABLE: Final = (sqlite3.SQLITE_IOERR_READ, sqlite3.SQLITE_IOERR_SHORT_READ, sqlite3.SQLITE_IOERR_CORRUPTFS)
"""Error codes of I/O errors at reading. All other I/O errors happen at writing: the file can still be read."""

log = structlog.get_logger()

Parameters = tuple[Any, ...]


class Form(NamedTuple):
    """The kind of a database file: its title, version and tables."""

    title: str
    """What the file holds, in words for messages."""
    version: int
    """Version of the schema, kept in the file's header. A file of another version is moved aside."""
    schema: str
    """Statements that create the tables, except for `meta`."""
    tables: tuple[Table, ...]
    """The tables whose rows are saved from a damaged file."""


class _Pending(NamedTuple):
    """A statement that is not in the file yet."""

    statement: str
    parameters: Parameters


class DatabaseUnavailableError(RuntimeError):
    """A database cannot be used at all: its folder is missing or read-only, or another process has the file."""


class DatabaseInUseError(DatabaseUnavailableError):
    """Another process has the file, such as one that is just ending."""


class _UnusableError(Exception):
    """The present file cannot be used and has to be replaced; the message says why."""

    def __init__(self, why: str, *, is_damaged: bool = False) -> None:
        super().__init__(why)
        self.is_damaged = is_damaged


class Database:
    """The open file and its writer thread. Its methods are for the thread that opened it."""

    def __init__(self, path: Path, fingerprint: bytes, form: Form, wait_s: float = _WAIT_S_MAX) -> None:
        """Open the database at `path`, or create an empty one there.

        Args:
            path: The SQLite file; its folder exists.
            fingerprint: Says what the content belongs to, such as the disk tier's fingerprint
                (`trunkline.kvstore.fingerprint`). A database with another fingerprint is not read.
            wait_s: How long to wait for another process that has the file, such as one that is just ending.

        Raises:
            DatabaseUnavailableError: No database can be opened or made there, or another process has it.
        """
        self.path = path
        self.form = form
        self.problem = ""
        """Why the last commit failed; its statements are kept and tried again. "" if it did not fail."""
        self.replaced = ""
        """Why an earlier file was moved aside at the start; "" if none was."""
        self._wait_s = wait_s
        self._connection = self._open(fingerprint)
        self._connection_in_use = threading.Lock()
        self._pending: dict[Hashable, _Pending] = {}
        self._changed = threading.Condition()
        self._rounds = 0
        """Number of rounds (commits, or attempts at one) that the writer thread has finished."""
        self._rounds_wanted = 0
        """The greatest value of `rounds` that a caller waits for."""
        self._closing = False
        self.boot: int = self._connection.execute("SELECT value FROM meta WHERE key = 'boot'").fetchone()[0]
        """A number that grows with each opening, even if the file was lost in between."""
        if self.problem:  # the file can still be read
            log.warning("a file cannot be written", holds=form.title, path=str(path), error=self.problem)
            self.boot += 1
            self.write("boot", "UPDATE meta SET value = ? WHERE key = 'boot'", (self.boot,))
        self._writer = threading.Thread(target=self._write_behind, name="database", daemon=True)
        self._writer.start()

    def write(self, key: Hashable, statement: str, parameters: Parameters, *, freshens: bool = False) -> None:
        """Have `statement` committed soon, in place of an earlier statement of `key` that is still pending.

        Args:
            key: What the statement is about. It must make all earlier statements of the same key unnecessary.
            freshens: Whether the statement may be left out if too many are pending.
        """
        with self._changed:
            if freshens and len(self._pending) >= _FRESHENING_MAX:
                return
            self._pending.pop(key, None)  # to be applied as the last one, not in the place of the earlier one
            self._pending[key] = _Pending(statement, parameters)
            if len(self._pending) == 1:
                self._changed.notify_all()

    def rows(self, query: str) -> list[Parameters]:
        """Return the result of a query, after any commit that is under way.

        Raises:
            sqlite3.Error: The file cannot be read.
        """
        with self._connection_in_use:
            return self._connection.execute(query).fetchall()

    def table(self, table: Table) -> list[Parameters]:
        """Return all readable rows of a table, after any commit that is under way. Meant for the start."""
        with self._connection_in_use:
            return list(readable_rows(self._connection, table))

    def flush(self) -> bool:
        """Have all pending statements committed, and wait for it; return False if that fails or takes too long."""
        with self._changed:
            target = self._rounds_wanted = self._rounds + 2  # the present round may have begun before
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: self._rounds >= target, _WAIT_S_MAX)
            return done and not self.problem

    def close(self) -> None:
        """Commit the pending statements, if the disk allows it, and release the file."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._writer.join(_WAIT_S_MAX)
        if self._writer.is_alive() or self._pending:
            log.warning("a file was closed before all was written", holds=self.form.title, path=str(self.path))

    def _write_behind(self) -> None:
        """Commit pending statements until the database is closed: the writer thread's main function.

        The connection is closed here, after the last round, because no other thread can be using it then.
        """
        is_last = False
        while not is_last:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._pending) or self._is_hurried())
                self._changed.wait_for(self._is_hurried, _RETRY_S if self.problem else COMMIT_S)
                is_last = self._closing
                batch, self._pending = self._pending, {}
            with self._connection_in_use:
                problem = self._commit(batch) if batch else self.problem
            self._note(problem)
            with self._changed:
                if problem:  # what was written meanwhile is newer
                    self._pending = {k: v for k, v in batch.items() if k not in self._pending} | self._pending
                self.problem = problem
                self._rounds += 1
                self._changed.notify_all()
        with suppress(sqlite3.Error):
            self._connection.close()

    def _is_hurried(self) -> bool:
        return self._closing or self._rounds_wanted > self._rounds

    def _commit(self, batch: dict[Hashable, _Pending]) -> str:
        """Apply the statements in one transaction; return why that failed, or "" if it did not."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for entry in batch.values():
                self._connection.execute(entry.statement, entry.parameters)
            self._connection.execute("COMMIT")
        except Exception as error:  # noqa: BLE001 (whatever it is, later statements wait for this thread)
            with suppress(*UNREADABLE):
                self._connection.execute("ROLLBACK")
            return str(error) or type(error).__name__
        return ""

    def _note(self, problem: str) -> None:
        """Log when commits begin to fail, and when they work again."""
        if problem and not self.problem:
            log.warning("a file cannot be written", holds=self.form.title, path=str(self.path), error=problem)
        elif self.problem and not problem:
            log.info("a file can be written again", holds=self.form.title, path=str(self.path))

    def _open(self, fingerprint: bytes) -> sqlite3.Connection:
        salvaged = Path(f"{self.path}.salvaged")
        if salvaged.exists() and not self.path.exists():  # a start that was interrupted between two renames
            os.replace(salvaged, self.path)
        try:
            return self._try_to_open(fingerprint)
        except _UnusableError as error:
            self.replaced = str(error)
            is_damaged = error.is_damaged
        try:
            if is_damaged:
                self._salvage(salvaged, fingerprint)
            else:
                aside = _moved_aside(self.path, "old")
                log.warning(
                    "a file that is not for us was moved aside; another one begins empty",
                    holds=self.form.title,
                    path=str(self.path),
                    aside=str(aside),
                    why=self.replaced,
                )
            return self._try_to_open(fingerprint)
        except (OSError, sqlite3.Error, _UnusableError) as error:
            raise DatabaseUnavailableError(
                f"{self.path} cannot be used ({self.replaced}), nor replaced: {error}"
            ) from error

    def _salvage(self, salvaged: Path, fingerprint: bytes) -> None:
        """Replace a damaged file by a new one with the rows that can still be read.

        If the process dies on the way, either the damaged file or the new one is there, complete.
        """
        for ending in ("", "-journal"):
            Path(f"{salvaged}{ending}").unlink(missing_ok=True)
        os.close(os.open(salvaged, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        with closing(sqlite3.connect(salvaged, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            _create(connection, fingerprint, self.form)
            found = save_rows(self.path, connection, self.form.tables, _first_page(self.form))
            connection.execute("COMMIT")
        aside = _moved_aside(self.path, "damaged")
        os.replace(salvaged, self.path)
        log.warning(
            "a damaged file was moved aside; what could be read of it was kept",
            holds=self.form.title,
            path=str(self.path),
            aside=str(aside),
            why=self.replaced,
            kept={name: rows.kept for name, rows in found.items()},
            lost={name: "unknown" if rows.lost is None else rows.lost for name, rows in found.items()},
        )

    def _try_to_open(self, fingerprint: bytes) -> sqlite3.Connection:
        """Open the file, or create it if it does not exist.

        Raises:
            _UnusableError: The file is damaged, or belongs to another program, version or configuration.
            DatabaseUnavailableError: No file can be opened or made at this path.
        """
        try:
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
            connection = sqlite3.connect(
                self.path, timeout=self._wait_s, isolation_level=None, check_same_thread=False
            )
        except (OSError, sqlite3.Error) as error:
            raise DatabaseUnavailableError(f"{self.path} cannot be opened: {error}") from error
        try:
            # Exclusive: no other process reads or writes the file while this one lives; the kernel then frees it.
            for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = NORMAL"):
                connection.execute(f"PRAGMA {pragma}")
            connection.execute("BEGIN IMMEDIATE")
            is_new = _pragma(connection, "schema_version") == 0 and _pragma(connection, "application_id") == 0
            if is_new:
                _create(connection, fingerprint, self.form)
            else:
                _check(connection, fingerprint, self.form)
            self.problem = _begin_boot(connection, is_new=is_new)
        except UNREADABLE as error:
            connection.close()
            raise _mapped(error, self.path) from error
        except _UnusableError:
            connection.close()
            raise
        return connection


def _begin_boot(connection: sqlite3.Connection, *, is_new: bool) -> str:
    """Count this opening in the file; return why it cannot be written (on a full disk), or "".

    Raises:
        sqlite3.Error: A new file cannot be written, or the old one is damaged.
    """
    try:
        connection.execute("UPDATE meta SET value = value + 1 WHERE key = 'boot'")
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        if is_new or _is_damage(error):
            raise
        with suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        return str(error)
    return ""


def _create(connection: sqlite3.Connection, fingerprint: bytes, form: Form) -> None:
    for statement in filter(str.strip, [_META, *form.schema.split(";")]):
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {form.version}")
    # Minutes since 1970: greater than all numbers of an earlier database that was lost.
    boot = int(time.time() // 60)
    connection.executemany("INSERT INTO meta VALUES (?, ?)", [("fingerprint", fingerprint), ("boot", boot)])


def _first_page(form: Form) -> bytes:
    """Return the first page of a new file of this kind."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        _create(connection, b"", form)
        size = _pragma(connection, "page_size")
        return connection.serialize()[:size]


def _check(connection: sqlite3.Connection, fingerprint: bytes, form: Form) -> None:
    """Check that the database is Trunkline's, of this version and configuration, and sound.

    Raises:
        _UnusableError: It is not.
    """
    if _pragma(connection, "application_id") != APPLICATION_ID:
        raise _UnusableError("it is some other program's database")
    if (version := _pragma(connection, "user_version")) != form.version:
        raise _UnusableError(f"its version is {version}, this program writes {form.version}")
    if (verdict := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
        raise _UnusableError(f"it is damaged: {verdict}", is_damaged=True)
    meta = dict(connection.execute("SELECT key, value FROM meta").fetchall())
    if meta.get("fingerprint") != fingerprint:
        raise _UnusableError("it is of another model, precision, chunk size or number of ranks")
    if not isinstance(meta.get("boot"), int):
        raise _UnusableError("it is damaged: its count of starts is missing", is_damaged=True)


def _moved_aside(path: Path, ending: str) -> Path:
    """Rename a file and its log to a name that no file has yet; return the new name."""
    aside = unused_name(path, ending)
    for part in ("-wal", ""):  # the file last: without it, its log is worth nothing
        if Path(f"{path}{part}").exists():
            os.replace(f"{path}{part}", f"{aside}{part}")
    for part in ("-shm", "-journal"):
        Path(f"{path}{part}").unlink(missing_ok=True)
    return aside


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def _mapped(error: Exception, path: Path) -> Exception:
    """Return the exception of this module that stands for an error at opening the file."""
    primary = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return DatabaseInUseError(f"{path} is in use by another process")
    if _is_damage(error):
        return _UnusableError(f"it is damaged: {error}", is_damaged=True)
    return DatabaseUnavailableError(f"{path} cannot be used: {error}")


def _is_damage(error: Exception) -> bool:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    return code & 0xFF in _DAMAGE or code in _UNREADABLE
