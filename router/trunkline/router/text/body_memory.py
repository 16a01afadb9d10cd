"""The bodies of requests with whole conversations, as far as the end of their last message. Pure.

A client that keeps its conversation itself sends a body that begins, byte by byte, as the one before. What is
remembered are these bytes, and the messages that were read of them, which must therefore never be changed.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

_BEGINNING: Final = 64
"""Number of first bytes by which a body is found."""
_ENTRIES_MAX: Final = 16
"""Largest number of bodies that begin alike."""
_MESSAGE_BYTES: Final = 300
"""Memory that a message takes besides its texts, about."""


@dataclass(frozen=True, slots=True)
class KnownBody:
    """The beginning of a body."""

    prefix: bytes
    """As far as the end of the last message."""
    head: int
    """Number of bytes before the first message."""
    messages: tuple[Any, ...]
    weight: int
    """Number of characters in `prefix`, at least, that may be marks of JSON (`http/json_slices.py`)."""
    name: str = "messages"
    """Name of the field that has the messages."""

    @property
    def size(self) -> int:
        """Bytes of memory, about: the texts are there twice."""
        return 2 * len(self.prefix) + _MESSAGE_BYTES * len(self.messages)


class BodyMemory:
    """Bodies that came last. May be used by several threads."""

    def __init__(self, bytes_max: int, lock: AbstractContextManager[Any] | None = None) -> None:
        """
        Args:
            bytes_max: bound of the memory, in bytes.
            lock: held while the memory is used; None: a single thread uses it.
        """
        self.bytes_max = bytes_max
        self.bytes = 0
        """Bytes that the entries take, about."""
        self._lock = nullcontext() if lock is None else lock
        self._entries: OrderedDict[tuple[bytes, bytes], list[KnownBody]] = OrderedDict()
        """By scope and first bytes, what was used last at the end."""

    def find(self, scope: bytes, body: bytes) -> KnownBody | None:
        """Return the longest remembered beginning of a body; None: there is none."""
        key = scope, body[:_BEGINNING]
        with self._lock:
            entries = self._entries.get(key)
            if entries is None:
                return None
            self._entries.move_to_end(key)
            found = [entry for entry in entries if body.startswith(entry.prefix)]
        return max(found, key=lambda entry: len(entry.prefix), default=None)

    def put(self, scope: bytes, known: KnownBody, before: KnownBody | None) -> None:
        """Remember a beginning, in place of the one `before`, which it continues, if there is one."""
        key = scope, known.prefix[:_BEGINNING]
        if known.size > self.bytes_max:
            return
        with self._lock:
            old = self._entries.setdefault(key, [])
            self._entries.move_to_end(key)
            kept = [entry for entry in old if entry is not before and entry.prefix != known.prefix]
            self._entries[key] = [*kept, known][-_ENTRIES_MAX:]
            self.bytes += _sum(self._entries[key]) - _sum(old)
            while self.bytes > self.bytes_max:
                _, gone = self._entries.popitem(last=False)
                self.bytes -= _sum(gone)

    def forget(self, scope: bytes) -> None:
        """Forget all bodies whose scope begins with `scope`."""
        with self._lock:
            for key in [key for key in self._entries if key[0].startswith(scope)]:
                self.bytes -= _sum(self._entries.pop(key))


def _sum(entries: list[KnownBody]) -> int:
    return sum(entry.size for entry in entries)
