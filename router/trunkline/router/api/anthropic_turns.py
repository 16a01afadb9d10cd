"""The turns of `/v1/messages` as messages of a chat completion: of a conversation that goes on, only what is new
is translated. Pure.

    came before   A B C D          translated: a b c d
    comes now     A B C D E F      compared ─┤ translated: E F

What earlier turns were translated to is used again, and must therefore never be changed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Final, NamedTuple

from trunkline.router.api.anthropic_content import ROLES, Message, Warnings, cache_lifetime, turn_messages
from trunkline.router.errors import bad_value
from trunkline.router.text.conversation_memory import LEAST, MESSAGE_BYTES, Beginnings, beginning

_FIRST: Final = 2
"""Number of first turns by which a conversation is found."""


class Turns(NamedTuple):
    """Turns that were translated."""

    messages: list[Message]
    borders: list[int | None]
    """For each turn, the number of messages before it; None where it continues the one before."""
    warnings: list[tuple[int, str]]
    """What has no effect in a turn, each with the turn's number."""
    lifetimes: list[tuple[int, str]]
    """What `cache_control` asks for in a turn, each with the turn's number."""


TurnMemory = Beginnings[Turns]


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
    if memory is None or len(turns) < LEAST:
        return _extended(Turns([], [], [], []), turns)
    begins = _begins(turns)
    known = memory.find(scope, begins, turns)
    first = Turns([], [], [], []) if known is None else _first(known.value, known.agreed)
    found, size = _extended(first, turns), 0
    shared = max(0, len(first.messages) - 1)  # the last one may have been continued
    if known is not None:
        size = known.size - _size(known.value.messages[shared:])
    size += _size(found.messages[shared:])
    memory.put(scope, begins, turns, found, size)
    return found


def _size(messages: Sequence[Message]) -> int:
    """Return the bytes of memory that messages take, about."""
    return sum(len(message["content"]) + MESSAGE_BYTES for message in messages)


def _begins(turns: Sequence[Any]) -> Hashable:
    """Return what conversations that begin alike have in common: the last block of each of the first turns."""
    contents = [turn.get("content") if isinstance(turn, dict) else None for turn in turns[:_FIRST]]
    last = [content[-1] if isinstance(content, list) and content else content for content in contents]
    return beginning(each.get("text", each.get("content")) if isinstance(each, dict) else each for each in last)


def _first(whole: Turns, count: int) -> Turns:
    """Return at most the first `count` turns, as many as were followed by a message of its own."""
    if count == len(whole.borders):
        return whole
    while (messages := whole.borders[count]) is None:
        count -= 1
    return Turns(
        whole.messages[:messages],
        whole.borders[:count],
        [each for each in whole.warnings if each[0] < count],
        [each for each in whole.lifetimes if each[0] < count],
    )


def _extended(first: Turns, turns: Sequence[Any]) -> Turns:
    """Return all turns translated. `first`: the first ones."""
    messages, borders = first.messages[:], first.borders[:]
    notes, lifetimes = first.warnings[:], first.lifetimes[:]
    if messages:
        messages[-1] = dict(messages[-1])  # the next turn may continue it
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
