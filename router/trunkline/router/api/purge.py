"""The purge of a tenant: all that is stored for it is deleted, with the KV that nothing else uses.

    for each kind ─► pages of the tenant's records ─► each is deleted, or counted as left if it is in use

Requests of the tenant that run meanwhile may store more, so its keys are revoked first. The ledgers of its limits
are no records of the tenant, and stay.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Final

import msgspec

from trunkline.kvstore.records import (
    PAGE_MAX,
    PASSING_KIND,
    BusyError,
    MissingError,
    Record,
    RecordKey,
    StoreAwayError,
)
from trunkline.router.api.next_route import delete_history
from trunkline.router.errors import ApiError, records_away
from trunkline.router.service import RouterService
from trunkline.router.stores.background_store import KIND as BACKGROUND
from trunkline.router.stores.batch_store import KIND as BATCHES
from trunkline.router.stores.file_store import KINDS as FILES
from trunkline.router.stores.history_kinds import CONVERSATIONS, RESPONSES, SESSIONS
from trunkline.router.stores.schema_records import is_schema
from trunkline.router.tenancy.auth import cache_salt, current_identity

CALL_S: Final = 10.0
"""Time in seconds after which a call ends though there is more to delete."""
_TASKS: Final = (BATCHES, BACKGROUND)


class Purged(msgspec.Struct, kw_only=True):
    """What one call has done."""

    deleted: dict[str, int] = {}
    """Number of records that were deleted, by kind. All schemas count as "schema"."""
    left: int = 0
    """Number of records that were not deleted because requests or tasks use them; these tasks end soon."""
    is_done: bool = True
    """Whether all records were looked at. If not, call again."""


async def purge(service: RouterService, seconds: float = CALL_S) -> Purged:
    """Delete what is stored for the owner that the request acts for. May be called again, at any time.

    Args:
        seconds: time after which it ends, done or not.

    Raises:
        ApiError: 503, the store of records does not answer; a part may have been deleted.
    """
    service.models.memory.forget(cache_salt(None))
    service.models.conversations.forget(cache_salt(None))
    done, end = Purged(), asyncio.get_running_loop().time() + seconds
    owner = current_identity().owner
    try:
        # Tasks go first, because they make the others; schemas last, because sessions need them to find their KV.
        known = (*_TASKS, PASSING_KIND, *(kind.name for kind in (SESSIONS, RESPONSES, CONVERSATIONS)), *FILES)
        schemas = [kind for kind in await service.records.kinds(owner) if is_schema(RecordKey(kind, owner, ""))]
        for kind in (*known, *schemas):
            if not await _purge_kind(service, kind, owner, done, end):
                done.is_done = False
                break
    except StoreAwayError as error:
        raise records_away(error) from None
    return done


async def _purge_kind(service: RouterService, kind: str, owner: str, done: Purged, end: float) -> bool:
    """Delete the records of a kind; return whether all were looked at before the loop time `end`."""
    page: list[Record] = []
    while True:
        page = await service.records.page(kind, owner, page[-1].key.id if page else "", PAGE_MAX)
        for record in page:
            if asyncio.get_running_loop().time() > end:
                return False
            try:
                is_deleted = await _delete(service, record.key)
            except BusyError:
                done.left += 1
                continue
            name = kind.partition(":")[0]
            done.deleted[name] = done.deleted.get(name, 0) + is_deleted
        if len(page) < PAGE_MAX:
            return True


async def _delete(service: RouterService, key: RecordKey) -> bool:
    """Delete a record; return whether it was still there.

    Raises:
        BusyError: it is in use.
        ApiError: 503, the store does not answer; so may `StoreAwayError`.
    """
    try:
        store = service.histories.of_kind(key.kind)
        if is_schema(key):
            await service.schemas.purge(key, [cache_salt(None)])
        elif store is None:
            await service.records.delete(key)
        else:
            await delete_history(service, store, key.id)
    except ApiError as error:
        if error.status == HTTPStatus.CONFLICT:
            raise BusyError(0.0) from None
        if error.status == HTTPStatus.NOT_FOUND:
            return False
        raise
    except MissingError:
        return False
    except BusyError:
        if key.kind in _TASKS:
            await service.tasks.cancel(key.id)
        raise
    if key.kind in _TASKS:
        await service.tasks.remove(key.id)
    return True
