"""A file of the controller's: an SQLite database, read at the start, then written by a thread of its own.

    loop ──write(key, statement)───► pending {key: statement} ──every 50 ms──► one transaction (writer thread)
         ──commit(key, statement)──► the same, at once; its `Outcome` says what became of it

The loop never waits for the disk. What it writes goes into a dictionary in which a later statement of the same
key replaces the earlier one, so that a disk that stalls or is full makes it no longer than there are slots and
records; statements are applied in the order in which each key was written last. What fails is tried again, but for
what was to be committed: that was made, or it was not, and the caller is told.

There are two such files: the index of the disk tier (`tier_index.py`), which only says what may be found, because
every slot says itself what it holds, and the records (`records.py`), which cannot be made again. So a damaged file
is read as far as possible (`salvage.py`), and nothing that was there before is deleted: it is moved aside.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import structlog

from trunkline.controller.storage.salvage import UNREADABLE, Table, readable_rows, save_rows

COMMIT_S: Final = 0.05
"""Statements of so long a time are committed together: one commit costs as much as a thousand rows."""
_RETRY_S: Final = 1.0
"""After a failed commit."""
_FRESHENING_MAX: Final = 1 << 16
"""With so many statements pending, those that only freshen a row are left out."""
_WAIT_S_MAX: Final = 5.0
"""The longest wait for a disk that does not answer, or for another process."""

APPLICATION_ID: Final = 0x54726B6C
""""Trkl" in the file's header: no other program's database is taken for ours."""
_META: Final = "CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID"
_DAMAGE: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
"""Error codes that another, empty file would not give; the last: a table is not as it should be."""
_UNREADABLE: Final = (sqlite3.SQLITE_IOERR_READ, sqlite3.SQLITE_IOERR_SHORT_READ, sqlite3.SQLITE_IOERR_CORRUPTFS)
"""Error codes of reading. Other I/O errors are of writing: the file's contents can still be read."""

log = structlog.get_logger()

Parameters = tuple[Any, ...]


class Form(NamedTuple):
    """What a file of ours holds."""

    title: str
    """For messages: what it holds."""
    version: int
    """In the file's header. A file of another version is moved aside."""
    schema: str
    """Statements that make its tables, but for `meta`."""
    tables: tuple[Table, ...]
    """What is saved of a damaged file."""


class Outcome:
    """What became of a statement that was to be committed. Written by the writer thread."""

    def __init__(self) -> None:
        self.is_known = False
        self.problem = ""
        """Why it is not in the file, and will not be; "": it is."""


class _Pending(NamedTuple):
    """A statement that is not in the file yet."""

    statement: str
    parameters: Parameters
    outcome: Outcome | None
    """None: no caller waits for it."""


class DatabaseUnavailableError(RuntimeError):
    """The file cannot be used at all: its folder is missing or read-only, or another process has it."""


class _UnusableError(Exception):
    """What is there cannot be gone on with; the message says why."""

    def __init__(self, why: str, *, is_damaged: bool = False) -> None:
        super().__init__(why)
        self.is_damaged = is_damaged


class Database:
    """The open file and its writer thread. Its methods are for the thread that opened it."""

    def __init__(self, path: Path, fingerprint: bytes, form: Form, wait_s: float = _WAIT_S_MAX) -> None:
        """Open `path`, or put an empty database there.

        Args:
            path: of the SQLite file; its folder exists.
            fingerprint: what the content belongs to, such as the disk tier's (`trunkline.kvstore.fingerprint`); a
                database of another is not read.
            wait_s: for a process that still has the file, such as one that is just ending.

        Raises:
            DatabaseUnavailableError: there is no way to have a database there, or another process has it.
        """
        self.path = path
        self.form = form
        self.problem = ""
        """Why the last commit failed; what it had is kept and tried again."""
        self.replaced = ""
        """Why what was there was moved aside; "" if nothing was."""
        self._wait_s = wait_s
        self._connection = self._open(fingerprint)
        self._connection_in_use = threading.Lock()
        self._pending: dict[Hashable, _Pending] = {}
        self._changed = threading.Condition()  # of an RLock: may be taken again
        self.rounds = 0
        """Of the writer, that are over …"""
        self._rounds_wanted = 0
        """… and for which somebody waits."""
        self.on_round: Callable[[], None] = lambda: None
        """Called by the writer thread after a round that a caller waits for."""
        self._closing = False
        self.boot: int = self._connection.execute("SELECT value FROM meta WHERE key = 'boot'").fetchone()[0]
        """Grows with each opening, also where the file was lost in between."""
        if self.problem:  # the file can still be read
            log.warning("a file cannot be written", holds=form.title, path=str(path), error=self.problem)
            self.boot += 1
            self.write("boot", "UPDATE meta SET value = ? WHERE key = 'boot'", (self.boot,))
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
            self._put(key, _Pending(statement, parameters, None))

    def commit(self, key: Hashable, statement: str, parameters: Parameters) -> Outcome:
        """As `write`, but at once, and not tried again if it fails."""
        outcome = Outcome()
        with self._changed:
            self._put(key, _Pending(statement, parameters, outcome))
            self.hurry()
        return outcome

    def _put(self, key: Hashable, entry: _Pending) -> None:
        replaced = self._pending.pop(key, None)
        if replaced is not None and replaced.outcome is not None:
            replaced.outcome.is_known = True
        self._pending[key] = entry
        if len(self._pending) == 1:
            self._changed.notify_all()

    def rows(self, query: str) -> list[Parameters]:
        """The result of a query, after a commit that is under way.

        Raises:
            sqlite3.Error: it cannot be read.
        """
        with self._connection_in_use:
            return self._connection.execute(query).fetchall()

    def table(self, table: Table) -> list[Parameters]:
        """All rows of a table that can be read, after a commit that is under way: for the start."""
        with self._connection_in_use:
            return list(readable_rows(self._connection, table))

    def import_rows(self, table: Table, rows: list[Parameters]) -> None:
        """Add rows that are not there yet, in one transaction, at once: for the start.

        Raises:
            sqlite3.Error: they cannot be written.
        """
        marks = ", ".join("?" * (table.columns.count(",") + 1))
        statement = f"INSERT OR IGNORE INTO {table.name} ({table.columns}) VALUES ({marks})"
        with self._connection_in_use, self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany(statement, rows)

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
            log.warning("a file was closed before all was written", holds=self.form.title, path=str(self.path))

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
                problems = self._commit_each(batch, problem)
            self._note(problem)
            with self._changed:
                for key, failure in problems.items():
                    _tell(batch.pop(key).outcome, failure)
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

    def _commit(self, batch: dict[Hashable, _Pending]) -> str:
        """One transaction; why it failed, if it did."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for entry in batch.values():
                self._connection.execute(entry.statement, entry.parameters)
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            with suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            return str(error)
        return ""

    def _commit_each(self, batch: dict[Hashable, _Pending], problem: str) -> dict[Hashable, str]:
        """Return why each statement that a caller waits for is not in the file ("": it is), by key. After a batch
        that failed (`problem`) each is tried alone: a large one without room must not take small ones with it."""
        waited = [key for key, entry in batch.items() if entry.outcome is not None]
        if not problem or len(batch) == 1:
            return dict.fromkeys(waited, problem)
        return {key: self._commit({key: batch[key]}) for key in waited}

    def _note(self, problem: str) -> None:
        """Tell a person when it begins to fail, and when that is over."""
        with suppress(OSError):  # the log may be on the same disk
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
        """Put what can be read of a damaged file in its place. At every moment one of the two is whole."""
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
            raise DatabaseUnavailableError(f"{self.path} cannot be opened: {error}") from error
        try:
            # Exclusive: nobody else reads or writes it while we live; the kernel ends that with the process.
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
    """Count this opening, and commit; why that is not possible on a full disk, which can still be read.

    Raises:
        sqlite3.Error: a new file cannot be written, or the old one is damaged.
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
    # Minutes since 1970: above all numbers of a database that was here before and got lost.
    boot = int(time.time() // 60)
    connection.executemany("INSERT INTO meta VALUES (?, ?)", [("fingerprint", fingerprint), ("boot", boot)])


def _first_page(form: Form) -> bytes:
    """Of a new file."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        _create(connection, b"", form)
        size = _pragma(connection, "page_size")
        return connection.serialize()[:size]


def _check(connection: sqlite3.Connection, fingerprint: bytes, form: Form) -> None:
    """
    Raises:
        _UnusableError: the database is not ours, of another version or of another configuration, or damaged.
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


def _tell(outcome: Outcome | None, problem: str) -> None:
    if outcome is not None:
        outcome.problem = problem
        outcome.is_known = True


def _moved_aside(path: Path, ending: str) -> Path:
    """Give a file (and its log) another name, at which nothing is yet; the name."""
    number, aside = 1, Path(f"{path}.{ending}")
    while aside.exists():
        number += 1
        aside = Path(f"{path}.{ending}-{number}")
    for part in ("-wal", ""):  # the file last: without it, its log is worth nothing
        if Path(f"{path}{part}").exists():
            os.replace(f"{path}{part}", f"{aside}{part}")
    for part in ("-shm", "-journal"):
        Path(f"{path}{part}").unlink(missing_ok=True)
    return aside


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def _mapped(error: Exception, path: Path) -> Exception:
    """What an error at the opening means."""
    primary = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return DatabaseUnavailableError(f"{path} is in use by another process")
    if _is_damage(error):
        return _UnusableError(f"it is damaged: {error}", is_damaged=True)
    return DatabaseUnavailableError(f"{path} cannot be used: {error}")


def _is_damage(error: Exception) -> bool:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    return code & 0xFF in _DAMAGE or code in _UNREADABLE
