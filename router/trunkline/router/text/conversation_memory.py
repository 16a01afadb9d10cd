"""The conversations that a router has worked on last, so that one that comes back whole costs what is new.
Pure.

    came before   A B C D            checked: messages           rendered: text
    comes now     A B C D E F        compared ─┤ checked: E F    goes on ─┤ rendered: E F

A conversation is found by its first messages, and compared with what is remembered message by message; nothing is
trusted. What was made of the messages in common is used again, and must therefore never be changed.

Who may see an entry is its *scope*. An entry is replaced by one that continues it, or that differs from it in its
last few messages only: clients move their marks of what is to be cached to the newest messages. All entries
together have a bound; those of the beginning that was not used for the longest time go.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Generic, NamedTuple, TypeVar

from trunkline.kvstore.adapters import without_adapter
from trunkline.router.text.body_memory import BodyMemory
from trunkline.router.text.chat_template import RenderedChat

LEAST: Final = 16
"""Smallest number of messages of a conversation that is remembered: the work that shorter ones save is small."""
MESSAGE_BYTES: Final = 1500
"""Memory that a message takes besides its texts, about."""
_VALUE_BYTES: Final = 8
"""Memory that each value in a list or an object takes besides its texts, at least."""
_ENTRIES_MAX: Final = 8
"""Largest number of conversations that begin alike."""
_LAST: Final = 4
"""Largest number of last messages by which an entry may differ from the one that replaces it. What another branch
loses by it is the work for so many messages."""
_FIRST: Final = 2
"""Number of first messages by which a conversation is found."""
_SHOWN: Final = 64
"""Number of characters of a message by which conversations are told apart at first."""
_Value = TypeVar("_Value")


class Known(NamedTuple, Generic[_Value]):
    """A remembered conversation that another one begins like."""

    agreed: int
    """Number of first messages that both have in common."""
    items: Sequence[Any]
    """The remembered messages."""
    value: _Value
    """The result for these messages, such as their text."""
    size: int
    """Bytes that it takes, about."""


@dataclass(slots=True)
class _Entry(Generic[_Value]):
    items: Sequence[Any]
    value: _Value
    size: int


class Beginnings(Generic[_Value]):
    """Lists of messages, each with what was made of it. May be used by several threads."""

    def __init__(self, bytes_max: int, lock: AbstractContextManager[Any] | None = None) -> None:
        """
        Args:
            bytes_max: Bound of the memory, in bytes; 0: nothing is remembered.
            lock: Held while the memory is used; None: a single thread uses it.
        """
        self.bytes_max = bytes_max
        self.bytes = 0
        """Bytes that the entries take, about."""
        self._lock = nullcontext() if lock is None else lock
        self._entries: OrderedDict[tuple[bytes, Hashable], list[_Entry[_Value]]] = OrderedDict()
        """By scope and beginning, the one that was used last at the end; so are the entries of each."""

    def find(self, scope: bytes, begins: Hashable, items: Sequence[Any]) -> Known[_Value] | None:
        """Return the remembered list that has the most first messages in common with another one; None: there is
        none.

        Args:
            begins: What lists that begin alike have in common.
        """
        with self._lock:
            entries = self._entries.get((scope, begins))
            if not entries:
                return None
            self._entries.move_to_end((scope, begins))
            lengths = [common_length(entry.items, items) for entry in entries]
            agreed = max(lengths)
            entry = entries.pop(lengths.index(agreed))
            entries.append(entry)
        return Known(agreed, entry.items, entry.value, entry.size) if agreed else None

    def put(self, scope: bytes, begins: Hashable, items: Sequence[Any], value: _Value, size: int) -> None:
        """Remember a list.

        Args:
            begins: As in `find`.
            value: What was made of it.
            size: Bytes that it takes, about.
        """
        if size > self.bytes_max:
            return
        with self._lock:
            entries = self._entries.setdefault((scope, begins), [])
            self._entries.move_to_end((scope, begins))
            if entries and _goes_on(entries[-1].items, items):
                self.bytes -= entries.pop().size
            entries.append(_Entry(items, value, size))
            self.bytes += size
            if len(entries) > _ENTRIES_MAX:
                self.bytes -= entries.pop(0).size
            while self.bytes > self.bytes_max:
                _, gone = self._entries.popitem(last=False)
                self.bytes -= sum(entry.size for entry in gone)

    def forget(self, scope: bytes) -> None:
        """Forget all lists whose scope, a salt, begins with `scope`, whatever their adapter."""
        with self._lock:
            for key in [key for key in self._entries if without_adapter(key[0]).startswith(scope)]:
                self.bytes -= sum(entry.size for entry in self._entries.pop(key))


class ConversationMemory:
    """What a router remembers of conversations, of all models."""

    def __init__(self, bytes_max: int, lock: AbstractContextManager[Any] | None = None) -> None:
        """`bytes_max`, `lock`: as those of `Beginnings`."""
        self.bodies = BodyMemory(bytes_max // 4, lock)
        """Messages as clients have sent them, by the bytes of bodies."""
        self.checked: Beginnings[list[Any]] = Beginnings(bytes_max // 4, lock)
        """Checked messages, by what clients have sent."""
        self.rendered: Beginnings[RenderedChat] = Beginnings(bytes_max // 4, lock)
        """Texts, by checked messages."""
        self.turns: Beginnings[Any] = Beginnings(bytes_max // 4, lock)
        """Turns of `/v1/messages` and items of `/v1/responses` as messages (`api/known_turns.py`)."""

    def forget(self, scope: bytes) -> None:
        """Forget all conversations whose scope begins with `scope`."""
        self.bodies.forget(scope)
        self.checked.forget(scope)
        self.rendered.forget(scope)
        self.turns.forget(scope)


def size_of(messages: Iterable[Any]) -> int:
    """Return about how many bytes of memory messages take as clients send them: with all texts in them, also those
    of calls and those that a model is not shown."""
    size, values = 0, list(messages)
    size += MESSAGE_BYTES * len(values)
    while values:
        value = values.pop()
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, (dict, list)):
            size += _VALUE_BYTES * len(value)
            values += value.values() if isinstance(value, dict) else value
    return size


def beginning(contents: Iterable[object]) -> Hashable:
    """Return what conversations that begin alike have in common. `contents`: of their first messages."""
    shown: list[tuple[int, str]] = []
    for content in islice(contents, _FIRST):
        text = content if isinstance(content, str) else ""
        shown.append((len(text), text[:_SHOWN]))
    return tuple(shown)


def beginning_of_fields(messages: Sequence[Any]) -> Hashable:
    """Return the beginning of messages as clients send them, whatever they are."""
    first = messages[:_FIRST]
    return beginning(message.get("content") if isinstance(message, dict) else None for message in first)


def _goes_on(old: Sequence[Any], new: Sequence[Any]) -> bool:
    """Return whether a list stands for an older one, too."""
    agreed = common_length(old, new)
    return agreed == len(old) or agreed >= max(len(old), LEAST) - _LAST


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common beginning of two texts, or of two lists."""
    low, high = 0, min(len(one), len(other))
    if isinstance(one, (str, bytes)) and len(one) == high:
        goes_on = other.startswith(one)  # type: ignore[attr-defined] # nothing is copied
    else:
        goes_on = one[:high] == other[:high]
    if goes_on:  # the usual case
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
