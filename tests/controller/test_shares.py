"""Tenants' shares of the device's blocks: which idle leaf loses its block, and whose chunks count."""

from __future__ import annotations

import random

import pytest
from seeds import seeds
from simulation.driver import Simulation

from trunkline.controller.cache.block_pool import BlockPool
from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.cache.radix_tree import Node
from trunkline.controller.engine.validation import problem_of_submit
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import Submit
from trunkline.kvstore.chunks import NO_BLOCK, pack_int32
from trunkline.kvstore.shares import KvAccount, Standing
from trunkline.kvstore.tier import TierKind
from trunkline.worker.messages import Sampling

BLOCKS = 40


class Device:
    """Paths of several tenants in a cache that is always full."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pool = BlockPool(BLOCKS)
        self.tree = RadixCache(self.pool, 1)
        shares = self.tree.tiers.shares
        self.accounts = [None, shares.account("a", 0.2, 0.5), shares.account("b", 0.3, 0.4)]
        self.now = 0.0
        self.serial = 0

    def standing(self, account: KvAccount | None) -> Standing:
        return self.tree.tiers.shares.standing(account, TierKind.DEVICE)

    def idle(self) -> list[Node]:
        return [node for node in self.tree.nodes() if self.tree._is_idle_leaf(node)]

    def add(self, tenant: int) -> None:
        """A request of a tenant computes a few chunks behind some that the tenant has, or that another has."""
        self.now += 1.0
        parent = self.tree.root(b"")
        node = self.rng.choice([parent, *self.tree.nodes()]) if self.rng.random() < 0.5 else parent
        self.tree.hold(node)
        path: list[Node] = []
        for _ in range(self.rng.randint(1, 4)):
            if not self.pool.free_count and not self.evict():
                break
            self.serial += 1
            child = self.tree.insert(node, pack_int32([self.serial]), self.pool.allocate(), 0, self.now)
            self.tree.hold(child)
            self.tree.release(node, self.now)
            node = child
            path.append(node)
        self.tree.own(path, self.accounts[tenant])
        self.tree.release(node, self.now)
        self.tree.keep(path, self.now, 0.0)

    def evict(self) -> bool:
        """One block is needed: the lowest standing goes first, and in it the least recently used leaf."""
        idle = self.idle()
        before = {node: (self.standing(node.account), node.last_use) for node in idle}
        freed = self.tree.evict(1)
        assert freed == (len(idle) > 0), "a floor stopped an eviction"
        gone = [node for node in idle if node.block == NO_BLOCK or node.parent is None]
        assert not gone or before[gone[0]] == min(before.values())
        return freed > 0

    def check(self) -> None:
        nodes = [node for node in self.tree.nodes() if node.on_device]
        for account in self.tree.tiers.shares.accounts():
            assert account.counts[TierKind.DEVICE] == sum(node.account is account for node in nodes)


@pytest.mark.parametrize("seed", seeds(4))
def test_the_lowest_standing_goes_first(seed: int) -> None:
    device = Device(seed)
    for _ in range(800):
        device.add(device.rng.randrange(3))
        device.check()


@pytest.mark.parametrize("seed", seeds(3))
def test_a_floor_holds_against_a_backlog(seed: int) -> None:
    device = Device(seed)
    account = device.accounts[1]
    assert account is not None
    while account.counts[TierKind.DEVICE] < 0.45 * BLOCKS:
        device.add(1)
    for _ in range(500):
        device.add(0)
        assert account.counts[TierKind.DEVICE] >= 0.2 * BLOCKS


def serve(simulation: Simulation, prompt: list[int], tenant: str, share: tuple[float, float]) -> None:
    simulation.submit(prompt, 2, salt=tenant.encode(), tenant=tenant, kv_share=share)
    while simulation.step():
        pass


def test_a_group_keeps_a_tenants_floor_while_others_fill_it() -> None:
    simulation = Simulation(EngineConfig(num_blocks=24, chunk_size=4, max_context=64, token_budget=64, max_rows=4))
    prompt = list(range(16))
    serve(simulation, prompt, "kept", (0.25, 1.0))
    for start in range(100, 2000, 50):
        serve(simulation, list(range(start, start + 16)), "others", (0.0, 1.0))
    root = simulation.tree.find_root(b"kept")
    assert root is not None
    assert len(simulation.tree.match(root, pack_int32(prompt), 1 << 30).path) == 4


def test_shares_are_parts() -> None:
    for share in ((-0.1, 1.0), (0.6, 0.5), (0.0, 1.1), (float("nan"), 1.0), (0.0, float("nan"))):
        submit = Submit(1, pack_int32([1]), 1, 4, Sampling(), kv_floor=share[0], kv_ceiling=share[1])
        assert "kv_floor" in problem_of_submit(submit, 0)
