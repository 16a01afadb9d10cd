"""Requests that come again with the same `Idempotency-Key`: one of them is answered, the others get its answer.

    claim ──► nobody has this key: a record is made, and leased ──► Claim ──► finish: the answer is in the record
      ├─────► it is answered: the record's answer                     └─────► close: the next one may try
      ├─────► it is being answered: wait ──► its answer, or its router died and the lease ran out: Claim
      └─────► it was used for another request: 422

The records are the controllers' (`record_homes.py`), so it does not matter which router a request comes to, nor
whether the first one is still there. What is answered anew is answered the same: all that is drawn at random
follows from the tenant, the key and the request (`request_context.py`). That is why a request goes on without its
record where there is none to be had.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
import structlog

from trunkline.controller.messages import RecordCall
from trunkline.router.errors import ApiError, in_conflict, unavailable
from trunkline.router.messages import Record, RecordReply
from trunkline.router.stores.record_homes import RecordHomes, record_call, record_reply
from trunkline.router.streams.link import ControllerLink

BODY_BYTES_MAX: Final = 4 << 20
"""Of an answer. A longer one is not kept: a repeated request is generated again."""
WAIT_SECONDS: Final = 60.0
"""How long a request waits for an answer that another request is getting."""
LEASE_SECONDS: Final = 5.0
"""After this a lease ends that is not renewed: its router has died."""
_RENEW_SECONDS: Final = 1.5
_CALL_SECONDS: Final = 2.0
"""Shorter than other calls' limit: without the controller's answer the request goes on."""
_PAUSES: Final = (0.02, 0.5)
"""Between two looks at a record that another request holds: the first pause, and the longest."""
_KIND: Final = "idem"
_KEY: Final = re.compile(r"[\x20-\x7e]{1,255}")
_log = structlog.get_logger("trunkline.router.http.idempotency")


class Result(msgspec.Struct, frozen=True, array_like=True):
    """A request and its answer: the value of its record, in MessagePack. Fields may be added, with defaults."""

    request: bytes
    """Digest of what was asked for."""
    created: int
    """Unix time in seconds of the first try."""
    status: int = 0
    """Of the answer; 0: there is none yet."""
    content_type: str = ""
    body: bytes = b""
    """Of a stream all its events."""


class RequestName(msgspec.Struct, frozen=True):
    """What makes two requests the same one."""

    record: str
    """Id of the record: says which tenant and key."""
    request: bytes
    """Digest of what is asked for."""

    @property
    def bytes(self) -> bytes:
        """The whole name."""
        return bytes.fromhex(self.record) + self.request


def name_request(tenant: str, key: str, *asked: bytes) -> RequestName:
    """Return the name of a request. `asked`: all that the answer depends on.

    Raises:
        ApiError: 400, the key is not valid.
    """
    if not _KEY.fullmatch(key):
        raise ApiError(
            400,
            "header Idempotency-Key: a key has 1 to 255 printable ASCII characters",
            param="Idempotency-Key",
            code="invalid_idempotency_key",
        )
    return RequestName(_digest(tenant.encode(), key.encode()).hex(), _digest(*asked))


def _digest(*parts: bytes) -> bytes:
    hashed = hashlib.blake2b(digest_size=16)
    for part in parts:
        hashed.update(len(part).to_bytes(8, "little"))
        hashed.update(part)
    return hashed.digest()


class IdempotencyStore:
    """The records of all keys."""

    def __init__(self, homes: RecordHomes, ttl_seconds: float, wait_seconds: float = WAIT_SECONDS) -> None:
        """
        Args:
            ttl_seconds: how long an answer is kept after it was last asked for.
            wait_seconds: see `WAIT_SECONDS`.
        """
        self._homes = homes
        self._ttl = ttl_seconds
        self._wait_seconds = wait_seconds

    async def claim(self, name: RequestName) -> Claim | Result:
        """Return the right to answer a request, or the answer that it has had.

        Raises:
            ApiError: 422, the key was used for another request; 409, another router has worked on it for too long;
            503, the record cannot be had.
        """
        home = self._homes.home_of(name.record)
        token = secrets.token_hex(8)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._wait_seconds
        pause, longest = _PAUSES
        record = await self._make(home, name)
        while True:
            reply = await self._acquire(home, name, token)
            if reply.status == "ok":
                record = reply.records[0]
                break
            if reply.status == "missing":  # it was forgotten, or its controller was started anew
                record = await self._make(home, name)
                continue
            if not record.value:  # somebody else's: at least look whether it is the same request
                seen = await _ask(home, "get", name.record)
                if seen.status == "ok":
                    record = seen.records[0]
                    _check_same(_read(record), name)
            if loop.time() >= deadline:
                raise _in_use(self._wait_seconds)
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, longest)
        claim = Claim(home, record, token, self._ttl)
        try:
            result = _read(record)
            _check_same(result, name)
        except BaseException:
            claim.close()
            raise
        if result.status:
            claim.close()
            return result
        claim.begin(result)
        return claim

    async def _make(self, home: ControllerLink, name: RequestName) -> Record:
        """Return the key's record, without its value; make it if there is none."""
        value = msgspec.msgpack.encode(Result(name.request, int(time.time())))
        reply = await _ask(home, "create", name.record, value=value, ttl=self._ttl)
        if reply.status not in ("ok", "exists"):
            raise unavailable(f"the request could not be recorded: {reply.detail}")
        return reply.records[0]

    async def _acquire(self, home: ControllerLink, name: RequestName, token: str) -> RecordReply:
        try:
            reply = await _ask(home, "acquire", name.record, lease=token, lease_s=LEASE_SECONDS)
        except BaseException:  # cancellation included: the client left
            home.tell(_call("release", name.record, lease=token))
            raise
        if reply.status not in ("ok", "missing", "busy"):
            raise unavailable(f"the request's record cannot be had: {reply.detail}")
        return reply


class Claim:
    """The lease of a key for the request at hand. Call `close` in the end, whatever happened."""

    def __init__(self, home: ControllerLink, record: Record, token: str, ttl_seconds: float) -> None:
        self._home = home
        self._record = record
        self._token = token
        self._ttl = ttl_seconds
        self._asked = Result(b"", 0)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._open = True

    @property
    def created(self) -> int:
        """When the request first came, Unix time in seconds."""
        return self._asked.created

    def begin(self, asked: Result) -> None:
        """Renew the lease until the answer is there. `asked`: the record, so far without an answer."""
        self._asked = asked
        self._renew_later()

    async def finish(self, status: int, content_type: str, body: bytes) -> bool:
        """Store the answer and release the key; return whether it was stored."""
        self._stop()
        answer = msgspec.structs.replace(self._asked, status=status, content_type=content_type, body=body)
        value, record = msgspec.msgpack.encode(answer), self._record
        fields: dict[str, Any] = {"value": value, "ttl": self._ttl}
        version, token = record.version, self._token
        try:
            reply = await _ask(self._home, "put", record.id, version=version, lease=token, release=True, **fields)
            if reply.status == "missing":  # its controller was started anew meanwhile
                reply = await _ask(self._home, "create", record.id, **fields)
        except ApiError as error:
            _log.warning("answer_not_kept", detail=error.message)
            return False
        if reply.status == "ok":
            self._open = False
        elif reply.status not in ("busy", "conflict", "exists"):  # those: somebody has taken it over
            _log.warning("answer_not_kept", detail=reply.detail)
        return reply.status == "ok"

    def close(self) -> None:
        """Release the key; without an answer the next request may try. May be called again."""
        self._stop()
        if self._open:
            self._open = False
            self._home.tell(_call("release", self._record.id, lease=self._token))

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _renew_later(self) -> None:
        self._timer = self._loop.call_later(_RENEW_SECONDS, self._renew)

    def _renew(self) -> None:
        self._home.tell(_call("acquire", self._record.id, lease=self._token, lease_s=LEASE_SECONDS))
        self._renew_later()


def _call(op: str, record_id: str, **fields: Any) -> Callable[[int], RecordCall]:
    return record_call(op, _KIND, record_id, **fields)


async def _ask(home: ControllerLink, op: str, record_id: str, **fields: Any) -> RecordReply:
    return record_reply(await home.call(_call(op, record_id, **fields), _CALL_SECONDS))


def _read(record: Record) -> Result:
    try:
        return msgspec.msgpack.decode(record.value, type=Result)
    except msgspec.DecodeError as error:
        raise unavailable(f"the request's record cannot be read: {error}") from None


def _check_same(result: Result, name: RequestName) -> None:
    if result.request != name.request:
        raise ApiError(
            422,
            "this Idempotency-Key was used for another request; please choose a new key for each",
            param="Idempotency-Key",
            code="idempotency_key_reused",
        )


def _in_use(seconds: float) -> ApiError:
    error = in_conflict(
        "Idempotency-Key",
        f"the request with this Idempotency-Key still runs, after {seconds:.0f} s; try again for its answer",
        code="idempotency_key_in_use",
    )
    error.retry_after = 5
    return error
