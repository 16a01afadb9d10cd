"""The index against a dictionary of what every controller has said, and of what every ticket expects."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from seeds import seeds

from trunkline.router.routing.index import DEVICE, DISK, EXPECT_SECONDS, EXPECTED, SHARDS, TIERS, ChunkIndex

TOLD = 0b111


@dataclass
class Expectation:
    controller: int
    names: list[bytes]
    end: float = float("inf")


@dataclass
class Oracle:
    """Knows everything, slowly."""

    controllers: int
    told: list[dict[bytes, int]] = field(default_factory=list)
    shadows: dict[int, dict[bytes, int]] = field(default_factory=dict)
    tickets: dict[int, Expectation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.told = [{} for _ in range(self.controllers)]

    def bits(self, controller: int, name: bytes, now: float) -> int:
        expected = any(
            ticket.controller == controller and name in ticket.names and now < ticket.end
            for ticket in self.tickets.values()
        )
        return self.told[controller].get(name, 0) | expected << EXPECTED

    def match(self, names: list[bytes], now: float) -> list[list[int]]:
        found = []
        for controller in range(self.controllers):
            counts = [0] * TIERS
            for name in names:
                bits = self.bits(controller, name, now)
                if not bits:
                    break
                counts[(bits & -bits).bit_length() - 1] += 1
            found.append(counts)
        return found


class Machine:
    """Random calls to both."""

    def __init__(self, seed: int, controllers: int, bytes_max: int) -> None:
        self.rng = random.Random(seed)
        self.index = ChunkIndex(controllers, bytes_max)
        self.oracle = Oracle(controllers)
        self.controllers = controllers
        self.now = 0.0
        self.next_ticket = 0
        self.chains: list[list[bytes]] = []
        for _ in range(14):
            trunk = self.rng.choice(self.chains)[: self.rng.randrange(7)] if self.chains else []
            self.chains.append(trunk + [self.rng.randbytes(16) for _ in range(self.rng.randint(1, 6))])

    def chunks(self) -> tuple[list[bytes], bytes]:
        chain = self.rng.choice(self.chains)
        start = self.rng.choice((0, 0, self.rng.randrange(len(chain))))
        names = chain[start : start + self.rng.randint(1, len(chain))]
        return names, bytes(self.rng.choice((0, 1, 1, 2, 3, 4, 6, 7, 9, 8)) for _ in names)

    def apply(self, controller: int) -> None:
        names, tiers = self.chunks()
        self.index.apply(controller, b"".join(names), tiers)
        for known in (self.oracle.told[controller], self.oracle.shadows.get(controller)):
            if known is not None:
                known.update((name, where & TOLD) for name, where in zip(names, tiers, strict=True))

    def snapshot(self, controller: int) -> None:
        oracle = self.oracle
        if controller not in oracle.shadows or self.rng.random() < 0.05:
            self.index.begin_snapshot(controller)
            oracle.shadows[controller] = {}
        elif self.rng.random() < 0.3:
            self.index.end_snapshot(controller)
            oracle.told[controller] = oracle.shadows.pop(controller)
        else:
            names, tiers = self.chunks()
            self.index.add_snapshot(controller, b"".join(names), tiers)
            oracle.shadows[controller].update(
                (name, where & TOLD) for name, where in zip(names, tiers, strict=True)
            )

    def forget(self, controller: int) -> None:
        self.index.forget(controller)
        oracle = self.oracle
        oracle.told[controller] = {}
        oracle.shadows.pop(controller, None)
        oracle.tickets = {
            number: ticket for number, ticket in oracle.tickets.items() if ticket.controller != controller
        }

    def expect(self, controller: int) -> None:
        chain = self.rng.choice(self.chains)
        # A full index may have lost what was told when it is expected, and expects it then.
        told = self.oracle.told[controller] if not self.index.evicted else {}
        self.index.expect(self.next_ticket, controller, chain, self.now)
        self.oracle.tickets[self.next_ticket] = Expectation(
            controller, [name for name in chain if not told.get(name, 0)]
        )
        self.next_ticket += 1

    def end_one(self) -> None:
        oracle = self.oracle
        number = self.rng.choice([*oracle.tickets, 999_999])
        if self.rng.random() < 0.5:
            self.index.drop(number)
            oracle.tickets.pop(number, None)
        else:
            self.index.settle(number, self.now)
            if number in oracle.tickets:
                ticket = oracle.tickets[number]
                ticket.end = min(ticket.end, self.now + EXPECT_SECONDS)

    def step(self) -> None:
        controller = self.rng.randrange(self.controllers)
        if self.rng.random() < 0.4:
            self.now += self.rng.choice((0.0, 0.01, 0.5, 1.9))
        draw = self.rng.random()
        if draw < 0.45:
            self.apply(controller)
        elif draw < 0.6:
            self.snapshot(controller)
        elif draw < 0.62:
            self.forget(controller)
        elif draw < 0.8:
            self.expect(controller)
        else:
            self.end_one()
        self.oracle.tickets = {n: t for n, t in self.oracle.tickets.items() if self.now < t.end}


@pytest.mark.parametrize("seed", seeds(2))
def test_it_knows_exactly_what_was_told(seed: int) -> None:
    machine = Machine(seed, controllers=random.Random(seed).choice((1, 3, 9, 64)), bytes_max=1 << 20)
    for step in range(800):
        machine.step()
        chain = machine.rng.choice(machine.chains)
        found = machine.index.match(chain, machine.now).tolist()
        assert found == machine.oracle.match(chain, machine.now), (seed, step)
    assert machine.index.evicted == 0
    assert machine.index.expecting <= len(machine.oracle.tickets)
    for controller in range(machine.controllers):
        machine.forget(controller)
    for _ in range(SHARDS * (2 * machine.controllers + 10)):
        machine.index.match(machine.chains[0], machine.now)
    assert machine.index.size == 0, "nothing is left of what nobody has"
    assert machine.index.expecting == 0


@pytest.mark.parametrize("seed", range(6))
def test_a_full_index_misses_things_but_tells_nothing_wrong(seed: int) -> None:
    machine = Machine(seed, controllers=4, bytes_max=20 * 200)
    names = list({name for chain in machine.chains for name in chain})
    hits = 0
    for step in range(800):
        machine.step()
        name = machine.rng.choice(names)
        for controller, tiers in enumerate(machine.index.match([name], machine.now).tolist()):
            bits = machine.oracle.bits(controller, name, machine.now)
            assert not any(count and not bits >> tier & 1 for tier, count in enumerate(tiers)), (seed, step)
            hits += sum(tiers)
        assert machine.index.estimated_bytes <= 20 * 200, (seed, step)
    assert machine.index.evicted > 0
    assert hits > 50
    assert machine.index.size == sum(len(shard) for shard in machine.index._shards)


def test_what_is_looked_for_stays() -> None:
    rng = random.Random(1)
    index = ChunkIndex(2, 1000 * 200)
    used = [rng.randbytes(16) for _ in range(100)]
    index.apply(0, b"".join(used), b"\1" * 100)
    for _ in range(100):
        fresh = [rng.randbytes(16) for _ in range(200)]
        index.apply(1, b"".join(fresh), b"\1" * 200)
        for name in used:
            index.match([name], 0.0)
    assert index.evicted > 15_000
    assert index.match(used, 0.0)[:, DEVICE].tolist() == [100, 0]


def test_an_overlap_counts_each_chunk_in_its_fastest_tier() -> None:
    index = ChunkIndex(3)
    names = [bytes([i]) * 16 for i in range(6)]
    index.apply(0, b"".join(names), bytes([1, 3, 2, 6, 4, 0]))
    index.apply(2, b"".join(names), bytes([0, 1, 1, 1, 1, 1]))
    index.expect(7, 0, names, 0.0)
    overlap = index.match(names, 0.0)
    assert overlap[:, DEVICE].tolist() == [2, 0, 0], "behind a gap nothing counts"
    assert overlap[0, 1:].tolist() == [2, 1, 1]
    assert overlap.sum(axis=1).tolist() == [6, 0, 0]
    index.settle(7, 1.0)
    assert index.match(names, 1.0 + EXPECT_SECONDS - 0.001)[0, EXPECTED] == 1
    assert index.match(names, 1.0 + EXPECT_SECONDS)[0, EXPECTED] == 0


def test_long_prompts_are_counted_right() -> None:
    """More chunks than a byte counts."""
    index = ChunkIndex(65)
    names = [number.to_bytes(16, "little") for number in range(3000)]
    index.apply(64, b"".join(names), b"\1" * 3000)
    index.apply(3, b"".join(names[:700]), b"\4" * 700)
    overlap = index.match(names, 0.0)
    assert np.flatnonzero(overlap.sum(axis=1)).tolist() == [3, 64]
    assert overlap[64, DEVICE] == 3000
    assert overlap[3, DISK] == 700


def test_memory_is_what_is_estimated() -> None:
    """The estimate is no less than what objects take by their own account."""
    index = ChunkIndex(64)
    rng = random.Random(0)
    for _ in range(40):
        names = rng.randbytes(16 * 256)
        index.apply(rng.randrange(64), names, b"\3" * 256)
    held = sum(
        shard.__sizeof__() + sum(name.__sizeof__() + mask.__sizeof__() for name, mask in shard.items())
        for shard in index._shards
    )
    assert 0.5 * index.estimated_bytes < held < 1.1 * index.estimated_bytes


def test_wrong_calls_are_refused() -> None:
    index = ChunkIndex(2)
    with pytest.raises(ValueError, match="2 tiers for 16 bytes of names"):
        index.apply(0, b"x" * 16, b"\1\1")
    with pytest.raises(ValueError, match="no snapshot of controller 1 has begun"):
        index.add_snapshot(1, b"", b"")
    with pytest.raises(ValueError, match="no snapshot of controller 1 has begun"):
        index.end_snapshot(1)
    with pytest.raises(ValueError, match="holds nothing"):
        ChunkIndex(2, 10)
