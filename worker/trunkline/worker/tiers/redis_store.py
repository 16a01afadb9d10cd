"""A store of the remote tier: Redis or Valkey.

A chunk is one hash, so that its parts are found, kept and deleted together:

      tl:kv:{fingerprint}/{name of the chunk}      field FIRST-STOP: record and bytes of these KV heads

The store forgets a chunk that was not used for its time to live. Writing and reading it, and asking for it on
behalf of a request, are uses. A use never shortens the time to live that an earlier one gave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

import redis

from trunkline.kvstore.remote_stores import ANSWER_S, CONNECT_S, Place

_DELETED_AT_ONCE: Final = 1000
_NO_CONDITIONS: Final = "wrong number of arguments for 'pexpire'"
_TOO_OLD: Final = "the server is older than Redis 7, which a remote tier needs (PEXPIRE with NX and GT)"


class RedisStore:
    """A `ChunkStore`. Each call takes a connection of its own."""

    def __init__(self, url: str) -> None:
        """Set up the store without connecting yet.

        Raises:
            ValueError: A URL that cannot be read.
        """
        parts = urlsplit(url)
        keepalive = {} if parts.scheme == "unix" else {"socket_keepalive": True}
        try:
            self._client: Any = redis.Redis.from_url(
                url.replace("valkey", "redis", 1) if parts.scheme.startswith("valkey") else url,
                socket_connect_timeout=CONNECT_S,
                socket_timeout=ANSWER_S,
                retry=None,
                protocol=2,
                **keepalive,
            )
        except redis.RedisError as error:
            raise ValueError(str(error)) from error

    def write(self, values: Sequence[tuple[Place, bytes]], kept_s: Sequence[float]) -> None:
        """Store values (see `ChunkStore.write`)."""

        def ask(pipeline: Any) -> None:
            for (place, value), seconds in zip(values, kept_s, strict=True):
                pipeline.hset(_key(place.chunk), place.part, value)
                _keep(pipeline, place.chunk, seconds)

        self._ask(ask)

    def read(self, places: Sequence[Place], kept_s: float) -> list[bytes | None]:
        """Return values (see `ChunkStore.read`)."""

        def ask(pipeline: Any) -> None:
            for place in places:
                pipeline.hget(_key(place.chunk), place.part)
            for chunk in dict.fromkeys(place.chunk for place in places):
                _keep(pipeline, chunk, kept_s)

        found: list[bytes | None] = self._ask(ask)[: len(places)]
        return found

    def count(self, chunks: Sequence[str], parts: Sequence[str], kept_s: float) -> int:
        """Return how many of the first chunks are there (see `ChunkStore.count`)."""

        def ask(pipeline: Any) -> None:
            for chunk in chunks:
                for part in parts:
                    pipeline.hexists(_key(chunk), part)

        found = self._ask(ask)
        absent = next((index for index, exists in enumerate(found) if not exists), len(found))
        present = absent // len(parts)

        def keep(pipeline: Any) -> None:
            for chunk in chunks[:present]:
                _keep(pipeline, chunk, kept_s)

        self._ask(keep)
        return present

    def parts(self, chunk: str) -> list[str]:
        """Return the stored parts of a chunk (see `ChunkStore.parts`)."""
        (found,) = self._ask(lambda pipeline: pipeline.hkeys(_key(chunk)))
        return [part.decode("ascii", "replace") for part in found]

    def delete(self, chunks: Sequence[str]) -> None:
        """Delete chunks (see `ChunkStore.delete`)."""
        for start in range(0, len(chunks), _DELETED_AT_ONCE):
            keys = [_key(chunk) for chunk in chunks[start : start + _DELETED_AT_ONCE]]
            self._ask(partial(_unlink, keys=keys))

    def close(self) -> None:
        """End the connections."""
        self._client.close()

    def _ask(self, ask: Callable[[Any], object]) -> list[Any]:
        """Send commands in one round trip; return their results.

        Raises:
            OSError: The store is away or refuses.
        """
        try:
            with self._client.pipeline(transaction=False) as pipeline:
                ask(pipeline)
                results: list[Any] = pipeline.execute() if len(pipeline) else []
        except redis.RedisError as error:
            raise OSError(_TOO_OLD if _NO_CONDITIONS in str(error).lower() else str(error)) from error
        return results


def _key(chunk: str) -> str:
    return f"tl:kv:{chunk}"


def _unlink(pipeline: Any, keys: list[str]) -> None:
    pipeline.unlink(*keys)


def _keep(pipeline: Any, chunk: str, seconds: float) -> None:
    """Make a chunk's time to live this long at least."""
    if seconds:
        milliseconds = max(1, int(1000 * seconds))
        pipeline.pexpire(_key(chunk), milliseconds, nx=True)
        pipeline.pexpire(_key(chunk), milliseconds, gt=True)
