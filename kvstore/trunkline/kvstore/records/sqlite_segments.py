"""The segments of a record store in SQLite, with the number of their uses. The caller has begun a transaction.

    segments (never change)               counts
      number                                segment, count
      name  (unique)                        only where the count is not one
      parent ──► number of another one
      content

Segments are facts: their rows are written once. How many records and segments need a segment is written only where
it is not one, because one is what nearly all have; so a turn of a conversation writes one new row and changes that
of its record. A segment that nothing needs has the count zero until it is removed.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from typing import Final

from trunkline.kvstore.records.store import (
    SEGMENT_BYTES,
    BaseMissingError,
    Change,
    Segment,
    chain_of,
    segment_name,
)

REMOVALS_MAX: Final = 256
"""Segments that one operation removes; what remains is left to `tend`."""

_CHAIN: Final = """
WITH RECURSIVE chain (number, name, parent) AS (
    SELECT number, name, parent FROM segments WHERE number = ?
    UNION ALL SELECT s.number, s.name, s.parent FROM chain JOIN segments s ON s.number = chain.parent)
SELECT number, name, parent FROM chain"""


class DamagedError(sqlite3.DatabaseError):
    """What is read contradicts itself."""

    sqlite_errorcode = sqlite3.SQLITE_CORRUPT


class SegmentTable:
    """The segments of an open database. Every method is part of a transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def end_of_chain(self, owner: str, head: int, known: frozenset[bytes]) -> tuple[bytes, list[Segment]]:
        """Return the name of the last known segment before `head`, and the segments behind it, the oldest first;
        b"": none is known, and these are all.

        Raises:
            DamagedError: A segment is missing, or its content does not fit its name.
        """
        chain: list[tuple[int, bytes]] = []
        after = b""
        parent: int | None = head
        for number, name, parent in self._connection.execute(_CHAIN, (head,)):
            if name in known:
                after, parent = name, None
                break
            chain.append((number, name))
        if parent is not None:
            raise DamagedError(f"segment {parent} is missing")
        query = "SELECT content FROM segments WHERE number = ?"
        segments: list[Segment] = []
        before = after
        for number, name in reversed(chain):
            content = self._connection.execute(query, (number,)).fetchone()[0]
            if name != segment_name(owner, before, content):
                raise DamagedError(f"segment {number} is damaged")
            segments.append(Segment(name, content))
            before = name
        return after, segments

    def unneeded(self) -> list[tuple[int, str]]:
        """Return a few segments that nothing needs, each with its owner."""
        query = "SELECT segment, owner FROM counts JOIN segments ON number = segment WHERE count = 0 LIMIT 4"
        return self._connection.execute(query).fetchall()

    def _find(self, owner: str, name: bytes) -> int | None:
        query = "SELECT number FROM segments WHERE name = ? AND owner = ?"
        row = self._connection.execute(query, (name, owner)).fetchone()
        return row[0] if row is not None else None

    def base(self, owner: str, change: Change) -> int | None:
        """Return the number of the segment that a change's segments follow; None: they begin the chain.

        Raises:
            BaseMissingError: There is no such segment.
        """
        number = self._find(owner, change.base) if change.base else None
        if change.base and (number is None or not self._count(number)):
            raise BaseMissingError(f"segment {change.base.hex()} does not exist")
        return number

    def extend(
        self, owner: str, change: Change, base: int | None, old: int | None
    ) -> tuple[int | None, bytes, int]:
        """Add a change's segments, and count that a record has the last one instead of `old` as its head.

        Returns:
            The head's number and name, and by how many bytes the owner's segments have grown.
        """
        moved: Counter[int] = Counter()
        head, name, grown, is_new = base, change.base, 0, False
        for segment in chain_of(owner, change):
            known = None if is_new else self._find(owner, segment.name)
            if known is None:
                if head is not None and not is_new:
                    moved[head] += 1
                head, is_new = self._add(owner, segment, head), True  # counted once, by its child or as the head
                grown += SEGMENT_BYTES + len(segment.content)
            else:
                head = known
            name = segment.name
        if head is not None and not is_new:
            moved[head] += 1
        if old is not None:
            moved[old] -= 1
        for number, by in moved.items():
            if by > 0:
                self._set_count(number, self._count(number) + by)
        freed = sum(self.let_go(number) for number, by in moved.items() if by < 0)
        return head, name, grown - freed

    def _add(self, owner: str, segment: Segment, parent: int | None) -> int:
        added = self._connection.execute(
            "INSERT INTO segments (owner, name, parent, content) VALUES (?, ?, ?, ?)",
            (owner, segment.name, parent, segment.content),
        )
        assert added.lastrowid is not None
        return added.lastrowid

    def _count(self, number: int) -> int:
        row = self._connection.execute("SELECT count FROM counts WHERE segment = ?", (number,)).fetchone()
        return int(row[0]) if row is not None else 1

    def _set_count(self, number: int, count: int) -> None:
        if count == 1:
            self._connection.execute("DELETE FROM counts WHERE segment = ?", (number,))
        else:
            self._connection.execute("INSERT OR REPLACE INTO counts VALUES (?, ?)", (number, count))

    def let_go(self, number: int) -> int:
        """Count that a segment is needed once less; if nothing needs it, remove it.

        Returns:
            The bytes of the segments that were removed.
        """
        count = self._count(number) - 1
        self._set_count(number, count)
        return self.remove(number) if not count else 0

    def remove(self, number: int) -> int:
        """Remove a segment whose count is zero and up to `REMOVALS_MAX` before it that nothing else needs.

        Returns:
            The bytes of the segments that were removed.
        """
        freed = 0
        for _ in range(REMOVALS_MAX):
            query = "SELECT parent, length(content) FROM segments WHERE number = ?"
            row = self._connection.execute(query, (number,)).fetchone()
            if row is None:
                raise DamagedError(f"segment {number} is missing")
            parent, size = row
            self._connection.execute("DELETE FROM segments WHERE number = ?", (number,))
            self._connection.execute("DELETE FROM counts WHERE segment = ?", (number,))
            freed += SEGMENT_BYTES + size
            if parent is None:
                break
            count = self._count(parent) - 1
            self._set_count(parent, count)
            if count:
                break
            number = parent
        return freed
