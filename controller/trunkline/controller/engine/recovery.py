"""Keep requests when the workers that compute them are lost. Pure.

All that counts of a request is its output so far: tokens are drawn from (seed, index), so other workers draw the
same ones. All else (blocks, chunks, places in the batch, steps that will not be answered) is forgotten with the
old scheduler, and each request begins again in a new one, as if it had been preempted:

    snapshot(group) ──► RequestSnapshot (no references into the old tree) ──► restore(snapshot, new group)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np

from trunkline.controller.scheduling.forks import restore_output
from trunkline.controller.sequences.beam_search import BeamHistory, sample_seed
from trunkline.controller.sequences.decode_rows import DecodeRows
from trunkline.controller.sequences.plan_builder import InflightStep
from trunkline.controller.sequences.sequence import (
    ALL_ENTRIES,
    CacheReport,
    Request,
    Sequence,
    SequenceGroup,
    TokenBuffer,
)
from trunkline.kvstore.chunks import Int32Array
from trunkline.worker.messages import Sampling


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """The part of a request that is kept when its workers are lost."""

    request: Request
    arrival: int
    preempted: bool
    """Whether the request goes before requests that have never run."""
    started: bool
    """Whether the router has been told that the request started."""
    found: CacheReport | None
    """What the router was told of the cache; None if the request has not started."""
    scored: bool
    """Whether the log-probabilities of its whole prompt have been reported, or were not asked for."""
    forked: bool
    outputs: list[tuple[int, Int32Array]]
    """(sample or beam, its output so far) of each sequence that has not ended. A group that has not forked has one
    sequence, without output."""
    search: BeamHistory | None


def snapshots(
    groups: Iterable[SequenceGroup], inflight: Iterable[InflightStep], rows: DecodeRows
) -> list[RequestSnapshot]:
    """Return what is left of groups when their workers are lost, which do not answer the steps in flight."""
    lost = {request for step in inflight for request in step.scored.values()}
    return [snapshot(group, rows, scores_lost=group.id in lost) for group in groups]


def snapshot(group: SequenceGroup, rows: DecodeRows, *, scores_lost: bool) -> RequestSnapshot:
    """Return what is left of a group when its workers are lost.

    Args:
        scores_lost: whether log-probabilities of its prompt were to come with a step that will not be answered.
    """
    outputs = []
    for member in group.members:
        if member.slot >= 0 and group.search is None:
            rows.flush(member.slot)
        if group.search is not None and group.forked:
            restore_output(member)
        outputs.append((member.sample, member.tokens.view(group.prompt_len).copy()))
    if group.found is not None:
        group.found.entries = ALL_ENTRIES  # all copies in lower tiers are loaded: nothing else is left
    whole = len(outputs) == group.request.width
    forked, search = group.forked, group.search
    if group.request.width > 1 and whole and not len(outputs[0][1]):
        # The sequences do not differ yet, so they fork again.
        forked, search, outputs = False, None, outputs[:1]
    return RequestSnapshot(
        request=group.request,
        arrival=group.arrival,
        preempted=group.preempted or group.runs,
        started=group.started,
        found=group.found if group.started else None,
        scored=group.prompt_scored and not scores_lost,
        forked=forked,
        outputs=outputs,
        search=search,
    )


def restore(survivor: RequestSnapshot, group: SequenceGroup, sampling: Sampling) -> bool:
    """Give a new group the progress that its request had made with the lost workers.

    Return False if the request is longer than what the new workers can hold.

    Args:
        group: a new group of one sequence, made of the survivor's request.
        sampling: the group's sampling parameters.
    """
    group.preempted, group.started, group.found = survivor.preempted, survivor.started, survivor.found
    group.prompt_scored, group.forked, group.search = survivor.scored, survivor.forked, survivor.search
    outputs = survivor.outputs
    if group.search is not None and group.search.output_limit != group.limit - group.prompt_len:
        # The result of a search depends on the length that it may reach. That has changed, so it starts again.
        group.search, group.forked, outputs = None, False, [(0, outputs[0][1][:0])]
    prompt = group.members[0].tokens.view(0, group.prompt_len)
    group.members.clear()
    for index, (sample, output) in enumerate(outputs):
        own = msgspec.structs.replace(sampling, seed=sample_seed(sampling.seed, sample))
        if survivor.scored or index:
            own = msgspec.structs.replace(own, prompt_logprobs=-1)
        group.members.append(Sequence(group, sample, TokenBuffer(np.concatenate([prompt, output])), own))
    return all(member.tokens.count < group.limit for member in group.members)
