"""The part `copies` of `kv_travel`: pulls beside plain copies, and the ranks without a model that pull."""

from __future__ import annotations

import multiprocessing
import os
import queue
import statistics
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
import torch
from report import Report

from trunkline.controller.reports import MoveOutcome, Probed
from trunkline.kernels.load import load_kernels
from trunkline.kernels.ops import KvPool
from trunkline.kvstore.chunks import NAME_BYTES, pack_int32
from trunkline.kvstore.shards import HeadShard
from trunkline.kvstore.tier import TierKind
from trunkline.runtime import wire_keys
from trunkline.worker.config import WorkerConfig
from trunkline.worker.messages import PeerAt, StepPlan, TierMove, TierMoves
from trunkline.worker.tiers import peer_tier
from trunkline.worker.tiers.copier import Copier
from trunkline.worker.tiers.host_pool import HostPool
from trunkline.worker.tiers.tier_service import TierService

SHAPES: Final = {"demo": (8, 2, 64, 64), "110 M": (12, 4, 64, 64)}
"""Of a chunk, float32: layers, KV heads, tokens, head dimension."""
BLOCKS: Final = 16
FINGERPRINT: Final = "00" * 16


@dataclass
class Rank:
    """A rank without a model: host pool and tiers."""

    copier: Copier
    tiers: TierService
    reports: queue.Queue[list[MoveOutcome] | Probed]
    shape: tuple[int, int, int, int]

    @classmethod
    def make(cls, shape: tuple[int, int, int, int], slots: int, **config: Any) -> Rank:
        layers, heads, chunk, dim = shape
        pool = KvPool.wrap(torch.randn(BLOCKS, layers, 2, heads, chunk, dim))
        copier = Copier(HostPool(slots, pool), pool.data.device, BLOCKS, lambda: load_kernels("auto", "cpu", 1))
        reports: queue.Queue[list[MoveOutcome] | Probed] = queue.Queue()
        settings = WorkerConfig(
            model="", plan_endpoint="", report_endpoint="", exchange_fingerprint=FINGERPRINT, **config
        )
        return cls(copier, TierService(settings, copier, reports.put, HeadShard(heads)), reports, shape)

    def fill(self, slots: int, serial: int) -> None:
        """Save a chunk into each slot, under names that depend on `serial`."""
        for start in range(0, slots, BLOCKS):
            into = range(start, min(slots, start + BLOCKS))
            rows = np.array([[slot - start, slot, serial] for slot in into], dtype=np.int32)
            names = b"".join(name_of(slot, serial) for slot in into)
            self.copier.begin(StepPlan(1, 1, saves=pack_int32(rows), save_names=names))
        self.copier.saves.wait_for(self.copier.saves.submitted)

    def pull(self, peer: int, slots: int, serial: int) -> float:
        """Seconds to pull a chunk into each slot."""
        return self.pull_names(peer, [name_of(slot, serial) for slot in range(slots)], serial)

    def pull_names(self, peer: int, names: list[bytes], serial: int) -> float:
        """Seconds to pull chunks with these names into the first slots."""
        kind = TierKind.PEER
        moves = [TierMove(at, kind, False, at, serial, -1, 0, name, peer) for at, name in enumerate(names)]
        started = time.perf_counter()
        self.tiers.take(TierMoves(0, moves))
        done = 0
        while done < len(moves):
            outcomes = self.reports.get(timeout=60)
            assert isinstance(outcomes, list)
            assert all(outcome.status == peer_tier.DONE for outcome in outcomes), outcomes
            done += len(outcomes)
        return time.perf_counter() - started


def name_of(slot: int, serial: int) -> bytes:
    return (slot << 32 | serial).to_bytes(NAME_BYTES, "little")


def export(told: Connection, shape: tuple[int, int, int, int], slots: int, config: dict[str, Any]) -> None:
    """Be a process that exports; fill the slots anew under each serial number that comes."""
    torch.set_num_threads(1)
    rank = Rank.make(shape, slots, parent_pid=os.getppid(), **config)
    told.send(rank.tiers.exports)
    while (serial := told.recv()) >= 0:
        rank.fill(slots, serial)
        told.send(serial)
    rank.tiers.close()
    rank.copier.close()


def measure_copies(report: Report, *, quick: bool) -> None:
    """Pull chunks in all ways, beside plain copies."""
    torch.set_num_threads(1)
    for model, shape in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            _copies_of(report, model, shape, Path(folder), rounds=5 if quick else 20)


def _copies_of(report: Report, model: str, shape: tuple[int, int, int, int], folder: Path, rounds: int) -> None:
    layers, heads, chunk, dim = shape
    chunk_bytes = layers * 2 * heads * chunk * dim * 4
    slots = max(64, (128 << 20) // chunk_bytes)
    keys = str(folder / "keys")
    wire_keys.write(wire_keys.generate(), Path(keys))
    context = multiprocessing.get_context("spawn")
    ways: dict[str, tuple[Rank, Connection, Any]] = {}
    configs: dict[str, dict[str, Any]] = {
        "memory": {"export": f"ipc://{folder}/x"},
        "tcp": {"export": "tcp://127.0.0.1:*", "plain_tcp": True},
        "curve": {"export": "tcp://127.0.0.1:*", "wire_keys": keys},
    }
    for peer, (way, config) in enumerate(configs.items()):
        here, there = context.Pipe()
        process = context.Process(target=export, args=(there, shape, slots, config), daemon=True)
        process.start()
        rank = Rank.make(shape, slots, wire_keys=config.get("wire_keys", ""))
        endpoint = here.recv()
        if way == "memory":
            rank.tiers.take(PeerAt(peer, [endpoint]))
        else:
            with mock.patch.object(peer_tier, "node_id", return_value=""):  # as if the peer were on another host
                rank.tiers.take(PeerAt(peer, [endpoint]))
                time.sleep(0.5)  # its thread has begun
        ways[way] = (rank, here, process)
    source = np.random.default_rng(1).integers(0, 255, (slots, chunk_bytes), dtype=np.uint8)
    target = ways["memory"][0].copier.host
    taken: dict[str, list[float]] = {}
    for serial in range(1, rounds + 2):
        started = time.perf_counter()
        for slot in range(slots):
            np.frombuffer(target.view(slot), dtype=np.uint8)[:] = source[slot]
        found = {"plain copy": time.perf_counter() - started}
        for peer, (way, (rank, told, _)) in enumerate(ways.items()):
            told.send(serial)
            told.recv()
            found[way] = rank.pull(peer, slots, serial)
            found[f"{way}, again"] = rank.pull(peer, slots, serial)
        if serial > 1:  # the first round makes the system provide the pages
            for way, seconds in found.items():
                taken.setdefault(way, []).append(seconds)
    for rank, told, process in ways.values():
        told.send(-1)
        process.join(10)
        rank.tiers.close()
        rank.copier.close()
    plain = statistics.median(taken["plain copy"])
    for way, times in taken.items():
        seconds = statistics.median(times)
        case = {"part": "copies", "model": model, "chunk, KiB": chunk_bytes >> 10, "way": way}
        report.add(case, "speed", slots * chunk_bytes / seconds / 1e9, "GB/s", len(times))
        report.add(case, "share", 100 * plain / seconds, "%", len(times))
        report.add(case, "per chunk", seconds / slots * 1e6, "us", len(times))
