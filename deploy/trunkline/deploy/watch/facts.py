"""Gather facts about a cluster for `trunkline top` and `doctor`: from its router over HTTP, and from this machine.

A question that failed is a fact, too.
"""

from __future__ import annotations

import contextlib
import resource
import shutil
import stat
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import psutil

from trunkline.deploy.config import machine
from trunkline.deploy.config.machine import Gpus, available_cores, cache_folder
from trunkline.deploy.errors import DeployError
from trunkline.deploy.supervisor.control import ask
from trunkline.deploy.supervisor.members import Command
from trunkline.deploy.supervisor.run_folder import CONTROL_SOCKET, client_headers, running_clusters
from trunkline.deploy.watch.stores import Trial, remote_urls, trial
from trunkline.router.tenancy.auth import is_loopback

_TIMEOUT_S: Final = 10.0
HISTORY_S: Final = 120
SESSIONS_MAX: Final = 100


class WatchError(DeployError):
    """The server cannot be reached, or refuses to answer."""


@dataclass(frozen=True)
class Look:
    """The figures of a cluster at one moment, as `/ui/api/…` gives them (docs/dashboard.md)."""

    overview: Mapping[str, Any]
    history: Mapping[str, Any] = field(default_factory=dict)
    sessions: tuple[Mapping[str, Any], ...] = ()
    requests: tuple[Mapping[str, Any], ...] = ()


class Source:
    """A connection to a router."""

    def __init__(self, url: str, api_key_file: str = "", *, key: str | None = None) -> None:
        """Connect to a router.

        Args:
            url: Its address.
            api_key_file: File with a key of role admin; "" to find a key as other commands do.
            key: A key to send instead; "" to send none.

        Raises:
            DeployError: The address or the key cannot be one, or the key's file cannot be read.
        """
        self.url = url.rstrip("/")
        if key is None:
            headers = client_headers(self.url, api_key_file)
        else:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            _ = urlsplit(self.url).port  # what httpx takes and the checks cannot read
            self._client = httpx.Client(base_url=self.url, headers=headers, timeout=_TIMEOUT_S)
        except (httpx.InvalidURL, ValueError) as error:
            raise WatchError(f"{self.url} is no address of a server: {error}") from error

    def close(self) -> None:
        """Disconnect."""
        self._client.close()

    def look(self) -> Look:
        """Return the figures that `top` shows; without sessions and requests if the router does not give them now.

        Raises:
            WatchError: The server does not answer, or refuses the key.
        """
        overview = self.get("/ui/api/overview")
        history = self.get(f"/ui/api/history?seconds={HISTORY_S}")
        lists: list[tuple[Mapping[str, Any], ...]] = [(), ()]
        for index, path in enumerate((f"/ui/api/sessions?limit={SESSIONS_MAX}", "/ui/api/requests")):
            with contextlib.suppress(WatchError):
                found = self.get(path)
                rows = (
                    found
                    if isinstance(found, list)
                    else next(iter(v for v in found.values() if isinstance(v, list)), [])
                )
                lists[index] = tuple(rows)
        return Look(overview, history, *lists)

    def get(self, path: str) -> Any:
        """Return the JSON at a path.

        Raises:
            WatchError: There is no JSON at the path; the text says why.
        """
        answer = self.fetch(path)
        if answer.status_code in (401, 403):
            raise WatchError(
                f"{self.url} refuses {path.partition('?')[0]}: {_message(answer)}. A key of role admin is needed: "
                "give it with --api-key-file, or in TRUNKLINE_API_KEY"
            )
        if answer.status_code != 200:
            raise WatchError(f"{self.url}{path} answers {answer.status_code}: {_message(answer)}")
        try:
            return answer.json()
        except ValueError as error:
            raise WatchError(f"{self.url}{path} does not answer in JSON: is that a Trunkline router?") from error

    def fetch(self, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        """Return the answer to a GET, or to a POST of this body.

        Raises:
            WatchError: The server does not answer.
        """
        try:
            return self._client.get(path) if body is None else self._client.post(path, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise WatchError(
                f"{self.url} does not answer ({error or type(error).__name__}); is the cluster running?"
            ) from error


def _message(answer: httpx.Response) -> str:
    try:
        error = answer.json()["error"]
        return str(error["message"]).rstrip(".")
    except (ValueError, KeyError, TypeError):
        return answer.text[:200] or answer.reason_phrase


PROBE_TOKENS: Final = 4
_PROBE_WORDS: Final = 96
"""Number of words in the prompt of the probe: more tokens than a chunk has, because after a restart KV is found in
whole chunks."""


@dataclass(frozen=True)
class Probe:
    """The result of the same completion, requested twice."""

    status: int
    """Status of the answer; 0: none came."""
    said: str
    """The error, if the status is not that of a success."""
    seconds: tuple[float, ...] = ()
    cached: int = 0
    """Number of prompt tokens that were cached at the second request."""
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
    """All facts about a deployment. A fact that is None could not be found out, or does not apply."""

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
    """Why the overview is missing; "" if it is there."""
    records: Mapping[str, Any] | None = None
    """The state of the store of records, as the router gives it."""
    open_paths: tuple[str, ...] = ()
    """Paths that answer without a key, although they need one where strangers can connect."""
    probe: Probe | None = None
    kind: str = ""
    """The part of a cluster that runs on this machine (`Running.kind`); "": not known."""
    status: Mapping[str, Any] | None = None
    """The status that the supervisor of a cluster on this machine gives."""
    loose_files: tuple[str, ...] = ()
    """Files with secrets in the run folder that other users may read or write."""
    machine: Machine | None = None
    trials: tuple[Trial, ...] = ()
    """What became of trials of the remote tiers of a cluster on this machine."""


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
        "machine": machine_facts(),
    }
    local = _local(address.port or 80) if known["is_loopback"] else None
    if local is not None:
        folder, known["kind"] = local
        known["status"] = _status(folder)
        known["loose_files"] = loose_files(folder)
        known["trials"] = tuple(map(trial, remote_urls(folder)))
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
        known["records"] = source.get("/ui/api/records")
    with contextlib.suppress(DeployError):
        known["open_paths"] = _open_paths(source.url)
    if probes and known["health_status"] == 200:
        known["probe"] = _probe(source)
    return Facts(**known)


def machine_facts() -> Machine:
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
        gpus=machine.find_gpus(),
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


def _local(port: int) -> tuple[Path, str] | None:
    """Return the run folder of what serves on a port of this machine, and its kind."""
    found = running_clusters().items()
    return next(((folder, running.kind) for folder, running in found if running.port == port), None)


def _status(folder: Path) -> Mapping[str, Any] | None:
    try:
        return next((reply.status for reply in ask(folder / CONTROL_SOCKET, Command("status"))), None)
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
            begun = time.monotonic()
            answer = source.fetch("/v1/completions", body)
            if answer.status_code != 200:
                said = _json(answer).get("error", {}).get("message", answer.text[:200])
                return Probe(answer.status_code, str(said), tuple(seconds))
            seconds.append(time.monotonic() - begun)
    except DeployError as error:
        return Probe(0, str(error), tuple(seconds))
    usage = _json(answer).get("usage", {})
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Probe(200, "", tuple(seconds), cached, usage.get("prompt_tokens", 0))
