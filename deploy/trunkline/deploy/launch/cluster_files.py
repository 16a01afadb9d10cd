"""The files of a cluster on the launcher's machine: its description, the record of what was launched, and keys.

    cluster.yaml                      what should run
    <state>/<cluster>/_launcher/      0700; no host's name begins with _
        launched.json                 what was launched, and how its hosts are reached: commands need no file
        lock                          held while a command starts or stops something
        wire.key                      unless cluster.yaml names another

Each kind of unit gets the secrets of its own roles only (`wire_keys.PARTS`): a router's host cannot pass for a
worker. API keys are in their file as digests; those that are drawn here are shown once, and kept nowhere.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from trunkline.deploy.config.option_values import check_tenants
from trunkline.deploy.errors import DeployError, UserError
from trunkline.deploy.launch.document import load
from trunkline.deploy.launch.fileformat import NAME, Host, Security, read
from trunkline.deploy.launch.folders import private_folder, state_base, write_private
from trunkline.deploy.launch.plan import API_KEYS, WIRE_KEYS, Plan, make_plan
from trunkline.deploy.launch.resources import Facts
from trunkline.deploy.launch.unit_options import command_rules
from trunkline.router.config import NO_LIMITS
from trunkline.router.tenancy.auth import KeyRole, draw_key, hash_key
from trunkline.runtime import wire_keys

DEFAULT_FILE: Final = Path("cluster.yaml")
_SUFFIXES: Final = (".yaml", ".yml")


class Loaded:
    """A file of a cluster, loaded."""

    def __init__(self, path: Path) -> None:
        """Load a file.

        Raises:
            UserError: It cannot be read, or is wrong.
        """
        self.path = path.absolute()
        self.document = load(path)
        self.cluster = read(self.document)
        self.name = self.cluster.name or _name_from(path)

    def plan(self, facts: Mapping[str, Facts] | None = None) -> Plan:
        """Return the plan for the file.

        Raises:
            UserError: The cluster cannot work as the file describes it.
        """
        return make_plan(self.document, self.cluster, command_rules(), facts, self.name, self.path.parent)


def is_file(word: str) -> bool:
    """Return whether a word on the command line means a file, and not a unit."""
    return word.endswith(_SUFFIXES) or "/" in word


def split(words: list[str]) -> tuple[Path | None, list[str]]:
    """Return the path of the file if the first word names one, else None, and the names of units in the other
    words."""
    if words and is_file(words[0]):
        return Path(words[0]), words[1:]
    return None, words


def launched(path: Path | None) -> Launched:
    """Return the cluster that a command is about: as it was launched, or else as the file describes it.

    Raises:
        UserError: It is not clear which cluster is meant.
    """
    if path is None and DEFAULT_FILE.is_file():
        path = DEFAULT_FILE
    if path is not None:
        loaded = Loaded(path)
        return load_record(loaded.name) or launched_from(loaded.plan(), loaded.path)
    known = all_launched()
    running = [each for each in known if not each.stopped] or known
    if not running:
        raise UserError(
            "nothing was launched from here; name a file, such as `trunkline launch status cluster.yaml`"
        )
    if len(running) > 1:
        files = ", ".join(each.file for each in running)
        raise UserError(f"several clusters were launched; say which by its file: {files}")
    return running[0]


def _name_from(path: Path) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", path.stem.lower()).strip("-")[:40].strip("-")
    if not NAME.fullmatch(name):
        raise UserError(f"{path}: its name cannot name the cluster; say `name:` in it")
    return name


_FOLDER: Final = "_launcher"
_FILE: Final = "launched.json"


class Launched(msgspec.Struct, frozen=True):
    """A cluster that was launched."""

    name: str
    file: str
    """Absolute path of the cluster's file."""
    hosts: dict[str, Host]
    units: dict[str, str]
    """The host of each unit. Routers come last."""
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


def save_record(launched: Launched) -> None:
    """Write the record of a cluster."""
    write_private(launcher_folder(launched.name) / _FILE, msgspec.json.encode(launched))


def load_record(cluster: str) -> Launched | None:
    """Return the record of the cluster with this name; None if there is none."""
    try:
        return msgspec.json.decode((state_base("") / cluster / _FOLDER / _FILE).read_bytes(), type=Launched)
    except (OSError, msgspec.MsgspecError):
        return None


def all_launched() -> list[Launched]:
    """Return the records of all clusters that were launched from this account."""
    found = [load_record(path.parents[1].name) for path in sorted(state_base("").glob(f"*/{_FOLDER}/{_FILE}"))]
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


_NEW_KEYS: Final = (("operators", KeyRole.ADMIN), ("main", KeyRole.USER))


def key_contents(security: Security, cluster: str, base: Path, say: Callable[[str], None]) -> dict[str, bytes]:
    """Return the contents of the key files for hosts, by their names there.

    Args:
        base: The folder of the cluster's file.
        say: Called with a sentence about each file that was made.

    Raises:
        UserError: A file cannot be used.
    """
    found: dict[str, bytes] = {}
    if not security.plain_tcp:
        keys = _wire_keys(security, cluster, base, say)
        for kind, name in WIRE_KEYS.items():
            part = keys.part(wire_keys.PARTS[kind])
            found[name] = msgspec.json.format(msgspec.json.encode(part), indent=2) + b"\n"
    if security.api_keys:
        found[API_KEYS] = _api_keys(base / Path(security.api_keys).expanduser(), say)
    return found


def _wire_keys(security: Security, cluster: str, base: Path, say: Callable[[str], None]) -> wire_keys.WireKeys:
    path = (
        base / Path(security.wire_keys).expanduser()
        if security.wire_keys
        else launcher_folder(cluster) / "wire.key"
    )
    try:
        if not path.exists():
            wire_keys.write(wire_keys.generate(), path)
            say(f"Made the keys of the cluster's processes: {path}")
        return wire_keys.load(path)
    except wire_keys.WireKeysError as error:
        raise UserError(f"security.wire_keys: {error}") from error


def _api_keys(path: Path, say: Callable[[str], None]) -> bytes:
    try:
        if not path.exists():
            drawn = [(tenant, role, draw_key()) for tenant, role in _NEW_KEYS]
            tenants = {
                tenant: {"keys": [{"sha256": hash_key(key), "name": "launch", "role": role.value}]}
                for tenant, role, key in drawn
            }
            write_private(path, msgspec.json.format(msgspec.json.encode({"tenants": tenants}), indent=2) + b"\n")
            say(f"Made {path} with these API keys, which are shown only now:")
            for tenant, role, key in drawn:
                say(f"  {role.value:<6} {key}   (tenant {tenant})")
        check_tenants(str(path), NO_LIMITS)
        return path.read_bytes()
    except UserError as error:
        raise UserError(f"security.api_keys: {error}") from error
    except OSError as error:
        raise UserError(f"security.api_keys: {path}: {error.strerror or error}") from error
