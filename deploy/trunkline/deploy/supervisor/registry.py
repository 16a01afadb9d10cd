"""How commands find the clusters that run on this machine.

    <cache folder>/running/<name of the run folder>     a line: the run folder's path
    <run folder>/cluster.json                           what runs there

The first is only a pointer, for run folders that are not where this process would make its own. A cluster runs
as long as the lock in its run folder is held (`rundir.py`); pointers to others are removed when they are met.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from trunkline.deploy.config.cache_folder import cache_folder
from trunkline.deploy.errors import DeployError
from trunkline.deploy.supervisor.control_server import SOCKET_NAME
from trunkline.deploy.supervisor.rundir import base_folder, is_run_folder, is_stale

_FILE: Final = "cluster.json"
_POINTERS: Final = "running"


class ClusterNotFoundError(DeployError):
    """There is no cluster that the command could mean, or more than one."""


class Running(msgspec.Struct, frozen=True):
    """A running cluster, or a part of one, as commands find it."""

    port: int
    url: str
    title: str
    pid: int
    """Of the supervisor."""
    kind: str = "cluster"
    """"cluster", or the part that runs here: "group", "workers" or "router" (`node_settings.Kind`)."""


@contextlib.contextmanager
def announced(folder: Path, running: Running) -> Iterator[None]:
    """Let commands find the cluster of this run folder. A pointer that cannot be written is no reason to fail."""
    (folder / _FILE).write_bytes(msgspec.json.encode(running))
    cache = cache_folder()
    pointer = None if cache is None else cache / _POINTERS / folder.name
    with contextlib.suppress(OSError):
        if pointer is not None:
            pointer.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            pointer.write_text(os.fspath(folder))
    try:
        yield
    finally:
        if pointer is not None:
            with contextlib.suppress(OSError):
                pointer.unlink(missing_ok=True)


def running_clusters() -> dict[Path, Running]:
    """Return all clusters of this user that run on this machine, by their run folders."""
    found: dict[Path, Running] = {}
    for folder in sorted({*_pointed(), *filter(is_run_folder, base_folder().glob("*"))}):
        # Gone meanwhile, another user's, not yet complete, or of another version: passed over.
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            if not is_stale(folder):
                found[folder] = msgspec.json.decode((folder / _FILE).read_bytes(), type=Running)
    return found


def find_cluster(port: int | None) -> tuple[Path, Running]:
    """Return the cluster on this port, or the only one if `port` is None.

    Raises:
        ClusterNotFoundError: There is none, or there are several; the text says what to do.
    """
    clusters = running_clusters()
    ports = ", ".join(str(running.port) for running in clusters.values())
    if not clusters:
        raise ClusterNotFoundError("no cluster of yours runs on this machine; `trunkline serve` starts one")
    chosen = [(folder, running) for folder, running in clusters.items() if port in (None, running.port)]
    if not chosen:
        raise ClusterNotFoundError(f"no cluster of yours serves on port {port}; there are some on {ports}")
    if len(chosen) > 1:
        advice = "say which with --port" if port is None else "stop one of them by its Ctrl-C or SIGTERM"
        raise ClusterNotFoundError(f"several clusters run, on ports {ports}; {advice}")
    return chosen[0]


def control_path(folder: Path) -> Path:
    """Return the path of the socket that takes commands."""
    return folder / SOCKET_NAME


def _pointed() -> Iterator[Path]:
    cache = cache_folder()
    if cache is None:
        return
    for pointer in (cache / _POINTERS).glob("*"):
        with contextlib.suppress(OSError, ValueError):
            folder = Path(pointer.read_text())
            if is_run_folder(folder) and not is_stale(folder):
                yield folder
            else:
                pointer.unlink(missing_ok=True)
