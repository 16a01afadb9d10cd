"""Tells groups where other groups export KV, before any request needs it: ranks connect then, and make their keys,
so that the first pull is as fast as all others.

A group is introduced to the next ones in the order of slots, so each is known to as many as any other. It is done
again when a group has joined or left, when the group has new workers, and often enough that the peers are not
forgotten.
"""

from __future__ import annotations

from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

from trunkline.controller.messages import Holder, Prefetch
from trunkline.kvstore.root_keys import SALT_ROOT
from trunkline.router.routing.core import RoutingCore
from trunkline.router.routing.index import IntArray
from trunkline.router.streams.link import ControllerLink

INTRODUCED_MAX: Final = 16
"""Largest number of peers to which a group is introduced: each takes a connection and a thread of each rank."""
AGAIN_SECONDS: Final = 120.0
"""Time in seconds after which peers are named again; below `trunkline.kvstore.peers.PEER_IDLE_S`."""
_ANY_ROOT: Final = SALT_ROOT
"""The key of a root, below which no chunks are asked for."""


class _Told(NamedTuple):
    """What a group was told of its peers."""

    peers: IntArray
    """The array from which `named` was made."""
    named: list[Holder]
    connections: int
    at: float


class Introductions:
    """Introduces groups to each other. Call its methods from the event loop's thread only."""

    def __init__(self, core: RoutingCore) -> None:
        self._core = core
        self._told: WeakKeyDictionary[ControllerLink, _Told] = WeakKeyDictionary()

    def changed(self, link: ControllerLink, now: float) -> None:
        """Note that a group has reported its state, which routing knows already.

        Args:
            now: seconds of any clock that does not go back.
        """
        if not link.ready:
            return
        peers, told = self._core.peers(link.index), self._told.get(link)
        is_due = told is None or told.connections != link.connections or now >= told.at + AGAIN_SECONDS
        if not is_due and told is not None and told.peers is peers:
            return
        named = self._named(link.index, peers)
        if told is not None and not is_due and told.named == named:
            self._told[link] = told._replace(peers=peers)
            return
        self._told[link] = _Told(peers, named, link.connections, now)
        if named:
            link.tell(lambda ticket: Prefetch(ticket, b"", holders=named, root=_ANY_ROOT))

    def _named(self, slot: int, peers: IntArray) -> list[Holder]:
        at = int(peers.searchsorted(slot, side="right"))
        others = [other for other in [*peers[at:].tolist(), *peers[:at].tolist()] if other != slot]
        core = self._core
        return [Holder(core.names[other], core.traits.exports(other), 0, 1) for other in others[:INTRODUCED_MAX]]
