"""Checks of a controller's messages: one that no correct controller sends is refused before it is used. Pure.

Types have been checked when the message was decoded, but every number fits an `int` and NaN is a `float`. What
requests bring is checked where it is used; here is the report that others' requests depend on.
"""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from trunkline.kvstore.tier import TierKind
from trunkline.router.messages import MissReason, Outputs, RouterMessage, State, TierState

STATUSES: Final = ("starting", "ready", "draining", "failed")
_COUNT_MAX: Final = (1 << 63) - 1
_INT32_MAX: Final = (1 << 31) - 1
_TEXT_MAX: Final = 65_536
_MOST: Final = {"chunk_size": 1 << 16, "max_context": _INT32_MAX, "max_rows": _INT32_MAX}
"""Limits of the numbers that are calculated with; all others are only shown."""
_TIERS: Final = frozenset(kind.name.lower() for kind in TierKind)


def problem_of_reply(message: RouterMessage) -> str:
    """Return why no controller of this version sends such a message; "": one could."""
    match message:
        case State():
            return _problem_of_state(message)
        case Outputs():
            return _problem_of_outputs(message)
    return ""


def _problem_of_state(state: State) -> str:
    if state.status not in STATUSES:
        return f"its status is {state.status[:40]!r}; known are {', '.join(STATUSES)}"
    problem = _problem_of_numbers(state)
    if problem:
        return problem
    if len(state.tiers) > len(_TIERS) or len(state.load_us) > len(_TIERS):
        return f"it reports {len(state.tiers)} tiers; there are {len(_TIERS)}"
    for tier in state.tiers:
        if tier.name not in _TIERS:
            return f"it has a tier {tier.name[:40]!r}; known are {', '.join(sorted(_TIERS))}"
        if problem := _problem_of_numbers(tier):
            return problem
    if not all(0.0 <= us < math.inf for us in state.load_us):
        return "loading takes no time that could be"
    unknown = next((reason for reason in state.misses if reason not in set(MissReason)), None)
    if unknown is not None:
        return f"requests missed for a reason {unknown[:40]!r} that is not known"
    return "" if all(0 <= count <= _COUNT_MAX for count in state.misses.values()) else "it counts below zero"


def _problem_of_numbers(report: State | TierState) -> str:
    for field in msgspec.structs.fields(report):
        value: Any = getattr(report, field.name)
        match value:
            case bool():
                pass
            case int():
                most = _MOST.get(field.name, _COUNT_MAX)
                if not 0 <= value <= most:
                    return f"{field.name} is {value}; allowed are 0 to {most}"
            case float():
                if not 0.0 <= value < math.inf:
                    return f"{field.name} is {value}; it is a time"
            case str() | bytes():
                if len(value) > _TEXT_MAX:
                    return f"{field.name} is {len(value)} long; at most {_TEXT_MAX} is allowed"
    return ""


def _problem_of_outputs(outputs: Outputs) -> str:
    for started in outputs.started:
        counts = (started.cached_tokens, started.miss_token, started.module_tokens, *started.tier_tokens)
        if not all(0 <= count <= _INT32_MAX for count in counts) or not 0.0 <= started.queued_s < math.inf:
            return f"request {started.request} starts with counts that cannot be"
        if len(started.tier_tokens) > len(_TIERS) or (started.miss and started.miss not in set(MissReason)):
            return f"request {started.request} found its tokens where nothing is, or not for no known reason"
    for top in (outputs.logprobs or {}).values():
        if len(top.top_ids) != len(top.top_logprobs) or len(top.top_ids) % 4:
            return "log-probabilities do not go with their tokens"
    for scored in outputs.prompt_logprobs:
        parts, count = scored.logprobs, len(scored.logprobs.token_logprobs)
        is_whole = count > 0 and count % 4 == 0 and len(parts.ranks) == count
        if not is_whole or len(parts.top_ids) != len(parts.top_logprobs) or len(parts.top_ids) % count:
            return "scores of a prompt do not go with their tokens"
    return ""
