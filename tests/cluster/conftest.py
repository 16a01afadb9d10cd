"""Clusters that several tests share: a start costs seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster.harness import Cluster


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
