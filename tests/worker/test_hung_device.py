"""Ranks that wait for a device in vain: with a real controller, each leaves soon after a peer is lost.

NCCL notices a dead peer late or never: the kernels of its collectives go on waiting. So a rank does not rely on
it: the controller sees the end of the peer's connection and says so, and the rank's watchdog ends its process.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from controller.service_harness import BLOCKS, CHUNK, Router, group_config, run_controller
from msgspec.structs import replace
from worker.driver import run_config
from worker.ranks import RankProcess
from worker.tier_driver import wait_until

from trunkline.kvstore.chunk_format import kv_format
from trunkline.kvstore.shards import HeadShard
from trunkline.worker.config import WorkerConfig
from trunkline.worker.launched_steps import LaunchedSteps
from trunkline.worker.model.decoder import make_kv_pool
from trunkline.worker.service import EXIT_LEFT, serve

pytestmark = pytest.mark.processes
LEAVES_WITHIN_S = 60.0
"""Generous: 0.26 s were measured, of which the controller waits 0.2 for a reason."""


def serve_hung(config: WorkerConfig, marker: Path) -> None:
    """Be a rank whose first step never ends. Nothing of Python reaches its main thread there.

    Args:
        marker: Appears when the step waits.
    """

    def wait_for_the_device(_plan: object) -> None:
        marker.touch()
        while True:
            ctypes.CDLL(None).pause()

    def load(*_: object) -> Any:
        return SimpleNamespace(
            copier=None,
            pool=make_kv_pool(32, kv_format((1, 1, 16, 16), "bfloat16"), torch.device("cpu")),
            head_shard=HeadShard(2, config.rank, config.tp),
            num_blocks=32,
            block_bytes=1024,
            host_slots=0,
            swap_us_per_block=0.0,
            windows={},
            is_preparing=False,
            check=lambda: None,
            reports=list,
            go_on=lambda *_: False,
            launch=wait_for_the_device,
            launched=LaunchedSteps(lambda: (0, 0)),
        )

    os._exit(serve(config, load))


class Group:
    """A controller, its router by hand, and two ranks that wait for their devices."""

    def __init__(self, folder: Path, router: Router) -> None:
        self.router = router
        self._markers = [folder / f"waits-{rank}" for rank in range(2)]
        self.ranks = [
            RankProcess(serve_hung, self._config(rank, folder), self._markers[rank]) for rank in range(2)
        ]

    def _config(self, rank: int, folder: Path) -> WorkerConfig:
        return run_config(
            folder,
            rank=rank,
            tp=2,
            chunk_size=CHUNK,
            max_context=96,
            pool_blocks=BLOCKS,
            plan_endpoint=f"ipc://{folder}/plan",
            report_endpoint=f"ipc://{folder}/report",
            rendezvous="file:///unused",
        )

    def begin_step(self) -> None:
        """Until both ranks are in it."""
        self.router.wait_state("ready", seconds=90)
        self.router.submit(1, [1, 2, 3], 5)
        wait_until(lambda: all(marker.exists() for marker in self._markers))


@contextmanager
def running_group(tmp_path: Path, step_timeout_s: float) -> Iterator[Group]:
    config = replace(group_config(tmp_path), step_timeout_s=step_timeout_s)
    with run_controller(config, tmp_path) as (_, router):
        made = Group(tmp_path, router)
        try:
            yield made
        finally:
            for rank in made.ranks:
                rank.kill()


def test_a_rank_leaves_when_its_peer_is_killed(tmp_path: Path) -> None:
    """Long before the step would be taken to hang."""
    with running_group(tmp_path, 600.0) as group:
        group.begin_step()
        group.ranks[1].kill()
        assert group.ranks[0].wait(timeout=LEAVES_WITHIN_S) == EXIT_LEFT
        assert "worker rank 1 is gone" in group.router.wait_state("starting").detail


def test_a_rank_leaves_when_its_peer_is_frozen(tmp_path: Path) -> None:
    """The step is not answered, so the epoch is ended. The frozen rank leaves, too, as soon as it can."""
    with running_group(tmp_path, 3.0) as group:
        group.begin_step()
        group.ranks[1].send_signal(signal.SIGSTOP)
        assert group.ranks[0].wait(timeout=3.0 + LEAVES_WITHIN_S) == EXIT_LEFT
        group.ranks[1].send_signal(signal.SIGCONT)
        # Its controller kills a rank that stays too long, as it does where this process gets no turn meanwhile.
        assert group.ranks[1].wait(timeout=LEAVES_WITHIN_S) in (EXIT_LEFT, -signal.SIGKILL)
