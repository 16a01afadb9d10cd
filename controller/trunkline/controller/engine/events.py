"""The input and the output of an engine: `Engine.step(events, now) -> Ready`. Pure.

An event is a `Request`, a report of the workers as it came over the wire (`StepResult`, `GrammarReady`,
`MovesDone`, `Probed`), or one of the classes below. A `Ready` says what the service has to do next, field by field
in the order in which it has to be done.

Each request has a `RequestTimeline` from its arrival to its end; the log gets it when the request has ended. What
costs something at every step is noted for traced requests only (`Request.trace`). Times are the engine's (`now`,
seconds of any origin).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

import msgspec

from trunkline.controller.cache.radix_tree import Node
from trunkline.controller.engine.disk_chunks import DiskChange, StoredChunks
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import ModulesCall
from trunkline.controller.reports import GrammarReady, MovesDone, Probed, StepResult, TopLogprobs
from trunkline.controller.sequences.decode_rows import Int64Array
from trunkline.controller.sequences.plan_builder import PlanBuilder
from trunkline.controller.sequences.sequence import Request, SequenceGroup
from trunkline.kvstore.chunks import NAME_BYTES, ChunkName, Int32Array
from trunkline.kvstore.next_use import NextUse
from trunkline.router.messages import (
    BeamsFound,
    DraftsTried,
    Finished,
    FinishReason,
    Flushed,
    ModulesReply,
    Prefetched,
    PromptScored,
    Started,
)
from trunkline.worker.messages import CompileGrammar, ForgetGrammar, StepPlan, TierOrder

Caller = tuple[int, int]
"""The receiver of an answer: the router's index, and the ticket of its call. The engine only hands both back."""

EVENTS_MAX: Final = 64
"""Largest number of parts of its prompt, and of losses of its workers, that a traced request's timeline lists."""
STARTS_WAIT_S: Final = 0.02
"""Longest time in seconds that a step may be predicted to take if routers are to hear with its result which
requests have started. A router that is woken for this alone takes the processor from the step."""


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """End a request, or one of its samples. Its KV stays cached. An unknown request changes nothing."""

    request: int
    sample: int = -1
    """Index of the sample to end; -1: the whole request. The end of a sample whose request goes on is not
    reported."""


@dataclass(frozen=True, slots=True)
class AnswerTold:
    """How the answer of a request that has ended did end (`Told`)."""

    request: int
    ended: str

    def tell(self, uses: NextUse[Node], now: float) -> None:
        """Tell what predicts the next use of KV."""
        turn = uses.turn_of(self.request)
        if turn is not None:
            uses.told(turn, self.ended)


@dataclass(frozen=True, slots=True)
class GoesOnElsewhere:
    """Another group computes a prompt of which this one has the beginning (`WentOn`)."""

    names: bytes
    prompt_tokens: int

    def tell(self, uses: NextUse[Node], now: float) -> None:
        """Tell what predicts the next use of KV."""
        starts = range(0, len(self.names), NAME_BYTES)
        names = [ChunkName(self.names[start : start + NAME_BYTES]) for start in starts]
        uses.went_on(names, self.prompt_tokens, now)


@dataclass(frozen=True, slots=True)
class EndWaiting:
    """End the requests that have not begun, and therefore hold nothing."""

    reason: FinishReason
    detail: str


@dataclass(frozen=True, slots=True)
class EndAll:
    """End every request and forget all KV: nothing is computed any more."""

    detail: str
    reason: FinishReason = FinishReason.ENGINE_FAILED


@dataclass(frozen=True, slots=True)
class EndAdapter:
    """End the requests and calls of an adapter that the workers do not have (any more); all others go on."""

    key: bytes
    detail: str


@dataclass(frozen=True, slots=True)
class DropCache:
    """Drop every chunk that no running sequence holds. Answered in `EngineOutputs.replies`."""

    caller: Caller = (0, 0)


@dataclass(frozen=True, slots=True)
class ExpectRequest:
    """Fetch the known chunks of a request that will probably come into host memory. Answered in
    `EngineOutputs.replies`."""

    caller: Caller
    request: Request
    root: bytes = b""
    """Key of the root below which the request's tokens are looked for; empty: the request says which one it is."""
    names: bytes = b""
    """Names of the path's first chunks that were moved behind a cut (`Prefetch.names`)."""


@dataclass(frozen=True, slots=True)
class ForgetPrompt:
    """Drop the chunks that only this request's prompt has, from all tiers."""

    request: Request


@dataclass(frozen=True, slots=True)
class CallTexts:
    """Do what a router asks about the texts of a schema. Answered in `EngineOutputs.modules`, perhaps steps
    later."""

    id: int
    """Id of the call, unique among the calls that have no answer yet."""
    call: ModulesCall


@dataclass(frozen=True, slots=True)
class WorkersLost:
    """The workers are gone with all that was in their memory. Requests wait for the next workers, with the tokens
    known so far; only those that probably kill workers end (`scheduling/admission.py`)."""

    epoch: int
    """The epoch of the next workers. Reports of any other epoch are ignored from now on."""


@dataclass(frozen=True, slots=True)
class WorkersBack:
    """New workers are ready: all requests go on."""

    config: EngineConfig
    """A valid configuration (`EngineConfig.validate`), with what these workers hold."""
    stored: StoredChunks | None = None
    """The chunks on their disks; None: there is no disk tier."""


WorkerEvent = StepResult | GrammarReady | MovesDone | Probed
Event = (
    WorkerEvent
    | Request
    | AbortRequest
    | AnswerTold
    | GoesOnElsewhere
    | EndWaiting
    | EndAll
    | EndAdapter
    | DropCache
    | ExpectRequest
    | ForgetPrompt
    | CallTexts
    | WorkersLost
    | WorkersBack
)


class EngineOutputs(msgspec.Struct):
    """The messages that routers get: starts first, then tokens and beams, then ends.

    Requests and calls have the engine's ids, and messages are not numbered yet.
    """

    started: list[Started] = []
    requests: list[Int64Array] = []
    """For each result of a step: the request of each token."""
    samples: list[Int64Array] = []
    """For each result of a step: the sample of each token, as an index within its request."""
    tokens: list[Int32Array] = []
    """For each result of a step: the tokens."""
    logprobs: list[dict[int, TopLogprobs] | None] = []
    """For each result of a step: the log-probabilities, by index into the result's tokens."""
    prompt_logprobs: list[PromptScored] = []
    drafts: list[DraftsTried] = []
    """Come with the tokens of their steps."""
    beams: list[BeamsFound] = []
    finished: list[Finished] = []
    modules: list[ModulesReply] = []
    """Answers to `CallTexts`; the `ticket` of an answer is the id of the call."""
    replies: list[tuple[int, Flushed | Prefetched]] = []
    """Answers to `DropCache` and `ExpectRequest`, each with the index of its router."""
    is_due: bool = False
    """Whether a step's result has been taken in, so that nothing waits for it any more."""

    def __bool__(self) -> bool:
        return bool(self.started) or self._has_more

    def followed_by(self, others: EngineOutputs) -> EngineOutputs:
        """Return these outputs, with others behind them."""
        lists = [name for name in self.__struct_fields__ if name != "is_due"]
        joined = {name: getattr(self, name) + getattr(others, name) for name in lists}
        return EngineOutputs(**joined, is_due=self.is_due or others.is_due)

    def may_wait(self, step_s: float) -> bool:
        """Return whether this only says which requests have started, and may be told with the result of a step
        that takes so many seconds."""
        return bool(self.started) and step_s <= STARTS_WAIT_S and not (self.is_due or self._has_more)

    @property
    def _has_more(self) -> bool:
        streams = self.tokens or self.prompt_logprobs or self.beams or self.finished
        return bool(streams or self.modules or self.replies)


@dataclass(slots=True)
class RequestTimeline:
    """The times at which one request reached each stage of its life, and how much was computed for it."""

    request: Request
    came: float
    admitted: float = -1.0
    """Time at which the request first entered the batch; -1: not yet."""
    planned: float = -1.0
    """Time at which the step that computes the last part of the prompt was planned."""
    first_token: float = -1.0
    cached_tokens: int = 0
    tier_tokens: list[int] = field(default_factory=list)
    """Number of `cached_tokens` that were in each tier (`TierKind`)."""
    computed_tokens: int = 0
    chunks: list[tuple[float, int, int]] = field(default_factory=list)
    """Of a traced request: the time, step and tokens of each part of its prompt that was planned."""
    chunk_count: int = 0
    """Of a traced request: the number of parts of its prompt that were planned."""
    batch_seq_ids: set[int] = field(default_factory=set)
    """Of a traced request: the ids that its sequences had in the batch of the present workers. Each return after a
    preemption adds one."""
    past_batch_seq_ids: int = 0
    """Of a traced request: the number of ids that its sequences had in batches of workers that were lost."""
    losses: list[float] = field(default_factory=list)
    """Times at which the request's workers were lost."""
    output_tokens: int = 0
    reason: str = ""
    """The reason why the request ended."""

    @property
    def returns(self) -> int:
        """Number of times that a traced request came back to the batch, after a preemption or with other
        workers."""
        return max(0, self.past_batch_seq_ids + len(self.batch_seq_ids) - 1)

    def chunk(self, now: float, step: int, batch_seq_id: int, tokens: int) -> None:
        """Note a part of the prompt that a step computes."""
        self.batch_seq_ids.add(batch_seq_id)
        self.computed_tokens += tokens
        self.chunk_count += 1
        if len(self.chunks) < EVENTS_MAX:
            self.chunks.append((now, step, tokens))


class Timelines:
    """The timelines of all requests that have not ended, and of those that ended since the last `take_done`."""

    def __init__(self) -> None:
        self._going: dict[int, RequestTimeline] = {}
        self._done: list[RequestTimeline] = []

    def came(self, request: Request, now: float) -> None:
        """Begin the timeline of a request that was accepted."""
        self._going[request.id] = RequestTimeline(request, now)

    def of(self, request: int) -> RequestTimeline | None:
        """Return the timeline of a request that has not ended."""
        return self._going.get(request)

    def started(self, group: SequenceGroup, now: float) -> None:
        """Note that the step which computes the end of a prompt is planned; set `Started.queued_s` once."""
        timeline, found = self._going.get(group.id), group.found
        if timeline is None or found is None or timeline.planned >= 0:
            return
        timeline.admitted, timeline.planned = found.at, now
        timeline.cached_tokens, timeline.tier_tokens = found.started.cached_tokens, found.started.tier_tokens
        found.started = msgspec.structs.replace(found.started, queued_s=found.at - timeline.came)

    def planned(self, plan: PlanBuilder) -> tuple[int, ...]:
        """Note the parts of traced prompts that a step computes; return those that get their first token."""
        first = []
        sampling = {sequence.group.id for sequence in plan.sampling}
        for group, batch_seq_id, tokens in plan.traced:
            timeline = self._going.get(group.id)
            if timeline is None:
                continue
            if timeline.admitted < 0:
                timeline.admitted = plan.now
            timeline.chunk(plan.now, plan.step, batch_seq_id, tokens)
            if group.id in sampling and timeline.first_token < 0:
                first.append(group.id)
        return tuple(first)

    def got_token(self, request: int, now: float) -> None:
        """Note the first token of a traced request."""
        if (timeline := self._going.get(request)) is not None and timeline.first_token < 0:
            timeline.first_token = now

    def lost(self, now: float) -> None:
        """Note that the workers are gone."""
        for timeline in self._going.values():
            timeline.past_batch_seq_ids += len(timeline.batch_seq_ids)
            timeline.batch_seq_ids.clear()
            if len(timeline.losses) < EVENTS_MAX:
                timeline.losses.append(now)

    def sampled(self, request: int, tokens: int) -> None:
        """Add the output tokens of a sample that is over."""
        if (timeline := self._going.get(request)) is not None:
            timeline.output_tokens += tokens

    def ended(self, finished: Finished) -> None:
        """Close the timeline of a request that has ended."""
        if (timeline := self._going.pop(finished.request, None)) is not None:
            timeline.reason = finished.reason
            self._done.append(timeline)

    def take_done(self) -> list[RequestTimeline]:
        """Return the timelines of the requests that have ended since the last call."""
        if not self._done:
            return []
        done, self._done = self._done, []
        return done


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """The actions that follow from a step of the engine, in the order of the fields."""

    grammars: Sequence[CompileGrammar | ForgetGrammar]
    """Send these messages to all workers before `plan`, which may name the grammars."""
    plan: StepPlan | None
    """Send this plan to all workers before doing anything that follows: workers must never wait for routers, disks
    or logs. None: there is nothing to compute, or two steps are unanswered."""
    outputs: EngineOutputs | None
    """Send each router its part. The next `Ready` continues these outputs, so none may be left out. Which requests
    have started may come with their first tokens (`Engine.holds_starts`)."""
    has_rest: bool = False
    """Do what stands above, then call `Engine.finish` at once, and do what it returns."""
    disk_changes: Sequence[DiskChange] = ()
    """Note these changes in the disk tier's index before `orders` are sent: a slot that is about to be overwritten
    must not be listed with the chunk that it held."""
    orders: Sequence[TierOrder] = ()
    """Send these orders to all workers after `plan`, whose saves and loads they follow."""
    ended: Sequence[RequestTimeline] = ()
    """Log the requests that have ended, and emit their spans. This may be done at any later time."""
    problem: str = ""
    """Why the workers cannot be trusted any more; "" if they can. If they cannot, nothing was planned, and a
    `WorkersLost` has to follow."""
    again: bool = False
    """Step again at once, even without events: one more step can be planned ahead."""
    wake_at: float = inf
    """Step again at this time, even without events; infinite if only an event can change anything."""

    def followed_by(self, rest: Ready) -> Ready:
        """Return what is to be done as one, of a step that has a rest."""
        outputs = self.outputs or rest.outputs
        if self.outputs is not None and rest.outputs is not None:
            outputs = self.outputs.followed_by(rest.outputs)
        return msgspec.structs.replace(
            rest,
            grammars=[*self.grammars, *rest.grammars],
            plan=self.plan or rest.plan,
            outputs=outputs,
            problem=self.problem,
        )
