"""Turns of a conversation as messages of a chat completion: of one that goes on, only what is new is translated.
Pure.

    came before   A B C D          translated: a b c d
    comes now     A B C D E F      compared ─┤ translated: E F

What earlier turns were translated to is used again, and must therefore never be changed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, NamedTuple

from trunkline.router.text.conversation_memory import LEAST, Beginnings, size_of

Message = dict[str, Any]


class Turns(NamedTuple):
    """Turns, or items, that were translated."""

    messages: list[Message]
    borders: list[int | None]
    """For each turn, the number of messages before it; None where it continues the one before, or is not shown."""
    warnings: list[tuple[int, str]]
    """What has no effect in a turn, each with the turn's number."""
    lifetimes: list[tuple[int, str]]
    """What `cache_control` asks for in a turn, each with the turn's number."""


TurnMemory = Beginnings[Turns]
NO_TURNS: Final = Turns([], [], [], [])


def translated(
    turns: Sequence[Any],
    memory: TurnMemory | None,
    scope: bytes,
    begins: Hashable,
    extend: Callable[[Turns], Turns | None],
) -> Turns | None:
    """Return turns translated, where those that `memory` has are not translated again.

    Args:
        memory: Translations of earlier requests; None: nothing is remembered.
        scope: Names the tenant, whose other requests may use the translation.
        begins: What conversations that begin alike have in common, and all else that the translation depends on.
        extend: Returns all turns translated, given the first of them translated; None: turns cannot be translated
            one after the other. Then nothing is remembered, and None is returned.
    """
    if memory is None or len(turns) < LEAST:
        return extend(NO_TURNS)
    known = memory.find(scope, begins, turns)
    first = NO_TURNS if known is None else _first(known.value, known.agreed)
    found, shared = extend(first), len(first.borders)
    if found is None:
        return None
    size = 0 if known is None else known.size - size_of(known.items[shared:])
    memory.put(scope, begins, turns, found, size + size_of(turns[shared:]))
    return found


def continuable_messages(first: Turns) -> list[Message]:
    """Return the messages of the first turns. The last one is a copy, because the next turn may continue it."""
    messages = first.messages[:]
    if messages:
        messages[-1] = dict(messages[-1])
        if "tool_calls" in messages[-1]:
            messages[-1]["tool_calls"] = list(messages[-1]["tool_calls"])
    return messages


def _first(whole: Turns, count: int) -> Turns:
    """Return the first `count` turns, or fewer: up to one behind which a message of its own begins."""
    if count == len(whole.borders):
        return whole
    while count and whole.borders[count] is None:
        count -= 1
    if not count:
        return NO_TURNS
    return Turns(
        whole.messages[: whole.borders[count]],
        whole.borders[:count],
        [each for each in whole.warnings if each[0] < count],
        [each for each in whole.lifetimes if each[0] < count],
    )
