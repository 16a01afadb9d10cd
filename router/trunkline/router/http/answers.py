"""Answers on their way to a client: JSON, errors, streams of events, and the end of the work when the client
leaves.

A client may close its connection at any moment. Reading from a connection whose request is complete waits until
the connection ends. So a watcher reads while the answer is made, and cancels the work when the read returns. The
work itself runs in the request's own task: what wakes it has no other task to pass through.

Errors have OpenAI's form everywhere but under `/v1/messages` and `/api`, where clients expect Anthropic's and
Ollama's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from trunkline.router.errors import ApiError, RouterError
from trunkline.router.request_context import current
from trunkline.router.streams.generation import Delta
from trunkline.router.streams.takers import Outlet

CLIENT_LEFT_STATUS: Final = 499
"""Status of a request whose client has left, as in nginx. It appears in metrics and logs only."""
BODY_SEND: Final = "trunkline.body_send"
"""Key in a request's scope: the `send` for the parts of the answer's body. Most middleware looks only at the
beginning of an answer; passing each token through it would cost a few calls."""

BODY_OUTLET: Final = "trunkline.body_outlet"
"""Key in a request's scope: the `StreamOutlet` for parts of the answer's body, if there is one. Parts may go there
while nothing is on its way through `send`."""

SPELT: Final = "trunkline.spelt"
"""Key in a request's scope: the client's spelling of parameters, by the names that errors have for them."""

EVENT_STREAM_HEADERS: Final = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Headers of event streams, which make proxies pass each event on at once."""
_EVENT_STREAM_HEADERS: Final = [
    (name.lower().encode(), value.encode()) for name, value in EVENT_STREAM_HEADERS.items()
]

_T = TypeVar("_T")
_log = structlog.get_logger("trunkline.router.api")
_encode = msgspec.json.Encoder().encode
_MARK: Final = "\ue000the text goes here\ue000"
_MARK_JSON: Final = _encode(_MARK)
"""The mark, encoded as JSON, that `TextEvents` replaces by the text. It is searched from the right: no field
behind the text can have contents chosen by a client or a model."""
DONE_EVENT = b"data: [DONE]\n\n"
_ANTHROPIC_PATH: Final = "/v1/messages"
_OLLAMA_PATHS: Final = "/api/"
_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_NULLABLE_STRING: Final = {"type": ["string", "null"]}
SCHEMAS: Final[dict[str, dict[str, Any]]] = {
    "Error": {
        "type": "object",
        "properties": {
            "error": {
                "type": "object",
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": _NULLABLE_STRING,
                    "code": _NULLABLE_STRING,
                    "line": {"type": ["integer", "null"], "description": "Of PML, where the error is; from 1."},
                    "column": {"type": ["integer", "null"]},
                    "path": {"type": "string", "description": "Of the module that the error is in."},
                },
                "required": ["message", "type", "param", "code"],
            }
        },
        "required": ["error"],
    },
    "AnthropicError": {
        "type": "object",
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
                "required": ["type", "message"],
            },
            "request_id": {"type": "string"},
        },
        "required": ["type", "error"],
    },
    "OllamaError": {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]},
}
"""Schemas of the forms of errors, for the OpenAPI document."""


class StreamOutlet(Outlet, Protocol):
    """An outlet for a whole stream. What its head needs is known long before the first token, for which a client
    waits: so the head is made ahead, and leaves with the token."""

    async def make_head(self, send: Send, start: Message) -> None:
        """Have `send` make the head of the answer from its `start`, but write nothing."""

    def begin(self) -> bool:
        """Begin the answer with the head that was made; return False if there is none that still holds."""

    @property
    def has_begun(self) -> bool:
        """Whether the answer has begun, so that it can be no other one."""

    def flush(self) -> None:
        """Write the head if it has not left."""


@runtime_checkable
class Closable(Protocol):
    """Work for an answer that must be closed in the end, such as a `Generation`."""

    def close(self) -> None:
        """Abort the work if it still runs. May be called again."""


class ClientLeftError(RouterError):
    """The client has closed its connection before the end of the answer."""


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Watch:
    """Cancels a task when the client of its request leaves."""

    def __init__(self, task: asyncio.Task[Any], receive: Receive) -> None:
        self.has_left = False
        self._is_over = False
        self._task = task
        self._watcher = task.get_loop().create_task(_disconnected(receive))
        self._watcher.add_done_callback(self._leave)

    def end(self) -> None:
        """Watch no longer. Once this was called, nothing is cancelled any more."""
        self._is_over = True
        self._watcher.cancel()

    def _leave(self, watcher: asyncio.Future[None]) -> None:
        if watcher.cancelled():
            return
        watcher.exception()  # asyncio would log an error that was never read
        if not self._is_over:  # a call that asyncio has begun to make can be taken back by this alone
            self.has_left = True
            self._task.cancel()


async def _race(work: Coroutine[Any, Any, _T], receive: Receive) -> _T:
    """Run `work` in the present task while the client is connected, and return its result. If it has one although
    the client has left, the result is closed.

    Raises:
        ClientLeftError: the client has left, and `work` was cancelled.
    """
    task = asyncio.current_task()
    assert task is not None
    watch = _Watch(task, receive)
    cancelled = task.cancelling()
    try:
        result = await work
    except asyncio.CancelledError:
        if watch.has_left and task.uncancel() <= cancelled:  # nothing else has cancelled it
            raise ClientLeftError from None
        raise
    finally:
        watch.end()
    if not watch.has_left:
        return result
    task.uncancel()
    if isinstance(result, Closable):
        result.close()
    raise ClientLeftError


async def while_connected(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of `work`. Cancel it if the client of `request`, whose body was read, leaves.

    Raises:
        ClientLeftError: the client has left, and `work` was cancelled.
    """
    return await _race(work, request.receive)


async def _at_once() -> None:
    pass


class EventStream(Response):
    """An answer in the form of a stream of server-sent events."""

    media_type = "text/event-stream"
    _content_type = b"text/event-stream; charset=utf-8"

    def __init__(
        self,
        work: Closable,
        events: AsyncIterator[bytes],
        last_words: Callable[[ApiError], bytes] = lambda error: event(error.body()),
        begin: Callable[[], Awaitable[None]] = _at_once,
    ) -> None:
        """
        Args:
            work: closed in the end, however the stream ends.
            events: the encoded events; may raise `ApiError`.
            last_words: makes the last event of that error.
            begin: awaited before the answer begins; the `ApiError` that it may raise is answered instead.
        """
        # `Response.__init__` would make the headers of each answer anew, from their texts.
        self.status_code, self.body = 200, b""
        self.raw_headers = [*_EVENT_STREAM_HEADERS, (b"content-type", self._content_type)]
        self.background = None
        self._work = work
        self._events = events
        self._last_words = last_words
        self._begin = begin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry point."""
        try:
            await _race(self._send(scope, send), receive)
        except ClientLeftError:
            scope.setdefault("state", {})["client_left"] = True
        finally:
            self._work.close()

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the events to a reader in the router, not to a client. Errors are raised, as `ApiError`."""
        try:
            await self._begin()
            async for part in self._events:
                yield part
        finally:
            self._work.close()

    async def _send(self, scope: Scope, send: Send) -> None:
        outlet: StreamOutlet | None = scope.get(BODY_OUTLET)
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        meter = current().meter  # what is left of limits is told as it is when the answer begins
        if outlet is not None and self._begin is not _at_once and not (meter is not None and meter.headers()):
            await outlet.make_head(send, start.copy())
        await self._begin()
        if outlet is None or not outlet.begin():
            await send(start)
        body_send = scope.get(BODY_SEND, send)

        async def pass_on(part: bytes, *, is_last: bool = False) -> None:
            if outlet is not None and outlet.is_open and not is_last:
                outlet.write(part)
                return
            if outlet is not None:
                outlet.flush()
            await body_send({"type": "http.response.body", "body": part, "more_body": not is_last})

        try:
            async for part in self._events:
                await pass_on(part)
        except ApiError as failure:
            error = failure.renamed(scope.get(SPELT, {}))
            scope.setdefault("state", {})["stream_failed"] = True
            _log.warning("stream_failed", code=error.code, detail=error.message)
            self._work.close()  # before the client gets the error: its next try must not find its session in use
            await pass_on(self._last_words(error))
        await pass_on(b"", is_last=True)


class LineStream(EventStream):
    """An answer in the form of a stream of lines, each a JSON object, as in Ollama's API."""

    media_type = "application/x-ndjson"
    _content_type = b"application/x-ndjson"

    def __init__(self, work: Closable, lines: AsyncIterator[bytes]) -> None:
        """`work`, `lines`: as in `EventStream`."""
        super().__init__(work, lines, lambda error: line(ollama_error(error)))


class JsonResponse(Response):
    """An answer with a JSON body, made of a `msgspec.Struct`, dict or list."""

    media_type = "application/json"

    def __init__(self, content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(_encode(content), status_code=status, headers=headers)


def encoded(content: Any) -> msgspec.Raw:
    """Return a part of an answer as JSON. Answers with many large parts are encoded part by part, since no other
    thread of the process runs during a call of the encoder."""
    return msgspec.Raw(_encode(content))


def event(content: Any) -> bytes:
    """Return a server-sent event with a JSON payload."""
    return b"data: " + _encode(content) + b"\n\n"


def line(content: Any) -> bytes:
    """Return a line with a JSON object."""
    return _encode(content) + b"\n"


class TextEvents:
    """Encodes events that differ only in their text, as nearly all events of a stream do: all else is encoded
    once."""

    __slots__ = ("_around", "_encode", "_head", "_index", "_tail")

    def __init__(self, encode: Callable[[int, str], bytes]) -> None:
        """`encode`: returns the whole event of a choice, given by its index, with a text."""
        self._encode = encode
        self._around: dict[int, tuple[bytes, bytes]] = {}
        self._index, self._head, self._tail = -1, b"", b""
        """The choice of the last event, and what stands around its text: a stream mostly has one choice."""

    def of(self, delta: Delta) -> bytes:
        """Return the event of a piece of a choice; b"": the piece has no text."""
        return self.event(delta.index, delta.text) if delta.text else b""

    def event(self, index: int, text: str) -> bytes:
        """Return the event of a choice with a text."""
        if index != self._index:
            self.go_to(index)
        return self._head + _encode(text) + self._tail

    def go_to(self, index: int) -> None:
        """Encode what stands around the texts of a choice."""
        around = self._around.get(index)
        if around is None:
            head, _, tail = self._encode(index, _MARK).rpartition(_MARK_JSON)
            around = self._around[index] = head, tail
        self._index, (self._head, self._tail) = index, around


def schema_of(path: str) -> str:
    """Return the name in `SCHEMAS` of the form that a path's errors have."""
    if path.startswith(_OLLAMA_PATHS):
        return "OllamaError"
    return "AnthropicError" if is_anthropic(path) else "Error"


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """Return an error in Anthropic's form: the JSON body, or the payload of an error event in a stream."""
    kind, message = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error"), _with_param(error)
    record = current().record
    name = {} if record is None else {"request_id": record.id}
    return {"type": "error", "error": {"type": kind, "message": message}, **name}


def ollama_error(error: ApiError) -> dict[str, Any]:
    """Return an error in Ollama's form: the JSON body, or the last line of a stream."""
    return {"error": _with_param(error)}


def _with_param(error: ApiError) -> str:
    """Return an error's message for a form that has no field for the parameter."""
    if error.param is None or f"`{error.param}`" in error.message:
        return error.message
    return f"{error.message} (parameter `{error.param}`)"


def error_response(path: str, error: ApiError, headers: Mapping[str, str] | None = None) -> JsonResponse:
    """Return the answer to a request to `path` that has failed. `headers`: None: those of the error."""
    if path.startswith(_OLLAMA_PATHS):
        body = ollama_error(error)
    else:
        body = anthropic_error(error) if is_anthropic(path) else error.body()
    return JsonResponse(body, error.status, error.headers() if headers is None else headers)


def is_anthropic(path: str) -> bool:
    """Return whether a path is one of Anthropic's API, whose answers have forms of their own."""
    return path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/")
