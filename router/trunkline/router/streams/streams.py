"""A request on its way through the controllers: its stream of tokens, and its attempts at controllers.

    ControllerLink ──push, receive──► Attempt ──► Stream ──► Generation reads it
                                         └─ lost, drained, full ──► Dispatcher begins another attempt

A `Stream` is read by the coroutine that answers the client. A step's tokens for many requests arrive in one
message; each stream only appends its token and wakes its reader once. Most tokens need no coroutine: while the
reader waits, a *taker* may have them in its place (`takers.py`).

The samples of a request share a stream: their tokens arrive mixed, and each sample ends separately. A stream ends
exactly once, with its last sample or as a whole. Leaving it early (`close`) tells the controller.

An `Attempt` is one sending of a request, or of one of its samples, to one controller. The stream keeps all tokens
that have arrived, so when a controller is lost another one goes on from there with the prompt and these tokens.
The noise of sampling depends only on seed, output index and token, so the request goes on as it would have.
Samples that have tokens differ from each other: each goes on in an attempt of its own, with its own seed. A beam
search, of which the client has seen nothing yet, begins again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from trunkline.controller.messages import Submit, Told
from trunkline.controller.reports import PromptLogprobs, TopLogprobs
from trunkline.router.errors import ApiError, overloaded, unavailable
from trunkline.router.jobs.job import Job
from trunkline.router.messages import BeamsFound, Finished, FinishReason, Hypothesis, PromptScored, Started
from trunkline.router.routing.request import Left, RouteRequest
from trunkline.router.streams.draft_counts import DraftCounts
from trunkline.router.streams.loop_turns import LoopTurns
from trunkline.router.streams.takers import Taker
from trunkline.router.telemetry.request_record import AttemptTrace, RequestRecord
from trunkline.runtime.spans import SpanContext

if TYPE_CHECKING:
    from trunkline.router.streams.dispatch import Dispatcher
    from trunkline.router.streams.link import ControllerLink
    from trunkline.router.streams.planned import Plan

TIMED_OUT: Final = "timeout"
"""The reason of an `End` by the router's own time limit; all other reasons are `FinishReason`s."""
Event = Started | PromptScored | BeamsFound | Finished
"""News of a request from its controller, other than tokens."""
ALL = -1
"""A value in place of a sample's index that stands for all samples of a request."""


class End(NamedTuple):
    """The end of a request: its reason, with details for the client."""

    reason: str
    """A `FinishReason`, or `TIMED_OUT`."""
    detail: str = ""
    param: str = ""
    """The client's parameter that is wrong; "": no parameter is wrong."""

    def error(self) -> ApiError | None:
        """Return the error that the client gets; None: the request ended regularly."""
        detail = self.detail
        match self.reason:
            case FinishReason.STOP | FinishReason.LENGTH:
                return None
            case FinishReason.INVALID:
                message = detail or "the engine cannot run this request"
                return ApiError(400, message, param=self.param or None, code="invalid_request")
            case FinishReason.QUEUE_FULL:
                return overloaded(detail or "too many requests are waiting; try again later")
            case FinishReason.DRAINING:
                return unavailable(detail or "the engine is shutting down", code="draining")
            case FinishReason.ABORT:
                return unavailable(detail or "the engine gave the request up", code="aborted")
        if self.reason == TIMED_OUT:
            return ApiError(504, detail, kind="timeout_error", code="timeout")
        return unavailable(detail or "the engine failed", code="engine_failed")


class Batch(msgspec.Struct):
    """Tokens and ends that have arrived since the reader last looked."""

    tokens: list[int]
    logprobs: list[TopLogprobs | None]
    """Log-probabilities, one entry per token; empty if the request did not ask for them."""
    samples: list[int] | None = None
    """Index of the sample that each token belongs to; None: the request has only one sample."""
    ended: dict[int, str] | None = None
    """The `FinishReason` of each sample that has ended, by the sample's index. None: the request has only one
    sample."""
    hypotheses: list[Hypothesis] | None = None
    """Results of a beam search, best first."""
    end: End | None = None
    """The end of the request, in its last batch; None in all earlier ones."""


class Stream:
    """The tokens of one request, in the order of arrival, for one reader."""

    __slots__ = (
        *("_batch", "_drop", "_is_offered", "_release", "_running", "_taker", "_turns", "_waiter"),
        *("_wants_logprobs", "drafts", "outputs", "prompt_logprobs", "request", "served", "started"),
    )

    def __init__(
        self,
        request: int,
        release: Callable[[int, bool], None],
        drop: Callable[[int, int], None] = lambda request, sample: None,
        *,
        wants_logprobs: bool = False,
        samples: int = 1,
        turns: LoopTurns | None = None,
    ) -> None:
        """
        Args:
            release: `release(request, abort)` makes the dispatcher forget the request; called exactly once.
            drop: `drop(request, sample)` makes the controller end one of several samples.
            turns: in which the reader gets the end; None: it gets it at once.
        """
        self.request = request
        self.started: Started | None = None
        """The controller's report of the part of the prompt that was cached; None until it has admitted the
        request."""
        self.prompt_logprobs: list[PromptLogprobs] = []
        """Log-probabilities of the prompt, in the order of arrival. They are complete before the first token."""
        self.drafts = DraftCounts()
        self.outputs: list[list[int]] = [[] for _ in range(samples)]
        """All tokens that have arrived, by sample."""
        self._release: Callable[[int, bool], None] | None = release
        self._wants_logprobs = wants_logprobs
        self._running = set(range(samples))
        self.served: tuple[ControllerLink, int] | None = None
        """The controller whose attempt has ended last, and the request's number there."""
        self._drop = drop
        self._turns = turns
        self._batch = self._fresh()
        self._waiter: asyncio.Future[None] | None = None
        self._taker: Taker | None = None
        self._is_offered = False
        """Whether `offer` is about to be called."""

    @property
    def samples(self) -> int:
        """Number of samples that the request began with."""
        return len(self.outputs)

    @property
    def running(self) -> frozenset[int]:
        """Indices of the samples that have not ended."""
        return frozenset(self._running)

    @property
    def ended(self) -> bool:
        """Whether the request is over, or its reader has left."""
        return self._release is None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV was found; 0 until the request was admitted."""
        return 0 if self.started is None else self.started.cached_tokens

    def receive(self, event: Event) -> None:
        """Take a message about the request from its controller.

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

    def push(self, token: int, logprobs: TopLogprobs | None = None, sample: int = 0) -> Stream | None:
        """Take the next token of a sample. Return the stream if `offer` is to be called in this turn of the loop.

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
        if self._taker is None:
            self._wake()
        elif not self._is_offered:
            self._is_offered = True
            return self
        return None

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
        """Have the controller end one of several samples, unless it has ended: the reader needs no more of it."""
        if sample in self._running and len(self._running) > 1:
            self._running.discard(sample)
            self._drop(self.request, sample)

    def finish(self, reason: str, detail: str = "", param: str = "") -> None:
        """End the request. Later calls do nothing: the first end counts."""
        self._end(End(reason, detail, param), abort=False)

    def cut(self, reason: str, detail: str) -> None:
        """Abort the request because of a time limit or a shutdown; its reader gets the reason."""
        self._end(End(reason, detail), abort=True)

    def close(self) -> None:
        """Abort the request if it still runs: its reader leaves. May be called at any time, and again."""
        self._let_go(abort=True)

    def tell(self, ended: str) -> None:
        """Tell the controller that had the request how the answer ended (`Told`), if the request is over."""
        if self.served is not None and self.ended:
            link, number = self.served
            link.tell(lambda _: Told(number, ended))

    async def wait_first(self) -> None:
        """Wait until the request was admitted, has a token or has ended."""
        while not (self.started is not None or self._batch.tokens or self._batch.end is not None):
            await self._wait()

    async def next(self) -> Batch:
        """Return what has arrived since the last call; wait until something has. Not to be called after a batch
        with an `end`."""
        batch = self._batch
        while not (batch.tokens or batch.end is not None or batch.ended):
            await self._wait()
        self._batch = self._fresh()
        if batch.end is not None and self._turns is not None:
            await self._turns.enter(is_end=True)  # a step may end many streams
        return batch

    def take_with(self, taker: Taker) -> None:
        """From now on offer tokens to a taker while the reader waits in `next`. The reader gets what it does not
        take, and all that is more than tokens. What it raises, `next` raises."""
        self._taker = taker

    def offer(self, taken: list[Taker]) -> None:
        """Offer the tokens that have arrived to the taker, and add it to `taken` if it takes them."""
        self._is_offered = False
        batch, waiter, taker = self._batch, self._waiter, self._taker
        if taker is None or not batch.tokens or waiter is None or waiter.done():
            return  # the reader has them, or has been woken and gets them
        try:
            if taker.take(batch.tokens):
                batch.tokens = []
                taken.append(taker)
            else:
                waiter.set_result(None)
        except Exception as error:  # noqa: BLE001 (raised by the reader)
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Have `next`, in which the reader waits, raise an error of its taker."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    @property
    def failure(self) -> End | None:
        """The end of the request, if it has arrived and `next` has not returned it yet."""
        return self._batch.end

    def _start(self, started: Started) -> None:
        """Note that a controller admitted the request. After a loss that may happen again, and the first time
        counts. But KV behind a cut may be lost with a controller. It is computed anew and sees less, so that is
        noted."""
        if self.started is None:
            self.started = started
            self._wake()
        elif started.cut == "recomputed":
            self.started = msgspec.structs.replace(self.started, cut=started.cut, exact=started.exact)

    def _check(self, sample: int, what: str) -> None:
        if not 0 <= sample < self.samples:
            raise ValueError(f"{what} sample {sample} of {self.samples}")

    def _fresh(self) -> Batch:
        return Batch([], []) if self.samples == 1 else Batch([], [], [], {})

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


NOTHING_FAILED: Final = End(FinishReason.ENGINE_FAILED)


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """A request that is not over: one or more controllers work on it, or it waits for one."""

    id: int
    job: Job
    route: RouteRequest
    stream: Stream
    attempts: dict[int, Attempt] = field(default_factory=dict)
    """Attempts that are not over, by their tickets."""
    waiting: set[int] = field(default_factory=set)
    """Samples (or `ALL`) that wait for a controller."""
    timer: asyncio.TimerHandle | None = None
    """Limits how long the request may wait. It runs from the first wait until a controller admits the request."""
    failures: dict[int, int] = field(default_factory=dict)
    """For each sample (or `ALL`): attempts lost since the sample's last token, each counted as `WAITING_LOSSES` or
    as 1. A controller that is lost with several samples counts once for each of them."""
    failed: set[int] = field(default_factory=set)
    """Controllers that lost an attempt of the request: other controllers are preferred."""
    full: set[int] = field(default_factory=set)
    """Controllers that refused the request because their queues were full."""
    last_failure: End = NOTHING_FAILED
    """The end of the last attempt that was lost."""
    weights: str = ""
    """Digest of the weights with which its tokens so far were computed; "": not known."""
    plan: Plan | None = None
    """Where its prompt is or was computed for another group, if it was; a request has one such plan at most."""
    record: RequestRecord | None = None
    """Record of the HTTP request; None: the request does not come from a client."""
    lost: list[SpanContext] = field(default_factory=list)
    """The span of the last attempt that was lost, if the request is traced; else empty."""

    @property
    def request_id(self) -> str:
        """Id of the HTTP request; "": the request does not come from a client."""
        return "" if self.record is None else self.record.id


class Attempt:
    """One sending of a request, or of one of its samples, to one controller."""

    __slots__ = (
        *("_dispatcher", "_follows_loss", "_stream", "_trace"),
        *("drafts", "has_started", "is_noted", "left", "link", "names", "request", "routed", "sample", "ticket"),
    )

    def __init__(
        self, dispatcher: Dispatcher, routed: RoutedRequest, link: ControllerLink, ticket: int, sample: int
    ) -> None:
        """`sample`: index of the one sample that the controller computes, or `ALL`."""
        self._dispatcher = dispatcher
        self._stream = routed.stream
        self.drafts = self._stream.drafts
        self.routed = routed
        self.link = link
        self.ticket = ticket
        self.sample = sample
        self.has_started = self.is_noted = False
        self.request = 0
        """Number of the request on the link."""
        self.names: list[bytes] = []
        """Names of the chunks that the controller has once the attempt has started. Empty if controllers publish
        their chunks themselves."""
        self.left: Left | None = None
        """The group that is told that the conversation goes on here once its KV was pulled."""
        self._trace: AttemptTrace | None = None
        self._follows_loss = bool(routed.failures)
        """Whether attempts were lost before, and this one has no token yet."""

    def marked(self, submit: Submit) -> Submit:
        """Return the message with the ids of the request for the controller's log and trace."""
        record = self.routed.record
        if record is None:
            return submit
        context = b""
        if record.trace is not None:
            known = sum(map(len, self.routed.stream.outputs))
            self._trace = record.trace.attempt(self.link.name, self.sample, self.routed.lost, known)
            context = self._trace.context.pack()
        return msgspec.structs.replace(submit, request_id=record.id, trace=context)

    def over(self, reason: str, *, is_failure: bool = False) -> None:
        """End the attempt's span in the trace. `is_failure`: another attempt goes on with the work."""
        trace, self._trace = self._trace, None
        record = self.routed.record
        if trace is None or record is None or record.trace is None:
            return
        if is_failure:
            self.routed.lost = [trace.context]
        record.trace.attempted(trace, reason, is_failure=is_failure, has_started=self.has_started)

    def push(self, token: int, logprobs: TopLogprobs | None = None, sample: int = 0) -> Stream | None:
        """Pass a token on to the request's stream, and return what that returns."""
        if self._follows_loss:
            self._follows_loss = False
            self.routed.failures.pop(self.sample, None)
            self.routed.failed.clear()
        if self.sample != ALL:
            if sample:
                raise ValueError(f"a token for sample {sample} of 1")
            sample = self.sample
        return self._stream.push(token, logprobs, sample)

    def receive(self, event: Event) -> None:
        """Pass news on to the request's stream; the end of the attempt goes to the dispatcher, which may begin
        another one."""
        if isinstance(event, Finished):
            if event.sample < 0 or (event.sample == 0 and self.sample != ALL):
                self._dispatcher.finished(self, End(event.reason, event.detail, event.param))
                return
            if self.sample != ALL:
                raise ValueError(f"the end of sample {event.sample} of 1")
        self._stream.receive(event)
        if isinstance(event, Started):
            self.has_started = True
            # Behind the reader: a first token that came along leaves for the client before routing notes this.
            asyncio.get_running_loop().call_soon(self._dispatcher.started, self)
