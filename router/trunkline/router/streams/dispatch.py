"""Streams and the controllers that work on them: where each goes, and where it goes on if that controller is lost.

    submit ──► route ──► ControllerLink.submit ──► Dispatch ──► Stream ──► reader
                 ▲                                    │ lost, drained, full
                 └──── what the stream has so far ◄───┘   or wait until a controller is there

A *dispatch* is one sending of a stream, or of one of its samples, to one controller. A stream that loses its
dispatch is sent again: before its first token as it was, later as a continuation (`continuation.py`). If no
controller takes requests it waits, up to `resume_seconds`. Its reader sees a pause.

What would fail everywhere is not tried everywhere: a stream that loses `FAILURES_MAX` dispatches in a row, without
a token between them, ends with the last one's error.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Final

import msgspec
import structlog

from trunkline.controller.messages import Submit
from trunkline.kvstore.int32_codec import pack_int32
from trunkline.kvstore.tier import TierKind
from trunkline.router.errors import ApiError, unavailable
from trunkline.router.jobs.job import Job
from trunkline.router.messages import FinishReason, State
from trunkline.router.routing.core import NoControllerError, RoutingCore
from trunkline.router.routing.names import Identity
from trunkline.router.routing.request import Decision, RouteRequest
from trunkline.router.streams.attempts import Dispatch, Flow
from trunkline.router.streams.continuation import ALL, continuation, end_of, submission
from trunkline.router.streams.health import describe
from trunkline.router.streams.link import ControllerLink
from trunkline.router.streams.streams import End, Stream
from trunkline.router.telemetry.request_record import current_record

FAILURES_MAX: Final = 3
"""Lost in a row, without a token between them; …"""
WAITING_LOSSES: Final = 3
"""… so many count as one where the connection was lost while the prompt had not been computed: a request that only
waits in a queue is not what kills a controller, but it may be."""
MOVE_SECONDS: Final = 3.0
"""For so long a controller whose workers are lost may get new ones before its streams go elsewhere."""
FULL_AGAIN_SECONDS: Final = 0.25
"""A stream that is to go on, and meets full queues everywhere, tries again so much later."""
_REGULAR: Final = (FinishReason.STOP, FinishReason.LENGTH)
_ELSEWHERE: Final = (FinishReason.ENGINE_FAILED, FinishReason.DRAINING, FinishReason.QUEUE_FULL)
"""Ends that say nothing of the request: another controller may take it."""
_log = structlog.get_logger("trunkline.router.streams.dispatch")


class Dispatcher:
    """All streams of a router. All calls from the event loop's thread."""

    def __init__(
        self,
        links: Sequence[ControllerLink],
        core: RoutingCore,
        *,
        resume_seconds: float,
        max_context: Callable[[], int],
        learns: bool = False,
        on_event: Callable[[str], None] = lambda kind: None,
        on_route: Callable[[Decision], None] = lambda decision: None,
    ) -> None:
        """
        Args:
            links: the controllers, by index; they may be added before the first request.
            resume_seconds: how long a stream waits for a controller; 0: not, and a lost stream ends.
            max_context: prompt and output at most, in tokens, at this moment.
            learns: controllers do not tell which chunks they have: then a chunk is taken to be where this router
                has seen a prompt with it start, until that controller is lost.
            on_event: told of "resumed", "retried", "waited" and "gave_up", for metrics.
            on_route: told of every choice that was carried out, likewise.
        """
        self.core = core
        self.has_served = False
        """Whether any controller has been ready yet."""
        self._links = links
        self._resume_seconds = resume_seconds
        self._max_context = max_context
        self._learns = learns
        self._on_event = on_event
        self._on_route = on_route
        self._ids = itertools.count(1)
        self._flows: dict[int, Flow] = {}
        self._waiting: dict[int, Flow] = {}
        self._starting_since: dict[int, float] = {}
        self._overdue: set[int] = set()
        """Streams whose time to wait is over, and which no controller has admitted yet."""

    @staticmethod
    def now() -> float:
        """Loop time in seconds."""
        return asyncio.get_running_loop().time()

    @property
    def can_wait(self) -> bool:
        """Whether a request that no controller takes now may wait for one."""
        return self.has_served and self._resume_seconds > 0

    @property
    def waiting_count(self) -> int:
        """Streams that no controller has at present."""
        return len(self._waiting)

    # -- from above

    def submit(self, job: Job, route: RouteRequest) -> Stream:
        """Send a job to a controller.

        Raises:
            ApiError: 503, there is none, and none is expected.
        """
        stream = Stream(
            next(self._ids),
            self._release,
            self._drop_sample,
            wants_logprobs=job.sampling.logprobs >= 0,
            samples=job.decoding.samples if job.decoding.beam is None else 1,
        )
        flow = self._flows[stream.request] = Flow(stream.request, job, route, stream, record=current_record())
        try:
            self._send(flow, ALL)
        except ApiError:
            del self._flows[flow.id]
            raise
        return stream

    def link_of(self, stream: Stream) -> ControllerLink | None:
        """The controller that works on a stream, if one does."""
        flow = self._flows.get(stream.request)
        return next((dispatch.link for dispatch in flow.dispatches.values()), None) if flow else None

    # -- from the links

    def link_changed(self, link: ControllerLink) -> None:
        """A controller has said how it is, or its connection was lost."""
        core, now, state = self.core, self.now(), link.state
        core.set_available(link.index, link.ready, now)
        if state is not None:
            if state.chunk_size:
                core.set_identity(link.index, _identity(state))
                core.set_costs(link.index, state.prefill_us, state.load_us)
            self.load_changed(link.index, state.requests, state.queued_tokens)
        if self._learns and not link.ready:
            core.index.forget(link.index)
        if link.ready:
            self.has_served = True
            self._retry()
        self._move_from(link, now)

    def load_changed(self, controller: int, requests: int, queued_tokens: int) -> None:
        """A controller has said what it has to do for all routers (`State`, or `KvEvents`)."""
        state = self._links[controller].state
        if state is None:
            return
        self.core.report(
            controller,
            requests=requests,
            queued_tokens=queued_tokens,
            kv_used=1.0 - (state.blocks_free + state.blocks_cached) / max(1, state.blocks_total),
            running=state.running,
            now=self.now(),
        )

    def _move_from(self, link: ControllerLink, now: float) -> None:
        """Streams of a controller that does not get new workers go elsewhere, if there is anybody."""
        if link.state is None or link.state.status != "starting" or not link.inflight:
            self._starting_since.pop(link.index, None)
            return
        since = self._starting_since.setdefault(link.index, now)
        if now - since < MOVE_SECONDS or not any(other.ready for other in self._links):
            return
        for flow in list(self._flows.values()):
            for dispatch in [d for d in flow.dispatches.values() if d.link is link]:
                dispatch.link.release(dispatch.request, abort=True)
                self.finished(dispatch, End(FinishReason.DRAINING, link.why_not_ready()))

    def started(self, dispatch: Dispatch) -> None:
        """A dispatch's prompt is computed, or as good as."""
        self.core.started(dispatch.ticket, self.now())
        if not dispatch.flow.waiting:
            self._stop_timer(dispatch.flow)
        if dispatch.names:
            self.core.index.apply(
                dispatch.link.index, b"".join(dispatch.names), bytes([1 << TierKind.DEVICE]) * len(dispatch.names)
            )

    def finished(self, dispatch: Dispatch, end: End) -> None:
        """A dispatch is over, one way or another."""
        flow = dispatch.flow
        if flow.dispatches.get(dispatch.ticket) is not dispatch:
            return
        dispatch.over(end.reason, is_failure=end.reason in _ELSEWHERE)
        self._let_go(dispatch, failed=end.reason == FinishReason.ENGINE_FAILED)
        if end.reason in _REGULAR and dispatch.sample != ALL:
            flow.stream.finish_sample(dispatch.sample, end.reason)
        elif end.reason not in _ELSEWHERE or (not self._resume_seconds and len(self._links) < 2):
            flow.stream.finish(*end)
        else:
            self._go_on(flow, dispatch, end)

    # -- on and on

    def _go_on(self, flow: Flow, dispatch: Dispatch, end: End) -> None:
        """Send what a dispatch leaves behind to somebody else."""
        flow.last_failure = end
        failures = flow.failures.pop(dispatch.sample, 0)
        begun = any(flow.stream.outputs)
        if end.reason == FinishReason.QUEUE_FULL:
            flow.full.add(dispatch.link.index)
        else:
            if end.reason == FinishReason.ENGINE_FAILED:
                only_waited = dispatch.link.state is None and not dispatch.has_started
                failures += 1 if only_waited else WAITING_LOSSES
            flow.failed.add(dispatch.link.index)
            if not flow.waiting:
                self._stop_timer(flow)  # it was in somebody's hands: a new wait begins, if one does
            if begun and not self._resume_seconds:
                flow.stream.finish(*end)
                return
            tokens = sum(map(len, flow.stream.outputs))
            _log.info(
                "stream_goes_on",
                request_id=flow.request_id,
                group=dispatch.link.index,
                reason=end.reason,
                tokens=tokens,
            )
        if failures >= FAILURES_MAX * WAITING_LOSSES:
            self._on_event("gave_up")
            flow.stream.finish(*end)
            return
        self._on_event("resumed" if begun else "retried")
        samples = [dispatch.sample]
        if dispatch.sample == ALL and begun:
            samples = sorted(flow.stream.running)
        elif dispatch.sample == ALL:
            flow.stream.restart()
        for sample in samples:
            if failures:
                flow.failures[sample] = failures
            self._send_or_end(flow, sample)

    def _send_or_end(self, flow: Flow, sample: int) -> None:
        """Send it again, unless it is over already and only word of that was lost, or nobody can have it."""
        if flow.stream.ended:
            return
        if sample != ALL:
            reason = end_of(flow.job, flow.stream.outputs[sample], self._max_context())
            if reason is not None:
                flow.stream.finish_sample(sample, reason)
                return
        try:
            self._send(flow, sample)
        except ApiError as error:
            self._on_event("gave_up")
            cause, detail, _ = flow.last_failure
            flow.stream.finish(cause, detail or error.message)

    def _send(self, flow: Flow, sample: int) -> None:
        """Send it to the controller of choice, or let it wait.

        Raises:
            ApiError: nobody takes it, and it must not wait.
        """
        output = [] if sample == ALL else flow.stream.outputs[sample]
        refused: set[int] = set()
        again_in = inf
        while True:
            exclude = frozenset(flow.failed | flow.full | refused)
            route = flow.route
            if output or exclude:
                route = msgspec.structs.replace(route, tokens=route.tokens + pack_int32(output), exclude=exclude)
            trace, began = None if flow.record is None else flow.record.trace, time.monotonic()
            try:
                decision = self.core.route(route, self.now())
            except NoControllerError as error:
                again_in = error.wait_seconds
                break
            if trace is not None:
                trace.routed(began, decision)
            if decision.controller in refused:
                break
            if decision.controller in flow.full:
                self._all_full(flow, sample)
                return
            if self._try(flow, sample, decision, route, output):
                return
            refused.add(decision.controller)
        if not self.can_wait:
            raise unavailable(f"no engine is ready: {describe(self._links)}")
        self._wait(flow, sample)
        if again_in < inf:
            asyncio.get_running_loop().call_later(again_in, self._retry_flow, flow)

    def _try(
        self, flow: Flow, sample: int, decision: Decision, route: RouteRequest, output: Sequence[int]
    ) -> bool:
        link = self._links[decision.controller]
        dispatch = Dispatch(self, flow, link, next(self._ids), sample)

        def make(request: int) -> Submit:
            if sample == ALL:
                return dispatch.marked(submission(flow.job, request))
            return dispatch.marked(continuation(flow.job, request, sample, output))

        try:
            dispatch.request = link.submit(make, dispatch)
        except ApiError:
            dispatch.over("not_sent", is_failure=True)
            return False
        if flow.record is not None:
            flow.record.sent(link.index)
        flow.dispatches[dispatch.ticket] = dispatch
        if self._learns:
            dispatch.names = decision.names
        self.core.sent(dispatch.ticket, decision, route, self.now())
        self._on_route(decision)
        return True

    def _all_full(self, flow: Flow, sample: int) -> None:
        """No queue takes it: a new request is turned away. One that a controller had, and lost or handed over, was
        let in before, so it tries again a little later."""
        is_known = bool(flow.failed) or any(flow.stream.outputs)
        if not is_known or not self._resume_seconds:
            end = flow.last_failure
            asyncio.get_running_loop().call_soon(flow.stream.finish, *end)
            return
        flow.full.clear()
        self._wait(flow, sample)
        asyncio.get_running_loop().call_later(FULL_AGAIN_SECONDS, self._retry_flow, flow)

    # -- waiting

    def _wait(self, flow: Flow, sample: int) -> None:
        flow.waiting.add(sample)
        self._waiting[flow.id] = flow
        if flow.id in self._overdue:
            asyncio.get_running_loop().call_soon(self._waited_enough, flow)
        elif flow.timer is None:
            self._on_event("waited")
            loop = asyncio.get_running_loop()
            flow.timer = loop.call_later(self._resume_seconds, self._waited_enough, flow)

    def _waited_enough(self, flow: Flow) -> None:
        if flow.stream.ended:
            return
        if not flow.waiting:
            # It is in a controller's queue, which is no reason to end it; should that refuse it, time is over.
            self._overdue.add(flow.id)
            return
        self._on_event("gave_up")
        detail = f"no engine was ready within {self._resume_seconds:.0f} s: {describe(self._links)}"
        flow.stream.finish(FinishReason.ENGINE_FAILED, detail)

    def _retry(self) -> None:
        for flow in list(self._waiting.values()):
            self._retry_flow(flow)

    def _retry_flow(self, flow: Flow) -> None:
        if flow.id not in self._waiting:
            return
        samples, flow.waiting = sorted(flow.waiting), set()
        self._waiting.pop(flow.id, None)
        for sample in samples:
            self._send_or_end(flow, sample)

    def _stop_timer(self, flow: Flow) -> None:
        self._overdue.discard(flow.id)
        if flow.timer is not None:
            flow.timer.cancel()
            flow.timer = None

    # -- letting go

    def _let_go(self, dispatch: Dispatch, *, failed: bool = False, abort: bool = False) -> None:
        """Take a dispatch off all books; exactly once, since it is in its flow exactly until then."""
        dispatch.over("released")
        del dispatch.flow.dispatches[dispatch.ticket]
        dispatch.link.release(dispatch.request, abort=abort)
        self.core.ended(dispatch.ticket, self.now(), failed=failed)

    def _release(self, stream: int, abort: bool) -> None:
        flow = self._flows.pop(stream, None)
        if flow is None:
            return
        self._waiting.pop(flow.id, None)
        self._stop_timer(flow)
        flow.waiting.clear()
        for dispatch in list(flow.dispatches.values()):
            # Samples that go on for themselves run to the last, whatever ended the stream.
            self._let_go(dispatch, abort=abort or dispatch.sample != ALL)

    def _drop_sample(self, stream: int, sample: int) -> None:
        """The reader wants no more of one of several samples."""
        flow = self._flows.get(stream)
        if flow is None:
            return
        flow.waiting.discard(sample)
        if not flow.waiting:
            self._waiting.pop(flow.id, None)
            self._stop_timer(flow)
        for dispatch in list(flow.dispatches.values()):
            if dispatch.sample == ALL:
                dispatch.link.drop_sample(dispatch.request, sample)
            elif dispatch.sample == sample:
                self._let_go(dispatch, abort=True)


def _identity(state: State) -> Identity:
    """What the names of a controller's chunks begin with."""
    return Identity(state.fingerprint, state.dtype, state.chunk_size, state.positions_shift)
