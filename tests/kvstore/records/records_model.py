"""A model of the record store: dictionaries, and what the store may answer.

Every step does one operation on the store and checks its answer. Where time decides and the store's clock cannot
be told to the second (`Lab.slack_s`), both answers are right, and the model follows the store.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from trunkline.kvstore.records import (
    PASSING_KIND,
    RECORD_BYTES,
    SEGMENT_BYTES,
    BaseMissingError,
    BusyError,
    Change,
    ConflictError,
    ExistsError,
    MissingError,
    QuotaError,
    Reading,
    Record,
    RecordError,
    RecordKey,
    RecordStore,
    Usage,
    segment_name,
)

KINDS = ("session", "schema:a", PASSING_KIND)
OWNERS = ("", "ann", "an")
IDS = ("a", "aa", "ab", "b", "bä", "ü𝄞", "z" * 70)
HOT = RecordKey("session", "ann", "a")
"""What half of the operations are about, so that they meet."""
TOKENS = ("one", "two")
CONTENTS = (b"", b"x", b"y", b"z" * 300, bytes(9000))
TTLS = (0.0, 0.0, 100.0, 3000.0)
LEASES = (30.0, 300.0)
WAITS = (0.0, 1.0, 20.0, 70.0, 400.0, 4000.0)
QUOTA = 8000


class Lab(Protocol):
    """A place for a store, with a clock that a test moves."""

    slack_s: float
    """How far the store's clock may be from `now()`."""
    counts_at_once: bool
    """Whether sizes are exact after each operation, or only when `tend` has nothing more to do."""

    def open(self, *, bytes_max: int = 0) -> RecordStore:
        """Return another store on the same records."""

    def now(self) -> float:
        """Return the Unix time in seconds that the store's clock shows."""

    def advance(self, seconds: float) -> None:
        """Move the clock on."""


@dataclass
class Doc:
    """A record as it should be."""

    version: int
    header: bytes
    head: bytes
    created: float
    touched: float
    """Time of the last use."""
    ttl: float
    token: str = ""
    until: float = 0.0

    @property
    def exact_s(self) -> float:
        """By how much the stored time of use may be older."""
        return min(60.0, self.ttl / 16) if self.ttl else 60.0


@dataclass
class Model:
    """All records, and every segment that there ever was."""

    lab: Lab
    rng: random.Random
    bytes_max: int = 0
    docs: dict[RecordKey, Doc] = field(default_factory=dict)
    segments: dict[bytes, tuple[str, bytes, bytes]] = field(default_factory=dict)
    """Owner, parent and content by name."""

    async def step(self, store: RecordStore) -> None:
        """Do one random operation and check its answer."""
        steps: dict[Callable[[RecordStore], Awaitable[None]], int] = {
            self.create: 3,
            self.get: 4,
            self.acquire: 3,
            self.renew: 1,
            self.release: 1,
            self.put: 8,
            self.delete: 1,
            self.page: 2,
            self.kinds: 1,
            self.usage: 1,
            self.tend: 1,
            self.wait: 2,
        }
        (chosen,) = self.rng.choices(list(steps), list(steps.values()))
        await chosen(store)

    # --- what the model knows

    def chain(self, name: bytes) -> list[bytes]:
        """Return the names of a chain, the oldest first."""
        names = []
        while name:
            names.append(name)
            name = self.segments[name][1]
        return names[::-1]

    def reachable(self) -> set[bytes]:
        """Return the segments that records need."""
        return {name for doc in self.docs.values() for name in self.chain(doc.head)}

    def size(self, owner: str | None) -> Usage:
        """Return the size of the records of an owner, or of all."""
        mine = [(key, doc) for key, doc in self.docs.items() if owner is None or key.owner == owner]
        needed = {name for _, doc in mine for name in self.chain(doc.head)}
        headers = sum(RECORD_BYTES + len(doc.header) for _, doc in mine)
        return Usage(len(mine), headers + sum(SEGMENT_BYTES + len(self.segments[name][2]) for name in needed))

    def busy(self, doc: Doc | None, token: str) -> set[type[RecordError] | None]:
        """Return what a lease makes of an operation: None is that it is carried out."""
        if doc is None:
            return {MissingError}
        left = doc.until - self.lab.now()
        if not doc.token or doc.token == token or left < -self.lab.slack_s:
            return {None}
        return {BusyError} if left > self.lab.slack_s else {BusyError, None}

    def draw_key(self) -> RecordKey:
        rng = self.rng
        if rng.random() < 0.5:
            return HOT
        return RecordKey(rng.choice(KINDS), rng.choice(OWNERS), rng.choice(IDS))

    def draw_known(self, doc: Doc | None) -> list[bytes]:
        known = self.rng.sample(sorted(self.segments), min(2, len(self.segments)))
        chain = self.chain(doc.head) if doc is not None else []
        return known + self.rng.sample(chain, self.rng.randint(0, min(2, len(chain))))

    def draw_change(self, owner: str, doc: Doc | None) -> Change:
        rng = self.rng
        bases = [b"", doc.head if doc is not None else b""]
        if self.segments:
            bases.append(rng.choice(sorted(self.segments)))
        if doc is not None and doc.head:
            bases += [doc.head, doc.head, rng.choice(self.chain(doc.head))]
        contents = [rng.choice(CONTENTS) for _ in range(rng.choice((0, 1, 1, 1, 2, 5)))]
        header = rng.randbytes(rng.choice((0, 10, 500)))
        return Change(header, rng.choice(TTLS), rng.choice(bases), contents)

    def lacks_base(self, owner: str, change: Change) -> set[type[RecordError] | None]:
        """Return what a change's base makes of it. One that nothing needs may not have been removed yet."""
        if not change.base or (change.base in self.reachable() and self.segments[change.base][0] == owner):
            return {None}
        is_mine = change.base in self.segments and self.segments[change.base][0] == owner
        return {BaseMissingError} if self.lab.counts_at_once or not is_mine else {BaseMissingError, None}

    # --- operations

    async def tried(self, call: Awaitable[Any], allowed: set[type[RecordError] | None]) -> Any:
        """Return the result of an operation, or how it was refused, if that is allowed."""
        result: Any
        try:
            result = await call
        except RecordError as error:
            result = error
        outcome = type(result) if isinstance(result, RecordError) else None
        assert outcome in allowed, (result, allowed)
        return result

    async def create(self, store: RecordStore) -> None:
        key = self.draw_key()
        change = self.draw_change(key.owner, None)
        quota = self.rng.choice((0, QUOTA))
        allowed: set[type[RecordError] | None] = {ExistsError} if key in self.docs else set()
        if not allowed:
            allowed = self.lacks_base(key.owner, change)
            if quota and self.size(key.owner).bytes >= quota:
                allowed = (allowed - {None}) | {QuotaError}
            elif quota and not self.lab.counts_at_once:
                allowed |= {QuotaError}
        found = await self.tried(store.create(key, change, owner_bytes_max=quota), allowed)
        if isinstance(found, Record):
            now = self.lab.now()
            self.docs[key] = Doc(1, change.header, self.grown(key.owner, change), now, now, change.ttl)
            self.check_record(found, key)

    async def put(self, store: RecordStore) -> None:
        key = self.draw_key()
        doc = self.docs.get(key)
        change = self.draw_change(key.owner, doc)
        lease, release = self.rng.choice(("", *TOKENS)), self.rng.random() < 0.5
        version = (doc.version if doc is not None else 1) + self.rng.choice((0, 0, 0, 0, 0, 1, -1))
        allowed = self.busy(doc, lease)
        if None in allowed and doc is not None:
            after = {ConflictError} if version != doc.version else self.lacks_base(key.owner, change)
            allowed = (allowed - {None}) | after
        call = store.put(key, version, change, lease=lease, release=release)
        found = await self.tried(call, allowed)
        if isinstance(found, ConflictError):
            assert doc is not None
            assert found.version == doc.version
        if isinstance(found, Record) and doc is not None:
            doc.version, doc.header, doc.ttl = version + 1, change.header, change.ttl
            doc.touched, doc.head = self.lab.now(), self.grown(key.owner, change)
            if release and lease and doc.token == lease:
                doc.token = ""
            self.check_record(found, key)

    def grown(self, owner: str, change: Change) -> bytes:
        name = change.base
        for content in change.segments:
            parent, name = name, segment_name(owner, name, content)
            self.segments[name] = owner, parent, content
        return name

    async def get(self, store: RecordStore) -> None:
        key = self.draw_key()
        doc, use = self.docs.get(key), self.rng.random() < 0.7
        known = self.draw_known(doc)
        allowed: set[type[RecordError] | None] = {None} if doc is not None else {MissingError}
        found = await self.tried(store.get(key, known, use=use), allowed)
        if doc is not None:
            doc.touched = self.lab.now() if use else doc.touched
            self.check_reading(found, key, known)
            left = doc.until - self.lab.now() if doc.token else 0.0
            assert abs(found.leased_s - max(0.0, left)) <= self.lab.slack_s + 0.001

    async def acquire(self, store: RecordStore) -> None:
        key, token, seconds = self.draw_key(), self.rng.choice(TOKENS), self.rng.choice(LEASES)
        doc = self.docs.get(key)
        known = self.draw_known(doc)
        found = await self.tried(store.acquire(key, token, seconds, known), self.busy(doc, token))
        if isinstance(found, BusyError):
            assert doc is not None
            assert abs(found.seconds - (doc.until - self.lab.now())) <= self.lab.slack_s + 0.001
        if isinstance(found, Reading) and doc is not None:
            doc.token, doc.until = token, self.lab.now() + seconds
            doc.touched = self.lab.now()
            self.check_reading(found, key, known)

    async def renew(self, store: RecordStore) -> None:
        key, token, seconds = self.draw_key(), self.rng.choice(TOKENS), self.rng.choice(LEASES)
        doc = self.docs.get(key)
        has_lease = await store.renew(key, token, seconds)
        left = doc.until - self.lab.now() if doc is not None and doc.token == token else -1e9
        if abs(left) > self.lab.slack_s:
            assert has_lease == (left > 0)
        if has_lease and doc is not None:
            doc.until = self.lab.now() + seconds

    async def release(self, store: RecordStore) -> None:
        key, token = self.draw_key(), self.rng.choice(TOKENS)
        await store.release(key, token)
        doc = self.docs.get(key)
        if doc is not None and doc.token == token:
            doc.token = ""

    async def delete(self, store: RecordStore) -> None:
        key, lease = self.draw_key(), self.rng.choice(("", *TOKENS))
        found = await self.tried(store.delete(key, lease=lease), self.busy(self.docs.get(key), lease))
        if found is None:
            del self.docs[key]

    async def page(self, store: RecordStore) -> None:
        rng = self.rng
        kind, owner = rng.choice(KINDS), rng.choice(OWNERS)
        after, prefix = rng.choice(("", *IDS)), rng.choice(("", "", "a", "b", "ü", "zz"))
        limit, headers = rng.choice((1, 2, 100)), rng.random() < 0.5
        found = await store.page(kind, owner, after, limit, prefix=prefix, headers=headers)
        ids = [key.id for key in self.docs if key[:2] == (kind, owner) and key.id > after]
        wanted = sorted(id_ for id_ in ids if id_.startswith(prefix))[:limit]
        assert [record.key for record in found] == [RecordKey(kind, owner, id_) for id_ in wanted]
        for record in found:
            self.check_record(record, record.key, with_header=headers)

    async def kinds(self, store: RecordStore) -> None:
        owner = self.rng.choice(OWNERS)
        assert await store.kinds(owner) == sorted({key.kind for key in self.docs if key.owner == owner})

    async def usage(self, store: RecordStore) -> None:
        for owner in (None, *OWNERS):
            found, wanted = await store.usage(owner), self.size(owner)
            assert found.records == wanted.records
            assert found.bytes == wanted.bytes if self.lab.counts_at_once else found.bytes >= wanted.bytes

    async def wait(self, store: RecordStore) -> None:
        self.lab.advance(self.rng.choice(WAITS))

    async def tend(self, store: RecordStore) -> None:
        """Let the store tidy up until it is done; check what it has deleted."""
        now, gone = self.lab.now(), set[RecordKey]()
        for _ in range(1000):
            tended = await store.tend()
            gone.update(tended.deleted)
            if tended.is_done:
                break
        else:
            raise AssertionError("it does not come to an end")
        assert gone <= set(self.docs)
        deleted = {key: self.docs.pop(key) for key in gone}
        assert not [key for key, doc in deleted.items() if doc.token and doc.until > now + self.lab.slack_s]
        slack = self.lab.slack_s
        free = {key: doc for key, doc in self.docs.items() if not doc.token or doc.until < now - slack}
        assert not [doc for doc in free.values() if doc.ttl and doc.touched + doc.ttl < now - slack]
        self.check_evictions(deleted, free, now)
        for owner in (None, *OWNERS):
            assert await store.usage(owner) == self.size(owner)

    def check_evictions(self, deleted: dict[RecordKey, Doc], free: dict[RecordKey, Doc], now: float) -> None:
        """Check that what was deleted before its end had to be, and that the rest was used later; but kept answers
        are deleted first."""
        slack = self.lab.slack_s
        early = {
            key: doc
            for key, doc in deleted.items()
            if not doc.ttl or doc.touched - doc.exact_s + doc.ttl > now + slack
        }
        assert self.bytes_max or not early
        if not self.bytes_max:
            return
        assert self.size(None).bytes <= self.bytes_max or not free
        for passes in (True, False):
            kept = [doc.touched for key, doc in free.items() if (key.kind == PASSING_KIND) == passes]
            gone = [doc for key, doc in early.items() if (key.kind == PASSING_KIND) == passes]
            assert all(doc.touched - doc.exact_s <= min(kept, default=now) + slack for doc in gone)
            assert not kept or passes is False or len(gone) == len(early), "a kept answer was to go first"

    # --- answers

    def check_record(self, record: Record, key: RecordKey, *, with_header: bool = True) -> None:
        """Compare a record with what it should be."""
        doc, slack = self.docs[key], self.lab.slack_s
        header = doc.header if with_header else b""
        wanted = key, doc.version, header, doc.head, doc.ttl
        assert (record.key, record.version, record.header, record.head, record.ttl) == wanted
        assert abs(record.created - doc.created) <= slack
        assert -slack <= doc.touched - record.used <= doc.exact_s + slack

    def check_reading(self, reading: Reading, key: RecordKey, known: Sequence[bytes]) -> None:
        """Compare a reading with what it should be."""
        self.check_record(reading.record, key)
        chain = self.chain(self.docs[key].head)
        first = max((place + 1 for place, name in enumerate(chain) if name in known), default=0)
        assert reading.after == (chain[first - 1] if first else b"")
        assert [segment.name for segment in reading.segments] == chain[first:]
        assert [segment.content for segment in reading.segments] == [self.segments[n][2] for n in chain[first:]]
        size = self.size(key.owner).bytes
        assert reading.owner_bytes == size if self.lab.counts_at_once else reading.owner_bytes >= size
