"""The tiers below a rank's host pool, and the moves between it and them (CachedAttention §3.3).

      main thread    orders ────────────► queue of the tier (disk, remote), or link to the peer (`peer_tier`)
      its threads    wait for the host slot's copies ──► read or write ──► outcome
      outbox thread  outcomes ──► MovesDone, Probed

The controller decides which chunks move; this service carries the moves out. A tier that fails is reported, move
by move, and never ends the rank: only a move of a host slot that does not exist does, as a plan that does not fit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from trunkline.controller.reports import MoveOutcome, Probed
from trunkline.kvstore.chunks import NAME_BYTES, ChunkName, SlotId
from trunkline.kvstore.shards import HeadShard
from trunkline.kvstore.tier import SharedTier, SlotKey, Tier, TierKind
from trunkline.runtime.wire_keys import WireKeysError
from trunkline.worker.config import WorkerConfig
from trunkline.worker.errors import PlanError, WorkerError
from trunkline.worker.messages import ForgetChunks, Probe, TierMove, TierMoves, TierOrder
from trunkline.worker.tiers.copier import Copier
from trunkline.worker.tiers.disk_tier import DiskTier, RecordKeeper
from trunkline.worker.tiers.exporter import Exporter, own_address
from trunkline.worker.tiers.host_pool import HostPool
from trunkline.worker.tiers.peer_tier import PeerTier
from trunkline.worker.tiers.process_memory import let_family_read
from trunkline.worker.tiers.remote_tier import Part, RemoteTier, open_remote_tier
from trunkline.worker.tiers.tier_queue import QueuedMove, TierQueue

_DONE: Final = 0
_MISS: Final = 1
_FAILED: Final = 2

_CLOSE_WITHIN_S: Final = 1.0

log = structlog.get_logger()

Report = Callable[[list[MoveOutcome] | Probed], None]


class _Served(NamedTuple):
    tier: Tier
    queue: TierQueue


class TierService:
    """Moves chunks between the host pool and the tiers below it. `move` and `probe` never wait."""

    def __init__(
        self, config: WorkerConfig, copier: Copier | None, report: Report, shard: HeadShard | None = None
    ) -> None:
        """Open the tiers that the configuration asks for.

        Args:
            copier: copier of the host pool; None: the rank has no host pool, so no tiers either.
            report: called from any thread with outcomes of moves, each once, and the answer to each probe.
            shard: the KV heads of this rank; None: it exchanges none with peers.

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
        self._shared: RemoteTier | None = None
        self._peers: PeerTier | None = None
        self._exporter: Exporter | None = None
        if copier is None:
            return
        if config.exchange_fingerprint and shard is not None:
            self._exchange(config, copier, shard)
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
            self._shared = open_remote_tier(config.remote_url, _part(config, copier, shard), config.remote_ttl_s)
            self._serve(self._shared, "remote", config.io_threads)

    def try_remote(self) -> None:
        """Have the remote tier tried out in the background, so that the log says at the start if it is of no
        use."""
        if self._shared is not None:
            threading.Thread(target=self._shared.try_out, name="trial", daemon=True).start()

    @property
    def disk_slots(self) -> int:
        """Number of blocks that the disk tier holds."""
        served = self._served.get(TierKind.DISK)
        return served.tier.capacity_slots if served else 0

    @property
    def has_remote(self) -> bool:
        return self._shared is not None

    @property
    def exports(self) -> str:
        """Endpoint at which peers ask for the chunks in host memory; "": they cannot."""
        return self._exporter.endpoint if self._exporter is not None else ""

    def take(self, order: TierOrder) -> None:
        """Carry out an order.

        Raises:
            PlanError: a move of a host slot that does not exist.
        """
        if isinstance(order, TierMoves):
            self.move(order)
        elif isinstance(order, Probe):
            self.probe(order)
        elif isinstance(order, ForgetChunks):
            self.forget(order)
        elif self._peers is not None:
            self._peers.at(order)

    def move(self, message: TierMoves) -> None:
        """Queue moves. Each waits for the copies from and to its host slot that the plans so far have ordered.

        Raises:
            PlanError: a host slot that does not exist.
        """
        if self._copier is None:
            raise PlanError("moves of host slots, but this rank has no host pool")
        pulls = []
        for move in message.moves:
            queued = QueuedMove(move, self._copier.ticket(move.host_slot))
            if move.tier == TierKind.PEER and self._peers is not None:
                pulls.append(queued)
                continue
            served = self._served.get(move.tier)
            if served is None:
                self._report([MoveOutcome(move.id, _FAILED, detail="this rank has no such tier")])
                continue
            task = queued if served.tier is self._shared else partial(self._carry_out, served.tier, [queued])
            served.queue.put(task, is_write=move.is_write)
        if self._peers is not None:
            self._peers.pull(pulls)

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
            except Exception as error:  # whatever a store does: requests wait for the answer
                log.error("a probe failed", error=str(error), exc_info=True)
                detail = f"{type(error).__name__}: {error}"
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
        """Begin no more moves, and close the tiers, except those that still carry a move out: the descriptor of a
        file that is closed under a thread may be another file's when the thread writes."""
        if self._exporter is not None:
            self._exporter.close()
        if self._peers is not None:
            self._peers.close()
        for served in self._served.values():
            if served.queue.close(_CLOSE_WITHIN_S):
                served.tier.close()
        self._served.clear()

    def _exchange(self, config: WorkerConfig, copier: Copier, shard: HeadShard) -> None:
        """Begin to exchange KV with peers."""
        fingerprint = bytes.fromhex(config.exchange_fingerprint)
        self._peers = PeerTier(copier, shard, fingerprint, config.wire_keys, self._report)
        if not config.export:
            return
        if config.parent_pid:
            let_family_read(config.parent_pid)
        try:
            self._exporter = Exporter(
                config.export, config.export_host or _host_of(config), copier, shard, fingerprint, config.wire_keys
            )
        except (OSError, WireKeysError) as error:
            self.problem = f"no KV for peers: {error}"
            log.warning("peers cannot pull KV from here", reason=str(error))

    def _serve(self, tier: Tier, name: str, threads: int) -> None:
        queue = TierQueue(name, threads, partial(self._carry_out, tier), tier.slot_bytes)
        self._served[tier.kind] = _Served(tier, queue)

    def _carry_out(self, tier: Tier, batch: Sequence[QueuedMove]) -> None:
        """Carry out moves that travel together, all writes or all reads, and report their outcomes."""
        copier = self._copier
        assert copier is not None
        started = time.perf_counter_ns()
        outcomes = [(_FAILED, "")] * len(batch)
        try:
            for queued in batch:
                copier.wait_ticket(queued.ticket)
            started = time.perf_counter_ns()
            carry_out = _write if batch[0].move.is_write else _read
            outcomes = carry_out(tier, [queued.move for queued in batch], copier.host)
        except (OSError, WorkerError) as error:
            outcomes = [(_FAILED, str(error))] * len(batch)
        except Exception as error:  # whatever a tier does, the moves are answered and the rank goes on
            log.error("a move failed", error=str(error), exc_info=True)
            outcomes = [(_FAILED, f"{type(error).__name__}: {error}")] * len(batch)
        elapsed_us = (time.perf_counter_ns() - started) // 1000
        ended = zip(batch, outcomes, strict=True)
        self._report(
            [MoveOutcome(queued.move.id, status, elapsed_us, detail) for queued, (status, detail) in ended]
        )


def _host_of(config: WorkerConfig) -> str:
    """Return where peers reach this rank, if it listens on all addresses of its host; else ""."""
    return own_address(config.plan_endpoint) if "://0.0.0.0:" in config.export else ""


def _names(packed: bytes) -> list[ChunkName]:
    return [ChunkName(packed[start : start + NAME_BYTES]) for start in range(0, len(packed), NAME_BYTES)]


def _part(config: WorkerConfig, copier: Copier, shard: HeadShard | None) -> Part:
    """Return which part of each chunk the rank has, in a tier that groups share."""
    host = copier.host
    if shard is not None and config.exchange_fingerprint:
        return Part(bytes.fromhex(config.exchange_fingerprint), shard, host.format)
    # Not known what other groups have in common with this one: only ranks of equal groups meet.
    alone = HeadShard(host.format.heads * config.tp, config.rank, config.tp)
    return Part(bytes.fromhex(config.tier_fingerprint), alone, host.format)


def _key(move: TierMove) -> SlotKey:
    return SlotKey(SlotId(move.slot), ChunkName(move.name), move.generation)


def _write(tier: Tier, moves: Sequence[TierMove], host: HostPool) -> list[tuple[int, str]]:
    """Write chunks into a tier; return status and detail of each.

    Raises:
        OSError: the tier failed.
    """
    outcomes, valid = [], []
    for move in moves:
        held = host.generation(move.host_slot)
        is_held = held == move.host_generation
        detail = f"host slot {move.host_slot} holds generation {held}, not {move.host_generation}"
        outcomes.append((_DONE, "") if is_held else (_MISS, detail))
        if is_held:
            valid.append(move)
    if isinstance(tier, SharedTier):
        tier.write_many([(_key(move), host.view(move.host_slot), move.kept_s) for move in valid])
    else:
        for move in valid:
            tier.write(_key(move), host.view(move.host_slot))
    return outcomes


def _read(tier: Tier, moves: Sequence[TierMove], host: HostPool) -> list[tuple[int, str]]:
    """Read chunks from a tier into host memory; return status and detail of each.

    Raises:
        OSError: the tier failed.
    """
    for move in moves:
        host.discard(SlotId(move.host_slot))
    if isinstance(tier, SharedTier):
        found = tier.read_many([(_key(move), host.view(move.host_slot)) for move in moves])
    else:
        found = [tier.read(_key(move), host.view(move.host_slot)) for move in moves]
    for move, is_found in zip(moves, found, strict=True):
        if is_found:
            host.set_generation(move.host_slot, move.host_generation, move.name)
    return [(_DONE if is_found else _MISS, "") for is_found in found]
