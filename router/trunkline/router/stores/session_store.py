"""Where stored sessions live: records of the controllers (`record_homes.py`), which a router only borrows.

Whoever changes a session acquires it first: until it is put back or let go of, everybody else is told that it is
busy. A lease runs out by itself if its router dies, and is renewed while a long answer is made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from trunkline.controller.messages import Prefetch, PromptLayout, RecordCall
from trunkline.kvstore.int32_codec import pack_int32
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
from trunkline.router.tenancy.identity import current_identity
from trunkline.router.text.truncation import TokenSpan

SESSION_PREFIX: Final = "sess_"
TTL_DEFAULT_S: Final = 24 * 3600.0
"""A session that nobody has touched for a day is forgotten, if its client did not say otherwise."""
_KIND: Final = "session"
_LEASE_SECONDS: Final = 10.0
"""How long a session stays busy after its router has died."""
PEEK_SECONDS: Final = 2.0
"""That a controller has to answer those who only watch."""
_RENEWALS: Final = 3
"""Per lease: two may get lost."""


def is_stored(session_id: str) -> bool:
    """Whether an id means a stored session; others are labels, which group requests and nothing more."""
    return session_id.startswith(SESSION_PREFIX)


class StoredSession(msgspec.Struct):
    """A session and its record."""

    record: Record
    session: SessionState


class SessionStore:
    """All sessions of all controllers. Calls that are not answered raise `ApiError` 503."""

    def __init__(self, homes: RecordHomes) -> None:
        self._homes = homes

    def home_of(self, session_id: str) -> ControllerLink:
        """The controller that keeps it."""
        return self._homes.home_of(session_id)

    def draw_id(self, beside: str = "") -> str:
        """A new session's id; with the same home as `beside`, so that they share what is cached.

        Args:
            beside: another session's id, or the key of another kind of record.
        """
        while True:
            drawn = SESSION_PREFIX + draw_hex("session", 16)
            if not beside or self.home_of(drawn) is self.home_of(beside):
                return drawn

    async def create(self, session_id: str, session: SessionState) -> StoredSession:
        """Store a new one. One with this id that is there already is this request's own, made on its first try."""
        value = pack_session(session)
        create = _call_of("create", session_id, value=value, ttl=ttl_of(session))
        reply = await ask(self.home_of(session_id), create)
        if reply.status == "exists" and request_name():
            return await self.get(session_id)
        return StoredSession(_checked(reply, session_id).records[0], session)

    async def get(self, session_id: str) -> StoredSession:
        """As it was when it was last put, whoever has acquired it since.

        Raises:
            ApiError: 404.
        """
        return _read(await self._call(session_id, "get"))

    async def peek(self, session_id: str) -> StoredSession:
        """As `get`, for those who only watch: it expires as if nobody had looked, and nobody is waited for.

        Raises:
            ApiError: 404; 503, its home is away.
        """
        reply = record_reply(await self.home_of(session_id).call(_call_of("peek", session_id), PEEK_SECONDS))
        return _read(_checked(reply, session_id))

    async def acquire(self, session_id: str) -> Lease:
        """Have it for oneself.

        Raises:
            ApiError: 404; 409, somebody else has it.
        """
        token = draw_hex("lease", 8)  # who takes a dead router's request over has its session, too
        try:
            reply = await self._call(session_id, "acquire", lease=token, lease_s=_LEASE_SECONDS)
            return Lease(self.home_of(session_id), _read(reply), token)
        except BaseException as error:  # cancellation included: the client left
            if not isinstance(error, ApiError) or error.status == 503:
                self.home_of(session_id).tell(_call_of("release", session_id, lease=token))
            raise

    async def delete(self, session_id: str) -> None:
        """Forget it.

        Raises:
            ApiError: 404; 409, it is in use.
        """
        await self._call(session_id, "delete")

    async def page(self, after: str, limit: int) -> list[Record]:
        """Records without their values, `limit` at most, in the order of their ids, behind `after`."""
        return await self._homes.page(_kind_of(current_identity().owner), after, limit)

    async def page_of_all(self, owners: Sequence[str], after: str, limit: int) -> list[tuple[str, Record]]:
        """As `page`, of all these owners (`identity.py`), each record with its owner."""
        pages = await asyncio.gather(*(self._homes.page(_kind_of(owner), after, limit) for owner in owners))
        found = [(owner, record) for owner, page in zip(owners, pages, strict=True) for record in page]
        return sorted(found, key=lambda pair: pair[1].id)[:limit]

    async def page_at(self, home: ControllerLink, owner: str, limit: int) -> list[Record]:
        """What one controller has of an owner, `limit` records at most, without their values. If it is away, it is
        not waited for.

        Raises:
            ApiError: 503, that one is.
        """
        reply = record_reply(await home.call(record_call("list", _kind_of(owner), "", limit=limit), PEEK_SECONDS))
        if reply.status != "ok":
            raise unavailable(f"what is stored cannot be listed: {reply.detail}", code="not_listed")
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
        """Have its home fetch what it knows of a prompt. `layout`: of one with modules."""
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
    """A session that is acquired. Call `close` in the end, whatever happened."""

    def __init__(self, home: ControllerLink, stored: StoredSession, token: str) -> None:
        self.record = stored.record
        self.session = stored.session
        """As it was acquired; changes of it are stored by `put` only."""
        self._home = home
        self._token = token
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._renew_later()

    async def put(self) -> StoredSession:
        """Store the session as it is now and let go of it.

        Raises:
            ApiError: 404 or 409, it was deleted or taken over after the lease ran out; 503, it was not stored.
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
        """Let go of it; what was not put is forgotten. May be called again."""
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
    """Seconds without use after which it is forgotten."""
    return session.ttl or TTL_DEFAULT_S


def _call_of(op: str, session_id: str, **fields: Any) -> Callable[[int], RecordCall]:
    """A call but for its ticket, for the owner of the request at hand."""
    return record_call(op, _kind_of(current_identity().owner), session_id, **fields)


def _kind_of(owner: str) -> str:
    """Each owner's sessions are records of a kind of their own: nobody else's id finds them."""
    return f"{_KIND}:{owner}" if owner else _KIND


def _read(reply: RecordReply) -> StoredSession:
    record = reply.records[0]
    try:
        return StoredSession(record, unpack_session(record.value))
    except ValueError as error:
        raise unavailable(f"session {record.id} cannot be read: {error}", code="session_unreadable") from None


def _checked(answer: RecordReply, session_id: str) -> RecordReply:
    """The answer, if it is a good one.

    Raises:
        ApiError: what it says.
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
            f"{name} was changed by somebody else meanwhile; nothing was stored",
            code="session_conflict",
        )
    raise unavailable(f"{name} could not be stored: {answer.detail}", code="session_not_stored")
