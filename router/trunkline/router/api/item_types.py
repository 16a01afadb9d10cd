"""The types of the items in `input` of `/v1/responses`: those that are known, and what is said of others. Pure."""

from __future__ import annotations

from typing import Final

CALL: Final = "_call"
"""What types of calls end with."""
OUTPUT: Final = "_call_output"
TRIGGER: Final = "compaction_trigger"
"""Type of the item that asks for a compaction."""
_KNOWN: Final = (
    *("message", "reasoning", "function_call", "function_call_output", "custom_tool_call"),
    *("custom_tool_call_output", "compaction", TRIGGER, "item_reference"),
)
_OF_OTHERS: Final = frozenset(
    ("mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "tool_search_output", "ghost_snapshot")
)
"""Types of other servers' items that tell the model nothing and are not named, besides those of calls."""


def is_known_type(kind: str) -> bool:
    """Return whether items of this type have a meaning here, or are known to have none."""
    return kind in _KNOWN or kind in _OF_OTHERS or kind.endswith((CALL, OUTPUT))


def problem_of_type(kind: str) -> str:
    """Return a sentence about a type that is not known, with those that are."""
    known = ", ".join((*_KNOWN, f"…{CALL}", f"…{OUTPUT}"))
    return f"its type {kind[:40]!r} is not known; known are {known}"
