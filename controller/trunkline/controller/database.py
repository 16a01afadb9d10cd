"""The controller's file: one SQLite database, read at the start, then written behind the loop's back.

    loop ──write(key, statement)──► pending {key: statement} ──every 50 ms──► one transaction (writer thread)

The loop never waits for the disk. What it writes goes into a dictionary in which a later statement of the same
key replaces the earlier one, so that a disk that stalls or is full makes it no longer than there are slots and
records; statements are applied in the order in which each key was written last. What fails is tried again.

The database is a memory of what may be found, never a proof: every slot of the disk tier says itself what it
holds. So losing the last moments at `kill -9` (what had not been committed; WAL keeps the rest whole) costs cached
KV, not correctness; what somebody has been told of is in the file (`hurry`). A database that is damaged, or of
another configuration, is moved aside for an empty one.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import structlog

COMMIT_S: Final = 0.05
"""Statements of so long a time are committed together: one commit costs as much as a thousand rows."""
_RETRY_S: Final = 1.0
"""After a failed commit."""
_FRESHENING_MAX: Final = 1 << 16
"""With so many statements pending, those that only freshen a row are left out."""
_WAIT_S_MAX: Final = 5.0
"""Nobody waits longer for a disk that does not answer, or for another process."""

APPLICATION_ID: Final = 0x54726B6C
""""Trkl" in the file's header: no other program's database is taken for ours."""
SCHEMA_VERSION: Final = 1
_SCHEMA: Final = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE roots (name BLOB PRIMARY KEY, key BLOB NOT NULL, digest BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE chunks (
    slot INTEGER PRIMARY KEY, generation INTEGER NOT NULL, name BLOB NOT NULL UNIQUE, parent BLOB NOT NULL,
    tokens BLOB NOT NULL, digest BLOB NOT NULL, last_use REAL NOT NULL, expires REAL NOT NULL
);
CREATE TABLE records (
    kind TEXT NOT NULL, id TEXT NOT NULL, version INTEGER NOT NULL, value BLOB NOT NULL, digest BLOB NOT NULL,
    created REAL NOT NULL, used REAL NOT NULL, ttl REAL NOT NULL, PRIMARY KEY (kind, id)
);
"""
_DAMAGE: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_ERROR)
"""Error codes that another, empty file would not give; the last: a table is not as it should be."""

log = structlog.get_logger()

Parameters = tuple[Any, ...]


class DatabaseUnavailableError(RuntimeError):
    """The file cannot be used at all: its folder is missing or read-only, or another process has it."""


class _UnusableError(Exception):
    """What is there cannot be gone on with; the message says why."""


class Database:
    """The open file and its writer thread. Its methods are for the thread that opened it."""

    def __init__(self, path: Path, fingerprint: bytes, wait_s: float = _WAIT_S_MAX) -> None:
        """Open `path`, or put an empty database there.

        Args:
            path: of the SQLite file; its folder exists.
            fingerprint: of the disk tier (`trunkline.kvstore.fingerprint`); a database of another is not read.
            wait_s: for a process that still has the file, such as one that is just ending.

        Raises:
            DatabaseUnavailableError: there is no way to have a database there, or another process has it.
        """
        self.path = path
        self.problem = ""
        """Why the last commit failed; what it had is kept and tried again."""
        self.replaced = ""
        """Why what was there was moved aside; "" if nothing was."""
        self._wait_s = wait_s
        self._connection = self._open(fingerprint)
        self.boot: int = self._connection.execute("SELECT value FROM meta WHERE key = 'boot'").fetchone()[0]
        """Grows with each opening, also where the file was lost in between."""
        self._connection_in_use = threading.Lock()
        self._pending: dict[Hashable, tuple[str, Parameters]] = {}
        self._changed = threading.Condition()
        self.rounds = 0
        """Of the writer, that are over …"""
        self._rounds_wanted = 0
        """… and for which somebody waits."""
        self.on_round: Callable[[], None] = lambda: None
        """Called by the writer thread after a round that somebody waits for."""
        self._closing = False
        self._writer = threading.Thread(target=self._write_behind, name="database", daemon=True)
        self._writer.start()

    def write(self, key: Hashable, statement: str, parameters: Parameters, *, freshens: bool = False) -> None:
        """Have `statement` committed soon, instead of whatever `key` still has pending.

        Args:
            key: what the statement is about: it makes all needless that were written under the same key before.
            freshens: it may be left out if too much is pending.
        """
        with self._changed:
            if freshens and len(self._pending) >= _FRESHENING_MAX:
                return
            self._pending.pop(key, None)
            self._pending[key] = statement, parameters
            if len(self._pending) == 1:
                self._changed.notify_all()

    def rows(self, query: str) -> list[Parameters]:
        """The result of a query, after a commit that is under way: for the start.

        What cannot be read counts as empty: cached KV is lost, nothing else.
        """
        try:
            with self._connection_in_use:
                return self._connection.execute(query).fetchall()
        except sqlite3.Error as error:
            log.warning("part of the index cannot be read and starts empty", path=str(self.path), error=str(error))
            return []

    def hurry(self) -> int:
        """Have what was written committed at once; the value of `rounds` from which on that was done, or has
        failed."""
        with self._changed:
            self._rounds_wanted = self.rounds + 2  # the present round may have begun before
            self._changed.notify_all()
            return self._rounds_wanted

    def flush(self) -> bool:
        """Wait until all that was written is committed; False: it cannot be, or the disk takes too long."""
        with self._changed:
            target = self.hurry()
            done = self._changed.wait_for(lambda: self.rounds >= target, _WAIT_S_MAX)
            return done and not self.problem

    def close(self) -> None:
        """Commit what is pending, if the disk lets us, and release the file."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._writer.join(_WAIT_S_MAX)
        if self._writer.is_alive() or self._pending:
            log.warning("the index was closed before all of it was written", path=str(self.path))

    def _write_behind(self) -> None:
        """The writer thread. After the last round the connection is closed here, for only here it is in use."""
        is_last = False
        while not is_last:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._pending) or self._is_hurried())
                self._changed.wait_for(self._is_hurried, _RETRY_S if self.problem else COMMIT_S)
                is_last = self._closing
                batch, self._pending = self._pending, {}
            with self._connection_in_use:
                problem = self._commit(batch) if batch else self.problem
            with self._changed:
                if problem:  # what was written meanwhile is newer
                    self._pending = {k: v for k, v in batch.items() if k not in self._pending} | self._pending
                self.problem = problem
                is_wanted = self._rounds_wanted > self.rounds
                self.rounds += 1
                self._changed.notify_all()
            if is_wanted:
                self.on_round()
        with suppress(sqlite3.Error):
            self._connection.close()

    def _is_hurried(self) -> bool:
        return self._closing or self._rounds_wanted > self.rounds

    def _commit(self, batch: dict[Hashable, tuple[str, Parameters]]) -> str:
        """One transaction; why it failed, if it did."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for statement, parameters in batch.values():
                self._connection.execute(statement, parameters)
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            with suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            if not self.problem:
                log.warning(
                    "the index cannot be written; a restart would find less", path=str(self.path), error=str(error)
                )
            return str(error)
        if self.problem:
            log.info("the index can be written again", path=str(self.path))
        return ""

    def _open(self, fingerprint: bytes) -> sqlite3.Connection:
        try:
            return self._try_to_open(fingerprint)
        except _UnusableError as error:
            self.replaced = str(error)
            log.warning("the index starts empty; the old one was moved aside", path=str(self.path), why=str(error))
        try:
            os.replace(self.path, f"{self.path}.old")
            for ending in ("-wal", "-shm", "-journal"):
                Path(f"{self.path}{ending}").unlink(missing_ok=True)
            return self._try_to_open(fingerprint)
        except (OSError, _UnusableError) as error:
            raise DatabaseUnavailableError(f"{self.path} cannot be replaced by an empty index: {error}") from error

    def _try_to_open(self, fingerprint: bytes) -> sqlite3.Connection:
        """
        Raises:
            _UnusableError: what is there is damaged, or not for us.
            DatabaseUnavailableError: nothing could be there.
        """
        try:
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
            connection = sqlite3.connect(
                self.path, timeout=self._wait_s, isolation_level=None, check_same_thread=False
            )
        except (OSError, sqlite3.Error) as error:
            raise DatabaseUnavailableError(f"the index {self.path} cannot be opened: {error}") from error
        try:
            # Exclusive: nobody else reads or writes it while we live; the kernel ends that with the process.
            for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = NORMAL"):
                connection.execute(f"PRAGMA {pragma}")
            connection.execute("BEGIN IMMEDIATE")
            if _pragma(connection, "schema_version") == 0 and _pragma(connection, "application_id") == 0:
                _create(connection, fingerprint)
            else:
                _check(connection, fingerprint)
            connection.execute("UPDATE meta SET value = value + 1 WHERE key = 'boot'")
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            connection.close()
            raise _mapped(error, self.path) from error
        except _UnusableError:
            connection.close()
            raise
        return connection


def _create(connection: sqlite3.Connection, fingerprint: bytes) -> None:
    for statement in filter(str.strip, _SCHEMA.split(";")):
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    # Minutes since 1970: above all numbers of a database that was here before and got lost.
    boot = int(time.time() // 60)
    connection.executemany("INSERT INTO meta VALUES (?, ?)", [("fingerprint", fingerprint), ("boot", boot)])


def _check(connection: sqlite3.Connection, fingerprint: bytes) -> None:
    """
    Raises:
        _UnusableError: the database is not ours, of another version or of another configuration, or damaged.
    """
    if _pragma(connection, "application_id") != APPLICATION_ID:
        raise _UnusableError("it is some other program's database")
    if (version := _pragma(connection, "user_version")) != SCHEMA_VERSION:
        raise _UnusableError(f"its version is {version}, this program writes {SCHEMA_VERSION}")
    if (verdict := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
        raise _UnusableError(f"it is damaged: {verdict}")
    meta = dict(connection.execute("SELECT key, value FROM meta").fetchall())
    if meta.get("fingerprint") != fingerprint:
        raise _UnusableError("it is of another model, precision, chunk size or number of ranks")
    if not isinstance(meta.get("boot"), int):
        raise _UnusableError("it is damaged: its count of starts is missing")


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def _mapped(error: sqlite3.Error, path: Path) -> Exception:
    """What an error at the opening means."""
    primary = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return DatabaseUnavailableError(f"the index {path} is in use by another process")
    if primary in _DAMAGE:
        return _UnusableError(f"it is damaged: {error}")
    return DatabaseUnavailableError(f"the index {path} cannot be used: {error}")
