"""Read the result of a step with drafts as a series of results, each of the rows that come equally far. Pure.

      rows            r0        r1     r2          (r0 has 2 drafts, r1 one, r2 none)
      places          t  d1 d2  t  d1  t
      tokens          5  7  8   9  -1  3           r0's drafts were 5 and 7, r1's was not 9
      stretches       {r0: 5, r1: 9, r2: 3}        one position, at which three rows have a token
                      {r0: 7 8}                    two positions, at which only r0 has

Whether a place has a token follows from the drafts and the tokens before it, so the controller need not be told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trunkline.controller.engine.events import EngineOutputs
from trunkline.controller.reports import TopLogprobs
from trunkline.controller.sequences.decode_rows import RowSet
from trunkline.controller.sequences.plan_builder import InflightStep
from trunkline.kvstore.chunks import Int32Array
from trunkline.router.messages import DraftsTried

Reports = dict[int, TopLogprobs]
"""Log-probabilities by index of the token."""


class Stretch(NamedTuple):
    """The tokens that a step drew at one position behind its rows' tokens, or at several: one of each row."""

    rows: RowSet
    tokens: Int32Array
    """`[positions, rows]`"""
    logprobs: Reports | None
    """Reported log-probabilities of a single position, by row; None: no row reports any."""


def stretches_of(step: InflightStep, tokens: Int32Array, logprobs: Reports | None) -> list[Stretch]:
    """Return what a step with drafts drew: the fewest stretches, or one for each position if there are reports.

    Args:
        tokens: int32 `[places]`, as in `StepResult.tokens`.
        logprobs: by place.

    Raises:
        ValueError: a token is missing that must have been drawn.
    """
    counts = np.zeros(len(step.rows), np.int64)  # prompts that end, and forks, have no drafts
    counts[: len(step.drafts)] = [len(draft) for draft in step.drafts]
    drafts = np.concatenate(step.drafts)
    first_place = np.arange(len(counts)) + np.cumsum(counts) - counts
    lengths = 1 + _accepted(drafts, tokens, counts, first_place)
    ends = range(1, int(lengths.max()) + 1) if logprobs else sorted(set(lengths.tolist()))
    found: list[Stretch] = []
    for start, stop in zip([0, *ends], ends, strict=False):
        rows = (lengths >= stop).nonzero()[0]
        places = first_place[rows] + np.arange(start, stop)[:, None]
        drawn = tokens[places]
        if drawn.min() < 0:
            position, row = divmod(int(drawn.argmin()), len(rows))
            raise ValueError(f"row {rows[row]} has no token behind {start + position} accepted drafts")
        found.append(Stretch(_subset(step.rows, rows), drawn, _at(logprobs, places[0])))
    return found


def _accepted(
    drafts: Int32Array, tokens: Int32Array, counts: NDArray[np.int64], first_place: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return how many drafts of each row are what was drawn where they stand, without those behind a wrong one."""
    owners = np.arange(len(counts)).repeat(counts)
    first_draft = np.cumsum(counts) - counts
    nth = np.arange(len(drafts)) - first_draft[owners]
    wrong = (tokens[first_place[owners] + nth] != drafts).nonzero()[0]
    accepted = counts.copy()
    np.minimum.at(accepted, owners[wrong], nth[wrong])
    return accepted


def _subset(rows: RowSet, chosen: NDArray[np.intp]) -> RowSet:
    if len(chosen) == len(rows):
        return rows
    return RowSet(rows.slots[chosen], rows.batch_seq_ids[chosen], rows.requests[chosen], rows.samples[chosen])


def _at(logprobs: Reports | None, places: NDArray[np.int64]) -> Reports | None:
    if not logprobs:
        return None
    found = {index: logprobs[place] for index, place in enumerate(places.tolist()) if place in logprobs}
    return found or None


def drafts_tried(step: InflightStep, taken: Counter[int], predicted: Container[int]) -> list[DraftsTried]:
    """Return what came of the drafts of each row that still had its place when the result came.

    Args:
        taken: how many tokens each slot took.
        predicted: slots whose drafts are from their client's prediction.
    """
    slots, requests = step.rows.slots.tolist(), step.rows.requests.tolist()
    return [
        DraftsTried(request, len(draft), taken[slot] - 1, slot in predicted)
        for slot, request, draft in zip(slots, requests, step.drafts, strict=False)  # prompts that end have none
        if len(draft) and taken[slot]
    ]


def join_results(outputs: EngineOutputs, first: int) -> None:
    """Make one result of those from index `first` on, so that routers get one message for a step."""
    if len(outputs.tokens) - first < 2:
        return
    reports: Reports = {}
    before = 0
    for tokens, logprobs in zip(outputs.tokens[first:], outputs.logprobs[first:], strict=True):
        reports |= {before + index: report for index, report in (logprobs or {}).items()}
        before += len(tokens)
    outputs.requests[first:] = [np.concatenate(outputs.requests[first:])]
    outputs.samples[first:] = [np.concatenate(outputs.samples[first:])]
    outputs.tokens[first:] = [np.concatenate(outputs.tokens[first:])]
    outputs.logprobs[first:] = [reports or None]
