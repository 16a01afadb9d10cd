"""A real server of the Redis protocol, for tests of the remote tier and of records."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import redis
from worker.child_server import ChildServer

DEADLINE_S = 20.0


class RedisServer(ChildServer):
    """One on a free port of this machine; may be killed and started again."""

    def __init__(self, folder: Path, *options: str) -> None:
        """Set up the server. `options`: of its command line; without them, it keeps nothing over its death."""
        super().__init__()
        binary = shutil.which("redis-server") or shutil.which("valkey-server")
        if binary is None:
            pytest.skip("neither redis-server nor valkey-server is installed (Debian: apt install redis-server)")
        self._binary = binary
        self._options = options or ("--save", "", "--appendonly", "no")
        self._folder = folder
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._socket = Path(tempfile.mkdtemp(prefix="tl-redis-")) / "redis.sock"  # pytest's paths may be too long
        self.socket_url = f"unix://{self._socket}?db=0"

    def start(self) -> None:
        """Returns when it answers."""
        options = ["--port", str(self.port), "--bind", "127.0.0.1", *self._options]
        options += ["--unixsocket", str(self._socket)]
        command = [self._binary, *options, "--dir", str(self._folder)]
        self._socket.parent.mkdir(exist_ok=True)
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                self.client().ping()
            except redis.RedisError:
                assert time.monotonic() < deadline, "the server does not answer"
                time.sleep(0.02)
            else:
                return

    def begin_anew(self) -> None:
        """Hold nothing and take everything; start again after `kill`."""
        if self._process is None:
            self.start()
        self.client().config_set("maxmemory", 0)
        self.client().flushall()

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url)

    def places(self) -> list[bytes]:
        """All keys that it holds."""
        found: Any = self.client().keys()
        return list(found)

    def value(self, key: bytes) -> bytes:
        found: Any = self.client().get(key)
        return bytes(found)

    def kill(self) -> None:
        if self._process is not None:
            super().kill()
            shutil.rmtree(self._socket.parent, ignore_errors=True)
