"""The thread that works on an SQLite file for an event loop.

    loop ──submit──► reads  ──► one read transaction for all that wait
                 └─► writes ──► one write transaction for all that wait, each operation in a savepoint

Readers never wait for a writer of another process. Writers of several processes take turns: while the file is
busy, operations wait for their patience, and those that only read go on.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

import structlog

from trunkline.kvstore.records.sqlite_file import FileBusyError, FileError, OpenFile
from trunkline.kvstore.records.sqlite_salvage import is_damage
from trunkline.kvstore.records.sqlite_tables import NeedsWriteError, RecordTables
from trunkline.kvstore.records.store import StoreAwayError
from trunkline.kvstore.salvage import UNREADABLE

BATCH_MAX: Final = 128
"""Operations in a transaction: others wait for the file no longer than these take."""
PAUSE_S_MIN: Final = 0.0005
PAUSE_S_MAX: Final = 0.02
"""Time between two attempts at a busy file."""
OPENING_REST: Final = 10.0
"""If opening the file fails, it is not tried again for this many times as long as that took: it may have been the
repair of a large file, for which the disk has no room."""
_BUSY: Final = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_AT_WRITING: Final = (sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_TRUNCATE)
"""Error codes of a disk that takes no more, for example because of a quota."""
_WRONG_USE: Final = (sqlite3.InterfaceError, sqlite3.ProgrammingError)
"""Exceptions for arguments of a wrong type."""

T = TypeVar("T")

log = structlog.get_logger()


class _Operation:
    """An operation, and the future that waits for its result."""

    def __init__(self, run: Callable[[RecordTables], Any], patience_s: float, *, writes: bool) -> None:
        self.run = run
        self.writes = writes
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self.deadline = time.monotonic() + patience_s
        self.result: Any = None
        self.error: Exception | None = None

    def deliver(self) -> None:
        """Give the result to the future, in its loop."""
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


class SqliteThread:
    """The thread and its queue. It begins with the first operation, and opens the file then."""

    def __init__(self, opened: Callable[[], tuple[OpenFile, RecordTables]], path: str, patience_s: float) -> None:
        """
        Args:
            opened: Opens the file.
            path: The file's path, for messages.
            patience_s: For how many seconds an operation waits for a busy file.
        """
        self._open = opened
        self._path = path
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._reads: list[_Operation] = []
        self._writes: list[_Operation] = []
        self._is_closing = False
        self._pause_s = 0.0
        self._file: OpenFile | None = None
        self._tables: RecordTables | None = None
        self._closed_until = 0.0
        """When opening the file is tried again, by the monotonic clock."""
        self._why_closed = ""
        self._problem = ""
        self._thread: threading.Thread | None = None

    async def carry_out(self, run: Callable[[RecordTables], T], *, writes: bool) -> T:
        """Carry out an operation in a transaction. `run` may be called several times; the last call counts.

        Raises:
            StoreAwayError: The file could not be used; nothing was changed.
        """
        operation = _Operation(run, self._patience_s, writes=writes)
        with self._changed:
            if self._is_closing:
                raise StoreAwayError("the record store is closed")
            if self._thread is None:
                thread = threading.Thread(target=self._main, name="records", daemon=True)
                thread.start()  # fails if the system has no room for threads; the next operation tries again
                self._thread = thread
            (self._writes if writes else self._reads).append(operation)
            self._changed.notify()
        result: T = await operation.future
        return result

    async def close(self) -> None:
        """Finish what has begun, and close the file."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _main(self) -> None:
        while True:
            with self._changed:
                if self._pause_s:
                    self._changed.wait(self._pause_s)
                self._changed.wait_for(lambda: self._reads or self._writes or self._is_closing)
                if not self._reads and not self._writes:
                    break
                reads, self._reads = self._reads[:BATCH_MAX], self._reads[BATCH_MAX:]
            self._take_turns(reads)
        self._disconnect()

    def _take_turns(self, reads: list[_Operation]) -> None:
        """Carry out reads, then the writes that wait by then."""
        was_busy = self._carry_out(reads, writes=False)
        with self._changed:
            writes, self._writes = self._writes[:BATCH_MAX], self._writes[BATCH_MAX:]
        was_busy |= self._carry_out(writes, writes=True)
        self._pause_s = min(PAUSE_S_MAX, max(PAUSE_S_MIN, 2 * self._pause_s)) if was_busy else 0.0

    def _carry_out(self, operations: list[_Operation], *, writes: bool) -> bool:
        """Carry out operations in one transaction; return whether the file was busy, so that they wait again."""
        operations = [each for each in operations if not each.future.cancelled()]
        if not operations:
            return False
        try:
            self._transact(operations, writes=writes)
        except FileBusyError as error:
            return self._put_off(operations, error, writes=writes)
        except FileError as error:
            self._fail(operations, error)
            return False
        except UNREADABLE as error:
            if _primary_code(error) in _BUSY:
                return self._put_off(operations, error, writes=writes)
            return self._without(operations, error, writes=writes)
        except Exception as error:  # whatever it is, the thread goes on, for which all operations wait
            log.error("records cannot be used", path=self._path, error=str(error), exc_info=True)
            self._disconnect()
            self._fail(operations, error)
            return False
        if writes:
            self._note("")
        wanting = [each for each in operations if isinstance(each.error, NeedsWriteError)]
        with self._changed:
            self._writes[:0] = wanting
        _deliver([each for each in operations if not isinstance(each.error, NeedsWriteError)])
        return False

    def _transact(self, operations: list[_Operation], *, writes: bool, notes_uses: bool = True) -> None:
        tables = self._connected()
        connection = tables.connection
        try:
            connection.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
            tables.may_write, tables.notes_uses = writes, notes_uses
            for operation in operations:
                self._attempt(tables, operation)
            connection.execute("COMMIT")
        except UNREADABLE:
            if connection.in_transaction:
                with suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
            raise

    def _attempt(self, tables: RecordTables, operation: _Operation) -> None:
        """Carry out an operation; one that is refused changes nothing."""
        connection = tables.connection
        operation.error = None
        if tables.may_write:
            connection.execute("SAVEPOINT operation")
        try:
            operation.result = operation.run(tables)
        except UNREADABLE as error:
            if not isinstance(error, _WRONG_USE):
                raise
            operation.error = error
        except Exception as error:  # noqa: BLE001 (raised again where the operation was called)
            operation.error = error
        if tables.may_write:
            if operation.error is not None:
                connection.execute("ROLLBACK TO operation")
            connection.execute("RELEASE operation")

    def _without(self, operations: list[_Operation], error: Exception, *, writes: bool) -> bool:
        """Carry out operations of a transaction that has failed, each by itself: one for which there is no room
        must not make others fail. Return whether the file was busy."""
        if self._file is not None and is_damage(error):
            self._file.report_damage()
            self._disconnect()
            return self._put_off(operations, error, writes=writes)
        if _primary_code(error) == sqlite3.SQLITE_IOERR and not (writes and _is_about_writing(error)):
            self._disconnect()
        if len(operations) > 1:
            return sum(self._carry_out([each], writes=writes) for each in operations) > 0
        self._give_up(operations[0], error, writes=writes)
        return False

    def _put_off(self, operations: list[_Operation], error: Exception, *, writes: bool) -> bool:
        """Let operations wait for their next turn, but for those whose patience is over."""
        now = time.monotonic()
        with self._changed:
            (self._writes if writes else self._reads)[:0] = [each for each in operations if each.deadline > now]
        for each in operations:
            if each.deadline <= now:
                self._give_up(each, error, writes=writes)
        return True

    def _give_up(self, operation: _Operation, error: Exception, *, writes: bool) -> None:
        """Let an operation fail; but if it reads, and only the time of use was to be written, leave that out."""
        if writes:
            self._note(str(error))
        if writes and not operation.writes:
            with suppress(*UNREADABLE, FileError):
                self._transact([operation], writes=False, notes_uses=False)
                if not isinstance(operation.error, NeedsWriteError):
                    _deliver([operation])
                    return
        self._fail([operation], error)

    def _fail(self, operations: list[_Operation], error: Exception) -> None:
        for each in operations:
            each.error = StoreAwayError(f"records cannot be used: {error}")
            each.error.__cause__ = error
        _deliver(operations)

    def _connected(self) -> RecordTables:
        if self._file is not None and not self._file.is_current():
            self._disconnect()
        if self._tables is None:
            self._file, self._tables = self._opened()
        return self._tables

    def _opened(self) -> tuple[OpenFile, RecordTables]:
        began = time.monotonic()
        if began < self._closed_until:
            raise FileError(self._why_closed)
        try:
            return self._open()
        except FileBusyError:
            raise
        except (FileError, *UNREADABLE) as error:
            if _primary_code(error) not in _BUSY:
                now = time.monotonic()
                self._closed_until, self._why_closed = now + OPENING_REST * (now - began), str(error)
            raise

    def _disconnect(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = self._tables = None

    def _note(self, problem: str) -> None:
        """Log when the file cannot be written any more, and when it can again."""
        if problem and not self._problem:
            log.warning("records cannot be written", path=self._path, error=problem)
        elif self._problem and not problem:
            log.info("records can be written again", path=self._path)
        self._problem = problem


def _primary_code(error: Exception) -> int:
    """Return SQLite's error code without its details; 0 if there is none."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _is_about_writing(error: Exception) -> bool:
    """Return whether an I/O error leaves the file readable. To open it again would take room on the disk."""
    return getattr(error, "sqlite_errorcode", 0) in _AT_WRITING


def _deliver(operations: list[_Operation]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[_Operation]] = {}
    for each in operations:
        by_loop.setdefault(each.loop, []).append(each)
    for loop, done in by_loop.items():
        with suppress(RuntimeError):  # the loop has ended, and with it who waits
            loop.call_soon_threadsafe(_deliver_here, done)


def _deliver_here(operations: list[_Operation]) -> None:
    for each in operations:
        each.deliver()
