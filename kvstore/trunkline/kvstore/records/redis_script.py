"""A script on a server of Redis's protocol, called with patience: the server may restart, fail over or be slow."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import redis.asyncio
import redis.exceptions as refusals

from .store import StoreAwayError

_CONNECT_S: Final = 2.0
_ANSWER_S: Final = 4.0
"""Seconds to wait for an answer, the wait for a free connection and the connection itself among them."""
_ANSWER_LEAST_S: Final = 1.0
"""The same for the last try, at the end of the caller's patience."""
_IDLE_S: Final = 60.0
"""Seconds after which an unused connection is not used again: something on the way may have forgotten it."""
_CONNECTIONS: Final = 16
_PAUSE_FIRST_S: Final = 0.05
_PAUSE_MOST_S: Final = 0.5
_PASSING: Final = ("READONLY", "LOADING", "BUSY", "MASTERDOWN", "NOREPLICAS", "UNKILLABLE")
"""Refusals that end by themselves. Old servers name them in the middle of a text."""
_NAMED: Final = (refusals.ReadOnlyError, refusals.MasterDownError)
"""Exceptions of such refusals whose texts do not name them."""

_Answer = TypeVar("_Answer")


class RedisScript:
    """Calls one script with one answer per call, in one round trip.

    A call that is cancelled or fails closes its connection, so that no later call reads its answer.
    """

    def __init__(self, url: str, body: str, *, patience_s: float) -> None:
        """Set up the connections without connecting yet.

        Args:
            body: the script.
            patience_s: how long a call is tried.

        Raises:
            ValueError: the URL cannot be read. The message does not contain it, because it may hold a password.
        """
        parts = urlsplit(url)
        self.place = f"{parts.hostname}:{parts.port or 6379}" if parts.hostname else parts.path
        """Where the server is, for messages: the whole URL may hold a password."""
        keepalive = {} if parts.scheme == "unix" else {"socket_keepalive": True}
        self._pool: Any = redis.asyncio.ConnectionPool.from_url(
            url.replace("valkey", "redis", 1) if parts.scheme.startswith("valkey") else url,
            socket_connect_timeout=_CONNECT_S,
            socket_timeout=None,
            protocol=2,
            **keepalive,
        )
        self._body = body
        self._digest = hashlib.sha1(body.encode()).hexdigest()
        self._patience_s = patience_s
        self._free: list[tuple[Any, float]] = []
        """Connections that no call uses, and since when, by the event loop's clock."""
        self._slots = asyncio.Semaphore(_CONNECTIONS)
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def call(self, *args: bytes | str | int) -> Any:
        """Call the script and return its answer: bytes, or a list of bytes.

        Raises:
            StoreAwayError: the server does not answer, or refuses.
        """

        async def ask(connection: Any) -> Any:
            try:
                return await _ask(connection, "EVALSHA", self._digest, 0, *args)
            except refusals.NoScriptError:
                return await _ask(connection, "EVAL", self._body, 0, *args)

        return await self._persistently(ask)

    async def command(self, *args: str) -> Any:
        """Send another command and return its answer.

        Raises:
            StoreAwayError: the server does not answer.
            redis.exceptions.ResponseError: the server refuses, such as for lack of a permission.
        """

        async def ask(connection: Any) -> Any:
            try:
                return await _ask(connection, *args)
            except refusals.ResponseError as error:
                if _passes(error):
                    raise
                return error

        answer = await self._persistently(ask)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self) -> None:
        """Wait for the calls that have begun, and end the connections."""
        await self._idle.wait()
        await self._drop(self._free)

    async def _persistently(self, ask: Callable[[Any], Awaitable[_Answer]]) -> _Answer:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience_s
        pause = 0.0
        self._under_way += 1
        self._idle.clear()
        try:
            while True:
                try:
                    left = deadline - loop.time()
                    return await self._once(ask, min(_ANSWER_S, max(_ANSWER_LEAST_S, left)))
                except (refusals.RedisError, OSError, TimeoutError) as error:
                    if not isinstance(error, refusals.ResponseError):
                        await self._drop(self._free)  # a server that ended one has probably ended all
                    if not _passes(error):
                        raise StoreAwayError(f"the store of records at {self.place} refuses: {error}") from error
                    if loop.time() + pause >= deadline:
                        reason = str(error) or "it does not answer in time"
                        raise StoreAwayError(f"the store of records at {self.place} is away: {reason}") from error
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(_PAUSE_MOST_S, 2 * pause or _PAUSE_FIRST_S)
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    async def _once(self, ask: Callable[[Any], Awaitable[_Answer]], answer_s: float) -> _Answer:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(answer_s), self._slots:
            await self._drop([each for each in self._free if each[1] < loop.time() - _IDLE_S])
            connection = self._free.pop()[0] if self._free else self._pool.make_connection()
            try:
                await connection.connect()  # nothing if it is connected
                answer = await ask(connection)
            except refusals.ResponseError:  # a whole answer
                self._free.append((connection, loop.time()))
                raise
            except BaseException:
                await connection.disconnect(nowait=True)
                raise
            self._free.append((connection, loop.time()))
            return answer

    async def _drop(self, unused: list[tuple[Any, float]]) -> None:
        dropped = list(unused)
        self._free = [each for each in self._free if each not in dropped]
        for connection, _ in dropped:
            await connection.disconnect(nowait=True)


async def _ask(connection: Any, *command: bytes | str | int) -> Any:
    await connection.send_command(*command)
    return await connection.read_response()


def _passes(error: Exception) -> bool:
    """Return whether the same call may succeed later."""
    if isinstance(error, refusals.AuthenticationError | refusals.AuthorizationError):
        return False
    if isinstance(error, refusals.ResponseError):
        return isinstance(error, _NAMED) or any(word in str(error) for word in _PASSING)
    return True
