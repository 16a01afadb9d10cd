"""A request on its way through the controllers, and each attempt to have a controller work on it.

A request that has lost its controller goes on elsewhere with its prompt and the tokens it has (design.md section
3). Its noise depends on seed, output index and token only, so it goes on as it would have. Samples with tokens
differ from each other: each goes on in an attempt of its own, with the seed that it has. A beam search, of which
nothing was told yet, begins again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec

from trunkline.controller.messages import Submit, TopLogprobs
from trunkline.controller.sequences.beam_search import sample_seed
from trunkline.kvstore.chunks import pack_int32
from trunkline.router.jobs.job import Job
from trunkline.router.messages import Finished, FinishReason, Started
from trunkline.router.routing.request import RouteRequest
from trunkline.router.streams.link import ControllerLink
from trunkline.router.streams.streams import End, Event, Stream
from trunkline.router.telemetry.request_record import AttemptTrace, RequestRecord
from trunkline.runtime.spans import SpanContext

ALL = -1
"""In place of a sample's index: all of a request."""
NOTHING_YET: Final = End(FinishReason.ENGINE_FAILED)


class Owner(Protocol):
    """The dispatcher, as an attempt sees it."""

    def started(self, attempt: Attempt) -> None:
        """Note that the attempt's prompt is computed, or is about to be."""

    def finished(self, attempt: Attempt, end: End) -> None:
        """Decide what follows the attempt's end."""


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """A request for which a controller works, or is waited for."""

    id: int
    job: Job
    route: RouteRequest
    stream: Stream
    attempts: dict[int, Attempt] = field(default_factory=dict)
    """By ticket; those that are not over."""
    waiting: set[int] = field(default_factory=set)
    """Samples (or `ALL`) that no controller has at present."""
    timer: asyncio.TimerHandle | None = None
    """Runs from the first wait until a controller admits the request: then nothing may wait any more."""
    failures: dict[int, int] = field(default_factory=dict)
    """By sample (or `ALL`): attempts lost since its last token, each as `WAITING_LOSSES` or as one. Samples that
    are lost together do not add up."""
    failed: set[int] = field(default_factory=set)
    """Controllers at which that happened; others are preferred."""
    full: set[int] = field(default_factory=set)
    """Controllers whose queue was full for it."""
    last_failure: End = NOTHING_YET
    record: RequestRecord | None = None
    """Of the HTTP request; None: there is none."""
    lost: list[SpanContext] = field(default_factory=list)
    """Of a traced request: the span of the last attempt that was lost."""

    @property
    def request_id(self) -> str:
        """The id of the HTTP request; "": there is none."""
        return "" if self.record is None else self.record.id


class Attempt:
    """One sending of a request, or of one of its samples, to one controller; a `Receiver`."""

    __slots__ = (
        *("_owner", "_stream", "_trace"),
        *("has_started", "link", "names", "request", "routed", "sample", "ticket"),
    )

    def __init__(
        self, owner: Owner, routed: RoutedRequest, link: ControllerLink, ticket: int, sample: int
    ) -> None:
        """`sample`: the only one that the controller computes, or `ALL`."""
        self._owner = owner
        self._stream = routed.stream
        self.routed = routed
        self.link = link
        self.ticket = ticket
        self.sample = sample
        self.has_started = False
        self.request = 0
        """The link's number for it."""
        self.names: list[bytes] = []
        """Chunks that the controller has once the attempt has started; only where that must be learnt so."""
        self._trace: AttemptTrace | None = None

    def marked(self, submit: Submit) -> Submit:
        """Return what is sent, with the ids by which the controller's log and trace know it."""
        record = self.routed.record
        if record is None:
            return submit
        context = b""
        if record.trace is not None:
            known = sum(map(len, self.routed.stream.outputs))
            self._trace = record.trace.attempt(self.link.index, self.sample, self.routed.lost, known)
            context = self._trace.context.pack()
        return msgspec.structs.replace(submit, request_id=record.id, trace=context)

    def over(self, reason: str, *, is_failure: bool = False) -> None:
        """End the attempt's span. `is_failure`: another attempt is to go on with the work."""
        trace, self._trace = self._trace, None
        record = self.routed.record
        if trace is None or record is None or record.trace is None:
            return
        if is_failure:
            self.routed.lost = [trace.context]
        record.trace.attempted(trace, reason, is_failure=is_failure, has_started=self.has_started)

    def push(self, token: int, logprobs: TopLogprobs | None = None, sample: int = 0) -> None:
        """See `Receiver`."""
        routed = self.routed
        if routed.failures:
            routed.failures.pop(self.sample, None)
            routed.failed.clear()
        if self.sample != ALL:
            if sample:
                raise ValueError(f"a token for sample {sample} of 1")
            sample = self.sample
        self._stream.push(token, logprobs, sample)

    def receive(self, event: Event) -> None:
        """See `Receiver`. The end of the attempt goes to its owner, for it need not be the request's."""
        if isinstance(event, Finished):
            if event.sample < 0 or (event.sample == 0 and self.sample != ALL):
                self._owner.finished(self, End(event.reason, event.detail, event.param))
                return
            if self.sample != ALL:
                raise ValueError(f"the end of sample {event.sample} of 1")
        elif isinstance(event, Started):
            self.has_started = True
            self._owner.started(self)
        self._stream.receive(event)


def submission(job: Job, request: int) -> Submit:
    """Return what a controller is asked for a job from its beginning, with all its samples.

    Args:
        request: the number under which the connection knows it.
    """
    return Submit(
        request=request,
        tokens=job.packed_prompt(),
        prompt_len=len(job.prompt),
        max_tokens=job.max_tokens,
        sampling=job.sampling,
        stop_token_ids=sorted(job.eos_ids),
        salt=job.salt,
        n=job.decoding.samples,
        beam=job.decoding.beam,
        priority=job.priority,
        grammar=job.grammar,
        drops=job.packed_drops(),
        ttl=job.ttl,
        layout=None if job.modules is None else job.modules.layout,
    )


def continuation(job: Job, request: int, sample: int, output: Sequence[int]) -> Submit:
    """Return what a controller is asked for one sample of a job, behind the tokens that the sample has.

    Args:
        sample: its index.
        output: its tokens so far; without any it begins.
    """
    sampling = msgspec.structs.replace(
        job.sampling, seed=sample_seed(job.sampling.seed, sample), prompt_logprobs=-1
    )
    whole = submission(job, request)
    return msgspec.structs.replace(whole, tokens=whole.tokens + pack_int32(output), sampling=sampling, n=1)


def end_of(job: Job, output: Sequence[int], max_context: int) -> FinishReason | None:
    """Return why a sample with these tokens is over; None: it is not. Its end may have been lost with a message.

    Args:
        output: its tokens so far.
        max_context: prompt and output at most; 0: not known.
    """
    if output and output[-1] in job.eos_ids:
        return FinishReason.STOP
    if len(output) >= job.max_tokens:
        return FinishReason.LENGTH
    if max_context and output and job.seen_tokens + len(output) >= max_context:
        return FinishReason.LENGTH
    return None
