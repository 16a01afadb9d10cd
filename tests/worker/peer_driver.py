"""Ranks without a model that exchange KV: chunks of known numbers, saved under names, exported and pulled."""

from __future__ import annotations

import os
import queue
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from worker.tier_driver import DEADLINE_S

from trunkline.controller.reports import MoveOutcome, Probed
from trunkline.kernels.load import load_kernels
from trunkline.kernels.ops import KvPool
from trunkline.kvstore.chunks import NAME_BYTES, pack_int32
from trunkline.kvstore.shards import HeadShard
from trunkline.kvstore.tier import TierKind
from trunkline.worker.config import WorkerConfig
from trunkline.worker.messages import PeerAt, StepPlan, TierMove, TierMoves
from trunkline.worker.tiers.copier import Copier
from trunkline.worker.tiers.host_pool import HostPool
from trunkline.worker.tiers.tier_service import TierService

LAYERS, HEADS, CHUNK, DIM = 3, 4, 32, 64  # parts are larger than the messages about them
FINGERPRINT = b"k" * 16
SLOTS = 96


def name_of(chunk: int) -> bytes:
    """The name of a chunk."""
    return chunk.to_bytes(4, "little") * (NAME_BYTES // 4)


def numbers(chunk: int, shard: HeadShard = HeadShard(HEADS)) -> np.ndarray:  # noqa: B008
    """A rank's part of a chunk, float32 `[layers, 2, heads, chunk_size, head_dim]`."""
    size = (LAYERS, 2, HEADS, CHUNK, DIM)
    whole = np.random.default_rng(chunk).standard_normal(size).astype(np.float32)
    return np.ascontiguousarray(whole[:, :, shard.heads.start : shard.heads.stop])


class PeerRank:
    """One rank of a group: its host pool, its copier, its tiers."""

    def __init__(self, rank: int = 0, tp: int = 1, **config: Any) -> None:
        self.shard = HeadShard(HEADS, rank, tp)
        data = torch.zeros((8, LAYERS, 2, len(self.shard.heads), CHUNK, DIM))
        self.pool = KvPool.wrap(data)
        self.copier = Copier(HostPool(SLOTS, self.pool), data.device, 8, lambda: load_kernels("cpu", "cpu", 1))
        self._reports: queue.Queue[list[MoveOutcome] | Probed] = queue.Queue()
        settings: dict[str, Any] = {
            "exchange_fingerprint": FINGERPRINT.hex(),
            "model": "",
            "plan_endpoint": "ipc://p",
            "report_endpoint": "ipc://r",
            **config,
        }
        self.tiers = TierService(
            WorkerConfig(rank=rank, tp=tp, **settings), self.copier, self._reports.put, self.shard
        )
        self.step = 0
        self._moves = 0
        self._ended: dict[int, MoveOutcome] = {}

    def save(self, chunks: range | list[int], slots: range | list[int], generation: int = 1) -> None:
        """Compute chunks, and save them into slots under their names; returns when they are ordered."""
        for start in range(0, len(chunks), 8):
            part, into = chunks[start : start + 8], slots[start : start + 8]
            self.copier.saves.wait_for(self.copier.saves.submitted)  # their blocks are written again
            for block, chunk in enumerate(part):
                self.pool.data[block] = torch.from_numpy(numbers(chunk, self.shard))
            rows = [[block, slot, generation] for block, slot in enumerate(into)]
            self.step += 1
            plan = StepPlan(
                self.step,
                1,
                saves=pack_int32(np.array(rows, dtype=np.int32)),
                save_fence=self.step,
                save_names=b"".join(map(name_of, part)),
            )
            self.copier.finish(self.copier.begin(plan))

    def save_late(self, chunk: int, slot: int) -> None:
        """Order a late save that nothing waits for."""
        self.pool.data[0] = torch.from_numpy(numbers(chunk, self.shard))
        self.step += 1
        rows = pack_int32([0, slot, 1])
        plan = StepPlan(self.step, 1, late_saves=rows, save_names=name_of(chunk))
        self.copier.finish(self.copier.begin(plan))
        self.copier.settle()

    def load(self, slot: int) -> None:
        """Order a load that nothing waits for."""
        self.step += 1
        rows = pack_int32([7, slot, self.copier.host.generation(slot)])
        self.copier.finish(self.copier.begin(StepPlan(self.step, 1, loads=rows)))

    def pull(self, peer: int, wanted: dict[int, int], generation: int = 5) -> list[int]:
        """Order chunks from a peer, by slot; returns the numbers of the moves."""
        made = []
        for slot, chunk in wanted.items():
            self._moves += 1
            made.append(
                TierMove(self._moves, TierKind.PEER, False, slot, generation, -1, 0, name_of(chunk), peer=peer)
            )
        self.tiers.take(TierMoves(self.step, made))
        return [move.id for move in made]

    def outcomes(self, moves: list[int], seconds: float = DEADLINE_S) -> list[MoveOutcome]:
        """What became of moves, in their order; others may end meanwhile."""
        deadline = time.monotonic() + seconds
        while not self._ended.keys() >= set(moves):
            report = self._reports.get(timeout=max(0.001, deadline - time.monotonic()))
            assert isinstance(report, list)
            for outcome in report:
                assert outcome.id not in self._ended, "a move is answered twice"
                self._ended[outcome.id] = outcome
        return [self._ended[move] for move in moves]

    def statuses(self, peer: int, wanted: dict[int, int]) -> list[int]:
        return [outcome.status for outcome in self.outcomes(self.pull(peer, wanted))]

    def meet(self, peer: int, *endpoints: str) -> None:
        self.tiers.take(PeerAt(peer, list(endpoints)))

    def holds(self, slot: int, chunk: int, generation: int = 5) -> bool:
        """Whether a slot has exactly this rank's part of a chunk."""
        host = self.copier.host
        is_same = bytes(host.view(slot)) == numbers(chunk, self.shard).tobytes()
        return is_same and host.generation(slot) == generation

    def close(self) -> None:
        self.tiers.close()
        self.copier.close()


def export_until_killed(told: str, chunks: int, settings: dict[str, Any], rank: int = 0, tp: int = 1) -> None:
    """Be a rank that exports chunks 0 to `chunks`; its endpoint is written to the file `told`."""
    peer = PeerRank(rank, tp, **settings)
    peer.save(range(chunks), range(chunks))
    waiting = Path(f"{told}.part")
    waiting.write_text(peer.tiers.exports)
    os.replace(waiting, told)
    time.sleep(600)
