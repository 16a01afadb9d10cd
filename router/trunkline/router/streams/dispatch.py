"""Send each request to a controller, and on to another one if that controller is lost.

    submit ──► route ──► ControllerLink.submit ──► Attempt ──► Stream ──► reader
                 ▲                                    │ lost, drained, full
                 └──── tokens that have come so far ◄─┘   or wait until a controller is ready

An *attempt* is one sending of a request, or of one of its samples, to one controller (`streams.py`). A request
that loses its attempt is sent again: unchanged before its first token, later as a continuation. If no controller
takes requests, it waits up to `resume_seconds`. Its reader sees only a pause.

A request that fails everywhere must not take down one controller after the other: after `FAILURES_MAX` lost
attempts in a row, without a token between them, it ends with the error of the last one.
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

from trunkline.controller.messages import ModuleText, Submit
from trunkline.kvstore.adapters import adapter_of
from trunkline.kvstore.chunks import pack_int32
from trunkline.router.errors import ApiError, unavailable
from trunkline.router.jobs.job import Job
from trunkline.router.messages import FinishReason
from trunkline.router.routing.core import NoControllerError, RoutingCore
from trunkline.router.routing.request import Decision, RouteRequest
from trunkline.router.routing.text_holders import with_holders
from trunkline.router.streams.adapters import may_have
from trunkline.router.streams.courier import identity_of, room_of
from trunkline.router.streams.health import describe
from trunkline.router.streams.link import ControllerLink, Standing
from trunkline.router.streams.links import Links
from trunkline.router.streams.loop_turns import LoopTurns
from trunkline.router.streams.planned import PlannedContinuations, only_first
from trunkline.router.streams.streams import ALL, Attempt, End, RoutedRequest, Stream
from trunkline.router.streams.submissions import continuation, end_of, submission
from trunkline.router.telemetry.request_record import current_record

FAILURES_MAX: Final = 3
"""Largest number of attempts of a request that may be lost in a row without a token between them."""
WAITING_LOSSES: Final = 3
"""Number of connections lost before the prompt was computed that count as one lost attempt. A request that only
waited in a queue has probably not killed the controller, but it may have."""
MOVE_SECONDS: Final = 3.0
"""Time in seconds for which a controller that has lost its workers keeps its requests. Then the requests go to
another controller."""
FULL_AGAIN_SECONDS: Final = 0.25
"""Delay in seconds before a request is sent again that was admitted before and then met full queues everywhere."""
_REGULAR: Final = (FinishReason.STOP, FinishReason.LENGTH)
_ELSEWHERE: Final = (FinishReason.ENGINE_FAILED, FinishReason.DRAINING, FinishReason.QUEUE_FULL)
"""Reasons for the end of an attempt that do not lie in the request: another controller may take the request."""
_OTHER_WEIGHTS: Final = "the model's weights were changed while the answer was generated; please ask again"
_log = structlog.get_logger("trunkline.router.streams.dispatch")


class Dispatcher:
    """All requests of a router that are not over. Call its methods from the event loop's thread only."""

    def __init__(
        self,
        links: Links,
        core: RoutingCore,
        *,
        resume_seconds: float,
        max_context: Callable[[str], int],
        learns: bool = False,
        on_event: Callable[[str], None] = lambda kind: None,
        on_route: Callable[[Decision], None] = lambda decision: None,
        on_planned: Callable[[str], None] = lambda outcome: None,
    ) -> None:
        """
        Args:
            links: connections to the controllers, which come and go.
            resume_seconds: how long a stream waits for a controller; 0: it does not wait, and a lost stream ends.
            max_context: returns the most tokens of prompt and output together at this moment, for a model.
            learns: controllers do not publish which chunks they have. Then a chunk counts as being where this
                router has seen a prompt with it start, until that controller is lost.
            on_event: called with "resumed", "retried", "waited" or "gave_up", for metrics.
            on_route: called with each routing decision that was carried out, for metrics.
            on_planned: see `PlannedContinuations`.
        """
        self.core = core
        self.turns = LoopTurns()
        """Only one request begins or ends in each turn of the event loop."""
        self._served: set[str] = set()
        """The models of which a controller has ever been ready."""
        self._links = links
        self._resume_seconds = resume_seconds
        self._max_context = max_context
        self._learns = learns
        self._on_event = on_event
        self._on_route = on_route
        self._planned = PlannedContinuations(links, core, on_planned)
        self._ids = itertools.count(1)
        self._routed: dict[int, RoutedRequest] = {}
        self._waiting: dict[int, RoutedRequest] = {}
        self._starting_since: dict[ControllerLink, float] = {}
        self._overdue: set[int] = set()
        """Requests whose waiting time is over while a controller has them in its queue."""

    @staticmethod
    def now() -> float:
        """Return the loop's time in seconds."""
        return asyncio.get_running_loop().time()

    def can_wait(self, model: str, adapter: bytes = b"") -> bool:
        """Return whether a request may wait if no controller takes it now.

        Args:
            model: main name of the model that it asks for; "": any.
            adapter: key of its adapter; empty: it has none.
        """
        if adapter and not may_have(adapter, self._links):
            return False
        return self._resume_seconds > 0 and (model in self._served if model else bool(self._served))

    @property
    def waiting_count(self) -> int:
        """Number of requests that wait for a controller."""
        return len(self._waiting)

    # -- calls by those who answer requests

    def submit(self, job: Job, route: RouteRequest) -> Stream:
        """Send a job to a controller.

        Raises:
            ApiError: 503, no controller is ready, and the request must not wait for one.
        """
        stream = Stream(
            next(self._ids),
            self._release,
            self._drop_sample,
            wants_logprobs=job.sampling.reports,
            samples=job.decoding.samples if job.decoding.beam is None else 1,
            turns=self.turns,
        )
        routed = self._routed[stream.request] = RoutedRequest(
            stream.request, job, route, stream, record=current_record()
        )
        try:
            self._send(routed, ALL)
        except ApiError:
            del self._routed[routed.id]
            raise
        return stream

    def with_holders(
        self, link: ControllerLink, texts: list[ModuleText], salt: bytes, relocate: bool
    ) -> list[ModuleText]:
        """Return texts with the groups from which a controller can pull those that it lacks."""
        return with_holders(self.core, link.index, texts, salt, self.now(), relocate=relocate)

    def choose(self, route: RouteRequest) -> tuple[ControllerLink, Decision]:
        """Return the link to the controller that would get a request now, and why.

        Raises:
            ApiError: 503, no controller is ready.
        """
        try:
            decision = self.core.route(route, self.now())
        except NoControllerError:
            raise unavailable(f"no engine is ready: {self._describe(route.model)}") from None
        return self._links[decision.controller], decision

    def _describe(self, model: str) -> str:
        return describe(link for link in self._links if link.standing.may_serve(model))

    def link_of(self, stream: Stream) -> ControllerLink | None:
        """Return the link to a controller that works on a request; None: it waits for one, or is over."""
        routed = self._routed.get(stream.request)
        return next((attempt.link for attempt in routed.attempts.values()), None) if routed else None

    # -- calls by the links to controllers

    def link_changed(self, link: ControllerLink) -> None:
        """Note that a controller has reported its state, or that its connection was lost."""
        core, now, state = self.core, self.now(), link.state
        if link not in self._links:  # its group was removed, and the link ends with its last request
            if state is None and self._links.get(link.index) is None:
                core.traits.set_exports(link.index, [])
            self._move_from(link, now)
            return
        core.set_available(link.index, link.ready)
        exports = [] if state is None or link.problem else state.exports
        core.traits.set_exports(link.index, exports, leaves=state is not None and state.status == "draining")
        if state is not None:
            core.traits.set_model(link.index, link.standing.model, [each.key for each in state.adapters])
            core.traits.set_role(link.index, state.role)
            if state.chunk_size:
                core.traits.set_identity(link.index, identity_of(state))
                core.traits.set_costs(link.index, state.prefill_us, state.load_us)
            self.load_changed(link.index, state.requests, state.queued_tokens)
        if self._learns and not link.ready:
            core.index.forget(link.index)
        if link.ready:
            self._served.add(link.standing.model)
            self._retry(link.standing)
        self._move_from(link, now)

    def load_changed(self, controller: int, requests: int, queued_tokens: int) -> None:
        """Note the load of a controller from all routers, as reported in its `State` or `KvEvents`."""
        self._planned.progressed(controller)
        link = self._links.get(controller)
        state = None if link is None else link.state
        if state is None:
            return
        self.core.loads.report(
            controller,
            requests=requests,
            queued_tokens=queued_tokens,
            kv_used=1.0 - (state.blocks_free + state.blocks_cached) / max(1, state.blocks_total),
            running=state.running,
            room=room_of(state),
        )

    def _move_from(self, link: ControllerLink, now: float) -> None:
        """Move the requests of a controller that waits for new workers too long, if another controller is
        ready."""
        if link.state is None or link.state.status != "starting" or not link.inflight:
            self._starting_since.pop(link, None)
            return
        since = self._starting_since.setdefault(link, now)
        others = [other for other in self._links if other.standing.model == link.standing.model]
        if now - since < MOVE_SECONDS or not any(other.ready for other in others):
            return
        for routed in list(self._routed.values()):
            for attempt in [each for each in routed.attempts.values() if each.link is link]:
                attempt.link.release(attempt.request, abort=True)
                self.finished(attempt, End(FinishReason.DRAINING, link.why_not_ready()))

    def started(self, attempt: Attempt) -> None:
        """Note that the controller has admitted an attempt, so that its prompt is computed or about to be. Calling
        it again changes nothing, nor does it once the attempt is over."""
        routed = attempt.routed
        if attempt.is_noted or routed.attempts.get(attempt.ticket) is not attempt:
            return
        attempt.is_noted = True
        self.core.started(attempt.ticket, self.now())
        if attempt.left is not None:
            self._links.conversation_left(attempt.left)
        if not routed.waiting:
            self._stop_timer(routed)
        self.core.index.on_device(attempt.link.index, attempt.names)

    def finished(self, attempt: Attempt, end: End) -> None:
        """Decide what follows the end of an attempt."""
        routed = attempt.routed
        if routed.attempts.get(attempt.ticket) is not attempt:
            return
        attempt.over(end.reason, is_failure=end.reason in _ELSEWHERE)
        self._let_go(attempt, failed=end.reason == FinishReason.ENGINE_FAILED)
        if self._planned.ended(routed, attempt.ticket, end.reason):
            self._send_or_end(routed, attempt.sample)
        elif end.reason in _REGULAR and attempt.sample != ALL:
            routed.stream.finish_sample(attempt.sample, end.reason)
        elif end.reason not in _ELSEWHERE or (not self._resume_seconds and len(self._links) < 2):
            routed.stream.finish(*end)
        else:
            self._go_on(routed, attempt, end)

    # -- going on after a loss

    def _go_on(self, routed: RoutedRequest, attempt: Attempt, end: End) -> None:
        """Send the rest of a lost attempt's work to another controller."""
        routed.last_failure = end
        failures = routed.failures.pop(attempt.sample, 0)
        begun = any(routed.stream.outputs)
        if end.reason == FinishReason.QUEUE_FULL:
            routed.full.add(attempt.link.index)
        else:
            if end.reason == FinishReason.ENGINE_FAILED:
                only_waited = attempt.link.state is None and not attempt.has_started
                failures += 1 if only_waited else WAITING_LOSSES
            routed.failed.add(attempt.link.index)
            if not routed.waiting:
                self._stop_timer(routed)  # a controller had the request, so a wait from now on is a new one
            if begun and not self._resume_seconds:
                routed.stream.finish(*end)
                return
            group, tokens = attempt.link.name, sum(map(len, routed.stream.outputs))
            _log.info(
                "stream_goes_on", request_id=routed.request_id, group=group, reason=end.reason, tokens=tokens
            )
        if failures >= FAILURES_MAX * WAITING_LOSSES:
            self._on_event("gave_up")
            routed.stream.finish(*end)
            return
        self._on_event("resumed" if begun else "retried")
        samples = [attempt.sample]
        if attempt.sample == ALL and begun:
            samples = sorted(routed.stream.running)
        elif attempt.sample == ALL:
            routed.stream.prompt_logprobs.clear()  # the request begins again, and its reader has used none yet
        for sample in samples:
            if failures:
                routed.failures[sample] = failures
            self._send_or_end(routed, sample)

    def _send_or_end(self, routed: RoutedRequest, sample: int) -> None:
        """Send a sample again. End it if it is complete, and only the message of its end was lost; end the request
        if no controller takes it."""
        if routed.stream.ended:
            return
        if sample != ALL:
            reason = end_of(routed.job, routed.stream.outputs[sample], self._max_context(routed.route.model))
            if reason is not None:
                routed.stream.finish_sample(sample, reason)
                return
        try:
            self._send(routed, sample)
        except ApiError as error:
            self._on_event("gave_up")
            cause, detail, _ = routed.last_failure
            routed.stream.finish(cause, detail or error.message)

    def _send(self, routed: RoutedRequest, sample: int) -> None:
        """Send a sample (or `ALL`) to the controller that routing chooses, or let it wait for one.

        Raises:
            ApiError: no controller takes the request, and it must not wait.
        """
        output = [] if sample == ALL else routed.stream.outputs[sample]
        refused: set[int] = set()
        again_in = inf
        while True:
            exclude = frozenset(routed.failed | routed.full | refused)
            route = routed.route
            if output or exclude:
                route = msgspec.structs.replace(route, tokens=route.tokens + pack_int32(output), exclude=exclude)
            route = self._planned.routed(routed, route, is_new=sample == ALL and not self._learns)
            trace, began = None if routed.record is None else routed.record.trace, time.monotonic()
            try:
                decision = self.core.route(route, self.now(), in_full=trace is not None)
            except NoControllerError as error:
                again_in = error.wait_seconds
                break
            if trace is not None:
                trace.routed(began, decision)
            if decision.controller in refused:
                break
            # Of controllers that have just refused, one that drains would refuse again at once, and so for ever.
            drains = routed.last_failure.reason == FinishReason.DRAINING and decision.controller in routed.failed
            if decision.controller in routed.full or (routed.full and drains):
                self._all_full(routed, sample)
                return
            if self._try(routed, sample, decision, route, output):
                return
            refused.add(decision.controller)
        if not self.can_wait(routed.route.model, adapter_of(routed.route.salt)):
            raise unavailable(f"no engine is ready: {self._describe(routed.route.model)}")
        self._wait(routed, sample)
        if again_in < inf:
            asyncio.get_running_loop().call_later(again_in, self._retry_one, routed)

    def _try(
        self, routed: RoutedRequest, sample: int, decision: Decision, route: RouteRequest, output: Sequence[int]
    ) -> bool:
        """Send a sample (or `ALL`), as routing has decided; return False if that controller cannot take it."""
        link, is_part = self._links[decision.controller], decision.goes_on >= 0
        if not any(routed.stream.outputs):
            routed.weights = link.weights
        elif link.weights and routed.weights and link.weights != routed.weights:
            self._on_event("gave_up")
            routed.stream.cut(FinishReason.ENGINE_FAILED, _OTHER_WEIGHTS)
            return True
        sample = 0 if is_part else sample  # there is only one
        attempt = Attempt(self, routed, link, next(self._ids), sample)
        holders = self._planned.holders(routed, link, decision)

        def make(request: int) -> Submit:
            if sample == ALL:
                submit = submission(routed.job, request)
            else:
                submit = continuation(routed.job, request, sample, output)
            submit = only_first(submit) if is_part else submit
            layout = decision.laid_out(submit.layout)
            return attempt.marked(
                msgspec.structs.replace(submit, holders=holders, layout=layout, kept=decision.kept)
            )

        try:
            attempt.request = link.submit(make, attempt)
        except ApiError:
            attempt.over("not_sent", is_failure=True)
            return False
        if routed.record is not None:
            routed.record.sent(link.name)
        routed.attempts[attempt.ticket] = attempt
        if is_part:
            self._planned.begin(routed, attempt.ticket, decision, route)
        else:
            self._planned.sent(routed, link)
        decision = self.core.sent(attempt.ticket, decision, route, self.now())
        attempt.left = decision.left
        if self._learns:
            attempt.names = decision.names
        self._on_route(decision)
        return True

    def _all_full(self, routed: RoutedRequest, sample: int) -> None:
        """Refuse a new request, because all queues are full. A request that a controller had before, and lost or
        handed over, is sent again a little later."""
        is_known = bool(routed.failed) or any(routed.stream.outputs)
        if not is_known or not self._resume_seconds:
            asyncio.get_running_loop().call_soon(routed.stream.finish, *routed.last_failure)
            return
        routed.full.clear()
        self._wait(routed, sample)
        asyncio.get_running_loop().call_later(FULL_AGAIN_SECONDS, self._retry_one, routed)

    # -- waiting

    def _wait(self, routed: RoutedRequest, sample: int) -> None:
        routed.waiting.add(sample)
        self._waiting[routed.id] = routed
        if routed.id in self._overdue:
            asyncio.get_running_loop().call_soon(self._waited_enough, routed)
        elif routed.timer is None:
            self._on_event("waited")
            loop = asyncio.get_running_loop()
            routed.timer = loop.call_later(self._resume_seconds, self._waited_enough, routed)

    def _waited_enough(self, routed: RoutedRequest) -> None:
        if routed.stream.ended:
            return
        if not routed.waiting:
            # A controller has the request in its queue. If that controller refuses it, it must not wait again.
            self._overdue.add(routed.id)
            return
        self._on_event("gave_up")
        why = self._describe(routed.route.model)
        detail = f"no engine was ready within {self._resume_seconds:.0f} s: {why}"
        routed.stream.finish(FinishReason.ENGINE_FAILED, detail)

    def _retry(self, standing: Standing) -> None:
        for routed in list(self._waiting.values()):
            if standing.may_serve(routed.route.model):
                self._retry_one(routed)

    def _retry_one(self, routed: RoutedRequest) -> None:
        if routed.id not in self._waiting:
            return
        samples, routed.waiting = sorted(routed.waiting), set()
        self._waiting.pop(routed.id, None)
        for sample in samples:
            self._send_or_end(routed, sample)

    def _stop_timer(self, routed: RoutedRequest) -> None:
        self._overdue.discard(routed.id)
        if routed.timer is not None:
            routed.timer.cancel()
            routed.timer = None

    # -- letting go

    def _let_go(self, attempt: Attempt, *, failed: bool = False, abort: bool = False) -> None:
        """Forget an attempt. Called exactly once for each: until then it is in its request's `attempts`."""
        if attempt.has_started and not failed:  # else the chunks that it began with are forgotten already
            self.started(attempt)
        attempt.over("released")
        del attempt.routed.attempts[attempt.ticket]
        attempt.routed.stream.served = attempt.link, attempt.request
        attempt.link.release(attempt.request, abort=abort)
        self.core.ended(attempt.ticket, self.now(), failed=failed)

    def _release(self, stream: int, abort: bool) -> None:
        routed = self._routed.pop(stream, None)
        if routed is None:
            return
        self._planned.released(routed)
        self._waiting.pop(routed.id, None)
        self._stop_timer(routed)
        routed.waiting.clear()
        for attempt in list(routed.attempts.values()):
            # An attempt at a single sample runs on, whatever ended the stream: it must be aborted.
            self._let_go(attempt, abort=abort or attempt.sample != ALL)

    def _drop_sample(self, stream: int, sample: int) -> None:
        """Stop one of several samples: the reader needs no more of it."""
        routed = self._routed.get(stream)
        if routed is None:
            return
        routed.waiting.discard(sample)
        if not routed.waiting:
            self._waiting.pop(routed.id, None)
            self._stop_timer(routed)
        for attempt in list(routed.attempts.values()):
            if attempt.sample == ALL:
                attempt.link.drop_sample(attempt.request, sample)
            elif attempt.sample == sample:
                self._let_go(attempt, abort=True)
