"""Answers on their way to a client: JSON, streams of events, and the end of the work when the client leaves.

A client may leave at any moment. Reading from a connection whose request is complete waits for the connection's
end. So a watcher reads while the answer is made, and cancels the work when the read returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, Final, Protocol, TypeVar

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trunkline.router.errors import ApiError, RouterError

CLIENT_LEFT_STATUS: Final = 499
"""nginx's status for a client that has left; seen in metrics and logs only."""
BODY_SEND: Final = "trunkline.body_send"
"""Key in a request's scope: the `send` that takes the parts of the answer's body. Most middleware looks only at
the beginning of an answer, and would cost each token a few calls."""

EVENT_STREAM_HEADERS: Final = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""They make proxies pass events on as they come."""

_T = TypeVar("_T")
_log = structlog.get_logger("trunkline.router.api")


class Closable(Protocol):
    """Work that must be closed, such as a `Generation`."""

    def close(self) -> None:
        """Abort the work if it still runs. May be called again."""


class ClientLeftError(RouterError):
    """The client closed its connection; nobody reads an answer."""


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _race(work: Coroutine[Any, Any, _T], receive: Receive) -> _T:
    """Run `work` while the client is connected, and return its result.

    Raises:
        ClientLeftError: the client has left; `work` was cancelled.
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
    """Return the result of `work`, while the client of `request` (whose body was read) waits for it.

    Raises:
        ClientLeftError: the client has left; `work` was cancelled.
    """
    return await _race(work, request.receive)


class EventStream(Response):
    """An answer that is a stream of server-sent events."""

    media_type = "text/event-stream"

    def __init__(
        self,
        work: Closable,
        events: AsyncIterator[bytes],
        last_words: Callable[[ApiError], bytes] = lambda error: event(error.body()),
    ) -> None:
        """`events` may raise `ApiError`, of which `last_words` makes the last event; `work` is closed in the
        end."""
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


_encode = msgspec.json.Encoder().encode


class JsonResponse(Response):
    """An answer whose body is a Struct, dict or list as JSON."""

    media_type = "application/json"

    def __init__(self, content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(_encode(content), status_code=status, headers=headers)


def encoded(content: Any) -> msgspec.Raw:
    """Return a part of an answer as JSON. An answer of many large parts is encoded part by part: while one call
    encodes, no other thread of the process runs."""
    return msgspec.Raw(_encode(content))


def event(content: Any) -> bytes:
    """Return a server-sent event with a JSON payload."""
    return b"data: " + _encode(content) + b"\n\n"


class TextEvents:
    """Events that differ in their text only, as nearly all of a stream do: all else is encoded once."""

    def __init__(self, encode: Callable[[int, str], bytes]) -> None:
        """`encode`: the whole event of a choice, by its index, with a text."""
        self._encode = encode
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def event(self, index: int, text: str) -> bytes:
        """Return the event of a choice with a text."""
        around = self._around.get(index)
        if around is None:
            head, _, tail = self._encode(index, _MARK).rpartition(_MARK_JSON)
            around = self._around[index] = head, tail
        return around[0] + _encode(text) + around[1]


_MARK: Final = "\ue000the text goes here\ue000"
_MARK_JSON: Final = _encode(_MARK)
"""The text is the last of an event's fields that can hold anything a client or a model says."""

DONE_EVENT = b"data: [DONE]\n\n"
