"""The peers: other groups from whose host memory chunks can be pulled. Part of the directory; pure.

A peer is a member of the cluster at certain endpoints, and has a number here. A group that has been started again
is at other endpoints, so it is another peer. Speed and health are kept for each peer by itself: a bad link, or a
group that hangs, must not stop pulls from the others. What is assumed of a peer before its first pull is low on
purpose, because only a pull can correct it.

Ranks know peers by number. They are told where a peer is before the first move that names it, and that it is gone
when it has been of no use for a while (`PeerBook.take_news`).
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from trunkline.kvstore.tier import TierTotals
from trunkline.kvstore.tier_health import TierHealth

PEER_READ_US: Final = 300.0
"""Assumed microseconds of one pull, until one was measured at any peer: about what a chunk of a small model
takes in a fast network."""
PEERS_MAX: Final = 64
"""Largest number of peers that are known at once; each takes a connection of each rank."""
PEER_IDLE_S: Final = 300.0
"""Seconds without use after which a peer is forgotten."""


@dataclass(slots=True, eq=False)
class Peer:
    """Another group from which chunks can be pulled."""

    number: int
    member: str
    """Id of the group as a member of the cluster."""
    endpoints: tuple[str, ...]
    """Where the group's ranks export chunks, by rank."""
    health: TierHealth
    used: float
    """Time at which a request last named the peer."""


class PeerNews(NamedTuple):
    """News of a peer for the ranks: its endpoints, or that it is gone."""

    number: int
    endpoints: tuple[str, ...]
    """Where the peer's ranks export chunks; empty: the peer is gone."""


class PeerBook:
    """The peers by number, with their health."""

    def __init__(self, pulls_in_flight: int, totals: TierTotals) -> None:
        """
        Args:
            pulls_in_flight: Largest number of pulls at once from one peer.
            totals: Totals of all peers together, to be counted on.
        """
        self.totals = totals
        self._pulls_in_flight = pulls_in_flight
        self._peers: dict[int, Peer] = {}
        self._numbers: dict[tuple[str, tuple[str, ...]], int] = {}
        self._next = 0
        self._news: list[PeerNews] = []

    def __len__(self) -> int:
        return len(self._peers)

    def __contains__(self, number: int) -> bool:
        return number in self._peers

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers.values())

    def health(self, number: int) -> TierHealth:
        """Return the health of a peer that is known."""
        return self._peers[number].health

    def is_measured(self, number: int) -> bool:
        """Return whether a chunk was pulled from a peer that is known."""
        return self._peers[number].health.is_measured

    def meet(self, member: str, endpoints: tuple[str, ...], now: float) -> Peer | None:
        """Return the peer at these endpoints, a new one if it is not known; None if too many are known."""
        number = self._numbers.get((member, endpoints))
        if number is not None:
            peer = self._peers[number]
            peer.used = max(peer.used, now)
            return peer
        if len(self._peers) >= PEERS_MAX:
            return None
        measured = [peer.health.read_us for peer in self if peer.health.is_measured]
        health = TierHealth(PEER_READ_US, self._pulls_in_flight, 1, self.totals, is_guess=True)
        health.read_us = min(measured, default=PEER_READ_US)
        peer = Peer(self._next, member, endpoints, health, now)
        self._next += 1
        self._peers[peer.number] = peer
        self._numbers[member, endpoints] = peer.number
        self._news.append(PeerNews(peer.number, endpoints))
        return peer

    def look(self, now: float, named: Container[int]) -> list[int]:
        """End pauses that are over, doubt old estimates, and forget peers that have been of no use for a while.
        Return their numbers.

        Args:
            named: Peers that are said to have chunks; these are not forgotten.
        """
        idle = []
        for peer in self._peers.values():
            peer.health.look(now)
            if now - peer.used > PEER_IDLE_S and not peer.health.reading and peer.number not in named:
                idle.append(peer)
        for peer in idle:
            del self._peers[peer.number]
            del self._numbers[peer.member, peer.endpoints]
            self._news.append(PeerNews(peer.number, ()))
        return [peer.number for peer in idle]

    def take_news(self) -> list[PeerNews]:
        """Return what ranks must be told since the last call, in order."""
        if news := self._news:
            self._news = []
        return news

    def doubt(self) -> None:
        """Lower the estimates of what pulls cost a little (`TierHealth.doubt`)."""
        for peer in self:
            peer.health.doubt()

    @property
    def read_us(self) -> float:
        """Microseconds of one pull, on average over the peers from which chunks were pulled; 0: none was."""
        measured = [peer.health.read_us for peer in self if peer.health.is_measured]
        return sum(measured) / len(measured) if measured else 0.0

    @property
    def problem(self) -> str:
        """What is wrong with the peers that are paused; "": none is."""
        return "; ".join(f"{peer.member}: {peer.health.problem}" for peer in self if peer.health.problem)
