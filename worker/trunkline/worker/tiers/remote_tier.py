"""The remote tier: a store that all controllers share, by the protocol of Redis and Valkey.

A chunk's shard is one value: its record (`RecordKeeper`), then its bytes in plain order. The key names everything
that the bytes depend on, so that groups of other models, or of another size, never meet:

      tl:{fingerprint}:{rank}/{ranks}:{name of the chunk}

The store forgets a chunk that was not used for its time to live. Writing and reading it, and asking for it on
behalf of a request, are uses.

The store may be away. Then every call fails at once until the next attempt is due, with growing distances; of each
outage one warning is logged.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Final
from urllib.parse import urlsplit

import redis
import structlog

from trunkline.kvstore.chunks import ChunkName
from trunkline.kvstore.remote_stores import RemoteUrlError, find_store
from trunkline.kvstore.tier import SharedTier, SlotKey, TierKind
from trunkline.worker.errors import WorkerConfigError
from trunkline.worker.tiers.disk_tier import RECORD_BYTES, RecordKeeper

_CONNECT_S: Final = 1.0
_ANSWER_S: Final = 3.0
"""Seconds to wait for the store's answer. A chunk is some megabytes; a store that takes longer for one is of no
use."""
_DELETED_AT_ONCE: Final = 1000
_RETRY_FIRST_S: Final = 0.5
_RETRY_MOST_S: Final = 15.0

log = structlog.get_logger()


class RedisTier:
    """A `SharedTier`. Thread-safe: each call takes a connection of its own."""

    kind = TierKind.REMOTE
    capacity_slots = 0

    def __init__(self, url: str, slot_bytes: int, keeper: RecordKeeper, ttl_s: float) -> None:
        """Set up the tier without connecting yet.

        Args:
            slot_bytes: bytes of a chunk's payload.
            ttl_s: seconds without use after which the store forgets a chunk; 0: never.

        Raises:
            WorkerConfigError: a URL that cannot be read.
        """
        self.slot_bytes = slot_bytes
        self._keeper = keeper
        self._ttl_ms = int(ttl_s * 1000)
        parts = urlsplit(url)
        self._place = parts.hostname or parts.path
        """Host or path of the store, for messages: the whole URL may hold a password."""
        keepalive = {} if parts.scheme == "unix" else {"socket_keepalive": True}
        try:
            self._client: Any = redis.Redis.from_url(
                url.replace("valkey", "redis", 1) if parts.scheme.startswith("valkey") else url,
                socket_connect_timeout=_CONNECT_S,
                socket_timeout=_ANSWER_S,
                retry=None,
                protocol=2,
                **keepalive,
            )
        except (ValueError, redis.RedisError) as error:
            raise WorkerConfigError(f"remote tier at {self._place}: {error}") from error
        self._lock = threading.Lock()
        self._next_attempt = 0.0
        self._retry_s = 0.0
        """Seconds to the next attempt to reach the store; 0 while the store is there."""

    # --- SharedTier

    def write(self, key: SlotKey, data: memoryview) -> None:
        """Store a chunk's bytes under its name (see `Tier.write`)."""
        record = self._keeper.record(key.name, 0, data)
        value = b"".join((record, data))
        expiry = {"px": self._ttl_ms} if self._ttl_ms else {}
        self._call(lambda client: client.set(self._key(key.name), value, **expiry))

    def read(self, key: SlotKey, into: memoryview) -> bool:
        """Fill `into` with a chunk's bytes (see `Tier.read`)."""

        def ask(client: Any) -> bytes | None:
            pipeline = client.pipeline(transaction=False)
            pipeline.get(self._key(key.name))
            if self._ttl_ms:
                pipeline.pexpire(self._key(key.name), self._ttl_ms)
            found: bytes | None = pipeline.execute()[0]
            return found

        value = self._call(ask)
        if value is None or len(value) != RECORD_BYTES + self.slot_bytes:
            return False
        payload = memoryview(value)[RECORD_BYTES:]
        if not self._keeper.holds(value[:RECORD_BYTES], key.name, 0, payload):
            return False
        into[:] = payload
        return True

    def present(self, names: Sequence[ChunkName]) -> int:
        """Return how many of the first of these chunks are there (see `SharedTier.present`)."""
        if not names:
            return 0

        def ask(client: Any) -> list[int]:
            pipeline = client.pipeline(transaction=False)
            for name in names:
                if self._ttl_ms:  # the question is a use: a request's prompt has the chunk
                    pipeline.pexpire(self._key(name), self._ttl_ms)
                else:
                    pipeline.exists(self._key(name))
            found: list[int] = pipeline.execute()
            return found

        found = self._call(ask)
        return next((index for index, exists in enumerate(found) if not exists), len(found))

    def delete(self, names: Sequence[ChunkName]) -> None:
        """Delete chunks (see `SharedTier.delete`)."""
        for start in range(0, len(names), _DELETED_AT_ONCE):
            keys = [self._key(name) for name in names[start : start + _DELETED_AT_ONCE]]
            self._call(partial(_unlink, keys=keys))

    def close(self) -> None:
        """End the connections."""
        self._client.close()

    def _key(self, name: bytes) -> str:
        keeper = self._keeper
        return f"tl:{keeper.fingerprint.hex()}:{keeper.rank}/{keeper.tp}:{name.hex()}"

    # --- outages

    def _call(self, ask: Callable[[Any], Any]) -> Any:
        """Ask the store, unless it is known to be away.

        Raises:
            OSError: the store is away or refuses.
        """
        if time.monotonic() < self._next_attempt:
            raise OSError(f"remote tier at {self._place} is away; the next attempt is due later")
        try:
            answer = ask(self._client)
        except redis.RedisError as error:
            self._failed(error)
            raise OSError(f"remote tier at {self._place}: {error}") from error
        if self._retry_s:
            self._is_back()
        return answer

    def _failed(self, error: Exception) -> None:
        with self._lock:
            if not self._retry_s:
                log.warning("remote tier fails", at=self._place, error=str(error))
            elif time.monotonic() < self._next_attempt:
                return  # calls that were under way at the same time count once
            self._retry_s = min(_RETRY_MOST_S, 2 * self._retry_s or _RETRY_FIRST_S)
            self._next_attempt = time.monotonic() + self._retry_s

    def _is_back(self) -> None:
        with self._lock:
            if self._retry_s:
                log.info("remote tier is back", at=self._place)
            self._retry_s = self._next_attempt = 0.0


def _unlink(client: Any, keys: list[str]) -> None:
    client.unlink(*keys)


def open_remote_tier(url: str, slot_bytes: int, keeper: RecordKeeper, ttl_s: float) -> SharedTier:
    """Return the tier that a URL names (`trunkline.kvstore.remote_stores`). It need not be reachable yet.

    Raises:
        WorkerConfigError: an unknown scheme, or a URL that cannot be read.
    """
    try:
        module, _, name = find_store(url).tier.partition(":")
    except RemoteUrlError as error:
        raise WorkerConfigError(f"remote_url (scheme {urlsplit(url).scheme!r}): {error}") from None
    tier: SharedTier = getattr(import_module(module), name)(url, slot_bytes, keeper, ttl_s)
    return tier
