"""Clusters that several tests share: a start costs seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.harness import Cluster
from worker.redis_server import RedisServer


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The demo model as `trunkline serve` serves it: two tensor-parallel workers."""
    with Cluster("--tp", "2", "--dtype", "float32") as running:
        yield running
        assert running.stop() == 0


@pytest.fixture(scope="session")
def plain() -> Iterator[Cluster]:
    """The demo model by one worker that computes everything anew: what texts must be equal to."""
    with Cluster("--tp", "1", "--dtype", "float32", "--no-prefix-cache", "--threads", "1") as running:
        yield running
        assert running.stop() == 0


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis server for a remote tier, which a test may kill."""
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()
