"""Where keys come from: a cluster's own at its start, and the one that a command on this machine sends.

Never from the command line, which every user of a machine can read.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from trunkline.deploy.errors import UserError
from trunkline.deploy.supervisor.registry import running_clusters
from trunkline.router.tenancy.auth import draw_key, hash_key, is_loopback
from trunkline.router.tenancy.tenant_file import write_private

VARIABLE: Final = "TRUNKLINE_API_KEY"
_ADMIN_FILE: Final = "admin.key"
_KEY: Final = re.compile(r"[\x21-\x7e]{16,512}")
_FILE_BYTES_MAX: Final = 4096


def server_key(api_key_file: str) -> str:
    """The one key that a server's clients share; "": there is none.

    Args:
        api_key_file: where it is; "": in the environment, if anywhere.

    Raises:
        UserError: it cannot be read, or is no key.
    """
    key, where = _given(api_key_file)
    if key and not _KEY.fullmatch(key):  # it is not shown
        raise UserError(
            f"{where} is no key: 16 to 512 printable ASCII characters without spaces are; `trunkline key draw` "
            "makes one"
        )
    return key


def server_key_digest(api_key_file: str) -> str:
    """Of `server_key`, as routers are told; "": there is none.

    Raises:
        UserError: as `server_key`.
    """
    key = server_key(api_key_file)
    return hash_key(key) if key else ""


def client_key(url: str, api_key_file: str = "") -> str:
    """The key that a command sends to a server; "": none is known.

    From the file, or the environment, or else from the run folder of the cluster here that serves there.

    Raises:
        UserError: the file cannot be read.
    """
    key, _ = _given(api_key_file)
    if key:
        return key
    with contextlib.suppress(ValueError):
        address = urlsplit(url)
        if is_loopback(address.hostname or ""):
            return _local_admin_key(address.port or 80)
    return ""


def client_headers(url: str, api_key_file: str = "") -> dict[str, str]:
    """What a command sends with each request to a server.

    Raises:
        UserError: as `client_key`.
    """
    key = client_key(url, api_key_file)
    return {"Authorization": f"Bearer {key}"} if key else {}


def make_admin_key(folder: Path) -> None:
    """Draw the key of a cluster's own commands, into its run folder; it lasts as long as that."""
    path = folder / _ADMIN_FILE
    if not path.exists():
        write_private(path, f"{draw_key()}\n".encode())


def admin_key(folder: Path) -> str:
    """The key in a run folder; "": there is none."""
    try:
        return (folder / _ADMIN_FILE).read_text().strip()
    except OSError:
        return ""


def admin_key_digest(folder: Path) -> str:
    """Of `admin_key`; "": there is none."""
    key = admin_key(folder)
    return hash_key(key) if key else ""


def _local_admin_key(port: int) -> str:
    for folder, running in running_clusters().items():
        if running.port == port:
            return admin_key(folder)
    return ""


def _given(api_key_file: str) -> tuple[str, str]:
    """The key, and where it was found."""
    if not api_key_file:
        return os.environ.get(VARIABLE, "").strip(), VARIABLE
    try:
        with Path(api_key_file).open("rb") as file:
            text = file.read(_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise UserError(f"--api-key-file {api_key_file}: {error.strerror or error}") from None
    key = text.decode("latin-1").strip()
    if not key:
        raise UserError(f"--api-key-file {api_key_file}: it is empty; a file with one key in one line is wanted")
    return key, f"what is in {api_key_file}"
