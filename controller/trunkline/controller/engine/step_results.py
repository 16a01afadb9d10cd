"""What the workers' answer to a step means: tokens for requests, ends, how searches go on. Pure."""

from __future__ import annotations

from typing import Final

import numpy as np

from trunkline.controller.engine.requests import RequestTable
from trunkline.controller.messages import BeamStep, PromptLogprobs, StepResult, TopLogprobs
from trunkline.controller.scheduling.scheduler import Scheduler
from trunkline.controller.sequences.plan_builder import BEAM, DecodeRows, InflightStep, PlanBuilder, RowSet
from trunkline.kvstore.chunks import Int32Array, unpack_int32
from trunkline.router.messages import BeamsFound, Finished, FinishReason, PromptScored

PLAIN_STEPS_PER_OBSERVATION: Final = 8
"""One in this many steps that only decode is used to learn what steps cost: they are alike, and learning costs."""


class ProtocolError(RuntimeError):
    """The workers answered something that no correct worker answers; the group cannot be trusted."""


def result_rows(draft: PlanBuilder, rows: DecodeRows) -> RowSet:
    """Return the rows that a plan's result has a token for: those that decode, then those that begin to."""
    if not draft.sampling:
        return draft.rows
    new = [sequence.slot for sequence in draft.sampling + draft.forked]
    added, old = rows.row_set(np.array(new, np.intp)), draft.rows
    return RowSet(
        np.append(old.slots, added.slots),
        np.append(old.batch_seq_ids, added.batch_seq_ids),
        np.append(old.requests, added.requests),
        np.append(old.samples, added.samples),
    )


def apply_step_result(
    requests: RequestTable, scheduler: Scheduler, step: InflightStep, result: StepResult, now: float
) -> None:
    """Apply the workers' answer to the oldest step: append tokens, end rows and advance searches.

    Raises:
        ProtocolError: the result does not fit the step. What was applied before that is sound.
    """
    rows = step.rows
    requests.counters.plan_copies += result.plan_copies
    requests.counters.kv_bytes_read += result.kv_bytes_read
    costs = scheduler.costs
    if step.prefill_tokens or result.waited_us or step.step % PLAIN_STEPS_PER_OBSERVATION == 0:
        elapsed_us = result.elapsed_us - result.waited_us
        costs.observe(rows=step.decode_rows, prefill_tokens=step.prefill_tokens, elapsed_us=elapsed_us)
    if result.moved_blocks:
        costs.observe_moves(result.moved_blocks, result.moved_us)
    if len(result.tokens) != 4 * len(rows):
        raise ProtocolError(
            f"step {result.step} samples {len(rows)} int32 tokens; {len(result.tokens)} bytes came back"
        )
    if result.logprobs and not all(0 <= index < len(rows) for index in result.logprobs):
        raise ProtocolError(f"step {result.step} has log-probabilities beyond its {len(rows)} tokens")
    _score(requests, step, result.prompt_logprobs or {})
    if len(rows):
        _accept(requests, scheduler, rows, unpack_int32(result.tokens), result.logprobs, now)
    if result.beams:
        _advance_searches(requests, scheduler, result.beams, now)


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


def _accept(
    requests: RequestTable,
    scheduler: Scheduler,
    rows: RowSet,
    tokens: Int32Array,
    logprobs: dict[int, TopLogprobs] | None,
    now: float,
) -> None:
    state = scheduler.rows
    valid, slots, stopped = state.accept(rows, tokens)
    counts = valid
    if (rows.samples == BEAM).any():
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
        return
    requests.quarantine.got_tokens(owners)
    requests.pending_outputs.requests.append(owners)
    requests.pending_outputs.samples.append(samples)
    requests.pending_outputs.tokens.append(tokens)
    requests.pending_outputs.logprobs.append(logprobs)
    requests.counters.output_tokens += len(slots)
    known = state.known[slots]
    ended = stopped | (known >= state.limit[slots])
    for index in np.flatnonzero(((known - 1) % scheduler.config.chunk_size == 0) & ~ended).tolist():
        scheduler.seal(int(slots[index]), int(known[index]) - 1, now)
    for index in np.flatnonzero(ended).tolist():
        sequence = state.sequences[slots[index]]
        assert sequence is not None
        requests.end_sequence(
            scheduler, sequence, FinishReason.STOP if stopped[index] else FinishReason.LENGTH, now
        )


def _advance_searches(
    requests: RequestTable, scheduler: Scheduler, steps: dict[int, BeamStep], now: float
) -> None:
    for search_id, step in steps.items():
        group = scheduler.forks.searches.get(search_id)
        if group is None or group.search is None:
            continue  # it has left meanwhile
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
