"""What can be read of a file whose disk is damaged or full."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest

from trunkline.controller.engine.disk_chunks import DiskChunk
from trunkline.controller.storage.tier_index import TierIndex
from trunkline.kvstore.salvage import Table, readable_rows

FINGERPRINT = bytes(range(16))
ROOT = b"r" * 16
CHUNK = DiskChunk(0, 100, b"c" * 16, ROOT, b"kept", 0.0, 0.0)


def with_a_chunk(folder: Path) -> Path:
    """The file of an index with one chunk."""
    path = folder / "index.sqlite"
    index = TierIndex.open(path, FINGERPRINT)
    index.root(ROOT, b"")
    index.stored(CHUNK)
    index.close()
    return path


def test_damaged_row_numbers_do_not_lead_back(tmp_path: Path) -> None:
    """The last rows of a page say number 0, and the page behind it cannot be read: no row is read twice."""
    path = tmp_path / "numbers.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE t (x)")
        connection.executemany("INSERT INTO t VALUES (?)", [(bytes(100),)] * 400)
    data = bytearray(path.read_bytes())
    leaves = [page for page in range(0, len(data), 4096) if page and data[page] == 13]
    first, second = leaves[:2]
    cells = int.from_bytes(data[first + 3 : first + 5], "big")
    for cell in (cells - 2, cells - 1):
        at = first + int.from_bytes(data[first + 8 + 2 * cell :][:2], "big")
        assert data[at] < 128  # one byte of length, then the row's number
        assert data[at + 1] == cell + 1
        data[at + 1] = 0
    data[second : second + 4096] = bytes(4096)
    path.write_bytes(data)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        rows = list(islice(readable_rows(connection, Table("t", "x", lambda _: True)), 1000))
    assert 300 < len(rows) < 400


def test_rows_are_found_where_the_schema_is_no_text(tmp_path: Path) -> None:
    """SQLite's message quotes what is damaged, which Python may not be able to read."""
    path = with_a_chunk(tmp_path)
    data = path.read_bytes()
    assert data.count(b"CREATE TABLE chunks") == 1
    path.write_bytes(data.replace(b"CREATE TABLE chunks", b"CREATE TAB\xff\xfe chunks"))
    index = TierIndex.open(path, FINGERPRINT)
    assert "damaged" in index.database.replaced
    assert index.load(slots=1, now=0.0).chunks == [CHUNK]
    index.close()


_ON_A_FULL_DISK = """
import resource, sys
from pathlib import Path
from trunkline.controller.storage.tier_index import TierIndex
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 1 << 30))
index = TierIndex.open(Path(sys.argv[1]), bytes(range(16)))
assert index.problem and not index.database.replaced, (index.problem, index.database.replaced)
print("found", len(index.load(slots=1, now=0.0).chunks))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
assert index.flush(), index.problem
index.close()
print("boot", index.database.boot)
"""


@pytest.mark.processes
def test_what_is_on_a_full_disk_is_found_at_the_start(tmp_path: Path) -> None:
    """A start writes, too: that it cannot must not keep it from reading."""
    path = with_a_chunk(tmp_path)
    command = [sys.executable, "-c", _ON_A_FULL_DISK, str(path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "found 1\n" in said
    boot = said.rpartition("boot ")[2]
    index = TierIndex.open(path, FINGERPRINT)
    assert index.database.boot == int(boot) + 1
    index.close()
