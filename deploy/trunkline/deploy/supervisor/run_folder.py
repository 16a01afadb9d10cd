"""The folder of one running cluster, how commands find it, and the admin key in it.

    <tmp>/trunkline-XXXXXXXX/     0700: a process that reaches the sockets controls the cluster
        lock                      held by flock while the supervisor lives
        *.json                    one configuration per process
        cluster.json              what runs here, for commands
        members.json              the groups, for routers
        admin.key                 drawn at the start, so that commands of the same user need no key
        g0-plan, g0-report, …     ipc sockets
        control, status           the supervisor's: commands come in, and status reports of children
    <cache folder>/running/<name of the run folder>     a line: the run folder's path

A supervisor removes its folder when it exits. One that was killed cannot, so every start removes folders whose
lock no process holds: unlike a process id, a lock is released by the kernel and never reused. The file in the
cache folder is only a pointer, for run folders that are not where a command would make its own; pointers to
clusters that have ended are removed when a command meets them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from trunkline.deploy.config.machine import DEFAULT_URL, cache_folder
from trunkline.deploy.config.option_values import check_range, given_key
from trunkline.deploy.errors import DeployError, UserError
from trunkline.router.tenancy.auth import draw_key, hash_key, is_loopback
from trunkline.router.tenancy.tenant_file import write_private

CONTROL_SOCKET: Final = "control"
STATUS_SOCKET: Final = "status"
MEMBERS_FILE: Final = "members.json"
_PREFIX: Final = "trunkline-"
_LOCK: Final = "lock"
_SOCKET_PATH_BYTES_MAX: Final = 107  # sockaddr_un.sun_path without its terminating zero
_SOCKET_NAME_BYTES_MAX: Final = 24
_UNLOCKED_SECONDS_MAX: Final = 60.0
"""Age in seconds above which a run folder without a lock counts as that of a dead supervisor. Below it, the
supervisor may be about to make the lock."""


def base_folder() -> Path:
    """Return the folder in which run folders are made: the one for temporary files, or `/tmp` if its path is too
    long for sockets."""
    base = Path(tempfile.gettempdir())
    longest = len(os.fsencode(base)) + len(f"/{_PREFIX}12345678/") + _SOCKET_NAME_BYTES_MAX
    return base if longest <= _SOCKET_PATH_BYTES_MAX else Path("/tmp")


def remove_stale(base: Path) -> list[Path]:
    """Remove the run folders below `base` whose supervisors are dead, and return them."""
    removed = []
    for folder in base.glob(f"{_PREFIX}????????"):
        with contextlib.suppress(OSError):  # another user's, or removed by another process meanwhile
            if not is_run_folder(folder) or not is_stale(folder):
                continue
            shutil.rmtree(folder)
            removed.append(folder)
    return removed


@contextlib.contextmanager
def run_folder(base: Path | None = None) -> Iterator[Path]:
    """Make a new, private, locked run folder, and remove it with its contents at the end.

    Raises:
        UserError: The folder cannot be made.
    """
    try:
        base = base or base_folder()
        remove_stale(base)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    except OSError as error:
        where = base or "the folders for temporary files"
        raise UserError(
            f"no folder for the cluster's sockets can be made in {where}: {error.strerror}; set TMPDIR to a "
            "folder that can be written"
        ) from error
    # Locked before it gets its name, so that a lock file that can be seen is a lock that is held.
    unnamed = folder / f"{_LOCK}.new"
    lock = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(folder / _LOCK)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def is_run_folder(path: Path) -> bool:
    """Return whether this is a run folder of this user."""
    if len(path.name) != len(_PREFIX) + 8 or not path.name.startswith(_PREFIX) or path.is_symlink():
        return False
    return path.is_dir() and path.stat().st_uid == os.getuid()


def is_stale(folder: Path) -> bool:
    """Return whether the supervisor of a run folder is dead.

    Raises:
        OSError: The supervisor's state cannot be found out, or the folder is gone.
    """
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return time.time() - folder.stat().st_mtime > _UNLOCKED_SECONDS_MAX
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


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
    """The supervisor's process id."""
    kind: str = "cluster"
    """"cluster", or the part that runs here: "group", "workers" or "router" (`node_settings.Kind`)."""


def describe(folder: Path, running: Running) -> None:
    """Write what runs here, or what has changed about it. A reader sees either the old description or the new."""
    new = folder / f"{_FILE}.new"
    new.write_bytes(msgspec.json.encode(running))
    new.replace(folder / _FILE)


@contextlib.contextmanager
def announced(folder: Path, running: Running) -> Iterator[None]:
    """Let commands find the cluster of this run folder. A pointer that cannot be written is no reason to fail."""
    describe(folder, running)
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
        UserError: There is no such port.
    """
    return _chosen(running_clusters(), port)


def _chosen(clusters: Mapping[Path, Running], port: int | None, way: str = "--port") -> tuple[Path, Running]:
    check_range("--port", port, 1, 65535)
    ports = ", ".join(str(running.port) for running in clusters.values())
    if not clusters:
        raise ClusterNotFoundError("no cluster of yours runs on this machine; `trunkline serve` starts one")
    chosen = [(folder, running) for folder, running in clusters.items() if port in (None, running.port)]
    if not chosen:
        raise ClusterNotFoundError(f"no cluster of yours serves on port {port}; there are some on {ports}")
    if len(chosen) > 1:
        advice = f"say which with {way}" if port is None else "stop one of them by its Ctrl-C or SIGTERM"
        raise ClusterNotFoundError(f"several clusters run, on ports {ports}; {advice}")
    return chosen[0]


def server_url(port: int | None = None, url: str = "", way: str = "--port") -> str:
    """Return the address of the server that `--port` or `--url` names. If both are left out, it is that of the
    cluster that runs on this machine, or the default address if there is none.

    Args:
        way: How a command says which cluster it means; for the message if there are several.

    Raises:
        ClusterNotFoundError: There is none on this port, or there are several.
        UserError: Both are given, or there is no such port.
    """
    _check_one(port, url)
    if url:
        return url.rstrip("/")
    # Of the parts of a cluster only routers speak HTTP (`trunkline.deploy.config.node_settings.Kind`).
    running = {at: found for at, found in running_clusters().items() if found.kind in ("cluster", "router")}
    return DEFAULT_URL if port is None and not running else _chosen(running, port, way)[1].url


def local_port(port: int | None, url: str) -> int | None:
    """Return the port of the cluster on this machine that `--port` or `--url` names; None if both are left out.

    Raises:
        UserError: Both are given, or the address is not that of a cluster of this machine.
    """
    _check_one(port, url)
    if not url:
        return port
    url = url.rstrip("/")
    for running in running_clusters().values():
        if url == running.url:
            return running.port
    with contextlib.suppress(ValueError):
        address = urlsplit(url)
        if is_loopback(address.hostname or ""):
            return address.port or 80
    raise UserError(f"{url} is no address on this machine; `trunkline top --url {url}` looks at servers elsewhere")


def _check_one(port: int | None, url: str) -> None:
    """Check that a server is named once.

    Raises:
        UserError: It is named by `--port` and by `--url`.
    """
    if url and port is not None:
        raise UserError("--url and --port say the same; give one of them")


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


_ADMIN_FILE: Final = "admin.key"


def client_key(url: str, api_key_file: str = "") -> str:
    """Return the key that a command sends to a server; "" if none is known.

    It comes from the file, else from the environment, else from the run folder of the cluster that serves there.

    Raises:
        UserError: The file cannot be read.
    """
    key, where = given_key(api_key_file)
    if key:
        if not (key.isascii() and key.isprintable()):  # it is not shown
            raise UserError(f"{where} is no key: it has characters that are not printable ASCII")
        return key
    with contextlib.suppress(ValueError):
        address = urlsplit(url)
        if is_loopback(address.hostname or ""):
            return _local_admin_key(address.port or 80)
    return ""


def client_headers(url: str, api_key_file: str = "") -> dict[str, str]:
    """Return the headers that a command sends with each request to a server.

    Raises:
        UserError: As `client_key`.
    """
    key = client_key(url, api_key_file)
    return {"Authorization": f"Bearer {key}"} if key else {}


def make_admin_key(folder: Path) -> None:
    """Draw the admin key of a cluster into its run folder, unless one is there already."""
    path = folder / _ADMIN_FILE
    if not path.exists():
        write_private(path, f"{draw_key()}\n".encode())


def admin_key(folder: Path) -> str:
    """Return the admin key in a run folder; "" if there is none."""
    try:
        return (folder / _ADMIN_FILE).read_text().strip()
    except OSError:
        return ""


def admin_key_digest(folder: Path) -> str:
    """Return the digest of the admin key; "" if there is none."""
    key = admin_key(folder)
    return hash_key(key) if key else ""


def _local_admin_key(port: int) -> str:
    for folder, running in running_clusters().items():
        if running.port == port:
            return admin_key(folder)
    return ""
