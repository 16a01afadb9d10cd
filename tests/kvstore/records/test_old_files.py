"""Files of earlier controllers become records, once."""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest
from xxhash import xxh3_64_digest

from trunkline.kvstore.records import (
    HEADER_BYTES_MAX,
    SEGMENT_BYTES_MAX,
    MissingError,
    RecordKey,
    open_records,
)
from trunkline.kvstore.records.old_files import import_old_files

RECORDS = """
CREATE TABLE records (
    kind TEXT NOT NULL, id TEXT NOT NULL, version INTEGER NOT NULL, value BLOB NOT NULL, digest BLOB NOT NULL,
    created REAL NOT NULL, used REAL NOT NULL, ttl REAL NOT NULL, PRIMARY KEY (kind, id)
)"""
META = "CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID"
CHUNKS = "CREATE TABLE chunks (slot INTEGER PRIMARY KEY, name BLOB)"
COLUMNS = "kind, id, version, value, created, used, ttl, digest"
NOW = time.time()

Value = tuple[str, str, bytes, float]
"""Kind, id, value and time to live."""


def hashed(said: bytes) -> str:
    return f"schema:{hashlib.blake2b(said, digest_size=16).hexdigest()}"


VALUES: list[Value] = [
    ("session", "sess_1", b"one", 0.0),
    ("session", "sess_2", b"", 3600.0),
    ("session:ann", "sess_1", b"of ann", 0.0),
    ("schema", "poem", b"<schema>", 0.0),
    (hashed(b"salt"), "poem", b"<salted>", 0.0),
    (hashed(b"\0ann\0"), "poem", b"<of ann>", 0.0),
    (hashed(b"\0ann\0salt"), "poem", b"<of ann, salted>", 0.0),
    ("idem", "request", b"answer", 600.0),
]
EXPECTED = {
    RecordKey("session", "", "sess_1"): b"one",
    RecordKey("session", "", "sess_2"): b"",
    RecordKey("session", "ann", "sess_1"): b"of ann",
    RecordKey("schema", "", "poem"): b"<schema>",
    RecordKey(hashed(b"salt"), "", "poem"): b"<salted>",
    RecordKey("schema", "ann", "poem"): b"<of ann>",
    RecordKey(hashed(b"\0ann\0salt"), "", "poem"): b"<of ann, salted>",
}


def old_file(path: Path, values: list[Value], *, is_index: bool = False, used: float = NOW) -> Path:
    """Make a file as a controller of an earlier version did."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        for statement in (META, RECORDS, *([CHUNKS] if is_index else [])):
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {0x54726B6C}")
        connection.execute("PRAGMA user_version = 1")
        for kind, id_, value, ttl in values:
            digest = xxh3_64_digest(f"{kind}\0{id_}\0{3}\0".encode() + value)
            row = kind, id_, 3, value, used, used, ttl, digest
            connection.execute(f"INSERT INTO records ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
    return path


def imported(store: str, *paths: Path) -> tuple[int, dict[RecordKey, bytes], list[str]]:
    """Import files into a store; return the number of new records, the expected ones, and the log."""
    lines: list[str] = []
    found: dict[RecordKey, bytes] = {}

    async def test() -> int:
        records = open_records(f"sqlite:{store}")
        count = await import_old_files(records, list(paths), lines.append)
        for key in EXPECTED:
            with suppress(MissingError):
                found[key] = (await records.get(key)).record.header
        await records.close()
        return count

    return asyncio.run(test()), found, lines


def test_records_of_old_files_are_taken_over_once(tmp_path: Path) -> None:
    first = old_file(tmp_path / "group-0.sqlite", VALUES[:4])
    second = old_file(tmp_path / "group-1.sqlite", VALUES[4:])
    count, found, lines = imported(str(tmp_path / "new.sqlite"), first, second)
    assert count == len(EXPECTED)
    assert found == EXPECTED
    assert len(lines) == 2
    assert not first.exists()
    assert Path(f"{first}.imported").exists()

    again = old_file(tmp_path / "group-0.sqlite", [(*VALUES[0][:2], b"older", 0.0)])
    count, found, lines = imported(str(tmp_path / "new.sqlite"), again)
    assert count == 0
    assert found == EXPECTED
    assert "already" in lines[0]


def test_a_value_that_is_too_long_for_a_header_is_a_segment(tmp_path: Path) -> None:
    long = bytes(HEADER_BYTES_MAX + 1)
    old = old_file(tmp_path / "group-0.sqlite", [("session", "sess_1", long, 86400.0)])

    async def test() -> None:
        records = open_records(f"sqlite:{tmp_path / 'new.sqlite'}")
        assert await import_old_files(records, [old], print) == 1
        reading = await records.get(RecordKey("session", "", "sess_1"))
        assert (reading.record.header, reading.record.ttl) == (b"", 86400.0)
        assert [segment.content for segment in reading.segments] == [long]
        await records.close()

    asyncio.run(test())


def test_an_index_stays_without_its_records(tmp_path: Path) -> None:
    index = old_file(tmp_path / "index.sqlite", VALUES, is_index=True)
    count, found, _ = imported(str(tmp_path / "new.sqlite"), index)
    assert count == len(EXPECTED)
    assert found == EXPECTED
    with closing(sqlite3.connect(index)) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        assert tables == {"meta", "chunks"}
        assert connection.execute("PRAGMA user_version").fetchone()[0] == 2


def test_records_whose_time_is_over_stay_behind(tmp_path: Path) -> None:
    old = old_file(tmp_path / "group-0.sqlite", VALUES[:2], used=NOW - 7200)
    count, found, _ = imported(str(tmp_path / "new.sqlite"), old)
    assert count == 1
    assert list(found) == [RecordKey("session", "", "sess_1")]


def test_what_is_too_large_for_a_store_stays_in_the_file(tmp_path: Path) -> None:
    """Earlier versions had no limit for one record."""
    path = old_file(
        tmp_path / "old.sqlite", [*VALUES[:1], ("session", "large", bytes(SEGMENT_BYTES_MAX + 1), 0.0)]
    )
    count, found, lines = imported(str(tmp_path / "new.sqlite"), path)
    assert (count, found[RecordKey("session", "", "sess_1")]) == (1, b"one")
    assert "1 are larger than records may be" in lines[0]
    assert (tmp_path / "old.sqlite.imported").exists()


def test_what_can_be_read_of_a_damaged_file_is_taken_over(tmp_path: Path) -> None:
    values: list[Value] = [("session", f"sess_{number}", bytes([number]) * 3000, 0.0) for number in range(60)]
    old = old_file(tmp_path / "group-0.sqlite", values)
    content = bytearray(old.read_bytes())
    place = content.index(values[30][2])
    content[place - 200 : place + 100] = bytes(300)
    flipped = content.index(values[50][2])
    content[flipped] ^= 1
    old.write_bytes(content)
    count, _, lines = imported(str(tmp_path / "new.sqlite"), old)
    assert len(values) - 5 <= count < len(values)
    assert "damaged" in lines[0]
    assert Path(f"{old}.imported").exists()


def test_another_programs_database_is_let_be(tmp_path: Path) -> None:
    other = tmp_path / "group-0.sqlite"
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE records (kind, id, version, value, used, ttl, digest)")
    assert imported(str(tmp_path / "new.sqlite"), other)[0] == 0
    assert other.exists()


@pytest.mark.parametrize("content", [b"", b"no database at all" * 1000])
def test_a_file_that_is_no_database_yields_nothing(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "group-0.sqlite"
    path.write_bytes(content)
    assert imported(str(tmp_path / "new.sqlite"), path)[0] == 0
