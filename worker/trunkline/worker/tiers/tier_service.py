"""The tiers below a rank's host pool, and the moves between it and them (CachedAttention §3.3).

      main thread    orders ────────────► queue of the tier (disk, remote)
      its threads    wait for the host slot's copies ──► read or write ──► outcome
      outbox thread  outcomes ──► MovesDone, Probed

The controller decides which chunks move; this service carries the moves out. A tier that fails is reported, move
by move, and never ends the rank: only a move of a host slot that does not exist does, as a plan that does not fit.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from trunkline.controller.messages import MoveOutcome, Probed
from trunkline.kvstore.chunks import NAME_BYTES, ChunkName, SlotId
from trunkline.kvstore.tier import SharedTier, SlotKey, Tier, TierKind
from trunkline.worker.config import WorkerConfig
from trunkline.worker.errors import PlanError, WorkerError
from trunkline.worker.messages import ForgetChunks, Probe, TierMove, TierMoves
from trunkline.worker.tiers.copier import Copier, Ticket
from trunkline.worker.tiers.disk_tier import DiskTier, RecordKeeper

_DONE: Final = 0
_MISS: Final = 1
_FAILED: Final = 2

_CLOSE_WITHIN_S: Final = 1.0

log = structlog.get_logger()

Report = Callable[[MoveOutcome | Probed], None]


class _Served(NamedTuple):
    tier: Tier
    queue: TierQueue


class TierService:
    """Moves chunks between the host pool and the tiers below it. `move` and `probe` never wait."""

    def __init__(self, config: WorkerConfig, copier: Copier | None, report: Report) -> None:
        """Open the tiers that the configuration asks for.

        Args:
            copier: copier of the host pool; None: the rank has no host pool, so no tiers either.
            report: called from any thread with the outcome of each move and the answer to each probe.

        Raises:
            WorkerConfigError: the remote tier can never be used. If the disk tier cannot be opened, nothing is
                raised: `problem` says why, and the rank goes on without the tier.
        """
        self.problem = ""
        """Why a tier of the configuration could not be opened; "" if all were."""
        self._rank, self._epoch = config.rank, config.epoch
        self._copier = copier
        self._report = report
        self._served: dict[int, _Served] = {}
        self._shared: SharedTier | None = None
        if copier is None:
            return
        keeper = RecordKeeper(bytes.fromhex(config.tier_fingerprint), config.rank, config.tp)
        slot_bytes = copier.host.slot_bytes
        if config.disk_bytes:
            try:
                disk = DiskTier(Path(config.disk_path), config.disk_bytes, slot_bytes, keeper)
            except OSError as error:
                self.problem = f"no disk tier: {error}"
                log.warning("no disk tier", reason=str(error))
            else:
                self._serve(disk, "disk", config.io_threads)
        if config.remote_url:
            # Only a rank that has such a tier pays for the client.
            from trunkline.worker.tiers.remote_tier import open_remote_tier  # noqa: PLC0415

            self._shared = open_remote_tier(config.remote_url, slot_bytes, keeper, config.remote_ttl_s)
            self._serve(self._shared, "remote", config.io_threads)

    @property
    def disk_slots(self) -> int:
        """Number of blocks that the disk tier holds."""
        served = self._served.get(TierKind.DISK)
        return served.tier.capacity_slots if served else 0

    @property
    def has_remote(self) -> bool:
        return self._shared is not None

    def move(self, message: TierMoves) -> None:
        """Queue moves. Each waits for the copies from and to its host slot that the plans so far have ordered.

        Raises:
            PlanError: a host slot that does not exist.
        """
        if self._copier is None:
            raise PlanError("moves of host slots, but this rank has no host pool")
        for move in message.moves:
            ticket = self._copier.ticket(move.host_slot)
            served = self._served.get(move.tier)
            if served is None:
                self._report(MoveOutcome(move.id, _FAILED, detail="this rank has no such tier"))
                continue
            served.queue.put(self._task(served.tier, move, ticket), is_write=move.is_write)

    def probe(self, message: Probe) -> None:
        """Queue a question to the remote tier: which chunks does it have?"""
        names = _names(message.names)
        served, shared = self._served.get(TierKind.REMOTE), self._shared
        if served is None or shared is None:
            self._report(Probed(self._rank, self._epoch, message.id, -1, "this rank has no remote tier"))
            return

        def ask() -> None:
            present, detail = -1, ""
            try:
                present = shared.present(names)
            except OSError as error:
                detail = str(error)
            self._report(Probed(self._rank, self._epoch, message.id, present, detail))

        served.queue.put(ask, is_write=False)

    def forget(self, message: ForgetChunks) -> None:
        """Queue the deletion of chunks from the remote tier, behind the writes so far."""
        served, shared = self._served.get(TierKind.REMOTE), self._shared
        if served is None or shared is None:
            return
        names = _names(message.names)

        def delete() -> None:
            try:
                shared.delete(names)
            except OSError as error:
                log.warning("deleted chunks stay in the remote tier", chunks=len(names), reason=str(error))

        served.queue.put(delete, is_write=True)

    def close(self) -> None:
        """Begin no more moves, and close the tiers."""
        for served in self._served.values():
            served.queue.close(_CLOSE_WITHIN_S)
            served.tier.close()
        self._served.clear()

    def _serve(self, tier: Tier, name: str, threads: int) -> None:
        self._served[tier.kind] = _Served(tier, TierQueue(name, threads))

    def _task(self, tier: Tier, move: TierMove, ticket: Ticket) -> Callable[[], None]:
        copier = self._copier
        assert copier is not None

        def carry_out() -> None:
            started = time.perf_counter_ns()
            status, detail = _FAILED, ""
            try:
                copier.wait_ticket(ticket)
                started = time.perf_counter_ns()
                status, detail = _carry_out(tier, move, copier)
            except (OSError, WorkerError) as error:
                detail = str(error)
            except Exception as error:  # whatever a tier does, the move is answered and the rank goes on
                log.error("a move failed", error=str(error), exc_info=True)
                detail = f"{type(error).__name__}: {error}"
            elapsed_us = (time.perf_counter_ns() - started) // 1000
            self._report(MoveOutcome(move.id, status, elapsed_us, detail))

        return carry_out


def _names(packed: bytes) -> list[ChunkName]:
    return [ChunkName(packed[start : start + NAME_BYTES]) for start in range(0, len(packed), NAME_BYTES)]


def _carry_out(tier: Tier, move: TierMove, copier: Copier) -> tuple[int, str]:
    """Carry out a move; return its status and detail.

    Raises:
        OSError: the tier failed.
    """
    host, slot = copier.host, move.host_slot
    key = SlotKey(SlotId(move.slot), ChunkName(move.name), move.generation)
    if move.is_write:
        held = host.generation(slot)
        if held != move.host_generation:
            return _MISS, f"host slot {slot} holds generation {held}, not {move.host_generation}"
        tier.write(key, host.view(slot))
        return _DONE, ""
    host.discard(SlotId(slot))
    if not tier.read(key, host.view(slot)):
        return _MISS, ""
    host.set_generation(slot, move.host_generation)
    return _DONE, ""


Task = Callable[[], None]


class TierQueue:
    """A queue of tasks for a few threads. Reads are begun in the order in which they were added, and so are
    writes."""

    def __init__(self, name: str, threads: int) -> None:
        """
        Args:
            threads: number of threads. If there are several, they never all write at once, so that a read need not
                wait for a write to end.
        """
        self._reads: deque[Task] = deque()
        self._writes: deque[Task] = deque()
        self._writers = 0
        self._writers_max = max(1, threads - 1)
        self._changed = threading.Condition()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{index}", daemon=True) for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, task: Task, *, is_write: bool) -> None:
        """Add a task. It must not raise."""
        with self._changed:
            (self._writes if is_write else self._reads).append(task)
            self._changed.notify()

    def close(self, within_s: float) -> None:
        """Begin no more tasks; wait a moment for those that have begun."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(within_s / len(self._threads))

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not (self._is_closed or self._reads or self._may_write()):
                    self._changed.wait()
                if self._is_closed:
                    return
                is_write = not self._reads
                task = self._writes.popleft() if is_write else self._reads.popleft()
                self._writers += is_write
            try:
                task()
            except Exception as error:  # the thread serves others after this one
                log.error("a tier's task failed", error=str(error), exc_info=True)
            if is_write:
                with self._changed:
                    self._writers -= 1
                    self._changed.notify()

    def _may_write(self) -> bool:
        return bool(self._writes) and self._writers < self._writers_max
