"""The lease of a stored session: what a request may do to it, and how changes are stored.

    acquired ─► (undo the last turn) ─► a turn ─► put: the session's new segment, the lease ends
        └─────── renewed three times in its duration ───────┘        the router dies: it ends by itself

A store may lose its last changes, as Redis does when it crashes. If that is seen when a turn is stored, the whole
session is written anew: the turn's tokens are generated already, and its client is told that they are stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Final, TypeVar

import structlog

from trunkline.kvstore.records import (
    BaseMissingError,
    Change,
    ConflictError,
    MissingError,
    Record,
    RecordError,
    RecordKey,
    RecordStore,
    StoreAwayError,
    chain_of,
)
from trunkline.router.stores.history_kinds import HistoryKind
from trunkline.router.stores.session_changes import change_between, read_segments, segments_of
from trunkline.router.stores.session_history import History
from trunkline.router.stores.session_memory import Base, SessionMemory, StoredSession
from trunkline.router.stores.session_state import LastTurn, pack_header

LEASE_SECONDS: Final = 10.0
"""Duration of a lease in seconds, which is also the longest time that a session stays busy after its router has
died."""
_RENEWALS: Final = 3
"""Number of renewals during one lease, so that two of them may fail."""
_log = structlog.get_logger("trunkline.router.stores.sessions")
_T = TypeVar("_T")


class Background:
    """Work that goes on although the request that began it is over."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Start work. Its errors go to the callers that wait for it, if there are any."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()


class Lease:
    """An acquired session. Call `close` at the end in any case."""

    def __init__(
        self,
        kind: HistoryKind,
        records: RecordStore,
        background: Background,
        memory: SessionMemory,
        stored: StoredSession,
        token: str,
    ) -> None:
        """
        Args:
            background: ends the lease after the request.
            memory: remembers the session when it is stored.
            stored: the session as it was acquired, a moment ago.
            token: the lease's token.
        """
        self.session = stored.session
        """The session as it was acquired; only `put` stores changes."""
        self._kind = kind
        self._records = records
        self._background = background
        self._memory = memory
        self._record = stored.record
        self._token = token
        self._base = stored.record.head
        self._before = stored.session.history
        """The history up to the segment `_base`."""
        self._rewrites = stored.rewrites
        self._held_until = asyncio.get_running_loop().time() + LEASE_SECONDS
        self._is_lost = False
        """Whether the store has ended the lease before its time, so that it has lost more than the lease."""
        self._renewal: asyncio.Task[None] | None = background.start(self._renew())

    @property
    def key(self) -> RecordKey:
        """The key of the session's record."""
        return self._record.key

    @property
    def base(self) -> Base | None:
        """What other records may share with the session as it was acquired; None: nothing."""
        return None if self._rewrites else Base(self._base, self._before)

    async def undo(self, request: bytes) -> None:
        """If a request was sent before and made the last turn, go back to the session before that turn.

        Args:
            request: the request's name; b"": it has none, and was not sent before.

        Raises:
            ApiError: 503, the session cannot be read.
        """
        last = self.session.last_turn
        if last is None or not request or last.request != request:
            return
        with self._kind.errors(self.key.id):
            before = await self._history_at(last.base)
        if before is not None:
            self.session.history = self._before = before
            self.session.last_turn = None
            self.session.turns -= 1
            self._base = last.base

    async def _history_at(self, base: bytes) -> History | None:
        """Return the history up to a segment of the record; None: the record does not have it."""
        if not base:
            return History()
        segments = (await self._records.get(self.key, use=False)).segments
        names = [segment.name for segment in segments]
        if base not in names:
            return None
        return read_segments(History(), [each.content for each in segments[: names.index(base) + 1]])

    async def put(self, turn: bytes | None = None) -> StoredSession:
        """Store the session and end its lease.

        Args:
            turn: name of the request that is answered with this change, b"" if it has none; None: the change is no
                turn.

        Raises:
            ApiError: 404 or 409, the lease had ended and the session was deleted or changed; 503, it was not
                stored.
        """
        self._stop()
        self.session.turns += turn is not None
        work = self._background.start(self._store(turn))
        try:
            with self._kind.errors(self.key.id, not_stored=True):
                record = await asyncio.shield(work)
        except BaseException:  # cancellation included: the client left
            self._background.start(self._release(work))
            raise
        stored = StoredSession(record, self.session)
        self._memory.keep(stored)
        return stored

    async def _store(self, turn: bytes | None) -> Record:
        record = self._record
        try:
            change = self._change(turn, whole=self._rewrites)
            return await self._records.put(self.key, record.version, change, lease=self._token, release=True)
        except ConflictError as error:
            version = error.version
            if version >= record.version:
                raise
        except BaseMissingError:
            version = record.version
        except MissingError:
            version = 0
            if not self._is_lost and asyncio.get_running_loop().time() >= self._held_until:
                raise  # the lease had ended, and the session was deleted
        _log.warning("session_written_anew", session=self.key.id, version=record.version, found=version)
        change = self._change(turn, whole=True)
        if version:
            return await self._records.put(self.key, version, change, lease=self._token, release=True)
        return await self._records.create(self.key, change)

    def _change(self, turn: bytes | None, *, whole: bool) -> Change:
        """Return what the record is to become. `whole`: write all of the history, not only what is new."""
        session, base = self.session, self._base
        added = segments_for(self._before, session.history)
        first: list[bytes] = []
        if whole:
            first = segments_for(History(), self._before)
            chain = chain_of(self.key.owner, Change(b"", segments=first))
            base = chain[-1].name if chain else b""
        if turn is not None or whole:  # if all is written anew, the segments have other names
            session.last_turn = LastTurn(turn, base) if turn else None
        return Change(pack_header(session), self._kind.ttl_of(session), b"" if whole else base, [*first, *added])

    def close(self) -> None:
        """End the lease; changes that were not stored are lost. Calling it again has no effect."""
        if self._renewal is not None:
            self._stop()
            self._background.start(self._release())

    async def _release(self, after: asyncio.Task[Any] | None = None) -> None:
        if after is not None:
            await asyncio.wait([after])
        with suppress(RecordError):  # if the store is away, the lease ends by itself
            await self._records.release(self.key, self._token)

    def _stop(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
            self._renewal = None

    async def _renew(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LEASE_SECONDS / _RENEWALS)
            began = loop.time()
            try:
                is_held = await self._records.renew(self.key, self._token, LEASE_SECONDS)
            except StoreAwayError:
                continue
            if not is_held:
                self._is_lost = began < self._held_until
                _log.warning("session_lease_lost", session=self.key.id, early=self._is_lost)
                return
            self._held_until = began + LEASE_SECONDS


def segments_for(before: History, after: History) -> list[bytes]:
    """Return the contents of the segments that lead from one history to another; none if they are equal."""
    return [] if before == after else segments_of(change_between(before, after))
