"""The router's record store: measures each operation and knows whether the store answers."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import structlog

from trunkline.kvstore.records import (
    Change,
    Reading,
    Record,
    RecordError,
    RecordKey,
    RecordStore,
    StoreAwayError,
    Tended,
    Usage,
)
from trunkline.runtime.process import RareLog

_T = TypeVar("_T")
_log = structlog.get_logger("trunkline.router.stores.metered_records")
_rare = RareLog("trunkline.router.stores.metered_records")


class MeteredRecords:
    """A record store in which each operation is measured."""

    def __init__(self, store: RecordStore, on_operation: Callable[[str, float, RecordError | None], None]) -> None:
        """`on_operation`: called after each operation with its name, its duration in seconds, and the error if it
        was not carried out."""
        self.away = ""
        """Why the store did not answer the last operation; "": it answered."""
        self._store = store
        self._on_operation = on_operation

    async def create(self, key: RecordKey, change: Change, *, owner_bytes_max: int = 0) -> Record:
        """See `RecordStore`; so do the other methods."""
        return await self._measure("create", self._store.create(key, change, owner_bytes_max=owner_bytes_max))

    async def get(self, key: RecordKey, known: Sequence[bytes] = (), *, use: bool = True) -> Reading:
        return await self._measure("get", self._store.get(key, known, use=use))

    async def acquire(self, key: RecordKey, token: str, seconds: float, known: Sequence[bytes] = ()) -> Reading:
        return await self._measure("acquire", self._store.acquire(key, token, seconds, known))

    async def renew(self, key: RecordKey, token: str, seconds: float) -> bool:
        return await self._measure("renew", self._store.renew(key, token, seconds))

    async def release(self, key: RecordKey, token: str) -> None:
        await self._measure("release", self._store.release(key, token))

    async def put(
        self, key: RecordKey, version: int, change: Change, *, lease: str = "", release: bool = False
    ) -> Record:
        return await self._measure("put", self._store.put(key, version, change, lease=lease, release=release))

    async def delete(self, key: RecordKey, *, lease: str = "") -> None:
        await self._measure("delete", self._store.delete(key, lease=lease))

    async def page(
        self, kind: str, owner: str, after: str = "", limit: int = 100, *, prefix: str = "", headers: bool = False
    ) -> list[Record]:
        found = self._store.page(kind, owner, after, limit, prefix=prefix, headers=headers)
        return await self._measure("page", found)

    async def kinds(self, owner: str) -> list[str]:
        return await self._measure("kinds", self._store.kinds(owner))

    async def usage(self, owner: str | None = None) -> Usage:
        return await self._measure("usage", self._store.usage(owner))

    async def tend(self) -> Tended:
        return await self._measure("tend", self._store.tend())

    async def check(self) -> str:
        return await self._measure("check", self._store.check())

    async def close(self) -> None:
        await self._store.close()

    def _note(self, away: str) -> None:
        """Note whether the store answers; the log tells once of each outage."""
        before, self.away = self.away, away
        if away and not before:
            _rare.warning("records_away", time.monotonic(), reason=away)
        elif before and not away:
            _log.info("records_answer_again")

    async def _measure(self, operation: str, work: Awaitable[_T]) -> _T:
        began = time.perf_counter()
        failure: RecordError | None = None
        try:
            result = await work
            self._note("")
            return result
        except RecordError as error:
            failure = error
            self._note(str(error) if isinstance(error, StoreAwayError) else "")
            raise
        finally:
            self._on_operation(operation, time.perf_counter() - began, failure)
