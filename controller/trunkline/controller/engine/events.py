"""What goes into an engine and what comes out of it: `Engine.step(events, now) -> Ready`. Pure.

An event is a `Request`, a report of the workers as it came over the wire (`StepResult`, `GrammarReady`,
`MovesDone`, `Probed`), or one of the classes below. A `Ready` says what the shell has to do next, field by field
in the order in which it has to be done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from trunkline.controller.engine.disk_chunks import DiskChange, StoredChunks
from trunkline.controller.engine.timeline import RequestTimeline
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import GrammarReady, ModulesCall, MovesDone, Probed, StepResult, TopLogprobs
from trunkline.controller.scheduling.module_calls import CallDone
from trunkline.controller.sequences.plan_builder import Int64Array
from trunkline.controller.sequences.sequence import Request
from trunkline.kvstore.chunks import Int32Array
from trunkline.router.messages import BeamsFound, Finished, FinishReason, PromptScored, Started
from trunkline.worker.messages import CompileGrammar, ForgetGrammar, Probe, StepPlan, TierMoves

Caller = tuple[int, int]
"""Where an answer goes: the router and its ticket. The engine only hands it back."""


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """End a request, or one of its samples. Its computed KV stays cached; an unknown request is fine."""

    request: int
    sample: int = -1
    """-1: the whole request. Nothing is reported of a sample that ends so while others go on."""


@dataclass(frozen=True, slots=True)
class EndWaiting:
    """End the requests that have not begun and hold nothing."""

    reason: FinishReason
    detail: str


@dataclass(frozen=True, slots=True)
class EndAll:
    """End every request and forget all KV: nothing is computed any more."""

    detail: str
    reason: FinishReason = FinishReason.ENGINE_FAILED


@dataclass(frozen=True, slots=True)
class DropCache:
    """Drop every chunk that no running sequence holds. Answered in `EngineOutputs.dropped`."""

    caller: Caller = (0, 0)


@dataclass(frozen=True, slots=True)
class ExpectRequest:
    """A request like this one is expected: fetch its known chunks into host memory. Answered in
    `EngineOutputs.expected`."""

    caller: Caller
    request: Request


@dataclass(frozen=True, slots=True)
class CallTexts:
    """A router's call about the texts of a schema. Answered in `EngineOutputs.modules`, perhaps steps later."""

    id: int
    """Unique among the calls that have no answer yet."""
    call: ModulesCall


@dataclass(frozen=True, slots=True)
class UnpinTexts:
    """Undo what was pinned under a name. An unknown name is fine."""

    holder: str


@dataclass(frozen=True, slots=True)
class WorkersLost:
    """The workers are gone with all that was in their memory. Requests wait for the next workers, with the tokens
    known so far; only those that probably kill workers end (`scheduling/quarantine.py`)."""

    epoch: int
    """The next workers'. Reports of any other epoch are ignored from now on."""


@dataclass(frozen=True, slots=True)
class WorkersBack:
    """New workers are ready: all requests go on."""

    config: EngineConfig
    """Valid (`EngineConfig.validate`), with what these workers hold."""
    stored: StoredChunks | None = None
    """The chunks on their disks; None: there is no disk tier."""


WorkerEvent = StepResult | GrammarReady | MovesDone | Probed
Event = (
    WorkerEvent
    | Request
    | AbortRequest
    | EndWaiting
    | EndAll
    | DropCache
    | ExpectRequest
    | CallTexts
    | UnpinTexts
    | WorkersLost
    | WorkersBack
)


@dataclass(slots=True)
class EngineOutputs:
    """What routers have to be told: first what has started, then tokens and beams, then what has finished."""

    started: list[Started] = field(default_factory=list)
    requests: list[Int64Array] = field(default_factory=list)
    """Per result of a step: the request of each token, …"""
    samples: list[Int64Array] = field(default_factory=list)
    """… the sample of that request, …"""
    tokens: list[Int32Array] = field(default_factory=list)
    """… and the token."""
    logprobs: list[dict[int, TopLogprobs] | None] = field(default_factory=list)
    """Per result, by index into its tokens."""
    prompt_logprobs: list[PromptScored] = field(default_factory=list)
    beams: list[BeamsFound] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    modules: list[CallDone] = field(default_factory=list)
    """Answers to `CallTexts`."""
    dropped: list[tuple[Caller, int]] = field(default_factory=list)
    """Answers to `DropCache`: the blocks that were freed."""
    expected: list[tuple[Caller, int, int]] = field(default_factory=list)
    """Answers to `ExpectRequest`: the tokens that are known, and those of them that have to be fetched."""

    def __bool__(self) -> bool:
        streams = self.started or self.tokens or self.prompt_logprobs or self.beams or self.finished
        return bool(streams or self.modules or self.dropped or self.expected)


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """What has to be done after a step of the engine, in the order of the fields."""

    grammars: Sequence[CompileGrammar | ForgetGrammar]
    """Send to all workers before `plan`, which may name these grammars."""
    plan: StepPlan | None
    """Send to all workers before anything that follows: they must never wait for routers, disks or logs. None:
    there is nothing to compute, or two steps are unanswered."""
    disk_changes: Sequence[DiskChange]
    """Note in the disk tier's index before `orders` are sent: a slot that is about to be overwritten must not be
    listed with what it held."""
    orders: Sequence[TierMoves | Probe]
    """Send to all workers after `plan`, whose saves and loads they follow."""
    outputs: EngineOutputs | None
    """Send to the routers, each its part. The next `Ready` continues it: none may be left out."""
    ended: Sequence[RequestTimeline]
    """Log, and emit as spans: the requests that have ended. Any time later will do."""
    problem: str = ""
    """Why the workers cannot be trusted any more; "" if they can. If they cannot, nothing was planned, and a
    `WorkersLost` has to follow."""
    again: bool = False
    """Step again at once, even without events: one more step can be planned ahead."""
    wake_at: float
    """Step again at this time, even without events; infinite if only an event can change anything."""
