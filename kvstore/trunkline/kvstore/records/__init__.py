"""The record store: sessions, schemas and kept answers, shared by routers."""

from __future__ import annotations

from typing import Final

from trunkline.kvstore.records.sqlite_store import SqliteRecords
from trunkline.kvstore.records.store import (
    HEADER_BYTES_MAX,
    LEASE_S_MAX,
    NAME_BYTES,
    PAGE_MAX,
    PASSING_KIND,
    RECORD_BYTES,
    SEGMENT_BYTES,
    SEGMENT_BYTES_MAX,
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
    Segment,
    StoreAwayError,
    Tended,
    Usage,
    chain_of,
    segment_name,
)
from trunkline.kvstore.remote_stores import RemoteUrlError, find_store

__all__ = [
    "HEADER_BYTES_MAX",
    "LEASE_S_MAX",
    "NAME_BYTES",
    "PAGE_MAX",
    "PASSING_KIND",
    "RECORD_BYTES",
    "SEGMENT_BYTES",
    "SEGMENT_BYTES_MAX",
    "BaseMissingError",
    "BusyError",
    "Change",
    "ConflictError",
    "ExistsError",
    "MissingError",
    "QuotaError",
    "Reading",
    "Record",
    "RecordError",
    "RecordKey",
    "RecordStore",
    "Segment",
    "StoreAwayError",
    "Tended",
    "Usage",
    "chain_of",
    "open_records",
    "problem_of_records",
    "segment_name",
]

_SQLITE: Final = "sqlite:"


def open_records(url: str, *, bytes_max: int = 0, patience_s: float = 10.0) -> RecordStore:
    """Return the store that a URL names. It connects at the first operation.

    Args:
        url: `sqlite:PATH`, `sqlite::memory:` for a store in this process's memory, or a Redis URL as the remote
            tier takes them.
        bytes_max: Size in bytes that all records together may have; if they have more, `tend` deletes those that
            were not used for the longest time. 0: there is no limit.
        patience_s: Time in seconds for which an operation is tried before it raises `StoreAwayError`.

    Raises:
        ValueError: The URL has another form; the message does not contain it, because it may hold a password.
    """
    if problem := problem_of_records(url):
        raise ValueError(problem)
    if url.startswith(_SQLITE):
        return SqliteRecords(url.removeprefix(_SQLITE), bytes_max=bytes_max, patience_s=patience_s)
    from trunkline.kvstore.records.redis_store import RedisRecords  # noqa: PLC0415

    return RedisRecords(url, bytes_max=bytes_max, patience_s=patience_s)


def problem_of_records(url: str) -> str:
    """Return what is wrong with the URL of a record store, as a sentence; "": nothing."""
    if url.startswith(_SQLITE):
        path = url.removeprefix(_SQLITE)
        if not path or "\0" in path or path.endswith("/"):
            return "After sqlite: the URL names a file, such as sqlite:/var/lib/trunkline/records.sqlite."
        return ""
    try:
        find_store(url, for_records=True)
    except RemoteUrlError as error:
        return f"The URL of a record store is sqlite:PATH or that of a Redis server; {error}."
    return ""
