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
    counts_at_once = True

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self.shift_s = 0.0

    def open(self, *, bytes_max: int = 0, patience_s: float = 30.0) -> RedisRecords:
        records = RedisRecords(self.server.url, bytes_max=bytes_max, patience_s=patience_s)
        body = redis_store.script_body()
        assert _CLOCK in body
        records._script = RedisScript(self.server.url, body.replace(_CLOCK, _SHIFTED), patience_s=patience_s)
        return records

    def now(self) -> float:
        return time.time() + self.shift_s

    def advance(self, seconds: float) -> None:
        self.shift_s += seconds
        self.server.client().set("shift", int(self.shift_s * 1e6))


@contextmanager
def redis_lab(folder: Path) -> Iterator[RedisLab]:
    server = RedisServer(folder, "--save", "", "--appendonly", "yes")
    try:
        server.start()
        yield RedisLab(server)
    finally:
        server.kill()
