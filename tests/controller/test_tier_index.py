"""The index follows the directory, survives anything that can happen to a file, and never stops a start."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
import structlog

from trunkline.controller.engine.disk_chunks import DiskChunk
from trunkline.controller.storage.database import Database, DatabaseInUseError, DatabaseUnavailableError
from trunkline.controller.storage.tier_index import INDEX, TierIndex

FINGERPRINT = bytes(range(16))
ROOT = b"r" * 16


def name_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def chunk(slot: int, number: int, parent: bytes = ROOT, last_use: float = 1.0, expires: float = 0.0) -> DiskChunk:
    """A chunk whose tokens tell its number."""
    return DiskChunk(slot, 100 + slot, name_of(number), parent, number.to_bytes(4, "little"), last_use, expires)


def reopened(index: TierIndex) -> TierIndex:
    index.close()
    return TierIndex.open(index.database.path, FINGERPRINT)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "index.sqlite"


def test_what_was_stored_is_found_parents_first(path: Path) -> None:
    index = TierIndex.open(path, FINGERPRINT)
    assert index.load(slots=10, now=0.0).chunks == []
    index.stored(chunk(0, 3, parent=name_of(2)))  # children before parents, as eviction may write them
    index.stored(chunk(1, 2, parent=name_of(1)))
    index.stored(chunk(2, 1, parent=ROOT, expires=9.0))
    index.root(ROOT, b"salt")
    index.root(b"s" * 16, b"nobody is below")
    assert index.flush()
    index = reopened(index)
    found = index.load(slots=10, now=5.0)
    assert found.roots == {ROOT: b"salt"}
    expected = [
        chunk(2, 1, parent=ROOT, expires=9.0),
        chunk(1, 2, parent=name_of(1)),
        chunk(0, 3, parent=name_of(2)),
    ]
    assert found.chunks == expected
    assert found.dropped == 0
    assert path.stat().st_mode & 0o777 == 0o600
    index.close()


def test_times_are_the_callers_and_never_in_the_future(path: Path) -> None:
    index = TierIndex.open(path, FINGERPRINT, wall_offset=1000.0)
    index.root(ROOT, b"")
    index.stored(chunk(0, 1, last_use=50.0, expires=60.0))
    index.stored(chunk(1, 2, last_use=10.0))
    index.touch([name_of(2), name_of(77)], 30.0, expires=80.0)
    index.close()
    index = TierIndex.open(path, FINGERPRINT, wall_offset=1020.0)  # a boot whose count began 20 s later
    found = {c.slot: c for c in index.load(slots=2, now=25.0).chunks}
    assert (found[0].last_use, found[0].expires) == (25.0, 40.0)  # 30 would be the future
    assert (found[1].last_use, found[1].expires) == (10.0, 60.0)
    index.close()


def test_generations_never_come_again_even_if_the_file_is_lost(path: Path) -> None:
    seen = []
    for _ in range(3):
        index = TierIndex.open(path, FINGERPRINT)
        seen.append(index.first_generation)
        index.close()
    path.unlink()
    index = TierIndex.open(path, FINGERPRINT)
    index.close()
    assert [later - earlier for earlier, later in pairwise(seen)] == [1 << 32] * 2
    assert seen[0] >> 32 > 29_000_000  # minutes since 1970: what a lost file does not know is still exceeded
    assert index.first_generation < 1 << 62


def test_unreachable_chunks_are_dropped_for_good(path: Path) -> None:
    index = TierIndex.open(path, FINGERPRINT)
    index.root(ROOT, b"")
    index.stored(chunk(0, 1))
    index.stored(chunk(1, 2, parent=name_of(1)))
    index.stored(chunk(2, 4, parent=name_of(3)))  # 3 was never stored
    index.stored(chunk(3, 5, parent=name_of(4)))
    index.stored(chunk(4, 6, parent=name_of(7)))  # a circle, as only damage can make it
    index.stored(chunk(5, 7, parent=name_of(6)))
    index.stored(chunk(99, 8))  # of a tier that was larger
    index = reopened(index)
    found = index.load(slots=6, now=5.0)
    assert [c.slot for c in found.chunks] == [0, 1]
    assert found.dropped == 5
    index = reopened(index)
    assert index.load(slots=100, now=5.0).dropped == 0
    index.close()


@pytest.mark.parametrize("seed", range(4))
def test_any_sequence_of_changes_ends_in_the_state_that_it_describes(path: Path, seed: int) -> None:
    """Against a dictionary, with commits at random points: coalescing must not change the outcome."""
    rng = random.Random(seed)
    index = TierIndex.open(path, FINGERPRINT)
    index.root(ROOT, b"")
    model: dict[int, DiskChunk] = {}
    for step in range(600):
        slot, number = rng.randrange(12), rng.randrange(20)
        match rng.choice(["stored", "stored", "freed", "touch", "parent", "flush"]):
            case "stored":
                row = chunk(slot, number, last_use=float(step))
                for other in [s for s, c in model.items() if c.name == row.name and s != slot]:
                    index.freed(other)
                    del model[other]
                model[slot] = row
                index.stored(row)
            case "freed":
                model.pop(slot, None)
                index.freed(slot)
            case "touch":
                index.touch([name_of(number)], float(step))
                model = {
                    s: c._replace(last_use=float(step)) if c.name == name_of(number) else c
                    for s, c in model.items()
                }
            case "parent":  # to a root of its own and back, so that all stay reachable
                index.root(name_of(1000), b"other")
                parent = rng.choice([ROOT, name_of(1000)])
                index.reparented(name_of(number), parent)
                model = {
                    s: c._replace(parent=parent) if c.name == name_of(number) else c for s, c in model.items()
                }
            case _ if rng.random() < 0.2:
                assert index.flush()
    index = reopened(index)
    assert {c.slot: c for c in index.load(slots=12, now=1e9).chunks} == model, f"seed {seed}"
    index.close()


def _damaged(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    match how:
        case "text":
            data = bytearray(b"This is no database, whatever its name says.\n" * 200)
        case "truncated":
            data = data[: len(data) // 2]
        case "header":
            data[20:60] = b"\xff" * 40
        case "first page":
            data[:4096] = bytes(4096)
    path.write_bytes(data)


def page_of(path: Path, table: str) -> int:
    """A leaf page in the middle of a table."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        root = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()[0]
    data = path.read_bytes()
    page = data[(root - 1) * 4096 :]
    assert page[0] in (2, 5), "there is one page only"  # an inner page, of an index or a table
    cells = int.from_bytes(page[3:5], "big")
    cell = int.from_bytes(page[12 + cells // 2 * 2 :][:2], "big")
    return int.from_bytes(page[cell : cell + 4], "big")


@pytest.mark.parametrize(
    ("how", "least"),
    [
        ("text", 0),
        ("header", 500),
        ("first page", 500),
        ("truncated", 100),
        ("chunks", 400),
        ("sqlite_autoindex_chunks_1", 500),
    ],
)
def test_of_a_damaged_file_what_can_be_read_is_kept(path: Path, how: str, least: int) -> None:
    index = TierIndex.open(path, FINGERPRINT)
    index.root(ROOT, b"")
    for slot in range(500):
        index.stored(chunk(slot, slot))
    index.close()
    if how in ("text", "header", "first page", "truncated"):
        _damaged(path, how)
    else:
        start = (page_of(path, how) - 1) * 4096
        data = bytearray(path.read_bytes())
        data[start : start + 4096] = bytes(4096)
        path.write_bytes(data)
    damaged = path.read_bytes()
    with structlog.testing.capture_logs() as logs:
        index = TierIndex.open(path, FINGERPRINT)
        found = index.load(slots=500, now=0.0)
    assert least <= len(found.chunks) <= 500
    assert (len(found.chunks) < 500) == (how in ("text", "truncated", "chunks"))
    assert all(row == chunk(row.slot, row.slot, last_use=0.0) for row in found.chunks)
    assert [entry["log_level"] for entry in logs if "damaged" in entry["event"]] == ["warning"]
    assert logs[0]["kept"]["chunks"] == len(found.chunks)
    assert logs[0]["lost"]["chunks"] in ("unknown", 500 - len(found.chunks))
    if how in (
        "chunks",
        "sqlite_autoindex_chunks_1",
    ):  # one of the two is whole, so it is known how many there were
        assert logs[0]["lost"]["chunks"] == 500 - len(found.chunks)
    assert path.with_name("index.sqlite.damaged").read_bytes() == damaged
    index.root(ROOT, b"")
    index.stored(chunk(499, 1000))
    index = reopened(index)
    assert 499 in [c.slot for c in index.load(slots=500, now=0.0).chunks]
    index.close()


def test_an_interrupted_rescue_begins_again_or_is_finished(path: Path) -> None:
    index = TierIndex.open(path, FINGERPRINT)
    index.root(ROOT, b"")
    index.stored(chunk(0, 1))
    index.close()
    path.with_name("index.sqlite.salvaged").write_bytes(b"half of")  # killed while it was written
    index = TierIndex.open(path, FINGERPRINT)
    assert len(index.load(slots=1, now=0.0).chunks) == 1
    index.close()
    path.rename(path.with_name("index.sqlite.salvaged"))  # killed between the two renames
    index = TierIndex.open(path, FINGERPRINT)
    assert len(index.load(slots=1, now=0.0).chunks) == 1
    index.close()


def test_what_was_moved_aside_is_never_overwritten(path: Path) -> None:
    for text in ("one", "two", "three"):
        path.write_text(f"{text} is no database. " * 100)
        TierIndex.open(path, FINGERPRINT).close()
        path.unlink()
    kept = [path.with_name(f"index.sqlite.damaged{n}").read_text()[:5] for n in ("", "-2", "-3")]
    assert kept == ["one i", "two i", "three"]


@pytest.mark.parametrize(
    ("pragma", "fingerprint"),
    [("user_version = 999", FINGERPRINT), ("application_id = 12345", FINGERPRINT), ("", FINGERPRINT[::-1])],
)
def test_a_file_of_another_version_program_or_model_is_not_read(
    path: Path, pragma: str, fingerprint: bytes
) -> None:
    index = TierIndex.open(path, FINGERPRINT)
    index.root(ROOT, b"")
    index.stored(chunk(0, 1))
    index.close()
    if pragma:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute(f"PRAGMA {pragma}")
    other = TierIndex.open(path, fingerprint)
    assert other.load(slots=1, now=0.0).chunks == []
    assert ("of another model" in other.database.replaced) == (not pragma)
    assert other.database.replaced
    other.close()


@pytest.mark.parametrize("column", ["tokens", "name", "generation", "digest", "last_use"])
def test_a_flipped_bit_in_a_row_costs_that_row_only(path: Path, column: str) -> None:
    """SQLite does not notice it, and other tokens beside a chunk's name would be another prompt's KV."""
    index = TierIndex.open(path, FINGERPRINT)
    index.root(ROOT, b"")
    index.stored(chunk(0, 1))
    index.stored(chunk(1, 2))
    index.close()
    with sqlite3.connect(path) as connection:
        value = {"generation": 5, "last_use": b"not a number"}.get(column, b"\x00\x01\x00\x00" * 4)
        connection.execute(f"UPDATE chunks SET {column} = ? WHERE slot = 0", (value,))
    connection.close()
    index = TierIndex.open(path, FINGERPRINT)
    found = index.load(slots=2, now=5.0)
    assert [c.slot for c in found.chunks] == [1]
    assert found.dropped == 1
    index.close()


@pytest.mark.processes
def test_an_index_in_use_is_not_shared(path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from trunkline.controller.storage.tier_index import TierIndex; "
        f"index = TierIndex.open(Path({str(path)!r}), bytes(range(16))); print('open', flush=True); "
        "sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(DatabaseInUseError, match="in use by another process"):
            Database(path, FINGERPRINT, INDEX, wait_s=0.1)
        ending = threading.Timer(0.2, other.kill)
        ending.start()
        index = TierIndex.open(path, FINGERPRINT)  # waits for a process that is just ending
        assert index.database.replaced == ""
        index.close()
        ending.join()


def test_a_folder_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DatabaseUnavailableError, match=r"index\.sqlite cannot be opened"):
        TierIndex.open(tmp_path / "missing" / "index.sqlite", FINGERPRINT)


def test_a_full_disk_costs_nothing_once_there_is_room_again(path: Path) -> None:
    index = TierIndex.open(path, FINGERPRINT)
    pages = index.database.rows("PRAGMA page_count")[0][0]
    index.database.rows(f"PRAGMA max_page_count = {pages}")  # SQLITE_FULL, as of a full disk
    index.root(ROOT, b"")
    with structlog.testing.capture_logs() as logs:
        for slot in range(300):
            index.stored(chunk(slot, slot))
        assert not index.flush()
        for slot in range(100):
            index.freed(slot)
        assert not index.flush()
        assert "full" in index.problem
        index.database.rows("PRAGMA max_page_count = 1000000")
        assert index.flush()
    assert index.problem == ""
    assert [entry["log_level"] for entry in logs] == ["warning", "info"]
    index = reopened(index)
    assert sorted(c.slot for c in index.load(slots=300, now=0.0).chunks) == list(range(100, 300))
    index.close()


def test_a_statement_that_cannot_be_carried_out_does_not_end_the_thread(path: Path) -> None:
    """Not all errors of a statement are SQLite's: of a damaged file, it may quote bytes that are no text."""
    index = TierIndex.open(path, FINGERPRINT)
    index.root(ROOT, b"")
    index.stored(chunk(1, 1))
    index.stored(chunk(1 << 63, 2))
    assert not index.flush()
    assert "too large" in index.problem
    index.database.write(("slot", 1 << 63), "SELECT 1", ())  # in its place
    assert index.flush()
    assert index.problem == ""
    index = reopened(index)
    assert [c.slot for c in index.load(slots=300, now=0.0).chunks] == [1]
    index.close()


_WRITER = """
import sys
import threading
from itertools import pairwise
from pathlib import Path
from trunkline.controller.storage.tier_index import DiskChunk, TierIndex
index = TierIndex.open(Path(sys.argv[1]), bytes(range(16)))
name = lambda n: n.to_bytes(16, "big")
index.root(b"r" * 16, b"")
for number in range(1, 10**9):
    parent = b"r" * 16 if number % 50 == 1 else name(number - 1)
    slot = number % 4000
    index.freed(slot)
    index.stored(DiskChunk(slot, number, name(number), parent, number.to_bytes(4, "little") * 64, float(number)))
    index.touch([name(max(1, number - 7))], float(number))
    if number % 500 == 0:
        assert index.flush()
        print(number, flush=True)
"""


@pytest.mark.processes
@pytest.mark.parametrize("rounds", [1, 13])
def test_killed_at_any_time_it_knows_what_was_committed(path: Path, rounds: int) -> None:
    command = [sys.executable, "-c", _WRITER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        flushed = 0
        for _ in range(rounds):
            flushed = int(child.stdout.readline())
        os.kill(child.pid, signal.SIGKILL)  # while it goes on writing
    with structlog.testing.capture_logs() as logs:
        index = TierIndex.open(path, FINGERPRINT)
        found = index.load(slots=4000, now=1e12)
    assert not [entry for entry in logs if entry["log_level"] == "warning"]
    assert found.dropped < 50  # at most the path whose head was overwritten
    kept = {c.generation for c in found.chunks}
    last = max(kept)
    assert last >= flushed
    expected = range(max(1, last - 4000 + 50), last + 1)
    assert kept.issuperset(expected)
    for row in found.chunks:
        assert row.name == name_of(row.generation)
        assert row.tokens == row.generation.to_bytes(4, "little") * 64
    index.close()
