"""The key that a command on this machine sends to a server, and the admin key of a cluster that runs here.

Every cluster draws an admin key at its start and keeps it in its run folder. So commands of the same user reach it
without a key being given.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from trunkline.deploy.config.credentials import given_key
from trunkline.deploy.supervisor.registry import running_clusters
from trunkline.router.tenancy.auth import draw_key, hash_key, is_loopback
from trunkline.router.tenancy.tenant_file import write_private

_ADMIN_FILE: Final = "admin.key"


def client_key(url: str, api_key_file: str = "") -> str:
    """Return the key that a command sends to a server; "" if none is known.

    It comes from the file, else from the environment, else from the run folder of the cluster that serves there.

    Raises:
        UserError: The file cannot be read.
    """
    key, _ = given_key(api_key_file)
    if key:
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
