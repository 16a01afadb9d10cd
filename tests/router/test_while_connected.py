"""Work for a client that may leave: what the work returns is used or closed, however the wait for it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, MutableMapping
from typing import Any

import pytest
from starlette.requests import Request

from trunkline.router.errors import ApiError
from trunkline.router.http.answers import ClientLeftError, EventStream, while_connected


class _Work:
    """Something that must be closed."""

    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class _Client:
    """A connection whose body was read."""

    def __init__(self) -> None:
        self.has_left = asyncio.Event()

    def request(self) -> Request:
        return Request({"type": "http"}, self._receive)

    async def _receive(self) -> dict[str, Any]:
        await self.has_left.wait()
        return {"type": "http.disconnect"}


def test_a_result_is_returned_open() -> None:
    async def run() -> None:
        made = _Work()

        async def work() -> _Work:
            await asyncio.sleep(0)
            return made

        assert await while_connected(_Client().request(), work()) is made
        await asyncio.sleep(0)
        assert not made.is_closed

    asyncio.run(run())


def test_the_caller_is_cancelled_at_the_moment_at_which_the_work_could_go_on() -> None:
    """A batch is cancelled at the moment at which an engine accepts one of its requests: the work learns of it."""
    ended: list[str] = []

    async def run() -> None:
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def work() -> None:
            try:
                await accepted
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise

        outer = asyncio.ensure_future(while_connected(_Client().request(), work()))
        await asyncio.sleep(0)
        accepted.set_result(None)
        outer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await outer

    asyncio.run(run())
    assert ended == ["cancelled"]


def test_a_caller_goes_on_behind_a_client_that_has_left() -> None:
    """The cancellation is used up: the caller may wait for something else."""

    async def run() -> None:
        client = _Client()
        client.has_left.set()
        with pytest.raises(ClientLeftError):
            await while_connected(client.request(), asyncio.Event().wait())
        await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()

    asyncio.run(run())


def test_a_caller_that_is_cancelled_as_the_client_leaves_stays_cancelled() -> None:
    async def run() -> None:
        client = _Client()
        outer = asyncio.ensure_future(while_connected(client.request(), asyncio.Event().wait()))
        for _ in range(3):
            await asyncio.sleep(0)
        client.has_left.set()
        await asyncio.sleep(0)
        outer.cancel()
        with pytest.raises((asyncio.CancelledError, ClientLeftError)):
            await outer
        assert outer.cancelled()

    asyncio.run(run())


def test_a_result_made_in_spite_of_the_clients_leaving_is_closed() -> None:
    async def run() -> None:
        client, made = _Client(), _Work()

        async def work() -> _Work:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return made
            raise AssertionError

        client.has_left.set()
        with pytest.raises(ClientLeftError):
            await while_connected(client.request(), work())
        await asyncio.sleep(0)
        assert made.is_closed

    asyncio.run(run())


def test_work_is_cancelled_with_its_caller() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("work")

    async def run() -> None:
        outer = asyncio.ensure_future(while_connected(_Client().request(), work()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        outer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await outer

    asyncio.run(run())
    assert ended == ["work"]


def test_a_client_that_leaves_as_the_work_ends_cancels_nothing_behind_it() -> None:
    """The watcher has seen it, but not said so yet."""

    async def run() -> None:
        client, made, done = _Client(), _Work(), asyncio.get_running_loop().create_future()

        async def work() -> _Work:
            await done
            return made

        async def answer() -> _Work:
            result = await while_connected(client.request(), work())
            await asyncio.sleep(0)  # as an answer that is sent, and counted
            await asyncio.sleep(0)
            return result

        outer = asyncio.ensure_future(answer())
        for _ in range(3):
            await asyncio.sleep(0)
        client.has_left.set()
        done.set_result(None)
        assert await outer is made
        assert not made.is_closed

    asyncio.run(run())


class _Opening:
    """A stream of one event, and how its beginning, which waits for `may_begin`, ends."""

    def __init__(self, problem: ApiError | None = None) -> None:
        self.may_begin = asyncio.Event()
        self.work, self.client, self.sent = _Work(), _Client(), list[bytes | str]()
        self.stream = EventStream(self.work, self._events(), begin=self._begin)
        self._problem = problem
        self.was_cancelled = False

    async def _begin(self) -> None:
        try:
            await self.may_begin.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        if self._problem is not None:
            raise self._problem

    @staticmethod
    async def _events() -> AsyncIterator[bytes]:
        yield b"event"

    async def answer(self, scope: dict[str, Any]) -> None:
        async def send(message: MutableMapping[str, Any]) -> None:
            self.sent.append(message.get("body", message["type"]))

        await self.stream(scope, self.client._receive, send)


def test_a_stream_sends_nothing_before_it_has_begun() -> None:
    async def run() -> None:
        opening = _Opening()
        answer = asyncio.ensure_future(opening.answer({}))
        for _ in range(3):
            await asyncio.sleep(0)
        assert not opening.sent
        opening.may_begin.set()
        await answer
        assert opening.sent == ["http.response.start", b"event", b""]
        assert opening.work.is_closed

    asyncio.run(run())


@pytest.mark.parametrize("is_inside", [False, True])
def test_what_keeps_a_stream_from_beginning_is_raised_and_its_work_closed(is_inside: bool) -> None:
    """For a client, and for a reader in the router."""

    async def run() -> None:
        opening = _Opening(ApiError(503, "not now"))
        opening.may_begin.set()
        read: Awaitable[object] = anext(opening.stream.parts()) if is_inside else opening.answer({})
        with pytest.raises(ApiError, match="not now"):
            await read
        assert opening.work.is_closed
        assert not opening.sent

    asyncio.run(run())


def test_a_client_that_leaves_before_a_stream_begins_cancels_its_beginning() -> None:
    async def run() -> None:
        opening, scope = _Opening(), dict[str, Any]()
        answer = asyncio.ensure_future(opening.answer(scope))
        await asyncio.sleep(0)
        opening.client.has_left.set()
        await asyncio.wait_for(answer, 10)
        assert (opening.was_cancelled, opening.work.is_closed, opening.sent) == (True, True, [])
        assert scope["state"] == {"client_left": True}

    asyncio.run(run())
