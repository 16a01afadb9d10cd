"""Streams on their way through the controllers, and their dispatches: what `Dispatcher` keeps of each."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec

from trunkline.controller.messages import PromptLogprobs, Submit, TopLogprobs
from trunkline.router.jobs.job import Job
from trunkline.router.messages import FinishReason, Hypothesis, Started
from trunkline.router.routing.request import RouteRequest
from trunkline.router.streams.continuation import ALL
from trunkline.router.streams.link import ControllerLink
from trunkline.router.streams.streams import End, Stream
from trunkline.router.telemetry.request_record import RequestRecord
from trunkline.router.telemetry.request_trace import DispatchTrace
from trunkline.runtime.spans import SpanContext

NOTHING_YET: Final = End(FinishReason.ENGINE_FAILED)


class Owner(Protocol):
    """Who is told of a dispatch."""

    def started(self, dispatch: Dispatch) -> None:
        """Its prompt is computed, or as good as."""

    def finished(self, dispatch: Dispatch, end: End) -> None:
        """It is over, one way or another."""


@dataclass(slots=True, eq=False)
class Flow:
    """A stream on its way through the controllers."""

    id: int
    job: Job
    route: RouteRequest
    stream: Stream
    dispatches: dict[int, Dispatch] = field(default_factory=dict)
    """By ticket."""
    waiting: set[int] = field(default_factory=set)
    """Samples (or `ALL`) that no controller has at present."""
    timer: asyncio.TimerHandle | None = None
    """Runs from the first wait until a controller admits it: then nothing may wait any more."""
    failures: dict[int, int] = field(default_factory=dict)
    """By sample (or `ALL`): dispatches lost since its last token, each as `WAITING_LOSSES` or as one. Samples that
    are lost together do not add up."""
    failed: set[int] = field(default_factory=set)
    """Controllers at which that happened; others are preferred."""
    full: set[int] = field(default_factory=set)
    """Controllers whose queue was full for it."""
    last_failure: End = NOTHING_YET
    record: RequestRecord | None = None
    """Of the HTTP request; None: there is none."""
    lost: list[SpanContext] = field(default_factory=list)
    """Of a traced one: the span of the last dispatch that was lost."""

    @property
    def request_id(self) -> str:
        """Of the HTTP request; "": there is none."""
        return "" if self.record is None else self.record.id


class Dispatch:
    """One sending of a stream, or of one of its samples, to one controller; a `Receiver`."""

    __slots__ = (
        *("_dispatcher", "_stream", "_trace"),
        *("flow", "has_started", "link", "names", "request", "sample", "ticket"),
    )

    def __init__(self, dispatcher: Owner, flow: Flow, link: ControllerLink, ticket: int, sample: int) -> None:
        self._dispatcher = dispatcher
        self._stream = flow.stream
        self.flow = flow
        self.link = link
        self.ticket = ticket
        self.sample = sample
        """`ALL`: the samples come as the stream's own, else this one comes as the controller's only one."""
        self.has_started = False
        self.request = 0
        """The link's number for it."""
        self.names: list[bytes] = []
        """Chunks that its controller has once it has started; only where that must be learnt so."""
        self._trace: DispatchTrace | None = None

    def marked(self, submit: Submit) -> Submit:
        """What is sent, with what makes it known in the controller's log and trace."""
        record = self.flow.record
        if record is None:
            return submit
        context = b""
        if record.trace is not None:
            known = sum(map(len, self.flow.stream.outputs))
            self._trace = record.trace.dispatch(self.link.index, self.sample, self.flow.lost, known)
            context = self._trace.context.pack()
        return msgspec.structs.replace(submit, request_id=record.id, trace=context)

    def over(self, reason: str, *, is_failure: bool = False) -> None:
        """Nothing comes of it any more. `is_failure`: others are to go on with it."""
        trace, self._trace = self._trace, None
        record = self.flow.record
        if trace is None or record is None or record.trace is None:
            return
        if is_failure:
            self.flow.lost = [trace.context]
        record.trace.dispatched(trace, reason, is_failure=is_failure, has_started=self.has_started)

    def start(self, started: Started) -> None:
        """It was admitted."""
        self.has_started = True
        self._dispatcher.started(self)
        self._stream.start(started)

    def score(self, logprobs: PromptLogprobs) -> None:
        """Something was said of the prompt."""
        self._stream.score(logprobs)

    def push(self, token: int, logprobs: TopLogprobs | None = None) -> None:
        """A token arrived for the only sample, or for sample 0."""
        flow = self.flow
        if flow.failures:
            flow.failures.pop(self.sample, None)
            flow.failed.clear()
        if self.sample <= 0:
            self._stream.push(token, logprobs)
        else:
            self._stream.push_sample(token, logprobs, self.sample)

    def push_sample(self, token: int, logprobs: TopLogprobs | None, sample: int) -> None:
        """A token arrived for one of several samples."""
        if sample == 0:
            self.push(token, logprobs)
            return
        if self.sample != ALL:
            raise ValueError(f"a token for sample {sample} of 1")
        self._stream.push_sample(token, logprobs, sample)

    def found(self, hypotheses: list[Hypothesis]) -> None:
        """A beam search's results arrived."""
        self._stream.found(hypotheses)

    def finish_sample(self, sample: int, reason: str) -> None:
        """One of several samples ended regularly."""
        if self.sample == ALL:
            self._stream.finish_sample(sample, reason)
        elif sample == 0:
            self.finish(reason)
        else:
            raise ValueError(f"the end of sample {sample} of 1")

    def finish(self, reason: str, detail: str = "", param: str = "") -> None:
        """It ended, regularly or not."""
        self._dispatcher.finished(self, End(reason, detail, param))
