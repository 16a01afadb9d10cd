"""The requests that have not ended, and what routers have to be told of them: where they start and end. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from trunkline.controller.engine.events import EngineOutputs
from trunkline.controller.engine.grammars import GrammarBook
from trunkline.controller.engine.prompt_scores import ScoreLedger
from trunkline.controller.engine.timeline import Journeys
from trunkline.controller.scheduling.quarantine import Quarantine
from trunkline.controller.scheduling.scheduler import Scheduler
from trunkline.controller.sequences.sequence import CacheReport, Sequence, SequenceGroup
from trunkline.kvstore.tier import TierKind
from trunkline.router.messages import Finished, FinishReason, Started


@dataclass(slots=True)
class EngineCounters:
    """Totals since the start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    row_set_changes: int = 0
    """Steps that carried a new row set; all others copy no plan (ChunkAttention §3.3)."""
    plan_copies: int = 0
    """Steps for which the workers rebuilt their decode plan: new rows, or a row that filled its block."""
    kv_bytes_read: int = 0
    """By decode attention on rank 0."""
    tier_tokens: list[int] = field(default_factory=lambda: [0] * len(TierKind))
    """`cached_tokens` by tier."""
    misses: dict[str, int] = field(default_factory=dict)
    """Requests by reason."""

    def found(self, found: CacheReport) -> None:
        """Add what was found in the cache for a request that starts."""
        self.cached_tokens += found.tokens
        for tier, tokens in enumerate(found.tier_tokens):
            self.tier_tokens[tier] += tokens
        if found.miss:
            self.misses[found.miss] = self.misses.get(found.miss, 0) + 1


class RequestTable:
    """The requests that have not ended. They outlive their scheduler, which ends with its workers."""

    def __init__(self) -> None:
        self.groups: dict[int, SequenceGroup] = {}
        """By request, in the order of arrival."""
        self.grammars = GrammarBook()
        self.scores = ScoreLedger()
        self.quarantine = Quarantine()
        self.journeys = Journeys()
        self.counters = EngineCounters()
        self.pending_outputs = EngineOutputs()
        """Since the last `take_outputs`."""

    def started(self, group: SequenceGroup, now: float) -> None:
        """Report a request whose prompt is computed with the step that is being planned."""
        found = group.found
        assert found is not None
        self.journeys.started(group, now)
        cut = "" if not group.request.drops else "kept" if group.cut is not None else "recomputed"
        if not group.started:
            group.started = True
            self.counters.prompt_tokens += group.prompt_len - group.holes
            self.counters.found(found)
        elif cut == found.cut or not cut:
            return  # it comes back from a preemption, or from workers that are gone
        found.cut = cut
        self.pending_outputs.started.append(
            Started(
                group.id,
                found.tokens,
                found.tier_tokens,
                found.miss,
                found.miss_token,
                found.exact,
                cut,
                found.module_tokens,
                found.queued_s,
            )
        )

    def end_sequence(self, scheduler: Scheduler, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """End a sample that has come to its own end; the request ends with its last one."""
        group = sequence.group
        if len(group.members) == 1:
            sample = -1 if group.request.n == 1 else sequence.sample
            self.end(scheduler, group, Finished(group.id, reason, sample=sample), now)
            return
        self.journeys.sampled(group.id, _output_tokens(scheduler, sequence))
        scheduler.end(sequence, now)
        self.pending_outputs.finished.append(Finished(group.id, reason, sample=sequence.sample))

    def end(self, scheduler: Scheduler, group: SequenceGroup, finished: Finished, now: float) -> None:
        """End a request and release everything that it holds, exactly once: all requests that hold anything end
        here."""
        del self.groups[group.id]
        for sequence in reversed(group.members.copy()):
            self.journeys.sampled(group.id, _output_tokens(scheduler, sequence))
            scheduler.end(sequence, now)
        if group.request.grammar is not None:
            self.grammars.leave(group.request.grammar, group.id)
        self.gone(finished)

    def gone(self, finished: Finished) -> None:
        """Report the end of a request that holds nothing any more."""
        self.scores.ended(finished.request)
        self.quarantine.ended(finished.request)
        self.journeys.ended(finished)
        self.pending_outputs.finished.append(finished)

    def take_outputs(self) -> EngineOutputs | None:
        """Return what routers have to be told since the last call, if anything."""
        if not self.pending_outputs:
            return None
        outputs, self.pending_outputs = self.pending_outputs, EngineOutputs()
        return outputs


def _output_tokens(scheduler: Scheduler, sequence: Sequence) -> int:
    known = sequence.tokens.count if sequence.slot < 0 else int(scheduler.rows.known[sequence.slot])
    return max(0, known - sequence.prompt_len)
