"""The moves between host memory and the tiers below it: which to order next, and what their results mean.

Moves are ordered for four reasons, in this order (CachedAttention §3.3):

1. *refill*: some host slots are kept free, so that saves and fetches never wait. The chunks that the policy
   chooses make room: they are dropped at once if they have another copy, else they are written to a tier below
   first.
2. *fetch*: the chunks of waiting jobs are read, in the order of the queue, as long as they replace chunks that are
   wanted later. If this came before the refill, the refill would evict what was just fetched.
3. *fetch ahead*: if nothing is to be fetched for a waiting job, the chunks of sessions that are expected soon are
   read (`trunkline.kvstore.fetch_ahead`).
4. *write-behind*: chunks that are in host memory only are copied into free disk slots and to the remote tier, so
   they survive a restart and can be dropped at once later. What was read from the remote tier is copied into free
   disk slots, so it is read from there next time.

Every move is transactional. No copy is given up before the other one is verified. A failed move leaves its source.
A read that does not bring back what was written is a miss, and that copy is forgotten.
Pure: time is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from itertools import count
from typing import Final, Generic

from trunkline.kvstore.chunks import NO_PEER, NO_SLOT, ChunkT, SlotId
from trunkline.kvstore.copies import Copies, may_leave
from trunkline.kvstore.fetch_ahead import FetchAhead
from trunkline.kvstore.peers import PeerBook
from trunkline.kvstore.tier import TierKind, TierTotals
from trunkline.kvstore.tier_health import TierHealth
from trunkline.kvstore.tier_policy import (
    DISK,
    REMOTE,
    DirectoryConfig,
    EvictionPolicy,
    HeapVerdict,
    Source,
    WaitingJobs,
    wanted_later,
)
from trunkline.kvstore.write_behind import WriteBehind

READ_FAILURES_MAX: Final = 3
"""Number of failed reads after which a copy is given up, even if its tier works for other chunks."""

REFUSALS_MAX: Final = 4
"""How many chunks `_make_room` tries to write to a lower tier before it gives up on such chunks: they have their
only copy in host memory, no tier takes it now, and it may not be dropped."""


class MoveStatus(IntEnum):
    """The result of a move on all ranks: the worst of their `MoveOutcome`s."""

    DONE = 0
    """Carried out and verified."""
    MISS = 1
    """The source does not hold the whole chunk: it never did, or has lost it."""
    FAILED = 2
    """The tier could not carry out the move."""


@dataclass(frozen=True, slots=True, eq=False)
class Move(Generic[ChunkT]):
    """An order to copy one chunk between a host slot and a tier below. It is sent to the workers as a
    `TierMove`."""

    id: int
    tier: TierKind
    is_write: bool
    chunk: ChunkT
    host_slot: SlotId
    host_generation: int
    slot: SlotId
    """Slot of the disk tier; `NO_SLOT`: the move is from or to the remote tier, or from a peer."""
    generation: int
    ordered: float
    evicts: bool = False
    """Whether this is a write after which the host slot can be freed: the slot is needed, or no waiting job wants
    the chunk and no tier below has it. Fetches wait for such writes."""
    borrows: bool = False
    """Whether this is a read into one of the host slots that are kept free."""
    peer: int = NO_PEER
    """Number of the peer from which the chunk is pulled, if the tier is `PEER`."""


class Room(Enum):
    """The outcome of the search for a host slot for a fetch."""

    MADE = auto()
    BORROWED = auto()
    """The fetch may use one of the host slots that are kept free."""
    LATER = auto()
    """The fetch must wait: a chunk has to be evicted first, and none can be evicted now."""
    NONE = auto()
    """There is no room for the fetch: all chunks in host memory are worth more."""


class TierMover(Generic[ChunkT]):
    """Orders moves and applies their results. Part of the directory."""

    def __init__(
        self,
        copies: Copies[ChunkT],
        jobs: WaitingJobs[ChunkT],
        health: dict[TierKind, TierHealth],
        peers: PeerBook,
        config: DirectoryConfig,
        totals: Mapping[TierKind, TierTotals],
    ) -> None:
        """
        Args:
            health: The health of each tier below host memory that exists, fastest tier first.
        """
        self._copies = copies
        self._jobs = jobs
        self._health = health
        self._peers = peers
        self._config = config
        self._host_totals = totals[TierKind.HOST]
        self.in_flight: dict[int, Move[ChunkT]] = {}
        self.behind: WriteBehind[ChunkT] = WriteBehind(health, config)
        self._ids = count(1)
        self._freeing = 0
        """Writes in flight after which a host slot can be freed."""
        self._borrowed = 0
        """Reads in flight into host slots that are kept free; a slot is made up for when its read ends."""
        self._read_failures: dict[ChunkT, int] = {}
        self.is_starved = False
        """Whether the last round of orders found no host slot for the chunk to be fetched next."""
        self._orders: list[Move[ChunkT]] = []
        self.ahead: FetchAhead[ChunkT] = FetchAhead()

    def orders(self, now: float) -> list[Move[ChunkT]]:
        """Return new moves, reads first."""
        for health in self._health.values():
            health.look(now)
        if len(self._peers):
            for peer in self._peers.look(now, self._copies.at_peers):
                self._jobs.peer_gone(peer)
        self._orders = []
        while self._copies.host.free_count + self._freeing + self._borrowed < self._config.host_buffer:
            if self._make_room(now) is not Room.MADE:
                break
        self._fetch(now)
        if self._config.policy is EvictionPolicy.PREDICTED:
            self._fetch_ahead(now)
        self.behind.see(now)
        for tier in self._health:
            self._write_behind(tier, now)
        orders, self._orders = self._orders, []
        orders.sort(key=lambda move: move.is_write)
        return orders

    def drop_host(self, chunk: ChunkT) -> None:
        """Give up the host copy of a chunk that no move uses."""
        self._host_totals.evictions += 1
        self.release_host(chunk)

    def release_host(self, chunk: ChunkT) -> None:
        """Give up a host copy without counting an eviction."""
        self.behind.left(chunk)
        self._copies.drop_host(chunk)
        self._jobs.note(chunk)

    def forget(self, chunk: ChunkT) -> None:
        """Forget a chunk that its owner removes."""
        self.behind.forget(chunk)
        self._read_failures.pop(chunk, None)

    @property
    def has_unwritten(self) -> bool:
        """Whether write-behind has a chunk to write, and a tier that can take it."""
        return any(
            queue
            and not self._health[tier].is_paused
            and (tier is not TierKind.DISK or self._copies.disk.free_count)
            for tier, queue in self.behind.queues.items()
        )

    def can_demote(self) -> bool:
        """Return whether some tier below works, so that only copies in host memory can be written there."""
        return any(not health.is_paused for health in self._health.values())

    def health_of(self, source: Source) -> TierHealth:
        """Return the health of a place from which chunks are read."""
        return self._peers.health(source.peer) if source.tier is TierKind.PEER else self._health[source.tier]

    def _fetch(self, now: float) -> None:
        self.is_starved = False
        while True:
            places = [place for place in self._jobs.lacking_at() if self.health_of(place).may_read()]
            chunk = self._jobs.next_lacking(places) if places else None
            if chunk is None or not (self._config.prefetches or self._jobs.is_next(chunk)):
                return
            source = self._jobs.source(chunk)
            assert source is not None, "it lacks a copy that can be read"
            chunk.busy += 1  # its copy must not be what makes room
            room = self._room_for(chunk, now)
            chunk.busy -= 1
            self._copies.offer(chunk)
            if room is Room.NONE or room is Room.LATER:
                # A move in flight will make room, or none will.
                self.is_starved = room is Room.NONE or not self.in_flight
                return
            slot = self._copies.reserve_host(chunk)
            assert slot is not None, "room was made"
            self._order(chunk, source, is_write=False, now=now, borrows=room is Room.BORROWED)

    def _fetch_ahead(self, now: float) -> None:
        """Read what sessions need that are expected soon, with at most half of the reads that a tier may have in
        flight: a job that comes now is to find the others free."""
        while not self._jobs.lacking_at() and (chunk := self.ahead.next(now)) is not None:
            source = DISK if chunk.disk_ready else REMOTE
            health = self._health[source.tier]
            if not health.may_read() or health.reading >= max(1, self._config.reads_in_flight // 2):
                return
            self.ahead.takes(health.predicted_us(self.ahead.lacking_count) / 1e6)
            chunk.busy += 1  # as in `_fetch`
            room = self._room_for(chunk, now)
            chunk.busy -= 1
            self._copies.offer(chunk)
            if room is not Room.MADE:
                if room is Room.NONE:
                    self.ahead.pause(now)
                return
            slot = self._copies.reserve_host(chunk)
            assert slot is not None, "room was made"
            self._order(chunk, source, is_write=False, now=now)

    def _gives_way(self, chunk: ChunkT, to: ChunkT) -> bool:
        """Return whether a chunk may be evicted from host memory so that `to` can be fetched."""
        return wanted_later(chunk, to) if to.wants else self.ahead.displaces(chunk)

    def _room_for(self, chunk: ChunkT, now: float) -> Room:
        """Make a host slot free for a fetch without using up the slots that are kept free.

        No chunk leaves the system for a fetch. If the disk is full, the chunk that is to make room waits until it
        can have the disk slot of the fetched one. Without a tier below there is no such room: what is pulled from
        a peer takes the place of a chunk that is worth less, as a chunk that is saved does.
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
        may_borrow = room is Room.LATER or self._jobs.is_next(chunk)  # the free slots are kept for the next job
        return Room.BORROWED if may_borrow and host.free_count > reserve + spare else room

    def _make_room(self, now: float, replaced_by: ChunkT | None = None) -> Room:
        """Free the host slot of the chunk that the policy chooses, at once or by a write that is ordered now.

        Args:
            replaced_by: The chunk to be fetched instead. No chunk that is wanted sooner is evicted for it, and
                none leaves the system.
        """
        copies, shares, refused = self._copies, self._copies.shares, set[ChunkT]()
        not_worth_it = HeapVerdict.STOP if self._config.policy.looks_ahead else HeapVerdict.SKIP

        def judge(chunk: ChunkT) -> HeapVerdict:
            if chunk in refused or self._jobs.is_next(chunk):
                return HeapVerdict.SKIP
            if replaced_by is not None and shares.is_protected(chunk, TierKind.HOST, replaced_by):
                return HeapVerdict.STOP
            if replaced_by is not None and not self._gives_way(chunk, replaced_by):
                return not_worth_it
            return HeapVerdict.TAKE

        def goes_first(one: ChunkT, other: ChunkT) -> bool:
            return shares.rank(one, TierKind.HOST) < shares.rank(other, TierKind.HOST)

        lossless = replaced_by is not None and bool(self._health)
        clean = copies.clean_victim(judge)
        while len(refused) < REFUSALS_MAX:
            dirty = copies.dirty_victim(judge)
            if dirty is None or (clean is not None and not goes_first(dirty, clean)):
                break
            if self._demote(dirty, now, lossless=lossless):
                return Room.MADE
            refused.add(dirty)
            writes_wait = any(not (health.is_paused or health.may_write()) for health in self._health.values())
            if writes_wait or (lossless and self.can_demote()):
                return Room.LATER  # rather than drop what is wanted sooner
        if clean is None:
            return Room.LATER if refused else Room.NONE
        if replaced_by is not None or not self._write_before_drop(clean, now):
            self.drop_host(clean)
        return Room.MADE

    def _write_before_drop(self, chunk: ChunkT, now: float) -> bool:
        """Write a chunk that is about to leave host memory to a tier for which it is still queued, if one can take
        it now; return whether one can. Its slot can be freed when that has ended."""
        if 2 * (self._copies.host.free_count - self._copies.unsaved_claims) < self._config.host_buffer:
            return False  # fetches would have to wait for that tier, however slow it is
        for tier in self._health:
            if self.behind.is_due(tier, chunk) and self._takes_more(tier):
                self._order(chunk, Source(tier), is_write=True, now=now, evicts=True)
                return True
        return False

    def _takes_more(self, tier: TierKind) -> bool:
        """Return whether write-behind may write another chunk to a tier now."""
        return self._health[tier].may_write() and (tier is TierKind.REMOTE or self._copies.disk.free_count > 0)

    def _demote(self, chunk: ChunkT, now: float, *, lossless: bool) -> bool:
        """Write a chunk whose only copy is in host memory to a tier below, or drop that copy if it is worth less
        than all chunks there. Return whether the host slot is free, or will be."""
        for tier, health in self._health.items():
            if not health.may_write():
                continue
            if tier is TierKind.REMOTE or self._copies.make_disk_room(chunk, self._jobs.note, lossless=lossless):
                self._order(chunk, Source(tier), is_write=True, now=now, evicts=True)
                return True
        if lossless or not may_leave(chunk) or not all(health.may_write() for health in self._health.values()):
            return False
        self.drop_host(chunk)
        return True

    def _write_behind(self, tier: TierKind, now: float) -> None:
        while self._takes_more(tier):
            chunk = self.behind.take(tier, now)
            if chunk is None:
                return
            self._order(chunk, Source(tier), is_write=True, now=now)

    def _order(
        self,
        chunk: ChunkT,
        place: Source,
        *,
        is_write: bool,
        now: float,
        evicts: bool = False,
        borrows: bool = False,
    ) -> None:
        copies, tier, slot, generation = self._copies, place.tier, NO_SLOT, 0
        if is_write:
            self.behind.queues[tier].pop(chunk, None)
        if tier is TierKind.DISK:
            if is_write:
                reserved = copies.reserve_disk(chunk)
                assert reserved is not None, "room was made"
            slot = chunk.disk
            generation = copies.disk.generation(slot)
        evicts = evicts or (is_write and not (chunk.wants or chunk.busy or chunk.disk_ready or chunk.remote))
        chunk.busy += 1
        self._freeing += evicts
        self._borrowed += borrows
        self.health_of(place).ordered(is_write)
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
            peer=place.peer,
        )
        self.in_flight[move.id] = move
        self._orders.append(move)

    def ended(self, move_id: int, status: MoveStatus, now: float, elapsed_us: float, detail: str) -> None:
        """Apply the result of a move that ended on all ranks.

        Raises:
            KeyError: No such move is in flight.
        """
        move = self.in_flight.pop(move_id)
        health = self.health_of(Source(move.tier, move.peer))
        if status is MoveStatus.FAILED:
            health.failed(move.is_write, now, detail)
        elif status is MoveStatus.MISS and move.tier is TierKind.PEER:
            health.answered(move.is_write)  # a peer that has nothing is not fast
            health.totals.failures += 1
        else:
            health.succeeded(move.is_write, move.ordered, now, elapsed_us)
            self._host_totals.writes += not move.is_write
            health.totals.failures += status is MoveStatus.MISS
        self._freeing -= move.evicts
        self._borrowed -= move.borrows
        chunk = move.chunk
        chunk.busy -= 1
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
            if move.tier is TierKind.DISK:
                self._copies.disk_arrived(chunk)
            else:
                self._copies.remote_arrived(chunk)
            return
        if move.tier is TierKind.DISK:
            self._copies.drop_disk(chunk)
        if status is MoveStatus.FAILED:
            if chunk.host_ready:
                self.behind.add_again(move.tier, chunk)
        elif chunk.host_ready:  # a miss: the host slot does not hold its bytes
            self.behind.owed[move.tier].add(chunk)
            if not chunk.busy:
                self.release_host(chunk)

    def _read(self, move: Move[ChunkT], status: MoveStatus) -> None:
        chunk = move.chunk
        if status is MoveStatus.DONE:
            self._read_failures.pop(chunk, None)
            self._copies.host_arrived(chunk)
            self.behind.came_back(chunk)
            return
        self._copies.drop_host(chunk)
        if move.tier is TierKind.PEER:
            self._not_pulled(move)
            return
        failures = self._read_failures[chunk] = self._read_failures.get(chunk, 0) + 1
        if status is MoveStatus.MISS or failures >= READ_FAILURES_MAX:
            del self._read_failures[chunk]
            if move.tier is TierKind.DISK:
                self._copies.drop_disk(chunk)
            else:
                self._copies.drop_remote(chunk)

    def _not_pulled(self, move: Move[ChunkT]) -> None:
        """Forget that a peer has a chunk that it did not give. If the peer is paused now, forget all that only it
        has: the waiting jobs compute these chunks, or read them from the remote tier."""
        if move.chunk.peer == move.peer:
            self._copies.drop_peer(move.chunk)
        if self._peers.health(move.peer).is_paused:
            for chunk in list(self._copies.at_peers.get(move.peer, ())):
                if chunk.host == NO_SLOT:  # what is under way may still come
                    self._copies.drop_peer(chunk)
                    self._jobs.note(chunk)
