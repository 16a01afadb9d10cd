"""Groups hear of each other before any request needs that: who is told of whom, and when again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import zmq
from router.fake_groups import FakeGroup

from trunkline.kvstore.peers import PEER_IDLE_S
from trunkline.router.routing.core import RoutingCore
from trunkline.router.streams.dispatch import Dispatcher
from trunkline.router.streams.introductions import AGAIN_SECONDS, INTRODUCED_MAX, Introductions
from trunkline.router.streams.link import ControllerLink
from trunkline.router.streams.links import Links


class Router:
    """The parts of a router that connect to groups and introduce them to each other."""

    def __init__(self) -> None:
        self.links, self.core, self.late = Links(), RoutingCore(), 0.0
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.dispatcher = Dispatcher(self.links, self.core, resume_seconds=5.0, max_context=lambda model: 2048)
        self.introductions = Introductions(self.core)

    def changed(self, link: ControllerLink) -> None:
        self.dispatcher.link_changed(link)
        self.introductions.changed(link, self.dispatcher.now() + self.late)

    def meet(self, group: FakeGroup) -> None:
        link = ControllerLink(self.core.add(group.name), group.member, self.context, 10.0)
        link.on_change = self.changed
        self.links.add(link)
        link.open()

    def hear(self) -> None:
        """Take note that all groups have said how they are."""
        for link in self.links:
            self.changed(link)

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.context.term()


def told(group: FakeGroup) -> list[list[str]]:
    """The names that each introduction named, in order of time."""
    return [sorted(holder.member for holder in each.holders) for each in group.heard.prefetches]


async def until_told(groups: dict[str, FakeGroup], count: int) -> None:
    async with asyncio.timeout(60.0):
        while any(len(told(group)) < count for group in groups.values()):
            await asyncio.sleep(0.01)


def test_groups_are_introduced_when_one_joins_and_often_enough_not_to_be_forgotten(place: Path) -> None:
    async def play() -> None:
        groups: dict[str, FakeGroup] = {}
        for name in "abcd":
            FakeGroup(name, place, groups).start()
        groups["d"].exports = False
        router = Router()
        try:
            for name in "abd":
                router.meet(groups[name])
            await until_told({name: groups[name] for name in "ab"}, 1)
            router.hear()
            router.meet(groups["c"])
            await until_told({name: groups[name] for name in "abc"}, 1)
            router.hear()
            await until_told({name: groups[name] for name in "ab"}, 2)
            router.late = AGAIN_SECONDS
            router.hear()
            await until_told({"c": groups["c"]}, 2)
            await until_told({name: groups[name] for name in "ab"}, 3)
            assert told(groups["a"]) == [["b"], ["b", "c"], ["b", "c"]], "of none twice without need"
            assert told(groups["c"]) == [["a", "b"]] * 2
            assert not told(groups["d"]), "it exports nothing, so it pulls nothing"
            named = groups["a"].heard.prefetches[-1]
            assert [each.endpoints for each in named.holders] == [["b"], ["c"]]
            assert not named.tokens, "it is asked to fetch nothing"
        finally:
            router.close()
            for group in groups.values():
                await group.stop()

    assert 2 * AGAIN_SECONDS < PEER_IDLE_S
    asyncio.run(play())


def test_in_a_large_cluster_each_group_is_known_to_as_many_as_any_other(place: Path) -> None:
    async def play() -> None:
        groups: dict[str, FakeGroup] = {}
        names = [f"group-{number}" for number in range(INTRODUCED_MAX + 5)]
        router = Router()

        def last_told() -> list[str]:
            return [name for group in groups.values() for name in (told(group) or [[]])[-1]]

        try:
            for name in names:
                router.meet(FakeGroup(name, place, groups).start())
            async with asyncio.timeout(60.0):
                while len(router.core.peers(0)) < len(names):
                    await asyncio.sleep(0.01)
            router.hear()
            async with asyncio.timeout(60.0):  # a group may have an introduction of before all were known
                while sorted(last_told()) != sorted(names * INTRODUCED_MAX):
                    await asyncio.sleep(0.01)
            assert all(name not in told(group)[-1] for name, group in groups.items())
        finally:
            router.close()
            for group in groups.values():
                await group.stop()

    asyncio.run(play())
