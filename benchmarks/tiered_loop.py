"""An engine, a rank and the rank's tiers in one process, and ways to have a history where one wants it.

As `EngineLoop`; moves between host memory, disk and a remote store go on in the tiers' threads, as in a worker,
beside whatever the loop executes.
"""

from __future__ import annotations

import queue
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import redis
from engine_loop import EngineLoop

from trunkline.controller.engine.engine import Engine
from trunkline.controller.engine.events import Ready
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.reports import MoveOutcome, MovesDone, Probed
from trunkline.controller.tiers.costs import Preloads
from trunkline.kvstore.tier import TierKind
from trunkline.worker.config import WorkerConfig
from trunkline.worker.tiers.copy_lane import CopyOptions
from trunkline.worker.tiers.tier_service import TierService

WAIT_SECONDS_MAX: Final = 0.25


class TieredLoop(EngineLoop):
    """Drives engine, rank and tiers until nothing is left to do."""

    def __init__(
        self,
        model: Path,
        engine: EngineConfig,
        worker: dict[str, Any],
        copying: CopyOptions = CopyOptions(),  # noqa: B008
    ) -> None:
        """See `EngineLoop`; what the tiers hold is taken from the worker, as a controller does."""
        super().__init__(model, engine, worker, copying)
        self._reports: queue.SimpleQueue[list[MoveOutcome] | Probed] = queue.SimpleQueue()
        config = WorkerConfig(model="", plan_endpoint="", report_endpoint="", tier_fingerprint="00", **worker)
        self.tiers = TierService(config, self.runner.copier, self._reports.put)
        limits = msgspec.structs.replace(
            engine,
            host_slots=self.runner.host_slots,
            swap_us_per_block=self.runner.swap_us_per_block,
            disk_slots=self.tiers.disk_slots,
            remote=self.tiers.has_remote,
            **self.runner.windows,
        )
        self.engine = Engine(limits)

    def step(self) -> bool:
        """As `EngineLoop.step`; if nothing can be computed now, wait for what is fetched."""
        self._take_reports(0.0)
        worked = super().step()
        now = time.perf_counter()
        if not worked and not self.engine.is_idle:
            left = self.wake_at - now
            self._take_reports(max(1e-4, min(left, WAIT_SECONDS_MAX)))
            return True
        return worked

    def _act(self, ready: Ready) -> None:
        super()._act(ready)
        for order in ready.orders:
            self.tiers.take(order)

    def _take_reports(self, seconds: float) -> None:
        """Give the engine what the tiers have done, waiting for the first of it."""
        outcomes: list[MoveOutcome] = []
        try:
            while True:
                report = self._reports.get(timeout=seconds) if seconds else self._reports.get_nowait()
                seconds = 0.0
                if isinstance(report, list):
                    outcomes += report
                else:
                    self.engine.receive(report, time.perf_counter())
        except queue.Empty:
            pass
        if outcomes:
            self.engine.receive(MovesDone(0, self.engine.epoch, outcomes), time.perf_counter())

    def settle(self) -> None:
        """Run until everything is computed, and copied wherever it is going to be."""
        tree = self.engine.scheduler.kv.tree
        self.run()
        while tree.saves.waiting or tree.tiers.has_unwritten or self.engine.traffic.in_flight:
            self.step()
            self._take_reports(1e-3)
        if self.runner.copier is not None:
            for lane in (self.runner.copier.saves, self.runner.copier.loads):
                lane.wait_for(lane.submitted)

    def first_token(self, prompt: list[int]) -> float:
        """Seconds from a prompt's submission to its first token, which is its last."""
        started = time.perf_counter()
        request = self.submit(prompt, 1)
        while not self.requests[request].tokens:
            self.step()
        return time.perf_counter() - started

    def sink(self, tier: TierKind) -> None:
        """Leave the idle chunks in this tier only, as if others had pushed them out of those above.

        To the remote tier: the engine knows nothing of them any more, like one that never computed them.
        """
        tree = self.engine.scheduler.kv.tree
        if tier is TierKind.DEVICE:
            return
        if tier is TierKind.REMOTE:
            tree.flush()
            return
        tree.evict(self.engine.config.num_blocks)
        if tier is TierKind.HOST:
            return
        for node in list(tree.nodes()):
            assert node.disk_ready, "it has not been written"
            if node.host_ready:
                tree.tiers.mover.drop_host(node)

    def close(self) -> None:
        self.tiers.close()
        super().close()


class HeldLoading(Preloads):
    """Lets a sequence compute once so many layers of its KV have arrived: a read buffer of a given size, filled
    while another job runs (CachedAttention §3.2.1)."""

    def __init__(self, loop: TieredLoop, layers: int) -> None:
        """
        Args:
            layers: 0: at once.
        """
        super().__init__()
        copier = loop.runner.copier
        assert copier is not None
        self._copier = copier
        self._until = copier.loads.submitted * copier.host.layers + layers

    def is_due(self, stay: int, now: float, first_step_us: float, alone: bool) -> bool:
        """See `Preloads`. The load that is waited for is the next one."""
        return self._copier.loads.gate.passed >= self._until


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """The URL of a server of this benchmark's own; "": none is installed."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        yield ""
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with subprocess.Popen([binary, *options, "--dir", str(folder)], stdout=subprocess.DEVNULL) as process:
        try:
            url = f"redis://127.0.0.1:{port}/0"
            client = redis.Redis.from_url(url)
            for _ in range(500):
                try:
                    client.ping()
                    break
                except redis.ConnectionError:
                    time.sleep(0.02)
            yield url
        finally:
            process.kill()


def forget_all(url: str) -> None:
    """Empty the remote tier."""
    if url:
        redis.Redis.from_url(url).flushall()
