"""Threads by default: as many as the cores that this process may keep busy, not as many as the machine has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trunkline.deploy.config import machine
from trunkline.deploy.config.machine import available_cores, whole_cores_of_quota
from trunkline.deploy.config.settings import ServeSettings

MEMBERSHIP_1 = "12:memory:/job\n3:cpu,cpuacct:/job/step\n1:cpuset:/job\n0::/\n"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


@pytest.mark.parametrize(
    ("files", "membership", "expected"),
    [
        ({}, "0::/", None),
        ({}, "", None),
        ({}, "nonsense", None),
        ({"cpu.max": "max 100000"}, "0::/", None),
        ({"cpu.max": "200000 100000"}, "0::/", 2),
        ({"cpu.max": "250000 100000"}, "0::/", 2),
        ({"cpu.max": "50000 100000"}, "0::/", 1),
        ({"a/cpu.max": "max 100000", "a/b/cpu.max": "400000 50000"}, "0::/a/b", 8),
        ({"a/cpu.max": "300000 100000", "a/b/cpu.max": "400000 50000"}, "0::/a/b", 3),
        # The host's path: the container's own group is mounted as the root.
        ({"cpu.max": "300000 100000"}, "0::/docker/0123/x", 3),
        ({"cpu.max": "300000 100000"}, "0::/../..", 3),
        ({"cpu.max": "broken"}, "0::/", None),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, MEMBERSHIP_1, None),
        ({"cpu/cpu.cfs_quota_us": "500000", "cpu/cpu.cfs_period_us": "100000"}, MEMBERSHIP_1, 5),
        (
            {"cpu,cpuacct/job/step/cpu.cfs_quota_us": "20000", "cpu,cpuacct/job/step/cpu.cfs_period_us": "10000"},
            MEMBERSHIP_1,
            2,
        ),
        ({"cpuset/cpu.cfs_quota_us": "100000", "cpuset/cpu.cfs_period_us": "100000"}, MEMBERSHIP_1, None),
    ],
)
def test_quota(files: dict[str, str], membership: str, expected: int | None, tmp_path: Path) -> None:
    write(tmp_path, files)
    assert whole_cores_of_quota(tmp_path, membership) == expected


@pytest.mark.parametrize(("quota", "expected"), [("max", 16), ("300000", 3), ("6400000", 16)])
def test_the_smaller_of_affinity_and_quota(
    quota: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"cpu.max": f"{quota} 100000", "membership": "0::/"})
    monkeypatch.setattr(machine, "_CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(machine, "_CGROUP_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert available_cores() == expected
    assert ServeSettings(groups=1, tp=2).threads_per_worker() == max(1, expected // 2)
    assert ServeSettings(groups=4, tp=8).threads_per_worker() == 1
    assert ServeSettings(threads=7).threads_per_worker() == 7
