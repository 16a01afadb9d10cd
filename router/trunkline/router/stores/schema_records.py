"""Schemas as records: names, headers and segments (`schema_store.py`, `kvstore/records/`).

record ─► header: the definition without the source, in MessagePack
   └────► head: the only segment, the source in UTF-8
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from trunkline.kvstore.records import (
    SEGMENT_BYTES_MAX,
    Change,
    ExistsError,
    MissingError,
    QuotaError,
    Reading,
    Record,
    RecordKey,
    RecordStore,
    StoreAwayError,
)
from trunkline.router import pml
from trunkline.router.errors import ApiError, bad_value, not_found, records_away, records_full, unavailable
from trunkline.router.pml.tree import NAME_CHARACTERS_MAX
from trunkline.router.tenancy.auth import current_identity

_KIND: Final = "schema"
Scope = Literal["ancestors", "self"]
UNKNOWN: Final = "E_SCHEMA_UNKNOWN"


class Definition(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A schema. Its record's header is the definition without the source, in MessagePack. New fields need a
    default: old records lack them."""

    model: str
    source: str = ""
    """The source as the client sent it. In headers of old records; since then it is a segment."""
    form: Literal["xml", "json"] = "xml"
    """The format of the source."""
    scope: Scope = "ancestors"
    relocate: bool = True
    version: int = 1
    """Counts the sources stored under this name."""
    pin: bool = False
    ttl: float = 0.0
    """Seconds without use after which the schema is deleted; 0: never."""
    request: bytes = b""
    """Name of the request that made this version (`request_context.py`); sent again, it makes no new version."""

    def parse(self) -> pml.SchemaDocument:
        """Parse the source.

        Raises:
            PmlError: The source is wrong.
        """
        if self.form == "xml":
            return pml.parse_schema(self.source)
        return pml.schema_from_json(msgspec.json.decode(self.source))

    def compiles_like(self, other: Definition) -> bool:
        """Return whether both definitions compile to the same schema."""
        return (self.model, self.source, self.form, self.scope) == (
            other.model,
            other.source,
            other.form,
            other.scope,
        )


def key_of(name: str, salt: bytes) -> RecordKey:
    """Return the key of a schema of the request's owner (`auth.py`). It holds a hash of the salt, not the salt.

    Raises:
        ApiError: 404, no schema can have this name.
    """
    if len(name) > NAME_CHARACTERS_MAX:
        raise schema_unknown(name)
    kind = f"{_KIND}:{hashlib.blake2b(salt, digest_size=16).hexdigest()}" if salt else _KIND
    return RecordKey(kind, current_identity().owner, name)


async def take_over(records: RecordStore, key: RecordKey, salt: bytes) -> Reading:
    """Move a tenant's schema that an earlier version stored to its key; return it.

    Raises:
        MissingError: there is none.
    """
    old = _old_key_of(key, salt)
    if old is None:
        raise MissingError
    record = (await records.get(old)).record
    with suppress(ExistsError):  # another router has just done it
        await records.create(key, change_of(unpack(record)))
    await delete_old(records, key, salt)
    return await records.get(key)


async def delete_old(records: RecordStore, key: RecordKey, salt: bytes) -> bool:
    """Delete a tenant's schema that an earlier version stored; return whether there was one."""
    old = _old_key_of(key, salt)
    if old is None:
        return False
    try:
        await records.delete(old)
    except MissingError:
        return False
    return True


def _old_key_of(key: RecordKey, salt: bytes) -> RecordKey | None:
    """Return the key under which records that were taken over from an earlier version have a tenant's schema: the
    tenant and the salt were hashed together, so the key does not tell them. None: there can be none."""
    if not key.owner:
        return None
    said = b"\0" + key.owner.encode() + b"\0" + salt
    return RecordKey(f"{_KIND}:{hashlib.blake2b(said, digest_size=16).hexdigest()}", "", key.id)


def is_schema(key: RecordKey) -> bool:
    """Return whether a key is one of a schema."""
    return key.kind.split(":")[0] == _KIND


def pin_name_of(key: RecordKey) -> str:
    """Return the name under which a schema's modules are pinned. No kind and no schema's name has a slash."""
    return "/".join(key)


@contextmanager
def store_errors(name: str) -> Iterator[None]:
    """Turn the record store's errors about a schema into answers."""
    try:
        yield
    except MissingError:
        raise schema_unknown(name) from None
    except QuotaError as error:
        raise records_full(error.used, error.limit) from None
    except StoreAwayError as error:
        raise records_away(error) from None


def change_of(definition: Definition, head: bytes = b"") -> Change:
    """Return a change that stores a definition. `head`: the segment with the present source, which stays if the
    definition has none."""
    header, source = msgspec.msgpack.encode(replace(definition, source="")), definition.source.encode()
    if len(source) > SEGMENT_BYTES_MAX:
        raise bad_value("json", f"the schema has {len(source)} bytes; {SEGMENT_BYTES_MAX} are kept at most")
    return Change(header, definition.ttl, segments=[source]) if source else Change(header, definition.ttl, head)


def definition_of(reading: Reading, known: Definition | None) -> Definition:
    """Return a schema's definition with its source. `known`: the definition as it was; its source was not
    read again if it is still the same."""
    definition = unpack(reading.record)
    if reading.segments:
        definition.source = b"".join(segment.content for segment in reading.segments).decode()
    elif reading.record.head and known is not None:
        definition.source = known.source
    return definition


def unpack(record: Record) -> Definition:
    """Return the definition in a record's header, without its source unless the record is an old one.

    Raises:
        ApiError: 503, it cannot be read.
    """
    try:
        return msgspec.msgpack.decode(record.header, type=Definition)
    except msgspec.DecodeError as error:
        raise unavailable(f"schema {record.key.id!r} cannot be read: {error}", code="schema_unreadable") from None


def schema_unknown(name: str) -> ApiError:
    """Return the error 404 for a schema that does not exist."""
    return not_found(
        "schema",
        f"schema {name[:80]!r} does not exist (any more) with this `cache_salt`; see GET /v1/schemas",
        code=UNKNOWN,
    )
