"""Records: small documents that outlive requests and processes, such as sessions, schemas and kept answers.

A record has a *header*, which each change replaces, and a chain of *segments*, to which changes append. A stored
session has one segment per turn, so a turn writes as much as it adds, however long the session is. A segment is
named by its content and by its parent, the segment before it. Records of one owner share segments with equal
names, so a fork of a session copies nothing, and a segment lives as long as a record or another segment needs it.

      record ─► header, version, lease
         └────► head: segment 3 ─► segment 2 ─► segment 1
      fork ───► head: segment 4' ────┘

Routers read and change records with compare-and-set: a change names the version that it replaces. A router that
works on a record for a while takes its *lease*; the lease ends by itself if the router dies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

HEADER_BYTES_MAX: Final = 8 << 20
"""Largest size in bytes of a header. A kept answer is the largest header there is."""
SEGMENT_BYTES_MAX: Final = 32 << 20
"""Largest size in bytes of a segment."""
RECORD_BYTES: Final = 512
"""Bytes that a record counts beside its header, for its key, its times and its place in indexes."""
SEGMENT_BYTES: Final = 128
"""Bytes that a segment counts beside its content."""
PAGE_MAX: Final = 1000
"""Largest number of records in a page of a listing."""
LEASE_S_MAX: Final = 600.0
"""Longest duration of a lease in seconds."""
PASSING_KIND: Final = "answer"
"""Kind of the records that are deleted first where room is lacking: kept answers. A request that is sent again and
has none is only computed again."""
NAME_BYTES: Final = 16
"""Length of a segment's name in bytes."""


class RecordError(Exception):
    """An operation on a record was not carried out; nothing was changed."""


class MissingError(RecordError):
    """The record does not exist (any more)."""


class ExistsError(RecordError):
    """The record was to be created but exists already."""


class BusyError(RecordError):
    """Another holder has the record's lease."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the record is in use for another {seconds:.0f} s at most")
        self.seconds = seconds
        """Time in seconds after which the lease ends if it is not renewed."""


class ConflictError(RecordError):
    """The record has another version than the one to be replaced."""

    def __init__(self, version: int) -> None:
        super().__init__(f"the record has version {version} now")
        self.version = version
        """The present version. If it is smaller than the expected one, the store has lost changes."""


class BaseMissingError(RecordError):
    """The segment that new segments were to follow does not exist (any more)."""


class QuotaError(RecordError):
    """The owner's records have reached their quota."""

    def __init__(self, used: int, limit: int) -> None:
        """`used`: their size in bytes. `limit`: the quota in bytes."""
        super().__init__(f"the records of the owner take {used} bytes; the quota is {limit}")
        self.used = used
        self.limit = limit


class StoreAwayError(RecordError):
    """The store did not answer. The operation may have been carried out all the same."""


class RecordKey(NamedTuple):
    """What identifies a record."""

    kind: str
    """Kind of the record, such as "session"; without zero bytes."""
    owner: str
    """The tenant's name; "" for the one tenant of a server without keys. Without zero bytes."""
    id: str
    """Unique among the owner's records of the kind."""


class Segment(NamedTuple):
    """One link of a chain."""

    name: bytes
    """Digest of owner, parent and content, `NAME_BYTES` long (`segment_name`)."""
    content: bytes


class Record(NamedTuple):
    """A record without its segments."""

    key: RecordKey
    version: int
    """Counts the changes, from 1 on. Uses and leases change no version."""
    header: bytes
    head: bytes
    """Name of the last segment; b"": the record has no segments."""
    created: float
    """Unix time in seconds."""
    used: float
    """Unix time in seconds of the last use, exact to a sixteenth of `ttl` or one minute, whichever is less."""
    ttl: float
    """Seconds without use after which the record is deleted; 0: never."""


class Reading(NamedTuple):
    """A record with those of its segments that the reader lacks."""

    record: Record
    after: bytes
    """The known segment that the first of `segments` follows; b"": the chain is here from its beginning."""
    segments: list[Segment]
    """The end of the chain, the oldest first."""
    owner_bytes: int
    """Bytes of all of the owner's records."""
    leased_s: float = 0.0
    """Time in seconds after which the record's lease ends if it is not renewed; 0: none was held. It
    has no meaning in what `acquire` returns."""


class Change(NamedTuple):
    """The new content of a record: its header, and its chain of segments."""

    header: bytes
    ttl: float = 0.0
    """See `Record.ttl`."""
    base: bytes = b""
    """Name of an existing segment of the owner, which `segments` follow and which is the head if there are none;
    b"": they begin the chain."""
    segments: Sequence[bytes] = ()
    """Contents of new segments, the oldest first."""


class Usage(NamedTuple):
    """The size of the records of one owner, or of all."""

    records: int
    bytes: int
    """Headers, segments and their overheads. A shared segment counts once."""


class Tended(NamedTuple):
    """What `RecordStore.tend` has done."""

    deleted: list[RecordKey]
    """Records that were deleted because they were not used for their `ttl`, or for lack of room."""
    is_done: bool
    """Whether no more work is due now."""


class RecordStore(Protocol):
    """A store of records, shared by routers.

    Every method may raise `StoreAwayError`, after it has tried for the time given to `open_records`. A method that
    was tried twice tells of the first try what that try has done: so a `put` whose answer was lost is not refused
    as a conflict with itself. A change is durable against the death of any process when the method returns.
    """

    async def create(self, key: RecordKey, change: Change, *, owner_bytes_max: int = 0) -> Record:
        """Make a record.

        Args:
            owner_bytes_max: the owner's quota: if its records have this size in bytes already, no record is made;
                0: there is no quota.

        Raises:
            ExistsError: there is one already.
            BaseMissingError: `change.base` does not exist.
            QuotaError: see `owner_bytes_max`.
            ValueError: header or a segment is too large.
        """

    async def get(self, key: RecordKey, known: Sequence[bytes] = (), *, use: bool = True) -> Reading:
        """Read a record.

        Args:
            known: names of segments that the reader has, with all before them; the last ones of a chain do.
            use: whether this counts as use, which puts off the end of the record's time to live.

        Raises:
            MissingError: there is no such record.
        """

    async def acquire(self, key: RecordKey, token: str, seconds: float, known: Sequence[bytes] = ()) -> Reading:
        """Take a record's lease, and read the record as `get` does. With the token of the present lease, prolong
        it.

        Args:
            token: chosen by the caller, who names it in later calls.
            seconds: duration of the lease.

        Raises:
            MissingError: there is no such record.
            BusyError: another token has the lease.
        """

    async def renew(self, key: RecordKey, token: str, seconds: float) -> bool:
        """Prolong a lease; return whether the token still has it."""

    async def release(self, key: RecordKey, token: str) -> None:
        """End a lease. If the token does not have it, nothing happens."""

    async def put(
        self, key: RecordKey, version: int, change: Change, *, lease: str = "", release: bool = False
    ) -> Record:
        """Replace a record.

        Args:
            version: the version to be replaced.
            lease: the caller's token, if it holds the lease.
            release: whether the lease ends with this change.

        Raises:
            MissingError: there is no such record.
            BusyError: another token has the lease.
            ConflictError: the record has another version.
            BaseMissingError: `change.base` does not exist.
            ValueError: header or a segment is too large.
        """

    async def delete(self, key: RecordKey, *, lease: str = "") -> None:
        """Delete a record, and the segments that no other record needs.

        Raises:
            MissingError: there is no such record.
            BusyError: another token than `lease` has the lease.
        """

    async def page(
        self, kind: str, owner: str, after: str = "", limit: int = 100, *, prefix: str = "", headers: bool = False
    ) -> list[Record]:
        """Return up to `limit` (at most `PAGE_MAX`) records of a kind and owner, in the order of their ids, which
        follow `after` and begin with `prefix`. Without `headers`, their headers are empty."""

    async def kinds(self, owner: str) -> list[str]:
        """Return the kinds of an owner's records, sorted. This may take seconds in a store of millions."""

    async def usage(self, owner: str | None = None) -> Usage:
        """Return the size of an owner's records; None: of all records."""

    async def tend(self) -> Tended:
        """Do a bounded part of the work that is due: delete records that were not used for their time to live,
        and, if all records together are larger than allowed, those that were not used for the longest time, of the
        kind `PASSING_KIND` before all others; remove segments that nothing needs. A leased record is not deleted.
        Any router may call this at any time."""

    async def check(self) -> str:
        """Return what endangers the records of this store, for people ("": nothing), for example a server that
        keeps them in memory only."""

    async def close(self) -> None:
        """Finish the operations that have begun, and close the store."""


def segment_name(owner: str, parent: bytes, content: bytes) -> bytes:
    """Return the name of a segment. `parent`: name of the segment before it; b"": it is the first."""
    hashed = hashlib.blake2b(digest_size=NAME_BYTES)
    for part in (owner.encode(), parent):
        hashed.update(len(part).to_bytes(4, "little") + part)
    hashed.update(content)
    return hashed.digest()


def chain_of(owner: str, change: Change) -> list[Segment]:
    """Return the new segments of a change with their names.

    Raises:
        ValueError: header or a segment is too large.
    """
    if len(change.header) > HEADER_BYTES_MAX:
        raise ValueError(f"the header has {len(change.header)} bytes; at most {HEADER_BYTES_MAX} are kept")
    chain: list[Segment] = []
    parent = change.base
    for content in change.segments:
        if len(content) > SEGMENT_BYTES_MAX:
            raise ValueError(f"a segment has {len(content)} bytes; at most {SEGMENT_BYTES_MAX} are kept")
        parent = segment_name(owner, parent, content)
        chain.append(Segment(parent, content))
    return chain
