"""Handovers between groups: what a group that leaves has goes to the others, and a group that is new gets what it
will need first.

    state "draining", or no member any more ──► lease ──► its live paths ──► Courier ──► Handed
    ready, with nothing cached ──► no requests yet ──► lease ──► hot paths of others ──► Courier ──► requests

Of several routers that share a record store exactly one does a handover: the one that gets its lease. If that
router dies, another one goes on when the lease ends. Without a shared store each router does it; what is fetched
already is not fetched again.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from typing import Any, Final, Protocol
from weakref import WeakSet

import structlog

from trunkline.controller.messages import Handed
from trunkline.kvstore.records import (
    BusyError,
    Change,
    ExistsError,
    MissingError,
    RecordError,
    RecordKey,
    RecordStore,
    StoreAwayError,
)
from trunkline.router.errors import ApiError
from trunkline.router.messages import OfferedPath, State
from trunkline.router.routing.core import RoutingCore
from trunkline.router.routing.handover import HandoverCounts
from trunkline.router.streams.courier import TICK_SECONDS, Courier, identity_of, offers
from trunkline.router.streams.link import ControllerLink
from trunkline.router.streams.links import Links
from trunkline.router.telemetry.handover_metrics import Occasion

WARM_SECONDS: Final = 5.0
"""Longest time in seconds for which a new group gets no requests while others can take them."""
WARM_UP_SECONDS_MAX: Final = 30.0
"""Longest time in seconds of a warm-up; it goes on while the group takes requests."""
DRAIN_SECONDS_MAX: Final = 3600.0
"""Longest time in seconds of a handover. A group that drains ends it earlier: its own time limit counts."""
LOOK_AGAIN_SECONDS: Final = 1.0
"""Pause before a group that drains is asked again, because requests of it have ended meanwhile."""
DRAIN_PART: Final = 0.5
"""Part of a group's host memory that one handover may fill: the rest is for what the group uses itself."""
WARM_PART: Final = 0.5
NEW_TOKENS: Final = 256
"""Number of prompt tokens below which a group is new: another router may be filling it already."""
GIVERS_MAX: Final = 3
"""Largest number of groups from which a new one gets what they have used most."""
HOT_PAGES_MAX: Final = 8
"""Largest number of pages that each of them is asked for."""
LEASE_SECONDS: Final = 10.0
"""Time in seconds after which another router goes on if the one that does a handover dies."""
RECORD_SECONDS: Final = 600.0
"""Time in seconds for which it is noted that a handover is over."""
KIND: Final = "handover"
"""Kind of the records that have the leases."""
_WAITING_MAX: Final = 64
"""Number of paths that wait above which the next page is not asked for yet."""
_DONE: Final = b"done"
_log = structlog.get_logger("trunkline.router.streams.handovers")


class Observer(Protocol):
    """What is told of handovers (`telemetry.handover_metrics`)."""

    def ended(self, occasion: Occasion, handed: HandoverCounts, seconds: float) -> None: ...


class _Lease:
    """The right to do one handover, renewed until `done` or `close`."""

    def __init__(self, records: RecordStore, name: str) -> None:
        """`name`: the same in all routers for the same handover."""
        self._records = records
        self._key = RecordKey(KIND, "", name)
        self._token = os.urandom(12).hex()
        self._version = 0
        self._renewal: asyncio.Task[None] | None = None

    async def take(self) -> bool:
        """Wait for the lease; return False if another router has done the handover. A store that is away gives it
        to every router."""
        try:
            with suppress(ExistsError):
                await self._records.create(self._key, Change(b"", RECORD_SECONDS))
            while True:
                try:
                    record = (await self._records.acquire(self._key, self._token, LEASE_SECONDS)).record
                    break
                except BusyError as error:
                    await asyncio.sleep(min(error.seconds, 0.25))
            self._version = record.version
            if record.header == _DONE:
                await self._records.release(self._key, self._token)
                return False
        except MissingError:
            return False
        except StoreAwayError:
            return True
        self._renewal = asyncio.create_task(self._renew())
        return True

    async def close(self, *, is_done: bool) -> None:
        """End the lease; `is_done`: no other router needs to go on."""
        if self._renewal is None:
            return
        self._renewal.cancel()
        try:
            if is_done:
                change = Change(_DONE, RECORD_SECONDS)
                await self._records.put(self._key, self._version, change, lease=self._token, release=True)
            else:
                await self._records.release(self._key, self._token)
        except RecordError:
            return  # the lease ends by itself

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(LEASE_SECONDS / 3)
            try:
                await self._records.renew(self._key, self._token, LEASE_SECONDS)
            except RecordError:
                continue


class Handovers:
    """The handovers that this router does. Call its methods from the event loop's thread only."""

    def __init__(
        self,
        links: Links,
        core: RoutingCore,
        records: RecordStore,
        observer: Observer,
    ) -> None:
        """
        Args:
            records: has the leases.
        """
        self._links = links
        self._core = core
        self._records = records
        self._observer = observer
        self._tasks: dict[ControllerLink, asyncio.Task[None]] = {}
        self._left: WeakSet[ControllerLink] = WeakSet()
        """Groups whose drain was seen."""
        self._met: WeakSet[ControllerLink] = WeakSet()
        """Groups that have been ready."""
        self._warming: dict[ControllerLink, asyncio.TimerHandle] = {}

    async def close(self) -> None:
        """End all handovers; other routers go on with them."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def needs(self, link: ControllerLink) -> bool:
        """Return whether a connection is in use for a handover."""
        return link in self._tasks

    def is_warming(self, link: ControllerLink) -> bool:
        """Return whether a group gets no requests yet if others can take them, because it is new."""
        return link in self._warming

    def changed(self, link: ControllerLink) -> None:
        """Note that a group's state has changed. Call it before a request can be sent to the group."""
        state = link.state
        if state is None:
            return
        if state.status == "draining":
            self.leaves(link)
        elif link.ready:
            self._left.discard(link)
            if link not in self._met and _is_cold(state) and self._givers(link):
                self._begin_warm_up(link)
            self._met.add(link)

    def leaves(self, link: ControllerLink) -> None:
        """Note that a group drains, or is no member any more."""
        state = link.state
        if state is None or link in self._left:
            return
        self._left.add(link)
        self._met.discard(link)
        self._warmed(link)
        if link in self._tasks:
            self._tasks[link].cancel()
        self._start(link, self._drain(link))

    # -- a group that leaves

    async def _drain(self, link: ControllerLink) -> None:
        lease = _Lease(self._records, self._name("drain", link))
        if not await lease.take():
            return
        is_done = False
        try:
            await self._hand_over(link)
            is_done = True
            link.tell(lambda _: Handed())
        finally:
            await lease.close(is_done=is_done)

    async def _hand_over(self, link: ControllerLink) -> None:
        state, began = link.state, _now()
        if state is None:
            return
        targets = list(self._alike(link, state))
        if not targets or not state.exports:
            _log.info("nothing_handed_over", group=link.name, others=len(targets), exports=bool(state.exports))
            return
        _log.info("handover_begins", group=link.name, to=[each.name for each in targets])
        courier = Courier(self._links, self._core, identity_of(state), targets, DRAIN_PART)
        try:
            await self._hand_all(link, courier, began + DRAIN_SECONDS_MAX)
        finally:
            self._ended("drain", link, courier, began)

    async def _hand_all(self, link: ControllerLink, courier: Courier, until: float) -> None:
        """Hand over all live paths, again and again until the group's last request has ended."""
        while link.state is not None and _now() < until:
            # A group that is no member any more, but goes on, has requests of others.
            was_quiet = link.state.status != "draining" or not link.state.requests
            page, more = 0, True
            while (more or not courier.is_idle) and link.state is not None and _now() < until:
                if more and courier.waiting < _WAITING_MAX:
                    try:
                        found = await offers(link, "live", page)
                    except ApiError:
                        return
                    courier.offer(found.paths, link.name)
                    page, more = page + 1, found.more
                courier.round()
                await asyncio.sleep(0 if more and courier.waiting < _WAITING_MAX else TICK_SECONDS)
            if was_quiet:
                return
            await asyncio.sleep(LOOK_AGAIN_SECONDS)

    # -- a group that is new

    def _begin_warm_up(self, link: ControllerLink) -> None:
        self._core.set_warming(link.index, True)
        loop = asyncio.get_running_loop()
        self._warming[link] = loop.call_later(WARM_SECONDS, self._warmed, link)
        self._start(link, self._warm_up(link))

    def _warmed(self, link: ControllerLink) -> None:
        timer = self._warming.pop(link, None)
        if timer is not None:
            timer.cancel()
            self._core.set_warming(link.index, False)

    async def _warm_up(self, link: ControllerLink) -> None:
        until = _now() + WARM_UP_SECONDS_MAX
        lease = _Lease(self._records, self._name("warm_up", link))
        try:
            async with asyncio.timeout_at(until):
                is_first = await lease.take()
                try:
                    if is_first:
                        await self._fill(link, until)
                finally:
                    await lease.close(is_done=True)
        except TimeoutError:
            return
        finally:
            self._warmed(link)

    async def _fill(self, link: ControllerLink, until: float) -> None:
        state, began = link.state, _now()
        givers = self._givers(link)
        if state is None or not givers:
            return
        _log.info("warm_up_begins", group=link.name, of=[each.name for each in givers])
        courier = Courier(self._links, self._core, identity_of(state), [link], WARM_PART)
        try:
            found = await asyncio.gather(*(_hot_paths(each) for each in givers))
            for path, giver in sorted(itertools.chain(*found), key=lambda each: -each[0].uses):
                courier.offer([path], giver)
            while not courier.is_idle and link.ready and _now() < until - 1.0:
                courier.round()
                await asyncio.sleep(TICK_SECONDS)
        finally:
            self._ended("warm_up", link, courier, began)

    # -- both

    def _start(self, link: ControllerLink, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[link] = asyncio.create_task(self._guarded(work, link.name))
        task.add_done_callback(lambda done: self._over(link, done))

    def _over(self, link: ControllerLink, task: asyncio.Task[None]) -> None:
        if self._tasks.get(link) is task:
            del self._tasks[link]

    @staticmethod
    async def _guarded(work: Coroutine[Any, Any, None], group: str) -> None:
        try:
            await work
        except Exception:  # noqa: BLE001 (a fault costs computing again, and must not end the router)
            _log.exception("handover_failed", group=group)

    def _ended(self, occasion: Occasion, link: ControllerLink, courier: Courier, began: float) -> None:
        courier.stop()
        handed, seconds = courier.handed, _now() - began
        self._observer.ended(occasion, handed, seconds)
        _log.info(
            "handover_ended",
            group=link.name,
            occasion=occasion,
            paths=handed.paths,
            chunks=handed.chunks,
            given_up=handed.given_up,
            seconds=round(seconds, 2),
        )

    @staticmethod
    def _name(occasion: Occasion, link: ControllerLink) -> str:
        """Return the name of a handover, the same in all routers, but another one for each start of the group.

        So it must follow from what a router knows at the latest when it has the group's state; the stream of
        events, for one, may be known to some routers only.
        """
        epoch = 0 if link.state is None else link.state.epoch
        return f"{occasion} {link.name} {epoch}"

    def _alike(self, link: ControllerLink, state: State) -> Iterator[ControllerLink]:
        """Yield the other groups that take requests and can exchange chunks with a group."""
        for other in self._links:
            of = other.state
            may_pull = other.name != link.name and other.ready and of is not None and bool(of.exports)
            if may_pull and of is not None and identity_of(of) == identity_of(state):
                yield other

    def _givers(self, link: ControllerLink) -> list[ControllerLink]:
        """Return the groups that can give a new one chunks: those that have most."""
        if link.state is None or not link.state.exports:
            return []
        cached = {other: other.state.blocks_cached for other in self._alike(link, link.state) if other.state}
        return sorted((other for other in cached if cached[other]), key=lambda other: -cached[other])[:GIVERS_MAX]


async def _hot_paths(giver: ControllerLink) -> list[tuple[OfferedPath, str]]:
    """Return what a group offers to one that is new, each with the group's name."""
    paths: list[tuple[OfferedPath, str]] = []
    for page in range(HOT_PAGES_MAX):
        try:
            found = await offers(giver, "hot", page)
        except ApiError:
            break
        paths += [(path, giver.name) for path in found.paths]
        if not found.more:
            break
    return paths


def _is_cold(state: State) -> bool:
    """Return whether a group has hardly any KV of its own requests: it is new, or has lost all of it."""
    has_none = not (state.blocks_cached or any(tier.used for tier in state.tiers))
    return not state.running and (has_none or state.prompt_tokens < NEW_TOKENS)


def _now() -> float:
    return asyncio.get_running_loop().time()
