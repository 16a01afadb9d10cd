"""What clients say about requests to come: hints, which change what an answer costs and never its text. Pure.

Clients of other servers send them as `nvext.agent_hints`, `agent_hints` or `agent_hint`. What is not understood,
in any of them and of any shape, is passed over: no hint is an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

PRIORITY_MAX: Final = 2**31 - 1
NEXT_MAX_S: Final = 86_400.0
"""Longest time until the next request that is believed, in seconds."""
OUTPUT_MAX: Final = 2**20
"""Longest answer that is believed, in tokens."""


class Hints(NamedTuple):
    """What a client says about its next requests."""

    next_s: float = 0.0
    """Seconds from the end of the answer to the conversation's next request; 0: not known."""
    is_last: bool = False
    """Whether no request of the conversation follows."""
    priority: int | None = None
    """Priority of the request, smaller first; None: nothing is said."""
    output_tokens: int = 0
    """Tokens that the answer will have; 0: not known."""


NO_HINTS: Final = Hints()


def hints_of(nvext: Any, others: Iterable[Any]) -> Hints:
    """Return what is understood of hints of any shape; the first source that says something counts.

    Args:
        nvext: The field `nvext`, in which hints are an object's `agent_hints`.
        others: Fields that are such objects themselves.
    """
    hints = Hints()
    inner = nvext.get("agent_hints") if isinstance(nvext, Mapping) else None
    for source in (inner, *others):
        if isinstance(source, Mapping):
            said = Hints(_next_s(source), _is_last(source), _priority(source), _output_tokens(source))
            hints = Hints(
                hints.next_s or said.next_s,
                hints.is_last or said.is_last,
                said.priority if hints.priority is None else hints.priority,
                hints.output_tokens or said.output_tokens,
            )
    return hints


def _number(value: Any) -> float:
    """Return a number that may be written as text, clipped; NaN: it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def _next_s(source: Mapping[str, Any]) -> float:
    milliseconds = _number(source.get("iat"))
    return min(milliseconds / 1000, NEXT_MAX_S) if milliseconds > 0.0 else 0.0


def _is_last(source: Mapping[str, Any]) -> bool:
    return source.get("last") is True or _number(source.get("total_requests")) == 1.0


def _output_tokens(source: Mapping[str, Any]) -> int:
    tokens = _number(source.get("osl"))
    return round(min(tokens, OUTPUT_MAX)) if tokens > 0.0 else 0


def _priority(source: Mapping[str, Any]) -> int | None:
    """Return our priority for one of which a larger number is more urgent."""
    number = _number(source.get("priority"))
    if math.isnan(number):
        return None
    return round(-max(-PRIORITY_MAX, min(PRIORITY_MAX, number)))
