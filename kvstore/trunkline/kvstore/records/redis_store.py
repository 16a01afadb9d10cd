"""Records on Redis (6.2 and later) or Valkey, for routers on several hosts. Not for Redis Cluster.

Each operation is one call of the script records.lua, which the server carries out as a whole; only a chain or page
of several megabytes takes more. The server's clock decides when leases and records end, so the hosts' clocks need
not agree. A change has a random name, which the server keeps with the record: if an answer is lost and the change
is sent again, it is not carried out a second time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final, NoReturn

import redis.exceptions as refusals

from .redis_script import RedisScript
from .store import (
    LEASE_S_MAX,
    PAGE_MAX,
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
    RecordKey,
    Segment,
    StoreAwayError,
    Tended,
    Usage,
    chain_of,
)

_CONSTANTS: Final = (
    f"local RECORD_BYTES, SEGMENT_BYTES, LEASE_US_MAX = {RECORD_BYTES}, {SEGMENT_BYTES}, {LEASE_S_MAX * 1e6:.0f}\n"
    f"local PASSING_KIND = '{PASSING_KIND}'\n"
)
_READINGS_MAX: Final = 10
"""How often a long chain is read anew because it was changed meanwhile."""
_VERSION_MIN: Final = (6, 2)
_INDEX: Final = "tl:r:i:"
"""What begins the names of the indexes of records, which are listed in records.lua."""
_SCAN: Final = "5000"
"""Number of names of the server that are looked at together: a few milliseconds of its time."""


class RedisRecords:
    """A `RecordStore` on one server, or on a server with replicas."""

    def __init__(self, url: str, *, bytes_max: int = 0, patience_s: float = 10.0) -> None:
        """Set up the store without connecting yet.

        Args:
            url: as for the remote tier: redis://, rediss://, valkey://, valkeys:// or unix://.
            bytes_max: size in bytes of all records over which `tend` deletes some; 0: no limit.
            patience_s: how long an operation is tried.

        Raises:
            ValueError: the URL cannot be read.
        """
        self._script = RedisScript(url, script_body(), patience_s=patience_s)
        self._bytes_max = bytes_max

    async def create(self, key: RecordKey, change: Change, *, owner_bytes_max: int = 0) -> Record:
        """See `RecordStore.create`."""
        written = _change_args(key, change)
        fields = await self._call("create", *key, _new_name(), owner_bytes_max, *written)
        return _record(key, fields, change.header)

    async def get(self, key: RecordKey, known: Sequence[bytes] = (), *, use: bool = True) -> Reading:
        """See `RecordStore.get`."""
        return await self._read(key, known, "get", *key, int(use))

    async def acquire(self, key: RecordKey, token: str, seconds: float, known: Sequence[bytes] = ()) -> Reading:
        """See `RecordStore.acquire`."""
        return await self._read(key, known, "acquire", *key, token, _lease_us(seconds))

    async def renew(self, key: RecordKey, token: str, seconds: float) -> bool:
        """See `RecordStore.renew`."""
        fields = await self._call("renew", *key, token, _lease_us(seconds))
        return next(fields) == b"1"

    async def release(self, key: RecordKey, token: str) -> None:
        """See `RecordStore.release`."""
        await self._call("release", *key, token)

    async def put(
        self, key: RecordKey, version: int, change: Change, *, lease: str = "", release: bool = False
    ) -> Record:
        """See `RecordStore.put`."""
        written = _change_args(key, change)
        fields = await self._call("put", *key, _new_name(), version, lease, int(release), *written)
        return _record(key, fields, change.header)

    async def delete(self, key: RecordKey, *, lease: str = "") -> None:
        """See `RecordStore.delete`."""
        await self._call("delete", *key, _new_name(), lease)

    async def page(
        self, kind: str, owner: str, after: str = "", limit: int = 100, *, prefix: str = "", headers: bool = False
    ) -> list[Record]:
        """See `RecordStore.page`."""
        limit = min(limit, PAGE_MAX)
        start, end = prefix.encode(), b"[" + prefix.encode() + b"\xff" if prefix else b"+"
        least = b"(" + after.encode() if after and after.encode() >= start else b"[" + start if start else b"-"
        records: list[Record] = []
        while len(records) < limit:
            count = limit - len(records)
            fields = await self._call("page", kind, owner, least, end, count, int(headers))
            ended, last = next(fields) == b"1", next(fields)
            for id_ in fields:
                record = _record(RecordKey(kind, owner, id_.decode()), fields, b"")
                records.append(record._replace(header=next(fields)))
            if ended:
                break
            least = b"(" + last
        return records

    async def kinds(self, owner: str) -> list[str]:
        """See `RecordStore.kinds`."""
        found: set[str] = set()
        cursor = "0"
        while True:
            try:
                answer = await self._script.command("SCAN", cursor, "MATCH", f"{_INDEX}*", "COUNT", _SCAN)
            except refusals.ResponseError as error:
                raise StoreAwayError(f"the store of records refuses to list its indexes: {error}") from error
            for name in answer[1]:
                kind, _, of = bytes(name).decode().removeprefix(_INDEX).partition("\0")
                if of == owner:
                    found.add(kind)
            cursor = bytes(answer[0]).decode()
            if cursor == "0":
                return sorted(found)

    async def usage(self, owner: str | None = None) -> Usage:
        """See `RecordStore.usage`."""
        fields = await self._call("usage", "tl:r:a" if owner is None else f"tl:r:o:{owner}")
        return Usage(int(next(fields)), int(next(fields)))

    async def tend(self) -> Tended:
        """See `RecordStore.tend`."""
        fields = await self._call("tend", _new_name(), self._bytes_max)
        is_done = next(fields) == b"1"
        parts = [field.decode() for field in fields]
        return Tended([RecordKey(*parts[at : at + 3]) for at in range(0, len(parts), 3)], is_done)

    async def check(self) -> str:
        """See `RecordStore.check`."""
        info = _info(await self._script.command("INFO"))
        found = [*_unsuited(info), *await self._losses(info)]
        least = int(info.get("maxmemory", "0"))
        policy = info.get("maxmemory_policy", "noeviction")
        if policy.startswith("allkeys-"):
            found.append(f"it evicts records when its memory is full (maxmemory-policy {policy}; use noeviction)")
        elif 0 < least < self._bytes_max:
            found.append(
                f"its maxmemory of {least} bytes is less than the {self._bytes_max} that records may take"
            )
        return "; ".join(found)

    async def close(self) -> None:
        """See `RecordStore.close`."""
        await self._script.close()

    async def _losses(self, info: dict[str, str]) -> list[str]:
        if info.get("aof_enabled") != "1":
            save = await self._setting("save")
            if save:
                return ["if it dies, it loses the records' changes since its last snapshot (appendonly no)"]
            if save is None:
                return ["if it dies, it loses records (appendonly no; whether it writes snapshots is unknown)"]
            return ["it keeps records in memory only (appendonly no, no snapshots)"]
        found = []
        if await self._setting("appendfsync") == "no":
            found.append("if its machine dies, it loses changes of half a minute (appendfsync no; use everysec)")
        if info.get("aof_last_write_status", "ok") != "ok":
            found.append("it cannot write its append-only file")
        return found

    async def _setting(self, name: str) -> str | None:
        """Return a setting of the server; None: we may not know."""
        try:
            answer = await self._script.command("CONFIG", "GET", name)
        except refusals.ResponseError:
            return None
        return bytes(answer[1]).decode() if len(answer) == 2 else None

    async def _call(self, *args: bytes | str | int) -> Iterator[bytes]:
        """Call an operation and return the fields of its answer after the first, which told of its success."""
        answer = await self._script.call(*args)
        fields = _fields(answer) if isinstance(answer, bytes) else chain(_fields(answer[0]), answer[1:])
        if (status := next(fields)) != b"ok":
            _refuse(status, fields)
        return fields

    async def _read(self, key: RecordKey, known: Sequence[bytes], *args: bytes | str | int) -> Reading:
        for _ in range(_READINGS_MAX):
            fields = await self._call(*args, *known)
            record = _record(key, fields, b"")
            leased_s = int(next(fields)) / 1e6
            record = record._replace(header=next(fields))
            owner_bytes, after, rest = int(next(fields)), next(fields), next(fields)
            stored = list(fields)
            while rest:
                try:
                    fields = await self._call("continue", *key, record.version, rest, *known)
                except _ChangedError:
                    break
                after, rest = next(fields), next(fields)
                stored += fields
            else:
                return Reading(record, after, _chain(record.head, stored), owner_bytes, leased_s)
        raise MissingError("there is no such record any more")


def script_body() -> str:
    """Return the script."""
    return _CONSTANTS + Path(__file__).with_name("records.lua").read_text(encoding="utf-8")


class _ChangedError(Exception):
    """A chain was removed while it was read."""


def _chain(head: bytes, stored: list[bytes]) -> list[Segment]:
    """Return segments, the oldest first, from what the script stores of them, the last one first."""
    segments = []
    for value in stored:
        segments.append(Segment(head, value[20:]))
        head = value[4:20]
    return segments[::-1]


def _change_args(key: RecordKey, change: Change) -> list[bytes | str]:
    args: list[bytes | str] = [change.header, repr(float(change.ttl)), change.base]
    for segment in chain_of(key.owner, change):
        args += segment
    return args


def _new_name() -> bytes:
    return os.urandom(8)


def _lease_us(seconds: float) -> int:
    return int(min(seconds, LEASE_S_MAX) * 1e6)


def _fields(answer: bytes) -> Iterator[bytes]:
    at, end = 0, len(answer)
    while at < end:
        start = at + 4
        at = start + int.from_bytes(answer[at:start], "big")
        yield answer[start:at]


def _record(key: RecordKey, fields: Iterator[bytes], header: bytes) -> Record:
    version, head = int(next(fields)), next(fields)
    created, used, ttl = int(next(fields)) / 1e6, int(next(fields)) / 1e6, float(next(fields))
    return Record(key, version, header, head, created, used, ttl)


def _refuse(status: bytes, fields: Iterator[bytes]) -> NoReturn:
    match status:
        case b"missing":
            raise MissingError("there is no such record")
        case b"exists":
            raise ExistsError("the record exists already")
        case b"busy":
            raise BusyError(int(next(fields)) / 1e6)
        case b"conflict":
            raise ConflictError(int(next(fields)))
        case b"base":
            raise BaseMissingError("there is no such segment")
        case b"changed":
            raise _ChangedError
        case b"quota":
            raise QuotaError(int(next(fields)), int(next(fields)))
    raise AssertionError(f"records.lua answered {status!r}")


def _info(answer: Any) -> dict[str, str]:
    lines = bytes(answer).decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _unsuited(info: dict[str, str]) -> list[str]:
    found = []
    version = tuple(int(part) for part in info.get("redis_version", "6.2").split(".")[:2])
    if version < _VERSION_MIN:
        found.append(f"it is Redis {info['redis_version']}; records need 6.2 or later")
    if info.get("cluster_enabled") == "1":
        found.append("it is a Redis Cluster; records need one server, with or without replicas")
    if info.get("role") == "slave":
        found.append("it is a replica, which takes no changes")
    return found
