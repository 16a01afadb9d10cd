"""Sessions over simulated tiers, and ways to make their chunks sink to where a test wants them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace
from simulation.driver import Simulation
from simulation.streams import Options, Stream, verify

from trunkline.controller.cache.radix_tree import Node
from trunkline.controller.engine_config import EngineConfig
from trunkline.kvstore.chunks import NO_SLOT
from trunkline.kvstore.tier import TierKind

CHUNK = 4
Drops = tuple[tuple[int, int], ...]
TIERED = EngineConfig(
    num_blocks=40,
    chunk_size=CHUNK,
    max_context=96,
    token_budget=40,
    max_rows=8,
    host_slots=40,
    disk_slots=80,
    remote=True,
    preemption="swap",
)
FIRST = 30
"""Tokens of a session's first turn, with four of output."""
CUTS: list[Drops] = [
    ((4, 16),),
    ((0, 16),),
    ((0, 20),),
    ((5, 18),),
    ((6, 7),),
    ((5, 8), (9, 11)),
    ((3, 13), (14, 15), (17, 21)),
    ((0, 31),),
    ((4, 8), (12, 37)),
]


def simulate(config: EngineConfig = TIERED, *, pace_s: float = 1e-5) -> Simulation:
    """Fast tiers: a move takes a few steps, a step 10 µs, and loading pays if nothing else is said."""
    simulation = Simulation(config)
    simulation.pace_s = pace_s
    for health in simulation.tree.tiers.health.values():
        health.read_us = 1.0
    return simulation


def settle(simulation: Simulation) -> None:
    """Until every chunk is where it is to be and nobody moves any more."""
    for _ in range(1000):
        simulation.now += simulation.pace_s
        planned, moved = simulation.plan(), simulation.move_chunks()
        answered = simulation.answer()
        if not (planned or moved or answered or simulation.engine.traffic.in_flight):
            return
    raise AssertionError("the tiers never come to rest")


def sink(simulation: Simulation, tier: TierKind) -> None:
    """All chunks that can be are in this tier and below, and in none above."""
    settle(simulation)
    kv, tree = simulation.scheduler.kv, simulation.tree
    kv.make_room(simulation.engine.config.num_blocks)
    for node in sorted(tree.nodes(), key=lambda node: -node.depth):
        if tier > TierKind.HOST and node.host != NO_SLOT and (node.disk_ready or node.remote):
            tree.tiers.mover.drop_host(node)
        if tier > TierKind.DISK and node.disk != NO_SLOT and node.remote:
            tree.tiers.copies.drop_disk(node)
    tree.drop_lost()


class Session:
    """A client that always sends its whole history."""

    def __init__(
        self, simulation: Simulation, start: int = 100, salt: bytes = b"", history: Iterable[int] = ()
    ) -> None:
        self.simulation = simulation
        self.history = list(history)
        self._next = start
        self._salt = salt

    def send(self, new: int, max_tokens: int = 4, drops: Drops = (), ttl: float = 0.0) -> int:
        """A turn of so many new tokens begins."""
        self.history += range(self._next, self._next + new)
        self._next += new
        options: Options = {"drops": drops, "ttl": ttl, "salt": self._salt}
        return self.simulation.submit(list(self.history), max_tokens, **options)

    def turn(self, new: int, max_tokens: int = 4, drops: Drops = (), ttl: float = 0.0) -> Stream:
        """A turn, from its beginning to its end."""
        request = self.send(new, max_tokens, drops, ttl)
        self.simulation.run()
        return self.ended(request)

    def ended(self, request: int) -> Stream:
        """The turn's answer, which is the oracle's."""
        stream = self.simulation.streams[request]
        verify(stream, self.simulation.engine.config.longest_sequence)
        self.history += stream.output
        return stream


def sunken(tier: TierKind, pace_s: float = 1e-5, **changes: Any) -> Session:
    """Return a session whose first turn of 30 tokens is in a tier; the engine is like `TIERED` but for changes."""
    session = Session(simulate(replace(TIERED, **changes), pace_s=pace_s))
    session.turn(30)
    sink(session.simulation, tier)
    return session


def cut_of(stream: Stream) -> str:
    """What became of its cut: kept, or recomputed; "" without one."""
    assert stream.started is not None
    return stream.started.cut


def tiers_of(stream: Stream) -> list[int]:
    """Cached tokens by tier of this group: device, host, disk, remote."""
    assert stream.started is not None
    return stream.started.tier_tokens[: TierKind.PEER]


def pulled_of(stream: Stream) -> int:
    """Cached tokens that came from peers."""
    assert stream.started is not None
    return stream.started.tier_tokens[TierKind.PEER]


def miss_of(stream: Stream) -> tuple[str, int]:
    """Why something was missed, and from which token on."""
    assert stream.started is not None
    return str(stream.started.miss), stream.started.miss_token


def below(node: Node) -> list[Node]:
    """All chunks below a node."""
    return [each for child in node.children.values() for each in (child, *below(child))]
