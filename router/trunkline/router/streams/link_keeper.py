"""Makes and closes the connections to controllers as groups come and go.

    MemberSource ──► changes ──┬─ added ──► slot, ControllerLink, feed of its events
                               ├─ removed ► no new requests; closed when its last request has ended
                               └─ changed ► another address: removed and added again

A group that was removed and comes back soon has the same slot, and the index still knows its chunks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Final

import structlog
import zmq

from trunkline.router.membership.member import Member, Members, MemberSource, Present, changes
from trunkline.router.routing.core import RoutingCore
from trunkline.router.streams.handovers import Handovers
from trunkline.router.streams.kv_feed import EventFeeds
from trunkline.router.streams.link import ControllerLink
from trunkline.router.streams.links import Links
from trunkline.runtime.wire_peer import WirePeer

TICK_SECONDS: Final = 0.5
"""Time between two checks of whether a removed group has ended its last request."""
FOLLOW_AGAIN_SECONDS: Final = 2.0
"""Pause before a source whose watch has ended is followed again."""
_log = structlog.get_logger("trunkline.router.streams.link_keeper")


class LinkKeeper:
    """Keeps the connections to those controllers that are members. Call its methods from the event loop's thread
    only."""

    def __init__(
        self,
        links: Links,
        core: RoutingCore,
        feeds: EventFeeds,
        connect: Callable[[int, Member, WirePeer], ControllerLink],
        *,
        peer: Callable[[], WirePeer] = WirePeer,
        refusal: Callable[[Sequence[str]], str] = lambda endpoints: "",
        handovers: Handovers | None = None,
        on_left: Callable[[str], None] = lambda name: None,
    ) -> None:
        """
        Args:
            connect: makes the connection to a member, given its slot.
            peer: makes the wire keys of a controller.
            refusal: returns why endpoints must not be connected to; "": they may.
            handovers: told of each group that was removed; its connection stays until it is handed over.
            on_left: called with the name of a group that was removed and has no requests any more.
        """
        self.problem = ""
        """Why the members may be out of date, for people; "": they are not."""
        self._links = links
        self._core = core
        self._feeds = feeds
        self._connect = connect
        self._peer = peer
        self._refusal = refusal
        self._handovers = handovers
        self._on_left = on_left
        self._refused: set[str] = set()
        """Members to which no connection may be made, and of which the log has told."""
        self._leaving: set[ControllerLink] = set()
        """Connections to groups that were removed, with requests that have not ended."""
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def open(self, first: Members, source: MemberSource | None) -> None:
        """Connect to the first members, and follow a source from then on; None: members do not change."""
        self.apply(Present(first))
        if source is not None:
            self.problem = "the members are not known yet"
            self._task = asyncio.create_task(self._follow(source))

    async def close(self) -> None:
        """Close all connections; their requests fail."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._timer is not None:
            self._timer.cancel()
        for link in [*self._links, *self._leaving]:
            link.close()

    def apply(self, present: Present) -> None:
        """Connect to members that are new, and let go of those that are none any more."""
        if present.problem and present.problem != self.problem:
            _log.warning("members_may_be_old", problem=present.problem, members=len(present.members))
        self.problem = present.problem
        allowed = {each: member for each, member in present.members.items() if self._may_connect(member)}
        self._refused = set(present.members) - set(allowed)
        slots = {link.name: link for link in self._links}
        added, removed, changed = changes({name: link.member for name, link in slots.items()}, allowed)
        for member in removed:
            self._remove(slots[member.id])
        for member in changed:
            link = slots[member.id]
            if (member.address, member.events) == (link.member.address, link.member.events):
                link.member = member
            else:
                self._remove(link)
                self._add(member)
        for member in added:
            self._add(member)

    async def _follow(self, source: MemberSource) -> None:
        while True:
            try:
                async with contextlib.aclosing(source.follow()) as news:
                    async for present in news:
                        self.apply(present)
            except Exception as error:  # noqa: BLE001 (a fault must not end the watch for good)
                self.problem = f"members cannot be followed: {error}"
                _log.exception("members_not_followed")
            await asyncio.sleep(FOLLOW_AGAIN_SECONDS)

    def _may_connect(self, member: Member) -> bool:
        refusal = self._refusal([member.address, *([member.events] if member.events else [])])
        if refusal and member.id not in self._refused:
            _log.error("member_refused", member=member.id, reason=refusal)
        return not refusal

    def _add(self, member: Member) -> None:
        slot = self._core.add(member.id)
        if not member.events:
            self._core.index.forget(slot)  # nothing will tell which of the chunks are still there
        peer = self._peer()
        link = self._connect(slot, member, peer)
        self._links.add(link)
        try:
            if member.events:
                self._feeds.add(slot, member.events, link, peer)
            link.open()
        except zmq.ZMQError as error:  # an address is wrong, which must not hide the other members
            _log.error("member_refused", member=member.id, reason=str(error))
            self._remove(link)
            return
        _log.info("group_joined", group=member.id, address=member.address, groups=len(self._links))

    def _remove(self, link: ControllerLink) -> None:
        self._core.remove(link.index, asyncio.get_running_loop().time())
        self._links.remove(link)
        if self._handovers is not None:
            self._handovers.leaves(link)
        self._feeds.remove(link.index)
        self._leaving.add(link)
        _log.info("group_left", group=link.name, requests=link.inflight, groups=len(self._links))
        if self._timer is None:
            self._tick()

    def _tick(self) -> None:
        """Close the connections to groups that were removed, have no requests any more and are handed over."""
        handed = self._handovers
        for link in [each for each in self._leaving if not (each.inflight or (handed and handed.needs(each)))]:
            self._leaving.remove(link)
            link.close()
            if all(other.name != link.name for other in self._links):  # it has not come back
                self._on_left(link.name)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(TICK_SECONDS, self._tick) if self._leaving else None
