"""Checks of the directory's invariants, for tests and debug runs: they visit every chunk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from trunkline.kvstore.chunks import NO_PEER, NO_SLOT, ChunkT, SlotId, TieredChunk
from trunkline.kvstore.copies import Copies, HostState, host_state, may_leave
from trunkline.kvstore.peers import PeerBook
from trunkline.kvstore.shares import KvAccount
from trunkline.kvstore.slots import SlotPool
from trunkline.kvstore.tier import TierKind
from trunkline.kvstore.tier_moves import TierMover
from trunkline.kvstore.tier_policy import Source, WaitingJobs


class DirectoryIntegrityError(AssertionError):
    """An invariant of the directory is broken: a bug."""


def _require(condition: bool, what: str, chunk: TieredChunk | None = None) -> None:
    if not condition:
        raise DirectoryIntegrityError(what if chunk is None else f"{what}: chunk {chunk.name.hex()}")


def check_directory(
    copies: Copies[ChunkT], jobs: WaitingJobs[ChunkT], mover: TierMover[ChunkT], claimed_count: int
) -> None:
    """Check that slots, copies, moves and the wishes of waiting jobs agree.

    Raises:
        DirectoryIntegrityError: An invariant is broken.
    """
    chunks = dict.fromkeys(copies.host.owners.values())
    chunks.update(dict.fromkeys(copies.disk.owners.values()))
    chunks.update(dict.fromkeys(copies.distant))
    for known in copies.at_peers.values():
        chunks.update(known)
    live = [chunk for chunk in chunks if not chunk.is_forgotten]
    _check_slots(copies.host, [(chunk.host, chunk) for chunk in chunks])
    _check_slots(copies.disk, [(chunk.disk, chunk) for chunk in chunks])
    _check_moves(copies, mover, chunks)
    for chunk in live:
        _check_chunk(copies, chunk)
        _check_wants(jobs, mover, chunk)
    for queue in mover.behind.queues.values():
        times = list(queue.values())
        _require(times == sorted(times), "of chunks to be written, a newer one is in front of an older one")
    _check_below(live)
    _check_shares(copies, chunks)
    _require(claimed_count <= copies.host.capacity, "more chunks are claimed than host memory has slots")
    _require(0 <= copies.unsaved_claims <= claimed_count, "unsaved claims do not add up")
    unsaved = claimed_count - sum(chunk.claims > 0 and chunk.host != NO_SLOT for chunk in live)
    _require(copies.unsaved_claims == unsaved, "unsaved claims do not add up")


def check_peers(
    copies: Copies[ChunkT], peers: PeerBook, mover: TierMover[ChunkT], released: Iterable[ChunkT]
) -> None:
    """Check that what peers are said to have is wanted and nowhere nearer, and that moves in flight are counted
    where they belong.

    Args:
        released: Chunks that a job has ceased to want since the last moves.

    Raises:
        DirectoryIntegrityError: An invariant is broken.
    """
    leaving = set(released)
    for number, known in copies.at_peers.items():
        _require(number in peers, f"peer {number} is not known")
        _require(bool(known), f"peer {number} is kept for nothing")
        for chunk in known:
            _require(chunk.peer == number and not chunk.is_forgotten, "a peer's chunk does not know of it", chunk)
            near = chunk.on_device or chunk.host_ready or chunk.disk_ready
            _require(not near, "a peer's copy is known of a chunk that is nearer", chunk)
            _require(bool(chunk.wants) or chunk in leaving, "a peer's copy is known that no job wants", chunk)
    in_flight = Counter(Source(move.tier, move.peer) for move in mover.in_flight.values() if not move.is_write)
    for peer in peers:
        place = Source(TierKind.PEER, peer.number)
        _require(peer.health.reading == in_flight.pop(place, 0), f"pulls from peer {peer.number} do not add up")
        _require(not peer.health.writing, f"something is written to peer {peer.number}")
    for place, reads in in_flight.items():
        _require(mover.health_of(place).reading == reads, f"reads from {place} do not add up")


def _check_slots(pool: SlotPool[ChunkT], held: Iterable[tuple[SlotId, ChunkT]]) -> None:
    owned = {slot: chunk for slot, chunk in held if slot != NO_SLOT}
    _require(owned == dict(pool.owners), "a slot's owner does not know of it, or has none")
    free = list(pool.free_slots())
    _require(len(free) == len(set(free)) == pool.free_count, "free slots do not add up")
    _require(not owned.keys() & set(free), "a slot in use is free")


def _check_shares(copies: Copies[ChunkT], chunks: Iterable[ChunkT]) -> None:
    counted = Counter[tuple[KvAccount, TierKind]]()
    for chunk in chunks:
        if chunk.account is not None:
            counted[chunk.account, TierKind.HOST] += chunk.host != NO_SLOT
            counted[chunk.account, TierKind.DISK] += chunk.disk != NO_SLOT
    for account in copies.shares.accounts():
        for tier in (TierKind.HOST, TierKind.DISK):
            right = account.counts[tier] == counted[account, tier]
            _require(right, f"the chunks of {account.tenant} in {tier.name} do not add up")


def _check_moves(copies: Copies[ChunkT], mover: TierMover[ChunkT], chunks: Iterable[ChunkT]) -> None:
    busy = dict.fromkeys(chunks, 0)
    for move in mover.in_flight.values():
        chunk = move.chunk
        _require(chunk in busy, "a move's chunk has no slot", chunk)
        busy[chunk] += 1
        _require(copies.host.owners.get(move.host_slot) is chunk, "a move's host slot changed hands", chunk)
        _require(copies.host.generation(move.host_slot) == move.host_generation, "a host slot was reused", chunk)
        if move.tier is TierKind.DISK:
            _require(copies.disk.owners.get(move.slot) is chunk, "a move's disk slot changed hands", chunk)
            _require(copies.disk.generation(move.slot) == move.generation, "a disk slot was reused", chunk)
        if not chunk.is_forgotten:
            _require(
                chunk.host_ready == move.is_write,
                "a move's host slot is in another state than the move assumes",
                chunk,
            )
    for chunk, count in busy.items():
        _require(chunk.busy == count, "moves in flight do not add up", chunk)


def _check_chunk(copies: Copies[ChunkT], chunk: ChunkT) -> None:
    _require(not chunk.host_ready or chunk.host != NO_SLOT, "a host copy without a slot", chunk)
    _require(not chunk.disk_ready or chunk.disk != NO_SLOT, "a disk copy without a slot", chunk)
    reserved = (chunk.host != NO_SLOT and not chunk.host_ready) + (chunk.disk != NO_SLOT and not chunk.disk_ready)
    _require(reserved <= chunk.busy, "a slot is reserved for nothing", chunk)
    known = chunk in copies.at_peers.get(chunk.peer, ())
    _require(known == (chunk.peer != NO_PEER), "what a peer is said to have is not noted", chunk)
    _require((chunk.arrived > 0) == chunk.is_stored, "arrival does not agree with copies", chunk)
    if chunk.busy:
        return
    state = host_state(chunk, may_sink=copies.may_sink)
    if chunk.host_ready and state is not HostState.HELD:
        # Either heap will do: which one is right depends on the device, and is seen when the chunk comes to the
        # top.
        _require(chunk in copies.clean or chunk in copies.dirty, "a host copy cannot be evicted", chunk)
    if chunk.disk_ready and (chunk.host_ready or may_leave(chunk)):
        _require(chunk in copies.doubles or chunk in copies.settled, "a disk copy cannot be evicted", chunk)
    if chunk.remote and not chunk.host_ready and not chunk.disk_ready and may_leave(chunk):
        _require(chunk in copies.distant, "a remote copy cannot be forgotten", chunk)


def _check_wants(jobs: WaitingJobs[ChunkT], mover: TierMover[ChunkT], chunk: ChunkT) -> None:
    _require(chunk.wants == sorted(chunk.wants), "wishes are out of order", chunk)
    _require(all(job in jobs for _, job in chunk.wants), "a job that is gone wants it", chunk)
    source = jobs.source(chunk)
    _require(source is None or jobs.is_lacking(chunk), "it is in no queue to be fetched", chunk)
    for tier, queue in mover.behind.queues.items():
        _require(chunk not in queue or chunk.host_ready, f"nothing to write to {tier.name}", chunk)


def _check_below(live: list[ChunkT]) -> None:
    below: dict[TieredChunk, set[TieredChunk]] = {}
    for chunk in live:
        child: TieredChunk = chunk
        while chunk.is_stored and child.parent is not None:
            below.setdefault(child.parent, set()).add(child)
            child = child.parent
    for parent, children in below.items():
        _require(parent.stored_below == len(children), "stored children do not add up", parent)
    for chunk in live:
        _require(chunk in below or not chunk.stored_below, "stored children do not add up", chunk)
