"""Choose what of a conversation an edit clears: old results of tools, their inputs, old thoughts. Pure.

    parts    thought 0 · input 0 · result 0 │ thought 1 · input 1 · result 1 │ … as far as the template shows them
    edits    clear_thinking: keep the last turns with thoughts
             clear_tool_uses: above a trigger, keep the last uses
    plan     the parts that are cleared, and what each edit has done

An edit sees the conversation as the edits before it leave it. What is cleared is chosen from the request alone, so
a client that sends the whole history with the same edits gets the same parts cleared again, and more as it grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import msgspec

TRIGGER_TOKENS_DEFAULT: Final = 100_000
"""Length of a prompt in tokens above which uses of tools are cleared, if the edit does not say it."""
KEPT_USES_DEFAULT: Final = 3
KEPT_TURNS_DEFAULT: Final = 1


class ConversationPart(NamedTuple):
    """A part of a conversation that an edit may clear."""

    kind: Literal["result", "input", "thought"]
    group: int
    """Number of the use of a tool that the part belongs to, or of the assistant's turn; both count from 0."""


class ToolUse(NamedTuple):
    """A call of a tool in a conversation."""

    tool: str
    answered: bool
    """Whether the conversation has its result."""


class ClearToolUses(msgspec.Struct, frozen=True, kw_only=True):
    """The edit that clears the results of old uses of tools."""

    trigger_tokens: int | None = TRIGGER_TOKENS_DEFAULT
    """The edit does nothing in prompts of so many tokens or fewer; None: `trigger_uses` counts."""
    trigger_uses: int = 0
    """The edit does nothing in conversations with so many uses or fewer."""
    keep: int = KEPT_USES_DEFAULT
    """Number of latest uses with results that stay."""
    clear_at_least: int = 0
    """The edit does nothing if it would clear fewer tokens."""
    exclude: frozenset[str] = frozenset()
    """Tools whose uses stay."""
    inputs: frozenset[str] | bool = False
    """Tools whose inputs are cleared, too; True: those of all tools."""

    def clears_input(self, tool: str) -> bool:
        """Return whether the inputs of a cleared use of this tool are cleared, too."""
        return self.inputs if isinstance(self.inputs, bool) else tool in self.inputs


class ClearThinking(msgspec.Struct, frozen=True):
    """The edit that clears old thoughts."""

    keep: int | None = KEPT_TURNS_DEFAULT
    """Number of latest turns with thoughts whose thoughts stay; None: all."""


Edit = ClearToolUses | ClearThinking


class AppliedEdit(NamedTuple):
    """What an edit has done."""

    edit: Edit
    groups: int
    """Number of cleared uses of tools, or of turns with cleared thoughts."""
    tokens: int
    """Number of cleared tokens."""


class EditPlan(NamedTuple):
    """What all edits of a request clear."""

    cleared: frozenset[int]
    """Indices of the cleared parts."""
    applied: tuple[AppliedEdit, ...]
    """The edits that clear something, in the request's order."""


def plan_edits(
    edits: Sequence[Edit],
    parts: Sequence[ConversationPart],
    uses: Sequence[ToolUse],
    tokens: Sequence[int],
    prompt_tokens: int,
) -> EditPlan:
    """Choose the parts that edits clear.

    Args:
        parts: What may be cleared, in any order.
        uses: All uses of tools in the conversation, in order.
        tokens: Number of tokens of each part in the prompt; 0 for one that it does not show.
        prompt_tokens: Length of the prompt before all edits.
    """
    cleared: set[int] = set()
    applied = []
    for edit in edits:
        if isinstance(edit, ClearThinking):
            chosen = _old_thoughts(edit, parts, tokens)
        else:
            left = prompt_tokens - sum(tokens[index] for index in cleared)
            chosen = _old_uses(edit, parts, uses, tokens, left)
        size = sum(tokens[index] for index in chosen)
        if size:
            applied.append(AppliedEdit(edit, len({parts[index].group for index in chosen}), size))
            cleared.update(chosen)
    return EditPlan(frozenset(cleared), tuple(applied))


def _old_thoughts(edit: ClearThinking, parts: Sequence[ConversationPart], tokens: Sequence[int]) -> list[int]:
    if edit.keep is None:
        return []
    shown = [index for index, part in enumerate(parts) if part.kind == "thought" and tokens[index]]
    turns = sorted({parts[index].group for index in shown})
    old = set(turns[: max(0, len(turns) - edit.keep)])
    return [index for index in shown if parts[index].group in old]


def _old_uses(
    edit: ClearToolUses,
    parts: Sequence[ConversationPart],
    uses: Sequence[ToolUse],
    tokens: Sequence[int],
    prompt_tokens: int,
) -> list[int]:
    triggered = len(uses) > edit.trigger_uses
    if edit.trigger_tokens is not None:
        triggered = prompt_tokens > edit.trigger_tokens
    if not triggered:
        return []
    answered = [number for number, use in enumerate(uses) if use.answered]
    old = answered[: max(0, len(answered) - edit.keep)]
    chosen = {number for number in old if uses[number].tool not in edit.exclude}
    with_inputs = {number for number in chosen if edit.clears_input(uses[number].tool)}
    taken = {"result": chosen, "input": with_inputs, "thought": set[int]()}
    indices = [index for index, part in enumerate(parts) if part.group in taken[part.kind] and tokens[index]]
    enough = sum(tokens[index] for index in indices) >= edit.clear_at_least
    return indices if enough else []
