"""The router's connections to the groups, from `open` to `close`: what makes, watches and closes them.

LinkKeeper ──► ControllerLink ──► a group's controller: requests, tokens, its state
    │                 └─ changed ──► models, handovers, dispatcher, introductions
    ├────────► EventFeeds ────────► which chunks the group has
    └────────► Handovers ─────────► what a group that leaves or joins gives or gets
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import zmq

from trunkline.kvstore.records import RecordStore
from trunkline.router.config import RouterConfig
from trunkline.router.membership.member import Member
from trunkline.router.membership.open_source import open_source
from trunkline.router.streams.dispatch import Dispatcher
from trunkline.router.streams.handovers import Handovers
from trunkline.router.streams.health import Health, HealthProbe
from trunkline.router.streams.introductions import Introductions
from trunkline.router.streams.kv_feed import EventFeeds
from trunkline.router.streams.link import ControllerLink
from trunkline.router.streams.link_keeper import LinkKeeper
from trunkline.router.streams.served_models import ServedModels
from trunkline.router.telemetry.metrics import RoutingMetrics
from trunkline.runtime.wire_keys import Role, problem_of
from trunkline.runtime.wire_peer import WirePeer


@dataclass(frozen=True, slots=True)
class _Opened:
    """What there is from `open` to `close`."""

    zmq: zmq.Context[zmq.Socket[bytes]]
    health: HealthProbe
    feeds: EventFeeds
    handovers: Handovers
    keeper: LinkKeeper


class GroupConnections:
    """Connects to the groups that are members of the cluster. Call its methods in the event loop."""

    def __init__(
        self,
        config: RouterConfig,
        models: ServedModels,
        dispatcher: Dispatcher,
        records: RecordStore,
        metrics: RoutingMetrics,
    ) -> None:
        self._config = config
        self._models = models
        self._dispatcher = dispatcher
        self._records = records
        self._metrics = metrics
        self._introductions = Introductions(dispatcher.core)
        self._opened: _Opened | None = None

    def open(self) -> None:
        """Begin to connect."""
        config, links, core = self._config, self._models.links, self._dispatcher.core
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        feeds = EventFeeds(context, core.index, self._dispatcher.load_changed)
        handovers = Handovers(links, core, self._records, self._metrics.handovers)

        def connect(slot: int, member: Member, peer: WirePeer) -> ControllerLink:
            link = ControllerLink(slot, member, context, config.silence_seconds, peer)
            link.patience = config.resume_seconds
            link.judge = self._models.judge
            link.on_change = lambda link: self._use([link, *self._weighed(link)])
            return link

        keeper = LinkKeeper(
            links,
            core,
            feeds,
            connect,
            handovers=handovers,
            on_left=self._metrics.left,
            peer=lambda: WirePeer(config.wire_keys, Role.ROUTER),
            refusal=lambda endpoints: problem_of(
                endpoints, config.wire_keys, Role.ROUTER, plain_tcp=config.plain_tcp
            ),
        )
        probe = HealthProbe(links, lambda link: self._models.of_link(link).probe_token)
        links.on_remove = lambda link: self._use(self._weighed(link))
        self._opened = _Opened(context, probe, feeds, handovers, keeper)
        feeds.open()
        source = open_source(config.members, self._records) if config.members else None
        keeper.open(_fixed_members(config), source)

    async def close(self) -> None:
        """Disconnect; generations that still run fail."""
        opened = self._opened
        if opened is not None:
            opened.feeds.close()
            await opened.handovers.close()
            await opened.keeper.close()
            opened.zmq.term()

    def _weighed(self, link: ControllerLink) -> list[ControllerLink]:
        """Judge anew which groups are used, after a change of one; return the others that are judged otherwise."""
        is_member = link in self._models.links
        others = self._models.weigh(link, is_member=is_member, now=self._dispatcher.now())
        return [each for each in others if each is not link]

    def _use(self, links: Iterable[ControllerLink]) -> None:
        """Pass on what has changed about some groups."""
        for link in links:
            if self._opened is not None:
                self._opened.handovers.changed(link)  # a new group must not get requests before it is told
            self._dispatcher.link_changed(link)
            self._introductions.changed(link, self._dispatcher.now())

    @property
    def members_problem(self) -> str:
        """Why the links may not be those to the present groups, for people; "": they are."""
        return "" if self._opened is None else self._opened.keeper.problem

    def events_status(self, controller: int) -> str:
        """Return how current the index of a controller's chunks is: "current", "catching up", "stale", or
        "off"."""
        return "off" if self._opened is None else self._opened.feeds.status(controller)

    def is_warming(self, link: ControllerLink) -> bool:
        """Return whether a group is new and fetches what it will need first, before it gets requests."""
        return self._opened is not None and self._opened.handovers.is_warming(link)

    async def health(self) -> Health:
        """Return whether a token can be generated."""
        return Health(False, "starting") if self._opened is None else await self._opened.health.check()


def _fixed_members(config: RouterConfig) -> dict[str, Member]:
    """Return the controllers that the configuration lists, as members; their ids are "0", "1", …."""
    events = config.events or [""] * len(config.controllers)
    pairs = enumerate(zip(config.controllers, events, strict=True))
    return {str(index): Member(str(index), address, of_it) for index, (address, of_it) in pairs}
