"""Translate the turns of `/v1/messages` to messages of a chat completion. Pure. `known_turns.py` has what was
translated before."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Final

from trunkline.router.api import known_turns
from trunkline.router.api.anthropic_content import ROLES, Message, Warnings, cache_lifetime, turn_messages
from trunkline.router.api.known_turns import TurnMemory, Turns
from trunkline.router.errors import bad_value
from trunkline.router.text.conversation_memory import beginning

_FIRST: Final = 2
"""Number of first turns by which a conversation is found."""


def translated(turns: list[Any], memory: TurnMemory | None, scope: bytes) -> Turns:
    """Translate turns, from the last one on that `memory` does not have.

    Args:
        memory: None: nothing is remembered.
        scope: Who may know of it.

    Raises:
        ApiError: 400, naming the place of the error (`messages[2].content[0]`).
    """
    if not turns:
        raise bad_value("messages", "`messages` must not be empty")
    found = known_turns.translated(turns, memory, scope, _begins(turns), lambda first: _extended(first, turns))
    assert found is not None, "turns are translated one after the other"
    return found


def _begins(turns: Sequence[Any]) -> Hashable:
    """Return what conversations that begin alike have in common: the last block of each of the first turns."""
    contents = [turn.get("content") if isinstance(turn, dict) else None for turn in turns[:_FIRST]]
    last = [content[-1] if isinstance(content, list) and content else content for content in contents]
    return beginning(each.get("text", each.get("content")) if isinstance(each, dict) else each for each in last)


def _extended(first: Turns, turns: Sequence[Any]) -> Turns:
    """Return all turns translated. `first`: the first ones."""
    messages, borders = known_turns.continuable_messages(first), first.borders[:]
    notes, lifetimes = first.warnings[:], first.lifetimes[:]
    for index in range(len(borders), len(turns)):
        turn, path = turns[index], f"messages[{index}]"
        role = turn.get("role") if isinstance(turn, dict) else None
        if role not in ROLES:
            raise bad_value(f"{path}.role", f'`{path}.role` must be "user", "assistant" or "system"')
        before, warnings = len(messages), Warnings()
        new = turn_messages(role, turn.get("content"), f"{path}.content", warnings)
        for message in new:
            _append(messages, message)
        borders.append(before if len(messages) > before and messages[before] is new[0] else None)
        notes += [(index, text) for text in warnings.texts]
        lifetime = cache_lifetime(turn)
        lifetimes += [(index, lifetime)] if lifetime else []
    return Turns(messages, borders, notes, lifetimes)


def behind_system(system: str, turns: Turns) -> tuple[list[Message], list[int | None]]:
    """Return the messages of turns behind a system message ("": there is none), and their borders."""
    if not system:
        return turns.messages, turns.borders
    head: list[Message] = [{"role": "system", "content": system}]
    if turns.messages[0]["role"] != "system":
        return [*head, *turns.messages], [None if each is None else each + 1 for each in turns.borders]
    _append(head, turns.messages[0])
    return [*head, *turns.messages[1:]], [None, *turns.borders[1:]]


def _append(messages: list[Message], message: Message) -> None:
    """Add a message to others; one of the last one's role becomes part of it."""
    last: Message = messages[-1] if messages else {"role": ""}
    if message["role"] == "tool" or last["role"] != message["role"]:
        messages.append(message)
        return
    last["content"] = "\n".join(text for text in (last["content"], message["content"]) if text)
    if "reasoning_content" in message:
        thoughts = (last.get("reasoning_content", ""), message["reasoning_content"])
        last["reasoning_content"] = "\n".join(thought for thought in thoughts if thought)
    if "tool_calls" in message:
        last["tool_calls"] = [*last.get("tool_calls", []), *message["tool_calls"]]
