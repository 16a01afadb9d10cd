"""The lease of a task's record: only the router that holds it changes the record."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from trunkline.kvstore.records import Change, RecordError, RecordKey, RecordStore, Segment, StoreAwayError
from trunkline.router.stores.task_store import Task

LEASE_SECONDS: Final = 10.0
"""Duration of a lease in seconds: the time after which another router goes on if this one dies."""
_RENEWALS: Final = 3
"""Number of renewals during one lease, so that two of them may fail."""


class TaskLease:
    """The acquired record of a task. Call `close` at the end in any case."""

    def __init__(self, records: RecordStore, task: Task, key: RecordKey, token: str) -> None:
        """`token`: the lease's token, drawn anew for each lease."""
        self.task = task
        self.cancelled = asyncio.Event()
        """Set when the task is to be cancelled."""
        self.stopped = asyncio.Event()
        """Set when this router is to stop the work, because it is about to exit; another router will go on."""
        self.segments: list[Segment] = []
        """The segments of the record as it was acquired."""
        self._records = records
        self._key = key
        self._token = token
        self._renewal: asyncio.Task[None] | None = None

    async def open(self, on_lost: Callable[[], object]) -> None:
        """Acquire the record. `on_lost`: called if another router can have it.

        Raises:
            BusyError: another router has the lease.
            MissingError: there is no such record.
        """
        reading = await self._records.acquire(self._key, self._token, LEASE_SECONDS)
        self.record, self.segments = reading.record, reading.segments
        self._renewal = asyncio.create_task(self._renew(on_lost))

    async def put(self, change: Change) -> None:
        """Replace the record.

        Raises:
            RecordError: the lease was lost, or the store is away; it is unknown whether the record was replaced.
        """
        self.record = await self._records.put(self._key, self.record.version, change, lease=self._token)

    async def delete(self) -> None:
        """Delete the record.

        Raises:
            RecordError: the lease was lost, or the store is away.
        """
        await self._records.delete(self._key, lease=self._token)

    async def close(self) -> None:
        """End the lease."""
        if self._renewal is None:
            return
        self._renewal.cancel()
        try:
            await self._records.release(self._key, self._token)
        except RecordError:
            return  # the lease ends by itself

    async def _renew(self, on_lost: Callable[[], object]) -> None:
        while True:
            await asyncio.sleep(LEASE_SECONDS / _RENEWALS)
            try:
                if not await self._records.renew(self._key, self._token, LEASE_SECONDS):
                    on_lost()
                    return
            except StoreAwayError:
                continue  # `put` finds out whether another router has the record now
