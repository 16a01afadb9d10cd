"""Groups that leave and groups that are new, over real sockets: where their chunks are afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from router.fake_groups import CHUNK, DISK, IDENTITY, FakeGroup, path

from trunkline.kvstore.chunks import pack_int32
from trunkline.kvstore.records import RecordStore, open_records
from trunkline.router.membership.member import Member, Present
from trunkline.router.routing import handover
from trunkline.router.routing.core import RoutingCore
from trunkline.router.routing.handover import PER_TARGET_MAX, HandoverCounts, path_names
from trunkline.router.routing.request import RouteRequest
from trunkline.router.streams import handovers as module
from trunkline.router.streams.dispatch import Dispatcher
from trunkline.router.streams.handovers import Handovers
from trunkline.router.streams.kv_feed import EventFeeds
from trunkline.router.streams.link import ControllerLink
from trunkline.router.streams.link_keeper import LinkKeeper
from trunkline.router.streams.links import Links
from trunkline.runtime.wire_peer import WirePeer

PATHS = [path(number, 2 + number % 5, shared=1) for number in range(1, 31)]


class Noted(Handovers):
    """Notes that it has got a lease."""

    began = False

    async def _hand_over(self, link: ControllerLink) -> None:
        self.began = True
        await super()._hand_over(link)


class Router:
    """The parts of a router that have to do with groups, without HTTP."""

    def __init__(self, records: RecordStore) -> None:
        self.links = Links()
        self.core = RoutingCore()
        self.ended_with: list[tuple[str, HandoverCounts]] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.dispatcher = Dispatcher(self.links, self.core, resume_seconds=5.0, max_context=lambda model: 2048)
        self.feeds = EventFeeds(self._context, self.core.index, self.dispatcher.load_changed)
        self.handovers = Noted(self.links, self.core, records, self)
        self.keeper = LinkKeeper(self.links, self.core, self.feeds, self._connect, handovers=self.handovers)
        self.feeds.open()

    def ended(self, occasion: str, handed: HandoverCounts, seconds: float) -> None:
        self.ended_with.append((occasion, handed))

    def _connect(self, slot: int, member: Member, peer: WirePeer) -> ControllerLink:
        link = ControllerLink(slot, member, self._context, 10.0, peer)

        def changed(link: ControllerLink) -> None:
            self.handovers.changed(link)
            self.dispatcher.link_changed(link)

        link.on_change = changed
        return link

    def meet(self, groups: dict[str, FakeGroup]) -> None:
        self.keeper.apply(Present({name: group.member for name, group in groups.items()}))

    def link(self, name: str) -> ControllerLink:
        return next(link for link in self.links if link.name == name)

    def knows(self, group: FakeGroup) -> bool:
        """Whether its index has all that the group has."""
        slot = self.core._slots.find(group.name)
        matches = (self.core.index.match(path_names(each, IDENTITY), 0.0)[slot].sum() for each in group.paths)
        return all(matches) and any(link.name == group.name and link.ready for link in self.links)

    async def close(self) -> None:
        await self.handovers.close()
        self.feeds.close()
        await self.keeper.close()
        self._context.term()


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def cluster(
    folder: Path, names: str = "abc", *, routers: int = 1, shared: bool = True, cold: bool = False
) -> AsyncIterator[tuple[list[Router], dict[str, FakeGroup]]]:
    """Groups, of which the first one has all conversations, and routers that know it."""
    groups: dict[str, FakeGroup] = {}
    for name in names:
        FakeGroup(name, folder, groups).start()
    if not cold:
        groups[names[0]].put(PATHS)
        for group in groups.values():
            group.chunks.setdefault(b"0" * 16, 2)  # none of them is new
            group.prompt_tokens = 1000
    urls = [f"sqlite:{folder}/records{0 if shared else number}" for number in range(routers)]
    stores = [open_records(url, bytes_max=1 << 30, patience_s=5.0) for url in urls]
    all_routers = [Router(store) for store in stores]
    try:
        for router in all_routers:
            router.meet(groups)
        await until(lambda: all(router.knows(group) for router in all_routers for group in groups.values()))
        yield all_routers, groups
    finally:
        for router in all_routers:
            await router.close()
        for store in stores:
            await store.close()
        for group in groups.values():
            await group.stop()


def run(work: Any) -> None:
    asyncio.run(work)


def where(groups: dict[str, FakeGroup], names: str = "bc") -> list[int]:
    """How many of the conversations each group has as a whole."""
    return [sum(groups[name].has(each) for each in PATHS) for name in names]


def test_a_group_that_drains_hands_all_over(place: Path) -> None:
    async def play() -> None:
        async with cluster(place) as ([router], groups):
            groups["a"].status = "draining"
            await until(lambda: bool(groups["a"].heard.handed))
            assert sum(where(groups)) == len(PATHS)
            assert min(where(groups)) >= len(PATHS) // 3, "groups with the same load share the conversations"
            assert max(group.heard.pulls_max for group in groups.values()) <= PER_TARGET_MAX
            [(occasion, handed)] = router.ended_with
            assert (occasion, handed.paths, handed.given_up) == ("drain", len(PATHS), 0)
            arrived = [len(groups[name].chunks) - 1 for name in "bc"]
            assert handed.chunks >= sum(arrived) >= len(PATHS)
            assert len(groups["a"].heard.handed) == 1

    run(play())


def test_what_is_sent_later_goes_to_the_group_that_has_it(place: Path) -> None:
    async def play() -> None:
        async with cluster(place) as ([router], groups):
            groups["a"].status = "draining"
            await until(lambda: bool(groups["a"].heard.handed))
            for each in PATHS:
                tokens = each.tokens + pack_int32([77] * CHUNK)
                decision = router.core.route(RouteRequest(tokens), asyncio.get_running_loop().time())
                assert groups[decision.name].has(each)

    run(play())


def test_requests_that_end_meanwhile_are_handed_over_too(place: Path) -> None:
    async def play() -> None:
        async with cluster(place) as (_, groups):
            leaving = groups["a"]
            leaving.requests = 1
            leaving.status = "draining"
            await until(lambda: sum(where(groups)) == len(PATHS))
            assert not leaving.heard.handed
            late = path(99, 5)
            leaving.put([late])
            leaving.requests = 0
            await until(lambda: bool(leaving.heard.handed))
            assert groups["b"].has(late) or groups["c"].has(late)

    run(play())


def test_a_group_that_is_no_member_any_more_hands_all_over(place: Path) -> None:
    async def play() -> None:
        async with cluster(place) as ([router], groups):
            leaving = groups["a"]
            link = router.link("a")
            router.meet({name: group for name, group in groups.items() if name != "a"})
            assert router.handovers.needs(link)
            await until(lambda: bool(leaving.heard.handed))
            assert sum(where(groups)) == len(PATHS)
            await until(lambda: not router.keeper._leaving)

    run(play())


@pytest.mark.parametrize("shared", [True, False])
def test_one_router_does_it(place: Path, shared: bool) -> None:
    """Routers without a shared store each do it, and fetch nothing twice."""

    async def play() -> None:
        async with cluster(place, routers=3, shared=shared) as (routers, groups):
            groups["a"].status = "draining"
            await until(lambda: len(groups["a"].heard.handed) == (1 if shared else 3))
            await until(lambda: not any(router.handovers._tasks for router in routers))
            assert len(groups["a"].heard.handed) == (1 if shared else 3)
            assert sum(len(router.ended_with) for router in routers) == (1 if shared else 3)
            assert all(groups["b"].has(each) or groups["c"].has(each) for each in PATHS)

    run(play())


def test_another_router_goes_on(place: Path) -> None:
    async def play() -> None:
        async with cluster(place, routers=2) as (routers, groups):
            for group in groups.values():
                group.pull_seconds = 0.03
            groups["a"].status = "draining"
            await until(lambda: any(where(groups)))
            assert not groups["a"].heard.handed
            asked = groups["a"].heard.asked[0][0]
            [doer] = [router for router in routers if router.handovers.began]
            await doer.handovers.close()
            await until(lambda: bool(groups["a"].heard.handed))
            assert sum(where(groups)) >= len(PATHS)
            assert {router for router, _ in groups["a"].heard.asked} > {asked}

    run(play())


def test_chunks_on_disk_are_brought_to_host_memory_first(place: Path) -> None:
    async def play() -> None:
        async with cluster(place) as (_, groups):
            leaving = groups["a"]
            asleep = path(50, 6)
            leaving.put([asleep], DISK)
            leaving.status = "draining"
            await until(lambda: bool(leaving.heard.handed))
            assert [each.tokens for each in leaving.heard.prefetches] == [asleep.tokens]
            assert groups["b"].has(asleep) or groups["c"].has(asleep)

    run(play())


def is_told(router: Router, group: FakeGroup) -> bool:
    """Whether a router knows how a group is now."""
    state = router.link(group.name).state
    return state is not None and (state.host_slots, bool(state.exports)) == (group.host_slots, group.exports)


@pytest.mark.parametrize("why", ["alone", "no exports", "nothing arrives", "no room"])
def test_what_cannot_be_handed_over_is_given_up(place: Path, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "STALL_SECONDS", 0.2)

    async def play() -> None:
        async with cluster(place, "a" if why == "alone" else "ab") as ([router], groups):
            other = groups.get("b", groups["a"])
            other.exports = why != "no exports"
            other.fails = why == "nothing arrives"
            other.host_slots = 0 if why == "no room" else 1000
            await until(lambda: all(is_told(router, group) for group in groups.values()))
            groups["a"].status = "draining"
            await until(lambda: bool(groups["a"].heard.handed))
            given_up = [handed.given_up for _, handed in router.ended_with]
            assert given_up == ([len(PATHS)] if why in ("nothing arrives", "no room") else [])

    run(play())


def test_a_group_that_dies_while_it_gets_paths_loses_them_to_another(place: Path) -> None:
    async def play() -> None:
        async with cluster(place) as ([router], groups):
            groups["b"].pull_seconds = 0.5
            groups["a"].status = "draining"
            await until(lambda: groups["b"].heard.pulls > 0)
            await groups.pop("b").stop()
            router.meet(groups)
            await until(lambda: bool(groups["a"].heard.handed))
            assert where(groups, "c") == [len(PATHS)]

    run(play())


HOT = [path(number, 3 + number % 3, shared=2, uses=50 - number) for number in range(1, 11)]


@pytest.mark.parametrize("routers", [1, 2])
def test_a_new_group_is_warmed_up_before_it_gets_requests(
    place: Path, routers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WARM_SECONDS", 60.0)

    async def play() -> None:
        async with cluster(place, routers=routers) as (all_routers, groups):
            groups["b"].put(HOT)
            await until(lambda: all(router.knows(groups["b"]) for router in all_routers))
            new = FakeGroup("d", place, groups).start()
            new.pull_seconds = 1.0  # it is not over before all routers have met the group
            for router in all_routers:
                router.meet(groups)
            await until(lambda: all(any(link.name == "d" and link.ready for link in r.links) for r in all_routers))
            for router in all_routers:
                assert router.handovers.is_warming(router.link("d"))
                assert all(_route(router, n).name != "d" for n in range(60, 80))
            new.pull_seconds = 0.02
            await until(lambda: not any(r.handovers.is_warming(r.link("d")) for r in all_routers))
            assert all(new.has(each) for each in HOT)
            assert sum(len(router.ended_with) for router in all_routers) == 1
            for router in all_routers:
                assert "d" in {_route(router, n).name for n in range(60, 80)}

    run(play())


def test_routers_agree_which_warm_up_it_is(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although one of them has not heard the new group's events yet."""
    monkeypatch.setattr(handover, "STALL_SECONDS", 0.2)

    async def play() -> None:
        async with cluster(place, routers=2) as (all_routers, groups):
            new = FakeGroup("d", place, groups).start()
            new.status = "starting"
            for router in all_routers:
                router.meet(groups)
            hears, deaf = all_routers
            deaf.feeds.remove(deaf.link("d").index)
            await until(lambda: hears.feeds.status(hears.link("d").index) == "current")
            await until(lambda: all(router.link("d").state is not None for router in all_routers))
            new.status = "ready"
            await until(lambda: all(router.link("d").ready for router in all_routers))
            await until(lambda: not any(router.handovers._tasks for router in all_routers))
            assert [len(router.ended_with) for router in all_routers] in ([0, 1], [1, 0])

    run(play())


def test_a_warm_up_that_takes_too_long_ends(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WARM_SECONDS", 2.0)

    async def play() -> None:
        async with cluster(place) as ([router], groups):
            new = FakeGroup("d", place, groups).start()
            new.pull_seconds = 3.0
            router.meet(groups)
            await until(lambda: router.handovers.is_warming(router.link("d")))
            await until(lambda: not router.handovers.is_warming(router.link("d")))
            assert not all(new.has(each) for each in PATHS)
            assert "d" in {_route(router, n).name for n in range(60, 80)}

    run(play())


def test_a_new_group_gets_requests_if_no_other_can_take_them(place: Path) -> None:
    async def play() -> None:
        async with cluster(place, "ab") as ([router], groups):
            new = FakeGroup("d", place, groups).start()
            new.pull_seconds = 1.0
            router.meet(groups)
            await until(lambda: router.handovers.is_warming(router.link("d")))
            others = frozenset(link.index for link in router.links if link.name != "d")
            assert _route(router, 60, others).name == "d"

    run(play())


def test_at_the_first_start_nothing_waits(place: Path) -> None:
    async def play() -> None:
        async with cluster(place, cold=True) as ([router], _):
            assert not router.handovers._tasks
            assert not any(router.handovers.is_warming(link) for link in router.links)

    run(play())


def _route(router: Router, number: int, exclude: frozenset[int] = frozenset()) -> Any:
    tokens = pack_int32([number] * CHUNK * 3)
    return router.core.route(RouteRequest(tokens, exclude=exclude), asyncio.get_running_loop().time())
