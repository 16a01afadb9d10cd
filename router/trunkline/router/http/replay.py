"""Around the endpoints that create something: a request with an `Idempotency-Key` is answered once
(`idempotency.py`).

The answer is copied as it is sent, streams included, and kept if it is a good one. Its end is told when it has
been kept. Errors are not kept, nor streams that end with one: the next try is a new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trunkline.router.errors import ApiError
from trunkline.router.http.answers import BODY_SEND, EVENT_STREAM_HEADERS, JsonResponse, while_connected
from trunkline.router.http.body import SESSION_HEADER, read_body
from trunkline.router.http.error_forms import error_body
from trunkline.router.http.idempotency import (
    BODY_BYTES_MAX,
    Claim,
    IdempotencyStore,
    RequestName,
    Result,
    name_request,
)
from trunkline.router.request_context import RequestRandom, created_at, known
from trunkline.router.tenancy.tenants import current_meter

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
"""A longer body is hashed in a thread."""
COPIES_BYTES_MAX: Final = 256 << 20
"""Most bytes of all answers that are being copied. An answer that does not fit is not kept."""


def takes_key(method: str, path: str) -> bool:
    """Return whether requests of a method to a path may have a key."""
    if method != "POST":
        return False
    return path in _PATHS or (path.startswith("/v1/sessions/") and path.endswith(_SESSION_VERBS))


class ReplayMiddleware:
    """Plain ASGI; inside of `AdmissionMiddleware`, which says whose keys they are."""

    def __init__(
        self, app: ASGIApp, store: IdempotencyStore, bytes_max: int, on_result: Callable[[str], Any]
    ) -> None:
        """
        Args:
            bytes_max: of a request's body.
            on_result: called with what became of each request with a key: "new", "replayed", "refused",
            "unavailable".
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
            response = JsonResponse(error_body(scope["path"], error), error.status, error.headers())
            await response(scope, receive, send)

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
        unread = None  # nobody needs it while the answer is made
        return message

    return again


def _replay(result: Result) -> Response:
    headers = {"Content-Type": result.content_type, "Idempotent-Replayed": "true"}
    if result.content_type.startswith("text/event-stream"):
        headers |= EVENT_STREAM_HEADERS
    return Response(result.body, result.status, headers)


class _Room:
    """Bytes of memory that many share."""

    def __init__(self, size: int) -> None:
        self._free = size

    def take(self, size: int) -> bool:
        """Take room for `size` bytes if there is enough; return whether there was."""
        if size > self._free:
            return False
        self._free -= size
        return True

    def give_back(self, size: int) -> None:
        """Give room back."""
        self._free += size


class _Copy:
    """Passes an answer on, and keeps it once it is complete."""

    def __init__(self, scope: Scope, claim: Claim | None, send: Send, room: _Room) -> None:
        self._scope = scope
        self._room = room
        self._claim = claim
        self._send = send
        self._status = 0
        self._content_type = ""
        self._body: bytearray | None = None
        """None: it is not to be kept."""

    async def send(self, message: Message) -> None:
        """See ASGI; copies the answer on its way."""
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
