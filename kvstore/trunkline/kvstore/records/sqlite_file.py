"""Open the file of a record store, which the routers of a host share.

    PATH          the database, with PATH-wal and PATH-shm
    PATH.lock     held by flock: shared while the file is open, exclusively while it is made or repaired
    PATH.damage   a process has met damage: all close the file, and the first one that has it alone repairs it

A damaged file is read as far as possible (`sqlite_salvage.py`) and kept beside the new one.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

import structlog

from trunkline.kvstore.records.sqlite_salvage import is_damage, put_aside, salvage
from trunkline.kvstore.records.sqlite_segments import DamagedError
from trunkline.kvstore.records.sqlite_tables import APPLICATION_ID, VERSION, create_tables
from trunkline.kvstore.salvage import UNREADABLE

MEMORY: Final = ":memory:"
CHECKED_BYTES_MAX: Final = 64 << 20
"""A file up to this size is checked whole when it is opened; a larger one when a query meets damage, because
reading it whole would delay the start by seconds."""
_PRAGMAS: Final = (
    "busy_timeout = 0",
    "journal_mode = WAL",
    "synchronous = NORMAL",
    "cache_size = -16384",
    "journal_size_limit = 67108864",
    "temp_store = MEMORY",
)

log = structlog.get_logger()


class FileError(Exception):
    """The file cannot be used; the message says why."""


class FileBusyError(FileError):
    """Another process makes or repairs the file at the moment."""


class OpenFile:
    """An open database, and the lock that says so to other processes."""

    def __init__(self, path: str) -> None:
        """Open the database at `path`; create or repair it if that is necessary.

        Raises:
            FileError: The file cannot be used.
            sqlite3.Error: Likewise.
        """
        self._path = Path(path)
        self._is_file = path != MEMORY
        self._marker = Path(f"{path}.damage")
        self._lock = -1
        self._identity: tuple[int, int] | None = None
        if not self._is_file:
            self.connection = sqlite3.connect(MEMORY, isolation_level=None)
            create_tables(self.connection)
            return
        try:
            self._lock = self._locked()
            if not self._path.exists():  # deleted while others have it open
                raise FileBusyError(f"{self._path} was deleted; other processes are still closing it")
            self._identity = _identity(self._path)
            self.connection = _connected(self._path)
        except OSError as error:
            self._unlock()
            raise FileError(f"{path}: {error.strerror or error}") from error
        except (FileError, *UNREADABLE) as error:
            self._unlock()
            if is_damage(error):  # it was not repaired, so other processes have it open
                self.report_damage()
                raise FileBusyError(f"{path} is damaged; other processes are still closing it") from error
            raise

    def is_current(self) -> bool:
        """Return whether the file can still be used: whether it is still at its path, and no process has met
        damage."""
        return not self._is_file or (_identity(self._path) == self._identity and not self._marker.exists())

    def report_damage(self) -> None:
        """Have all processes close the file, so that the first one that has it alone repairs it."""
        with suppress(OSError):
            self._marker.touch(0o600)

    def close(self) -> None:
        """Close the file."""
        with suppress(sqlite3.Error):
            self.connection.close()
        self._unlock()

    def _locked(self) -> int:
        """Make or repair the file if no other process has it open; then take the shared lock, and return it."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(f"{self._path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if self._marker.exists():
                    raise FileBusyError(f"{self._path} is damaged; other processes are still closing it") from None
            else:
                _prepare(self._path, was_damaged=self._marker.exists())
                self._marker.unlink(missing_ok=True)
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FileBusyError(f"{self._path} is being made or repaired by another process") from None
        except BaseException:
            os.close(lock)
            raise
        return lock

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _prepare(path: Path, *, was_damaged: bool) -> None:
    """Create the file if it does not exist, and repair it if it is damaged. No other process has it open.

    Raises:
        FileError: The file is of another program or of a later version.
    """
    salvaged = Path(f"{path}.salvaged")
    if salvaged.exists() and not path.exists():  # a repair that ended between two renames
        os.replace(salvaged, path)
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    try:
        with closing(_connected(path)) as connection:
            if _pragma(connection, "schema_version") == 0:
                connection.execute("BEGIN IMMEDIATE")
                create_tables(connection)
                connection.execute("COMMIT")
            if was_damaged:
                raise DamagedError("a query met damage")
            if path.stat().st_size <= CHECKED_BYTES_MAX:
                verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
                if verdict != "ok":
                    raise DamagedError(verdict)
        return
    except UNREADABLE as error:
        if not is_damage(error):
            raise
        why = str(error)
    found = salvage(path, salvaged)
    aside = put_aside(path)
    os.replace(salvaged, path)
    log.warning(
        "a damaged file of records was put aside; what could be read of it was kept",
        path=str(path),
        aside=str(aside),
        why=why,
        kept=found.kept,
        lost="unknown" if found.lost is None else found.lost,
    )


def _connected(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, cached_statements=256)
    try:
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")
        if _pragma(connection, "schema_version") or _pragma(connection, "application_id"):
            _check_format(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _check_format(connection: sqlite3.Connection, path: Path) -> None:
    """Check that a file is Trunkline's, and of this version.

    Raises:
        FileError: It is not.
    """
    if _pragma(connection, "application_id") != APPLICATION_ID:
        raise FileError(f"{path} is some other program's database")
    version = _pragma(connection, "user_version")
    if version > VERSION:
        raise FileError(
            f"{path} was written by a later version of Trunkline (format {version}; this one reads {VERSION})"
        )


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
