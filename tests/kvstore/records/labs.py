"""Places for a store, in which a test opens it and moves its clock (`records_model.Lab`)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from kvstore.records.records_model import Lab

from trunkline.kvstore.records import RecordStore
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
