"""Responses that are made in the background, as records: until they are done, and if they fail.

queued ─► in_progress ─► stored like every other response; this record is deleted
               └─► failed, cancelled: this record stays
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

import msgspec

from trunkline.kvstore.records import Change, ExistsError, Record, RecordKey, RecordStore
from trunkline.router.stores.owned_records import KEPT_S, QuotaOf, no_quota
from trunkline.router.stores.task_store import TaskStore

KIND: Final = "background"
PREFIX: Final = "resp_"


class BackgroundState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A response in the background: the header of its record, in MessagePack. New fields need a default."""

    tenant: str
    """Tenant whose limits the request counts against."""
    name: bytes
    """Name of the request (`request_context.py`), from which its id follows."""
    created: int
    """Unix time in seconds."""
    answer: dict[str, Any]
    """The response object, as clients see it now."""

    @property
    def is_over(self) -> bool:
        """Whether the response stays as it is."""
        return self.answer["status"] in ("failed", "cancelled")


class BackgroundStore:
    """The responses of all tenants that are made in the background."""

    def __init__(self, records: RecordStore, tasks: TaskStore, quota_of: QuotaOf = no_quota) -> None:
        """`quota_of`: as in `owned_records.py`."""
        self._records = records
        self._tasks = tasks
        self._quota_of = quota_of

    async def create(self, owner: str, state: BackgroundState, body: bytes) -> None:
        """Store a request, and have it answered. A request that is stored already changes nothing.

        Raises:
            QuotaError: the owner's records have reached their quota.
        """
        task_id = state.answer["id"]
        change = Change(msgspec.msgpack.encode(state), KEPT_S, segments=[body])
        with suppress(ExistsError):
            await self._tasks.add(owner, task_id)
        try:
            key = RecordKey(KIND, owner, task_id)
            await self._records.create(key, change, owner_bytes_max=self._quota_of(owner))
        except ExistsError:
            return
        except Exception:
            await self._tasks.remove(task_id)
            raise
        self._tasks.changed.set()

    async def get(self, owner: str, response_id: str) -> BackgroundState:
        """Return a response that is not stored as one that is complete.

        Raises:
            MissingError: the owner has no such response in the background.
        """
        return state_of((await self._records.get(RecordKey(KIND, owner, response_id), use=False)).record)

    async def delete(self, owner: str, response_id: str) -> None:
        """Delete a response that was made in the background, and has failed or was cancelled.

        Raises:
            MissingError: the owner has no such response in the background.
            BusyError: a router makes it.
        """
        await self._records.delete(RecordKey(KIND, owner, response_id))
        await self._tasks.remove(response_id)


def change_of(state: BackgroundState, base: bytes) -> Change:
    """Return a change that stores a state. `base`: the segment with the request."""
    return Change(msgspec.msgpack.encode(state), KEPT_S, base)


def state_of(record: Record) -> BackgroundState:
    """Return the state in a record's header."""
    return msgspec.msgpack.decode(record.header, type=BackgroundState)
