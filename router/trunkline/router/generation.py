"""One running generation: a stream of tokens made into deltas of text, measured, and always let go of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Final

from trunkline.router.errors import TIMED_OUT, finish_error
from trunkline.router.metrics import Metrics
from trunkline.router.sampling import Job
from trunkline.router.streams import Batch, Stream
from trunkline.router.text import Delta, TextAssembler

_FIRST_EVENT_SECONDS_MAX: Final = 10.0
"""Until the first event an error can still be an HTTP status. A request that queues for longer gets its
response headers anyway, because proxies give up on connections without any."""


class Generation:
    """A submitted job. Call `close` in the end, whatever happened; `deltas` does so itself."""

    def __init__(
        self,
        job: Job,
        stream: Stream,
        assembler: TextAssembler,
        metrics: Metrics,
        arrived_at: float,
        on_close: Callable[[Generation], None],
    ) -> None:
        self.job = job
        self._stream = stream
        self._assembler = assembler
        self._metrics = metrics
        self._on_close: Callable[[Generation], None] | None = on_close
        self._loop = asyncio.get_running_loop()
        self._arrived_at = arrived_at
        self._last_token_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV was found."""
        return self._stream.cached_tokens

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far that count."""
        return self._assembler.output_tokens

    async def begin(self) -> None:
        """Wait until the controller has taken the request on.

        Raises:
            ApiError: it did not; nothing was generated.
        """
        try:
            async with asyncio.timeout(_FIRST_EVENT_SECONDS_MAX):
                await self._stream.wait_first()
        except TimeoutError:
            return
        failure = self._stream.failure
        error = None if failure is None else finish_error(*failure)
        if error is not None:
            raise error

    async def deltas(self) -> AsyncIterator[Delta]:
        """The answer, piece by piece; the last piece has `finish`.

        Raises:
            ApiError: the generation failed on the way.
        """
        try:
            while True:
                batch = await self._stream.next()
                self._measure(batch)
                # An end by failure still has the tokens before it: they were generated, so they are shown.
                error = None if batch.reason is None else finish_error(batch.reason, batch.detail)
                before = self._assembler.output_tokens
                delta = self._assembler.feed(batch.tokens, batch.logprobs, batch.reason if error is None else None)
                self._metrics.output_tokens.inc(self._assembler.output_tokens - before)
                if delta.finish is not None:
                    self._metrics.end_to_end.observe(self._loop.time() - self._arrived_at)
                    self.close()  # after a stop string the engine must not go on while the client reads
                yield delta
                if delta.finish is not None:
                    return
                if error is not None:
                    raise error
        finally:
            self.close()

    def limit(self, seconds: float) -> None:
        """Cut it off if it is not over after so long."""
        detail = f"the request took longer than {seconds:.0f} s"
        self._timer = self._loop.call_later(seconds, self._stream.cut, TIMED_OUT, detail)

    def cut(self, reason: str, detail: str) -> None:
        """End it with an error that its reader gets."""
        self._stream.cut(reason, detail)

    def close(self) -> None:
        """Let go: aborts the request if it still runs. May be called again."""
        self._stream.close()
        if self._timer is not None:
            self._timer.cancel()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close(self)

    def _measure(self, batch: Batch) -> None:
        count = len(batch.tokens)
        if not count:
            return
        now = self._loop.time()
        if self._last_token_at is None:
            self._metrics.first_token.observe(now - self._arrived_at)
            self._metrics.prompt_tokens.inc(len(self.job.prompt))
            self._metrics.cached_tokens.inc(self.cached_tokens)
            count -= 1
        else:
            for _ in range(count):
                self._metrics.inter_token.observe((now - self._last_token_at) / count)
        self._last_token_at = now
