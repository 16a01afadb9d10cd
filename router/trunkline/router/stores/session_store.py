"""The store of sessions: each is a record of a controller (`record_homes.py`), leased by a router that changes it.

While a request holds the lease of a session, other requests get the error "busy". The lease ends when the session
is stored or released. It expires if its router dies, and is renewed while a long answer is generated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from trunkline.controller.messages import Prefetch, PromptLayout, RecordCall
from trunkline.kvstore.chunks import pack_int32
from trunkline.router.errors import ApiError, in_conflict, not_found, unavailable
from trunkline.router.messages import Prefetched, Record, RecordReply
from trunkline.router.request_context import draw_hex, request_name
from trunkline.router.stores.record_homes import (
    CALL_SECONDS,
    RecordHomes,
    ask,
    call_persistently,
    record_call,
    record_reply,
)
from trunkline.router.stores.session_history import SessionState, pack_session, unpack_session
from trunkline.router.streams.link import ControllerLink
from trunkline.router.tenancy.auth import current_identity
from trunkline.router.text.truncation import TokenSpan

SESSION_PREFIX: Final = "sess_"
TTL_DEFAULT_S: Final = 24 * 3600.0
"""Time to live of a session whose client gave none."""
_KIND: Final = "session"
_LEASE_SECONDS: Final = 10.0
"""Duration of a lease in seconds, which is also the longest time that a session stays busy after its router has
died."""
PEEK_SECONDS: Final = 2.0
"""Longest time in seconds that the dashboard waits for a controller's answer."""
_RENEWALS: Final = 3
"""Number of renewals during one lease, so that two messages may be lost."""


def is_stored(session_id: str) -> bool:
    """Return whether an id belongs to a stored session. Other ids are labels that only group requests for
    routing."""
    return session_id.startswith(SESSION_PREFIX)


class StoredSession(msgspec.Struct):
    """A session together with its record."""

    record: Record
    session: SessionState


class SessionStore:
    """The sessions of all controllers. Calls that no controller answers raise `ApiError` 503."""

    def __init__(self, homes: RecordHomes) -> None:
        self._homes = homes

    def home_of(self, session_id: str) -> ControllerLink:
        """Return the controller that stores a session."""
        return self._homes.home_of(session_id)

    def draw_id(self, beside: str = "") -> str:
        """Draw the id of a new session, on the same controller as `beside` so that both share cached KV.

        Args:
            beside: The id of another session, or the key of another kind of record; "": any controller will do.
        """
        while True:
            drawn = SESSION_PREFIX + draw_hex("session", 16)
            if not beside or self.home_of(drawn) is self.home_of(beside):
                return drawn

    async def create(self, session_id: str, session: SessionState) -> StoredSession:
        """Store a new session. If its id exists, the request was sent twice, and the stored session is
        returned."""
        value = pack_session(session)
        create = _call_of("create", session_id, value=value, ttl=ttl_of(session))
        reply = await ask(self.home_of(session_id), create)
        if reply.status == "exists" and request_name():
            return await self.get(session_id)
        return StoredSession(_checked(reply, session_id).records[0], session)

    async def get(self, session_id: str) -> StoredSession:
        """Return a session as it was last stored, even if another request holds its lease.

        Raises:
            ApiError: 404, there is no such session.
        """
        return _read(await self._call(session_id, "get"))

    async def peek(self, session_id: str) -> StoredSession:
        """Return a session like `get`, without prolonging its life and without waiting for a controller that is
        away.

        Raises:
            ApiError: 404, there is no such session; 503, its controller is away.
        """
        reply = record_reply(await self.home_of(session_id).call(_call_of("peek", session_id), PEEK_SECONDS))
        return _read(_checked(reply, session_id))

    async def acquire(self, session_id: str) -> Lease:
        """Acquire the lease of a session.

        Raises:
            ApiError: 404, there is no such session; 409, another request holds its lease.
        """
        token = draw_hex("lease", 8)  # the same for the router that takes over a dead router's request
        try:
            reply = await self._call(session_id, "acquire", lease=token, lease_s=_LEASE_SECONDS)
            return Lease(self.home_of(session_id), _read(reply), token)
        except BaseException as error:  # cancellation included: the client left
            if not isinstance(error, ApiError) or error.status == 503:
                self.home_of(session_id).tell(_call_of("release", session_id, lease=token))
            raise

    async def delete(self, session_id: str) -> None:
        """Delete a session.

        Raises:
            ApiError: 404, there is no such session; 409, it is in use.
        """
        await self._call(session_id, "delete")

    async def page(self, after: str, limit: int) -> list[Record]:
        """Return up to `limit` records whose ids follow `after`, in the order of ids, without their values."""
        return await self._homes.page(_kind_of(current_identity().owner), after, limit)

    async def page_of_all(self, owners: Sequence[str], after: str, limit: int) -> list[tuple[str, Record]]:
        """Return up to `limit` records of several owners (`auth.py`), each with its owner; otherwise like
        `page`."""
        pages = await asyncio.gather(*(self._homes.page(_kind_of(owner), after, limit) for owner in owners))
        found = [(owner, record) for owner, page in zip(owners, pages, strict=True) for record in page]
        return sorted(found, key=lambda pair: pair[1].id)[:limit]

    async def page_at(self, home: ControllerLink, owner: str, limit: int) -> list[Record]:
        """Return up to `limit` of an owner's records on one controller, without values and without waiting.

        Raises:
            ApiError: 503, the controller is away.
        """
        reply = record_reply(await home.call(record_call("list", _kind_of(owner), "", limit=limit), PEEK_SECONDS))
        if reply.status != "ok":
            raise unavailable(f"stored records cannot be listed: {reply.detail}", code="not_listed")
        return reply.records

    async def prefetch(
        self,
        session_id: str,
        tokens: Sequence[int],
        drops: Sequence[TokenSpan] = (),
        *,
        salt: bytes = b"",
        layout: PromptLayout | None = None,
    ) -> Prefetched:
        """Ask a session's controller to fetch the KV of a prompt from slow tiers. `layout`: the prompt's layout,
        if it has modules."""
        packed, cut = pack_int32(list(tokens)), pack_int32([end for span in drops for end in span])
        answer, _ = await call_persistently(
            self.home_of(session_id), lambda ticket: Prefetch(ticket, packed, salt, cut, layout), CALL_SECONDS
        )
        if not isinstance(answer, Prefetched):
            raise unavailable("the engine gave another answer than the one to the question")
        return answer

    async def _call(self, session_id: str, op: str, **fields: Any) -> RecordReply:
        return _checked(await ask(self.home_of(session_id), _call_of(op, session_id, **fields)), session_id)


class Lease:
    """An acquired session. Call `close` at the end in any case."""

    def __init__(self, home: ControllerLink, stored: StoredSession, token: str) -> None:
        self.record = stored.record
        self.session = stored.session
        """The session as it was acquired; only `put` stores changes."""
        self._home = home
        self._token = token
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._renew_later()

    async def put(self) -> StoredSession:
        """Store the session and release its lease.

        Raises:
            ApiError: 404 or 409, the lease had expired and the session was deleted or changed; 503, it was not
            stored.
        """
        self._stop()
        value = pack_session(self.session)
        put = _call_of(
            "put",
            self.record.id,
            value=value,
            version=self.record.version,
            ttl=ttl_of(self.session),
            lease=self._token,
            release=True,
        )
        try:
            reply = _checked(await ask(self._home, put), self.record.id)
        except BaseException:  # cancellation included: the client left
            self._release()
            raise
        return StoredSession(reply.records[0] if reply.records else self.record, self.session)

    def close(self) -> None:
        """Release the lease; changes that were not stored are lost. Calling it again has no effect."""
        if self._timer is not None:
            self._stop()
            self._release()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _release(self) -> None:
        self._home.tell(_call_of("release", self.record.id, lease=self._token))

    def _renew_later(self) -> None:
        self._timer = self._loop.call_later(_LEASE_SECONDS / _RENEWALS, self._renew)

    def _renew(self) -> None:
        self._home.tell(_call_of("acquire", self.record.id, lease=self._token, lease_s=_LEASE_SECONDS))
        self._renew_later()


def ttl_of(session: SessionState) -> float:
    """Return the seconds without use after which a session is deleted."""
    return session.ttl or TTL_DEFAULT_S


def _call_of(op: str, session_id: str, **fields: Any) -> Callable[[int], RecordCall]:
    """Return a function that makes a call for the owner of the current request, given the call's ticket."""
    return record_call(op, _kind_of(current_identity().owner), session_id, **fields)


def _kind_of(owner: str) -> str:
    """Return the kind of an owner's session records. Each owner has a kind, so ids of other owners find
    nothing."""
    return f"{_KIND}:{owner}" if owner else _KIND


def _read(reply: RecordReply) -> StoredSession:
    record = reply.records[0]
    try:
        return StoredSession(record, unpack_session(record.value))
    except ValueError as error:
        raise unavailable(f"session {record.id} cannot be read: {error}", code="session_unreadable") from None


def _checked(answer: RecordReply, session_id: str) -> RecordReply:
    """Return a successful answer.

    Raises:
        ApiError: The error that the answer reports.
    """
    if answer.status == "ok":
        return answer
    name = f"session {session_id[:80]!r}"
    if answer.status == "missing":
        raise not_found("session_id", f"{name} does not exist (any more)", code="session_not_found")
    if answer.status == "busy":
        raise in_conflict(
            "session_id",
            f"{name} is in use: another request of it has not ended yet. Wait for that, or fork the session.",
            code="session_busy",
        )
    if answer.status in ("conflict", "exists"):
        raise in_conflict(
            "session_id",
            f"{name} was changed by another request meanwhile; nothing was stored",
            code="session_conflict",
        )
    raise unavailable(f"{name} could not be stored: {answer.detail}", code="session_not_stored")
