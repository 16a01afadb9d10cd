"""The requests of an engine that have not ended: what of them is to be told to routers, and how they end. Pure.

Request ──► intake.py ──► queue, batch ──► StepResult ──► step_results.py ──► tokens, ends ──► EngineOutputs
              └─ waits for its grammar (`grammar_book.py`)
"""

from __future__ import annotations

from typing import Final

import msgspec

from trunkline.controller.engine.events import EngineOutputs, Timelines
from trunkline.controller.engine.grammar_book import GrammarBook
from trunkline.controller.reports import PromptLogprobs, StepResult
from trunkline.controller.scheduling.admission import Quarantine
from trunkline.controller.scheduling.scheduler import Scheduler
from trunkline.controller.sequences.plan_builder import InflightStep
from trunkline.controller.sequences.sequence import Sequence, SequenceGroup
from trunkline.controller.tiers.costs import StepCosts
from trunkline.controller.totals import Totals
from trunkline.kvstore.adapters import adapter_of
from trunkline.router.messages import Finished, FinishReason, ModulesReply

_INT32_BYTES: Final = 4


class RequestTable:
    """The requests that have not ended. They outlive their scheduler, which ends with its workers."""

    def __init__(self) -> None:
        self.groups: dict[int, SequenceGroup] = {}
        """The groups of the requests, by request id, in the order of arrival."""
        self.arrivals = 0
        """Number of requests that have come so far, which is the arrival number of the latest one."""
        self.grammars = GrammarBook()
        self.scores = ScoreLedger()
        self.quarantine = Quarantine()
        self.timelines = Timelines()
        self.counters = Totals()
        self.pending_outputs = EngineOutputs()
        """The outputs since the last `take_outputs`."""
        self.ending: list[tuple[SequenceGroup, Finished, float]] = []
        """Requests whose ends are among the outputs, and which still hold what they held until `settle`, with the
        times of their ends."""
        self.answered: list[tuple[InflightStep, StepResult]] = []
        """Results from which the costs of steps are to be learnt by `settle`."""

    def take_outputs(self) -> EngineOutputs | None:
        """Return the outputs since the last call; None if there are none."""
        outputs = self.pending_outputs
        if outputs or outputs.is_due:
            self.pending_outputs = EngineOutputs()
        return outputs or None

    def started(self, group: SequenceGroup, now: float) -> None:
        """Report a request whose prompt is computed with the step that is being planned."""
        found = group.found
        assert found is not None
        self.timelines.started(group, now)
        cut = "" if not group.request.drops else "kept" if group.cut is not None else "recomputed"
        if not group.started:
            group.started = True
            self.counters.prompt_tokens += group.prompt_len - group.holes
            self.counters.cached_tokens += found.started.cached_tokens
            for tier, tokens in enumerate(found.started.tier_tokens):
                self.counters.tier_tokens[tier] += tokens
            if miss := found.started.miss:
                self.counters.misses[miss] = self.counters.misses.get(miss, 0) + 1
        elif cut == found.started.cut or not cut:
            return  # it has been reported, and was preempted or lost its workers since
        found.started = msgspec.structs.replace(found.started, cut=cut)
        self.pending_outputs.started.append(found.started)

    def end_sequence(self, scheduler: Scheduler, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """End a sample that is complete. The request ends with its last sample: a client waits for this, and for
        nothing that follows from it, which is left to `settle`."""
        group = sequence.group
        if len(group.members) == 1:
            finished = Finished(group.id, reason, sample=-1 if group.request.submit.n == 1 else sequence.sample)
            self.pending_outputs.finished.append(finished)
            self.ending.append((group, finished, now))
            return
        self.drop(scheduler, sequence, now)
        self.pending_outputs.finished.append(Finished(group.id, reason, sample=sequence.sample))

    def settle(self, scheduler: Scheduler) -> None:
        """Draw the conclusions from results that no client waits for: learn costs, and release what requests hold
        that have ended. This comes before anything else is decided."""
        for step, result in self.answered:
            _learn(scheduler.costs, step, result)
        self.answered.clear()
        ending, self.ending = self.ending, []
        for group, finished, now in ending:
            self._release(scheduler, group, now)
            self._forget(finished)

    def drop(self, scheduler: Scheduler, sequence: Sequence, now: float) -> None:
        """Release what a sample holds, and count its tokens for the request's timeline."""
        self.timelines.sampled(sequence.group.id, _output_tokens(scheduler, sequence))
        scheduler.end(sequence, now)

    @property
    def only_end(self) -> bool:
        """Whether there are requests, and all of them are `ending`."""
        return len(self.ending) == len(self.groups) > 0

    @property
    def has_answered_prompt(self) -> bool:
        """Whether a step that computed a part of a prompt was answered since `settle`."""
        return any(step.prefill_tokens for step, _ in self.answered)

    @property
    def is_unsettled(self) -> bool:
        """Whether a result came since `settle`."""
        return bool(self.answered)

    def abort(self, scheduler: Scheduler, request_id: int, sample: int, now: float) -> None:
        """End a request, or one sample of it; -1: all."""
        group = self.groups.get(request_id)
        if group is None:
            return
        if sample >= 0 and group.request.submit.beam is None:
            chosen = next((member for member in group.members if member.sample == sample), None)
            if chosen is None or not group.forked:
                return
            if len(group.members) > 1:
                self.drop(scheduler, chosen, now)
                return
        self.end(scheduler, group, Finished(request_id, FinishReason.ABORT), now)

    def end_waiting(self, scheduler: Scheduler, reason: FinishReason, detail: str, now: float) -> None:
        """End the requests that have not begun."""
        for group in list(self.groups.values()):
            if not (group.started or any(member.batch_seq_id for member in group.members)):
                self.end(scheduler, group, Finished(group.id, reason, detail), now)

    def end_all(self, scheduler: Scheduler, reason: FinishReason, detail: str) -> None:
        """End all requests and calls about texts; whatever they hold is about to go with the scheduler."""
        for group in self.groups.values():
            self.gone(Finished(group.id, reason, detail))
        calls = scheduler.encoding.calls
        calls.done.extend(ModulesReply(0, call, "failed", detail) for call in calls.ids() if call >= 0)
        self.pending_outputs.modules += calls.done
        self.groups.clear()

    def end_adapter(self, scheduler: Scheduler, key: bytes, detail: str, now: float) -> None:
        """End the requests and the calls about texts that use an adapter. `key`: the adapter's."""
        for group in [each for each in self.groups.values() if adapter_of(each.request.submit.salt) == key]:
            self.end(scheduler, group, Finished(group.id, FinishReason.ENGINE_FAILED, detail), now)
        calls = scheduler.encoding.calls
        for call_id, salt in calls.salts().items():
            if adapter_of(salt) == key and (call := calls.cancel(call_id, "failed", detail)) is not None:
                scheduler.leave_jobs(call, now)

    def end(self, scheduler: Scheduler, group: SequenceGroup, finished: Finished, now: float) -> None:
        """End a request and release everything that it holds. All requests that hold anything end here."""
        self._release(scheduler, group, now)
        self.gone(finished)

    def gone(self, finished: Finished) -> None:
        """Report the end of a request that holds nothing any more."""
        self._forget(finished)
        self.pending_outputs.finished.append(finished)

    def _release(self, scheduler: Scheduler, group: SequenceGroup, now: float) -> None:
        del self.groups[group.id]
        for sequence in reversed(group.members.copy()):
            self.drop(scheduler, sequence, now)
        if group.request.submit.grammar is not None:
            self.grammars.leave(group.request.submit.grammar, group.id)

    def _forget(self, finished: Finished) -> None:
        self.scores.ended(finished.request)
        self.quarantine.ended(finished.request)
        self.timelines.ended(finished)


def _output_tokens(scheduler: Scheduler, sequence: Sequence) -> int:
    known = sequence.tokens.count if sequence.slot < 0 else int(scheduler.rows.known[sequence.slot])
    return max(0, known - sequence.prompt_len)


def _learn(costs: StepCosts, step: InflightStep, result: StepResult) -> None:
    if step.prefill_tokens or step.drafts or result.waited_us:
        elapsed_us = result.elapsed_us - result.waited_us
        costs.observe(rows=step.decode_rows, prefill_tokens=step.prefill_tokens, elapsed_us=elapsed_us)
    else:
        costs.observe_decode(step.step, rows=step.decode_rows, elapsed_us=result.elapsed_us)
    if result.moved_blocks:
        costs.observe_moves(result.moved_blocks, result.moved_us)


class ScoreLedger:
    """Remembers which log-probabilities of each prompt have been reported already.

    They come in the order of positions. A prompt that is computed again begins again at its start.
    """

    def __init__(self) -> None:
        self._next: dict[int, int] = {}
        """The first position that has not been reported, by request."""

    def news(self, request: int, scores: PromptLogprobs) -> PromptLogprobs | None:
        """Return the part of these scores that is new, and count it as reported."""
        count = len(scores.token_logprobs) // _INT32_BYTES
        known = min(max(0, self._next.get(request, 0) - scores.start), count)
        if known == count:
            return None
        self._next[request] = scores.start + count
        if not known:
            return scores
        top = known * (len(scores.top_ids) // count)
        return PromptLogprobs(
            scores.start + known,
            scores.token_logprobs[known * _INT32_BYTES :],
            scores.ranks[known * _INT32_BYTES :],
            scores.top_ids[top:],
            scores.top_logprobs[top:],
        )

    def ended(self, request: int) -> None:
        """Forget a request that has ended."""
        self._next.pop(request, None)
