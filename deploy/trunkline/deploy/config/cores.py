"""Find how many cores this process may use: its affinity, or less if a control group's quota is smaller.

A container limited to two CPUs of a large machine sees all of them; threads beyond the quota only use it up
sooner and then all wait for the next period.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

_MEMBERSHIP: Final = Path("/proc/self/cgroup")
_ROOT: Final = Path("/sys/fs/cgroup")


def available_cores() -> int:
    """Return the number of cores for this process, at least 1."""
    cores = len(os.sched_getaffinity(0))
    membership = _text(_MEMBERSHIP)
    quota = None if membership is None else whole_cores_of_quota(_ROOT, membership)
    return cores if quota is None else min(cores, quota)


def whole_cores_of_quota(root: Path, membership: str) -> int | None:
    """Return the smallest CPU quota of a process's control groups, in whole cores, at least 1; None: no quota.

    The quotas of the groups above them count, too.

    Args:
        root: Where the control groups are mounted.
        membership: The text of the process's `/proc/PID/cgroup`.
    """
    cores = []
    for line in membership.splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            cores += [_version_2(folder) for folder in _upwards(root, path)]
        elif "cpu" in controllers.split(","):
            for mount in (root / controllers, root / "cpu"):
                cores += [_version_1(folder) for folder in _upwards(mount, path)]
    return min((max(1, found) for found in cores if found is not None), default=None)


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """Yield the group's folder and all above it. In a container the path may be the host's, of which only the
    mount's own folder exists."""
    group = PurePosixPath(path.lstrip("/"))
    return (mount / folder for folder in (group, *group.parents) if ".." not in folder.parts)


def _version_2(folder: Path) -> int | None:
    quota, _, period = (_text(folder / "cpu.max") or "").partition(" ")
    return _ratio(quota, period)


def _version_1(folder: Path) -> int | None:
    return _ratio(_text(folder / "cpu.cfs_quota_us") or "", _text(folder / "cpu.cfs_period_us") or "")


def _ratio(quota: str, period: str) -> int | None:
    """Return the quota in whole cores; None where there is none, which is written "max" or -1."""
    try:
        quota_us, period_us = int(quota), int(period)
    except ValueError:
        return None
    return quota_us // period_us if quota_us > 0 and period_us > 0 else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
