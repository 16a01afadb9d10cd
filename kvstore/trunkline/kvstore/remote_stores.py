"""The kinds of stores that can be a remote tier, by the scheme of their URLs.

The launcher checks `--remote-tier` with this table before anything starts, and workers open the store that it
names. Other packages add kinds of stores by entry points of the group `trunkline.tiers`: the name is the scheme,
the object a `RemoteStore` (docs/remote-stores.md). This module imports no client of a store, because the launcher
needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Final, NamedTuple, Protocol
from urllib.parse import SplitResult, parse_qs, parse_qsl, urlsplit
from uuid import uuid4

ENTRY_POINTS: Final = "trunkline.tiers"
CONNECT_S: Final = 1.0
"""Seconds in which a store must accept a connection."""
_TRIAL: Final = b"a trial"
_TRIAL_S: Final = 60.0
ANSWER_S: Final = 3.0
"""Seconds to wait for a store's next bytes. A chunk is some megabytes; a store that takes longer for one is of no
use."""


class Place(NamedTuple):
    """The place of a value."""

    chunk: str
    """Identifies the chunk: letters, digits, `-` and `/`. All parts of a chunk have the same."""
    part: str
    """Identifies the part of the chunk that the value is: letters, digits and `-`."""


class ChunkStore(Protocol):
    """A store of chunks for a remote tier. It stores bytes under names and knows nothing of what they are: the
    tier above it makes and verifies checksums, cuts and joins parts, and waits out outages.

    Several threads call it at the same time. A value that was written whole is read back whole or not at all;
    besides that the store may lose values at any time. Every method returns or raises within some seconds, and
    raises OSError if the store cannot be reached or refuses; the text shows no password.
    """

    def write(self, values: Sequence[tuple[Place, bytes]], kept_s: Sequence[float]) -> None:
        """Store values, in place of older ones.

        Args:
            kept_s: For each value, the seconds without use after which the store may forget it; 0: never. A
                shorter time than the one that an earlier use gave changes nothing.
        """

    def read(self, places: Sequence[Place], kept_s: float) -> Sequence[bytes | memoryview | None]:
        """Return the values; None for those that are not there. This is a use of the chunks."""

    def count(self, chunks: Sequence[str], parts: Sequence[str], kept_s: float) -> int:
        """Return how many of the first chunks have all of these parts. This is a use of those chunks.

        It may be more where a chunk among them is gone: then a read of it finds nothing."""

    def parts(self, chunk: str) -> Sequence[str]:
        """Return the names of the parts of a chunk that are stored."""

    def delete(self, chunks: Sequence[str]) -> None:
        """Delete all parts of chunks; those that are not there are left out."""

    def close(self) -> None:
        """End all connections."""


@dataclass(frozen=True)
class RemoteStore:
    """A kind of store that can be a remote tier."""

    form: str
    """The form of the store's URLs, for messages."""
    store: str
    """`MODULE:NAME` of the function that opens the store in a worker. Its argument is the URL; it returns a
    `ChunkStore` without waiting for the store to be reachable, and raises ValueError for a URL that cannot be
    used."""
    problem: Callable[[SplitResult], str]
    """Function that returns why a URL with the store's scheme does not have the right form; "": it has. Its result
    never quotes a password."""
    needs: str = ""
    """Module that the store's client is; "": one that is always installed."""
    extra: str = ""
    """What to install for `needs`."""
    keeps_records: bool = False
    """Whether `trunkline.kvstore.records` can use the same server."""

    @property
    def missing(self) -> str:
        """Why the store cannot be used on this machine; "": it can."""
        if not self.needs or find_spec(self.needs) is not None:
            return ""
        return f"{self.form} needs {self.needs}, which is not installed here: pip install '{self.extra}'"

    def open(self, url: str) -> ChunkStore:
        """Return the store that a URL names, without connecting yet.

        Raises:
            ValueError: The URL can never be used.
        """
        module, _, name = self.store.partition(":")
        store: ChunkStore = getattr(import_module(module), name)(url)
        return store


def try_out(store: ChunkStore) -> None:
    """Write a few bytes, read them and delete them again, as a worker would.

    Raises:
        OSError: One of these is not possible; the text says which, and why.
    """
    place = Place(f"trial/{uuid4().hex}", "0-1")
    done = "written"
    try:
        store.write([(place, _TRIAL)], [_TRIAL_S])
        done = "read"
        found = store.read([place], _TRIAL_S)[0]
        done = "deleted"
        store.delete([place.chunk])
    except OSError as error:
        raise OSError(f"nothing can be {done}: {error}") from error
    if found is None or bytes(found) != _TRIAL:
        raise OSError("what was written is not there when it is read")


class RemoteUrlError(ValueError):
    """A URL that names no known kind of store. The message does not contain it, because it may hold a password."""


def find_store(url: str, *, for_records: bool = False) -> RemoteStore:
    """Return the kind of store that a URL names.

    Args:
        for_records: Only stores count that can keep records, too.

    Raises:
        RemoteUrlError: There is no such kind, the URL is malformed, or the package that has the kind is broken.
    """
    try:
        parts = urlsplit(url)
        _ = parts.hostname, parts.port
    except ValueError:  # its message may quote the address
        raise RemoteUrlError("which is no URL with a host and a port") from None
    known = {scheme: kind for scheme, kind in REMOTE_STORES.items() if kind.keeps_records or not for_records}
    store = known.get(parts.scheme) or (None if for_records else _installed(parts.scheme))
    if store is None:
        forms = [*(kind.form for kind in known.values()), *(() if for_records else _installed_schemes())]
        raise RemoteUrlError(f"allowed are {', '.join(forms)}")
    if problem := store.problem(parts):
        raise RemoteUrlError(problem)
    return store


def _installed_schemes() -> Iterator[str]:
    for point in entry_points(group=ENTRY_POINTS):
        yield f"{point.name}://… (of {point.dist.name if point.dist else point.value})"


def _installed(scheme: str) -> RemoteStore | None:
    """Return the kind of store that another package has for a scheme; None: no package has one."""
    found = sorted(entry_points(group=ENTRY_POINTS, name=scheme), key=lambda point: point.value)
    if not found:
        return None
    try:
        store = found[0].load()
    except Exception as error:  # whatever the package's code does when it is imported
        raise RemoteUrlError(f"its entry point {found[0].value} does not load: {error}") from error
    if not isinstance(store, RemoteStore):
        raise RemoteUrlError(f"its entry point {found[0].value} is no RemoteStore")
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


S3_OPTIONS: Final = ("endpoint", "region", "profile")


def _s3_problem(parts: SplitResult) -> str:
    if parts.username is not None or parts.password is not None:
        return "credentials are taken from the environment (AWS_ACCESS_KEY_ID …) or ~/.aws, never from the URL"
    if not parts.hostname or parts.port is not None:
        return "write s3://BUCKET/PREFIX?endpoint=http://HOST:PORT&region=REGION, where only BUCKET is needed"
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(options.keys() - set(S3_OPTIONS)):
        return f"its option {unknown[0]!r} is unknown; allowed are {', '.join(S3_OPTIONS)}"
    if "endpoint" in options:
        endpoint = urlsplit(options["endpoint"])
        if endpoint.scheme not in ("http", "https") or not endpoint.hostname or endpoint.username is not None:
            return "its endpoint is http://HOST:PORT or https://HOST:PORT"
    return ""


_REDIS: Final = "trunkline.worker.tiers.redis_store:RedisStore"
REMOTE_STORES: Final[dict[str, RemoteStore]] = {
    **{
        scheme: RemoteStore(f"{scheme}://HOST:PORT/DB", _REDIS, _network_problem, keeps_records=True)
        for scheme in ("redis", "rediss", "valkey", "valkeys")  # the longer ones: over TLS
    },
    "unix": RemoteStore("unix:///PATH?db=DB", _REDIS, _socket_problem, keeps_records=True),
    "s3": RemoteStore(
        "s3://BUCKET/PREFIX",
        "trunkline.worker.tiers.s3_store:S3Store",
        _s3_problem,
        needs="obstore",
        extra="trunkline[s3]",
    ),
}
