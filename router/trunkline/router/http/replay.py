"""The middleware for requests with an `Idempotency-Key` (`idempotency.py`).

It copies an answer while it is sent, streams included. The copy is stored before the client gets the end of the
answer. Errors are not kept, nor streams that end with one: the next request tries again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trunkline.kvstore.records import RecordError
from trunkline.router.errors import ApiError
from trunkline.router.http.answers import (
    BODY_OUTLET,
    BODY_SEND,
    EVENT_STREAM_HEADERS,
    error_response,
    while_connected,
)
from trunkline.router.http.body import SESSION_HEADER, read_body
from trunkline.router.http.headers import headers_of
from trunkline.router.http.idempotency import Claim, IdempotencyStore, RequestName, Result, name_request
from trunkline.router.request_context import RequestRandom, created_at, known
from trunkline.router.tenancy.tenants import current_meter

BODY_BYTES_MAX: Final = 4 << 20
"""Largest size in bytes of an answer that is kept. If the answer was longer, a repeated request is generated
again."""
_PATHS: Final = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/v1/responses",
        "/v1/responses/compact",
        "/v1/messages",
        "/v1/messages/batches",
        "/v1/batches",
        "/api/chat",
        "/api/generate",
        "/api/embed",
        "/api/embeddings",
        "/v1/conversations",
        "/v1/sessions",
        "/v1/schemas",
    }
)
_UPLOADS: Final = "/v1/files"
"""Where a key does not count: its request would have to be in memory whole."""
_SESSION_VERBS: Final = ("/fork", "/discard")
_ITEMS: Final = "/items"
_HEADER: Final = "Idempotency-Key"
_OFF_LOOP_BYTES: Final = 1 << 20
"""Size in bytes above which a body is hashed in a thread."""
COPIES_BYTES_MAX: Final = 256 << 20
"""Largest size of all copies of answers together. An answer that does not fit is not kept."""


def takes_key(method: str, path: str) -> bool:
    """Return whether `Idempotency-Key` counts for requests of this method to this path."""
    if method != "POST":
        return False
    return (
        path in _PATHS
        or (path.startswith("/v1/sessions/") and path.endswith(_SESSION_VERBS))
        or (path.startswith("/v1/conversations/") and path.endswith(_ITEMS))
    )


def _is_upload(scope: Scope) -> bool:
    return bool(scope["method"] == "POST" and scope["path"] == _UPLOADS)


class ReplayMiddleware:
    """Answers each `Idempotency-Key` once. It stands inside of `AccessMiddleware`, which sets the tenant. Plain
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
        key = headers_of(scope).get(_HEADER)
        if key is not None and not takes_key(scope["method"], scope["path"]):
            key = None
            if _is_upload(scope):
                send = _Copy(scope, None, send, self._room).send
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
        except RecordError:
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
        session = headers_of(scope).get(SESSION_HEADER, "").encode()
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
        scope.pop(BODY_OUTLET, None)  # the copy has to get all parts
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
