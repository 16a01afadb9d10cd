"""The key that all clients of a server share, as it is given in a file or in the environment.

Never on the command line, which every user of a machine can read.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from trunkline.deploy.errors import UserError
from trunkline.router.tenancy.auth import hash_key

VARIABLE: Final = "TRUNKLINE_API_KEY"
_KEY: Final = re.compile(r"[\x21-\x7e]{16,512}")
_FILE_BYTES_MAX: Final = 4096


def server_key(api_key_file: str) -> str:
    """Return the one key that a server's clients share; "" if there is none.

    Args:
        api_key_file: The file with the key; "" to look in the environment.

    Raises:
        UserError: The file cannot be read, or does not hold a key.
    """
    key, where = given_key(api_key_file)
    if key and not _KEY.fullmatch(key):  # it is not shown
        raise UserError(
            f"{where} is no key: 16 to 512 printable ASCII characters without spaces are; `trunkline key draw` "
            "makes one"
        )
    return key


def server_key_digest(api_key_file: str) -> str:
    """Return the digest of the shared key, as routers are told it; "" if there is none.

    Raises:
        UserError: As `server_key`.
    """
    key = server_key(api_key_file)
    return hash_key(key) if key else ""


def given_key(api_key_file: str) -> tuple[str, str]:
    """Return the key, "" if there is none, and where it was found: in the file, or else in the environment.

    Raises:
        UserError: The file cannot be read, or is empty.
    """
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
