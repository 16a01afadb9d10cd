"""The part `exporter` of `kv_travel`: the time between tokens of a rank's streams while others pull from it.

Engine, rank and exporter are in one process, which is harder than in a server, where the engine has a process of
its own. Eight streams decode all the time. In every other stretch a second process pulls all of a conversation's
chunks, over and over and as fast as it can: in memory, or by TCP with wire keys. `4/s`:
it pulls them four times a second only. `neither`: that process pulls
from a third one, so the rank exports nothing, but the machine is as busy. `cost` is that of stretches with pulls
over those without.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Final
from unittest import mock

import numpy as np
import torch
from kv_travel_copies import FINGERPRINT, SHAPES, Rank, export, name_of
from report import Report
from small_model import VOCABULARY, small_model
from tiered_loop import TieredLoop

from trunkline.controller.engine_config import EngineConfig
from trunkline.deploy.config.models import DEMO_FOLDER
from trunkline.runtime import wire_keys
from trunkline.runtime.process import node_id
from trunkline.worker.config import WorkerConfig
from trunkline.worker.messages import PeerAt
from trunkline.worker.tiers import peer_tier
from trunkline.worker.tiers.tier_service import TierService

STREAMS: Final = 8
EXPORTED: Final = 24
"""Chunks of the conversation that is pulled."""
CHUNK: Final = 64
PAUSES: Final = {0.25: "4/s", 0.0: "on and on"}
"""Seconds from pull to pull."""


@dataclass(slots=True)
class Stretches:
    """Times between tokens in seconds, and pulled bytes per second, by stretch."""

    beside: list[list[float]] = field(default_factory=list)
    without: list[list[float]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


def measure_exporter(report: Report, *, quick: bool) -> None:
    """Measure all ways for both models."""
    torch.set_num_threads(1)
    seconds, rounds = (1.5, 3) if quick else (1.5, 4)
    for model, folder, vocabulary in (("demo", DEMO_FOLDER, 4096), ("110 M", small_model(), VOCABULARY)):
        with tempfile.TemporaryDirectory() as scratch:
            _measure(report, model, folder, vocabulary, Path(scratch), seconds, rounds)


def pull_on_and_on(told: Connection, shape: tuple[int, int, int, int], keys: str, is_near: bool) -> None:
    """Be a process that pulls: take endpoint and names, then seconds of stretches; tell bytes per second."""
    torch.set_num_threads(1)
    rank = Rank.make(shape, EXPORTED, wire_keys=keys)
    endpoint, names = told.recv()
    with mock.patch.object(peer_tier, "node_id", node_id if is_near else lambda: ""):
        rank.tiers.take(PeerAt(0, [endpoint]))
        rank.pull_names(0, names, 1)
    told.send(0.0)
    while stretch := told.recv():
        seconds, pause_s = stretch
        began, pulls = time.perf_counter(), 0
        while (spent := time.perf_counter() - began) < seconds:
            rank.pull_names(0, names, 1)
            pulls += 1
            time.sleep(max(0.0, min(began + pulls * pause_s, began + seconds) - time.perf_counter()))
        told.send(pulls * len(names) * rank.copier.host.slot_bytes / spent)
    rank.tiers.close()
    rank.copier.close()


class Puller:
    """A process that pulls when it is told to."""

    def __init__(self, shape: tuple[int, int, int, int], endpoint: str, names: list[bytes], keys: str, near: bool):
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=pull_on_and_on, args=(there, shape, keys, near), daemon=True)
        self._process.start()
        self._here.send((endpoint, names))
        self._here.recv()

    def begin(self, seconds: float, pause_s: float) -> None:
        self._here.send((seconds, pause_s))

    def rate(self) -> float:
        """Wait for the end of a stretch; return bytes per second."""
        return float(self._here.recv())

    def close(self) -> None:
        self._here.send(None)
        self._process.join(10)


class Streams:
    """Streams of an engine and its rank, which exports."""

    def __init__(self, folder: Path, vocabulary: int, endpoints: dict[str, dict[str, Any]]) -> None:
        config = EngineConfig(num_blocks=512, chunk_size=CHUNK, dtype="float32", max_context=2048, peers=True)
        self._rng, self._vocabulary = np.random.default_rng(0), vocabulary
        self._loop = TieredLoop(folder, config, {"dtype": "float32", "threads": 1, "host_memory_bytes": 1 << 30})
        self.tiers = {way: self._exporter(settings) for way, settings in endpoints.items()}
        self._loop.first_token(self._draw(EXPORTED * CHUNK))
        self._loop.settle()
        nodes = self._loop.engine.scheduler.kv.tree.nodes()
        self.names = [bytes(node.name) for node in nodes if node.host_ready][:EXPORTED]

    def _exporter(self, settings: dict[str, Any]) -> TierService:
        config = WorkerConfig(
            model="",
            plan_endpoint="",
            report_endpoint="",
            exchange_fingerprint=FINGERPRINT,
            parent_pid=os.getpid(),
            **settings,
        )
        return TierService(config, self._loop.runner.copier, lambda _: None, self._loop.runner.head_shard)

    def _draw(self, tokens: int) -> list[int]:
        return list(self._rng.integers(2, self._vocabulary, tokens).tolist())

    def steps(self, seconds: float) -> list[float]:
        """Decode for so long; return the seconds of each step."""
        loop, taken = self._loop, list[float]()
        while loop.engine.is_idle:
            for _ in range(STREAMS):
                loop.submit(self._draw(16), 1800)
            for _ in range(8):
                loop.step()
        until = time.perf_counter() + seconds
        while (began := time.perf_counter()) < until and not loop.engine.is_idle:
            loop.step()
            taken.append(time.perf_counter() - began)
        return taken

    def close(self) -> None:
        for tiers in self.tiers.values():
            tiers.close()
        self._loop.close()


def _measure(
    report: Report, model: str, folder: Path, vocabulary: int, scratch: Path, seconds: float, rounds: int
) -> None:
    shape = SHAPES[model]
    keys = str(scratch / "keys")
    wire_keys.write(wire_keys.generate(), Path(keys))
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    idle = {"export": f"ipc://{scratch}/idle"}
    other = context.Process(target=export, args=(there, shape, EXPORTED, idle), daemon=True)
    other.start()
    elsewhere = here.recv()
    here.send(1)
    here.recv()
    ways = {
        "memory": {"export": f"ipc://{scratch}/x"},
        "curve": {"export": "tcp://127.0.0.1:*", "wire_keys": keys},
    }
    with closing(Streams(folder, vocabulary, ways)) as streams:
        assert len(streams.names) == EXPORTED
        pullers = {
            way: Puller(shape, tiers.exports, streams.names, ways[way].get("wire_keys", ""), way == "memory")
            for way, tiers in streams.tiers.items()
        }
        names = [name_of(slot, 1) for slot in range(EXPORTED)]
        pullers["neither"] = Puller(shape, elsewhere, names, "", True)
        found = {(way, pause_s): Stretches() for way in pullers for pause_s in PAUSES}
        streams.steps(seconds)
        for _ in range(rounds):
            for (way, pause_s), stretches in found.items():
                stretches.without.append(streams.steps(seconds))
                pullers[way].begin(seconds, pause_s)
                stretches.beside.append(streams.steps(seconds))
                stretches.rates.append(pullers[way].rate())
        for puller in pullers.values():
            puller.close()
    here.send(-1)
    other.join(10)
    for (way, pause_s), stretches in found.items():
        case = {"part": "exporter", "model": model, "pulls": f"{way}, {PAUSES[pause_s]}"}
        for name, part in (("median", 0.5), ("p99", 0.99)):
            pairs = zip(stretches.beside, stretches.without, strict=True)
            ratio = median(np.quantile(a, part) / np.quantile(b, part) for a, b in pairs)
            report.add(case, f"{name} between tokens", 1e3 * _quantile(stretches.without, part), "ms", rounds)
            report.add(case, f"{name}, beside pulls", 1e3 * _quantile(stretches.beside, part), "ms", rounds)
            report.add(case, f"cost, {name}", 100 * (float(ratio) - 1), "%", rounds)
        report.add(case, "pulled", median(stretches.rates) / 1e9, "GB/s", rounds)


def _quantile(stretches: list[list[float]], part: float) -> float:
    return float(median(np.quantile(each, part) for each in stretches))
