"""The store of sessions: each is a record (`kvstore/records/`), leased by a router that changes it.
Stored responses and conversations are kept in the same way, as kinds of their own (`history_kinds.py`).

    record ─► header: all but the history     segments: the changes of the history (`session_changes.py`)

Any router may work on any session. While a request holds the lease of a session, other requests get the error
"busy". A router remembers the sessions that it has used last, and reads only what was added to them since.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import structlog
from msgspec.structs import replace

from trunkline.kvstore.records import (
    BaseMissingError,
    BusyError,
    Change,
    ExistsError,
    MissingError,
    Reading,
    Record,
    RecordError,
    RecordKey,
    RecordStore,
    StoreAwayError,
)
from trunkline.router.errors import ApiError, records_away, records_full
from trunkline.router.request_context import draw_hex, request_name
from trunkline.router.stores.history_kinds import CONVERSATIONS, RESPONSES, SESSIONS, HistoryKind
from trunkline.router.stores.owned_records import QuotaOf, no_quota
from trunkline.router.stores.seals import SealKeys
from trunkline.router.stores.session_changes import read_segments
from trunkline.router.stores.session_history import History
from trunkline.router.stores.session_lease import LEASE_SECONDS, Background, Lease, segments_for
from trunkline.router.stores.session_memory import Base, SessionMemory, StoredSession
from trunkline.router.stores.session_state import SessionState, pack_header, unpack_header
from trunkline.router.tenancy.auth import current_identity

MEMORY_BYTES: Final = 256 << 20
"""Largest approximate size in bytes of the sessions, responses and conversations that a router remembers."""
_PAUSES: Final = (0.02, 0.5)
"""The first and the longest pause, in seconds, between two looks whether a lease has ended."""
_log = structlog.get_logger("trunkline.router.stores.sessions")


def is_stored(session_id: str) -> bool:
    """Return whether an id belongs to a stored session. Other ids are labels that only group requests for
    routing."""
    return session_id.startswith(SESSIONS.prefix)


class SessionStore:
    """The sessions of all tenants, or the records of another kind that have a history. Calls raise `ApiError` 503
    if the store of records does not answer."""

    def __init__(
        self,
        records: RecordStore,
        quota_of: QuotaOf = no_quota,
        *,
        kind: HistoryKind = SESSIONS,
        memory: SessionMemory | None = None,
    ) -> None:
        """
        Args:
            quota_of: as in `owned_records.py`; from there on a tenant gets no more sessions and turns.
            memory: remembers what was used last; None: one of its own.
        """
        self._records = records
        self._quota_of = quota_of
        self._kind = kind
        self._memory = SessionMemory(MEMORY_BYTES) if memory is None else memory
        self._background = Background()

    def draw_id(self) -> str:
        """Draw the id of a new session."""
        return self._kind.prefix + draw_hex(self._kind.name, 16)

    async def check_room(self) -> None:
        """Refuse a request whose answer is to be stored, before any work is done for it.

        Raises:
            ApiError: 429, the tenant's records have reached their quota.
        """
        try:
            usage = await self._records.usage(current_identity().owner)
        except StoreAwayError as error:
            raise records_away(error) from None
        self._check_quota(usage.bytes)

    def _check_quota(self, owner_bytes: int) -> None:
        if 0 < (quota := self._quota_of(current_identity().owner)) <= owner_bytes:
            raise records_full(owner_bytes, quota)

    async def create(
        self, session_id: str, session: SessionState, base: Base | None = None, *, is_admitted: bool = False
    ) -> StoredSession:
        """Store a new session. If its id exists, the request was sent twice, and the stored session is returned.

        Args:
            base: the stored history that the session continues and shares; None: it shares nothing.
            is_admitted: whether the tenant's quota was checked when the request began; it is not checked again.

        Raises:
            ApiError: 429, the tenant's records have reached their quota; 400, the session is too large.
        """
        key = self._kind.key_of(session_id)
        with self._kind.errors(session_id, not_stored=True):
            try:
                record = await self._create(key, session, base, 0 if is_admitted else self._quota_of(key.owner))
            except ExistsError:
                if not request_name():
                    raise
                return await self.get(session_id)
            except StoreAwayError as error:
                raise records_away(error) from None
            except ValueError as error:
                message = f"the {self._kind.name} is too large: {error}"
                raise ApiError(400, message, code=f"{self._kind.name}_too_long") from None
        stored = StoredSession(record, session)
        self._memory.keep(stored)
        return stored

    async def _create(self, key: RecordKey, session: SessionState, base: Base | None, quota: int) -> Record:
        header, ttl = pack_header(session), self._kind.ttl_of(session)
        if base is not None and base.segment:
            added = segments_for(base.history, session.history)
            with suppress(BaseMissingError):  # the other record was deleted meanwhile
                return await self._records.create(
                    key, Change(header, ttl, base.segment, added), owner_bytes_max=quota
                )
        change = Change(header, ttl, segments=segments_for(History(), session.history))
        return await self._records.create(key, change, owner_bytes_max=quota)

    async def get(self, session_id: str, *, extends: bool = False) -> StoredSession:
        """Return a session as it was last stored, even if another request holds its lease.

        Args:
            extends: whether the request may store a longer history, which the tenant's quota limits.

        Raises:
            ApiError: 404, there is no such session; 429, the tenant's records have reached their quota.
        """
        return (await self._get(session_id, extends=extends))[0]

    async def _get(self, session_id: str, *, extends: bool = False) -> tuple[StoredSession, float]:
        """Return a session and the seconds for which its lease lasts, as `get`."""
        key = self._kind.key_of(session_id)
        remembered = self._memory.find(key)
        with self._kind.errors(session_id):
            reading = await self._records.get(key, _known(remembered))
            if extends:
                self._check_quota(reading.owner_bytes)
            stored = _read(reading, remembered)
        self._memory.keep(stored)
        return stored, reading.leased_s

    async def get_settled(self, session_id: str, patience_s: float) -> StoredSession:
        """Return a session as soon as the request is over that holds its lease now, at whatever router. If that
        router dies, the lease ends by itself, and the session is as before the request.

        Args:
            patience_s: longest time in seconds to wait.

        Raises:
            ApiError: 404, there is no such session; 409, the request still runs.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience_s
        pause, longest = _PAUSES
        stored, leased_s = await self._get(session_id)
        version = stored.record.version
        # Only the lease's holder makes a new version: another one means that it has ended, if not the next ones.
        while leased_s > 0 and stored.record.version == version:
            if loop.time() >= deadline:
                with self._kind.errors(session_id):
                    raise BusyError(leased_s)
            await asyncio.sleep(min(pause, leased_s, deadline - loop.time()))
            pause = min(1.5 * pause, longest)
            stored, leased_s = await self._get(session_id)
        return stored

    async def peek(self, session_id: str) -> StoredSession:
        """Return a session like `get`, without prolonging its life.

        Raises:
            ApiError: 404, there is no such session.
        """
        key = self._kind.key_of(session_id)
        remembered = self._memory.find(key)
        with self._kind.errors(session_id):
            return _read(await self._records.get(key, _known(remembered), use=False), remembered)

    async def acquire(self, session_id: str, *, extends: bool = False) -> Lease:
        """Acquire the lease of a session.

        Args:
            extends: whether the request may make the session longer, which the tenant's quota limits.

        Raises:
            ApiError: 404, there is no such session; 409, another request holds its lease; 429, the tenant's
                records have reached their quota.
        """
        key = self._kind.key_of(session_id)
        token = draw_hex("lease", 8)  # the same for the router that takes over a dead router's request
        remembered = self._memory.find(key)
        work = self._background.start(self._records.acquire(key, token, LEASE_SECONDS, _known(remembered)))
        try:
            with self._kind.errors(session_id):
                reading = await asyncio.shield(work)
                if extends:
                    self._check_quota(reading.owner_bytes)
                stored = _read(reading, remembered)
        except BaseException:  # cancellation included: the client left
            self._background.start(self._release(key, token, work))
            raise
        self._memory.keep(stored)
        return Lease(self._kind, self._records, self._background, self._memory, stored, token)

    async def _release(self, key: RecordKey, token: str, acquiring: asyncio.Task[Any]) -> None:
        """End a lease that is being acquired, if it is."""
        try:
            await acquiring
        except (MissingError, BusyError):
            return
        except RecordError:  # it may have been acquired all the same
            pass
        with suppress(RecordError):
            await self._records.release(key, token)

    async def delete(self, session_id: str) -> None:
        """Delete a session.

        Raises:
            ApiError: 404, there is no such session; 409, it is in use.
        """
        key = self._kind.key_of(session_id)
        with self._kind.errors(session_id):
            await self._records.delete(key)
        self._memory.forget(key)

    async def page(self, owners: Sequence[str], after: str, limit: int, *, headers: bool = False) -> list[Record]:
        """Return up to `limit` records of some owners (`auth.py`) whose ids follow `after`, in the order of ids.
        Without `headers`, their headers are empty."""
        page = self._records.page
        try:
            pages = await asyncio.gather(
                *(page(self._kind.name, each, after, limit, headers=headers) for each in owners)
            )
        except StoreAwayError as error:
            raise records_away(error) from None
        return sorted((record for page in pages for record in page), key=lambda record: record.key.id)[:limit]


class Histories:
    """The stores of all records that have a history. They share what a router remembers."""

    def __init__(self, records: RecordStore, quota_of: QuotaOf = no_quota) -> None:
        """`quota_of`: as in `SessionStore`."""
        memory = SessionMemory(MEMORY_BYTES)
        self.sessions = SessionStore(records, quota_of, memory=memory)
        self.responses = SessionStore(records, quota_of, kind=RESPONSES, memory=memory)
        self.conversations = SessionStore(records, quota_of, kind=CONVERSATIONS, memory=memory)
        self.seals = SealKeys(records)

    def of_kind(self, kind: str) -> SessionStore | None:
        """Return the store of the records of a kind; None: they have no history."""
        stores = {SESSIONS: self.sessions, RESPONSES: self.responses, CONVERSATIONS: self.conversations}
        return next((store for each, store in stores.items() if each.name == kind), None)


def _known(remembered: StoredSession | None) -> tuple[bytes, ...]:
    return () if remembered is None or not remembered.record.head else (remembered.record.head,)


def _read(reading: Reading, remembered: StoredSession | None) -> StoredSession:
    """Return the session that was read.

    Args:
        remembered: what was known of it.

    Raises:
        ValueError: it cannot be read.
    """
    record = reading.record
    if remembered is not None and _is_lost(remembered.record, record):
        _log.warning("session_restored", session=record.key.id, version=remembered.record.version)
        return StoredSession(record, replace(remembered.session), rewrites=True)
    contents = [segment.content for segment in reading.segments]
    session, is_old = unpack_header(record.header or b"".join(contents))  # of an old one that is too long for that
    if is_old:
        return StoredSession(record, session, rewrites=True)
    history = History()
    if reading.after:
        if remembered is None or remembered.record.head != reading.after:
            raise ValueError("its beginning is missing")
        history = remembered.session.history
    if reading.segments or not reading.after:
        history = read_segments(history, contents)
    session.history = history
    return StoredSession(record, session)


def _is_lost(remembered: Record, found: Record) -> bool:
    """Return whether the store has lost changes of a record that it had stored."""
    return found.version < remembered.version and found.created == remembered.created
