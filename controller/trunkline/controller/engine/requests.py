"""The requests that have not ended, and what is to be said of them: where they start and where they end. Pure."""

from __future__ import annotations

from trunkline.controller.engine.grammars import GrammarBook
from trunkline.controller.engine.outcomes import EngineCounters, EngineOutputs
from trunkline.controller.engine.prompt_scores import ScoreLedger
from trunkline.controller.engine.timeline import Journeys
from trunkline.controller.scheduling.quarantine import Suspects
from trunkline.controller.scheduling.scheduler import Scheduler
from trunkline.controller.sequences.sequence import Sequence, SequenceGroup
from trunkline.router.messages import Finished, FinishReason, Started


class LiveRequests:
    """They outlive the scheduler that they are in, which goes with its workers."""

    def __init__(self) -> None:
        self.groups: dict[int, SequenceGroup] = {}
        """By request, in the order of their coming."""
        self.grammars = GrammarBook()
        self.scores = ScoreLedger()
        self.suspects = Suspects()
        self.journeys = Journeys()
        self.counters = EngineCounters()
        self.said = EngineOutputs()
        """Since the last `take_said`."""

    def started(self, group: SequenceGroup, now: float) -> None:
        """Its prompt will have been computed after the step that is being planned."""
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
        self.said.started.append(
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
        """A sample has ended by itself; the request with its last one."""
        group = sequence.group
        if len(group.members) == 1:
            sample = -1 if group.request.n == 1 else sequence.sample
            self.end(scheduler, group, Finished(group.id, reason, sample=sample), now)
            return
        self.journeys.sampled(group.id, _output_tokens(scheduler, sequence))
        scheduler.end(sequence, now)
        self.said.finished.append(Finished(group.id, reason, sample=sequence.sample))

    def end(self, scheduler: Scheduler, group: SequenceGroup, finished: Finished, now: float) -> None:
        """The one place where a request ends: everything it holds is released exactly once."""
        del self.groups[group.id]
        for sequence in reversed(group.members.copy()):
            self.journeys.sampled(group.id, _output_tokens(scheduler, sequence))
            scheduler.end(sequence, now)
        if group.request.grammar is not None:
            self.grammars.leave(group.request.grammar, group.id)
        self.gone(finished)

    def gone(self, finished: Finished) -> None:
        """One that holds nothing any more has ended."""
        self.scores.ended(finished.request)
        self.suspects.ended(finished.request)
        self.journeys.ended(finished)
        self.said.finished.append(finished)

    def take_said(self) -> EngineOutputs | None:
        """What is to be said since the last call, if anything."""
        if not self.said:
            return None
        said, self.said = self.said, EngineOutputs()
        return said


def _output_tokens(scheduler: Scheduler, sequence: Sequence) -> int:
    known = sequence.tokens.count if sequence.slot < 0 else int(scheduler.rows.known[sequence.slot])
    return max(0, known - sequence.prompt_len)
