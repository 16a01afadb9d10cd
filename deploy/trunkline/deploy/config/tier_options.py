"""Parse and check `--disk-tier` and `--remote-tier` before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trunkline.deploy.config.sizes import parse_bytes
from trunkline.deploy.errors import UserError
from trunkline.kvstore.remote_stores import RemoteUrlError, find_store


@dataclass(frozen=True)
class DiskOption:
    """The value of `--disk-tier`: `PATH:SIZE`, `SIZE` or `0`."""

    size_bytes: int
    """Of all workers together; 0: no disk tier."""
    path: Path | None = None
    """None: below the user's cache folder."""


def parse_disk_tier(text: str) -> DiskOption:
    """Return the value of `--disk-tier`.

    Raises:
        UserError: The text has none of the three forms.
    """
    given = text.strip()
    if given == "0":
        return DiskOption(0)
    path, colon, size = given.rpartition(":")
    if not colon:
        if "/" in given or given.startswith("~"):
            raise UserError(f"--disk-tier is {text!r}, which says no size; write PATH:SIZE, such as {given}:20GiB")
        return DiskOption(parse_bytes(given, "--disk-tier"))
    if not size.strip():
        raise UserError(f"--disk-tier is {text!r}, which says no size; write PATH:SIZE, such as {given}20GiB")
    if not path:
        raise UserError(f"--disk-tier is {text!r}; write PATH:SIZE, or SIZE alone for a folder of our own, or 0")
    if size.strip() == "0":
        raise UserError(f"--disk-tier is {text!r}; to have no disk tier, write 0 alone")
    return DiskOption(parse_bytes(size, "--disk-tier"), Path(path).expanduser().absolute())


def check_remote_url(url: str) -> None:
    """Check that this is the URL of a store that can be a remote tier.

    Raises:
        UserError: It is not. The text says what is allowed, and does not show the password.
    """
    try:
        find_store(url)
    except RemoteUrlError as error:
        raise UserError(f"--remote-tier is {redacted(url)!r}; {error}") from None


def redacted(url: str) -> str:
    """Return `url` for people and logs, without anything that may be a password, even if it is malformed."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "", url
    address = rest.partition("?")[0].partition("#")[0]
    if address.count("@") != rest.count("@"):  # a password with ? or #, or one in the query
        return f"{scheme}{separator}***"
    credentials, at, host = address.rpartition("@")
    user, colon, _ = credentials.partition(":")
    hidden = f"{user if colon and separator else ''}:***@" if at else ""
    return f"{scheme}{separator}{hidden}{host}"
