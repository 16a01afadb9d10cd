"""The remote tier: a store that groups share, also groups with other numbers of ranks.

      TierService ──chunks──► RemoteTier ──values──► ChunkStore: Redis, S3, …
                              records, parts, outages

What a store keeps of a chunk is the part of some KV heads: its record (`RecordKeeper`), then its bytes in plain
order. It stands under the fingerprint of what groups may exchange, the chunk's name and the range of the heads,
but neither under a rank nor under the number of ranks:

      {exchange fingerprint}/{name of the chunk}      FIRST-STOP of the model's KV heads

A rank writes and reads the part of its own heads in one value. Where that is not there, a group of another size
may have written the chunk: its parts are then joined or divided (`trunkline.kvstore.shards`). Parts are read
whole, also where a half is used, because the checksum is over the whole part.

The store may be away. Then every call fails at once until the next attempt is due, with growing distances; of each
outage one warning is logged.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeVar
from urllib.parse import urlsplit

import structlog

from trunkline.kvstore.chunk_format import ChunkFormat
from trunkline.kvstore.chunks import ChunkName
from trunkline.kvstore.remote_stores import ChunkStore, Place, RemoteUrlError, find_store, try_out
from trunkline.kvstore.shards import HeadShard, rows_of
from trunkline.kvstore.tier import SlotKey, TierKind
from trunkline.worker.errors import WorkerConfigError
from trunkline.worker.tiers.disk_tier import RECORD_BYTES, RecordKeeper

_RETRY_FIRST_S: Final = 0.5
_RETRY_MOST_S: Final = 15.0

log = structlog.get_logger()

_T = TypeVar("_T")


class Part(NamedTuple):
    """Which part of each chunk a rank has."""

    fingerprint: bytes
    """The `exchange_fingerprint`."""
    shard: HeadShard
    format: ChunkFormat
    """The format of the rank's part of a chunk."""


class RemoteTier:
    """A `SharedTier`. Thread-safe if its store is."""

    kind = TierKind.REMOTE
    capacity_slots = 0

    def __init__(self, store: ChunkStore, at: str, part: Part, ttl_s: float) -> None:
        """
        Args:
            at: Place of the store, for messages.
            ttl_s: Seconds without use after which the store may forget a chunk; 0: never.

        Raises:
            ShardError: The ranks cannot divide the heads.
        """
        self.slot_bytes = part.format.chunk_bytes
        self._store = store
        self._outages = Outages(at)
        self._part = part
        self._ttl_s = ttl_s
        heads = part.shard.kv_heads
        self._own = min(part.shard.tp, heads)
        """Number of parts into which this rank's group divides a chunk."""
        self._divisions = sorted(
            (count for count in range(1, heads + 1) if heads % count == 0),
            key=lambda count: (count != self._own, -count),
        )
        """Numbers of parts into which groups may have divided a chunk; the group's own first."""
        self._last = self._own
        """Division of the chunk that was found last: most likely that of the next one, too."""
        self._name = _part_name(part.shard.heads)
        self._writes = part.shard.copy == 0

    # --- SharedTier

    def write(self, key: SlotKey, data: memoryview, kept_s: float = 0.0) -> None:
        """Store a chunk's bytes under its name (see `Tier.write`)."""
        self.write_many([(key, data, kept_s)])

    def write_many(self, chunks: Sequence[tuple[SlotKey, memoryview, float]]) -> None:
        """Store chunks (see `SharedTier.write_many`). Of ranks with the same heads only the first one does."""
        if not (self._writes and chunks):
            return
        keeper = self._keeper(self._part.shard.heads)
        values = [
            (Place(self._chunk(key.name), self._name), b"".join((keeper.record(key.name, 0, data), data)))
            for key, data, _ in chunks
        ]
        kept = [kept_s or self._ttl_s for _, _, kept_s in chunks]
        self._outages.call(lambda: self._store.write(values, kept))

    def read(self, key: SlotKey, into: memoryview) -> bool:
        """Fill `into` with a chunk's bytes (see `Tier.read`)."""
        return self.read_many([(key, into)])[0]

    def read_many(self, chunks: Sequence[tuple[SlotKey, memoryview]]) -> list[bool]:
        """Fill each buffer with its chunk's bytes (see `SharedTier.read_many`)."""
        done = [False] * len(chunks)
        left = list(range(len(chunks)))
        for division in dict.fromkeys((self._last, self._own)):
            if left:
                left = self._read_divided(division, chunks, left, done)
        for index in left:
            division = self._division_of(chunks[index][0].name)
            if division not in (0, self._own):
                self._read_divided(division, chunks, [index], done)
                self._last = division
        return done

    def present(self, names: Sequence[ChunkName]) -> int:
        """Return how many of the first of these chunks are there (see `SharedTier.present`)."""
        chunks, count, division = [self._chunk(name) for name in names], 0, self._own
        while count < len(chunks):
            parts = [_part_name(shard.heads) for shard in self._shards(division)]
            rest = chunks[count:]
            count += self._outages.call(partial(self._store.count, rest, parts, self._ttl_s))
            if count == len(chunks):
                break
            found = self._division_of(names[count])
            if found in (0, division):
                break
            self._last = division = found
        return count

    def delete(self, names: Sequence[ChunkName]) -> None:
        """Delete chunks (see `SharedTier.delete`)."""
        if names:
            self._outages.call(lambda: self._store.delete([self._chunk(name) for name in names]))

    def try_out(self) -> None:
        """Write, read and delete a few bytes. If that is not possible, the log says why."""
        with contextlib.suppress(OSError):
            self._outages.call(lambda: try_out(self._store))

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    # --- parts

    def _read_divided(
        self,
        division: int,
        chunks: Sequence[tuple[SlotKey, memoryview]],
        wanted: list[int],
        done: list[bool],
    ) -> list[int]:
        """Read chunks that are divided into so many parts.

        Args:
            wanted: Indices of the chunks.
            done: Set for each chunk that was read and verified.

        Returns:
            The indices of those of which a part is not there.
        """
        shards = self._shards(division)
        places = [
            Place(self._chunk(chunks[index][0].name), _part_name(shard.heads))
            for index in wanted
            for shard in shards
        ]
        values = self._outages.call(lambda: self._store.read(places, self._ttl_s))
        absent = []
        for at, index in enumerate(wanted):
            parts = [value for value in values[at * len(shards) : (at + 1) * len(shards)] if value is not None]
            if len(parts) < len(shards):
                absent.append(index)
            else:
                key, into = chunks[index]
                done[index] = self._take(division, [memoryview(value) for value in parts], key.name, into)
        return absent

    def _take(self, division: int, values: list[memoryview], name: ChunkName, into: memoryview) -> bool:
        """Verify the parts of a chunk and put this rank's heads into its buffer; return whether they are whole."""
        own = self._part.format
        pieces = self._part.shard.pieces(division)
        for piece, shard, value in zip(pieces, self._shards(division), values, strict=True):
            payload = value[RECORD_BYTES:]
            theirs = own.with_heads(len(shard.heads))
            if len(payload) != theirs.chunk_bytes:
                return False
            if not self._keeper(shard.heads).holds(bytes(value[:RECORD_BYTES]), name, 0, payload):
                return False
            if division == self._own:
                into[:] = payload
            else:
                rows = rows_of(payload, theirs)
                source = rows[:, piece.source.start : piece.source.stop]
                rows_of(into, own)[:, piece.target.start : piece.target.stop] = source
        return True

    def _shards(self, division: int) -> list[HeadShard]:
        """Return the parts that this rank's heads are in, of chunks that are divided into so many parts."""
        shard = self._part.shard
        return [HeadShard(shard.kv_heads, piece.rank, division) for piece in shard.pieces(division)]

    def _division_of(self, name: ChunkName) -> int:
        """Return into how many parts a chunk is divided that has all parts for this rank; 0: none is whole."""
        found = set(self._outages.call(lambda: self._store.parts(self._chunk(name))))
        for division in self._divisions:
            if all(_part_name(shard.heads) in found for shard in self._shards(division)):
                return division
        return 0

    def _keeper(self, heads: range) -> RecordKeeper:
        """Return the keeper of the records of a part. Where the disk's have rank and ranks, these have heads."""
        return RecordKeeper(self._part.fingerprint, heads.start, len(heads))

    def _chunk(self, name: bytes) -> str:
        return f"{self._part.fingerprint.hex()}/{name.hex()}"


def _part_name(heads: range) -> str:
    return f"{heads.start}-{heads.stop}"


class Outages:
    """Keeps calls from a store that is known to be away. Thread-safe."""

    def __init__(self, at: str) -> None:
        self._at = at
        self._lock = threading.Lock()
        self._next_attempt = 0.0
        self._retry_s = 0.0
        """Seconds to the next attempt to reach the store; 0 while the store is there."""

    def call(self, ask: Callable[[], _T]) -> _T:
        """Ask the store, unless it is known to be away.

        Raises:
            OSError: The store is away or refuses.
        """
        if time.monotonic() < self._next_attempt:
            raise OSError(f"remote tier at {self._at} is away; the next attempt is due later")
        try:
            answer = ask()
        except OSError as error:
            self._failed(error)
            raise OSError(f"remote tier at {self._at}: {error}") from error
        if self._retry_s:
            self._is_back()
        return answer

    def _failed(self, error: Exception) -> None:
        with self._lock:
            if not self._retry_s:
                log.warning("remote tier fails", at=self._at, error=str(error))
            elif time.monotonic() < self._next_attempt:
                return  # calls that were under way at the same time count once
            self._retry_s = min(_RETRY_MOST_S, 2 * self._retry_s or _RETRY_FIRST_S)
            self._next_attempt = time.monotonic() + self._retry_s

    def _is_back(self) -> None:
        with self._lock:
            if self._retry_s:
                log.info("remote tier is back", at=self._at)
            self._retry_s = self._next_attempt = 0.0


def open_remote_tier(url: str, part: Part, ttl_s: float) -> RemoteTier:
    """Return the tier that a URL names (`trunkline.kvstore.remote_stores`). It need not be reachable yet.

    Raises:
        WorkerConfigError: An unknown scheme, a URL that cannot be read, or a client that is not installed.
    """
    parts = urlsplit(url)
    try:
        kind = find_store(url)
    except RemoteUrlError as error:
        raise WorkerConfigError(f"remote_url (scheme {parts.scheme!r}): {error}") from None
    if kind.missing:
        raise WorkerConfigError(f"remote_url: {kind.missing}")
    at = parts.hostname or parts.path  # the whole URL may hold a password
    try:
        store = kind.open(url)
    except ValueError as error:
        raise WorkerConfigError(f"remote tier at {at}: {error}") from error
    return RemoteTier(store, at, part, ttl_s)
