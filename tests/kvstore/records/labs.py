"""Places for a store, in which a test opens it and moves its clock (`records_model.Lab`)."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

from kvstore.records.records_model import Lab

from trunkline.kvstore.records import RECORD_BYTES, SEGMENT_BYTES, RecordStore, Usage
from trunkline.kvstore.records.sqlite_store import SqliteRecords


class SqliteLab:
    """A file, or ":memory:" for a store that is opened once."""

    slack_s = 0.0
    counts_at_once = True

    def __init__(self, path: str) -> None:
        self.path = path
        self.wall = 1_700_000_000.0
        self.steady = 5000.0
        self.boot = "first"

    def open(self, *, bytes_max: int = 0, patience_s: float = 10.0) -> SqliteRecords:
        return SqliteRecords(
            self.path,
            bytes_max=bytes_max,
            patience_s=patience_s,
            clock=lambda: self.wall,
            steady=lambda: self.steady,
            boot=self.boot,
        )

    def now(self) -> float:
        return self.wall

    def advance(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds


@contextmanager
def sqlite_lab(folder: Path) -> Iterator[SqliteLab]:
    yield SqliteLab(str(folder / "records.sqlite"))


@asynccontextmanager
async def stores(lab: Lab, count: int = 1, *, bytes_max: int = 0) -> AsyncIterator[list[RecordStore]]:
    """Stores on the same records, closed at the end."""
    opened = [lab.open(bytes_max=bytes_max) for _ in range(count)]
    try:
        yield opened
    finally:
        for store in opened:
            await store.close()


def counted_again(path: str) -> dict[str, Usage]:
    """Count records, bytes and references from the rows; check what the file says of them."""
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        segments = connection.execute("SELECT number, parent, owner, length(content) FROM segments").fetchall()
        records = connection.execute("SELECT head, owner, length(header) FROM records").fetchall()
        needs = Counter([parent for _, parent, _, _ in segments] + [head for head, _, _ in records])
        counts = dict(connection.execute("SELECT segment, count FROM counts"))
        assert {number: counts.get(number, 1) for number, *_ in segments} == {
            number: needs[number] for number, *_ in segments
        }
        said = connection.execute("SELECT name, records, bytes FROM owners").fetchall()
    found = {}
    for name, number, size in said:
        mine = sum(RECORD_BYTES + length for _, owner, length in records if owner == name)
        mine += sum(SEGMENT_BYTES + length for *_, owner, length in segments if owner == name)
        assert (number, size) == (sum(owner == name for _, owner, _ in records), mine)
        found[name] = Usage(number, size)
    return found
