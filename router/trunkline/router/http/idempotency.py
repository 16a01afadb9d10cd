"""Requests that come again with the same `Idempotency-Key`: one of them is answered, the others get its answer.

    claim ──► the key is new: a record is made and leased ───► Claim ──► finish: the answer is in the record
      ├─────► its request was answered: the record's answer      └─────► close: the next request may try
      ├─────► its request is being answered: wait ──► its answer; or Claim, if its router died and the lease ended
      └─────► it was used for another request: 422

The records are in the store that all routers share (`kvstore/records/`), so it does not matter which router a
request comes to, nor whether the first router still runs. A repeated request that is generated again gets the same
answer: everything drawn at random follows from the tenant, the key and the request (`request_context.py`). So a
request whose record cannot be had is answered without one.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import time
from collections.abc import Awaitable, Coroutine
from contextlib import suppress
from typing import Any, Final, TypeVar

import msgspec
import structlog

from trunkline.kvstore.records import (
    PASSING_KIND,
    BusyError,
    Change,
    ConflictError,
    ExistsError,
    MissingError,
    Record,
    RecordError,
    RecordKey,
    RecordStore,
    StoreAwayError,
)
from trunkline.router.errors import ApiError, in_conflict
from trunkline.router.stores.owned_records import QuotaOf, no_quota
from trunkline.router.tenancy.auth import current_identity

WAIT_SECONDS: Final = 60.0
"""Longest time in seconds that a request waits for the answer to an earlier request with the same key."""
LEASE_SECONDS: Final = 5.0
"""Time in seconds after which a lease ends that was not renewed, because its router has died."""
_RENEW_SECONDS: Final = 1.5
_CALL_SECONDS: Final = 2.0
"""Time limit in seconds of an operation on a record. It is short because without the store's answer the request
goes on."""
_PAUSES: Final = (0.02, 0.5)
"""The first and the longest pause, in seconds, between two requests for a record that another request holds."""
_KEY: Final = re.compile(r"[\x20-\x7e]{1,255}")
_log = structlog.get_logger("trunkline.router.http.idempotency")
_T = TypeVar("_T")


class Result(msgspec.Struct, frozen=True, array_like=True):
    """The header of a record: digest of a request, and its answer. MessagePack; new fields need defaults."""

    request: bytes
    """Digest of the request."""
    created: int
    """Unix time in seconds of the first try."""
    status: int = 0
    """Status of the answer; 0: there is no answer yet."""
    content_type: str = ""
    body: bytes = b""
    """The answer's body; of a stream all its events."""


class RequestName(msgspec.Struct, frozen=True):
    """Identifies a request: two requests with equal names are the same one."""

    record: str
    """Id of the record: a digest of tenant and key, in hexadecimal."""
    request: bytes
    """Digest of all that the answer depends on."""

    @property
    def bytes(self) -> bytes:
        """Both digests, one after the other."""
        return bytes.fromhex(self.record) + self.request


def name_request(tenant: str, key: str, *asked: bytes) -> RequestName:
    """Return the name of a request. `asked`: everything that its answer depends on.

    Raises:
        ApiError: 400, the key is not valid.
    """
    if not _KEY.fullmatch(key):
        raise ApiError(
            400,
            "header Idempotency-Key: a key has 1 to 255 printable ASCII characters",
            param="Idempotency-Key",
            code="invalid_idempotency_key",
        )
    return RequestName(_digest(tenant.encode(), key.encode()).hex(), _digest(*asked))


def _digest(*parts: bytes) -> bytes:
    hashed = hashlib.blake2b(digest_size=16)
    for part in parts:
        hashed.update(len(part).to_bytes(8, "little"))
        hashed.update(part)
    return hashed.digest()


class IdempotencyStore:
    """The records of all idempotency keys."""

    def __init__(
        self,
        records: RecordStore,
        ttl_seconds: float,
        *,
        quota_of: QuotaOf = no_quota,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        """
        Args:
            ttl_seconds: how long an answer is kept after it was last used.
            quota_of: as in `owned_records.py`; from there on no answers are kept for an owner.
            wait_seconds: see `WAIT_SECONDS`.
        """
        self.records = records
        self.ttl_seconds = ttl_seconds
        self.quota_of = quota_of
        self._wait_seconds = wait_seconds
        self._background: set[asyncio.Task[None]] = set()

    async def claim(self, name: RequestName) -> Claim | Result:
        """Return the right to answer a request, or the answer to an earlier request with the same name.

        Raises:
            ApiError: 422, the key was used for another request; 409, the earlier request still runs after
                `wait_seconds`.
            RecordError: the record is not available.
        """
        claim = Claim(self, RecordKey(PASSING_KIND, current_identity().owner, name.record), name)
        try:
            result = await self._taken(claim)
        except BaseException:  # also a cancellation, when the client leaves
            claim.close()
            raise
        if result.status:
            claim.close()
            return result
        claim.begin()
        return claim

    async def _taken(self, claim: Claim) -> Result:
        """Take the key's record as soon as no other request holds it; return its header."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._wait_seconds
        pause, longest = _PAUSES
        is_first = True
        while True:
            try:
                return await claim.take(is_new=is_first)
            except BusyError:
                await claim.check_holder()
            if loop.time() >= deadline:
                raise _in_use(self._wait_seconds)
            await asyncio.sleep(pause)
            pause, is_first = min(1.5 * pause, longest), False

    def in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run an operation whose result does not matter."""

        async def run() -> None:
            with suppress(RecordError):
                await work

        task = asyncio.create_task(run())
        self._background.add(task)
        task.add_done_callback(self._background.discard)


class Claim:
    """A request's right to store the answer for its key, held as a lease of the key's record. Always call `close`
    in the end."""

    def __init__(self, store: IdempotencyStore, key: RecordKey, name: RequestName) -> None:
        self._store = store
        self._records = store.records
        self._key = key
        self._name = name
        self._token = secrets.token_hex(8)
        self._asked = Result(name.request, int(time.time()))
        """The record's header until the answer is in it."""
        self._version = 0
        self._timer: asyncio.TimerHandle | None = None
        self._is_open = True

    @property
    def created(self) -> int:
        """Unix time in seconds at which the request first came."""
        return self._asked.created

    async def take(self, *, is_new: bool) -> Result:
        """Take the lease of the key's record; return the record's header.

        Args:
            is_new: whether the key is probably new, so that its record must be made first.

        Raises:
            ApiError: 422, the key was used for another request.
            RecordError: see `RecordStore`; `BusyError`, another request holds the lease.
        """
        while True:
            if is_new:
                change = Change(msgspec.msgpack.encode(self._asked), self._store.ttl_seconds)
                with suppress(ExistsError):
                    quota = self._store.quota_of(self._key.owner)
                    made = self._records.create(self._key, change, owner_bytes_max=quota)
                    await _soon(made)
            with suppress(MissingError):  # it has expired
                reading = await _soon(self._records.acquire(self._key, self._token, LEASE_SECONDS))
                self._version, self._asked = reading.record.version, self._read(reading.record)
                return self._asked
            is_new = True

    async def check_holder(self) -> None:
        """Check that the request that holds the key's record is the same one.

        Raises:
            ApiError: 422, it is another one.
            RecordError: see `RecordStore`.
        """
        with suppress(MissingError):
            self._read((await _soon(self._records.get(self._key))).record)

    def begin(self) -> None:
        """Begin to renew the lease, until the answer is stored."""
        self._timer = asyncio.get_running_loop().call_later(_RENEW_SECONDS, self._renew)

    async def finish(self, status: int, content_type: str, body: bytes) -> bool:
        """Store the answer and release the key; return whether it was stored."""
        self._stop()
        answer = msgspec.structs.replace(self._asked, status=status, content_type=content_type, body=body)
        change = Change(msgspec.msgpack.encode(answer), self._store.ttl_seconds)
        put = self._records.put(self._key, self._version, change, lease=self._token, release=True)
        try:
            try:
                await _soon(put)
            except MissingError:  # it was deleted for lack of room
                await _soon(self._records.create(self._key, change))
        except (BusyError, ConflictError, ExistsError):  # the lease had ended, and another request has the key now
            return False
        except RecordError as error:
            _log.warning("answer_not_kept", detail=str(error))
            return False
        self._is_open = False
        return True

    def close(self) -> None:
        """Release the key. If no answer was stored, the next request may try. May be called again."""
        self._stop()
        if self._is_open:
            self._is_open = False
            self._store.in_background(self._records.release(self._key, self._token))

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _renew(self) -> None:
        self._store.in_background(self._records.renew(self._key, self._token, LEASE_SECONDS))
        self.begin()

    def _read(self, record: Record) -> Result:
        try:
            result = msgspec.msgpack.decode(record.header, type=Result)
        except msgspec.DecodeError as error:
            raise RecordError(f"the request's record cannot be read: {error}") from None
        if result.request != self._name.request:
            raise ApiError(
                422,
                "this Idempotency-Key was used for another request; please choose a new key for each",
                param="Idempotency-Key",
                code="idempotency_key_reused",
            )
        return result


async def _soon(work: Awaitable[_T]) -> _T:
    """Return the result of an operation.

    Raises:
        RecordError: see `RecordStore`; also if it takes longer than `_CALL_SECONDS`.
    """
    try:
        async with asyncio.timeout(_CALL_SECONDS):
            return await work
    except TimeoutError:
        raise StoreAwayError(f"no answer within {_CALL_SECONDS:g} s") from None


def _in_use(seconds: float) -> ApiError:
    error = in_conflict(
        "Idempotency-Key",
        f"the request with this Idempotency-Key still runs, after {seconds:.0f} s; try again for its answer",
        code="idempotency_key_in_use",
    )
    error.retry_after = 5
    return error
