"""The directory's invariants, looked at one by one. For tests and debug runs: it visits every chunk."""

from __future__ import annotations

from collections.abc import Iterable

from trunkline.kvstore.chunks import ChunkT, TieredChunk
from trunkline.kvstore.copies import Copies, HostState, host_state, may_leave
from trunkline.kvstore.extents import NO_SLOT, SlotId
from trunkline.kvstore.lookahead import WaitingJobs
from trunkline.kvstore.slots import SlotPool
from trunkline.kvstore.tier import TierKind
from trunkline.kvstore.tier_moves import TierMover


class DirectoryIntegrityError(AssertionError):
    """The directory contradicts itself: a bug."""


def _require(condition: bool, what: str, item: TieredChunk | None = None) -> None:
    if not condition:
        raise DirectoryIntegrityError(what if item is None else f"{what}: chunk {item.name.hex()}")


def check_directory(
    copies: Copies[ChunkT], jobs: WaitingJobs[ChunkT], mover: TierMover[ChunkT], claimed_count: int
) -> None:
    """
    Raises:
        IntegrityError: an invariant is broken.
    """
    items = dict.fromkeys(copies.host.owners.values())
    items.update(dict.fromkeys(copies.disk.owners.values()))
    items.update(dict.fromkeys(copies.distant))
    live = [item for item in items if not item.is_forgotten]
    _check_slots(copies.host, [(item.host, item) for item in items])
    _check_slots(copies.disk, [(item.disk, item) for item in items])
    _check_moves(copies, mover, items)
    for item in live:
        _check_item(copies, item)
        _check_wants(jobs, mover, item)
    _check_below(live)
    _require(claimed_count <= copies.host.capacity, "more chunks are claimed than host memory has slots")
    _require(0 <= copies.unsaved_claims <= claimed_count, "unsaved claims do not add up")
    unsaved = claimed_count - sum(item.claims > 0 and item.host != NO_SLOT for item in live)
    _require(copies.unsaved_claims == unsaved, "unsaved claims do not add up")


def _check_slots(pool: SlotPool[ChunkT], held: Iterable[tuple[SlotId, ChunkT]]) -> None:
    owned = {slot: item for slot, item in held if slot != NO_SLOT}
    _require(owned == dict(pool.owners), "a slot's owner does not know of it, or has none")
    free = list(pool.free_slots())
    _require(len(free) == len(set(free)) == pool.free_count, "free slots do not add up")
    _require(not owned.keys() & set(free), "a slot in use is free")


def _check_moves(copies: Copies[ChunkT], mover: TierMover[ChunkT], items: Iterable[ChunkT]) -> None:
    busy = dict.fromkeys(items, 0)
    for move in mover.in_flight.values():
        item = move.item
        _require(item in busy, "a move's chunk has no slot", item)
        busy[item] += 1
        _require(copies.host.owners.get(move.host_slot) is item, "a move's host slot changed hands", item)
        _require(copies.host.generation(move.host_slot) == move.host_generation, "a host slot was reused", item)
        if move.tier is TierKind.DISK:
            _require(copies.disk.owners.get(move.slot) is item, "a move's disk slot changed hands", item)
            _require(copies.disk.generation(move.slot) == move.generation, "a disk slot was reused", item)
        if not item.is_forgotten:
            _require(item.host_ready == move.is_write, "a move's host slot is not what it takes it for", item)
    for item, count in busy.items():
        _require(item.busy == count, "moves in flight do not add up", item)


def _check_item(copies: Copies[ChunkT], item: ChunkT) -> None:
    _require(not item.host_ready or item.host != NO_SLOT, "a host copy without a slot", item)
    _require(not item.disk_ready or item.disk != NO_SLOT, "a disk copy without a slot", item)
    reserved = (item.host != NO_SLOT and not item.host_ready) + (item.disk != NO_SLOT and not item.disk_ready)
    _require(reserved <= item.busy, "a slot is reserved for nothing", item)
    _require((item.arrived > 0) == item.is_stored, "arrival does not agree with copies", item)
    if item.busy:
        return
    state = host_state(item, may_sink=copies.rules.may_sink)
    if item.host_ready and state is not HostState.HELD:
        # On the device or not, the heaps find out when they meet it; but it is in one of them.
        _require(item in copies.clean or item in copies.dirty, "a host copy cannot be evicted", item)
    if item.disk_ready and (item.host_ready or may_leave(item)):
        _require(item in copies.doubles or item in copies.settled, "a disk copy cannot be evicted", item)
    if item.remote and not item.host_ready and not item.disk_ready and may_leave(item):
        _require(item in copies.distant, "a remote copy cannot be forgotten", item)


def _check_wants(jobs: WaitingJobs[ChunkT], mover: TierMover[ChunkT], item: ChunkT) -> None:
    _require(item.wants == sorted(item.wants), "wishes are out of order", item)
    _require(all(job in jobs for _, job in item.wants), "a job that is gone wants it", item)
    source = jobs.source(item)
    _require(source is None or jobs.is_lacking(item), "nobody will fetch it", item)
    for tier, queue in mover.unsaved.items():
        _require(item not in queue or item.host_ready, f"nothing to write to {tier.name}", item)


def _check_below(live: list[ChunkT]) -> None:
    below: dict[TieredChunk, set[TieredChunk]] = {}
    for item in live:
        child: TieredChunk = item
        while item.is_stored and child.parent is not None:
            below.setdefault(child.parent, set()).add(child)
            child = child.parent
    for parent, children in below.items():
        _require(parent.stored_below == len(children), "stored children do not add up", parent)
    for item in live:
        _require(item in below or not item.stored_below, "stored children do not add up", item)
