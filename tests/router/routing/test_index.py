"""The index against a dictionary of what every controller has said, and of what every ticket expects."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from seeds import seeds

from trunkline.kvstore.native_names import library
from trunkline.router.routing import index as index_module
from trunkline.router.routing.index import DEVICE, DISK, EXPECT_SECONDS, EXPECTED, TIERS, ChunkIndex
from trunkline.router.routing.name_table import SHARDS, DictTable, NameTable, row_bytes
from trunkline.router.routing.native_table import NativeTable

pytestmark = pytest.mark.sanitized

TOLD = 0b111
TABLES: list[type[NameTable]] = [DictTable] if library is None else [DictTable, NativeTable]


@pytest.fixture(params=TABLES)
def table(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[NameTable]:
    """The kind of table that indices have during a test."""
    monkeypatch.setattr(index_module, "new_table", request.param)
    kind: type[NameTable] = request.param
    return kind


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


@pytest.mark.usefixtures("table")
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
def test_a_full_index_misses_things_but_tells_nothing_wrong(seed: int, table: type[NameTable]) -> None:
    bytes_max = 20 * table(row_bytes(5)).bytes_each()  # type: ignore[call-arg]
    machine = Machine(seed, controllers=4, bytes_max=bytes_max)
    names = list({name for chain in machine.chains for name in chain})
    hits = 0
    for step in range(800):
        machine.step()
        name = machine.rng.choice(names)
        for controller, tiers in enumerate(machine.index.match([name], machine.now).tolist()):
            bits = machine.oracle.bits(controller, name, machine.now)
            assert not any(count and not bits >> tier & 1 for tier, count in enumerate(tiers)), (seed, step)
            hits += sum(tiers)
        assert machine.index.estimated_bytes <= bytes_max, (seed, step)
    assert machine.index.evicted > 0
    assert hits > 50
    assert machine.index.size == sum(machine.index._table.shard_size(shard) for shard in range(SHARDS))


def test_what_is_looked_for_stays(table: type[NameTable]) -> None:
    rng = random.Random(1)
    index = ChunkIndex(2, 1000 * table(row_bytes(3)).bytes_each())  # type: ignore[call-arg]
    used = [rng.randbytes(16) for _ in range(100)]
    index.apply(0, b"".join(used), b"\1" * 100)
    for _ in range(100):
        fresh = [rng.randbytes(16) for _ in range(200)]
        index.apply(1, b"".join(fresh), b"\1" * 200)
        for name in used:
            index.match([name], 0.0)
    assert index.evicted > 15_000
    assert index.match(used, 0.0)[:, DEVICE].tolist() == [100, 0]


@pytest.mark.usefixtures("table")
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


@pytest.mark.usefixtures("table")
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


@pytest.mark.usefixtures("table")
def test_memory_is_what_is_estimated() -> None:
    """The estimate is no less than what objects take by their own account."""
    index = ChunkIndex(64)
    rng = random.Random(0)
    for _ in range(40):
        names = rng.randbytes(16 * 256)
        index.apply(rng.randrange(64), names, b"\3" * 256)
    held = index.held_bytes
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


@pytest.mark.skipif(library is None, reason="the library of names is not installed or does not run here")
@pytest.mark.parametrize("seed", seeds(2))
def test_the_compiled_table_is_the_same(seed: int) -> None:
    """After each of many random calls both tables have the same names with the same bits, in the same order."""
    rng = random.Random(seed)
    columns = 3
    tables: list[NameTable] = [DictTable(row_bytes(columns)), NativeTable(row_bytes(columns))]
    pool = [bytes([rng.randrange(4)]) + rng.randbytes(15) for _ in range(150)]  # in four shards, so these grow

    def both(call: str, *arguments: object, **named: object) -> None:
        first, second = (getattr(each, call)(*arguments, **named) for each in tables)
        assert first == second, (call, arguments)

    for _ in range(4000):
        column, shard = rng.randrange(1, columns), rng.randrange(4)
        some = rng.choices(pool, k=rng.randrange(30))
        packed, draw = b"".join(some), rng.random()
        if draw < 0.3:
            both("write", column, packed, bytes(rng.choice((0, 0, 1, 2, 5, 7, 15)) for _ in some))
        elif draw < 0.5:
            founds = [bytearray(len(some)) for _ in tables]
            told = rng.random() < 0.2
            added = [t.expect(column, packed, f, though_told=told) for t, f in zip(tables, founds, strict=True)]
            assert added[0] == added[1]
            assert founds[0] == founds[1]
        elif draw < 0.65:
            both("unexpect", column, packed)
        elif draw < 0.7:
            both("wipe", shard, 0xF << TIERS * column)
        elif draw < 0.85:
            both("evict", shard, rng.randrange(tables[0].shard_size(shard) + 1))
        elif draw < 0.87 and columns < 150:
            columns += rng.randrange(20)
            for each in tables:
                each.set_width(row_bytes(columns))
        else:
            some.sort(key=lambda name: not tables[0].look_up(name).rows.any())  # the known ones first
            first, second = (each.look_up(b"".join(some)) for each in tables)
            assert (first.rows == second.rows).all()
            assert (first.counts == second.counts).all()
        both("shard_size", shard)
