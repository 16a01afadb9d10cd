"""One request's way back: tokens from a controller, waited for by the coroutine that answers the client.

A step's tokens for many requests arrive in one message; each stream only appends and, if its reader
waits, wakes it once. A stream ends exactly once; leaving it early (`close`) tells the controller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from trunkline.controller.messages import TopLogprobs


class Batch(msgspec.Struct):
    """What has arrived since the reader last looked."""

    tokens: list[int]
    logprobs: list[TopLogprobs | None]
    """One per token, or empty where the request asked for none."""
    reason: str | None = None
    """A `FinishReason` once the request has ended; nothing follows then."""
    detail: str = ""


class Stream:
    """The router's end of one request at one controller."""

    def __init__(
        self, request: int, release: Callable[[int, bool], None], *, wants_logprobs: bool = False
    ) -> None:
        """`release(request, abort)` takes the stream off its controller's books; called exactly once."""
        self.request = request
        self.started = False
        self.cached_tokens = 0
        """Prompt tokens whose KV was found; valid once `started`."""
        self._release: Callable[[int, bool], None] | None = release
        self._wants_logprobs = wants_logprobs
        self._batch = Batch([], [])
        self._waiter: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        """Whether the controller has nothing more to say, or nobody listens."""
        return self._release is None

    def start(self, cached_tokens: int) -> None:
        """The controller admitted the request."""
        self.started = True
        self.cached_tokens = cached_tokens
        self._wake()

    def push(self, token: int, logprobs: TopLogprobs | None) -> None:
        """A token arrived."""
        self._batch.tokens.append(token)
        if self._wants_logprobs:
            self._batch.logprobs.append(logprobs)
        self._wake()

    def finish(self, reason: str, detail: str = "") -> None:
        """The request ended. Later calls do nothing: the first end is the one that counts."""
        if self._let_go(abort=False):
            self._batch.reason = reason
            self._batch.detail = detail
            self._wake()

    def cut(self, reason: str, detail: str) -> None:
        """End the request from this side (time limit, shutdown): abort it, and let its reader know why."""
        if self._let_go(abort=True):
            self._batch.reason = reason
            self._batch.detail = detail
            self._wake()

    def close(self) -> None:
        """The reader wants no more: abort the request if it still runs. May be called at any time."""
        self._let_go(abort=True)

    async def wait_first(self) -> None:
        """Return as soon as the request was admitted, brought a token or ended."""
        while not (self.started or self._batch.tokens or self._batch.reason is not None):
            await self._wait()

    async def next(self) -> Batch:
        """What has arrived, waiting until there is something. Not to be called after an end was read."""
        while not (self._batch.tokens or self._batch.reason is not None):
            await self._wait()
        batch, self._batch = self._batch, Batch([], [])
        return batch

    @property
    def failure(self) -> tuple[str, str] | None:
        """Reason and detail of an end that has arrived and was not read yet."""
        return None if self._batch.reason is None else (self._batch.reason, self._batch.detail)

    def _let_go(self, *, abort: bool) -> bool:
        release, self._release = self._release, None
        if release is None:
            return False
        release(self.request, abort)
        return True

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
