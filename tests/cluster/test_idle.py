"""An idle cluster waits for events; it does not look for them."""

from __future__ import annotations

import time

import psutil
import pytest
from cluster.harness import PATIENCE_SECONDS, Cluster, wait_for

pytestmark = pytest.mark.processes

SECONDS = 5.0
CPU_SECONDS_MAX = 0.02 * SECONDS
"""2 % of one core, all processes together."""


def cpu_seconds(cluster: Cluster) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in cluster.pids.values()]
    return float(sum(t.user + t.system for t in times))


def is_quiet(cluster: Cluster) -> bool:
    """Whether a look of some seconds finds almost no CPU time."""
    before = cpu_seconds(cluster)
    time.sleep(SECONDS)
    return cpu_seconds(cluster) - before < CPU_SECONDS_MAX


def test_an_idle_cluster_uses_almost_no_cpu_time(cluster: Cluster) -> None:
    """Given time: on a busy machine, what a start leaves for later (grammars, connections that close) takes longer
    than a single look."""
    wait_for(cluster.is_idle, 10)
    wait_for(lambda: is_quiet(cluster), PATIENCE_SECONDS)
