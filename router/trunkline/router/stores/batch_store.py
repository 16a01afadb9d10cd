"""Batches as records: many requests in a file, whose answers become another file (`tasks/batch_run.py`).

    batch record ─► header: `BatchState`
       └────► head: portion 2 ─► portion 1     answers that are not yet in a part of the result files

A portion of answers is stored together with the state that counts them, in one change: each answer is kept exactly
once, whichever router dies. When the portions have the size of a part of a file, they become one.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from trunkline.kvstore.records import Change, Record, RecordKey, RecordStore, Segment
from trunkline.router.stores.owned_records import KEPT_S, QuotaOf, check_id, draw_id, no_quota
from trunkline.router.stores.task_store import TaskStore

KIND: Final = "batch"
PREFIX: Final = "batch_"
Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
OVER: Final = ("failed", "completed", "expired", "cancelled")
"""The states in which a batch stays."""


class Problem(msgspec.Struct, omit_defaults=True):
    """An error in the input of a batch."""

    code: str
    message: str
    line: int | None = None
    """Line of the input file, from 1."""
    param: str | None = None


class ResultFile(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A file of answers, which exists when the batch is over."""

    id: str
    parts: list[str] = []
    bytes: int = 0
    """Size of the parts."""


class BatchState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A batch: the header of its record, in MessagePack. New fields need a default."""

    tenant: str
    """Tenant whose limits the requests count against."""
    endpoint: str
    input_file_id: str
    window: str
    """Time within which the batch is to be done, such as "24h"."""
    expires: float
    """Unix time in seconds at which the batch ends, done or not."""
    outputs: ResultFile
    errors: ResultFile
    metadata: dict[str, str] | None = None
    result_ttl: float = 0.0
    """Time in seconds for which the result files are kept; 0: while they are used."""
    status: Status = "validating"
    ending: Status | None = None
    """The status in which the batch ends, once that is known."""
    times: dict[str, int] = {}
    """Unix times in seconds at which a status began, by the status."""
    total: int = 0
    completed: int = 0
    failed: int = 0
    unanswered: int = 0
    """Those of the failed requests for which there was no time before the batch was cancelled or expired."""
    done: bytes = b""
    """One bit for each line of the input: whether its answer is stored."""
    problems: list[Problem] = []

    @property
    def is_over(self) -> bool:
        """Whether the batch stays as it is."""
        return self.status in OVER


class Portion(msgspec.Struct, array_like=True):
    """Answers that were stored together, as lines of the result files; a segment, in MessagePack."""

    outputs: bytes = b""
    errors: bytes = b""


class StoredBatch(msgspec.Struct, frozen=True):
    """A batch as it is stored."""

    id: str
    created: float
    """Unix time in seconds."""
    state: BatchState


class BatchStore:
    """The batches of all tenants."""

    def __init__(self, records: RecordStore, tasks: TaskStore, quota_of: QuotaOf = no_quota) -> None:
        """`quota_of`: as in `owned_records.py`."""
        self._records = records
        self._tasks = tasks
        self._quota_of = quota_of

    async def create(self, owner: str, state: BatchState, model: str) -> StoredBatch:
        """Store a batch, and have it done.

        Args:
            model: the main name of the model that requests mean that name none.

        Raises:
            QuotaError: the owner's records have reached their quota.
        """
        batch_id = draw_id(PREFIX)
        await self._tasks.add(owner, batch_id, model, state.expires)
        try:
            key = RecordKey(KIND, owner, batch_id)
            record = await self._records.create(key, change_of(state), owner_bytes_max=self._quota_of(owner))
        except Exception:
            await self._tasks.remove(batch_id)
            raise
        self._tasks.changed.set()
        return _stored(record)

    async def get(self, owner: str, batch_id: str) -> StoredBatch:
        """Return a batch. This counts as use.

        Raises:
            MissingError: the owner has no such batch.
        """
        key = RecordKey(KIND, owner, check_id(batch_id, PREFIX))
        stored = _stored((await self._records.get(key)).record)
        return await self._with_cancelling(stored)

    async def delete(self, owner: str, batch_id: str) -> None:
        """Delete a batch that is over. Its files stay.

        Raises:
            MissingError: the owner has no such batch.
        """
        await self._records.delete(RecordKey(KIND, owner, check_id(batch_id, PREFIX)))

    async def page(self, owner: str, after: str, limit: int) -> list[StoredBatch]:
        """Return up to `limit` batches of an owner behind the one with the id `after`, the newest first."""
        found = await self._records.page(KIND, owner, after, limit, headers=True)
        return [await self._with_cancelling(_stored(record)) for record in found]

    async def _with_cancelling(self, stored: StoredBatch) -> StoredBatch:
        """Return a batch with status "cancelling" if its router has yet to see that it is to be cancelled."""
        state = stored.state
        if not state.is_over and state.status != "cancelling" and await self._tasks.is_cancelled(stored.id):
            state.status = "cancelling"
        return stored


def change_of(state: BatchState, base: bytes = b"", portions: list[Portion] | None = None) -> Change:
    """Return a change that stores a batch and more portions. `base`: the segment that they follow."""
    segments = [msgspec.msgpack.encode(portion) for portion in portions or ()]
    return Change(msgspec.msgpack.encode(state), KEPT_S, base, segments)


def state_of(record: Record) -> BatchState:
    """Return the batch in a record's header."""
    return msgspec.msgpack.decode(record.header, type=BatchState)


def joined(segments: list[Segment]) -> Portion:
    """Return the portions in segments as one."""
    found = [msgspec.msgpack.decode(segment.content, type=Portion) for segment in segments]
    return Portion(b"".join(each.outputs for each in found), b"".join(each.errors for each in found))


def _stored(record: Record) -> StoredBatch:
    return StoredBatch(record.key.id, record.created, state_of(record))
