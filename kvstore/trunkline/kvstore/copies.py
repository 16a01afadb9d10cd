"""The copies of chunks in the tiers, and which of them may be evicted. Part of the directory; pure.

      host   clean    copies that may be dropped: the chunk is on disk, remote or on the device as well
             dirty    only copies: they must be written to a tier below first
      disk   doubles  copies of chunks that are in host memory as well: the first to go when the disk is full
             settled  the other copies
      remote distant  chunks without a nearer copy; only their names take memory here

Each chunk stands in the heap of its state in each tier, ordered by the policy. A heap's entry is a hint: the state
is checked again when the entry comes to the top, so only changes after which a chunk may be evicted *sooner* must
be reported (`offer`). Chunks that must not be evicted now are taken out and offered again when the reason ends.

Leaf first: a chunk leaves the system (loses its last copy) only if no chunk below it is stored. `stored_below`
counts these along the path, so no search is needed.

What only a *peer* has is in no heap: it is known while a waiting job wants it, and takes no slot here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import Enum
from itertools import count
from typing import Generic, NamedTuple, cast

from trunkline.kvstore.chunks import NO_PEER, NO_SLOT, ChangeLog, ChunkT, SlotId, TieredChunk
from trunkline.kvstore.shares import KvAccount, SharedHeap, Shares
from trunkline.kvstore.slots import SlotPool
from trunkline.kvstore.tier import TierKind, TierTotals
from trunkline.kvstore.tier_policy import (
    DirectoryConfig,
    EvictionPolicy,
    HeapVerdict,
    LazyHeap,
    VictimKey,
    victim_key,
)


class IndexEvent(NamedTuple, Generic[ChunkT]):
    """A change of what a disk slot holds, for the index that survives restarts."""

    slot: SlotId
    chunk: ChunkT | None
    """The chunk that the disk slot holds now, written and verified by every rank; None: the slot is empty."""
    generation: int = 0


class HostState(Enum):
    """Whether a chunk's host copy may be dropped, and what would be lost."""

    HELD = "a move or a claim needs it"
    CLEAN = "there is another copy"
    DIRTY = "it is the only copy"


def may_leave(chunk: TieredChunk) -> bool:
    """Return whether the last copy of a chunk may be given up now."""
    return not (chunk.busy or chunk.claims or chunk.pins or chunk.stored_below)


def host_state(chunk: TieredChunk, *, may_sink: bool) -> HostState:
    """Return the state of a chunk's host copy.

    Args:
        may_sink: There are tiers below, to which host copies are to be written. Without them a copy on the device
            counts as another copy if the chunk may leave the system, although it may soon be given up.
    """
    if chunk.busy or chunk.claims:
        return HostState.HELD
    if chunk.disk_ready or chunk.remote or (chunk.on_device and not may_sink and may_leave(chunk)):
        return HostState.CLEAN
    return HostState.DIRTY


class CopyChanges(Generic[ChunkT]):
    """Changes of copies that the directory's owner has not taken yet."""

    def __init__(self) -> None:
        self.lost: list[ChunkT] = []
        """Chunks that lost their last copy since the owner last asked. A chunk of the list may have a new copy by
        now."""
        self.events: list[IndexEvent[ChunkT]] = []
        self.log: ChangeLog[ChunkT] = ChangeLog()
        """Chunks that may be in other tiers than before. The owner notes changes on the device in it as well."""
        self.unheld: set[ChunkT] = set()
        """The chunks of `lost` that only a peer was said to have."""


class Copies(Generic[ChunkT]):
    """The slots of host memory and disk, and the order in which their copies are evicted."""

    def __init__(
        self, config: DirectoryConfig, totals: Mapping[TierKind, TierTotals], device_blocks: int = 0
    ) -> None:
        self.host: SlotPool[ChunkT] = SlotPool(config.host_slots)
        self.disk: SlotPool[ChunkT] = SlotPool(config.disk_slots, config.first_generation)
        sizes = (
            (TierKind.DEVICE, device_blocks),
            (TierKind.HOST, config.host_slots),
            (TierKind.DISK, config.disk_slots),
        )
        self.shares = Shares(victim_key(config.policy), dict(sizes))
        """The tenants' shares of the tiers, the device included: they and the policy order all chunks."""
        self._config = config
        self._totals = totals
        self.clean: SharedHeap[ChunkT] = SharedHeap(self.shares, TierKind.HOST)
        self.dirty: SharedHeap[ChunkT] = SharedHeap(self.shares, TierKind.HOST)
        self.doubles: SharedHeap[ChunkT] = SharedHeap(self.shares, TierKind.DISK)
        self.settled: SharedHeap[ChunkT] = SharedHeap(self.shares, TierKind.DISK)
        self.distant: LazyHeap[ChunkT] = LazyHeap(self.shares.key)
        self.expiring: LazyHeap[ChunkT] = LazyHeap(lambda chunk: (chunk.expires, -chunk.depth))
        self.changes: CopyChanges[ChunkT] = CopyChanges()
        self.at_peers: dict[int, dict[ChunkT, None]] = {}
        """The chunks that only a peer is said to have, by the number of the peer."""
        self.unsaved_claims = 0
        """Claimed chunks without a host slot. Each of them may be saved at any moment."""
        self._arrivals = count(1)

    @property
    def may_sink(self) -> bool:
        """Whether there are tiers below host memory, to which host copies are to be written."""
        return self._config.disk_slots > 0 or self._config.remote

    def reserve_host(self, chunk: ChunkT, step: int = 0) -> SlotId | None:
        """Return a host slot for a copy that is about to come; None if none is free."""
        slot = self.host.allocate(chunk, step)
        if slot is not None:
            chunk.host = slot
            self.shares.count(chunk, TierKind.HOST, 1)
            self.unsaved_claims -= chunk.claims > 0
        return slot

    def host_arrived(self, chunk: ChunkT) -> None:
        """Note that the host slot reserved for a chunk holds its copy, which may be read from now on."""
        self._arriving(chunk)
        chunk.host_ready = True
        self._came_nearer(chunk)

    def drop_host(self, chunk: ChunkT) -> None:
        """Give up a chunk's host copy, or the host slot that was reserved for one."""
        self.host.release(chunk.host)
        chunk.host = NO_SLOT
        self.shares.count(chunk, TierKind.HOST, -1)
        self.unsaved_claims += chunk.claims > 0
        self.clean.discard(chunk)
        self.dirty.discard(chunk)
        if chunk.host_ready:
            chunk.host_ready = False
            self.changes.log.note(chunk)
            self._gone(chunk)

    def reserve_disk(self, chunk: ChunkT) -> SlotId | None:
        """Return a disk slot for a copy that is about to come; None if none is free."""
        slot = self.disk.allocate(chunk)
        if slot is not None:
            chunk.disk = slot
            self.shares.count(chunk, TierKind.DISK, 1)
        return slot

    def disk_arrived(self, chunk: ChunkT) -> None:
        """Note that a chunk's copy is written to its reserved disk slot and verified."""
        self._arriving(chunk)
        chunk.disk_ready = True
        self.changes.events.append(IndexEvent(chunk.disk, chunk, self.disk.generation(chunk.disk)))
        self._came_nearer(chunk)

    def restore_disk(self, chunk: ChunkT, slot: SlotId, generation: int) -> bool:
        """Enter a disk copy that an earlier run left; return False if its slot does not exist or is taken."""
        if chunk.disk != NO_SLOT or not self.disk.take(chunk, slot, generation):
            return False
        self._arriving(chunk)
        chunk.disk, chunk.disk_ready = slot, True
        self.shares.count(chunk, TierKind.DISK, 1)
        self._came_nearer(chunk)
        return True

    def _came_nearer(self, chunk: ChunkT) -> None:
        """Note that host memory or the disk has a ready copy of a chunk now."""
        self.changes.log.note(chunk)
        self.distant.discard(chunk)
        self.drop_peer(chunk)
        self.offer(chunk)

    def drop_disk(self, chunk: ChunkT) -> None:
        """Give up a chunk's disk copy, or the disk slot that was reserved for one."""
        slot = chunk.disk
        self.disk.release(slot)
        chunk.disk = NO_SLOT
        self.shares.count(chunk, TierKind.DISK, -1)
        self.doubles.discard(chunk)
        self.settled.discard(chunk)
        if chunk.disk_ready:
            chunk.disk_ready = False
            self.changes.log.note(chunk)
            self.changes.events.append(IndexEvent(slot, None))
            self._gone(chunk)

    def evict_disk(self, chunk: ChunkT) -> None:
        """Give up a chunk's disk copy, and count an eviction."""
        self._totals[TierKind.DISK].evictions += 1
        self.drop_disk(chunk)

    def remote_arrived(self, chunk: ChunkT) -> None:
        """Note that the remote tier has a copy."""
        self._arriving(chunk)
        chunk.remote = True
        self.offer(chunk)

    def drop_remote(self, chunk: ChunkT) -> None:
        """Forget that the remote tier has a copy of a chunk."""
        self.distant.discard(chunk)
        if chunk.remote:
            chunk.remote = False
            self._gone(chunk)

    def evict_remote(self, chunk: ChunkT) -> None:
        """Forget that the remote tier has a copy of a chunk, and count an eviction."""
        self._totals[TierKind.REMOTE].evictions += 1
        self.drop_remote(chunk)

    def change_peer(self, chunk: ChunkT, peer: int) -> None:
        """Note that a peer is said to have a chunk that has no nearer copy, and forget what another peer has."""
        if chunk.peer != NO_PEER:
            self._not_at_peer(chunk)
        else:
            self._arriving(chunk)
        chunk.peer = peer
        self.at_peers.setdefault(peer, {})[chunk] = None

    def drop_peer(self, chunk: ChunkT) -> None:
        """Forget that a peer has a chunk: it has come nearer, or the peer does not have it, or no job wants it."""
        if chunk.peer != NO_PEER:
            self._not_at_peer(chunk)
            if not chunk.is_stored:
                self.changes.unheld.add(chunk)
            self._gone(chunk)

    def _not_at_peer(self, chunk: ChunkT) -> None:
        known = self.at_peers[chunk.peer]
        del known[chunk]
        if not known:
            del self.at_peers[chunk.peer]
        chunk.peer = NO_PEER

    def forget(self, chunk: ChunkT) -> None:
        """Forget a chunk that its owner removes. Slots that moves still use stay reserved (see
        `free_slots_of`)."""
        for heap in (self.clean, self.dirty, self.doubles, self.settled, self.distant, self.expiring):
            heap.discard(chunk)
        stored = chunk.is_stored
        if chunk.disk_ready:
            self.changes.events.append(IndexEvent(chunk.disk, None))
        chunk.host_ready = chunk.disk_ready = chunk.remote = False
        if chunk.peer != NO_PEER:
            self._not_at_peer(chunk)
        self.changes.log.note(chunk)
        chunk.arrived = 0
        chunk.expires = 0.0
        self.unsaved_claims -= chunk.claims > 0 and chunk.host == NO_SLOT
        chunk.claims = chunk.pins = 0
        chunk.is_forgotten = True
        if stored:
            self._absent_below(chunk)
        if not chunk.busy:
            self.free_slots_of(chunk)

    def free_slots_of(self, chunk: ChunkT) -> None:
        """Free the slots of a forgotten chunk that no move uses any more."""
        if chunk.host != NO_SLOT:
            self.host.release(chunk.host)
            self.shares.count(chunk, TierKind.HOST, -1)
        if chunk.disk != NO_SLOT:
            self.disk.release(chunk.disk)
            self.shares.count(chunk, TierKind.DISK, -1)
        chunk.host = chunk.disk = NO_SLOT

    def offer(self, chunk: ChunkT) -> None:
        """Put a chunk into the heaps of its state, because it may be evicted now, or sooner than before."""
        if 0.0 < chunk.expires < math.inf and chunk not in self.expiring:
            self.expiring.push(chunk)
        if chunk.busy:
            return
        if chunk.host_ready:
            state = host_state(chunk, may_sink=self.may_sink)
            if state is HostState.CLEAN:
                self.clean.push(chunk)
            elif state is HostState.DIRTY:
                self.dirty.push(chunk)
        if chunk.disk_ready:
            (self.doubles if chunk.host_ready else self.settled).push(chunk)
        elif chunk.remote and not chunk.host_ready:
            self.distant.push(chunk)

    def give(self, chunk: ChunkT, account: KvAccount) -> None:
        """Make a chunk that belongs to no tenant with a share one of this account."""
        heaps = [heap for heap in (self.clean, self.dirty, self.doubles, self.settled) if chunk in heap]
        for heap in heaps:
            heap.discard(chunk)
        chunk.account = account
        for heap in heaps:
            heap.push(chunk)
        account.counts[TierKind.DEVICE] += chunk.on_device
        account.counts[TierKind.HOST] += chunk.host != NO_SLOT
        account.counts[TierKind.DISK] += chunk.disk != NO_SLOT

    def clean_victim(self, judge: Callable[[ChunkT], HeapVerdict]) -> ChunkT | None:
        """Return the first chunk whose host copy can be dropped without loss and that `judge` takes."""
        return self.clean.search(lambda chunk: self._check_host(chunk, HostState.CLEAN, self.dirty, judge))

    def dirty_victim(self, judge: Callable[[ChunkT], HeapVerdict]) -> ChunkT | None:
        """Return the first chunk whose host copy is its only one and that `judge` takes."""
        return self.dirty.search(lambda chunk: self._check_host(chunk, HostState.DIRTY, self.clean, judge))

    def _check_host(
        self, chunk: ChunkT, wanted: HostState, other: SharedHeap[ChunkT], judge: Callable[[ChunkT], HeapVerdict]
    ) -> HeapVerdict:
        state = host_state(chunk, may_sink=self.may_sink)
        if state is wanted:
            return judge(chunk)
        if state is not HostState.HELD:
            other.push(chunk)
        return HeapVerdict.PARK

    def make_disk_room(self, chunk: ChunkT, gone: Callable[[ChunkT], None], *, lossless: bool) -> bool:
        """Free a disk slot for `chunk` by dropping a copy that is worth less; return whether one is free.

        In exclusive mode a copy whose chunk is in host memory as well goes first, whatever it is worth. A pinned
        chunk is worth more than any other.

        Args:
            gone: Called with the chunk that loses its disk copy.
            lossless: In exclusive mode, no chunk may leave the system for this one.
        """
        if self.disk.free_count:
            return True
        victim = self.doubles.search(lambda double: self._judge_double(double, chunk))
        if not (self._config.is_exclusive and (victim is not None or lossless)):
            settled = self.settled.search(lambda settled: self._judge_settled(settled, chunk))
            if victim is None or (settled is not None and self._disk_rank(settled) < self._disk_rank(victim)):
                victim = settled
        if victim is None:
            return False
        self.evict_disk(victim)
        self.offer(victim)
        gone(victim)
        return True

    def _disk_rank(self, chunk: ChunkT) -> VictimKey:
        return self.shares.rank(chunk, TierKind.DISK)

    def _may_replace(self, chunk: ChunkT, newcomer: ChunkT) -> bool:
        """Return whether a chunk's disk copy may be given up for that of a newcomer."""
        if newcomer.pins:
            return not self.shares.is_protected(chunk, TierKind.DISK, newcomer)
        return self.shares.outranks(newcomer, chunk, TierKind.DISK)

    def _judge_double(self, chunk: ChunkT, newcomer: ChunkT) -> HeapVerdict:
        if chunk.busy:
            return HeapVerdict.PARK
        if not chunk.host_ready:
            self.settled.push(chunk)
            return HeapVerdict.PARK
        if not self._config.is_exclusive and not self._may_replace(chunk, newcomer):
            return HeapVerdict.STOP
        return HeapVerdict.TAKE

    def _judge_settled(self, chunk: ChunkT, newcomer: ChunkT) -> HeapVerdict:
        if chunk.host_ready and not chunk.busy:
            self.doubles.push(chunk)
            return HeapVerdict.PARK
        if chunk.busy or not (chunk.remote or may_leave(chunk)):
            return HeapVerdict.PARK
        if not self._may_replace(chunk, newcomer):
            return HeapVerdict.STOP
        return HeapVerdict.TAKE

    def trim_remote(self, limit: int) -> None:
        """Forget the least valuable chunks of which only the remote tier has a copy, until `limit` are left."""
        while len(self.distant) > limit:
            victim = self.distant.search(self._judge_distant)
            if victim is None:
                return
            self.evict_remote(victim)

    def _judge_distant(self, chunk: ChunkT) -> HeapVerdict:
        if chunk.host_ready or chunk.disk_ready:
            return HeapVerdict.PARK
        return HeapVerdict.TAKE if may_leave(chunk) else HeapVerdict.SKIP

    def _arriving(self, chunk: ChunkT) -> None:
        """Note that a chunk is about to get a ready copy. With its first copy the chunk comes into the system."""
        if chunk.is_stored:
            return
        parent = chunk.parent
        if parent is not None and parent.arrived and not parent.stored_below:
            chunk.arrived = parent.arrived  # a session that grows does not become younger
        else:
            chunk.arrived = next(self._arrivals)
        if not chunk.stored_below:
            self._one_more_below(parent)

    def _gone(self, chunk: ChunkT) -> None:
        """Note that a ready copy of a chunk is gone. With its last copy the chunk leaves the system."""
        if chunk.parent is not None and self._config.policy is EvictionPolicy.PREDICTED:
            self.offer(cast(ChunkT, chunk.parent))  # it is the end of its path in that tier now
        if chunk.is_stored:
            self.offer(chunk)
            return
        chunk.arrived = 0
        self.changes.lost.append(chunk)
        self._absent_below(chunk)

    def moved(self, chunk: TieredChunk, before: TieredChunk) -> None:
        """Correct `stored_below` after a chunk, with all chunks below it, got another parent than `before`."""
        if chunk.is_stored or chunk.stored_below:
            self._one_less_below(before)
            self._one_more_below(chunk.parent)

    def _one_more_below(self, parent: TieredChunk | None) -> None:
        while parent is not None:
            parent.stored_below += 1
            if parent.stored_below > 1 or parent.is_stored:
                break
            parent = parent.parent

    def _absent_below(self, chunk: TieredChunk) -> None:
        if not chunk.stored_below:
            self._one_less_below(chunk.parent)

    def _one_less_below(self, parent: TieredChunk | None) -> None:
        while parent is not None:
            parent.stored_below -= 1
            if parent.stored_below:
                break
            self.offer(cast(ChunkT, parent))
            if parent.is_stored:
                break
            parent = parent.parent
