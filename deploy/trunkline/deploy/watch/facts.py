"""Gather the facts that `trunkline doctor` checks. A question that failed is a fact, too."""

from __future__ import annotations

import contextlib
import resource
import shutil
import stat
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import psutil

from trunkline.deploy.config import gpus
from trunkline.deploy.config.cache_folder import cache_folder
from trunkline.deploy.config.cores import available_cores
from trunkline.deploy.config.gpus import Gpus
from trunkline.deploy.errors import DeployError
from trunkline.deploy.supervisor.control_client import ask
from trunkline.deploy.supervisor.control_commands import Command
from trunkline.deploy.supervisor.registry import control_path, running_clusters
from trunkline.deploy.watch.source import Source
from trunkline.router.tenancy.auth import is_loopback

PROBE_TOKENS: Final = 4
_PROBE_WORDS: Final = 96
"""Words of the prompt: more than a chunk, as after a restart KV is found in whole chunks."""


@dataclass(frozen=True)
class Probe:
    """The result of the same completion, requested twice."""

    status: int
    """Status of the answer; 0: none came."""
    said: str
    """The error, if it was none."""
    seconds: tuple[float, ...] = ()
    cached: int = 0
    """Prompt tokens of the second one that were cached."""
    prompt: int = 0


@dataclass(frozen=True)
class Machine:
    """The machine on which the command runs."""

    open_files_max: int
    cores: int
    memory_bytes: int
    memory_free_bytes: int
    swap_used_bytes: int
    shared_memory_free_bytes: int | None
    cache_free_bytes: int | None
    gpus: Gpus = field(default_factory=Gpus)


@dataclass(frozen=True)
class Facts:
    """All facts about a deployment. None: it could not be found out, or does not apply."""

    url: str
    is_loopback: bool
    unreachable: str = ""
    """Why the server did not answer; then nothing else was asked."""
    health: Mapping[str, Any] | None = None
    health_status: int = 0
    version: str = ""
    own_version: str = ""
    overview: Mapping[str, Any] | None = None
    no_overview: str = ""
    """Why there is no overview."""
    open_paths: tuple[str, ...] = ()
    """Paths that answer without a key, although they need one where strangers can connect."""
    probe: Probe | None = None
    status: Mapping[str, Any] | None = None
    """The status that the supervisor of a cluster on this machine gives."""
    loose_files: tuple[str, ...] = ()
    """Files with secrets in the run folder that other users may read or write."""
    machine: Machine | None = None


def gather(source: Source, own_version: str, *, probes: bool) -> Facts:
    """Gather all facts. With `probes`, also generate a few tokens, twice.

    Raises:
        DeployError: As `Source`.
    """
    address = urlsplit(source.url)
    known: dict[str, Any] = {
        "url": source.url,
        "is_loopback": is_loopback(address.hostname or ""),
        "own_version": own_version,
        "machine": machine(),
    }
    local = _local(address.port or 80) if known["is_loopback"] else None
    if local is not None:
        known["status"] = _status(local)
        known["loose_files"] = loose_files(local)
    try:
        health = source.fetch("/health")
        known["health_status"], known["health"] = health.status_code, _json(health)
        known["version"] = str(_json(source.fetch("/version")).get("version", ""))
    except DeployError as error:
        return Facts(**known, unreachable=str(error))
    try:
        known["overview"] = source.get("/ui/api/overview")
    except DeployError as error:
        known["no_overview"] = str(error)
    with contextlib.suppress(DeployError):
        known["open_paths"] = _open_paths(source.url)
    if probes and known["health_status"] == 200:
        known["probe"] = _probe(source)
    return Facts(**known)


def machine() -> Machine:
    """Return the facts about this machine."""
    memory, cache = psutil.virtual_memory(), cache_folder()
    return Machine(
        open_files_max=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        cores=available_cores(),
        memory_bytes=memory.total,
        memory_free_bytes=memory.available,
        swap_used_bytes=psutil.swap_memory().used,
        shared_memory_free_bytes=_free(Path("/dev/shm")),
        cache_free_bytes=None if cache is None else _free(cache),
        gpus=gpus.look(),
    )


def loose_files(folder: Path) -> tuple[str, ...]:
    """Return the files in a run folder that other users could read or write, if the folder let them in."""
    loose = []
    with contextlib.suppress(OSError):
        if stat.S_IMODE(folder.stat().st_mode) & 0o077:
            loose.append(str(folder))
        for path in folder.iterdir():
            if path.suffix in (".key", ".keys") and stat.S_IMODE(path.stat().st_mode) & 0o077:
                loose.append(str(path))
    return tuple(loose)


def _free(folder: Path) -> int | None:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _local(port: int) -> Path | None:
    return next((folder for folder, running in running_clusters().items() if running.port == port), None)


def _status(folder: Path) -> Mapping[str, Any] | None:
    try:
        return next((reply.status for reply in ask(control_path(folder), Command("status"))), None)
    except DeployError:
        return None


def _json(answer: Any) -> dict[str, Any]:
    try:
        found = answer.json()
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _open_paths(url: str) -> tuple[str, ...]:
    stranger = Source(url, key="")
    try:
        return tuple(
            path for path in ("/v1/models", "/metrics", "/ui/api/overview") if stranger.fetch(path).is_success
        )
    finally:
        stranger.close()


def _probe(source: Source) -> Probe:
    # Of its own each time: what is found must be what the first of the two left.
    prompt = f"{uuid.uuid4()} " + "one two three four " * (_PROBE_WORDS // 4)
    body = {"prompt": prompt, "max_tokens": PROBE_TOKENS, "temperature": 0}
    seconds: list[float] = []
    try:
        for _ in range(2):
            answer, taken = source.timed("/v1/completions", body)
            if answer.status_code != 200:
                said = _json(answer).get("error", {}).get("message", answer.text[:200])
                return Probe(answer.status_code, str(said), tuple(seconds))
            seconds.append(taken)
    except DeployError as error:
        return Probe(0, str(error), tuple(seconds))
    usage = _json(answer).get("usage", {})
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Probe(200, "", tuple(seconds), cached, usage.get("prompt_tokens", 0))
