"""The moves between host memory and the tiers below it: what to order next, and what became of it.

Three reasons, in this order (CachedAttention §3.3):

1. *refill*: some host slots are kept free, so that saves and fetches never wait; the policy's victims make room,
   dropped at once where another copy is left, else written to a tier below first;
2. *fetch*: the chunks of waiting jobs, in the order of the queue, as far as they replace what is wanted later.
   Before the refill it would take the victims that this needs, which would then take what was fetched;
3. *write-behind*: what is in host memory only is copied into free disk slots and to the remote tier, so that it
   survives a restart and can be dropped at once later.

Every move is transactional. Nothing is given up before its copy is verified; a failed move leaves its source, and
a read that does not bring back what was written is a miss: that copy is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from itertools import count
from typing import Final, Generic

from trunkline.kvstore.chunks import ChunkT
from trunkline.kvstore.copies import Copies, may_leave
from trunkline.kvstore.directory_config import DirectoryConfig
from trunkline.kvstore.eviction import EvictionPolicy
from trunkline.kvstore.extents import NO_SLOT, SlotId
from trunkline.kvstore.lazy_heap import HeapVerdict
from trunkline.kvstore.lookahead import WaitingJobs, wanted_later
from trunkline.kvstore.tier import TierKind
from trunkline.kvstore.tier_costs import TierHealth

READ_FAILURES_MAX: Final = 3
"""A copy that could not be read so many times is given up, though its tier may be well."""

REFUSALS_MAX: Final = 4
"""Victims that no tier takes and that must not leave, before a round gives up."""


class MoveStatus(IntEnum):
    """What became of a move on all ranks: the worst of their `MoveOutcome`s."""

    DONE = 0
    """Carried out and verified."""
    MISS = 1
    """The source does not hold the chunk (any more) whole."""
    FAILED = 2
    """The tier could not."""


@dataclass(frozen=True, slots=True, eq=False)
class Move(Generic[ChunkT]):
    """An order: one chunk between a host slot and a tier below. Becomes a `trunkline.worker.messages.TierMove`."""

    id: int
    tier: TierKind
    is_write: bool
    chunk: ChunkT
    host_slot: SlotId
    host_generation: int
    slot: SlotId
    """Of the disk tier; `NO_SLOT` for the remote one."""
    generation: int
    ordered: float
    evicts: bool = False
    """A write after which the host slot can be free: it is to be, or no waiting job wants the chunk."""
    borrows: bool = False
    """A read into a slot of the buffer."""


class Room(Enum):
    """Whether there is a host slot for something."""

    MADE = auto()
    BORROWED = auto()
    """In the buffer."""
    LATER = auto()
    """What must go first cannot go now."""
    NONE = auto()
    """All that is there is worth more."""


class TierMover(Generic[ChunkT]):
    """Orders moves and takes their results. Part of the directory."""

    def __init__(
        self,
        copies: Copies[ChunkT],
        jobs: WaitingJobs[ChunkT],
        health: dict[TierKind, TierHealth],
        config: DirectoryConfig,
    ) -> None:
        """
        Args:
            health: of the tiers that exist, fastest first.
        """
        self._copies = copies
        self._jobs = jobs
        self._health = health
        self._config = config
        self.in_flight: dict[int, Move[ChunkT]] = {}
        self.unsaved: dict[TierKind, OrderedDict[ChunkT, None]] = {tier: OrderedDict() for tier in health}
        """In host memory, not yet in that tier, oldest first: the write-behind queues."""
        self._ids = count(1)
        self._freeing = 0
        """Writes in flight after which a host slot can be free."""
        self._borrowed = 0
        """Reads in flight whose slots the buffer gets back when they end."""
        self._read_failures: dict[ChunkT, int] = {}
        self.is_starved = False
        """The last round of orders found no host slot for the chunk to be fetched next."""
        self._orders: list[Move[ChunkT]] = []

    def orders(self, now: float) -> list[Move[ChunkT]]:
        """New moves, reads first."""
        for health in self._health.values():
            health.look(now)
        self._orders = []
        self._refill(now)
        self._fetch(now)
        for tier in self._health:
            self._write_unsaved(tier, now)
        orders, self._orders = self._orders, []
        orders.sort(key=lambda move: move.is_write)
        return orders

    def saved(self, chunk: ChunkT) -> None:
        """A chunk has come into host memory from the device."""
        if self._config.write_behind:
            for tier, queue in self.unsaved.items():
                if not (chunk.disk != NO_SLOT if tier is TierKind.DISK else chunk.remote):
                    queue[chunk] = None

    def drop_host(self, chunk: ChunkT) -> None:
        """Give up the host copy of a chunk that no move uses."""
        self._copies.evictions[TierKind.HOST] += 1
        self.release_host(chunk)

    def release_host(self, chunk: ChunkT) -> None:
        """As `drop_host`, but it was no eviction."""
        for queue in self.unsaved.values():
            queue.pop(chunk, None)
        self._copies.drop_host(chunk)
        self._jobs.note(chunk)

    def forget(self, chunk: ChunkT) -> None:
        """Its owner removed the chunk."""
        for queue in self.unsaved.values():
            queue.pop(chunk, None)
        self._read_failures.pop(chunk, None)

    @property
    def has_unwritten(self) -> bool:
        """Whether write-behind has something to do and somewhere to put it."""
        return any(
            queue
            and not self._health[tier].is_paused
            and (tier is not TierKind.DISK or self._copies.disk.free_count)
            for tier, queue in self.unsaved.items()
        )

    def can_sink(self) -> bool:
        """Whether a host copy that is the only one can be written to a tier below, as far as is known."""
        return any(not health.is_paused for health in self._health.values())

    def _fetch(self, now: float) -> None:
        self.is_starved = False
        while True:
            tiers = [tier for tier, health in self._health.items() if health.may_read()]
            chunk = self._jobs.next_lacking(tiers) if tiers else None
            if chunk is None or not (self._config.prefetches or self._jobs.is_next(chunk)):
                return
            chunk.busy += 1  # its copy must not be what makes room
            room = self._room_for(chunk, now)
            chunk.busy -= 1
            self._copies.offer(chunk)
            if room is Room.NONE or room is Room.LATER:
                # What is in the way later goes by a move in flight, or not at all.
                self.is_starved = room is Room.NONE or not self.in_flight
                return
            slot = self._copies.reserve_host(chunk)
            assert slot is not None, "room was made"
            source = TierKind.DISK if chunk.disk_ready else TierKind.REMOTE
            self._order(chunk, source, is_write=False, now=now, borrows=room is Room.BORROWED)

    def _room_for(self, chunk: ChunkT, now: float) -> Room:
        """See that a host slot is free for a fetch, and that the buffer is no smaller for it in the end.

        No chunk leaves the system for a fetch: if all of disk is needed, the chunk that is to make room waits
        until it can have the disk slot of the one that has come.
        """
        host = self._copies.host
        reserve = 0 if chunk.claims else self._copies.unsaved_claims
        if host.free_count > reserve and host.free_count + self._freeing > self._config.host_buffer:
            return Room.MADE
        if host.free_count <= reserve and self._freeing:
            return Room.LATER
        room = self._make_room(now, replaced_by=chunk)
        if room is Room.MADE:
            return Room.MADE if host.free_count > reserve else Room.LATER
        spare = 0 if self._jobs.is_next(chunk) else self._config.host_buffer // 2
        may_borrow = room is Room.LATER or self._jobs.is_next(chunk)  # for the next job the buffer is there
        return Room.BORROWED if may_borrow and host.free_count > reserve + spare else room

    def _refill(self, now: float) -> None:
        while self._copies.host.free_count + self._freeing + self._borrowed < self._config.host_buffer:
            if self._make_room(now) is not Room.MADE:
                return

    def _make_room(self, now: float, replaced_by: ChunkT | None = None) -> Room:
        """Free one host slot, now or by a write ordered now: the policy's victim.

        Args:
            replaced_by: it is to be fetched instead: nothing wanted sooner goes, and nothing leaves the system.
        """
        copies, refused = self._copies, set[ChunkT]()
        not_worth_it = HeapVerdict.STOP if self._config.policy is EvictionPolicy.LOOK_AHEAD else HeapVerdict.SKIP

        def judge(chunk: ChunkT) -> HeapVerdict:
            if chunk in refused or self._jobs.is_next(chunk):
                return HeapVerdict.SKIP
            if replaced_by is not None and not wanted_later(chunk, replaced_by):
                return not_worth_it
            return HeapVerdict.TAKE

        lossless = replaced_by is not None
        clean = copies.clean_victim(judge)
        while len(refused) < REFUSALS_MAX:
            dirty = copies.dirty_victim(judge)
            if dirty is None or (clean is not None and copies.key(clean) <= copies.key(dirty)):
                break
            if self._sink(dirty, now, lossless=lossless):
                return Room.MADE
            refused.add(dirty)
            if (lossless and self.can_sink()) or self._writes_wait():
                return Room.LATER  # rather than drop what is wanted sooner
        if clean is None:
            return Room.LATER if refused else Room.NONE
        self.drop_host(clean)
        return Room.MADE

    def _writes_wait(self) -> bool:
        """Whether a tier that works takes no more writes just now."""
        return any(not (health.is_paused or health.may_write()) for health in self._health.values())

    def _sink(self, chunk: ChunkT, now: float, *, lossless: bool) -> bool:
        """Write the only copy of a chunk to a tier below, or let it leave if it is worth less than all there."""
        for tier, health in self._health.items():
            if not health.may_write():
                continue
            if tier is TierKind.REMOTE or self._copies.make_disk_room(chunk, self._jobs.note, lossless=lossless):
                self._order(chunk, tier, is_write=True, now=now, evicts=True)
                return True
        if lossless or not may_leave(chunk) or not all(health.may_write() for health in self._health.values()):
            return False
        self.drop_host(chunk)
        return True

    def _write_unsaved(self, tier: TierKind, now: float) -> None:
        queue, health = self.unsaved[tier], self._health[tier]
        while queue and health.may_write() and (tier is TierKind.REMOTE or self._copies.disk.free_count):
            chunk, _ = queue.popitem(last=False)
            if not (chunk.remote if tier is TierKind.REMOTE else chunk.disk != NO_SLOT):
                self._order(chunk, tier, is_write=True, now=now)

    def _order(
        self,
        chunk: ChunkT,
        tier: TierKind,
        *,
        is_write: bool,
        now: float,
        evicts: bool = False,
        borrows: bool = False,
    ) -> None:
        copies, slot, generation = self._copies, NO_SLOT, 0
        if is_write:
            self.unsaved[tier].pop(chunk, None)
        if tier is TierKind.DISK:
            if is_write:
                reserved = copies.reserve_disk(chunk)
                assert reserved is not None, "room was made"
            slot = chunk.disk
            generation = copies.disk.generation(slot)
        evicts = evicts or (is_write and not chunk.wants and not chunk.busy)
        chunk.busy += 1
        self._freeing += evicts
        self._borrowed += borrows
        self._health[tier].ordered(is_write)
        move = Move(
            id=next(self._ids),
            tier=tier,
            is_write=is_write,
            chunk=chunk,
            host_slot=chunk.host,
            host_generation=copies.host.generation(chunk.host),
            slot=slot,
            generation=generation,
            ordered=now,
            evicts=evicts,
            borrows=borrows,
        )
        self.in_flight[move.id] = move
        self._orders.append(move)

    def ended(self, move_id: int, status: MoveStatus, now: float, elapsed_us: float, detail: str) -> None:
        """A move ended on all ranks.

        Raises:
            KeyError: no such move is in flight.
        """
        move = self.in_flight.pop(move_id)
        health = self._health[move.tier]
        if status is MoveStatus.FAILED:
            health.failed(move.is_write, now, detail)
        else:
            health.succeeded(move.is_write, move.ordered, now, elapsed_us)
            health.failures += status is MoveStatus.MISS
        self._freeing -= move.evicts
        self._borrowed -= move.borrows
        move.chunk.busy -= 1
        self._settle(move, status)

    def _settle(self, move: Move[ChunkT], status: MoveStatus) -> None:
        chunk = move.chunk
        if chunk.is_forgotten:
            if not chunk.busy:
                self._copies.free_slots_of(chunk)
            return
        if move.is_write:
            self._wrote(move, status)
        else:
            self._read(move, status)
        self._copies.offer(chunk)
        self._jobs.note(chunk)

    def _wrote(self, move: Move[ChunkT], status: MoveStatus) -> None:
        chunk = move.chunk
        if status is MoveStatus.DONE:
            self._arrived(chunk, move.tier)
            return
        if move.tier is TierKind.DISK:
            self._copies.drop_disk(chunk)
        if status is MoveStatus.FAILED:
            if self._config.write_behind and chunk.host_ready:
                self.unsaved[move.tier][chunk] = None
        elif chunk.host_ready and not chunk.busy:
            self.release_host(chunk)  # its bytes are not there

    def _arrived(self, chunk: ChunkT, tier: TierKind) -> None:
        if tier is TierKind.DISK:
            self._copies.disk_arrived(chunk)
        else:
            self._copies.remote_arrived(chunk)

    def _read(self, move: Move[ChunkT], status: MoveStatus) -> None:
        chunk = move.chunk
        if status is MoveStatus.DONE:
            self._read_failures.pop(chunk, None)
            self._copies.host_arrived(chunk)
            return
        self._copies.drop_host(chunk)
        failures = self._read_failures[chunk] = self._read_failures.get(chunk, 0) + 1
        if status is MoveStatus.MISS or failures >= READ_FAILURES_MAX:
            del self._read_failures[chunk]
            if move.tier is TierKind.DISK:
                self._copies.drop_disk(chunk)
            else:
                self._copies.drop_remote(chunk)

    def abandon(self) -> None:
        """No move in flight will be answered: the workers are gone, and host memory with them."""
        moves, self.in_flight = self.in_flight, {}
        for move in moves.values():
            self._health[move.tier].withdrawn(move.is_write)
            move.chunk.busy -= 1
        self._freeing = self._borrowed = 0
        for move in moves.values():
            chunk = move.chunk
            if chunk.is_forgotten:
                if not chunk.busy:
                    self._copies.free_slots_of(chunk)
            elif move.is_write and move.tier is TierKind.DISK:
                self._copies.drop_disk(chunk)
        for chunk in list(self._copies.host.owners.values()):
            self.release_host(chunk)
            self._copies.offer(chunk)
