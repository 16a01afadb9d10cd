"""Limits that hold for all routers together: settles this router's accounts with the tenants' ledgers.

    request ─► prepare ─► reserved enough? ──────────────────────────► admitted or refused (`tenants.py`)
                  └─ no ─► settle: read the ledger, put the new one ──────┘
    twice a second ─► settle, for tenants whose requests have come or gone

Ledgers are records of kind "limit". A settlement replaces a ledger by compare-and-set: usually one operation,
since the router still knows the ledger that it wrote last. If the store is away, each router grants an equal part
of each limit, until it is back.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable
from typing import Final

import msgspec
import structlog

from trunkline.kvstore.records import (
    Change,
    ConflictError,
    ExistsError,
    MissingError,
    RecordError,
    RecordKey,
    RecordStore,
)
from trunkline.router.tenancy.account import Account
from trunkline.router.tenancy.ledger import Ledger

KIND: Final = "limit"
PERIOD_S: Final = 0.5
"""Time in seconds between two rounds of settlements."""
_TTL_S: Final = 86_400.0
"""Time in seconds after which a ledger that no router uses is deleted. Its buckets are full long before."""
_CALL_S: Final = 2.0
"""Time limit in seconds of a settlement: requests wait for it."""
_RETRY_S: Final = 2.0
"""Time in seconds between two tries while the store is away."""
_AT_ONCE: Final = 16
"""Largest number of settlements at a time in a round."""
_CONFLICT_PAUSE_S: Final = 0.01
"""Longest pause in seconds after the first conflict; after the n-th it is n times as long."""
_log = structlog.get_logger("trunkline.router.tenancy.shared_limits")


class SharedLimits:
    """The accounts of a router. Works without `open`, too, but then settles only when requests wait for it."""

    def __init__(
        self,
        records: RecordStore,
        routers: int,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            routers: number of router processes that are known; while the store is away, each grants an equal part.
            clock: returns seconds that only go forward.
            wall_clock: returns Unix time in seconds.
        """
        self.router = secrets.token_hex(6)
        """This router's id in ledgers."""
        self._records = records
        self._routers = routers
        self._clock = clock
        self._wall_clock = wall_clock
        self._accounts: dict[str, Account] = {}
        """Accounts in use. Of others the ledger has nothing."""
        self._locks: dict[str, asyncio.Lock] = {}
        self._away_until = 0.0
        """Time until which the store is not asked again; 0: it answers."""
        self._task: asyncio.Task[None] | None = None

    def account(self, name: str) -> Account:
        """Return the account that is in use for a tenant, or a new one."""
        return self._accounts.get(name) or Account(name)

    def touch(self, account: Account) -> None:
        """Note that an account is in use."""
        self._accounts.setdefault(account.name, account)

    async def prepare(self, account: Account) -> None:
        """Reserve something for a request that is about to be admitted, if nothing is reserved."""
        if self._away_until:
            self.touch(account)
            if not account.is_alone:
                account.fail(self._routers, self._clock())
            return
        if not account.needs(self._clock()):
            return
        self.touch(account)
        async with self._lock(account):
            if account.needs(self._clock()):
                await self._settle(account, is_awaited=True)

    def open(self) -> None:
        """Begin to settle in the background."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Give everything back, as far as the store takes it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        for account in self._accounts.values():
            account.running, account.changed = 0, False
        if not self._away_until:
            await self._round(is_last=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                await self._round()
            except Exception:  # noqa: BLE001 (no error must end the work for good)
                _log.exception("limits_not_settled")

    async def _round(self, *, is_last: bool = False) -> None:
        """Settle all accounts that are due."""
        now = self._clock()
        if now < self._away_until:
            self._all_fall_back(now)
            return
        due = [account for account in self._accounts.values() if account.is_alone or account.is_due(now)]
        for first in range(0, len(due), _AT_ONCE):
            await asyncio.gather(*(self._settle_one(account) for account in due[first : first + _AT_ONCE]))
            if self._away_until:
                break
        if not is_last:
            for name in [name for name, account in self._accounts.items() if account.is_idle()]:
                if not self._lock(self._accounts[name]).locked():
                    del self._accounts[name], self._locks[name]

    async def _settle_one(self, account: Account) -> None:
        async with self._lock(account):
            await self._settle(account)

    async def _settle(self, account: Account, *, is_awaited: bool = False) -> None:
        """Settle an account; the caller has its lock. `is_awaited`: whether a request waits for this."""
        try:
            async with asyncio.timeout(_CALL_S):
                await self._write(account, is_awaited=is_awaited)
        except (RecordError, TimeoutError) as error:
            now = self._clock()
            if not self._away_until:
                _log.warning("limits_not_shared", reason=str(error) or "no answer", parts=self._routers)
            self._away_until = now + _RETRY_S
            self._all_fall_back(now)
            return
        if self._away_until:
            _log.info("limits_shared_again")
            self._away_until = 0.0

    async def _write(self, account: Account, *, is_awaited: bool) -> None:
        key = RecordKey(KIND, "", account.name)
        ledger, version = account.ledger or Ledger(), 0 if account.is_unsure else account.version
        failures = 0
        while True:
            if not version:
                try:
                    record = (await self._records.get(key)).record
                    ledger, version = msgspec.msgpack.decode(record.header, type=Ledger), record.version
                except MissingError:  # or it was deleted for lack of room, and is as this router knows it
                    pass
                except msgspec.DecodeError:
                    ledger, version = Ledger(), record.version
                account.catch_up(ledger.shares.get(self.router) if version else None)
            now = self._clock()
            use = account.use(now, wants_place=is_awaited)
            new = account.propose(ledger, self.router, use, now, self._wall_clock())
            change = Change(msgspec.msgpack.encode(new), _TTL_S)
            try:
                if version:
                    record = await self._records.put(key, version, change)
                else:
                    record = await self._records.create(key, change)
            except (ConflictError, ExistsError, MissingError):
                version = 0
                failures += 1
                await asyncio.sleep(random.uniform(0, failures * _CONFLICT_PAUSE_S) if failures > 1 else 0)
                continue
            account.settle(new, record.version, self.router, use, now)
            return

    def _all_fall_back(self, now: float) -> None:
        for account in self._accounts.values():
            if not account.is_alone:
                account.fail(self._routers, now)

    def _lock(self, account: Account) -> asyncio.Lock:
        return self._locks.setdefault(account.name, asyncio.Lock())
