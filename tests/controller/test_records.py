"""Records: what the operations promise, checked against a plain model, with restarts in between."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import structlog

from trunkline.controller.messages import RecordCall
from trunkline.controller.storage.database import Database
from trunkline.controller.storage.records import RECORDS, Change, Limits, RecordStore
from trunkline.controller.storage.salvage import Table, readable_rows
from trunkline.router.messages import RecordReply


def begin(store: RecordStore, op: str, now: float = 0.0, **fields: Any) -> tuple[RecordReply, Change | None]:
    """The answer, and what must get into the file first."""
    call = RecordCall(7, op, **{"kind": "session", "id": "a"} | fields)
    answer, change = store.handle(call, 3, now)
    assert (answer.seq, answer.ticket) == (3, 7)
    return answer, change


def ask(store: RecordStore, op: str, now: float = 0.0, **fields: Any) -> RecordReply:
    answer, change = begin(store, op, now, **fields)
    if change is not None:
        store.settle(change)
    return answer


def opened(path: Path) -> Database:
    return Database(path, b"", RECORDS)


def test_the_life_of_a_record() -> None:
    store = RecordStore()
    assert ask(store, "get").status == "missing"
    made = ask(store, "create", now=10.0, value=b"one", ttl=60.0)
    assert made.status == "ok"
    assert (made.records[0].version, made.records[0].created, made.records[0].expires) == (1, 10.0, 70.0)
    assert made.records[0].value == b""  # the caller has it
    assert ask(store, "create", now=11.0, value=b"two").status == "exists"
    got = ask(store, "get", now=20.0).records[0]
    assert (got.value, got.version, got.used, got.expires) == (b"one", 1, 20.0, 80.0)
    stale = ask(store, "put", now=21.0, value=b"two", version=2)
    assert (stale.status, stale.records[0].version) == ("conflict", 1)
    assert ask(store, "put", now=21.0, value=b"two", version=1, ttl=60.0).records[0].version == 2
    assert ask(store, "get", now=22.0, version=1).records[0].value == b"two"
    known = ask(store, "get", now=22.0, version=2).records[0]
    assert (known.value, known.version) == (b"", 2)  # the caller has it
    seen = ask(store, "peek", now=81.0).records[0]
    assert (seen.value, seen.used, seen.expires) == (b"two", 22.0, 82.0)  # who watches does not use it
    assert ask(store, "peek", now=81.0, version=2).records[0].value == b""
    assert ask(store, "delete", now=23.0).status == "ok"
    assert ask(store, "delete", now=23.0).status == "missing"
    assert (len(store), store.total_bytes) == (0, 0)


def test_lists_go_on_after_an_id() -> None:
    store = RecordStore()
    ids = [f"s{i:03d}" for i in range(25)]
    for id_ in random.Random(0).sample(ids, len(ids)):
        ask(store, "create", id=id_, value=b"value")
    ask(store, "create", kind="schema", id="s0045")
    seen: list[str] = []
    while page := ask(store, "list", id=seen[-1] if seen else "", limit=10).records:
        assert all(record.value == b"" for record in page)
        seen += [record.id for record in page]
    assert seen == ids
    assert ask(store, "list", kind="other").records == []


@pytest.mark.parametrize(
    ("op", "fields", "detail"),
    [
        ("destroy", {}, "operation 'destroy' is unknown"),
        ("create", {"id": ""}, "one is empty"),
        ("create", {"id": "x" * 513}, "longer than 512"),
        ("create", {"value": b"12345678901"}, "11 bytes; at most 10"),
        ("create", {"id": "third"}, "2 records, which is the limit"),
        ("put", {"value": b"1234567890", "version": 1}, "may have 12 bytes"),
        ("create", {"id": "b", "ttl": -1.0}, "ttl is -1"),
        ("acquire", {"lease_s": 1.0}, "has a token"),
        ("acquire", {"lease": "x", "lease_s": float("nan")}, "lasts up to"),
    ],
)
def test_what_is_too_much_fails_with_a_reason_and_changes_nothing(
    op: str, fields: dict[str, Any], detail: str
) -> None:
    store = RecordStore(limits=Limits(records=2, value_bytes=10, total_bytes=12))
    ask(store, "create", value=b"1234")
    ask(store, "create", id="second", value=b"1234")
    answer = ask(store, op, **fields)
    assert (answer.status, answer.records) == ("failed", [])
    assert detail in answer.detail
    assert (len(store), store.total_bytes) == (2, 8)


def test_expired_records_make_room() -> None:
    store = RecordStore(limits=Limits(records=1))
    ask(store, "create", ttl=5.0)
    assert ask(store, "create", id="b", now=4.0).status == "failed"
    assert ask(store, "create", id="b", now=5.0).status == "ok"


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


def test_records_are_found_where_the_schema_is_no_text(tmp_path: Path) -> None:
    """SQLite's message quotes what is damaged, which Python may not be able to read."""
    path = tmp_path / "records.sqlite"
    database = opened(path)
    ask(RecordStore(database), "create", value=b"kept")
    database.close()
    data = path.read_bytes()
    assert data.count(b"CREATE TABLE records") == 1
    path.write_bytes(data.replace(b"CREATE TABLE records", b"CREATE TAB\xff\xfe records"))
    database = opened(path)
    assert "damaged" in database.replaced
    assert ask(RecordStore(database), "get").records[0].value == b"kept"
    database.close()


def test_a_damaged_record_is_dropped_alone(tmp_path: Path) -> None:
    path = tmp_path / "records.sqlite"
    database = opened(path)
    store = RecordStore(database)
    for id_ in "abc":
        ask(store, "create", id=id_, value=b"value of " + id_.encode())
    database.close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE records SET value = x'00' WHERE id = 'a'")
        connection.execute("UPDATE records SET version = 'many' WHERE id = 'b'")
    connection.close()
    for _ in range(2):
        database = opened(path)
        with structlog.testing.capture_logs() as logs:
            store = RecordStore(database)
        assert [(entry["log_level"], entry["records"], entry["kept"]) for entry in logs] == [("warning", 2, 1)]
        assert [record.id for record in ask(store, "list", id="").records] == ["c"]
        database.close()
    with sqlite3.connect(path) as connection:  # a person may still look at the others
        assert connection.execute("SELECT count(*) FROM records").fetchone() == (3,)
    connection.close()


def fill(database: Database) -> None:
    """From now on its disk is full."""
    pages = database.rows("PRAGMA page_count")[0][0]
    database.rows(f"PRAGMA max_page_count = {pages}")


def known(change: Change | None) -> str:
    """Why a change did not get into the file; "" if it did. Waits for the disk."""
    assert change is not None
    deadline = time.monotonic() + 20
    while not change.outcome.is_known:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return change.outcome.problem


def state(store: RecordStore) -> object:
    """All that can be seen of a store, leases included."""
    records = {id_: ask(store, "peek", id=id_).records for id_ in "abc"}
    held = {id_: ask(store, "release", id=id_, lease="nobody's").status for id_ in "abc"}
    return records, held, len(store), store.total_bytes, ask(store, "list", id="").records


@pytest.mark.parametrize(
    "fields",
    [
        {"op": "create", "id": "c", "value": bytes(1 << 20)},
        {"op": "put", "version": 1, "value": bytes(1 << 20)},
        {"op": "put", "version": 1, "value": bytes(1 << 20), "lease": "x", "release": True, "ttl": 9.0, "id": "b"},
    ],
)
def test_what_the_disk_does_not_take_is_taken_back(tmp_path: Path, fields: dict[str, Any]) -> None:
    path = tmp_path / "records.sqlite"
    database = opened(path)
    store = RecordStore(database)
    for id_ in "ab":
        ask(store, "create", id=id_, value=b"first", ttl=1000.0)
    ask(store, "acquire", id="b", lease="x", lease_s=100.0)
    assert database.flush()
    before = state(store)
    fill(database)
    answer, change = begin(store, **fields)
    assert (answer.status, "full" in known(change)) == ("ok", True)
    assert change is not None
    store.undo(change)
    assert state(store) == before
    # A small change has room where a large one has not; together with one that has none, too.
    database.rows("PRAGMA max_page_count = 1000000")
    assert known(begin(store, "put", version=1, value=b"small")[1]) == ""
    database.close()
    database = opened(path)
    assert [r.version for r in ask(RecordStore(database), "list", id="").records] == [2, 1]
    database.close()


def test_a_deletion_that_is_not_written_is_none(tmp_path: Path) -> None:
    database = opened(tmp_path / "records.sqlite")
    store = RecordStore(database)
    ask(store, "create", value=b"first")
    assert database.flush()
    before = state(store)
    database.rows("CREATE TEMP TRIGGER no BEFORE DELETE ON records BEGIN SELECT RAISE(ABORT, 'disk error'); END")
    _, change = begin(store, "delete")
    assert known(change) == "disk error"
    assert change is not None
    store.undo(change)
    assert state(store) == before
    assert store.take_gone() == []  # what was pinned for it stays pinned
    database.rows("DROP TRIGGER no")
    _, change = begin(store, "delete")
    assert known(change) == ""
    assert change is not None
    store.settle(change)
    assert store.take_gone() == [("session", "a")]
    database.close()


@pytest.mark.processes
def test_a_large_record_that_has_no_room_takes_no_small_one_with_it(tmp_path: Path) -> None:
    database = opened(tmp_path / "records.sqlite")
    store = RecordStore(database)
    ask(store, "create", id="large", value=bytes(100))
    assert database.flush()
    database.rows(f"PRAGMA max_page_count = {database.rows('PRAGMA page_count')[0][0] + 4}")
    with database._connection_in_use:  # the writer waits here: all of these are in one transaction
        database.write("wake", "DELETE FROM records WHERE id = 'nothing'", ())
        time.sleep(0.2)
        changes = [begin(store, "create", id=f"s{n}", value=bytes(1 << 20 if n == 1 else 10))[1] for n in range(3)]
    assert ["full" in known(change) for change in changes] == [False, True, False]
    database.close()


@pytest.mark.processes
def test_what_is_on_a_full_disk_is_found_at_the_start(tmp_path: Path) -> None:
    """A start writes, too: that it cannot must not keep it from reading."""
    path = tmp_path / "records.sqlite"
    database = opened(path)
    ask(RecordStore(database), "create", value=b"first")
    database.close()
    code = (
        "import resource, sys, time; from pathlib import Path\n"
        "from trunkline.controller.storage.database import Database\n"
        "from trunkline.controller.messages import RecordCall\n"
        "from trunkline.controller.storage.records import RECORDS, RecordStore\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 1 << 30))\n"
        "database = Database(Path(sys.argv[1]), b'', RECORDS); store = RecordStore(database)\n"
        "assert database.problem and not database.replaced, (database.problem, database.replaced)\n"
        "reply, _ = store.handle(RecordCall(0, 'get', 'session', 'a'), 0, 1.0)\n"
        "print('got', reply.records[0].value)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))\n"
        "assert database.flush(), database.problem; database.close(); print('boot', database.boot)"
    )
    command = [sys.executable, "-c", code, str(path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "got b'first'\n" in said
    boot = said.rpartition("boot ")[2]
    database = opened(path)
    assert database.boot == int(boot) + 1
    database.close()


@pytest.mark.parametrize("stalls", [True, False])
def test_a_disk_that_is_given_up_is_told_to_take_it_back(tmp_path: Path, stalls: bool) -> None:
    """The write may get there in the end, or be done just when the store has decided that it took too long."""
    path = tmp_path / "records.sqlite"
    database = opened(path)
    store = RecordStore(database)
    ask(store, "create", value=b"first")
    assert database.flush()
    with database._connection_in_use if stalls else nullcontext():
        for fields in ({"op": "create", "id": "b"}, {"op": "put", "version": 1, "value": b"second"}):
            _, change = begin(store, **fields)
            assert change is not None
            assert stalls or database.flush()
            assert change.outcome.is_known != stalls
            store.undo(change)
    database.close()
    database = opened(path)
    store = RecordStore(database)
    assert [(r.id, r.version) for r in ask(store, "list", id="").records] == [("a", 1)]
    assert ask(store, "get").records[0].value == b"first"
    database.close()


@dataclass
class Known:
    """The model's idea of a record."""

    version: int
    value: bytes
    used: float
    ttl: float
    lease: str = ""
    lease_until: float = 0.0

    def is_over(self, now: float) -> bool:
        return bool(self.ttl) and max(self.used + self.ttl, self.lease_until) <= now

    def is_busy(self, token: str, now: float) -> bool:
        return self.lease_until > now and self.lease != token


def expected_status(model: dict[str, Known], call: RecordCall, now: float) -> str:
    """Apply `call` to the model."""
    known = model.get(call.id)
    if call.op == "create":
        if known is not None:
            return "exists"
        model[call.id] = Known(1, call.value, now, call.ttl)
        return "ok"
    if known is None:
        return "missing"
    if call.op != "get" and known.is_busy(call.lease, now):
        return "busy"
    if call.op == "put" and call.version != known.version:
        return "conflict"
    known.used = now
    match call.op:
        case "put":
            known.version, known.value, known.ttl = known.version + 1, call.value, call.ttl
        case "delete":
            del model[call.id]
        case "acquire":
            known.lease, known.lease_until = call.lease, now + call.lease_s
    if call.op == "release" or (call.op == "put" and call.release):
        known.lease_until = 0.0
    return "ok"


@pytest.mark.parametrize("seed", range(5))
def test_random_calls_agree_with_a_model(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    path = tmp_path / "records.sqlite"
    database = opened(path)
    store = RecordStore(database)
    model: dict[str, Known] = {}
    now = 0.0
    for step in range(1500):
        now += rng.choice([0.0, 0.5, 0.5, 7.0])
        model = {id_: known for id_, known in model.items() if not known.is_over(now)}
        if rng.random() < 0.005:  # a restart: leases end
            database.close()
            database = opened(path)
            store = RecordStore(database, now)
            for known in model.values():
                known.lease_until = 0.0
            model = {id_: known for id_, known in model.items() if not known.is_over(now)}
        id_ = rng.choice("abcdef")
        call = RecordCall(
            ticket=step,
            op=rng.choice(["create", "get", "put", "put", "delete", "acquire", "acquire", "release"]),
            kind="session",
            id=id_,
            value=rng.randbytes(rng.randrange(40)),
            version=model[id_].version - (rng.random() < 0.2) if id_ in model else 1,
            ttl=rng.choice([0.0, 10.0, 30.0]),
            lease=rng.choice(["x", "y"]),
            lease_s=rng.choice([2.0, 20.0]),
            release=rng.random() < 0.5,
        )
        status = expected_status(model, call, now)
        answer, change = store.handle(call, 0, now)
        if change is not None:
            store.settle(change)
        assert answer.status == status, f"seed {seed}, step {step}: {call}"
        assert len(store) == len(model)
        assert store.total_bytes == sum(len(known.value) for known in model.values())
        if status == "ok" and call.op in ("get", "acquire"):
            record, known = answer.records[0], model[id_]
            has_it = call.op == "get" and call.version == known.version
            assert record.value == (b"" if has_it else known.value)
            assert (record.version, record.used) == (known.version, now)
    ids = [record.id for record in store.handle(RecordCall(0, "list", "session", ""), 0, now)[0].records]
    assert ids == sorted(model)
    database.close()
