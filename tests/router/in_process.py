"""An httpx transport that calls a running router's application in its event loop, without a socket in between.

For tests of what the API answers. What HTTP itself does (parsing, limits of connections, keep-alive) is not here:
tests of that send their requests to `RunningRouter.url`.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx

Message = dict[str, Any]


class _Exchange:
    """One request: the messages of ASGI between the client's thread and the router's loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.answers: queue.SimpleQueue[Message | BaseException] = queue.SimpleQueue()
        self.is_answered = False
        """Whether the last part of the answer was sent."""
        self._sent: asyncio.Queue[Message] = asyncio.Queue()
        self._has_left = asyncio.Event()

    def give(self, message: Message) -> None:
        """Let the application receive a message; from the client's thread."""
        self.loop.call_soon_threadsafe(self._sent.put_nowait, message)

    def leave(self) -> None:
        """Tell the application that the client has left."""
        self.loop.call_soon_threadsafe(self._has_left.set)

    async def receive(self) -> Message:
        """Return the next part of the body, then wait until the client leaves."""
        parts = asyncio.create_task(self._sent.get())
        left = asyncio.create_task(self._has_left.wait())
        try:
            await asyncio.wait((parts, left), return_when=asyncio.FIRST_COMPLETED)
            return parts.result() if parts.done() else {"type": "http.disconnect"}
        finally:
            parts.cancel()
            left.cancel()

    async def send(self, message: Message) -> None:
        """Hand a part of the answer to the client."""
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.is_answered = True
        self.answers.put(message)
        if self.is_answered:
            self._has_left.set()  # as a server says once the answer is out

    async def run(self, app: Callable[..., Awaitable[None]], scope: Message) -> None:
        """Run the application; what it raises is raised in the client."""
        try:
            await app(scope, self.receive, self.send)
        except BaseException as error:  # noqa: BLE001 (raised again in the client's thread)
            self.answers.put(error)

    def next(self, timeout_s: float | None) -> Message:
        """Return the next part of the answer.

        Raises:
            httpx.ReadTimeout: It did not come in time; the client leaves.
        """
        try:
            answer = self.answers.get(timeout=timeout_s)
        except queue.Empty:
            self.leave()
            raise httpx.ReadTimeout("the application was silent") from None
        if isinstance(answer, BaseException):
            raise answer
        return answer


class _Answer(httpx.SyncByteStream):
    """The body of an answer, as it comes."""

    def __init__(self, exchange: _Exchange, timeout_s: float | None, *, is_head: bool) -> None:
        self._exchange, self._timeout_s, self._is_head = exchange, timeout_s, is_head

    def __iter__(self) -> Iterator[bytes]:
        more = True
        while more:
            part = self._exchange.next(self._timeout_s)
            more = part.get("more_body", False)
            if part.get("body") and not self._is_head:
                yield part["body"]

    def close(self) -> None:
        """Leave, if the answer is not over."""
        self._exchange.leave()


class InProcess(httpx.BaseTransport):
    """Requests to an application, from any thread but that of its loop."""

    def __init__(self, app: Callable[..., Awaitable[None]], loop: asyncio.AbstractEventLoop) -> None:
        self._app, self._loop = app, loop

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, and return its answer once its headers are known."""
        exchange = _Exchange(self._loop)
        timeout_s = request.extensions.get("timeout", {}).get("read")
        path, _, query = request.url.raw_path.partition(b"?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": request.url.scheme,
            "path": request.url.path,
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "client": ("127.0.0.1", 1),
            "server": (request.url.host, request.url.port),
            "state": {},
        }
        asyncio.run_coroutine_threadsafe(exchange.run(self._app, scope), self._loop)
        assert isinstance(request.stream, httpx.SyncByteStream)
        try:
            for part in request.stream:
                exchange.give({"type": "http.request", "body": part, "more_body": True})
                if not exchange.answers.empty():
                    break  # it was refused before all of it was sent
        except BaseException:
            exchange.leave()
            raise
        exchange.give({"type": "http.request", "body": b"", "more_body": False})
        head = exchange.next(timeout_s)
        stream = _Answer(exchange, timeout_s, is_head=request.method == "HEAD")
        return httpx.Response(head["status"], headers=head["headers"], stream=stream)
