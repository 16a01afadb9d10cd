"""Make files with keys where they are missing, and hand to each host the keys that it needs.

Each kind of unit gets the secrets of its own roles only (`wire_keys.PARTS`): a router's host cannot pass for a
worker. API keys are in their file as digests; those that are drawn here are told once, and kept nowhere.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from trunkline.deploy.config.tenant_options import check_tenants
from trunkline.deploy.errors import UserError
from trunkline.deploy.launch.fileformat import Security
from trunkline.deploy.launch.plan import API_KEYS, WIRE_KEYS
from trunkline.deploy.launch.records import launcher_folder
from trunkline.router.config import NO_LIMITS
from trunkline.router.tenancy.auth import Role, draw_key, hash_key
from trunkline.router.tenancy.tenant_file import write_private
from trunkline.runtime import wire_keys

_NEW_KEYS: Final = (("operators", Role.ADMIN), ("main", Role.USER))


def contents(security: Security, cluster: str, base: Path, say: Callable[[str], None]) -> dict[str, bytes]:
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
