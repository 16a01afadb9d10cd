"""The directory under random orders and faults, with a model of every byte that its tiers hold.

The model keeps what lies in each slot of the host pool, of the disk and of the remote tier, and what peers have;
moves are carried out some time after they were ordered and reported some time after that. Whatever happens, a load
must find in its host slot the bytes that were computed for its chunk, and `check` must find nothing to complain
about.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from seeds import seeds

from trunkline.kvstore.chunks import ChunkName, SlotId, TieredChunk
from trunkline.kvstore.copies import IndexEvent
from trunkline.kvstore.directory import Directory
from trunkline.kvstore.next_use import TurnEnd
from trunkline.kvstore.tier import TierKind
from trunkline.kvstore.tier_moves import Move, MoveStatus
from trunkline.kvstore.tier_policy import DirectoryConfig, EvictionPolicy

Content = tuple[bytes, int]
"""What a slot holds: a chunk's name (its bytes are a function of it) and the generation it was written with."""
GARBAGE: Content = (b"garbage", -1)
FANOUT = 3
DEPTH = 4


class Chunk(TieredChunk):
    """A node of the owner's tree."""

    __slots__ = ("children", "placed")

    def __init__(self, parent: Chunk | None, name: bytes) -> None:
        super().__init__(parent, ChunkName(name))
        self.children: dict[int, Chunk] = {}
        self.placed = False

    @property
    def on_device(self) -> bool:
        return self.placed


@dataclass
class World:
    """What the workers' tiers really hold. Disk and remote survive a crash."""

    host: dict[int, Content] = field(default_factory=dict)
    disk: dict[int, Content] = field(default_factory=dict)
    remote: set[bytes] = field(default_factory=set)
    peers: dict[str, set[bytes]] = field(default_factory=dict)
    """What each peer has in host memory, by its endpoint."""
    where: dict[int, str] = field(default_factory=dict)
    """Endpoint of each peer that the directory knows, by its number."""


@dataclass
class Plan:
    """The step being planned: of one plan all saves run before all loads, in no order among themselves."""

    step: int = 1
    saves: dict[int, Content] = field(default_factory=dict)
    loads: list[tuple[int, Content]] = field(default_factory=list)


class Life:
    """Owner, workers and index in one; what they do next is drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        pause_s = rng.choice([0.0, 0.0, 0.03])
        self.options = {
            "host_slots": rng.randint(1, 8),
            "disk_slots": rng.choice([0, 1, 4, 9, 12]),
            "remote": rng.random() < 0.4,
            "peers": rng.random() < 0.5,
            "pulls_in_flight": 2,
            "policy": rng.choice(list(EvictionPolicy)),
            "write_behind": rng.random() < 0.7,
            "host_free": rng.randrange(3),
            "reads_in_flight": 3,
            "writes_in_flight": 2,
            "remote_known": 5,
            "exclusive": rng.random() < 0.5,
            "write_pause_s": pause_s,
            "write_within_s": rng.choice([1.0, 3.0]) * pause_s,
        }
        self.world = World()
        self.index: dict[int, tuple[bytes, int]] = {}
        self.now = 0.0
        self.boot = 0
        self.boot_up()

    def boot_up(self) -> None:
        self.boot += 1
        config = DirectoryConfig(**self.options, first_generation=self.boot << 32)  # type: ignore[arg-type]
        self.directory: Directory[Chunk] = Directory(config)
        self.root = Chunk(None, b"/")
        self.chunks: dict[bytes, Chunk] = {}
        self.world.host.clear()
        self.ordered: list[Move[Chunk]] = []
        self.executed: list[tuple[Move[Chunk], MoveStatus]] = []
        self.plan = Plan()
        self.world.where.clear()
        self.claims: list[Chunk] = []
        self.pins: list[list[Chunk]] = []
        self.may_lose = False

    def path_to(self, name: bytes) -> list[Chunk]:
        """The chunks on the way to `name`, made where they are missing."""
        path: list[Chunk] = []
        for depth in range(1, len(name) + 1):
            part = name[:depth]
            if part not in self.chunks:
                parent = path[-1] if path else self.root
                self.chunks[part] = parent.children[part[-1]] = Chunk(parent, part)
            path.append(self.chunks[part])
        return path

    def remove(self, chunk: Chunk) -> None:
        for child in list(chunk.children.values()):
            self.remove(child)
        self.directory.forget(chunk)
        del self.chunks[chunk.name]
        assert isinstance(chunk.parent, Chunk)
        del chunk.parent.children[chunk.name[-1]]
        chunk.parent = None

    def some(self) -> Chunk | None:
        return self.chunks[self.rng.choice(sorted(self.chunks))] if self.chunks else None

    # The device side.

    def compute(self) -> None:
        """A request is computed: its chunks are on the device, and saved or not."""
        path = self.path_to(bytes(self.rng.randrange(FANOUT) for _ in range(self.rng.randint(1, DEPTH))))
        self.directory.used(path, self.now)
        for chunk in path:
            chunk.placed = True
            self.directory.placed(chunk)
            self.save(chunk, forced=self.rng.random() < 0.1)

    def save(self, chunk: Chunk, *, forced: bool) -> None:
        if chunk.host_ready:
            return
        saved = self.directory.save(chunk, self.plan.step, forced=forced)
        if saved is not None:
            slot, generation = saved
            assert slot not in self.plan.saves, "written twice in a plan"
            assert all(slot != read for read, _ in self.plan.loads), "written in a plan that reads it"
            self.plan.saves[slot] = chunk.name, generation

    def load(self) -> None:
        """A request finds chunks in host memory."""
        for chunk in list(self.chunks.values()):
            if chunk.host_ready and not chunk.placed and self.rng.random() < 0.5:
                slot, generation = self.directory.load(chunk, self.plan.step)
                self.plan.loads.append((slot, (chunk.name, generation)))
                chunk.placed = True
                self.directory.placed(chunk)

    def leave_device(self) -> None:
        """Blocks are needed for something else."""
        for chunk in sorted(self.chunks.values(), key=lambda c: -c.depth):
            if chunk.is_forgotten or not chunk.placed or self.rng.random() < 0.3:
                continue
            if any(self.on_device(child) for child in chunk.children.values()):
                continue
            if chunk.claims:
                self.save(chunk, forced=True)
            chunk.placed = False
            self.directory.left_device(chunk)
            if not chunk.is_stored:
                self.remove(chunk)  # chunks below it could not be reached any more

    def end_step(self) -> None:
        """The plan is carried out."""
        self.world.host.update(self.plan.saves)
        for slot, wanted in self.plan.loads:
            assert self.world.host.get(slot) == wanted, "loaded the KV of another chunk"
        self.plan = Plan(self.plan.step + 1)

    # Wishes.

    def want(self) -> None:
        if (chunk := self.some()) is not None:
            job = self.rng.randrange(6)
            self.directory.want(job, (float(self.rng.randrange(10)), float(job)), self.path_to(chunk.name))

    def unwant(self) -> None:
        self.directory.unwant(self.rng.randrange(6))

    def claim(self) -> None:
        if (chunk := self.some()) is not None and self.directory.claim(chunk):
            self.claims.append(chunk)

    def unclaim(self) -> None:
        if self.claims:
            self.directory.unclaim(self.claims.pop(self.rng.randrange(len(self.claims))))

    def pin(self) -> None:
        if (chunk := self.some()) is not None and self.directory.pin(path := self.path_to(chunk.name)):
            self.pins.append(path)

    def unpin(self) -> None:
        if self.pins:
            self.directory.unpin(self.pins.pop(self.rng.randrange(len(self.pins))))

    def keep(self) -> None:
        if (chunk := self.some()) is not None:
            self.directory.keep(self.path_to(chunk.name), self.now + self.rng.randint(1, 20))

    def expire(self) -> None:
        self.now += self.rng.randint(1, 5)
        for chunk in self.directory.expire(self.now):
            assert not chunk.is_stored
            assert (chunk.pins, chunk.claims, chunk.wants) == (0, 0, [])

    def own(self) -> None:
        """A tenant's request uses chunks; its share may have changed."""
        if (chunk := self.some()) is not None:
            floor, ceiling = sorted(self.rng.choices([0.0, 0.2, 0.5, 1.0], k=2))
            account = self.directory.shares.account(self.rng.choice("abc"), floor, ceiling)
            if account is not None:
                self.directory.own(self.path_to(chunk.name), account)

    def end_turn(self) -> None:
        """A request ends; how, is known at once, later or never."""
        if (chunk := self.some()) is not None:
            path = self.path_to(chunk.name)
            end = TurnEnd(
                arrived=self.now - self.rng.random(),
                prompt_chunks=self.rng.randint(0, len(path)),
                prompt_tokens=self.rng.randrange(9),
                expected_s=self.rng.choice([0.0, 0.5, 5.0, 500.0]),
                is_last=self.rng.random() < 0.1,
            )
            self.directory.next_use.ended(path, end, self.now)
            turn = self.rng.choice(chunk.turns)
            if self.rng.random() < 0.3:
                self.directory.next_use.told(turn, self.rng.choice(["tool", "text"]))
            elif self.rng.random() < 0.3:
                self.directory.next_use.close(turn)

    def forget(self) -> None:
        if (chunk := self.some()) is not None and not chunk.children:
            self.remove(chunk)

    # The background.

    def order(self) -> None:
        self.end_step()  # moves are sent after the plans that touch their slots
        self.now += 0.01
        self.directory.mover.behind.note_requests(self.now, is_busy=self.rng.random() < 0.5)
        moves = self.directory.moves(self.now)
        assert self.directory.mover.behind.next_time(self.now) > self.now
        assert [m.is_write for m in moves] == sorted(m.is_write for m in moves)
        self.ordered += moves

    def execute(self) -> None:
        """The workers carry a move out, or the tier fails halfway."""
        if not self.ordered:
            return
        move = self.ordered.pop(self.rng.randrange(len(self.ordered)))
        fault = self.rng.choices(["", "failed", "torn", "flipped"], [20, 1, 1, 1])[0]
        if fault in ("failed", "torn"):
            if fault == "torn" and not move.is_write:
                self.world.host[move.host_slot] = GARBAGE
            elif fault == "torn" and move.tier is TierKind.DISK:
                self.world.disk[move.slot] = GARBAGE
            self.executed.append((move, MoveStatus.FAILED))
        elif move.is_write:
            self.write(move)
        else:
            self.read(move, is_flipped=fault == "flipped")

    def write(self, move: Move[Chunk]) -> None:
        name = bytes(move.chunk.name)
        assert self.world.host.get(move.host_slot) == (name, move.host_generation), "wrote the KV of another chunk"
        if move.tier is TierKind.DISK:
            self.world.disk[move.slot] = name, move.generation
        else:
            self.world.remote.add(name)
        self.executed.append((move, MoveStatus.DONE))

    def read(self, move: Move[Chunk], *, is_flipped: bool) -> None:
        name = bytes(move.chunk.name)
        if move.tier is TierKind.DISK:
            found = self.world.disk.get(move.slot) == (name, move.generation) and not is_flipped
            assert found or is_flipped or self.was_damaged(move), "it was there"
        elif move.tier is TierKind.PEER:
            found = name in self.world.peers.get(self.world.where[move.peer], ())
        else:
            found = name in self.world.remote
        self.world.host[move.host_slot] = (name, move.host_generation) if found else GARBAGE
        self.executed.append((move, MoveStatus.DONE if found else MoveStatus.MISS))

    def was_damaged(self, move: Move[Chunk]) -> bool:
        """Only a row of an index that was behind, from an earlier run, may be wrong about a slot."""
        return move.generation <= self.directory.config.first_generation

    def report(self) -> None:
        if self.executed:
            move, status = self.executed.pop(self.rng.randrange(len(self.executed)))
            self.may_lose |= status is not MoveStatus.DONE
            self.now += 0.001
            self.directory.done(move.id, status, self.now, elapsed_us=100.0)

    def work(self) -> None:
        """Much of the background's work."""
        self.order()
        for _ in range(self.rng.randrange(8)):
            self.execute()
            if self.rng.random() < 0.7:
                self.report()
        self.order()

    def remote_evicts(self) -> None:
        """A server's memory is its own affair."""
        if self.world.remote:
            self.world.remote.discard(self.rng.choice(sorted(self.world.remote)))

    def probe(self) -> None:
        if (chunk := self.some()) is not None and chunk.name in self.world.remote:
            self.directory.add_remote(chunk)

    def peer_changes(self) -> None:
        """A peer gets chunks, loses some, or leaves; it comes back elsewhere."""
        at = f"ipc://{self.rng.randrange(4)}"
        has = self.world.peers.setdefault(at, set())
        if self.rng.random() < 0.1:
            del self.world.peers[at]
        elif self.rng.random() < 0.3:
            has -= set(self.rng.sample(sorted(has), len(has) // 2))
        elif self.chunks:
            has |= set(self.rng.choices(sorted(self.chunks), k=5))

    def hear(self) -> None:
        """A router says that peers have the chunks of a path, rightly or not; a job wants them."""
        at = f"ipc://{self.rng.randrange(5)}"
        peer = self.directory.peers.meet("a group", (at,), self.now) if self.options["peers"] else None
        if peer is None:
            return
        self.world.where[peer.number] = at
        path = self.path_to(bytes(self.rng.randrange(FANOUT) for _ in range(self.rng.randint(1, DEPTH))))
        for chunk in path:
            if self.rng.random() < 0.8:
                self.directory.add_peer(chunk, peer)
        if self.rng.random() < 0.8:
            job = self.rng.randrange(6)
            self.directory.want(job, (float(self.rng.randrange(10)), float(job)), path)

    def pass_time(self) -> None:
        """So long that peers without use are forgotten."""
        self.now += 400.0

    def crash(self) -> None:
        """Everything but disk, index and remote tier is gone; the index may be a few events behind."""
        events = self.directory.index_events()
        self.write_index(events[: max(0, len(events) - self.rng.randrange(4))])
        self.boot_up()
        rows = sorted(self.index.items())
        self.rng.shuffle(rows)
        for slot, (name, generation) in rows:
            if not self.directory.restore(self.path_to(name)[-1], SlotId(slot), generation, self.now):
                del self.index[slot]  # the chunk is in two rows: the index was behind

    def write_index(self, events: list[IndexEvent[Chunk]]) -> None:
        for slot, item, generation in events:
            if item is None:
                self.index.pop(slot, None)
            else:
                self.index[slot] = bytes(item.name), generation

    def check(self) -> None:
        self.directory.check()
        lost, hearsay = self.directory.lost(), self.directory.take_unheld()
        for chunk in lost:
            if chunk.is_forgotten:
                continue  # went with one above it
            if chunk in hearsay:
                if not self.on_device(chunk):
                    self.remove(chunk)
                continue
            assert not chunk.pins or self.may_lose or chunk.placed, "a pinned chunk left"
            assert not chunk.stored_below or self.may_lose or chunk.placed, "not leaf first"
            if not self.on_device(chunk):
                self.remove(chunk)
        self.may_lose = False
        self.directory.check()
        if self.rng.random() < 0.7:
            self.write_index(self.directory.index_events())

    def on_device(self, chunk: Chunk) -> bool:
        return chunk.placed or any(self.on_device(child) for child in chunk.children.values())


COMMON = (
    *(Life.compute, Life.load, Life.leave_device, Life.order, Life.work, Life.execute, Life.report, Life.want),
    *(Life.unwant, Life.claim, Life.unclaim, Life.unclaim, Life.end_step, Life.hear, Life.peer_changes),
    Life.end_turn,
)
RARE = (
    *(Life.pin, Life.unpin, Life.unpin, Life.keep, Life.expire, Life.forget, Life.remote_evicts, Life.probe),
    *(Life.own, Life.crash, Life.pass_time),
)


def live(seed: int, steps: int) -> None:
    life = Life(seed)
    for _ in range(steps):
        act = life.rng.choice(COMMON if life.rng.random() < 0.95 else RARE)
        act(life)
        life.check()


@pytest.mark.parametrize("seed", seeds(30))
def test_random_lives(seed: int) -> None:
    live(seed, 400)


@pytest.mark.soak
@pytest.mark.parametrize("seed", seeds(300))
def test_long_lives(seed: int) -> None:
    live(seed, 2000)
