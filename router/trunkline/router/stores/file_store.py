"""Files of tenants as records: inputs and results of batches, and whatever else clients upload.

    file record ─► header: name, purpose, size, and the ids of its parts
    part records ─► one segment of at most `PART_BYTES` each

Parts are records of their own, so that a large file is written and read part by part. They are written first and
the file last: a file that exists is whole. Parts of a file that was never finished expire.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import msgspec

from trunkline.kvstore.records import Change, MissingError, Record, RecordKey, RecordStore
from trunkline.router.request_context import draw_hex
from trunkline.router.stores.owned_records import KEPT_S, QuotaOf, check_id, draw_id, no_quota

PART_BYTES: Final = 4 << 20
"""Largest size in bytes of a part."""
_KIND: Final = "file"
_PART_KIND: Final = "file-part"
KINDS: Final = (_KIND, _PART_KIND)
"""The kinds of records of files, in the order in which they can be deleted."""
PREFIX: Final = "file-"
_PART_TTL_S: Final = KEPT_S + 24 * 3600.0
"""Parts are used a little before or after their file, and must not expire before it."""
_PART_LATER_S: Final = 3600.0
"""Time in seconds by which the parts of an expired file outlive it, so that requests which read it can end."""


class FileInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A file without its content: the header of its record, in MessagePack. New fields need a default."""

    name: str
    purpose: str
    bytes: int
    parts: list[str]
    """Ids of the parts, in their order."""
    ttl: float = 0.0
    """Time in seconds from its creation after which the file is deleted; 0: it is kept while it is used."""


class StoredFile(msgspec.Struct, frozen=True):
    """A file as it is stored."""

    id: str
    info: FileInfo
    created: float
    """Unix time in seconds."""
    expires: float
    """Unix time in seconds at which the file is deleted if it is not used before."""


class FileStore:
    """The files of all tenants."""

    def __init__(self, records: RecordStore, quota_of: QuotaOf = no_quota) -> None:
        """`quota_of`: as in `owned_records.py`."""
        self._records = records
        self._quota_of = quota_of

    def draw_id(self) -> str:
        """Return the id for a new file."""
        return draw_id(PREFIX)

    async def add_part(self, owner: str, file_id: str, content: bytes, *, is_bounded: bool = True) -> str:
        """Store a part of a file that is being made, and return the part's id.

        Args:
            content: at most `PART_BYTES`.
            is_bounded: whether the owner's quota counts.

        Raises:
            QuotaError: the owner's records have reached their quota.
        """
        part = f"{file_id}/{draw_hex('part', 8)}"
        change = Change(b"", _PART_TTL_S, segments=[content])
        quota = self._quota_of(owner) if is_bounded else 0
        await self._records.create(RecordKey(_PART_KIND, owner, part), change, owner_bytes_max=quota)
        return part

    async def create(self, owner: str, file_id: str, info: FileInfo) -> StoredFile:
        """Make a file of parts that are stored.

        Raises:
            ExistsError: there is one already.
        """
        if info.ttl:
            for part in info.parts:
                await self._expire(RecordKey(_PART_KIND, owner, part), info.ttl + _PART_LATER_S)
        change = Change(msgspec.msgpack.encode(info), info.ttl or KEPT_S)
        return _stored(await self._records.create(RecordKey(_KIND, owner, file_id), change))

    async def _expire(self, key: RecordKey, seconds: float) -> None:
        """Let a part expire after a time."""
        record = (await self._records.get(key)).record
        await self._records.put(key, record.version, Change(b"", seconds, record.head))

    async def get(self, owner: str, file_id: str) -> StoredFile:
        """Return a file.

        Raises:
            MissingError: the owner has no such file.
        """
        key = RecordKey(_KIND, owner, check_id(file_id, PREFIX))
        return _stored((await self._records.get(key, use=False)).record)

    async def content(self, owner: str, file: StoredFile) -> AsyncIterator[bytes]:
        """Yield a file's content, part by part. This counts as use.

        Raises:
            MissingError: the file is being deleted.
        """
        if not file.info.ttl:
            await self._records.get(RecordKey(_KIND, owner, file.id))
        for part in file.info.parts:
            reading = await self._records.get(RecordKey(_PART_KIND, owner, part), use=not file.info.ttl)
            yield reading.segments[0].content

    async def page(self, owner: str, after: str, limit: int) -> list[StoredFile]:
        """Return up to `limit` files of an owner behind the one with the id `after`, the newest first."""
        found = await self._records.page(_KIND, owner, after, limit, headers=True)
        return [_stored(record) for record in found]

    async def delete(self, owner: str, file_id: str) -> None:
        """Delete a file with its parts.

        Raises:
            MissingError: the owner has no such file.
        """
        file = await self.get(owner, file_id)
        await self._records.delete(RecordKey(_KIND, owner, file_id))
        await self.drop_parts(owner, file.info.parts)

    async def drop_parts(self, owner: str, parts: list[str]) -> None:
        """Delete parts that no file has (any more)."""
        for part in parts:
            try:
                await self._records.delete(RecordKey(_PART_KIND, owner, part))
            except MissingError:
                continue


def _stored(record: Record) -> StoredFile:
    info = msgspec.msgpack.decode(record.header, type=FileInfo)
    begin = record.created if info.ttl else record.used
    return StoredFile(record.key.id, info, record.created, begin + (info.ttl or KEPT_S))
