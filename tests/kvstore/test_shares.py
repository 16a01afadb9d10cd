"""Tenants' shares of host memory and disk: floors that others do not evict, and ceilings."""

from __future__ import annotations

import random

import pytest
from seeds import seeds

from trunkline.kvstore.chunks import ChunkName, TieredChunk
from trunkline.kvstore.directory import Directory
from trunkline.kvstore.shares import KvAccount, SharedHeap, Shares, Standing
from trunkline.kvstore.tier import TierKind
from trunkline.kvstore.tier_moves import MoveStatus
from trunkline.kvstore.tier_policy import DirectoryConfig, EvictionPolicy, HeapVerdict

HOST, DISK = 20, 40
TIERS = (TierKind.HOST, TierKind.DISK)


class Tenants:
    """Two tenants that fill host memory and disk with chunks of which each stands alone."""

    def __init__(self, seed: int, floor: float, ceiling: float) -> None:
        self.rng = random.Random(seed)
        policy = self.rng.choice([EvictionPolicy.LRU, EvictionPolicy.LOOK_AHEAD])
        config = DirectoryConfig(
            host_slots=HOST, disk_slots=DISK, policy=policy, exclusive=self.rng.random() < 0.5
        )
        self.directory: Directory[TieredChunk] = Directory(config)
        account = self.directory.shares.account("owner", floor, ceiling)
        assert account is not None
        self.account: KvAccount = account
        self.root = TieredChunk(None, ChunkName(b"/"))
        self.step = 0

    def add(self, *, owned: bool) -> None:
        """A request of the tenant with the share, or of another, computes a chunk and leaves."""
        self.step += 1
        chunk = TieredChunk(self.root, ChunkName(self.step.to_bytes(16, "little")))
        if owned:
            self.directory.own([chunk], self.account)
        self.directory.used([chunk], float(self.step))
        self.directory.save(chunk, self.step)
        for move in self.directory.moves(float(self.step)):
            self.directory.done(move.id, MoveStatus.DONE, float(self.step), elapsed_us=1.0)
        self.directory.lost()
        self.directory.check()

    def has(self, tier: TierKind) -> int:
        return self.account.counts[tier]


@pytest.mark.parametrize("seed", seeds(5))
def test_others_never_push_a_tenant_below_its_floor(seed: int) -> None:
    tenants = Tenants(seed, 0.3, 1.0)
    for _ in range(HOST + DISK):
        tenants.add(owned=True)
    before = {tier: tenants.has(tier) for tier in TIERS}
    assert before[TierKind.DISK] >= 0.9 * DISK
    for _ in range(1000):
        tenants.add(owned=False)
        assert tenants.has(TierKind.HOST) >= 0.3 * HOST
        assert tenants.has(TierKind.DISK) >= 0.3 * DISK
    assert tenants.has(TierKind.HOST) == 0.3 * HOST
    assert tenants.has(TierKind.DISK) == 0.3 * DISK


@pytest.mark.parametrize("seed", seeds(5))
def test_a_tenant_above_its_ceiling_replaces_its_own_chunks(seed: int) -> None:
    tenants = Tenants(seed, 0.0, 0.25)
    for _ in range(HOST + DISK):
        tenants.add(owned=False)
    for _ in range(2000):
        tenants.add(owned=tenants.rng.random() < 0.8)
        assert tenants.has(TierKind.HOST) <= 0.25 * HOST + 2  # one above, and the slot that is kept free
        assert tenants.has(TierKind.DISK) <= 0.25 * DISK + 1


@pytest.mark.parametrize("seed", seeds(3))
def test_floors_of_a_whole_tier_stop_nothing(seed: int) -> None:
    tenants = Tenants(seed, 1.0, 1.0)
    for _ in range(2 * (HOST + DISK)):
        tenants.add(owned=True)
    for _ in range(200):
        tenants.add(owned=False)
    assert tenants.directory.copies.host.used_count <= HOST
    assert tenants.has(TierKind.DISK) == DISK, "the floor is kept on disk, where nothing must go"


def test_standings_follow_counts() -> None:
    shares = Shares(lambda chunk: (chunk.last_use,), {TierKind.HOST: 10})
    assert shares.account("none", 0.0, 1.0) is None
    account = shares.account("some", 0.2, 0.5)
    assert account is not None
    found = []
    for account.counts[TierKind.HOST] in range(7):
        found.append(shares.standing(account, TierKind.HOST))
    assert found == [Standing.AT_FLOOR] * 3 + [Standing.ORDINARY] * 3 + [Standing.ABOVE_CEILING]
    assert shares.account("some", 0.0, 1.0) is account, "a share that is taken back counts at once"
    assert shares.standing(account, TierKind.HOST) is Standing.ORDINARY
    assert shares.standing(None, TierKind.HOST) is Standing.ORDINARY


@pytest.mark.parametrize("seed", seeds(5))
def test_the_heap_finds_the_same_as_sorting(seed: int) -> None:
    rng = random.Random(seed)
    shares = Shares(lambda chunk: (chunk.last_use,), {TierKind.HOST: 60})
    heap: SharedHeap[TieredChunk] = SharedHeap(shares, TierKind.HOST)
    accounts = [None, shares.account("a", 0.2, 0.4), shares.account("b", 0.1, 0.2), shares.account("c", 0.3, 1.0)]
    present: list[TieredChunk] = []
    for number in range(3000):
        if len(present) < 60 and rng.random() < 0.6:
            chunk = TieredChunk(None, ChunkName(number.to_bytes(16, "little")))
            chunk.account, chunk.last_use = rng.choice(accounts), rng.random()
            shares.count(chunk, TierKind.HOST, 1)
            present.append(chunk)
            heap.push(chunk)
        elif present:
            barred = rng.choice(accounts)
            worth = rng.random()

            def judge(chunk: TieredChunk, barred: KvAccount | None = barred, worth: float = worth) -> HeapVerdict:
                stops = chunk.account is barred or chunk.last_use > worth
                return HeapVerdict.STOP if stops else HeapVerdict.TAKE

            allowed = [chunk for chunk in present if judge(chunk) is HeapVerdict.TAKE]
            wanted = min(allowed, key=lambda chunk: shares.rank(chunk, TierKind.HOST), default=None)
            assert heap.search(judge) is wanted
            if wanted is not None:
                heap.discard(wanted)
                shares.count(wanted, TierKind.HOST, -1)
                present.remove(wanted)
        assert len(heap) == len(present)
        assert set(heap) == set(present)
