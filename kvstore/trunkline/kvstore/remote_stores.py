"""The kinds of stores that can be a remote tier, by the scheme of their URLs.

The launcher checks `--remote-tier` with this table before anything starts, and workers open the store that it
names. To add a kind of store, add an entry. This module imports no client of a store, because the launcher needs
none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult, parse_qs, urlsplit


@dataclass(frozen=True)
class RemoteStore:
    """A kind of store that can be a remote tier."""

    form: str
    """The form of the store's URLs, for messages."""
    tier: str
    """`MODULE:NAME` of the function that makes the tier in a worker. Its arguments are the URL, the bytes of a
    chunk's shard, the `RecordKeeper` and the seconds without use after which a chunk is forgotten (0: never); it
    returns a `SharedTier`."""
    problem: Callable[[SplitResult], str]
    """Function that returns why a URL with the store's scheme does not have the right form; "": it has. Its result
    never quotes a password."""


class RemoteUrlError(ValueError):
    """A URL that names no known kind of store. The message does not contain it, because it may hold a password."""


def find_store(url: str) -> RemoteStore:
    """Return the kind of store that a URL names.

    Raises:
        RemoteUrlError: There is no such kind, or the URL is malformed.
    """
    try:
        parts = urlsplit(url)
        _ = parts.hostname, parts.port
    except ValueError:  # its message may quote the address
        raise RemoteUrlError("which is no URL with a host and a port") from None
    store = REMOTE_STORES.get(parts.scheme)
    if store is None:
        raise RemoteUrlError(f"allowed are {', '.join(known.form for known in REMOTE_STORES.values())}")
    if problem := store.problem(parts):
        raise RemoteUrlError(problem)
    return store


def _network_problem(parts: SplitResult) -> str:
    database = parts.path.removeprefix("/")
    if parts.hostname and _is_number(database or "0"):
        return ""
    return f"write {parts.scheme}://HOST:PORT/DB, DB being a number, such as {parts.scheme}://localhost:6379/0"


def _socket_problem(parts: SplitResult) -> str:
    databases = parse_qs(parts.query, keep_blank_values=True).get("db", ["0"])
    if not parts.hostname and len(parts.path) > 1 and all(map(_is_number, databases)):
        return ""
    return "write unix:///PATH?db=DB, PATH being a socket of this host and DB a number, such as unix:///run/redis.sock?db=0"


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


_REDIS: Final = "trunkline.worker.tiers.remote_tier:RedisTier"
REMOTE_STORES: Final[dict[str, RemoteStore]] = {
    **{
        scheme: RemoteStore(f"{scheme}://HOST:PORT/DB", _REDIS, _network_problem)
        for scheme in ("redis", "rediss", "valkey", "valkeys")  # the longer ones: over TLS
    },
    "unix": RemoteStore("unix:///PATH?db=DB", _REDIS, _socket_problem),
}
