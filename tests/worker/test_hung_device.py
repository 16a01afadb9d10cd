"""Ranks that wait for a device in vain: with a real controller, each leaves soon after a peer is lost.

NCCL notices a dead peer late or never: the kernels of its collectives go on waiting. So a rank does not rely on
it: the controller sees the end of the peer's connection and says so, and the rank's watchdog ends its process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from controller.service_harness import BLOCKS, CHUNK, Router, group_config, run_controller
from msgspec.structs import replace
from worker.driver import run_config

from trunkline.worker.service import EXIT_LEFT

SCRIPT = Path(__file__).parent / "hung_rank.py"
LEAVES_WITHIN_S = 10.0
"""Generous: 0.26 s were measured, of which the controller waits 0.2 for a reason."""


class Group:
    """A controller, its router by hand, and two ranks that wait for their devices."""

    def __init__(self, folder: Path, router: Router, ranks: list[subprocess.Popen[bytes]]) -> None:
        self.folder = folder
        self.router = router
        self.ranks = ranks

    def begin_step(self) -> None:
        """Until both ranks are in it."""
        self.router.wait_state("ready", seconds=90)  # the ranks import torch
        self.router.submit(1, [1, 2, 3], 5)
        deadline = time.monotonic() + 30
        while not all((self.folder / f"waits-{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    controller = replace(group_config(tmp_path), step_timeout_s=3.0)
    with run_controller(controller, tmp_path) as (_, router):
        ranks = [start(rank, tmp_path) for rank in range(2)]
        try:
            yield Group(tmp_path, router, ranks)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def start(rank: int, folder: Path) -> subprocess.Popen[bytes]:
    config = run_config(
        folder,
        rank=rank,
        tp=2,
        chunk_size=CHUNK,
        max_context=96,
        pool_blocks=BLOCKS,
        plan_endpoint=f"ipc://{folder}/plan",
        report_endpoint=f"ipc://{folder}/report",
        rendezvous="file:///unused",
        parent_pid=os.getpid(),
    )
    path = folder / f"rank-{rank}.json"
    path.write_bytes(msgspec.json.encode(config))
    return subprocess.Popen([sys.executable, str(SCRIPT), str(path), str(folder / f"waits-{rank}")])


def test_a_rank_leaves_when_its_peer_is_killed(group: Group) -> None:
    group.begin_step()
    group.ranks[1].kill()
    began = time.monotonic()
    assert group.ranks[0].wait(timeout=LEAVES_WITHIN_S) == EXIT_LEFT
    print(f"left after {time.monotonic() - began:.2f} s")
    assert "worker rank 1 is gone" in group.router.wait_state("starting").detail


def test_a_rank_leaves_when_its_peer_is_frozen(group: Group) -> None:
    """The step is not answered, so the epoch is ended. The frozen rank leaves, too, as soon as it can."""
    group.begin_step()
    group.ranks[1].send_signal(signal.SIGSTOP)
    assert group.ranks[0].wait(timeout=3.0 + LEAVES_WITHIN_S) == EXIT_LEFT
    group.ranks[1].send_signal(signal.SIGCONT)
    # Its controller kills a rank that stays too long, which it does where this process gets no turn for so long.
    assert group.ranks[1].wait(timeout=LEAVES_WITHIN_S) in (EXIT_LEFT, -signal.SIGKILL)
