"""One running generation: turns its stream of tokens into pieces of text, and measures it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

from trunkline.controller.messages import PromptLogprobs
from trunkline.router.errors import ApiError, unavailable
from trunkline.router.jobs.job import Job
from trunkline.router.messages import FinishReason, Started
from trunkline.router.streams.choices import Choices, Delta
from trunkline.router.streams.streams import TIMED_OUT, Batch, End, Stream
from trunkline.router.telemetry.metrics import Metrics

_FIRST_EVENT_SECONDS_MAX: Final = 10.0
"""Until the first event an error can still be an HTTP status. A request that queues for longer gets its
response headers anyway, because proxies give up on connections without any."""
CLIENT_LEFT: Final = "client_left"
OUTCOMES: Final[dict[str, str]] = {FinishReason.ABORT: "aborted", FinishReason.ENGINE_FAILED: "failed"}
"""Ends that are not regular, as metrics and logs have them; others by their own names."""


class Generation:
    """A submitted job. Call `close` in the end, whatever happened; `deltas` does so itself."""

    def __init__(
        self,
        job: Job,
        stream: Stream,
        choices: Choices,
        metrics: Metrics,
        arrived_at: float,
        on_close: Callable[[Generation], None],
    ) -> None:
        self.job = job
        self._stream = stream
        self._choices = choices
        self._metrics = metrics
        self._on_close: Callable[[Generation], None] | None = on_close
        self._loop = asyncio.get_running_loop()
        self._arrived_at = arrived_at
        self.first_token_at: float | None = None
        """Loop time in seconds."""
        self._last_token_at: float | None = None
        self._submitted_at = self._loop.time()
        self.steps = 0
        """Tokens of the sample that came furthest."""
        self.outcome = CLIENT_LEFT
        """How the generation ended; while it runs: how it would end if its reader left."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV was found."""
        return self._stream.cached_tokens

    @property
    def started(self) -> Started | None:
        """What the controller found of the prompt; None until it was admitted."""
        return self._stream.started

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far that count, over all samples."""
        return self._choices.output_tokens

    @property
    def decode_s(self) -> float:
        """Seconds from its first token until its last."""
        if self.first_token_at is None or self._last_token_at is None:
            return 0.0
        return self._last_token_at - self.first_token_at

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the request's arrival to its first token; None: there was none."""
        return None if self.first_token_at is None else self.first_token_at - self._arrived_at

    @property
    def prompt_logprobs(self) -> Sequence[PromptLogprobs]:
        """Pieces of what the job asked to know of its prompt; complete once a token has come."""
        return self._stream.prompt_logprobs

    async def begin(self) -> None:
        """Wait until the controller has taken the request on.

        Raises:
            ApiError: the controller refused it; nothing was generated.
        """
        try:
            async with asyncio.timeout(_FIRST_EVENT_SECONDS_MAX):
                await self._stream.wait_first()
        except TimeoutError:
            return
        error = self._error_of(self._stream.failure)
        if error is not None:
            raise error

    async def deltas(self) -> AsyncIterator[Delta]:
        """Yield the answer, piece by piece; the last piece of each choice has `finish`.

        Raises:
            ApiError: the generation failed on the way.
        """
        try:
            while True:
                batch = await self._stream.next()
                self._measure(batch)
                # An end by failure still has the tokens before it: they were generated, so they are shown.
                end = batch.end
                error = self._error_of(end)
                before = self._choices.output_tokens
                deltas = self._choices.feed(batch, None if end is None or error is not None else end.reason)
                self._metrics.per_token.tokens += self._choices.output_tokens - before
                over = self._choices.all_over
                if over:
                    self.outcome = next((delta.finish for delta in reversed(deltas) if delta.finish), "stop")
                    self._metrics.end_to_end.observe(self._loop.time() - self._arrived_at)
                    self.close()  # after a stop string the engine must not go on while the client reads
                for delta in deltas:
                    if delta.stop is not None and not over:
                        self._stream.drop_sample(delta.index)
                    yield delta
                if over:
                    return
                if end is not None:
                    raise error or unavailable("the engine ended a search without results", code="engine_failed")
        finally:
            self.close()

    def limit(self, seconds: float) -> None:
        """Cut the generation off if it is not over after `seconds`."""
        detail = f"the request took longer than {seconds:.0f} s"
        self._timer = self._loop.call_later(seconds, self._stream.cut, TIMED_OUT, detail)

    def cut(self, reason: str, detail: str) -> None:
        """End the generation with an error, which its reader gets."""
        self._stream.cut(reason, detail)

    def close(self) -> None:
        """Abort the request if it still runs, and count the generation. May be called again."""
        self._stream.close()
        if self._timer is not None:
            self._timer.cancel()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close(self)

    def _error_of(self, end: End | None) -> ApiError | None:
        error = None if end is None else end.error()
        if end is not None and error is not None:
            self.outcome = OUTCOMES.get(end.reason, end.reason)
        return None if error is None else self.job.decoding.in_clients_words(error)

    def _measure(self, batch: Batch) -> None:
        # Samples of one request go on side by side: what counts is how far the furthest came.
        count = max(Counter(batch.samples).values()) if batch.samples else len(batch.tokens)
        if not count and batch.hypotheses is None:
            return
        now = self._loop.time()
        self.steps += max(count, batch.hypotheses is not None)
        if self._last_token_at is None:
            self.first_token_at = now
            if self.started is not None:
                self._metrics.phases.queued.observe(self.started.queued_s)
                self._metrics.phases.prefill.observe(max(0.0, now - self._submitted_at - self.started.queued_s))
            self._metrics.first_token.observe(now - self._arrived_at)
            self._metrics.prompt_tokens.inc(self.job.seen_tokens)
            self._metrics.cached_tokens.inc(self.cached_tokens)
            self._metrics.modules.tokens.inc(self.job.module_tokens)
            if self.job.cut.drops and self.started is not None:
                self._metrics.truncations.labels(self.started.cut or "kept").inc()
        elif count:
            self._metrics.per_token.between((now - self._last_token_at) / count, count)
        self._last_token_at = now
