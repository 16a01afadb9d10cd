"""Apply the result of a step: append tokens, end the rows that are done, advance beam searches. Pure.

What no client waits for is left to `RequestTable.settle`: it releases what ended requests hold, and learns what
the step has cost.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from trunkline.controller.engine.drafted import drafts_tried, join_results, stretches_of
from trunkline.controller.engine.requests import RequestTable
from trunkline.controller.reports import BeamStep, PromptLogprobs, StepResult, TopLogprobs
from trunkline.controller.scheduling.row_blocks import slack_of
from trunkline.controller.scheduling.scheduler import Scheduler
from trunkline.controller.sequences.decode_rows import BEAM, DecodeRows, RowSet
from trunkline.controller.sequences.plan_builder import InflightStep, PlanBuilder
from trunkline.kvstore.chunks import Int32Array, any_of, largest, least, unpack_int32
from trunkline.router.messages import BeamsFound, Finished, FinishReason, PromptScored


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
        np.concatenate((old.slots, added.slots)),
        np.concatenate((old.batch_seq_ids, added.batch_seq_ids)),
        np.concatenate((old.requests, added.requests)),
        np.concatenate((old.samples, added.samples)),
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
    if not any_of(places.samples == BEAM):
        return frozenset()
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
    """Accept what a step with drafts drew, a stretch at a time: a row that ends leaves, and has nothing behind."""
    first = len(requests.pending_outputs.tokens)
    try:
        stretches = stretches_of(step, unpack_int32(result.tokens), result.logprobs)
    except ValueError as error:
        raise ProtocolError(f"step {result.step}: {error}") from error
    predicted = scheduler.drafting.predicted(step)
    taken: Counter[int] = Counter()
    is_first = True
    for rows, tokens, logprobs in stretches:
        while len(tokens):
            count = scheduler.rows.uneventful(rows, tokens, slack_of(scheduler.kv, len(rows)))
            drafted, is_first = count - is_first, False
            slots = _accept(requests, scheduler, rows, tokens[:count], logprobs, now, drafted=drafted)
            taken.update(dict.fromkeys(slots.tolist(), count))
            requests.settle(scheduler)
            tokens = tokens[count:]
    requests.pending_outputs.drafts += drafts_tried(step, taken, predicted)
    join_results(requests.pending_outputs, first)


def _accept(
    requests: RequestTable,
    scheduler: Scheduler,
    rows: RowSet,
    tokens: Int32Array,
    logprobs: dict[int, TopLogprobs] | None,
    now: float,
    *,
    drafted: int = 0,
) -> NDArray[np.intp]:
    """Store tokens of each row, and end the rows that are done. Returns the slots of the rows that took theirs,
    without beams.

    Args:
        tokens: `[rows]`, or `[positions, rows]` that are `DecodeRows.uneventful`.
        logprobs: by row, of a single position.
        drafted: number of positions behind drafts that are accepted.
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
        owners, samples, tokens = owners[counts], samples[counts], tokens[..., counts]
    if not len(slots):
        return slots
    requests.quarantine.got_tokens(owners)
    if tokens.ndim > 1:
        owners, samples = np.tile(owners, len(tokens)), np.tile(samples, len(tokens))
    requests.pending_outputs.requests.append(owners)
    requests.pending_outputs.samples.append(samples)
    requests.pending_outputs.tokens.append(tokens.ravel())
    requests.pending_outputs.logprobs.append(logprobs)
    requests.counters.output_tokens += tokens.size
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
