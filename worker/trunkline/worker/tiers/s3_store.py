"""A store of the remote tier: a bucket of S3, or of anything that speaks its API.

A part of a chunk is one object:

      PREFIX/{fingerprint}/{name of the chunk}/FIRST-STOP      record and bytes of these KV heads

Several objects at once travel by as many requests beside each other. S3 does not know when an object was last
used: objects stay until they are deleted, or until a lifecycle rule of the bucket ends them by their age
(docs/operating.md). Credentials come from where AWS's own tools take them, see `_credentials`.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, urlsplit

import obstore
from obstore.exceptions import BaseError, NotFoundError
from obstore.store import S3Store as Bucket

from trunkline.kvstore.remote_stores import ANSWER_S, CONNECT_S, Place

_REQUESTS: Final = 16
"""Requests beside each other."""
_ALL_S: Final = 20.0
"""Longest time of one request in seconds, whatever comes meanwhile."""
_RETRIES: Final = 2
"""Attempts after the first one: a bucket answers 500 and 503 now and then."""
_ASKED: Final = 4
"""Chunks that `count` asks for at once: most prompts that are asked for are not there, and each question costs
money."""

_T = TypeVar("_T")
_R = TypeVar("_R")


class S3Store:
    """A `ChunkStore`."""

    def __init__(self, url: str) -> None:
        """Set up the store without connecting yet.

        Raises:
            ValueError: A URL or credentials that cannot be read.
        """
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query))
        prefix = parts.path.strip("/")
        self._prefix = f"{prefix}/" if prefix else ""
        endpoint = options.get("endpoint", os.environ.get("AWS_ENDPOINT_URL", ""))
        settings: dict[str, Any] = _credentials(options.get("profile", ""))
        if endpoint:
            settings["endpoint"] = endpoint
        if "region" in options or endpoint:
            region = options.get("region") or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
            settings["region"] = region or settings.get("region") or "us-east-1"
        try:
            self._bucket: Any = Bucket(
                parts.hostname or "",
                client_options={
                    "connect_timeout": timedelta(seconds=CONNECT_S),
                    "read_timeout": timedelta(seconds=ANSWER_S),
                    "timeout": timedelta(seconds=_ALL_S),
                    "allow_http": endpoint.startswith("http:"),
                },
                retry_config={"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=ANSWER_S)},
                **settings,
            )
        except BaseError as error:
            raise ValueError(str(error)) from error
        self._threads = ThreadPoolExecutor(_REQUESTS, thread_name_prefix="s3")

    def write(self, values: Sequence[tuple[Place, bytes]], kept_s: Sequence[float]) -> None:
        """Store values (see `ChunkStore.write`); how long they are kept is the bucket's affair."""
        self._each(lambda one: obstore.put(self._bucket, self._path(one[0]), one[1], use_multipart=False), values)

    def read(self, places: Sequence[Place], kept_s: float) -> list[memoryview | None]:
        """Return values (see `ChunkStore.read`)."""

        def get(place: Place) -> memoryview | None:
            try:
                return memoryview(obstore.get(self._bucket, self._path(place)).bytes())
            except (NotFoundError, FileNotFoundError):
                return None

        return self._each(get, places)

    def count(self, chunks: Sequence[str], parts: Sequence[str], kept_s: float) -> int:
        """Return how many of the first chunks are there (see `ChunkStore.count`).

        The end is searched for: a few chunks spread over the rest at a time, always its first one. A question for
        each chunk of a long prompt would take longer than requests wait for. A gap between two of those asked for
        goes unnoticed; then reading the chunk is a miss.
        """
        low, high = 0, len(chunks)  # the first `low` are there, that at `high` is not
        while low < high:
            at = sorted({low + (high - 1 - low) * step // (_ASKED - 1) for step in range(_ASKED)})
            exists = iter(self._each(self._exists, [Place(chunks[index], part) for index in at for part in parts]))
            for index in at:
                if not all(next(exists) for _ in parts):
                    high = index
                    break
                low = index + 1
        return low

    def parts(self, chunk: str) -> list[str]:
        """Return the stored parts of a chunk (see `ChunkStore.parts`)."""
        return [path.rpartition("/")[2] for path in self._each(self._list, [chunk])[0]]

    def delete(self, chunks: Sequence[str]) -> None:
        """Delete chunks (see `ChunkStore.delete`)."""
        paths = [path for listed in self._each(self._list, chunks) for path in listed]
        self._each(lambda path: obstore.delete(self._bucket, path), paths)

    def close(self) -> None:
        """End the threads; those under way end by their time limits."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _path(self, place: Place) -> str:
        return f"{self._prefix}{place.chunk}/{place.part}"

    def _exists(self, place: Place) -> bool:
        try:
            obstore.head(self._bucket, self._path(place))
        except (NotFoundError, FileNotFoundError):
            return False
        return True

    def _list(self, chunk: str) -> list[str]:
        listed = obstore.list(self._bucket, prefix=f"{self._prefix}{chunk}").collect()
        return [str(entry["path"]) for entry in listed]

    def _each(self, ask: Callable[[_T], _R], items: Iterable[_T]) -> list[_R]:
        """Carry out requests beside each other; return their results.

        Raises:
            OSError: The bucket cannot be reached, or refuses.
        """
        items = list(items)
        try:
            if len(items) == 1:
                return [ask(items[0])]
            return list(self._threads.map(ask, items))
        except BaseError as error:
            raise OSError(_plain(error)) from error


def _plain(error: BaseError) -> str:
    """Return an error in one short line. Clients print all they know, over many lines."""
    text = " ".join(str(error).split("Debug source:")[0].split())
    return text[:600]


def _credentials(profile: str) -> dict[str, str]:
    """Return the access key of a profile in the files of AWS's tools; empty if the client is to look for itself:
    in the environment, and at the services that give roles to machines and containers.

    Raises:
        ValueError: There is no such profile.
    """
    named = profile or os.environ.get("AWS_PROFILE", "")
    if not named and ("AWS_ACCESS_KEY_ID" in os.environ or "AWS_WEB_IDENTITY_TOKEN_FILE" in os.environ):
        return {}
    folder = Path.home() / ".aws"
    files = configparser.ConfigParser(interpolation=None)
    try:
        files.read(
            [
                os.environ.get("AWS_CONFIG_FILE", folder / "config"),
                os.environ.get("AWS_SHARED_CREDENTIALS_FILE", folder / "credentials"),
            ]
        )
    except (configparser.Error, UnicodeDecodeError) as error:
        # Its text may quote a line with a key.
        raise ValueError(f"the files of AWS's tools cannot be read: {type(error).__name__}") from None
    found: dict[str, str] = {}
    for section in (f"profile {named or 'default'}", named or "default"):
        if files.has_section(section):
            found.update(files[section])
    if named and not found:
        raise ValueError(f"there is no profile {named!r} in ~/.aws/config or ~/.aws/credentials")
    known = {
        "aws_access_key_id": "access_key_id",
        "aws_secret_access_key": "secret_access_key",
        "aws_session_token": "session_token",
        "region": "region",
    }
    return {known[key]: value for key, value in found.items() if key in known}
