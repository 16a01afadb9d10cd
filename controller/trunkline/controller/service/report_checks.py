"""What a rank may report: numbers that no right worker sends are refused before the engine sees them. Pure.

Types have been checked when the message was decoded, but every number fits an `int` and NaN is a `float`. A worker
of another version, or one with a bug, must not take the controller down: its group is lost, and nothing else.
"""

from __future__ import annotations

import math
from typing import Final

from trunkline.controller.messages import (
    GrammarReady,
    LoadProgress,
    MovesDone,
    Probed,
    PromptLogprobs,
    StepResult,
    TopLogprobs,
    WorkerFailed,
    WorkerHello,
    WorkerReady,
    WorkerReport,
)

BLOCKS_MAX: Final = 1 << 24
SLOTS_MAX: Final = 1 << 28
_COUNT_MAX: Final = 1 << 31
_BYTES_MAX: Final = 1 << 48
"""Totals of them are kept, and sent as 64-bit numbers."""
_US_MAX: Final = 1 << 42
"""Seven weeks."""
_TEXT_MAX: Final = 4096
_RESULT_RANGES: Final = {
    "elapsed_us": _US_MAX,
    "plan_copies": 1,
    "kv_bytes_read": _BYTES_MAX,
    "moved_us": _US_MAX,
    "moved_blocks": _COUNT_MAX,
    "waited_us": _US_MAX,
}
_READY_RANGES: Final = {
    "num_blocks": BLOCKS_MAX,
    "block_bytes": _BYTES_MAX,
    "host_slots": SLOTS_MAX,
    "disk_slots": SLOTS_MAX,
    "swap_us_per_block": _US_MAX,
}


def problem_of_report(report: WorkerReport, ranks: int) -> str:
    """Why no worker of a group of so many ranks says that; "" if one could."""
    match report:
        case StepResult():
            return _out_of_range(report, _RESULT_RANGES) or _problem_of_scores(report)
        case WorkerReady():
            return _problem_of_rank(report.rank, ranks) or _out_of_range(report, _READY_RANGES)
        case WorkerHello():
            return _problem_of_rank(report.rank, ranks) or _too_long(report.node)
        case LoadProgress():
            is_sound = math.isfinite(report.fraction)
            problem = _too_long(report.stage) or ("" if is_sound else "its progress is no number")
            return _problem_of_rank(report.rank, ranks) or problem
        case MovesDone():
            late = next((move for move in report.outcomes if not 0 <= move.elapsed_us <= _US_MAX), None)
            problem = "" if late is None else f"a move took {late.elapsed_us} us"
            return _problem_of_rank(report.rank, ranks) or problem
        case Probed():
            return _problem_of_rank(report.rank, ranks)
        case GrammarReady():
            return ""
        case WorkerFailed():
            return ""  # its reason is all that people will know; whatever it is, its epoch ends


def _problem_of_rank(rank: int, ranks: int) -> str:
    return "" if 0 <= rank < ranks else f"rank {rank} reports; the group has {ranks}"


def _too_long(text: str) -> str:
    return f"a name has {len(text)} characters" if len(text) > _TEXT_MAX else ""


def _out_of_range(report: StepResult | WorkerReady, ranges: dict[str, int]) -> str:
    for name, most in ranges.items():
        value = getattr(report, name)
        if not 0 <= value <= most:  # also true of NaN
            return f"{type(report).__name__}.{name} is {value}; allowed are 0 to {most}"
    return ""


def _problem_of_scores(result: StepResult) -> str:
    for top in (result.logprobs or {}).values():
        if not _are_pairs(top):
            return f"log-probabilities of step {result.step} do not go with their tokens"
    for scored in (result.prompt_logprobs or {}).values():
        if not _fit(scored):
            return f"scores of a prompt in step {result.step} do not go with their tokens"
    return ""


def _are_pairs(top: TopLogprobs) -> bool:
    return len(top.top_ids) == len(top.top_logprobs) and len(top.top_ids) % 4 == 0


def _fit(scored: PromptLogprobs) -> bool:
    count, top = len(scored.token_logprobs), len(scored.top_ids)
    return (
        0 <= scored.start < _COUNT_MAX
        and count > 0
        and count % 4 == 0
        and len(scored.ranks) == count
        and len(scored.top_logprobs) == top
        and top % count == 0
    )
