"""The end of a request's way back: tokens from a controller, read by the coroutine that answers the client.

A step's tokens for many requests arrive in one message; each stream only appends and, if its reader
waits, wakes it once. The samples of a request share a stream: their tokens come mixed, and each of them
ends for itself. A stream ends exactly once, with its last sample or as a whole; leaving it early (`close`)
tells the controller. What it has got is remembered: should its controller die, another one goes on from there
(`trunkline.router.streams.dispatch`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

from trunkline.controller.messages import PromptLogprobs, TopLogprobs
from trunkline.router.messages import BeamsFound, Finished, Hypothesis, PromptScored, Started


class End(NamedTuple):
    """Why a request is over."""

    reason: str
    """A `FinishReason`, or `errors.TIMED_OUT`."""
    detail: str = ""
    param: str = ""
    """The client's parameter that is to blame, if one is."""


class Batch(msgspec.Struct):
    """Tokens and ends that have arrived since the reader last looked."""

    tokens: list[int]
    logprobs: list[TopLogprobs | None]
    """One per token, or empty where the request asked for none."""
    samples: list[int] | None = None
    """Which sample each token belongs to; None where the request has only one."""
    ended: dict[int, str] | None = None
    """Samples that are over, each with its `FinishReason`: nothing follows for them. None like `samples`."""
    hypotheses: list[Hypothesis] | None = None
    """What a beam search found, best first."""
    end: End | None = None
    """Set once the request has ended as a whole; nothing follows then."""

    @property
    def reason(self) -> str | None:
        """Why the request ended, if it did."""
        return None if self.end is None else self.end.reason


Event = Started | PromptScored | BeamsFound | Finished
"""What a controller says of a request besides its tokens."""


class Receiver(Protocol):
    """The end of a request's way back. `ControllerLink` calls it in the order of the controller's messages."""

    def push(self, token: int, logprobs: TopLogprobs | None = None, sample: int = 0) -> None:
        """Take the next token of a sample. Tokens have a method of their own: nearly all calls are theirs."""

    def receive(self, event: Event) -> None:
        """Take any other news of the request. After a `Finished` of the whole request nothing follows."""


class Stream:
    """Tokens of one request, in the order of arrival, for one reader."""

    def __init__(
        self,
        request: int,
        release: Callable[[int, bool], None],
        drop: Callable[[int, int], None] = lambda request, sample: None,
        *,
        wants_logprobs: bool = False,
        samples: int = 1,
    ) -> None:
        """
        Args:
            release: `release(request, abort)` takes the stream off its controller's books; called exactly once.
            drop: `drop(request, sample)` lets the controller end one of several samples.
        """
        self.request = request
        self.started: Started | None = None
        """What was found of its prompt; None until it was admitted."""
        self.prompt_logprobs: list[PromptLogprobs] = []
        """What has been said of the prompt, in the order of arrival; all of it before the first token."""
        self.outputs: list[list[int]] = [[] for _ in range(samples)]
        """All tokens that have arrived, by sample."""
        self._release: Callable[[int, bool], None] | None = release
        self._wants_logprobs = wants_logprobs
        self._samples = samples
        self._running = set(range(samples))
        self._drop = drop
        self._batch = self._fresh()
        self._waiter: asyncio.Future[None] | None = None

    @property
    def running(self) -> frozenset[int]:
        """Samples that have not ended."""
        return frozenset(self._running)

    @property
    def samples(self) -> int:
        """How many samples the request began with."""
        return self._samples

    @property
    def ended(self) -> bool:
        """Whether nothing more will come, or the reader has left."""
        return self._release is None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV was found; 0 until it was admitted."""
        return 0 if self.started is None else self.started.cached_tokens

    def receive(self, event: Event) -> None:
        """Take news of the request.

        Raises:
            ValueError: a sample has ended that the request does not have.
        """
        if isinstance(event, Started):
            self._start(event)
        elif isinstance(event, PromptScored):
            self.prompt_logprobs.append(event.logprobs)
        elif isinstance(event, BeamsFound):
            self._batch.hypotheses = event.hypotheses  # the end follows
        elif event.sample >= 0:
            self.finish_sample(event.sample, event.reason)
        else:
            self.finish(event.reason, event.detail, event.param)

    def restart(self) -> None:
        """Forget what was said of the prompt: the request begins again, and its reader has kept nothing yet."""
        self.prompt_logprobs.clear()

    def push(self, token: int, logprobs: TopLogprobs | None = None, sample: int = 0) -> None:
        """Take the next token of a sample.

        Raises:
            ValueError: there is no such sample.
        """
        if sample:
            self._check(sample, "a token for")
        batch = self._batch
        batch.tokens.append(token)
        self.outputs[sample].append(token)
        if self._wants_logprobs:
            batch.logprobs.append(logprobs)
        if batch.samples is not None:
            batch.samples.append(sample)
        waiter = self._waiter  # as `_wake`, without the call: this runs for every token
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def finish_sample(self, sample: int, reason: str) -> None:
        """End one sample regularly; the request ends with its last one.

        Raises:
            ValueError: there is no such sample.
        """
        self._check(sample, "the end of")
        if self._batch.ended is not None:
            self._batch.ended[sample] = reason
        self._running.discard(sample)
        if self._running:
            self._wake()
        else:
            self.finish(reason)

    def drop_sample(self, sample: int) -> None:
        """End one of several samples, of which the reader wants no more, unless it has ended."""
        if sample in self._running and len(self._running) > 1:
            self._running.discard(sample)
            self._drop(self.request, sample)

    def finish(self, reason: str, detail: str = "", param: str = "") -> None:
        """End the request. Later calls do nothing: the first end counts."""
        self._end(End(reason, detail, param), abort=False)

    def cut(self, reason: str, detail: str) -> None:
        """End the request from this side (time limit, shutdown): abort it, and let its reader know why."""
        self._end(End(reason, detail), abort=True)

    def close(self) -> None:
        """Abort the request if it still runs: the reader wants no more. May be called at any time."""
        self._let_go(abort=True)

    async def wait_first(self) -> None:
        """Return as soon as the request was admitted, brought a token or ended."""
        while not (self.started is not None or self._batch.tokens or self._batch.end is not None):
            await self._wait()

    async def next(self) -> Batch:
        """Return what has arrived; wait until something has. Not to be called after an end was read."""
        batch = self._batch
        while not (batch.tokens or batch.end is not None or batch.ended):
            await self._wait()
        self._batch = self._fresh()
        return batch

    @property
    def failure(self) -> End | None:
        """An end that has arrived and was not read yet."""
        return self._batch.end

    def _start(self, started: Started) -> None:
        """Note that the controller admitted the request. If that happens again, the first time counts. But KV
        behind a cut that is lost on the way is computed anew, and sees less: the reader is told."""
        if self.started is None:
            self.started = started
            self._wake()
        elif started.cut == "recomputed":
            self.started = msgspec.structs.replace(self.started, cut=started.cut, exact=started.exact)

    def _check(self, sample: int, what: str) -> None:
        if not 0 <= sample < self._samples:
            raise ValueError(f"{what} sample {sample} of {self._samples}")

    def _fresh(self) -> Batch:
        return Batch([], []) if self._samples == 1 else Batch([], [], [], {})

    def _end(self, end: End, *, abort: bool) -> None:
        if self._let_go(abort=abort):
            self._batch.end = end
            self._wake()

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
