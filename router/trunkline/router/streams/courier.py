"""Carries out the plan of a handover: asks who has a path, and has the group that is to get it fetch it.

giver ──Offers──► HandoverPlan ──► core.route ──► Prefetch(root, tokens, holders) ──► target
                       ▲                                                                │ pulls
                       └──────────── index: which chunks the target has ◄──KvEvents─────┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from math import inf
from typing import Final

import msgspec

from trunkline.controller.messages import OffersCall, Prefetch
from trunkline.kvstore.chunks import TOKEN_BYTES
from trunkline.router.errors import ApiError
from trunkline.router.messages import OfferedPath, Offers, Prefetched, State
from trunkline.router.routing.core import NoControllerError, RoutingCore
from trunkline.router.routing.handover import Handing, HandoverCounts, HandoverPlan, path_names
from trunkline.router.routing.names import KvIdentity
from trunkline.router.routing.request import Decision, RouteRequest
from trunkline.router.streams.link import ControllerLink
from trunkline.router.streams.links import Links

TICK_SECONDS: Final = 0.1
"""Time between two looks at what has arrived."""
CALL_SECONDS: Final = 10.0
"""Longest time in seconds to wait for a controller's answer."""


def room_of(state: State) -> float:
    """Return for how many tokens a controller's largest tier has room; infinity: it has a remote tier."""
    free = state.blocks_free
    for tier in state.tiers:
        if not tier.problem:
            free = max(free, tier.slots - tier.used)
            if tier.name == "remote":
                return inf
    return float(free * state.chunk_size)


def identity_of(state: State) -> KvIdentity:
    """Return how a controller names its chunks."""
    return KvIdentity(state.fingerprint, state.dtype, state.chunk_size, state.positions_shift)


async def offers(link: ControllerLink, kind: str, page: int) -> Offers:
    """Return a page of what a group offers.

    Raises:
        ApiError: 503, there was no answer.
    """
    answer = await link.call(lambda ticket: OffersCall(ticket, kind, page), CALL_SECONDS)
    return answer if isinstance(answer, Offers) else Offers(0, 0, [], more=False)


class Courier:
    """One handover. Make and use it in the event loop's thread."""

    def __init__(
        self, links: Links, core: RoutingCore, identity: KvIdentity, targets: Iterable[ControllerLink], part: float
    ) -> None:
        """
        Args:
            identity: how the groups name their chunks.
            targets: the groups that may get paths, all of this identity.
            part: part of a target's host memory that may be filled, 0 to 1.
        """
        self._links = links
        self._core = core
        self._identity = identity
        self._targets = {link.name: link for link in targets}
        self._plan = HandoverPlan(
            {link.name: int(part * link.state.host_slots) for link in self._targets.values() if link.state}
        )
        self._calls: set[asyncio.Task[None]] = set()

    @property
    def handed(self) -> HandoverCounts:
        """What has become of the paths."""
        return self._plan.handed

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do."""
        return self._plan.is_idle

    @property
    def waiting(self) -> int:
        """Number of paths that are not sent yet."""
        return self._plan.waiting

    def offer(self, paths: Iterable[OfferedPath], giver: str) -> None:
        """Add paths that a group offers, the most urgent first."""
        self._plan.offer(paths, giver)

    def stop(self) -> None:
        """Give up what is not done."""
        self._plan.stop()
        for call in self._calls:
            call.cancel()

    def round(self) -> None:
        """Look at what has arrived, and send what can be sent."""
        now = self._now()
        for name, link in list(self._targets.items()):
            if link not in self._links or not link.ready:
                del self._targets[name]
                self._plan.left(name)
        for handing in self._plan.flying:
            if handing.target:
                has = self._has(handing.names, self._targets[handing.target], now)
                self._plan.seen(handing, has, len(handing.names), now)
            else:
                self._send(handing, now)
        while (handing_next := self._plan.next()) is not None:
            self._send(handing_next, now)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _has(self, names: list[bytes], link: ControllerLink, now: float) -> int:
        """Return how many of a path's first chunks a group has, in any tier."""
        return int(self._core.index.match(names, now)[link.index][:3].sum())

    def _send(self, handing: Handing, now: float) -> None:
        """Have a group fetch a path; or wait until it can be fetched, or give it up."""
        path = handing.path
        names = handing.names = handing.names or path_names(path, self._identity)
        decision = self._decide(names, len(path.tokens) // TOKEN_BYTES, now) if names else None
        if decision is None:
            self._plan.give_up(handing)
            return
        target = self._links[decision.controller]
        has = self._has(names, target, now)
        if decision.sleeping is not None and self._wake(handing, decision.sleeping.controller, now):
            return
        if has < len(names) and not decision.holders:
            self._plan.give_up(handing)
            return
        self._plan.sent(handing, target.name, has, len(names), now)
        if has < len(names):
            prefetch = Prefetch(0, path.tokens, holders=decision.holders, root=path.root, names=path.names)
            call = asyncio.create_task(self._ask(target, prefetch, handing))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        else:
            self._plan.seen(handing, has, len(names), now)

    def _decide(self, names: list[bytes], tokens: int, now: float) -> Decision | None:
        """Return to which group a path goes: where routing would send such a prompt if only groups that can take
        another path were there; None: there is no such group."""
        open_slots = {self._targets[name].index: name for name in self._plan.open_targets}
        request = RouteRequest(
            b"",
            names=names,
            token_count=tokens,
            exclude=frozenset(link.index for link in self._links if link.index not in open_slots),
        )
        try:
            decision = self._core.route(request, now)
            weighed = decision.weighed
            if weighed is None:
                return None
            candidates = open_slots.keys() & set(weighed.candidates.tolist())
            if not candidates:
                return None
            costs = {open_slots[slot]: float(weighed.costs[slot]) for slot in candidates}
            chosen = self._targets[self._plan.choose(costs)].index
            if chosen != decision.controller:
                decision = self._core.route(msgspec.structs.replace(request, pinned=chosen), now)
        except NoControllerError:
            return None
        return decision

    def _wake(self, handing: Handing, slot: int, now: float) -> bool:
        """Have a group bring chunks from its disk to its host memory; return whether to wait for them."""
        link, is_first = self._links.get(slot), not handing.asleep_until
        if link is None or not self._plan.asleep(handing, now):
            return False
        if is_first:
            path = handing.path
            link.tell(lambda ticket: Prefetch(ticket, path.tokens, root=path.root, names=path.names))
        return True

    async def _ask(self, target: ControllerLink, prefetch: Prefetch, handing: Handing) -> None:
        try:
            answer = await target.call(
                lambda ticket: msgspec.structs.replace(prefetch, ticket=ticket), CALL_SECONDS
            )
        except ApiError:
            return  # nothing will come, and the path is given up in a moment
        coming = isinstance(answer, Prefetched) and answer.coming_tokens > 0
        self._plan.answered(handing, coming, self._now())
