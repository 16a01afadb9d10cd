"""A prefix that most requests share is computed once in the cluster, and no group becomes a bottleneck for it:
routing sends requests elsewhere when a group is busy, and the group there pulls the prefix."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest
from controller.tier_harness import CHUNK, TIERED, simulate
from msgspec.structs import replace
from seeds import seeds
from simulation.driver import Simulation
from simulation.peers import Network
from simulation.streams import verify

from trunkline.controller.cache.kv_events import announced_tiers
from trunkline.controller.messages import Holder, Submit
from trunkline.kvstore import peers
from trunkline.kvstore.chunks import pack_int32
from trunkline.router.routing.core import Decision, RouteRequest, RoutingCore, RoutingSettings
from trunkline.router.routing.names import KvIdentity

GROUPS = 3
SHARED = [*range(1000, 1000 + 12 * CHUNK)]
"""What nine of ten prompts begin with."""
REQUESTS = 300
CONFIG = replace(
    TIERED, num_blocks=120, host_slots=400, disk_slots=0, remote=False, peers=True, max_context=80, max_rows=4
)


class Cluster:
    """Groups that exchange KV, and a router that knows what they have and how busy they are."""

    def __init__(self, *, pulls: bool) -> None:
        self.network = Network()
        self.groups = [simulate(CONFIG) for _ in range(GROUPS)]
        self.core = RoutingCore(
            map(str, range(GROUPS)), settings=RoutingSettings(floor_tokens=4, request_tokens=8, chunk_tokens=16)
        )
        self.now = 0.0
        self.open: dict[int, tuple[Simulation, int]] = {}
        """By ticket: the group of a request that has not ended, and its number there."""
        self.done: list[tuple[int, int, bool]] = []
        """Of each request that has ended: its group, the shared tokens that it computed, whether it has them."""
        for slot, group in enumerate(self.groups):
            group.tiers.network = self.network
            group.pace_s = 1e-3
            endpoints = self.network.export(group.workers.pool, str(slot), CONFIG.ranks)
            self.core.traits.set_identity(slot, KvIdentity(*group.tree._identity, CHUNK))
            self.core.traits.set_exports(slot, endpoints if pulls else [])
            self.core.set_available(slot, True)

    def ask(self, prompt: list[int]) -> None:
        route = RouteRequest(pack_int32(prompt))
        decision = self.core.route(route, self.now)
        ticket, group = len(self.open) + len(self.done), self.groups[decision.controller]
        group.holders_of = partial(self.holders, decision)
        self.core.sent(ticket, decision, route, self.now)
        self.open[ticket] = group, group.submit(prompt, 4)

    @staticmethod
    def holders(decision: Decision, submit: Submit) -> list[Holder]:
        return decision.holders

    def step(self) -> None:
        """All groups compute a step, and the router hears of it."""
        self.now += 1e-3
        for slot, group in enumerate(self.groups):
            group.step()
            tree = group.tree
            told = [(node.name, announced_tiers(node, tree)) for node in tree.nodes()]
            self.core.index.begin_snapshot(slot)
            self.core.index.add_snapshot(slot, b"".join(n for n, _ in told), bytes(tiers for _, tiers in told))
            self.core.index.end_snapshot(slot)
        for ticket, (group, number) in list(self.open.items()):
            stream = group.streams[number]
            if stream.started:
                self.core.started(ticket, self.now)
            if stream.ended:
                self.core.ended(ticket, self.now)
                del self.open[ticket]
                verify(stream, CONFIG.longest_sequence)
                shares = stream.prompt[: len(SHARED)] == SHARED
                computed = max(0, len(SHARED) - (stream.cached_tokens or 0)) if shares else 0
                self.done.append((self.groups.index(group), computed, shares))


@pytest.fixture(autouse=True)
def pulls_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated steps are so fast that pulls at the usual assumption would not be tried."""
    monkeypatch.setattr(peers, "PEER_READ_US", 1.0)


def live(seed: int, *, pulls: bool) -> Cluster:
    """Requests come faster than one group could answer them."""
    rng, cluster = Random(seed), Cluster(pulls=pulls)
    cluster.ask([*SHARED, 1, 2, 3])
    while cluster.open:
        cluster.step()
    for number in range(REQUESTS):
        own = [2000 + 10 * number + at for at in range(5)]
        cluster.ask([*SHARED, *own] if rng.random() < 0.9 else [*own, *own, *own])
        for _ in range(rng.choice((0, 0, 1, 2))):
            cluster.step()
    while cluster.open:
        cluster.step()
    return cluster


@pytest.mark.parametrize("seed", seeds(3))
def test_a_hot_prefix_is_computed_once_and_served_by_all_groups(seed: int) -> None:
    cluster = live(seed, pulls=True)
    assert sum(computed for _, computed, _ in cluster.done) == len(SHARED), "it is computed once in the cluster"
    served = [sum(group == slot for group, _, shares in cluster.done if shares) for slot in range(GROUPS)]
    total = sum(served)
    assert total > 0.8 * REQUESTS
    assert min(served) > 0, f"one group is spared: {served}"
    assert max(served) < 0.6 * total, f"one group does most: {served}"


def test_without_pulls_each_group_computes_it() -> None:
    """So the test above can fail."""
    cluster = live(1, pulls=False)
    assert sum(computed for _, computed, _ in cluster.done) > len(SHARED)
