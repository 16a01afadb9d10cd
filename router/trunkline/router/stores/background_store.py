"""Responses that are made in the background, as records: until they are done, and if they fail.

queued ─► in_progress ─► stored like every other response; this record is deleted, or has its events for an hour
               └─► failed, cancelled: this record stays

The first segment is the request. If it asked for a stream, the others are its events (`response_events.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec

from trunkline.kvstore.records import Change, ExistsError, MissingError, Reading, Record, RecordKey, RecordStore
from trunkline.router.stores.owned_records import KEPT_S, QuotaOf, no_quota
from trunkline.router.stores.task_store import TaskStore

EVENTS_S: Final = 3600.0
"""Time in seconds for which the events of a complete response are kept after they were last read."""
TRIED_S: Final = 24 * 3600.0
"""Time in seconds from its request after which a response fails that always gets "try again later" (429, 503)."""
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
    """The response object, as clients see it now; once it is stored elsewhere, only its status counts."""
    streams: bool = False
    """Whether its events are kept."""

    @property
    def is_stored(self) -> bool:
        """Whether the response is complete and stored like every other one."""
        return self.answer["status"] in ("completed", "incomplete")

    @property
    def is_over(self) -> bool:
        """Whether the response stays as it is."""
        return self.is_stored or self.answer["status"] in ("failed", "cancelled")


class BackgroundStore:
    """The responses of all tenants that are made in the background."""

    def __init__(self, records: RecordStore, tasks: TaskStore, quota_of: QuotaOf = no_quota) -> None:
        """`quota_of`: as in `owned_records.py`."""
        self._records = records
        self._tasks = tasks
        self._quota_of = quota_of

    async def create(self, owner: str, state: BackgroundState, segments: Sequence[bytes], model: str) -> None:
        """Store a request, and have it answered. A request that is stored already changes nothing.

        Args:
            segments: the request's body, and the first of its events if they are kept.
            model: the main name of its model.

        Raises:
            QuotaError: the owner's records have reached their quota.
        """
        task_id = state.answer["id"]
        change = Change(msgspec.msgpack.encode(state), KEPT_S, segments=segments)
        with suppress(ExistsError):
            await self._tasks.add(owner, task_id, model, state.created + TRIED_S)
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
        state = state_of((await self._records.get(RecordKey(KIND, owner, response_id), use=False)).record)
        if state.is_stored:
            raise MissingError("it is stored as one that is complete")
        return state

    async def follow(self, owner: str, response_id: str, known: bytes = b"") -> Reading:
        """Return a response's record, with the segments behind the one that is `known`.

        Raises:
            MissingError: the owner has no such response in the background.
        """
        return await self._records.get(RecordKey(KIND, owner, response_id), [known] if known else [])

    async def delete(self, owner: str, response_id: str) -> None:
        """Delete a response that was made in the background, and has failed or was cancelled.

        Raises:
            MissingError: the owner has no such response in the background.
            BusyError: a router makes it.
        """
        await self._records.delete(RecordKey(KIND, owner, response_id))
        await self._tasks.remove(response_id)


def change_of(state: BackgroundState, base: bytes, events: Sequence[bytes] = ()) -> Change:
    """Return a change that stores a state. `base`: the record's last segment, which `events` follow."""
    return Change(msgspec.msgpack.encode(state), EVENTS_S if state.is_stored else KEPT_S, base, events)


def state_of(record: Record) -> BackgroundState:
    """Return the state in a record's header."""
    return msgspec.msgpack.decode(record.header, type=BackgroundState)
