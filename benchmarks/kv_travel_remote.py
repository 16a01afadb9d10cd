"""The part `remote` of `kv_travel`: a rank's shards from and to Redis and S3, servers on this machine.

Four I/O threads read, as those of a rank do. `one by one`: a chunk per call; `batches`: up to four in each
(`TierQueue`); `layers`: a chunk whose layers are values of their own, without checksums.
"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Final

import redis
from report import Report

from trunkline.kvstore.chunk_format import ChunkFormat, kv_format
from trunkline.kvstore.chunks import NAME_BYTES, ChunkName, SlotId
from trunkline.kvstore.remote_stores import Place
from trunkline.kvstore.shards import HeadShard
from trunkline.kvstore.tier import SlotKey
from trunkline.worker.tiers.remote_tier import Part, RemoteTier, open_remote_tier
from trunkline.worker.tiers.tier_queue import BATCH_MAX

THREADS: Final = 4
SHAPES: Final = {
    "demo": kv_format((8, 2, 64, 64), "float32"),
    "110 M": kv_format((12, 4, 64, 64), "float32"),
}
STARTED_S: Final = 30.0


def measure_remote(report: Report, *, quick: bool) -> None:
    """Measure all stores whose servers are installed."""
    rounds = 3 if quick else 9
    with ExitStack() as servers:
        urls = {"redis": servers.enter_context(redis_server()), "s3": servers.enter_context(s3_server())}
        for store, url in urls.items():
            if not url:
                print(f"{store}: no server is installed here")
                continue
            for model, shape in SHAPES.items():
                _measure(report, store, url, model, shape, rounds)


def _measure(report: Report, store: str, url: str, model: str, shape: ChunkFormat, rounds: int) -> None:
    size = shape.chunk_bytes
    part = Part(b"benchmark" + model.encode(), HeadShard(shape.heads), shape)
    tier = open_remote_tier(url, part, 600.0)
    assert isinstance(tier, RemoteTier)
    names = [ChunkName(index.to_bytes(NAME_BYTES, "little")) for index in range(96)]
    keys = [SlotKey(SlotId(-1), name, 0) for name in names]
    buffers = [memoryview(bytearray(os.urandom(size))) for _ in names]
    with ThreadPoolExecutor(THREADS) as threads:
        for start in range(0, len(keys), 4):
            tier.write_many([(keys[at], buffers[at], 0.0) for at in range(start, start + 4)])

        def read(count: int, batch: int) -> float:
            """Seconds to read so many chunks, so many in each call."""
            started = time.perf_counter()
            chunks = list(zip(keys, buffers, strict=True))[:count]
            calls = [chunks[at : at + batch] for at in range(0, count, batch)]
            for done in threads.map(tier.read_many, calls):
                assert all(done)
            return time.perf_counter() - started

        def layers(count: int) -> float:
            """Seconds to read as many chunks whose layers are values of their own."""
            started = time.perf_counter()
            places = [[Place(f"layers/{at}", str(layer)) for layer in range(shape.layers)] for at in range(count)]
            for values in threads.map(lambda each: tier._store.read(each, 0.0), places):
                assert all(value is not None and len(value) == size // shape.layers for value in values)
            return time.perf_counter() - started

        for at in range(24):
            values = [
                (Place(f"layers/{at}", str(layer)), bytes(size // shape.layers)) for layer in range(shape.layers)
            ]
            tier._store.write(values, [600.0] * shape.layers)
        ways: dict[tuple[str, int], Callable[[], float]] = {
            ("one by one", 1): lambda: read(1, 1),
            ("one by one", 24): lambda: read(24, 1),
            ("batches", 24): lambda: read(24, BATCH_MAX),
            ("layers", 24): lambda: layers(24),
            ("one by one", 96): lambda: read(96, 1),
            ("batches", 96): lambda: read(96, BATCH_MAX),
        }
        seconds: dict[tuple[str, int], list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, call in ways.items():
                seconds[way].append(call())
    for (read_as, count), taken in seconds.items():
        case = {
            "part": "remote",
            "store": store,
            "model": model,
            "chunk": f"{size >> 10} KiB",
            "read": read_as,
            "chunks": count,
        }
        middle = statistics.median(taken)
        report.add(case, "time", 1e3 * middle, "ms", rounds)
        report.add(case, "per chunk", 1e6 * middle / count, "µs", rounds)
        report.add(case, "rate", count * size / middle / 1e9, "GB/s", rounds)
    tier.close()


@contextmanager
def redis_server() -> Iterator[str]:
    """A server of Redis' protocol; its URL, or "" if none is installed."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        yield ""
        return
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        with _running([binary, *options]):
            url = f"redis://127.0.0.1:{port}/0"
            client = redis.Redis.from_url(url)
            _until_it_answers(lambda: client.ping())
            yield url


@contextmanager
def s3_server() -> Iterator[str]:
    """A server of S3's API, in Python: what it costs is its own time more than the client's."""
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "benchmark")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "benchmark")
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with _running(command):
        request = urllib.request.Request(f"{endpoint}/kv-bench", method="PUT")
        request.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=k/20260101/us-east-1/s3/aws4_request")
        _until_it_answers(lambda: urllib.request.urlopen(request, timeout=5).close())
        yield f"s3://kv-bench?endpoint={endpoint}&region=us-east-1"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def _running(command: list[str]) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _until_it_answers(ask: Callable[[], object]) -> None:
    deadline = time.monotonic() + STARTED_S
    while True:
        try:
            ask()
        except (OSError, redis.RedisError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return
