"""Rules for lines that clients put into prompts, that change with every request and tell the model nothing. Pure.

What stands behind such a line would have to be computed again each time: a prompt is found in the cache only as
far as it is the same. Each rule has a name, and an operator can switch it off (`RouterConfig.show_lines`).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, Final, NamedTuple


class LineRule(NamedTuple):
    """A rule for a line that is left out."""

    name: str
    client: str
    """The client that writes the line."""
    what: str
    """A description of what is left out."""
    block: re.Pattern[str]
    """Matches the whole text of the block that is left out: the first one of a system message that is a list."""


RULES: Final = (
    LineRule(
        "billing-header",
        "Claude Code",
        "the first block of `system`, if it is exactly one line that begins with `x-anthropic-billing-header:`",
        re.compile(r"x-anthropic-billing-header:[^\n]*\n?"),
    ),
)
"""All rules. `docs/clients.md` has a row for each."""
RULE_NAMES: Final = tuple(rule.name for rule in RULES)


def problem_of_rules(names: Collection[str]) -> str:
    """Return why these are no names of rules; "": they are."""
    wrong = next((name for name in names if name not in RULE_NAMES), None)
    return "" if wrong is None else f"{wrong!r} is no rule; there are {', '.join(RULE_NAMES)}"


def without_volatile(system: Any, shown: Collection[str] = ()) -> tuple[Any, str]:
    """Return a system message without what the rules leave out, and the name of the rule that did; "": none.

    Args:
        system: A text, or a list of blocks as in `/v1/messages`; anything else is returned as it is.
        shown: Names of rules that are switched off.
    """
    first = system[0] if isinstance(system, list) and system else None
    text = first.get("text") if isinstance(first, dict) and first.get("type") == "text" else None
    if isinstance(text, str):
        for rule in RULES:
            if rule.name not in shown and rule.block.fullmatch(text):
                return system[1:], rule.name
    return system, ""
