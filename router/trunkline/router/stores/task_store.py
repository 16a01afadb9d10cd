"""Tasks: batches and background responses, which outlive the requests that asked for them.

    task record (owner "", so that one page finds all) ─► whose it is; its model; whether it is to be cancelled
    record of the batch or response ─► what is to be done, what is done; its lease names the router that does it

A router looks for tasks whose record no router has leased, and does them (`tasks/runner.py`). If it dies, the
lease ends, and another router goes on from what is stored. The task's record is made first and deleted last,
so no batch is forgotten.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

import msgspec

from trunkline.kvstore.records import (
    PAGE_MAX,
    Change,
    ConflictError,
    MissingError,
    RecordKey,
    RecordStore,
)
from trunkline.router.stores.owned_records import KEPT_S

_KIND: Final = "task"


class _Header(msgspec.Struct, omit_defaults=True):
    """The header of a task's record, in MessagePack."""

    owner: str
    is_cancelled: bool = False
    model: str = ""
    until: float = 0.0


class Task(msgspec.Struct, frozen=True):
    """A batch or a background response that is not over."""

    id: str
    """Id of the batch or response, whose prefix tells which it is."""
    owner: str
    is_cancelled: bool
    """Whether its client wants it to be cancelled."""
    created: float
    """Unix time in seconds."""
    model: str
    """Main name of the model that it needs; "": an older version has stored the task."""
    until: float
    """Unix time in seconds from which on the task has failed, if it is not over."""


class TaskStore:
    """The tasks of all tenants."""

    def __init__(self, records: RecordStore) -> None:
        self._records = records
        self.changed = asyncio.Event()
        """Set whenever this router should look at the tasks at once."""

    async def add(self, owner: str, task_id: str, model: str, until: float) -> None:
        """Store a task; then the caller stores its record, and sets `changed`. `model`, `until`: as in `Task`."""
        header = msgspec.msgpack.encode(_Header(owner, model=model, until=until))
        await self._records.create(_key(task_id), Change(header, KEPT_S))

    async def is_cancelled(self, task_id: str) -> bool:
        """Return whether a task is to be cancelled and is not over."""
        with suppress(MissingError):
            reading = await self._records.get(_key(task_id), use=False)
            return msgspec.msgpack.decode(reading.record.header, type=_Header).is_cancelled
        return False

    async def cancel(self, task_id: str) -> bool:
        """Ask the router that does a task to cancel it. Return whether the task was not over yet."""
        while True:
            try:
                record = (await self._records.get(_key(task_id), use=False)).record
                header = msgspec.msgpack.decode(record.header, type=_Header)
                header.is_cancelled = True
                change = Change(msgspec.msgpack.encode(header), KEPT_S)
                await self._records.put(_key(task_id), record.version, change)
            except ConflictError:
                continue  # another request cancels it, too
            except MissingError:
                return False
            self.changed.set()
            return True

    async def all(self) -> list[Task]:
        """Return all tasks that are not over."""
        found: list[Task] = []
        after = ""
        while True:
            page = await self._records.page(_KIND, "", after, PAGE_MAX, headers=True)
            for record in page:
                header = msgspec.msgpack.decode(record.header, type=_Header)
                owner, is_cancelled = header.owner, header.is_cancelled
                found.append(Task(record.key.id, owner, is_cancelled, record.created, header.model, header.until))
            if len(page) < PAGE_MAX:
                return found
            after = page[-1].key.id

    async def remove(self, task_id: str) -> None:
        """Forget a task that is over. May be called again."""
        with suppress(MissingError):
            await self._records.delete(_key(task_id))


def _key(task_id: str) -> RecordKey:
    return RecordKey(_KIND, "", task_id)
