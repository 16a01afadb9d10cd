"""The directory: where every chunk is below the device, what to fetch, what to evict (CachedAttention §3.3). Pure.

One per group, in the controller; workers only obey. Time and step numbers are arguments.

      device ──save──► host ──write──► disk       save, load: part of step plans, never fail, logically at once
             ◄──load──      ◄──read───            write, read: `Move`s beside the steps, each answered by all ranks
                            ──write──► remote
                            ◄──read───

A chunk may be in several tiers: it is immutable. The directory keeps, over all chunks,

- where the copies are and which go first (`trunkline.kvstore.copies`),
- which chunks the waiting jobs will use (`trunkline.kvstore.lookahead`),
- the moves in flight (`trunkline.kvstore.tier_moves`) and how the tiers do (`trunkline.kvstore.tier_costs`).

Invariants (`check`): a slot has one owner; what is claimed stays in host memory, what is pinned in the system,
what a move uses where it is; a chunk leaves the system only after all below it (unless a tier lost it); a copy is
given up only when another is verified, or when its chunk leaves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic

from trunkline.kvstore.chunks import ChunkT, QueueKey, TieredChunk
from trunkline.kvstore.copies import Copies, CopyRules, IndexEvent, may_leave
from trunkline.kvstore.directory_check import DirectoryIntegrityError, check_directory
from trunkline.kvstore.directory_config import DirectoryConfig
from trunkline.kvstore.eviction import EvictionPolicy, victim_key
from trunkline.kvstore.extents import NO_SLOT, SlotId
from trunkline.kvstore.lazy_heap import HeapVerdict
from trunkline.kvstore.lookahead import WaitingJobs
from trunkline.kvstore.tier import TierKind
from trunkline.kvstore.tier_costs import TierHealth
from trunkline.kvstore.tier_moves import Move, MoveStatus, TierMover

__all__ = [
    "Directory",
    "DirectoryConfig",
    "IndexEvent",
    "DirectoryIntegrityError",
    "TieredChunk",
    "Move",
    "MoveStatus",
    "EvictionPolicy",
    "TierStats",
]

READ_US: dict[TierKind, float] = {TierKind.DISK: 500.0, TierKind.REMOTE: 1000.0}
"""What a read is taken to cost until one was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """A tier's size and totals since the start."""

    slots: int
    """0: not known (remote)."""
    used: int
    writes: int
    reads: int
    evictions: int
    failures: int
    hit_tokens: int
    problem: str = ""


class Directory(Generic[ChunkT]):
    """Bookkeeping of all tiers below the device."""

    def __init__(self, config: DirectoryConfig) -> None:
        """
        Raises:
            ValueError: the configuration makes no sense.
        """
        config.validate()
        self.config = config
        limits = config.reads_in_flight, config.writes_in_flight
        tiers = [TierKind.DISK] * (config.disk_slots > 0) + [TierKind.REMOTE] * config.remote
        self.health = {tier: TierHealth(READ_US[tier], *limits) for tier in tiers}
        self.copies: Copies[ChunkT] = Copies(
            config.host_slots,
            config.disk_slots,
            config.first_generation,
            victim_key(config.policy),
            CopyRules(config.is_exclusive, may_sink=bool(tiers)),
        )
        self.jobs: WaitingJobs[ChunkT] = WaitingJobs()
        self.mover: TierMover[ChunkT] = TierMover(self.copies, self.jobs, self.health, config)
        self.saves = 0
        """Chunks saved to host memory from the device since the start."""
        self.loads = 0
        """Chunks loaded from there."""
        self.claimed_count = 0
        self.pinned_count = 0
        self.hit_tokens = dict.fromkeys(TierKind, 0)
        """Tokens of used chunks by the fastest tier in which they were found."""

    # Device side: synchronous with step plans.

    def save(self, chunk: ChunkT, step: int, *, forced: bool = False) -> tuple[SlotId, int] | None:
        """The plan of `step` is to save a chunk that has no host copy; the copy is ready for every later use.

        If no slot is free, a host copy goes that loses nothing; if there is none, and no tier below takes
        copies, the one worth least, if that is less than this chunk is worth.

        Args:
            forced: the chunk loses its block and is claimed: rather give up the only copy of another that is not.

        Returns:
            (host slot, generation), or None: no room, or a copy is already being fetched.
        """
        assert not chunk.host_ready, "it has a copy"
        if chunk.host != NO_SLOT:
            return None
        slot = self.copies.reserve_host(chunk, step)
        if slot is None:
            victim = self._victim_for(chunk, step, forced)
            if victim is None:
                return None
            self.mover.drop_host(victim)
            slot = self.copies.reserve_host(chunk, step)
            if slot is None:
                return None
        self.saves += 1
        self.copies.host_arrived(chunk)
        self.mover.saved(chunk)
        return slot, self.copies.host.generation(slot)

    def _victim_for(self, chunk: ChunkT, step: int, forced: bool) -> ChunkT | None:
        """The host copy that goes for a save in the plan of `step`."""
        copies = self.copies
        outranks = forced or self.config.policy is EvictionPolicy.FIFO  # by arrival a newcomer is the last to go
        worth = copies.key(chunk)
        above = chunk.parent
        # Without a copy of the chunk above, whose block may go in this very plan, nobody would find this one.
        only_above = above if above is not None and not (above.disk_ready or above.remote) else None

        def judge_clean(victim: ChunkT) -> HeapVerdict:
            if victim is only_above:
                return HeapVerdict.SKIP
            spared = copies.host.is_busy(victim.host, step) or (self.jobs.is_next(victim) and not forced)
            return HeapVerdict.SKIP if spared else HeapVerdict.TAKE

        def judge_dirty(victim: ChunkT) -> HeapVerdict:
            if not outranks and copies.key(victim) >= worth:
                return HeapVerdict.STOP
            spared = victim is only_above or copies.host.is_busy(victim.host, step) or not may_leave(victim)
            return HeapVerdict.SKIP if spared else HeapVerdict.TAKE

        victim = copies.clean_victim(judge_clean)
        if victim is None and (forced or not self.mover.can_sink()):
            victim = copies.dirty_victim(judge_dirty)
        return victim

    def load(self, chunk: ChunkT, step: int) -> tuple[SlotId, int]:
        """The plan of `step` reads the host copy: (host slot, generation)."""
        assert chunk.host_ready, "there is nothing to load"
        self.copies.host.touch(chunk.host, step)
        self.loads += 1
        self.copies.offer(chunk)
        return chunk.host, self.copies.host.generation(chunk.host)

    def left_device(self, chunk: ChunkT) -> None:
        """Its block was given up: if a waiting job wants it, its copy here may have to be fetched."""
        self.jobs.note(chunk)
        self.copies.offer(chunk)

    # Use and wishes.

    def used(self, path: Sequence[ChunkT], now: float, *, hit: bool = True) -> None:
        """A request uses the chunks of a path, from its beginning on.

        Args:
            hit: they were found, not made: count by the fastest tier that has them, so call it before they are
                loaded.
        """
        for chunk in path:
            chunk.last_use = max(chunk.last_use, now)
            if hit:
                tier = self.tier_of(chunk)
                if tier is not None:
                    self.hit_tokens[tier] += chunk.token_count

    @staticmethod
    def tier_of(chunk: TieredChunk) -> TierKind | None:
        """The fastest tier that has the chunk ready; None: no tier has."""
        if chunk.on_device:
            return TierKind.DEVICE
        if chunk.host_ready:
            return TierKind.HOST
        if chunk.disk_ready:
            return TierKind.DISK
        return TierKind.REMOTE if chunk.remote else None

    def want(self, job: int, key: QueueKey, chunks: Sequence[ChunkT]) -> None:
        """A waiting job will use these chunks (those of a path, in its order). A job known already is replaced.

        Args:
            key: its place in the queue, smallest first; unique, and as long as all others.
        """
        if job in self.jobs:
            self.unwant(job)
        self.jobs.add(job, key, chunks)

    def unwant(self, job: int) -> None:
        """The job waits no more. An unknown one is fine."""
        if job in self.jobs:
            for chunk in self.jobs.remove(job):
                if not chunk.is_forgotten:
                    self.copies.offer(chunk)

    def claim(self, chunk: ChunkT) -> bool:
        """A preempted sequence wants to find the chunk in host memory once it has lost its block; False: more
        chunks would be claimed than host memory has slots."""
        if not chunk.claims:
            if self.claimed_count >= self.config.host_slots:
                return False
            self.claimed_count += 1
            self.copies.unsaved_claims += chunk.host == NO_SLOT
        chunk.claims += 1
        return True

    def unclaim(self, chunk: ChunkT) -> None:
        """Undo one `claim`; of a forgotten chunk it is undone already."""
        if not chunk.claims:
            return
        chunk.claims -= 1
        if not chunk.claims:
            self.claimed_count -= 1
            self.copies.unsaved_claims -= chunk.host == NO_SLOT
            self.copies.offer(chunk)

    def pin(self, chunks: Sequence[ChunkT]) -> bool:
        """Keep chunks (a path, from its beginning) in the system; False: over the quota, and nothing is pinned."""
        fresh = sum(not chunk.pins for chunk in chunks)
        if self.pinned_count + fresh > self.config.pins_max:
            return False
        self.pinned_count += fresh
        for chunk in chunks:
            chunk.pins += 1
        return True

    def unpin(self, chunks: Sequence[ChunkT]) -> None:
        """Undo one `pin`; forgotten chunks are undone already."""
        for chunk in chunks:
            if chunk.pins:
                chunk.pins -= 1
                if not chunk.pins:
                    self.pinned_count -= 1
                    self.copies.offer(chunk)

    def keep(self, path: Sequence[ChunkT], until: float) -> None:
        """The copies of a path are given up at `until` (infinity: never) unless another `keep` says later."""
        for chunk in path:
            if until > chunk.expires:
                chunk.expires = until
                if until < math.inf and chunk not in self.copies.expiring:
                    self.copies.expiring.push(chunk)

    def expire(self, now: float) -> list[ChunkT]:
        """Give up the copies of chunks whose time is over, leaf first; they count as evicted.

        Chunks that are claimed, pinned, wanted or being moved wait until they are not. So does what is above them.

        Returns:
            all whose time is over, those that had copies on the device only, too.
        """
        expired: list[ChunkT] = []
        expiring = self.copies.expiring
        while (chunk := expiring.first()) is not None and chunk.expires <= now:
            expiring.discard(chunk)
            if chunk.wants or not may_leave(chunk):
                continue  # offered again when the reason ends
            chunk.expires = 0.0
            self._drop_copies(chunk)
            expired.append(chunk)
        return expired

    def _drop_copies(self, chunk: ChunkT) -> None:
        if chunk.host != NO_SLOT:
            self.mover.drop_host(chunk)
        if chunk.disk != NO_SLOT:
            self.copies.evictions[TierKind.DISK] += 1
            self.copies.drop_disk(chunk)
        if chunk.remote:
            self.copies.evictions[TierKind.REMOTE] += 1
            self.copies.drop_remote(chunk)

    # Background.

    def moves(self, now: float) -> list[Move[ChunkT]]:
        """New orders. They may use slots of all plans made so far, so these are to be sent before them."""
        self.copies.trim_remote(self.config.remote_known)
        return self.mover.orders(now)

    def done(
        self, move_id: int, status: MoveStatus, now: float, elapsed_us: float = 0.0, detail: str = ""
    ) -> ChunkT | None:
        """A move ended: the worst of all ranks' outcomes.

        Returns:
            its chunk, unless that is forgotten.

        Raises:
            KeyError: no such move is in flight.
        """
        chunk = self.mover.in_flight[move_id].chunk
        self.mover.ended(move_id, status, now, elapsed_us, detail)
        return None if chunk.is_forgotten else chunk

    def forget(self, chunk: ChunkT) -> None:
        """The owner removes a chunk: its slots are freed, those that moves use when these end.

        Call it before the chunk is taken from its parent, and the deepest first.
        """
        assert not chunk.stored_below, "what is below a chunk is removed first"
        self.claimed_count -= chunk.claims > 0
        self.pinned_count -= chunk.pins > 0
        self.jobs.forget(chunk)
        self.mover.forget(chunk)
        self.copies.forget(chunk)

    def moved(self, chunk: ChunkT, before: ChunkT) -> None:
        """The owner has hung a chunk, with all that is below it, from another parent than `before`."""
        self.copies.moved(chunk, before)

    def lost(self) -> list[ChunkT]:
        """Chunks that lost their last copy since the last call and have none now, in that order.

        Nothing stored is below them, unless a tier could not give back what it held.
        """
        lost = dict.fromkeys(self.copies.changes.lost)
        self.copies.changes.lost.clear()
        return [chunk for chunk in lost if not (chunk.is_stored or chunk.is_forgotten)]

    def index_events(self) -> list[IndexEvent[ChunkT]]:
        """What changed on disk since the last call, in order; forgotten chunks are not said to be stored."""
        events, self.copies.changes.events = self.copies.changes.events, []
        return [event for event in events if event.chunk is None or not event.chunk.is_forgotten]

    def restore(self, chunk: ChunkT, slot: SlotId, generation: int, last_use: float) -> bool:
        """An earlier run left this chunk on disk; in any order. False: there is no such slot, or it is taken."""
        chunk.last_use = max(chunk.last_use, last_use)
        return self.copies.restore_disk(chunk, slot, generation)

    def add_remote(self, chunk: ChunkT) -> None:
        """A probe found it in the remote tier."""
        if TierKind.REMOTE in self.health and not chunk.remote:
            self.copies.remote_arrived(chunk)
            self.jobs.note(chunk)

    def workers_lost(self) -> None:
        """Host memory is gone with the workers, and nobody will answer the moves in flight."""
        self.mover.abandon()

    # What to expect.

    def is_coming(self, chunk: ChunkT) -> bool:
        """Whether it is being read into host memory, or stands in line for it and nothing is in the way."""
        if chunk.host != NO_SLOT:
            return not chunk.host_ready
        source = self.jobs.source(chunk)
        if source is None or self.health[source].is_paused or self.mover.is_starved:
            return False
        if not (self.config.prefetches or self.jobs.is_next(chunk)):
            return False
        return self.jobs.is_lacking(chunk)

    def predicted_us(self, chunks: Sequence[ChunkT]) -> float:
        """Time until those of `chunks` that are neither on the device nor in host memory would be in host memory;
        infinite if they cannot come. The reads in flight go first."""
        missing = dict.fromkeys(self.health, 0)
        is_coming = False
        for chunk in chunks:
            tier = self.tier_of(chunk)
            if tier is None:
                return math.inf
            if tier in missing:
                missing[tier] += chunk.host == NO_SLOT
                is_coming = is_coming or chunk.host != NO_SLOT
        slowest = 0.0
        for tier, health in self.health.items():
            if missing[tier] and health.is_paused:
                return math.inf
            if missing[tier] or (is_coming and health.reading):
                slowest = max(slowest, health.predicted_us(missing[tier]))
        return slowest

    def doubt_costs(self) -> None:
        """Reads were not ordered because they seemed too slow: believe a little less in that."""
        for tier, health in self.health.items():
            health.doubt(READ_US[tier])

    def stats(self) -> dict[TierKind, TierStats]:
        """By tier that exists."""
        found = {}
        if self.config.host_slots:
            fetched = sum(health.reads for health in self.health.values())
            found[TierKind.HOST] = self._stats(TierKind.HOST, self.saves + fetched, self.loads, 0, "")
        for tier, health in self.health.items():
            found[tier] = self._stats(tier, health.writes, health.reads, health.failures, health.problem)
        return found

    def _stats(self, tier: TierKind, writes: int, reads: int, failures: int, problem: str) -> TierStats:
        pool = {TierKind.HOST: self.copies.host, TierKind.DISK: self.copies.disk}.get(tier)
        return TierStats(
            slots=pool.capacity if pool else 0,
            used=pool.used_count if pool else len(self.copies.distant),
            writes=writes,
            reads=reads,
            evictions=self.copies.evictions[tier],
            failures=failures,
            hit_tokens=self.hit_tokens[tier],
            problem=problem,
        )

    def stored(self) -> Iterator[ChunkT]:
        """All chunks with a slot in a local tier."""
        seen = dict.fromkeys(self.copies.host.owners.values())
        seen.update(dict.fromkeys(self.copies.disk.owners.values()))
        return iter(seen)

    def check(self) -> None:
        """Look at everything: slow.

        Raises:
            IntegrityError: an invariant is broken.
        """
        check_directory(self.copies, self.jobs, self.mover, self.claimed_count)
