"""Read the result of a step with drafts as a series of plain results, one for each position. Pure.

      rows            r0        r1     r2          (r0 has 2 drafts, r1 one, r2 none)
      places          t  d1 d2  t  d1  t
      tokens          5  7  -1  9  -1  3           r0's first draft was 5, r1's was not 9
      positions       {r0: 5, r1: 9, r2: 3}, {r0: 7}

Whether a place has a token follows from the drafts and the tokens before it, so the controller need not be told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from collections.abc import Sequence as Items
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


class Position(NamedTuple):
    """The tokens that a step drew at one position behind its rows' tokens: at most one per row."""

    rows: RowSet
    tokens: Int32Array
    logprobs: Reports | None
    """Reported log-probabilities, by index into `tokens`; None: no row reports any."""


def positions_of(step: InflightStep, tokens: Int32Array, logprobs: Reports | None) -> list[Position]:
    """Return what a step with drafts drew, position by position.

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
    first_draft = np.cumsum(counts) - counts
    rows = np.arange(len(counts))
    found: list[Position] = []
    while len(rows):
        places = first_place[rows] + len(found)
        drawn = tokens[places]
        if drawn.min() < 0:
            row = int(rows[drawn.argmin()])
            raise ValueError(f"row {row} has no token behind {len(found)} accepted drafts")
        going = rows[counts[rows] > len(found)]
        guessed, got = drafts[first_draft[going] + len(found)], tokens[first_place[going] + len(found)]
        found.append(Position(_subset(step.rows, rows), drawn, _at(logprobs, places)))
        rows = going[guessed == got]
    return found


def _subset(rows: RowSet, chosen: np.ndarray[tuple[int], np.dtype[np.int64]]) -> RowSet:
    return RowSet(rows.slots[chosen], rows.batch_seq_ids[chosen], rows.requests[chosen], rows.samples[chosen])


def _at(logprobs: Reports | None, places: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Reports | None:
    if not logprobs:
        return None
    found = {index: logprobs[place] for index, place in enumerate(places.tolist()) if place in logprobs}
    return found or None


def drafts_tried(
    step: InflightStep, accepted: Items[NDArray[np.intp]], predicted: Container[int]
) -> list[DraftsTried]:
    """Return what came of the drafts of each row that still had its place when the result came.

    Args:
        accepted: for each position, the slots whose tokens there were taken.
        predicted: slots whose drafts are from their client's prediction.
    """
    times = Counter(np.concatenate(accepted).tolist())
    slots, requests = step.rows.slots.tolist(), step.rows.requests.tolist()
    return [
        DraftsTried(request, len(draft), times[slot] - 1, slot in predicted)
        for slot, request, draft in zip(slots, requests, step.drafts, strict=False)  # prompts that end have none
        if len(draft) and times[slot]
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
