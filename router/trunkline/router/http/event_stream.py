"""Answering a client that may leave at any moment: then the work for it stops at once.

Reading from an HTTP connection whose request is complete waits for its end; so a watcher reads while the
answer is made, and cancels it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final, Protocol, TypeVar

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trunkline.router.errors import ApiError
from trunkline.router.http.json_response import event

CLIENT_LEFT_STATUS: Final = 499
"""nginx's code for it; seen in metrics and logs only."""
BODY_SEND: Final = "trunkline.body_send"
"""In a request's scope: where the parts of its answer's body may go straight to. Most of what stands between an
endpoint and the connection looks at the beginning of an answer only, and would cost each token a few calls."""

EVENT_STREAM_HEADERS: Final = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Proxies pass events on as they come."""

_T = TypeVar("_T")
_log = structlog.get_logger("trunkline.router.api")


class Closable(Protocol):
    """Work that must be let go of, such as a `Generation`."""

    def close(self) -> None:
        """Abort what still runs. May be called again."""


class ClientLeftError(Exception):
    """The client closed its connection; nobody reads an answer."""


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _race(work: Coroutine[Any, Any, _T], receive: Receive) -> _T:
    """Run `work` while the client is there.

    Raises:
        ClientLeftError: it is not, and `work` was cancelled.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeftError
    finally:
        for pending in (task, watcher):
            pending.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def while_connected(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """`work`'s result, as long as the client of `request` (whose body was read) waits for it.

    Raises:
        ClientLeftError: it left; `work` was cancelled.
    """
    return await _race(work, request.receive)


class EventStream(Response):
    """Server-sent events of one answer."""

    media_type = "text/event-stream"

    def __init__(
        self,
        work: Closable,
        events: AsyncIterator[bytes],
        last_words: Callable[[ApiError], bytes] = lambda error: event(error.body()),
    ) -> None:
        """`events` may raise `ApiError`, which `last_words` makes the last event; `work` is closed in the end."""
        super().__init__(headers=EVENT_STREAM_HEADERS, media_type=self.media_type)
        del self.headers["content-length"]
        self._work = work
        self._events = events
        self._last_words = last_words

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry point."""
        try:
            await _race(self._send(scope, send), receive)
        except ClientLeftError:
            scope.setdefault("state", {})["client_left"] = True
        finally:
            self._work.close()

    async def _send(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        send = scope.get(BODY_SEND, send)
        try:
            async for part in self._events:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except ApiError as error:
            scope.setdefault("state", {})["stream_failed"] = True
            _log.warning("stream_failed", code=error.code, detail=error.message)
            self._work.close()  # before the client hears of it: its next try must not find its session in use
            await send({"type": "http.response.body", "body": self._last_words(error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
