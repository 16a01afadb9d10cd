"""The sessions that a router has used last, so that it reads only what other routers have added to them since."""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from trunkline.kvstore.records import Record, RecordKey
from trunkline.router.stores.session_history import History
from trunkline.router.stores.session_state import SessionState

_BYTES: Final = 1000
"""Approximate memory in bytes of a remembered session without its history."""
_MESSAGE_BYTES: Final = 400
"""Approximate memory in bytes of a message without its text."""
_MARK_BYTES: Final = 120
"""Approximate memory in bytes of a mark."""


class Base(NamedTuple):
    """The end of a stored history, which other records may continue and so share."""

    segment: bytes
    """Name of the last segment; b"": there is none."""
    history: History


class StoredSession(msgspec.Struct, frozen=True):
    """A session together with its record."""

    record: Record
    session: SessionState
    rewrites: bool = False
    """Whether the next change must write all of the history, because it is not in the record's segments: an
    earlier version wrote the record, or the store has lost changes."""

    @property
    def base(self) -> Base | None:
        """What other records may share with this one; None: nothing."""
        return None if self.rewrites else Base(self.record.head, self.session.history)


class SessionMemory:
    """Remembered sessions, the ones that were used last; their number is limited by their approximate size."""

    def __init__(self, bytes_max: int) -> None:
        """`bytes_max`: largest approximate size in bytes of all remembered sessions together."""
        self._bytes_max = bytes_max
        self._sessions: OrderedDict[RecordKey, _Remembered] = OrderedDict()
        self.bytes = 0
        """Approximate size in bytes of all remembered sessions together."""

    def __len__(self) -> int:
        return len(self._sessions)

    def find(self, key: RecordKey) -> StoredSession | None:
        """Return a session as it was last seen; None: it is not remembered."""
        found = self._sessions.get(key)
        if found is None:
            return None
        self._sessions.move_to_end(key)
        return found.stored

    def keep(self, stored: StoredSession) -> None:
        """Remember a session as it is stored now, unless its record is to be written anew."""
        if stored.rewrites:
            return
        key, size = stored.record.key, _size_of(stored)
        self.forget(key)
        # The header's bytes are not needed any more; callers may change their copy of the session.
        kept = StoredSession(stored.record._replace(header=b""), replace(stored.session))
        self._sessions[key] = _Remembered(kept, size)
        self.bytes += size
        while self.bytes > self._bytes_max:
            self.forget(next(iter(self._sessions)))

    def forget(self, key: RecordKey) -> None:
        """Forget a session, if it is remembered."""
        found = self._sessions.pop(key, None)
        if found is not None:
            self.bytes -= found.size


class _Remembered(NamedTuple):
    stored: StoredSession
    size: int
    """Approximate memory in bytes."""


def _size_of(stored: StoredSession) -> int:
    """Return the approximate memory of a session in bytes. Messages are counted as long as the rendered text."""
    history = stored.session.history
    return (
        _BYTES
        + len(stored.record.header)
        + 2 * sys.getsizeof(history.text)
        + len(history.tokens)
        + _MESSAGE_BYTES * len(history.messages)
        + _MARK_BYTES * len(history.marks)
    )
