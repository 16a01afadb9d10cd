"""A Redis server of a test's own, whose clock the test moves (`records_model.Lab`)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from worker.redis_server import RedisServer

from trunkline.kvstore.records import redis_store
from trunkline.kvstore.records.redis_script import RedisScript
from trunkline.kvstore.records.redis_store import RedisRecords

_CLOCK = "local now = tonumber(clock[1]) * 1000000 + tonumber(clock[2])"
_SHIFTED = f"{_CLOCK} + tonumber(redis.call('GET', 'shift') or 0)"


class RedisLab:
    """The script reads by how much to move the server's clock from a key beside the records."""

    slack_s = 5.0

    def __init__(self, server: RedisServer, *, is_lazy: bool) -> None:
        self.server = server
        self.counts_at_once = not is_lazy
        self._numbers = {"INLINE_SEGMENTS = 200": "INLINE_SEGMENTS = 1", "TEND_STEPS = 400": "TEND_STEPS = 4"}
        """What to change in the script if it is to do little at a time."""
        self.shift_s = 0.0

    def open(self, *, bytes_max: int = 0, patience_s: float = 30.0) -> RedisRecords:
        body = redis_store.script_body()
        for old, new in {_CLOCK: _SHIFTED, **({} if self.counts_at_once else self._numbers)}.items():
            assert old in body
            body = body.replace(old, new)
        records = RedisRecords(self.server.url, bytes_max=bytes_max, patience_s=patience_s)
        records._script = RedisScript(self.server.url, body, patience_s=patience_s)
        return records

    def now(self) -> float:
        return time.time() + self.shift_s

    def advance(self, seconds: float) -> None:
        self.shift_s += seconds
        self.server.client().set("shift", int(self.shift_s * 1e6))


@contextmanager
def redis_lab(folder: Path, *, is_lazy: bool = False) -> Iterator[RedisLab]:
    """Start a server. With `is_lazy`, an operation removes one segment, and `tend` four."""
    server = RedisServer(folder, "--save", "", "--appendonly", "yes")
    try:
        server.start()
        yield RedisLab(server, is_lazy=is_lazy)
    finally:
        server.kill()
