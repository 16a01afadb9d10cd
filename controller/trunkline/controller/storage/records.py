"""Small documents that outlive requests, such as sessions: `RecordCall` in, `RecordReply` out.

    free ──acquire──► leased ──release, put(release), lease over──► free        get, list: at any time
      └── put (present version), delete ──┘ only with the lease's token

Routers keep no state, so data that several of them must agree on is kept here. A record's version grows with each
put, and a put must name the present version: if two routers change the same version, one of them gets "conflict".
A lease keeps other routers from changing a record while a turn of a conversation runs; it ends by itself if its
router dies. Leases are not stored: after a restart of the controller only the version decides.

A change that cannot be written to the file is undone (`undo`): a record that was reported as stored is stored.

Pure except for the database, which only receives changes. Time is an argument, in wall-clock seconds.
"""

from __future__ import annotations

import copy
import heapq
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec
import structlog
from xxhash import xxh3_64_digest

from trunkline.controller.messages import RecordCall
from trunkline.controller.storage.database import Database, Form, Outcome
from trunkline.controller.storage.salvage import Row, Table
from trunkline.router.messages import Record, RecordReply

RECORDS_MAX: Final = 100_000
VALUE_BYTES_MAX: Final = 16 << 20
TOTAL_BYTES_MAX: Final = 1 << 30
"""Most bytes of all values together: they are kept in memory, too."""
NAME_CHARS_MAX: Final = 512
"""Most characters of an id, a kind or a lease's token."""
LIST_MAX: Final = 1000
LEASE_S_MAX: Final = 86_400.0
SHARES: Final = {"idem": 4}
"""Kinds that may fill only a part of the records and bytes: 4 means a fourth. Kept copies of answers ("idem") must
not take the room of sessions, which could not be made again."""

_SCHEMA: Final = """
CREATE TABLE records (
    kind TEXT NOT NULL, id TEXT NOT NULL, version INTEGER NOT NULL, value BLOB NOT NULL, digest BLOB NOT NULL,
    created REAL NOT NULL, used REAL NOT NULL, ttl REAL NOT NULL, PRIMARY KEY (kind, id)
);
"""
RECORDS_VERSION: Final = 1
_COLUMNS: Final = "kind, id, version, value, created, used, ttl, digest"
STORE_STATEMENT: Final = f"INSERT OR REPLACE INTO records ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
_DELETE_STATEMENT: Final = "DELETE FROM records WHERE kind = ? AND id = ?"

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Limits:
    """Most records and bytes that one controller keeps."""

    records: int = RECORDS_MAX
    value_bytes: int = VALUE_BYTES_MAX
    total_bytes: int = TOTAL_BYTES_MAX


class _Row(msgspec.Struct, array_like=True):
    """A record as it is stored."""

    kind: str
    id: str
    version: int
    value: bytes
    created: float
    used: float
    ttl: float

    @property
    def expires(self) -> float:
        return self.used + self.ttl if self.ttl else 0.0

    @property
    def digest(self) -> bytes:
        return xxh3_64_digest(f"{self.kind}\0{self.id}\0{self.version}\0".encode() + self.value)

    @property
    def columns(self) -> Row:
        """Return the record's columns, in the order of `STORE_STATEMENT`'s parameters."""
        return (
            self.kind,
            self.id,
            self.version,
            self.value,
            self.created,
            self.used,
            self.ttl,
            self.digest,
        )


@dataclass(slots=True)
class _Lease:
    token: str
    until: float


_Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Change:
    """A change that a call has made in memory, and that is not known to be in the file yet."""

    key: _Key
    outcome: Outcome
    before: _Row | None
    """The record before the change; None if it is new."""
    after: _Row | None
    """The record after the change; None if it was deleted."""
    lease: _Lease | None
    """The record's lease before the change, if it had one."""


class _RefusedError(Exception):
    """A call is refused; `status` and `detail` are the reply's."""

    def __init__(self, status: str, detail: str = "", row: _Row | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.row = row


class RecordStore:
    """All records of a controller: in memory, and in the database if there is one."""

    def __init__(self, database: Database | None = None, now: float = 0.0, limits: Limits | None = None) -> None:
        """
        Args:
            database: A database that has just been opened; its records are read here.
            now: Wall-clock seconds.
        """
        self.limits = limits or Limits()
        self.total_bytes = 0
        self._database = database
        self._rows: dict[_Key, _Row] = {}
        self._kind_bytes: defaultdict[str, int] = defaultdict(int)
        """Bytes of all values of a kind."""
        self._ids: defaultdict[str, list[str]] = defaultdict(list)
        """Ids by kind, sorted."""
        self._leases: dict[_Key, _Lease] = {}
        self._expiries: list[tuple[float, _Key]] = []
        """Heap of times at which records may expire. An entry whose record was used meanwhile is put back with its
        new time when it is popped."""
        self._due: dict[_Key, float] = {}
        """The time of the one heap entry that counts, by record; other entries of the record are ignored."""
        self._operations: dict[str, Callable[[RecordCall, float], _Row | None]] = {
            "create": self._create,
            "get": self._get,
            "peek": self._peek,
            "put": self._put,
            "delete": self._delete,
            "acquire": self._acquire,
            "release": self._release,
        }
        self._gone: list[_Key] = []
        self._outcome: Outcome | None = None
        """Outcome of the present call's change in the database; None if the call changes nothing there."""
        if database is not None:
            self._load(database, now)

    def __len__(self) -> int:
        return len(self._rows)

    def handle(self, call: RecordCall, seq: int, now: float) -> tuple[RecordReply, Change | None]:
        """Carry out a call on a record, in memory.

        "get", "peek" and "acquire" answer with the record; without its value if "get" or "peek" names the present
        version, because the caller has that value. "create" and "put" answer with the record as it is now, without
        its value. The refusals "exists", "conflict" and "busy" come with the present record, without its value.

        Returns:
            The answer, numbered `seq`; and the change that must be in the file before the answer is sent, if there
            is one. Until that change is settled or undone, no other call on the record may be carried out.
        """
        self.expire(now)
        key = call.kind, call.id
        before, lease = copy.copy(self._rows.get(key)), self._leases.get(key)
        self._outcome = None
        try:
            if problem := self._problem(call):
                raise _RefusedError("failed", problem)
            if call.op == "list":
                return RecordReply(seq, call.ticket, "ok", self._list(call)), None
            row = self._operations[call.op](call, now)
        except _RefusedError as refusal:
            records = [_record(refusal.row, with_value=False)] if refusal.row is not None else []
            return RecordReply(seq, call.ticket, refusal.status, records, refusal.detail), None
        is_new = row is not None and call.version != row.version
        wanted = call.op == "acquire" or (call.op in ("get", "peek") and is_new)
        records = [_record(row, with_value=wanted)] if row is not None else []
        change = Change(key, self._outcome, before, row, lease) if self._outcome is not None else None
        return RecordReply(seq, call.ticket, "ok", records), change

    def settle(self, change: Change) -> None:
        """Note that the change is in the file."""
        if change.after is None:
            self._gone.append(change.key)

    def undo(self, change: Change) -> None:
        """Undo a change that could not be written, or whose commit takes too long.

        If the change is in the file, or may still get there, the file is corrected, too.
        """
        key, before = change.key, change.before
        if change.after is not None and self._rows.get(key) is not change.after:
            return  # the record has expired meanwhile
        if change.after is not None:
            self._drop(key)
        if before is not None:
            self._add(before)
        if change.lease is not None:
            self._leases[key] = change.lease
        has_failed = change.outcome.is_known and change.outcome.problem
        if self._database is not None and not has_failed:  # the change is in the file, or may still get there
            if before is not None:
                self._database.write(("record", *key), STORE_STATEMENT, before.columns)
            else:
                self._database.write(("record", *key), _DELETE_STATEMENT, key)

    def expire(self, now: float) -> int:
        """Forget the records that were not used for their `ttl`, and leases that are over.

        Returns:
            The number of records forgotten.
        """
        forgotten = 0
        while self._expiries and self._expiries[0][0] <= now:
            due, key = heapq.heappop(self._expiries)
            if self._due.get(key) != due:
                continue
            del self._due[key]
            row = self._rows[key]
            lease = self._leases.get(key)
            until = max(row.expires, lease.until if lease is not None else 0.0)  # a leased record is not forgotten
            if not row.expires:
                continue
            if until > now:
                self._schedule(key, until)
            else:
                self._drop(key)
                self._gone.append(key)
                if self._database is not None:
                    self._database.write(("record", *key), _DELETE_STATEMENT, key)
                forgotten += 1
        return forgotten

    def has(self, kind: str, id_: str) -> bool:
        """Return whether there is a record of this kind and id."""
        return (kind, id_) in self._rows

    def take_gone(self) -> list[tuple[str, str]]:
        """Return kind and id of the records that were deleted or forgotten since the last call."""
        gone, self._gone = self._gone, []
        return gone

    def _problem(self, call: RecordCall) -> str:
        if call.op != "list" and call.op not in self._operations:
            return f"operation {call.op!r} is unknown; there are {', '.join(self._operations)} and list"
        if not call.kind or not (call.id or call.op == "list"):
            return "a record has a kind and an id; one is empty"
        if max(len(call.kind), len(call.id), len(call.lease)) > NAME_CHARS_MAX:
            return f"kind, id or lease is longer than {NAME_CHARS_MAX} characters"
        if not (0 <= call.ttl < float("inf")):
            return f"ttl is {call.ttl:g}; it is a time in seconds, 0 for never"
        if call.op == "acquire" and not (call.lease and 0 < call.lease_s <= LEASE_S_MAX):
            return f"a lease has a token and lasts up to {LEASE_S_MAX:g} seconds; lease_s is {call.lease_s:g}"
        if len(call.value) > self.limits.value_bytes:
            return f"the value has {len(call.value)} bytes; at most {self.limits.value_bytes} are kept"
        return ""

    def _create(self, call: RecordCall, now: float) -> _Row:
        key = call.kind, call.id
        if (present := self._rows.get(key)) is not None:
            raise _RefusedError("exists", row=present)
        if len(self._rows) >= self.limits.records:
            raise _RefusedError("failed", f"there are {self.limits.records} records, which is the limit")
        most = self.limits.records // SHARES.get(call.kind, 1)
        if len(self._ids.get(call.kind, ())) >= most:
            raise _RefusedError("failed", f"there are {most} records of kind {call.kind!r}, which is the limit")
        self._check_room(call.kind, len(call.value))
        row = _Row(call.kind, call.id, 1, call.value, now, now, call.ttl)
        self._add(row)
        self._store(row)
        return row

    def _get(self, call: RecordCall, now: float) -> _Row:
        row = self._find(call)
        self._use(row, now)
        return row

    def _peek(self, call: RecordCall, now: float) -> _Row:
        """Return a record without using it: it expires when it would have otherwise."""
        del now
        return self._find(call)

    def _put(self, call: RecordCall, now: float) -> _Row:
        row = self._find(call)
        self._check_lease(call, now)
        if call.version != row.version:
            detail = f"version {call.version} was to be replaced; the present one is {row.version}"
            raise _RefusedError("conflict", detail, row)
        self._check_room(call.kind, len(call.value) - len(row.value))
        self._count(row, len(call.value) - len(row.value))
        row.version += 1
        row.value, row.used, row.ttl = call.value, now, call.ttl
        self._note_expiry(row)
        if call.release:
            self._leases.pop((call.kind, call.id), None)
        self._store(row)
        return row

    def _delete(self, call: RecordCall, now: float) -> None:
        self._find(call)
        self._check_lease(call, now)
        key = call.kind, call.id
        self._drop(key)
        if self._database is not None:
            self._outcome = self._database.commit(("record", *key), _DELETE_STATEMENT, key)
        else:
            self._gone.append(key)

    def _acquire(self, call: RecordCall, now: float) -> _Row:
        """Give the caller the record's lease; with the token of the present lease, prolong it."""
        row = self._find(call)
        self._check_lease(call, now)
        self._leases[call.kind, call.id] = _Lease(call.lease, now + call.lease_s)
        self._use(row, now)
        return row

    def _release(self, call: RecordCall, now: float) -> None:
        """End a lease. One that is over already is no error; one that another caller has by now is."""
        row = self._find(call)
        self._check_lease(call, now)
        self._leases.pop((call.kind, call.id), None)
        self._use(row, now)

    def _list(self, call: RecordCall) -> list[Record]:
        ids = self._ids.get(call.kind, [])
        first = bisect_right(ids, call.id)
        wanted = ids[first : first + max(1, min(call.limit, LIST_MAX))]
        return [_record(self._rows[call.kind, id_], with_value=False) for id_ in wanted]

    def _find(self, call: RecordCall) -> _Row:
        row = self._rows.get((call.kind, call.id))
        if row is None:
            raise _RefusedError("missing")
        return row

    def _check_lease(self, call: RecordCall, now: float) -> None:
        key = call.kind, call.id
        lease = self._leases.get(key)
        if lease is not None and lease.until > now and lease.token != call.lease:
            raise _RefusedError(
                "busy", f"it is in use for another {lease.until - now:.0f} s at most", self._rows[key]
            )

    def _check_room(self, kind: str, more: int) -> None:
        if self.total_bytes + more > self.limits.total_bytes:
            raise _RefusedError("failed", f"all records together may have {self.limits.total_bytes} bytes")
        most = self.limits.total_bytes // SHARES.get(kind, 1)
        if self._kind_bytes.get(kind, 0) + more > most:
            raise _RefusedError("failed", f"all records of kind {kind!r} together may have {most} bytes")

    def _count(self, row: _Row, more: int) -> None:
        self.total_bytes += more
        self._kind_bytes[row.kind] += more

    def _use(self, row: _Row, now: float) -> None:
        """Note that a record is used now, so that its time to live begins again.

        The heap's entry is moved when it comes due; only an entry that was put off for a lease that has ended
        early must be replaced at once.
        """
        row.used = now
        self._note_expiry(row)
        if self._database is not None:
            statement = "UPDATE records SET used = ? WHERE kind = ? AND id = ?"
            key = "used", row.kind, row.id
            self._database.write(key, statement, (now, row.kind, row.id), freshens=True)

    def _note_expiry(self, row: _Row) -> None:
        """Put the record's expiry into the heap, unless an earlier entry of the record is there."""
        key = row.kind, row.id
        if row.expires and row.expires < self._due.get(key, float("inf")):
            self._schedule(key, row.expires)

    def _schedule(self, key: _Key, due: float) -> None:
        self._due[key] = due
        heapq.heappush(self._expiries, (due, key))

    def _store(self, row: _Row) -> None:
        if self._database is not None:
            self._outcome = self._database.commit(("record", row.kind, row.id), STORE_STATEMENT, row.columns)

    def _add(self, row: _Row) -> None:
        self._rows[row.kind, row.id] = row
        self._count(row, len(row.value))
        insort(self._ids[row.kind], row.id)
        self._note_expiry(row)

    def _drop(self, key: _Key) -> None:
        """Remove a record from memory."""
        kind, id_ = key
        row = self._rows.pop(key)
        self._count(row, -len(row.value))
        ids = self._ids[kind]
        del ids[bisect_left(ids, id_)]
        if not ids:
            del self._ids[kind], self._kind_bytes[kind]
        self._leases.pop(key, None)
        self._due.pop(key, None)

    def _load(self, database: Database, now: float) -> None:
        damaged = 0
        for fields in database.table(_TABLE):
            row = _row_of(fields)
            if row is None:
                damaged += 1
                continue
            row.used = min(row.used, now)  # a clock that was set back
            self._rows[row.kind, row.id] = row
            self._ids[row.kind].append(row.id)
            self._count(row, len(row.value))
            self._note_expiry(row)
        for ids in self._ids.values():
            ids.sort()
        if damaged:  # they stay in the file, where a person may look at them
            log.warning(
                "damaged records are passed over", records=damaged, kept=len(self), path=str(database.path)
            )
        self.expire(now)


def _row_of(fields: Row) -> _Row | None:
    """Return the record in a row of the table; None if the row is damaged."""
    try:
        row = msgspec.convert(fields[:-1], _Row)
        return row if row.digest == fields[-1] else None
    except (msgspec.ValidationError, UnicodeEncodeError):
        return None


_TABLE: Final = Table("records", _COLUMNS, lambda row: _row_of(row) is not None)
RECORDS: Final = Form("records: sessions, schemas, kept answers", RECORDS_VERSION, _SCHEMA, (_TABLE,))


def _record(row: _Row, *, with_value: bool) -> Record:
    return Record(row.id, row.version, row.value if with_value else b"", row.created, row.used, row.expires)
