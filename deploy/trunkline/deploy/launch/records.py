"""Records of what was launched, on the launcher's own machine, so that later commands need no file.

<state>/<cluster>/_launcher/      0700; no host's name begins with _
    launched.json                 what was launched, and how its hosts are reached
    lock                          held while a command starts or stops something
    wire.key                      unless the file names another
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from trunkline.deploy.errors import DeployError, UserError
from trunkline.deploy.launch.fileformat import Host
from trunkline.deploy.launch.folders import private_folder, state_base, write_private
from trunkline.deploy.launch.plan import Plan

_FOLDER: Final = "_launcher"
_FILE: Final = "launched.json"
_SOCKET_FOLDER_BYTES_MAX: Final = 40
"""ssh adds some sixty bytes, and a socket's path has 107."""


class Launched(msgspec.Struct, frozen=True):
    """A cluster that was launched."""

    name: str
    file: str
    """Absolute path."""
    hosts: dict[str, Host]
    units: dict[str, str]
    """Host by unit, routers last."""
    routers: list[str]
    groups: dict[str, list[str]]
    urls: list[str]
    stop_s: float
    stopped: bool = False


class BusyError(DeployError):
    """Another command changes the cluster."""


def launched_from(plan: Plan, file: Path) -> Launched:
    """Return the record of a plan."""
    return Launched(
        name=plan.name,
        file=str(file),
        hosts=dict(plan.hosts),
        units={unit.name: unit.host for unit in plan.units},
        routers=[unit.name for unit in plan.units if unit.kind == "router"],
        groups={name: list(units) for name, units in plan.groups.items()},
        urls=list(plan.urls),
        stop_s=plan.stop_s,
    )


def launcher_folder(cluster: str) -> Path:
    """Return the launcher's folder of a cluster; make it if it does not exist.

    Raises:
        UserError: It cannot be made.
    """
    path = state_base("") / cluster / _FOLDER
    try:
        return private_folder(path)
    except OSError as error:
        raise UserError(f"{path} cannot be used: {error.strerror or error}; set XDG_STATE_HOME") from error


def save(launched: Launched) -> None:
    """Write the record of a cluster."""
    write_private(launcher_folder(launched.name) / _FILE, msgspec.json.encode(launched))


def load(cluster: str) -> Launched | None:
    """Return the record of the cluster with this name; None if there is none."""
    try:
        return msgspec.json.decode((state_base("") / cluster / _FOLDER / _FILE).read_bytes(), type=Launched)
    except (OSError, msgspec.MsgspecError):
        return None


def all_launched() -> list[Launched]:
    """Return the records of all clusters that were launched from this account."""
    found = [load(path.parents[1].name) for path in sorted(state_base("").glob(f"*/{_FOLDER}/{_FILE}"))]
    return [launched for launched in found if launched is not None]


@contextlib.contextmanager
def alone(cluster: str) -> Iterator[None]:
    """Keep other launchers of this account from changing the cluster meanwhile.

    Raises:
        BusyError: Another launcher changes it.
    """
    descriptor = os.open(launcher_folder(cluster) / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BusyError(
                f"another `trunkline launch` is starting or stopping {cluster}; wait for it"
            ) from error
        yield
    finally:
        os.close(descriptor)


def socket_folder() -> Path | None:
    """Return the folder for ssh connections that later commands share; None if its path would be too long."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    path = Path(runtime) / "trunkline-ssh" if os.path.isabs(runtime) else state_base("") / "ssh"
    if len(os.fsencode(path)) > _SOCKET_FOLDER_BYTES_MAX:
        return None
    try:
        return private_folder(path)
    except OSError:
        return None
