"""Where the copies are, and which of them may go. Part of the directory; pure.

      host   clean    lost without loss: the chunk is on disk, remote or on the device, too
             dirty    the only copy: must sink to a tier below first
      disk   doubles  chunks that are in host memory, too: the first to go when the disk is full
             settled  the others
      remote distant  chunks of which nothing nearer is left; only their names cost anything here

Each chunk stands in the heap of its state in each tier, ordered by the policy. A heap's entry is a hint: the state
is looked at again when it comes to the top, so that only changes that make a chunk go *sooner* must be told
(`offer`). Chunks that must not go now are taken out and offered again when the reason ends.

Leaf first: a chunk leaves the system (loses its last copy) only if nothing below it is stored. `stored_below`
counts that along the path, so no search is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from itertools import count
from typing import Generic, NamedTuple, cast

from trunkline.kvstore.chunks import ChangeLog, ChunkT, TieredChunk
from trunkline.kvstore.eviction import VictimKey
from trunkline.kvstore.extents import NO_SLOT, SlotId
from trunkline.kvstore.lazy_heap import HeapVerdict, LazyHeap
from trunkline.kvstore.slots import SlotPool
from trunkline.kvstore.tier import TierKind


class IndexEvent(NamedTuple, Generic[ChunkT]):
    """A change of what the disk tier holds, for the index that survives restarts; in order."""

    slot: SlotId
    item: ChunkT | None
    """What the slot holds now, written and verified by every rank; None: nothing any more."""
    generation: int = 0


class HostState(Enum):
    """What dropping a chunk's host copy would mean."""

    HELD = "a move or a claim needs it"
    CLEAN = "there is another copy"
    DIRTY = "it is the only copy"


def may_leave(item: TieredChunk) -> bool:
    """Whether the last copy of a chunk may be given up now."""
    return not (item.busy or item.claims or item.pins or item.stored_below)


def host_state(item: TieredChunk, *, may_sink: bool) -> HostState:
    """
    Args:
        may_sink: there are tiers below, so what has come into host memory is to get there. If there are none, a
        copy
            on the device counts if the chunk may leave: it may be gone tomorrow.
    """
    if item.busy or item.claims:
        return HostState.HELD
    if item.disk_ready or item.remote or (item.on_device and not may_sink and may_leave(item)):
        return HostState.CLEAN
    return HostState.DIRTY


class CopyRules(NamedTuple):
    """What goes before what."""

    exclusive: bool
    """See `DirectoryConfig`."""
    may_sink: bool
    """See `host_state`."""


class CopyChanges(Generic[ChunkT]):
    """What has happened since those whom it concerns looked at it."""

    def __init__(self) -> None:
        self.lost: list[ChunkT] = []
        """Lost their last copy; they may have one again."""
        self.events: list[IndexEvent[ChunkT]] = []
        self.log: ChangeLog[ChunkT] = ChangeLog()
        """For whoever wants to know where chunks are; the owner notes in it what happens on the device."""


class Copies(Generic[ChunkT]):
    """The slots of both local tiers and the order in which their copies go."""

    def __init__(
        self,
        host_slots: int,
        disk_slots: int,
        first_generation: int,
        key: Callable[[TieredChunk], VictimKey],
        rules: CopyRules,
    ) -> None:
        self.host: SlotPool[ChunkT] = SlotPool(host_slots)
        self.disk: SlotPool[ChunkT] = SlotPool(disk_slots, first_generation)
        self.key = key
        self.rules = rules
        self.clean: LazyHeap[ChunkT] = LazyHeap(key)
        self.dirty: LazyHeap[ChunkT] = LazyHeap(key)
        self.doubles: LazyHeap[ChunkT] = LazyHeap(key)
        self.settled: LazyHeap[ChunkT] = LazyHeap(key)
        self.distant: LazyHeap[ChunkT] = LazyHeap(key)
        self.expiring: LazyHeap[ChunkT] = LazyHeap(lambda item: (item.expires, -item.depth))
        self.changes: CopyChanges[ChunkT] = CopyChanges()
        self.evictions = {TierKind.HOST: 0, TierKind.DISK: 0, TierKind.REMOTE: 0}
        self.unsaved_claims = 0
        """Claimed chunks without a host slot: so many may be saved any moment."""
        self._arrivals = count(1)

    def reserve_host(self, item: ChunkT, step: int = 0) -> SlotId | None:
        """A host slot for a copy that is not there yet."""
        slot = self.host.allocate(item, step)
        if slot is not None:
            item.host = slot
            self.unsaved_claims -= item.claims > 0
        return slot

    def host_arrived(self, item: ChunkT) -> None:
        """The reserved host slot may be read from now on."""
        self._arriving(item)
        item.host_ready = True
        self.changes.log.note(item)
        self.distant.discard(item)
        self.offer(item)

    def drop_host(self, item: ChunkT) -> None:
        """Give up the host copy, or the slot that was reserved for one."""
        self.host.release(item.host)
        item.host = NO_SLOT
        self.unsaved_claims += item.claims > 0
        self.clean.discard(item)
        self.dirty.discard(item)
        if item.host_ready:
            item.host_ready = False
            self.changes.log.note(item)
            self._gone(item)

    def reserve_disk(self, item: ChunkT) -> SlotId | None:
        """A free disk slot for a copy that is not there yet."""
        slot = self.disk.allocate(item)
        if slot is not None:
            item.disk = slot
        return slot

    def disk_arrived(self, item: ChunkT) -> None:
        """What was written into the reserved disk slot is verified."""
        self._arriving(item)
        item.disk_ready = True
        self.changes.log.note(item)
        self.distant.discard(item)
        self.changes.events.append(IndexEvent(item.disk, item, self.disk.generation(item.disk)))
        self.offer(item)

    def restore_disk(self, item: ChunkT, slot: SlotId, generation: int) -> bool:
        """The copy is there since an earlier run; False if there is no such slot, or it is another's."""
        if item.disk != NO_SLOT or not self.disk.take(item, slot, generation):
            return False
        self._arriving(item)
        item.disk, item.disk_ready = slot, True
        self.changes.log.note(item)
        self.distant.discard(item)
        self.offer(item)
        return True

    def drop_disk(self, item: ChunkT) -> None:
        """Give up the disk copy, or the slot that was reserved for one."""
        slot = item.disk
        self.disk.release(slot)
        item.disk = NO_SLOT
        self.doubles.discard(item)
        self.settled.discard(item)
        if item.disk_ready:
            item.disk_ready = False
            self.changes.log.note(item)
            self.changes.events.append(IndexEvent(slot, None))
            self._gone(item)

    def remote_arrived(self, item: ChunkT) -> None:
        """The remote tier has it."""
        self._arriving(item)
        item.remote = True
        self.offer(item)

    def drop_remote(self, item: ChunkT) -> None:
        """Do not rely on the remote tier for it any more."""
        self.distant.discard(item)
        if item.remote:
            item.remote = False
            self._gone(item)

    def forget(self, item: ChunkT) -> None:
        """Its owner removed it. Slots that moves still use stay reserved (`free_slots_of`)."""
        for heap in (self.clean, self.dirty, self.doubles, self.settled, self.distant, self.expiring):
            heap.discard(item)
        stored = item.is_stored
        if item.disk_ready:
            self.changes.events.append(IndexEvent(item.disk, None))
        item.host_ready = item.disk_ready = item.remote = False
        self.changes.log.note(item)
        item.arrived = 0
        item.expires = 0.0
        self.unsaved_claims -= item.claims > 0 and item.host == NO_SLOT
        item.claims = item.pins = 0
        item.is_forgotten = True
        if stored:
            self._absent_below(item)
        if not item.busy:
            self.free_slots_of(item)

    def free_slots_of(self, item: ChunkT) -> None:
        """Its slots are free again: it is forgotten, and no move uses them."""
        if item.host != NO_SLOT:
            self.host.release(item.host)
        if item.disk != NO_SLOT:
            self.disk.release(item.disk)
        item.host = item.disk = NO_SLOT

    def offer(self, item: ChunkT) -> None:
        """Put a chunk where its state says, because it may go now, or sooner than before."""
        if 0.0 < item.expires < math.inf and item not in self.expiring:
            self.expiring.push(item)
        if item.busy:
            return
        if item.host_ready:
            state = host_state(item, may_sink=self.rules.may_sink)
            if state is HostState.CLEAN:
                self.clean.push(item)
            elif state is HostState.DIRTY:
                self.dirty.push(item)
        if item.disk_ready:
            (self.doubles if item.host_ready else self.settled).push(item)
        elif item.remote and not item.host_ready:
            self.distant.push(item)

    def clean_victim(self, judge: Callable[[ChunkT], HeapVerdict]) -> ChunkT | None:
        """The first host copy that can be dropped without loss and that `judge` takes."""
        return self.clean.search(lambda item: self._check_host(item, HostState.CLEAN, self.dirty, judge))

    def dirty_victim(self, judge: Callable[[ChunkT], HeapVerdict]) -> ChunkT | None:
        """The first host copy that is the only one and that `judge` takes."""
        return self.dirty.search(lambda item: self._check_host(item, HostState.DIRTY, self.clean, judge))

    def _check_host(
        self, item: ChunkT, wanted: HostState, other: LazyHeap[ChunkT], judge: Callable[[ChunkT], HeapVerdict]
    ) -> HeapVerdict:
        state = host_state(item, may_sink=self.rules.may_sink)
        if state is wanted:
            return judge(item)
        if state is not HostState.HELD:
            other.push(item)
        return HeapVerdict.PARK

    def make_disk_room(self, item: ChunkT, gone: Callable[[ChunkT], None], *, lossless: bool) -> bool:
        """See that a disk slot is free for `item` by dropping what is worth less; if exclusive, what loses nothing
        goes before it, whatever it is worth.

        A pinned chunk is worth more than any other.

        Args:
            gone: told of the chunk that lost its disk copy.
            lossless: if exclusive, no chunk may leave the system for it.
        """
        if self.disk.free_count:
            return True
        floor = None if item.pins else self.key(item)
        victim = self.doubles.search(lambda double: self._judge_double(double, floor))
        if not (self.rules.exclusive and (victim is not None or lossless)):
            settled = self.settled.search(lambda settled: self._judge_settled(settled, floor))
            if victim is None or (settled is not None and self.key(settled) < self.key(victim)):
                victim = settled
        if victim is None:
            return False
        self.evictions[TierKind.DISK] += 1
        self.drop_disk(victim)
        self.offer(victim)
        gone(victim)
        return True

    def _judge_double(self, item: ChunkT, floor: VictimKey | None) -> HeapVerdict:
        if item.busy:
            return HeapVerdict.PARK
        if not item.host_ready:
            self.settled.push(item)
            return HeapVerdict.PARK
        if not self.rules.exclusive and floor is not None and self.key(item) >= floor:
            return HeapVerdict.STOP
        return HeapVerdict.TAKE

    def _judge_settled(self, item: ChunkT, floor: VictimKey | None) -> HeapVerdict:
        if item.host_ready and not item.busy:
            self.doubles.push(item)
            return HeapVerdict.PARK
        if item.busy or not (item.remote or may_leave(item)):
            return HeapVerdict.PARK
        if floor is not None and self.key(item) >= floor:
            return HeapVerdict.STOP
        return HeapVerdict.TAKE

    def trim_remote(self, limit: int) -> None:
        """Forget the remote copies worth least of which nothing nearer is left, until so many are known."""
        while len(self.distant) > limit:
            victim = self.distant.search(self._judge_distant)
            if victim is None:
                return
            self.evictions[TierKind.REMOTE] += 1
            self.drop_remote(victim)

    def _judge_distant(self, item: ChunkT) -> HeapVerdict:
        if item.host_ready or item.disk_ready:
            return HeapVerdict.PARK
        return HeapVerdict.TAKE if may_leave(item) else HeapVerdict.SKIP

    def _arriving(self, item: ChunkT) -> None:
        """Before a chunk gets a ready copy: if it has none yet, it comes into the system."""
        if item.is_stored:
            return
        parent = item.parent
        if parent is not None and parent.arrived and not parent.stored_below:
            item.arrived = parent.arrived  # a session that grows does not become younger
        else:
            item.arrived = next(self._arrivals)
        if not item.stored_below:
            self._one_more_below(parent)

    def _gone(self, item: ChunkT) -> None:
        """After a ready copy went."""
        if item.is_stored:
            self.offer(item)
            return
        item.arrived = 0
        self.changes.lost.append(item)
        self._absent_below(item)

    def moved(self, item: TieredChunk, before: TieredChunk) -> None:
        """A chunk, with all that is below it, hangs from another parent than before."""
        if item.is_stored or item.stored_below:
            self._one_less_below(before)
            self._one_more_below(item.parent)

    def _one_more_below(self, parent: TieredChunk | None) -> None:
        while parent is not None:
            parent.stored_below += 1
            if parent.stored_below > 1 or parent.is_stored:
                break
            parent = parent.parent

    def _absent_below(self, item: TieredChunk) -> None:
        if not item.stored_below:
            self._one_less_below(item.parent)

    def _one_less_below(self, parent: TieredChunk | None) -> None:
        while parent is not None:
            parent.stored_below -= 1
            if parent.stored_below:
                break
            self.offer(cast(ChunkT, parent))
            if parent.is_stored:
                break
            parent = parent.parent
