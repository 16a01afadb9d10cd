"""Requests from their arrival to their end: their groups, and the tokens that results of steps bring them. Pure.

Request ──► make_group ──► queue, batch ──► StepResult ──► apply_step_result ──► tokens, ends ──► EngineOutputs
                └─ waits for its grammar (`grammar_book.py`)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from trunkline.controller.allocation.modules import lay_out, prompt_of
from trunkline.controller.allocation.prefix_match import cut_group, known_tokens, shorten_history
from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.engine.drafted import drafts_tried, join_results, positions_of
from trunkline.controller.engine.events import EngineOutputs, Timelines
from trunkline.controller.engine.grammar_book import GrammarBook
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import BeamStep, PromptLogprobs, StepResult, TopLogprobs
from trunkline.controller.scheduling.admission import Quarantine
from trunkline.controller.scheduling.row_blocks import slack_of
from trunkline.controller.scheduling.scheduler import Scheduler
from trunkline.controller.sequences.decode_rows import BEAM, DecodeRows, RowSet
from trunkline.controller.sequences.plan_builder import InflightStep, PlanBuilder
from trunkline.controller.sequences.sequence import Request, Sequence, SequenceGroup
from trunkline.controller.tiers.costs import StepCosts
from trunkline.controller.totals import Totals
from trunkline.kvstore.chunks import Int32Array, any_of, largest, least, unpack_int32
from trunkline.kvstore.module_names import RelocationRule
from trunkline.router.messages import BeamsFound, Finished, FinishReason, ModulesReply, PromptScored
from trunkline.worker.messages import Sampling

PLAIN_STEPS_PER_OBSERVATION: Final = 8
"""Number of steps that only decode for each one from which step costs are learnt: such steps are alike, and
learning takes time."""
_INT32_BYTES: Final = 4


class RequestTable:
    """The requests that have not ended. They outlive their scheduler, which ends with its workers."""

    def __init__(self) -> None:
        self.groups: dict[int, SequenceGroup] = {}
        """The groups of the requests, by request id, in the order of arrival."""
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


def from_its_start(request: Request) -> Request:
    """Return a request in the form in which it can begin here.

    A beam search that another controller began starts again, without its output: the state of its beams is lost.
    """
    prompt_len = request.submit.prompt_len
    if request.submit.beam is not None and len(request.tokens) > prompt_len:
        return replace(request, tokens=request.tokens[:prompt_len])
    return request


def make_group(
    request: Request,
    arrival: int,
    sampling: Sampling,
    tree: RadixCache,
    config: EngineConfig,
    *,
    is_announced: bool = False,
) -> SequenceGroup:
    """Return a new group of one sequence. Dropped parts and texts of modules are in its block table.

    Args:
        sampling: the request's sampling parameters, with the engine's additions.
        is_announced: whether the request is only expected; then the group is never computed.
    """
    group = _make_group(request, arrival, sampling, tree, config, is_announced=is_announced)
    shorter = shorten_history(request, tree) if request.drops and config.prefix_cache else None
    if shorter is not None:
        other = _make_group(shorter, arrival, sampling, tree, config, is_announced=is_announced)
        if known_tokens(tree, other) > known_tokens(tree, group):
            return other
    return group


def _make_group(
    request: Request,
    arrival: int,
    sampling: Sampling,
    tree: RadixCache,
    config: EngineConfig,
    *,
    is_announced: bool,
) -> SequenceGroup:
    seen = request.submit.prompt_len
    for start, stop in request.drops:
        seen -= stop - start
    longest = request.longest(config)
    limit = min(seen + request.submit.max_tokens, longest)
    group = SequenceGroup(request, arrival, 0 if is_announced else limit, sampling)
    if request.drops:
        cut_group(group, tree, config)
    if request.submit.layout is not None:
        moves = RelocationRule.of(config.positions_shift, request.submit.layout.relocate)
        lay_out(group, prompt_of(tree, request.submit.salt, request.submit.layout, moves), config.max_context)
    return group


# Results of steps


class ProtocolError(RuntimeError):
    """The workers sent a result that no correct worker sends: they cannot be trusted any more."""


def result_rows(plan: PlanBuilder, rows: DecodeRows) -> RowSet:
    """Return the rows that a plan's result has a token for: those that decode, then those that begin to."""
    if not plan.sampling:
        return plan.rows
    new = [sequence.slot for sequence in plan.sampling + plan.forked]
    added, old = rows.row_set(np.array(new, np.intp)), plan.rows
    if not len(old):
        return added
    return RowSet(
        np.append(old.slots, added.slots),
        np.append(old.batch_seq_ids, added.batch_seq_ids),
        np.append(old.requests, added.requests),
        np.append(old.samples, added.samples),
    )


def inflight_step(requests: RequestTable, plan: PlanBuilder, rows: DecodeRows) -> InflightStep:
    """Return what is needed of a plan to understand its result."""
    places = result_rows(plan, rows)
    return InflightStep(
        step=plan.step,
        rows=places,
        decode_rows=len(plan.rows) + plan.drafted,
        prefill_tokens=plan.prefill_tokens,
        scored=plan.scored,
        traced_first=requests.timelines.planned(plan) if plan.traced else (),
        drafts=tuple(plan.drafts),
        searches=_searches_of(places, rows),
    )


def _searches_of(places: RowSet, rows: DecodeRows) -> frozenset[int]:
    beams = [rows.sequences[slot] for slot in places.slots[places.samples == BEAM].tolist()]
    return frozenset(
        beam.beam_position.search for beam in beams if beam is not None and beam.beam_position is not None
    )


def apply_step_result(
    requests: RequestTable, scheduler: Scheduler, step: InflightStep, result: StepResult, now: float
) -> None:
    """Apply the workers' answer to the oldest step: append tokens, end rows and advance searches.

    Raises:
        ProtocolError: the result does not fit the step. What was applied before that is sound.
    """
    rows = step.rows
    requests.pending_outputs.is_due = True
    requests.counters.plan_copies += result.plan_copies
    requests.counters.replayed_steps += result.replayed
    requests.counters.kv_bytes_read += result.kv_bytes_read
    scheduler.drafting.answered(step, result, now)
    requests.answered.append((step, result))
    if len(result.tokens) != 4 * step.places:
        raise ProtocolError(
            f"step {result.step} samples {step.places} int32 tokens; {len(result.tokens)} bytes came back"
        )
    if result.logprobs and not all(0 <= index < step.places for index in result.logprobs):
        raise ProtocolError(f"step {result.step} has log-probabilities beyond its {step.places} tokens")
    if (result.beams or {}).keys() != step.searches:  # the beams of workers move by each of them
        raise ProtocolError(
            f"step {result.step} advances searches {sorted(step.searches)}; {sorted(result.beams or {})} came back"
        )
    _score(requests, step, result.prompt_logprobs or {})
    if step.drafts:
        _accept_drafted(requests, scheduler, step, result, now)
    elif len(rows):
        tokens = unpack_int32(result.tokens)
        if least(tokens) < 0:
            raise ProtocolError(f"step {result.step} draws no token for row {tokens.argmin()}")
        _accept(requests, scheduler, rows, tokens, result.logprobs, now)
    if result.beams:
        _advance_searches(requests, scheduler, result.beams, now)
    if result.forced:
        if any(len(packed) % 4 for packed in result.forced.values()):
            raise ProtocolError(f"step {result.step} foretells what is no int32 ids")
        scheduler.drafting.foretold(result.forced)


def _learn(costs: StepCosts, step: InflightStep, result: StepResult) -> None:
    rare = step.prefill_tokens or step.drafts or result.waited_us
    if rare or step.step % PLAIN_STEPS_PER_OBSERVATION == 0:
        elapsed_us = result.elapsed_us - result.waited_us
        costs.observe(rows=step.decode_rows, prefill_tokens=step.prefill_tokens, elapsed_us=elapsed_us)
    if result.moved_blocks:
        costs.observe_moves(result.moved_blocks, result.moved_us)


def _score(requests: RequestTable, step: InflightStep, scores: dict[int, PromptLogprobs]) -> None:
    for batch_seq_id, logprobs in scores.items():
        request = step.scored.get(batch_seq_id)
        if request is None:
            raise ProtocolError(
                f"step {step.step} scores a prompt of sequence {batch_seq_id}, which asked for nothing"
            )
        if request not in requests.groups:
            continue
        if (news := requests.scores.news(request, logprobs)) is not None:
            requests.pending_outputs.prompt_logprobs.append(PromptScored(request, news))


def _accept_drafted(
    requests: RequestTable, scheduler: Scheduler, step: InflightStep, result: StepResult, now: float
) -> None:
    """Accept what a step with drafts drew, position by position: a row that ends at one of them leaves, and has
    nothing at the next."""
    first = len(requests.pending_outputs.tokens)
    try:
        positions = positions_of(step, unpack_int32(result.tokens), result.logprobs)
    except ValueError as error:
        raise ProtocolError(f"step {result.step}: {error}") from error
    predicted = scheduler.drafting.predicted(step)
    accepted = []
    for depth, (rows, tokens, logprobs) in enumerate(positions):
        accepted.append(_accept(requests, scheduler, rows, tokens, logprobs, now, drafted=depth > 0))
        requests.settle(scheduler)
    requests.pending_outputs.drafts += drafts_tried(step, accepted, predicted)
    join_results(requests.pending_outputs, first)


def _accept(
    requests: RequestTable,
    scheduler: Scheduler,
    rows: RowSet,
    tokens: Int32Array,
    logprobs: dict[int, TopLogprobs] | None,
    now: float,
    *,
    drafted: bool = False,
) -> NDArray[np.intp]:
    """Store one token of each row, and end the rows that are done. Returns the slots of the rows that took
    theirs, without beams.

    Args:
        drafted: whether the tokens were drawn behind drafts that are accepted.
    """
    state = scheduler.rows
    valid, slots, stopped = state.accept(rows, tokens, drafted=drafted)
    counts = valid
    if any_of(rows.samples == BEAM):
        counts = valid & (rows.samples != BEAM)
        own = rows.samples[valid] != BEAM
        slots, stopped = slots[own], stopped[own]
    owners, samples = rows.requests, rows.samples
    if len(slots) != len(rows):
        if logprobs:
            position = np.cumsum(counts) - 1
            logprobs = {int(position[i]): value for i, value in logprobs.items() if counts[i]}
        owners, samples, tokens = owners[counts], samples[counts], tokens[counts]
    if not len(slots):
        return slots
    requests.quarantine.got_tokens(owners)
    requests.pending_outputs.requests.append(owners)
    requests.pending_outputs.samples.append(samples)
    requests.pending_outputs.tokens.append(tokens)
    requests.pending_outputs.logprobs.append(logprobs)
    requests.counters.output_tokens += len(slots)
    scheduler.drafting.extend(slots, tokens, drafted=drafted)
    known = state.known[slots]
    ended = stopped | (known >= state.limit[slots])
    beyond = known - state.fills_at[slots]
    if largest(beyond) > slack_of(scheduler.kv, len(rows)):
        full = slots[(beyond > 0) & ~ended]
        if len(full):
            scheduler.enter_filled(full, now)
    for index in ended.nonzero()[0].tolist():
        sequence = state.sequences[slots[index]]
        assert sequence is not None
        requests.end_sequence(
            scheduler, sequence, FinishReason.STOP if stopped[index] else FinishReason.LENGTH, now
        )
    return slots


def _advance_searches(
    requests: RequestTable, scheduler: Scheduler, steps: dict[int, BeamStep], now: float
) -> None:
    for search_id, step in steps.items():
        group = scheduler.forks.searches.get(search_id)
        if group is None or group.search is None:
            continue  # the search has left the batch meanwhile
        try:
            parents = group.search.advance(step)
        except ValueError as error:
            raise ProtocolError(f"search {search_id}: {error}") from error
        requests.counters.output_tokens += group.search.width
        requests.quarantine.ended(group.id)
        if parents:
            scheduler.move_beams(group, parents, now)
        if not group.search.done:
            continue
        hypotheses = group.search.hypotheses()
        requests.pending_outputs.beams.append(BeamsFound(group.id, hypotheses))
        requests.end(scheduler, group, Finished(group.id, hypotheses[0].reason), now)
