"""Limits that routers share: random requests at routers that die, on a store that is slow or away."""

from __future__ import annotations

import asyncio
import itertools
import random
import selectors
from bisect import bisect_left
from collections.abc import Coroutine, Sequence
from typing import Any, cast

import msgspec
import pytest
from seeds import seeds

from trunkline.kvstore.records import (
    Change,
    ConflictError,
    ExistsError,
    MissingError,
    Reading,
    Record,
    RecordKey,
    RecordStore,
    StoreAwayError,
)
from trunkline.router.config import TenantLimits
from trunkline.router.errors import ApiError
from trunkline.router.tenancy.auth import TenantRules
from trunkline.router.tenancy.ledger import LEASE_S, Ledger
from trunkline.router.tenancy.shared_limits import PERIOD_S, SharedLimits
from trunkline.router.tenancy.tenants import Meter, TenantBook


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer whenever nothing is left to do."""

    def __init__(self) -> None:
        self.now = 1000.0
        loop = self

        class Selector(selectors.SelectSelector):
            def select(self, timeout: float | None = None) -> list[Any]:
                assert timeout is not None, "nothing will ever happen"
                loop.now += timeout
                return super().select(0)

        super().__init__(Selector())

    def time(self) -> float:
        return self.now


def simulate(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(work)


class SlowStore:
    """Records in memory; every operation takes a random time, before and after it is carried out."""

    def __init__(self, rng: random.Random, delay_s: float) -> None:
        self.rng = rng
        self.delay_s = delay_s
        self.records: dict[RecordKey, Record] = {}
        self.is_away = False
        self.hangs_s = 0.0
        """Seconds for which the answer to a change hangs that is already made."""
        self.operations = 0

    async def get(self, key: RecordKey, known: Sequence[bytes] = (), *, use: bool = True) -> Reading:
        await self._travel()
        if key not in self.records:
            raise MissingError
        found = self.records[key]
        await self._travel()
        return Reading(found, b"", [], 0)

    async def create(self, key: RecordKey, change: Change, *, owner_bytes_max: int = 0) -> Record:
        await self._travel()
        if key in self.records:
            raise ExistsError
        self.records[key] = made = Record(key, 1, change.header, b"", 0.0, 0.0, change.ttl)
        await self._travel()
        return made

    async def put(self, key: RecordKey, version: int, change: Change) -> Record:
        await self._travel()
        if key not in self.records:
            raise MissingError
        if self.records[key].version != version:
            raise ConflictError(self.records[key].version)
        self.records[key] = made = Record(key, version + 1, change.header, b"", 0.0, 0.0, change.ttl)
        await self._travel()
        await asyncio.sleep(self.hangs_s)
        return made

    async def _travel(self) -> None:
        self.operations += 1
        if self.is_away:
            raise StoreAwayError("away")
        await asyncio.sleep(self.rng.uniform(0, self.delay_s))


class Site:
    """Routers on one store, and when they have admitted requests."""

    def __init__(self, rng: random.Random, limits: TenantLimits, routers: int, delay_s: float = 0.01) -> None:
        self.rng = rng
        self.limits = limits
        self.store = SlowStore(rng, delay_s)
        self.count = routers
        self.routers: list[tuple[TenantBook, SharedLimits]] = []
        self.admitted: list[float] = []
        self.waited: list[float] = []
        """Seconds for which admissions waited."""
        self.clock = asyncio.get_running_loop().time
        for _ in range(routers):
            self.start()

    def start(self) -> None:
        """Start a router whose wall clock is wrong by seconds."""
        skew_s = self.rng.uniform(-2, 2)
        store = cast("RecordStore", self.store)
        shared = SharedLimits(store, self.count, self.clock, lambda: self.clock() + skew_s)
        shared.open()
        book = TenantBook(TenantRules(self.limits), self.clock, self.count, shared=shared)
        self.routers.append((book, shared))

    def kill(self, index: int) -> None:
        """End a router that gives nothing back."""
        _, shared = self.routers.pop(index)
        assert shared._task is not None
        shared._task.cancel()

    async def ask(self, index: int) -> Meter | None:
        """Send a request; return None if it is refused."""
        book, _ = self.routers[index % len(self.routers)]
        began = self.clock()
        await book.prepare("t")
        self.waited.append(self.clock() - began)
        try:
            meter = book.admit("t")
        except ApiError:
            return None
        self.admitted.append(self.clock())
        return meter

    async def close(self) -> None:
        for _, shared in self.routers:
            await shared.close()


def most_in(times: list[float], window_s: float) -> int:
    """The largest number of events in any window of this length."""
    return max((bisect_left(times, at + window_s) - first for first, at in enumerate(times)), default=0)


@pytest.mark.parametrize("seed", seeds(4))
@pytest.mark.parametrize("skewed", [False, True], ids=["evenly", "one router has all"])
def test_the_rate_holds_and_is_used(seed: int, skewed: bool) -> None:
    rng = random.Random(seed)
    per_minute = rng.choice([60, 600, 6000])

    async def run() -> None:
        site = Site(rng, TenantLimits(requests_per_minute=per_minute), rng.randint(2, 5))
        began, length = site.clock(), 240.0
        demand = 2.0 * per_minute / 60  # twice what is allowed
        while site.clock() < began + length:
            meter = await site.ask(0 if skewed else rng.randrange(99))
            if meter is not None:
                meter.close()
            await asyncio.sleep(rng.expovariate(demand))
        allowed = per_minute + length / 60 * per_minute
        assert 0.95 * allowed <= len(site.admitted) <= 1.01 * allowed + 5
        for window_s in (1.0, 10.0, 60.0, 120.0):
            assert most_in(site.admitted, window_s) <= 1.01 * per_minute * (1 + window_s / 60) + 5
        await site.close()

    simulate(run())


@pytest.mark.parametrize("seed", seeds(4))
def test_routers_that_die_lose_little_and_grant_nothing_twice(seed: int) -> None:
    rng = random.Random(seed)
    per_minute = 1200

    async def run() -> None:
        site = Site(rng, TenantLimits(requests_per_minute=per_minute), 3, rng.choice([0.001, 0.1]))
        began, length, next_death = site.clock(), 400.0, 30.0
        while (passed := site.clock() - began) < length:
            if passed > next_death:
                next_death = passed + rng.uniform(20, 60)
                site.kill(rng.randrange(3))
                site.start()
            if (meter := await site.ask(rng.randrange(3))) is not None:
                meter.close()
            await asyncio.sleep(rng.expovariate(60))
        allowed = per_minute + length / 60 * per_minute
        assert 0.95 * allowed <= len(site.admitted) <= 1.01 * allowed + 5
        await site.close()

    simulate(run())


@pytest.mark.parametrize("seed", seeds(4))
def test_tokens_overdraw_and_are_paid(seed: int) -> None:
    rng = random.Random(seed)
    per_minute = 60_000

    async def run() -> None:
        site = Site(rng, TenantLimits(tokens_per_minute=per_minute), 2)
        began, length, used = site.clock(), 300.0, 0

        async def request(index: int) -> None:
            nonlocal used
            if (meter := await site.ask(index)) is None:
                return
            prompt, output = rng.randrange(2000), rng.randrange(500)
            try:
                meter.check_prompt()
            except ApiError:
                return
            finally:
                meter.close()
            meter.charge_prompt(prompt)
            await asyncio.sleep(rng.uniform(0, 2))
            if rng.random() < 0.2:
                meter.charge(-prompt)  # controllers have refused it
                return
            used += prompt
            meter.charge(output)
            used += output

        async with asyncio.TaskGroup() as group:
            while site.clock() < began + length:
                group.create_task(request(rng.randrange(2)))
                await asyncio.sleep(rng.expovariate(4))
        allowed = per_minute + length / 60 * per_minute
        assert 0.95 * allowed <= used <= 1.05 * allowed
        await site.close()

    simulate(run())


@pytest.mark.parametrize("seed", seeds(3))
def test_requests_that_leave_while_they_wait_cost_nothing(seed: int) -> None:
    async def run() -> None:
        rng = random.Random(seed)
        site = Site(rng, TenantLimits(requests_per_minute=600), 1, delay_s=0.1)
        end = site.clock() + 60
        while site.clock() < end:
            asked = asyncio.create_task(site.ask(0))
            await asyncio.wait([asked], timeout=rng.uniform(0, 0.1))
            if asked.cancel():
                await asyncio.wait([asked])
            elif (meter := asked.result()) is not None:
                meter.close()
            else:
                await asyncio.sleep(0.05)
        assert 1000 <= len(site.admitted) <= 1200, "a full bucket and what flows in, each once"
        await site.close()

    simulate(run())


@pytest.mark.parametrize("seed", seeds(4))
@pytest.mark.parametrize("skewed", [False, True], ids=["evenly", "one router has all"])
def test_places_hold_and_are_used(seed: int, skewed: bool) -> None:
    rng = random.Random(seed)
    limit = rng.choice([1, 4, 40])

    async def run() -> None:
        site = Site(rng, TenantLimits(requests=limit), 3)
        began, length, running, busy_s = site.clock(), 300.0, 0, 0.0

        async def request(index: int) -> None:
            nonlocal running, busy_s
            if (meter := await site.ask(index)) is None:
                return
            running += 1
            assert running <= limit
            seconds = rng.uniform(5, 15)
            await asyncio.sleep(seconds)
            running -= 1
            busy_s += seconds
            meter.close()

        async with asyncio.TaskGroup() as group:
            while site.clock() < began + length:
                group.create_task(request(0 if skewed else rng.randrange(3)))
                await asyncio.sleep(rng.expovariate(max(2.0, limit)))
        least = 0.93 if limit > 1 else 0.85  # a single place takes up to half a second from router to router
        assert busy_s >= least * limit * length
        await site.close()

    simulate(run())


def test_a_dead_routers_places_come_back() -> None:
    async def run() -> None:
        site = Site(random.Random(0), TenantLimits(requests=4), 2)
        meters = [await site.ask(0) for _ in range(4)]
        assert None not in meters
        await asyncio.sleep(4 * PERIOD_S)
        assert await site.ask(1) is None
        site.kill(0)
        began = site.clock()
        while await site.ask(0) is None:
            await asyncio.sleep(0.1)
        assert LEASE_S / 2 < site.clock() - began <= LEASE_S + 2
        await site.close()

    simulate(run())


def test_while_the_store_is_away_each_router_grants_its_part() -> None:
    async def run() -> None:
        site = Site(random.Random(0), TenantLimits(requests_per_minute=600, requests=10), 2)
        site.store.is_away = True
        meters = [await site.ask(0) for _ in range(10)]
        assert sum(meter is not None for meter in meters) == 5
        began, admitted = site.clock(), 0
        for meter in meters:
            if meter is not None:
                meter.close()
        while site.clock() < began + 120:
            for index in range(2):
                if (meter := await site.ask(index)) is not None:
                    admitted += 1
                    meter.close()
            await asyncio.sleep(0.02)
        assert admitted == pytest.approx(600 + 1200, rel=0.02)
        assert max(site.waited) == 0.0
        site.store.is_away = False
        await asyncio.sleep(5)
        began, admitted = site.clock(), 0
        while site.clock() < began + 60:
            if (meter := await site.ask(0)) is not None:
                admitted += 1
                meter.close()
            await asyncio.sleep(0.02)
        assert 0.95 * 600 <= admitted <= 1.1 * 600, "one router has the whole limit again"
        await site.close()

    simulate(run())


@pytest.mark.parametrize("times", [1, 3])
def test_what_is_paid_without_an_answer_is_paid_once(times: int) -> None:
    async def run() -> None:
        site = Site(random.Random(0), TenantLimits(requests_per_minute=60), 1)
        for _ in range(20):
            meter = await site.ask(0)
            assert meter is not None
            meter.close()
        for _ in range(times):
            site.store.hangs_s = 5.0
            await asyncio.sleep(2.5)
            site.store.hangs_s = 0.0
            await asyncio.sleep(1.5)
        await asyncio.sleep(2.5)
        [record] = site.store.records.values()
        ledger = msgspec.msgpack.decode(record.header, type=Ledger)
        assert 0 < ledger.requests <= 20
        await site.close()

    simulate(run())


def test_a_tenant_without_limits_costs_no_operation() -> None:
    async def run() -> None:
        site = Site(random.Random(0), TenantLimits(priority=3), 2)
        for index in range(100):
            assert await site.ask(index) is not None
        await asyncio.sleep(10)
        assert site.store.operations == 0
        await site.close()

    simulate(run())


def test_an_admission_seldom_waits_and_an_idle_tenant_costs_nothing() -> None:
    async def run() -> None:
        site = Site(random.Random(0), TenantLimits(requests_per_minute=60_000), 2)
        for index in itertools.islice(itertools.count(), 2000):
            meter = await site.ask(index)
            assert meter is not None
            meter.close()
            await asyncio.sleep(0.005)
        assert sum(wait > 0 for wait in site.waited) <= 4
        await asyncio.sleep(2)
        operations = site.store.operations
        await asyncio.sleep(100)
        assert site.store.operations == operations
        await site.close()

    simulate(run())
