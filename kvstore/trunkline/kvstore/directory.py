"""The directory: where each chunk is below the device, what to fetch and what to evict (CachedAttention §3.3).
Pure.

The controller has one; its workers carry out what it orders. Time and step numbers are arguments.

      device ──save──► host ──write──► disk       save, load: part of step plans, never fail, logically at once
             ◄──load──      ◄──read───            write, read: `Move`s beside the steps, each answered by all ranks
                            ──write──► remote
                            ◄──read───
                            ◄──pull─── peer      the host memory of another group, which is only read

A chunk is immutable, so it may be in several tiers. A peer's copy is hearsay: it is known only while a waiting job
wants the chunk and nothing nearer has it. The directory keeps, over all chunks,

- where the copies are and which of them are evicted first (`trunkline.kvstore.copies`),
- which chunks the waiting jobs will use (`trunkline.kvstore.tier_policy`),
- which chunks the jobs after these will use, as far as it can be foreseen (`trunkline.kvstore.next_use`),
- the moves in flight (`trunkline.kvstore.tier_moves`), and how fast and how reliable each tier and each peer is
  (`trunkline.kvstore.tier_health`, `trunkline.kvstore.peers`).

Invariants (`check`): a slot has one owner. A claimed chunk stays in host memory, a pinned one in the system, and a
copy that a move uses where it is. A chunk leaves the system only after all chunks below it, unless a tier lost it.
A copy is given up only when another one is verified, or when its chunk leaves the system.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic

from trunkline.kvstore.chunks import NO_PEER, NO_SLOT, ChangeLog, ChunkName, ChunkT, QueueKey, SlotId
from trunkline.kvstore.copies import Copies, IndexEvent, may_leave
from trunkline.kvstore.directory_check import check_directory, check_peers
from trunkline.kvstore.next_use import RESTORED, NextUse
from trunkline.kvstore.peers import Peer, PeerBook
from trunkline.kvstore.save_victims import victim_of_save
from trunkline.kvstore.shares import KvAccount, Shares
from trunkline.kvstore.tier import TierKind, TierStats, TierTotals
from trunkline.kvstore.tier_health import TierHealth
from trunkline.kvstore.tier_moves import Move, MoveStatus, TierMover
from trunkline.kvstore.tier_policy import DirectoryConfig, Source, WaitingJobs

READ_US: dict[TierKind, float] = {TierKind.DISK: 500.0, TierKind.REMOTE: 1000.0}
"""Assumed microseconds of one read, by tier, until a read was measured."""


class Directory(Generic[ChunkT]):
    """Knows which chunk has a copy in which tier below the device, and decides all moves and evictions."""

    def __init__(
        self,
        config: DirectoryConfig,
        totals: Mapping[TierKind, TierTotals] | None = None,
        device_blocks: int = 0,
        is_thin: Callable[[ChunkT], bool] = lambda _: False,
    ) -> None:
        """
        Args:
            totals: The totals of each `TierKind` from which to count on; None: count from zero.
            device_blocks: Number of blocks of the device, for the tenants' shares of it.
            is_thin: Says of a chunk on the device whether layers with a window have nothing of it there.

        Raises:
            ValueError: The configuration makes no sense.
        """
        config.validate()
        self.config = config
        limits = config.reads_in_flight, config.writes_in_flight
        tiers = [TierKind.DISK] * (config.disk_slots > 0) + [TierKind.REMOTE] * config.remote
        self.totals = totals or {tier: TierTotals() for tier in TierKind}
        self.health = {tier: TierHealth(READ_US[tier], *limits, self.totals[tier]) for tier in tiers}
        self.copies: Copies[ChunkT] = Copies(config, self.totals, device_blocks)
        self.jobs: WaitingJobs[ChunkT] = WaitingJobs(is_thin)
        self.next_use: NextUse[ChunkT] = NextUse(
            self.copies.offer, has_host=config.host_slots > 0, has_disk=config.disk_slots > 0
        )
        self.peers = PeerBook(config.pulls_in_flight, self.totals[TierKind.PEER])
        self.mover: TierMover[ChunkT] = TierMover(
            self.copies, self.jobs, self.health, self.peers, config, self.totals
        )
        self._is_thin = is_thin
        self._released: list[ChunkT] = []
        """Chunks that only a peer is said to have, and that a job has ceased to want since the last moves."""
        self.claimed_count = 0
        self.pinned_count = 0

    # Device side: synchronous with step plans.

    def save(self, chunk: ChunkT, step: int, *, forced: bool = False) -> tuple[SlotId, int] | None:
        """Reserve a host slot for a chunk that the plan of `step` is to save. The copy counts as ready at once.

        If no slot is free, another chunk's host copy makes room, if there is one that may (`save_victims`).

        Args:
            forced: The chunk loses its block and is claimed, so the only copy of an unclaimed chunk may be
            dropped.

        Returns:
            (host slot, generation); None if there is no room, or if a copy is being fetched already.
        """
        assert not chunk.host_ready, "it has a copy"
        if chunk.host != NO_SLOT:
            return None
        slot = self.copies.reserve_host(chunk, step)
        if slot is None:
            can_drop_only_copies = forced or not self.mover.can_demote()
            victim = victim_of_save(
                self.copies, self.jobs, self.config.policy, chunk, step, can_drop_only_copies, forced=forced
            )
            if victim is None:
                return None
            self.mover.drop_host(victim)
            slot = self.copies.reserve_host(chunk, step)
            if slot is None:
                return None
        self.totals[TierKind.DEVICE].reads += 1
        self.totals[TierKind.HOST].writes += 1
        self.copies.host_arrived(chunk)
        self.mover.behind.add(chunk)
        return slot, self.copies.host.generation(slot)

    def load(self, chunk: ChunkT, step: int) -> tuple[SlotId, int]:
        """Return (host slot, generation) of the host copy, which the plan of `step` is to read."""
        assert chunk.host_ready, "a chunk is loaded that has no host copy"
        self.copies.host.touch(chunk.host, step)
        self.totals[TierKind.DEVICE].writes += 1
        self.totals[TierKind.HOST].reads += 1
        self.copies.offer(chunk)
        return chunk.host, self.copies.host.generation(chunk.host)

    def left_device(self, chunk: ChunkT) -> None:
        """Note that a chunk's block was given up or became thin: a copy may have to be fetched for a job."""
        self.jobs.note(chunk)
        self.copies.offer(chunk)

    # What requests use and want.

    def own(self, path: Sequence[ChunkT], account: KvAccount) -> None:
        """Give a tenant with a share the chunks of a path that it uses, if they belong to no such tenant."""
        for chunk in path:
            if chunk.account is None:
                self.copies.give(chunk, account)

    def used(self, path: Sequence[ChunkT], now: float) -> None:
        """Note that a request uses the chunks of a path, from its beginning on."""
        for chunk in path:
            chunk.last_use = max(chunk.last_use, now)

    def is_near(self, chunk: ChunkT) -> bool:
        """Return whether a plan made now may use the chunk in all layers, or load what the device lacks of it."""
        return chunk.host_ready or (chunk.on_device and not self._is_thin(chunk))

    def tier_of(self, chunk: ChunkT) -> TierKind | None:
        """Return the fastest tier that has a ready copy, with the KV of all layers; None if no tier has one."""
        if chunk.on_device and not self._is_thin(chunk):
            return TierKind.DEVICE
        if chunk.host_ready:
            return TierKind.HOST
        if chunk.disk_ready:
            return TierKind.DISK
        if chunk.peer != NO_PEER:
            return TierKind.PEER
        return TierKind.REMOTE if chunk.remote else None

    def source_of(self, chunk: ChunkT) -> Source | None:
        """Return the fastest place that has a ready copy, as `tier_of`, and which peer it is."""
        tier = self.tier_of(chunk)
        return None if tier is None else Source(tier, chunk.peer if tier is TierKind.PEER else NO_PEER)

    def want(self, job: int, key: QueueKey, chunks: Sequence[ChunkT], behind: int = 0) -> None:
        """Note that a waiting job will use the chunks of a path. If the job is known already, this replaces it.

        Args:
            key: The job's place in the queue, smallest first. Keys are unique and all of the same length.
            behind: How many of the first chunks the job reads in layers without a window only.
        """
        if job in self.jobs:
            self.unwant(job)
        self.jobs.add(job, key, chunks, behind)

    def unwant(self, job: int) -> None:
        """Note that a job does not wait any more. A job that is not known is ignored."""
        if job in self.jobs:
            for chunk in self.jobs.remove(job):
                if not chunk.is_forgotten:
                    self.copies.offer(chunk)
                    if chunk.peer != NO_PEER and not chunk.wants:
                        self._released.append(chunk)

    def claim(self, chunk: ChunkT) -> bool:
        """Claim a chunk for a preempted sequence: from when it has lost its block, it stays in host memory.

        Returns:
            False if more chunks would be claimed than host memory has slots.
        """
        if not chunk.claims:
            if self.claimed_count >= self.config.host_slots:
                return False
            self.claimed_count += 1
            self.copies.unsaved_claims += chunk.host == NO_SLOT
        chunk.claims += 1
        return True

    def unclaim(self, chunk: ChunkT) -> None:
        """Undo one `claim` of a chunk. The claims of a forgotten chunk are undone already."""
        if not chunk.claims:
            return
        chunk.claims -= 1
        if not chunk.claims:
            self.claimed_count -= 1
            self.copies.unsaved_claims -= chunk.host == NO_SLOT
            self.copies.offer(chunk)

    def pin(self, chunks: Sequence[ChunkT]) -> bool:
        """Keep the chunks of a path, from its beginning on, in the system.

        Returns:
            False if the quota would be exceeded; then nothing is pinned.
        """
        fresh = sum(not chunk.pins for chunk in chunks)
        if self.pinned_count + fresh > self.config.pins_max:
            return False
        self.pinned_count += fresh
        for chunk in chunks:
            chunk.pins += 1
        return True

    def unpin(self, chunks: Sequence[ChunkT]) -> None:
        """Undo one `pin` of these chunks. The pins of forgotten chunks are undone already."""
        for chunk in chunks:
            if chunk.pins:
                chunk.pins -= 1
                if not chunk.pins:
                    self.pinned_count -= 1
                    self.copies.offer(chunk)

    def keep(self, path: Sequence[ChunkT], until: float) -> None:
        """Give up the copies of a path at `until` (infinity: never), unless another `keep` names a later time."""
        for chunk in path:
            if until > chunk.expires:
                chunk.expires = until
                if until < math.inf and chunk not in self.copies.expiring:
                    self.copies.expiring.push(chunk)

    def expire(self, now: float) -> list[ChunkT]:
        """Give up the copies of chunks whose time is over, leaf first. They count as evicted.

        A chunk stays while it, or a chunk below it, is claimed, pinned, wanted or being moved.

        Returns:
            All chunks whose time is over, also those that had copies on the device only.
        """
        expired: list[ChunkT] = []
        expiring = self.copies.expiring
        while (chunk := expiring.first()) is not None and chunk.expires <= now:
            expiring.discard(chunk)
            if chunk.wants or not may_leave(chunk):
                continue  # offered again when the reason ends
            chunk.expires = 0.0
            if chunk.host != NO_SLOT:
                self.mover.drop_host(chunk)
            if chunk.disk != NO_SLOT:
                self.copies.evict_disk(chunk)
            if chunk.remote:
                self.copies.evict_remote(chunk)
            self.copies.drop_peer(chunk)
            expired.append(chunk)
        return expired

    # Background.

    def moves(self, now: float) -> list[Move[ChunkT]]:
        """Return new moves. They may use slots of all plans made so far, so send those plans first."""
        self.next_use.tick(now)
        self.mover.ahead.add(self.next_use.take_nearing())
        self.copies.trim_remote(self.config.remote_known)
        for chunk in [chunk for chunk in self._released if not chunk.wants]:
            self.copies.drop_peer(chunk)
        self._released.clear()
        return self.mover.orders(now)

    def done(
        self, move_id: int, status: MoveStatus, now: float, elapsed_us: float = 0.0, detail: str = ""
    ) -> ChunkT | None:
        """Apply the result of a move; `status` is the worst of all ranks' outcomes.

        Returns:
            The moved chunk; None if it is forgotten.

        Raises:
            KeyError: No such move is in flight.
        """
        chunk = self.mover.in_flight[move_id].chunk
        self.mover.ended(move_id, status, now, elapsed_us, detail)
        return None if chunk.is_forgotten else chunk

    def forget(self, chunk: ChunkT) -> None:
        """Forget a chunk that its owner removes. Its slots are freed at once, or when the moves that use them end.

        Call it before the chunk is taken from its parent, and for the deepest chunks first.
        """
        assert not chunk.stored_below, "chunks below a chunk are removed first"
        self.claimed_count -= chunk.claims > 0
        self.pinned_count -= chunk.pins > 0
        self.jobs.forget(chunk)
        self.next_use.forget(chunk)
        self.mover.forget(chunk)
        self.copies.forget(chunk)

    def moved(self, chunk: ChunkT, before: ChunkT) -> None:
        """Note that the owner gave a chunk, with all chunks below it, another parent than `before`."""
        self.copies.moved(chunk, before)

    def lost(self) -> list[ChunkT]:
        """Return the chunks that lost their last copy since the last call and have none now, in that order.

        No stored chunk is below them, unless a tier could not give back what it held.
        """
        lost = dict.fromkeys(self.copies.changes.lost)
        self.copies.changes.lost.clear()
        return [chunk for chunk in lost if not (chunk.is_stored or chunk.is_forgotten)]

    def take_unheld(self) -> set[ChunkT]:
        """Return the chunks that only a peer was said to have, and that were forgotten since the last call."""
        unheld = self.copies.changes.unheld
        self.copies.changes.unheld = set() if unheld else unheld
        return unheld

    def index_events(self) -> list[IndexEvent[ChunkT]]:
        """Return what changed on disk since the last call, in order, without arrivals of forgotten chunks."""
        events, self.copies.changes.events = self.copies.changes.events, []
        return [event for event in events if event.chunk is None or not event.chunk.is_forgotten]

    def restore(self, chunk: ChunkT, slot: SlotId, generation: int, last_use: float) -> bool:
        """Enter a chunk that an earlier run left on disk. The order of calls does not matter.

        Returns:
            False if there is no such slot, or if it is taken.
        """
        chunk.last_use = max(chunk.last_use, last_use)
        chunk.turns = chunk.turns or RESTORED
        return self.copies.restore_disk(chunk, slot, generation)

    def unwritten(self) -> set[ChunkName]:
        """Return the names of the chunks on disk that the remote tier lacks, or may lack: they are queued for it,
        owed to it, or being written there."""
        if TierKind.REMOTE not in self.health:
            return set()
        behind, moves = self.mover.behind, self.mover.in_flight.values()
        writing = (move.chunk for move in moves if move.is_write and move.tier is TierKind.REMOTE)
        lacking = (*behind.queues[TierKind.REMOTE], *behind.owed[TierKind.REMOTE], *writing)
        return {chunk.name for chunk in lacking if chunk.disk_ready and not chunk.remote}

    def owe(self, chunk: ChunkT) -> None:
        """Note that the remote tier lacks a chunk, which is written there once it is read into host memory."""
        if TierKind.REMOTE in self.health:
            self.mover.behind.owed[TierKind.REMOTE].add(chunk)

    def add_remote(self, chunk: ChunkT) -> None:
        """Note that a probe found a chunk in the remote tier."""
        if TierKind.REMOTE in self.health and not chunk.remote:
            self.copies.remote_arrived(chunk)
            self.jobs.note(chunk)

    def add_peer(self, chunk: ChunkT, peer: Peer) -> None:
        """Note that a peer is said to have a chunk. Call `want` for the chunk before the next moves.

        Nothing is noted if the chunk is near or coming, or costs no more elsewhere, or if the peer is paused.
        """
        is_near = chunk.on_device or chunk.host != NO_SLOT or chunk.disk_ready
        if is_near or chunk.peer == peer.number or peer.health.is_paused:
            return
        known = self.source_of(chunk)
        if known is not None:
            health = self.mover.health_of(known)
            if not health.is_paused and health.read_us <= peer.health.read_us:
                return
        self.copies.change_peer(chunk, peer.number)
        self.jobs.note(chunk)
        if not chunk.wants:
            self._released.append(chunk)

    def placed(self, chunk: ChunkT) -> None:
        """Note that a chunk got a block: it is computed or loaded, so it is not pulled any more."""
        self.copies.drop_peer(chunk)

    # What to expect.

    def is_coming(self, chunk: ChunkT) -> bool:
        """Return whether a chunk is being read into host memory, or is queued for that with nothing in the way."""
        if chunk.host != NO_SLOT:
            return not chunk.host_ready
        source = self.jobs.source(chunk)
        if source is None or self.mover.health_of(source).is_paused or self.mover.is_starved:
            return False
        if not (self.config.prefetches or self.jobs.is_next(chunk)):
            return False
        return self.jobs.is_lacking(chunk)

    def predicted_us(self, chunks: Sequence[ChunkT]) -> float:
        """Return the time until all of `chunks` would be on the device or in host memory; infinite if never.

        The reads in flight come first.
        """
        missing: dict[Source, int] = {}
        for chunk in chunks:
            source = self.source_of(chunk)
            if source is None:
                return math.inf
            if source.tier > TierKind.HOST:
                missing[source] = missing.get(source, 0) + (chunk.host == NO_SLOT)
        slowest = 0.0
        for source, reads in missing.items():
            health = self.mover.health_of(source)
            if reads and health.is_paused:
                return math.inf
            if reads or health.reading:
                slowest = max(slowest, health.predicted_us(reads))
        return slowest

    def doubt_costs(self) -> None:
        """Lower the estimates of read costs a little. Call it when reads are not ordered because they seem slow:
        no read would correct a wrong estimate then."""
        for health in self.health.values():
            health.doubt()
        self.peers.doubt()

    def stats(self) -> dict[TierKind, TierStats]:
        """Return the state of each tier that exists."""
        found = {}
        if self.config.host_slots:
            host = self.copies.host
            found[TierKind.HOST] = TierStats(host.capacity, host.used_count, self.totals[TierKind.HOST])
        for tier, health in self.health.items():
            disk = self.copies.disk
            size = (disk.capacity, disk.used_count) if tier is TierKind.DISK else (0, len(self.copies.distant))
            found[tier] = TierStats(*size, health.totals, health.read_us, health.problem)
        if self.config.peers:
            known = sum(len(chunks) for chunks in self.copies.at_peers.values())
            totals = self.totals[TierKind.PEER]
            found[TierKind.PEER] = TierStats(0, known, totals, self.peers.read_us, self.peers.problem)
        return found

    @property
    def shares(self) -> Shares:
        """The tenants' shares of the tiers, the device included."""
        return self.copies.shares

    @property
    def changed(self) -> ChangeLog[ChunkT]:
        """Chunks that may be in other tiers than before. The owner notes changes on the device in it as well."""
        return self.copies.changes.log

    @property
    def highest_disk_generation(self) -> int:
        """The highest generation that a slot of the disk tier has had."""
        return self.copies.disk.highest_generation

    @property
    def has_unwritten(self) -> bool:
        """Whether write-behind has a chunk to write, and a tier that can take it."""
        return self.mover.has_unwritten

    def hurry_writes(self) -> None:
        """Have chunks written to the tiers below host memory without waiting for a pause."""
        self.mover.behind.is_hurried = True

    def can_demote(self) -> bool:
        """Return whether some tier below host memory works."""
        return self.mover.can_demote()

    def stored(self) -> Iterator[ChunkT]:
        """Return all chunks that have a slot in host memory or on disk."""
        seen = dict.fromkeys(self.copies.host.owners.values())
        seen.update(dict.fromkeys(self.copies.disk.owners.values()))
        return iter(seen)

    def check(self) -> None:
        """Check all invariants. It visits every chunk, so it is slow.

        Raises:
            DirectoryIntegrityError: An invariant is broken.
        """
        check_directory(self.copies, self.jobs, self.mover, self.claimed_count)
        check_peers(self.copies, self.peers, self.mover, self._released)
