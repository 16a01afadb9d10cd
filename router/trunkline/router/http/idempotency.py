"""Requests that come again with the same `Idempotency-Key`: one of them is answered, the others get its answer.

    claim ──► the key is new: a record is made and leased ───► Claim ──► finish: the answer is in the record
      ├─────► its request was answered: the record's answer      └─────► close: the next request may try
      ├─────► its request is being answered: wait ──► its answer; or Claim, if its router died and the lease ended
      └─────► it was used for another request: 422

The records are kept by the controllers (`record_homes.py`), so it does not matter which router a request comes to,
nor whether the first router still runs. A repeated request that is generated again gets the same answer:
everything drawn at random follows from the tenant, the key and the request (`request_context.py`). So a request
whose record cannot be had is answered without one.

`ReplayMiddleware` copies an answer while it is sent, streams included. The copy is stored before the client gets
the end of the answer. Errors are not kept, nor streams that end with one: the next request tries again.
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
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trunkline.controller.messages import RecordCall
from trunkline.router.errors import ApiError, in_conflict, unavailable
from trunkline.router.http.answers import BODY_SEND, EVENT_STREAM_HEADERS, error_response, while_connected
from trunkline.router.http.body import SESSION_HEADER, read_body
from trunkline.router.messages import Record, RecordReply
from trunkline.router.request_context import RequestRandom, created_at, known
from trunkline.router.stores.record_homes import RecordHomes, record_call, record_reply
from trunkline.router.streams.link import ControllerLink
from trunkline.router.tenancy.tenants import current_meter

BODY_BYTES_MAX: Final = 4 << 20
"""Largest size in bytes of an answer that is kept. If the answer was longer, a repeated request is generated
again."""
WAIT_SECONDS: Final = 60.0
"""Longest time in seconds that a request waits for the answer to an earlier request with the same key."""
LEASE_SECONDS: Final = 5.0
"""Time in seconds after which a lease ends that was not renewed, because its router has died."""
_RENEW_SECONDS: Final = 1.5
_CALL_SECONDS: Final = 2.0
"""Time limit in seconds of a call about a record. It is short because without the controller's answer the request
goes on."""
_PAUSES: Final = (0.02, 0.5)
"""The first and the longest pause, in seconds, between two requests for a record that another request holds."""
_KIND: Final = "idem"
_KEY: Final = re.compile(r"[\x20-\x7e]{1,255}")
_log = structlog.get_logger("trunkline.router.http.idempotency")
_PATHS: Final = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/sessions",
        "/v1/schemas",
    }
)
_SESSION_VERBS: Final = ("/fork", "/discard")
_HEADER: Final = "Idempotency-Key"
_UNAVAILABLE: Final = 503
_OFF_LOOP_BYTES: Final = 1 << 20
"""Size in bytes above which a body is hashed in a thread."""
COPIES_BYTES_MAX: Final = 256 << 20
"""Largest size of all copies of answers together. An answer that does not fit is not kept."""


class Result(msgspec.Struct, frozen=True, array_like=True):
    """The value of a record: digest of a request, and its answer. MessagePack; new fields need defaults."""

    request: bytes
    """Digest of the request."""
    created: int
    """Unix time in seconds of the first try."""
    status: int = 0
    """Status of the answer; 0: there is no answer yet."""
    content_type: str = ""
    body: bytes = b""
    """The answer's body; of a stream all its events."""


class RequestName(msgspec.Struct, frozen=True):
    """Identifies a request: two requests with equal names are the same one."""

    record: str
    """Id of the record: a digest of tenant and key, in hexadecimal."""
    request: bytes
    """Digest of all that the answer depends on."""

    @property
    def bytes(self) -> bytes:
        """Both digests, one after the other."""
        return bytes.fromhex(self.record) + self.request


def name_request(tenant: str, key: str, *asked: bytes) -> RequestName:
    """Return the name of a request. `asked`: everything that its answer depends on.

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
    """The records of all idempotency keys."""

    def __init__(self, homes: RecordHomes, ttl_seconds: float, wait_seconds: float = WAIT_SECONDS) -> None:
        """
        Args:
            homes: finds the controller that keeps a record.
            ttl_seconds: how long an answer is kept after it was last used.
            wait_seconds: see `WAIT_SECONDS`.
        """
        self._homes = homes
        self._ttl = ttl_seconds
        self._wait_seconds = wait_seconds

    async def claim(self, name: RequestName) -> Claim | Result:
        """Return the right to answer a request, or the answer to an earlier request with the same name.

        Raises:
            ApiError: 422, the key was used for another request; 409, the earlier request still runs after
                `wait_seconds`; 503, the record is not available.
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
            if reply.status == "missing":  # it has expired, or its controller was started again
                record = await self._make(home, name)
                continue
            if not record.value:  # another request made it: check that it is the same request
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
        """Make the key's record, and return the record. If the key had a record already, return that record
        without its value."""
        value = msgspec.msgpack.encode(Result(name.request, int(time.time())))
        reply = await _ask(home, "create", name.record, value=value, ttl=self._ttl)
        if reply.status not in ("ok", "exists"):
            raise unavailable(f"the request could not be recorded: {reply.detail}")
        return reply.records[0]

    async def _acquire(self, home: ControllerLink, name: RequestName, token: str) -> RecordReply:
        try:
            reply = await _ask(home, "acquire", name.record, lease=token, lease_s=LEASE_SECONDS)
        except BaseException:  # also a cancellation, when the client leaves
            home.tell(_call("release", name.record, lease=token))
            raise
        if reply.status not in ("ok", "missing", "busy"):
            raise unavailable(f"the request's record cannot be had: {reply.detail}")
        return reply


class Claim:
    """A request's right to store the answer for its key, held as a lease of the key's record. Always call `close`
    in the end."""

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
        """Unix time in seconds at which the request first came."""
        return self._asked.created

    def begin(self, asked: Result) -> None:
        """Begin to renew the lease, until the answer is stored. `asked`: the value of the key's record, which has
        no answer yet."""
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
            if reply.status == "missing":  # the controller was started again meanwhile
                reply = await _ask(self._home, "create", record.id, **fields)
        except ApiError as error:
            _log.warning("answer_not_kept", detail=error.message)
            return False
        if reply.status == "ok":
            self._open = False
        elif reply.status not in ("busy", "conflict", "exists"):  # in these cases another router has the key now
            _log.warning("answer_not_kept", detail=reply.detail)
        return reply.status == "ok"

    def close(self) -> None:
        """Release the key. If no answer was stored, the next request may try. May be called again."""
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


def takes_key(method: str, path: str) -> bool:
    """Return whether `Idempotency-Key` counts for requests of this method to this path."""
    if method != "POST":
        return False
    return path in _PATHS or (path.startswith("/v1/sessions/") and path.endswith(_SESSION_VERBS))


class ReplayMiddleware:
    """Answers each `Idempotency-Key` once. It stands inside of `AdmissionMiddleware`, which sets the tenant. Plain
    ASGI."""

    def __init__(
        self, app: ASGIApp, store: IdempotencyStore, bytes_max: int, on_result: Callable[[str], Any]
    ) -> None:
        """
        Args:
            bytes_max: largest size of a request's body.
            on_result: called for each request with a key, with "new", "replayed", "refused" or "unavailable".
        """
        self._app = app
        self._store = store
        self._bytes_max = bytes_max
        self._room = _Room(COPIES_BYTES_MAX)
        self._on_result = on_result

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry point."""
        key = None
        if scope["type"] == "http" and takes_key(scope["method"], scope["path"]):
            key = Headers(scope=scope).get(_HEADER)
        if key is None:
            await self._app(scope, receive, send)
            return
        try:
            await self._answer(key, scope, receive, send)
        except ApiError as error:
            self._on_result("refused")
            await error_response(scope["path"], error)(scope, receive, send)

    async def _answer(self, key: str, scope: Scope, receive: Receive, send: Send) -> None:
        """
        Raises:
            ApiError: before anything was sent.
        """
        request = Request(scope, receive)
        name, receive_again = await self._read(key, request)
        claim: Claim | Result | None
        try:
            claim = await while_connected(request, self._store.claim(name))
        except ApiError as error:
            if error.status != _UNAVAILABLE:
                raise
            claim = None
        if isinstance(claim, Result):
            self._on_result("replayed")
            await _replay(claim)(scope, receive, send)
            return
        self._on_result("new" if claim is not None else "unavailable")
        await self._run(name, claim, scope, receive_again, send)

    async def _read(self, key: str, request: Request) -> tuple[RequestName, Receive]:
        """Return a request's name, and a `receive` that gives its body again."""
        body = await read_body(request, self._bytes_max)
        scope = request.scope
        session = request.headers.get(SESSION_HEADER, "").encode()
        asked = (scope["method"].encode(), scope["path"].encode(), scope.get("query_string", b""), session, body)
        tenant = current_meter().tenant
        if len(body) > _OFF_LOOP_BYTES:
            name = await asyncio.to_thread(name_request, tenant, key, *asked)
        else:
            name = name_request(tenant, key, *asked)
        return name, _with_body(body, request.receive)

    async def _run(
        self, name: RequestName, claim: Claim | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        copy = _Copy(scope, claim, send, self._room)
        scope[BODY_SEND] = copy.send
        try:
            with known(random=RequestRandom(name.bytes, created_at() if claim is None else claim.created)):
                await self._app(scope, receive, copy.send)
        finally:
            copy.close()
            if claim is not None:
                claim.close()


def _with_body(body: bytes, receive: Receive) -> Receive:
    unread: bytes | None = body

    async def again() -> Message:
        nonlocal unread
        if unread is None:
            return await receive()
        message = {"type": "http.request", "body": unread, "more_body": False}
        unread = None  # free its memory while the answer is made
        return message

    return again


def _replay(result: Result) -> Response:
    headers = {"Content-Type": result.content_type, "Idempotent-Replayed": "true"}
    if result.content_type.startswith("text/event-stream"):
        headers |= EVENT_STREAM_HEADERS
    return Response(result.body, result.status, headers)


class _Room:
    """The limit of bytes for all copies of answers together."""

    def __init__(self, size: int) -> None:
        self._free = size

    def take(self, size: int) -> bool:
        """Take `size` bytes if that many are free; return whether they were taken."""
        if size > self._free:
            return False
        self._free -= size
        return True

    def give_back(self, size: int) -> None:
        """Give `size` bytes back."""
        self._free += size


class _Copy:
    """Passes an answer on to the client, and stores a copy of it once it is complete."""

    def __init__(self, scope: Scope, claim: Claim | None, send: Send, room: _Room) -> None:
        self._scope = scope
        self._room = room
        self._claim = claim
        self._send = send
        self._status = 0
        self._content_type = ""
        self._body: bytearray | None = None
        """The copy so far; None: this answer is not kept."""

    async def send(self, message: Message) -> None:
        """Pass a message of ASGI on, and copy its part of the answer."""
        if message["type"] == "http.response.start":
            self._start(message)
        elif message["type"] == "http.response.body" and self._body is not None:
            part = message.get("body", b"")
            if len(self._body) + len(part) > BODY_BYTES_MAX or not self._room.take(len(part)):
                self.close()
            else:
                self._body += part
                if not message.get("more_body", False):
                    await self._keep(bytes(self._body))
        await self._send(message)

    def close(self) -> None:
        """Forget the copy. May be called again."""
        if self._body is not None:
            self._room.give_back(len(self._body))
            self._body = None

    def _start(self, message: Message) -> None:
        headers = MutableHeaders(scope=message)
        self._status = message["status"]
        self._content_type = headers.get("content-type", "")
        if self._claim is None:
            headers["Idempotency-Status"] = "unavailable"
        elif 200 <= self._status < 300:
            self._body = bytearray()

    async def _keep(self, body: bytes) -> None:
        self.close()
        if self._claim is not None and not self._scope.get("state", {}).get("stream_failed"):
            await self._claim.finish(self._status, self._content_type, body)
