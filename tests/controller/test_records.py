"""Records: what the operations promise, checked against a plain model, with restarts in between."""

from __future__ import annotations

import random
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from trunkline.controller.database import Database
from trunkline.controller.messages import RecordCall
from trunkline.controller.records import Limits, RecordStore
from trunkline.router.messages import RecordReply

FINGERPRINT = bytes(16)


def ask(store: RecordStore, op: str, now: float = 0.0, **fields: Any) -> RecordReply:
    call = RecordCall(7, op, **{"kind": "session", "id": "a"} | fields)
    answer = store.handle(call, 3, now)
    assert (answer.seq, answer.ticket) == (3, 7)
    return answer


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


def test_a_lease_keeps_others_away_until_it_ends() -> None:
    store = RecordStore()
    ask(store, "create", value=b"v")
    assert ask(store, "acquire", lease="x", lease_s=10.0).records[0].value == b"v"
    assert ask(store, "get", now=1.0).status == "ok"
    for op in ("acquire", "put", "delete", "release"):
        refused = ask(store, op, now=9.0, lease="y", lease_s=10.0, version=1)
        assert refused.status == "busy", op
        assert "another 1 s" in refused.detail
    assert ask(store, "acquire", now=9.0, lease="x", lease_s=10.0).status == "ok"  # longer
    assert ask(store, "acquire", now=18.0, lease="y", lease_s=10.0).status == "busy"
    assert ask(store, "acquire", now=19.0, lease="y", lease_s=10.0).status == "ok"  # over: its router died
    late = ask(store, "put", now=20.0, lease="x", version=1, value=b"late")
    assert late.status == "busy"
    assert ask(store, "put", now=20.0, lease="y", version=1, value=b"w", release=True).records[0].version == 2
    assert ask(store, "put", now=20.0, lease="x", version=1, value=b"late").status == "conflict"
    assert ask(store, "acquire", now=20.0, lease="z", lease_s=1.0).records[0].value == b"w"
    assert ask(store, "release", now=20.0, lease="z").status == "ok"
    assert ask(store, "delete", now=20.0).status == "ok"


def test_a_record_in_use_does_not_expire() -> None:
    store = RecordStore()
    ask(store, "create", ttl=10.0)
    ask(store, "create", id="b", ttl=10.0)
    ask(store, "acquire", now=5.0, lease="x", lease_s=100.0)
    assert store.expire(50.0) == 1
    assert ask(store, "get", id="b", now=50.0).status == "missing"
    assert ask(store, "release", now=60.0, lease="x").status == "ok"
    assert ask(store, "get", now=69.0).status == "ok"
    assert ask(store, "get", now=79.0).status == "missing"


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


def test_a_damaged_record_is_dropped_alone(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    database = Database(path, FINGERPRINT)
    store = RecordStore(database)
    for id_ in "abc":
        ask(store, "create", id=id_, value=b"value of " + id_.encode())
    database.close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE records SET value = x'00' WHERE id = 'a'")
        connection.execute("UPDATE records SET version = 'many' WHERE id = 'b'")
    connection.close()
    for _ in range(2):
        database = Database(path, FINGERPRINT)
        store = RecordStore(database)
        assert [record.id for record in ask(store, "list", id="").records] == ["c"]
        database.close()
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT count(*) FROM records").fetchone() == (1,)
    connection.close()


def test_what_is_not_stored_is_said(tmp_path: Path) -> None:
    database = Database(tmp_path / "index.sqlite", FINGERPRINT)
    store = RecordStore(database)
    pages = database.rows("PRAGMA page_count")[0][0]
    database.rows(f"PRAGMA max_page_count = {pages}")  # as a full disk
    assert ask(store, "create", value=bytes(1 << 20)).detail == ""
    assert not database.flush()
    answer = ask(store, "put", value=b"v", version=1)
    assert answer.status == "ok"
    assert "kept in memory only: " in answer.detail
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


@pytest.mark.parametrize("seed", range(10))
def test_random_calls_agree_with_a_model(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    path = tmp_path / "index.sqlite"
    database = Database(path, FINGERPRINT)
    store = RecordStore(database)
    model: dict[str, Known] = {}
    now = 0.0
    for step in range(1500):
        now += rng.choice([0.0, 0.5, 0.5, 7.0])
        model = {id_: known for id_, known in model.items() if not known.is_over(now)}
        if rng.random() < 0.005:  # a restart: leases end
            database.close()
            database = Database(path, FINGERPRINT)
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
        answer = store.handle(call, 0, now)
        assert answer.status == status, f"seed {seed}, step {step}: {call}"
        assert len(store) == len(model)
        assert store.total_bytes == sum(len(known.value) for known in model.values())
        if status == "ok" and call.op in ("get", "acquire"):
            record, known = answer.records[0], model[id_]
            has_it = call.op == "get" and call.version == known.version
            assert record.value == (b"" if has_it else known.value)
            assert (record.version, record.used) == (known.version, now)
    ids = [record.id for record in store.handle(RecordCall(0, "list", "session", ""), 0, now).records]
    assert ids == sorted(model)
    database.close()
