"""What records cost: turns of a session by the length of its history, operations by the number of records.

    python benchmarks/records.py [--quick] [--records N,N] [--parts turns,sizes] [--stores sqlite,redis]
                                 [--folder PATH] [--json PATH]

One client, one operation after the other, stores on this machine. Redis appends to its file and syncs it every
second; a Redis server of the benchmark's own is started, if one is installed.

- turns: a turn takes the session's lease with the present head known, and appends a segment of 200 tokens (four
  bytes each, and as many for its text) with a header of 400 bytes. `written`: bytes written to files per turn
  (SQLite's log and what is moved from it into the database; Redis's append-only file). `cold`: a router that knows
  nothing of the session reads all of it.
- sizes: so many records of 100 owners, each with a header of 400 bytes and a segment of 1 KiB. `fill`: they are
  made 128 at a time. `page`: 100 records without headers. `held`: the growth of this process's memory, or the
  server's; `on disk`: of the file.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final, NamedTuple

import psutil
import redis
from report import Report, argument_parser

from trunkline.kvstore.records import Change, Record, RecordKey, RecordStore, open_records

TURN_TOKENS: Final = 200
TURN_BYTES: Final = TURN_TOKENS * 8
HEADER: Final = bytes(400)
OWNERS: Final = 100
AT_ONCE: Final = 128
TTL_S: Final = 86_400.0
REDIS: Final = shutil.which("redis-server") or shutil.which("valkey-server")


class Place(NamedTuple):
    """A store's URL, and ways to ask what it has written and what it holds, in bytes."""

    url: str
    written: Callable[[], int]
    held: Callable[[], int]
    on_disk: Callable[[], int]


@contextmanager
def sqlite_place(folder: Path) -> Iterator[Place]:
    path = folder / "records.sqlite"
    process = psutil.Process()

    def written() -> int:
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(dict(line.split(": ") for line in lines)["wchar"])

    def on_disk() -> int:
        return sum(each.stat().st_size for each in folder.glob("records.sqlite*"))

    yield Place(f"sqlite:{path}", written, lambda: process.memory_info().rss, on_disk)


@contextmanager
def redis_place(folder: Path) -> Iterator[Place]:
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    assert binary is not None
    socket = folder / "s"
    options = [
        "--port",
        "0",
        "--unixsocket",
        str(socket),
        "--save",
        "",
        "--appendonly",
        "yes",
        "--dir",
        str(folder),
    ]
    with subprocess.Popen([binary, *options], stdout=subprocess.DEVNULL) as process:
        try:
            while not socket.exists():
                time.sleep(0.02)
            client = redis.Redis(unix_socket_path=str(socket))

            def told(section: str, name: str) -> int:
                return int(client.info(section)[name])

            yield Place(
                f"unix://{socket}?db=0",
                lambda: told("persistence", "aof_current_size"),
                lambda: told("memory", "used_memory"),
                lambda: told("persistence", "aof_current_size"),
            )
            client.close()
        finally:
            process.kill()


PLACES: Final = {"sqlite": sqlite_place, "redis": redis_place}


async def timed(call: Callable[[], Awaitable[Any]], count: int) -> list[float]:
    """Return the microseconds that each of so many calls took."""
    taken = []
    for _ in range(count):
        start = time.perf_counter()
        await call()
        taken.append((time.perf_counter() - start) * 1e6)
    return taken


def add_times(report: Report, case: dict[str, Any], name: str, taken: list[float]) -> None:
    report.add(case, name, median(taken), "µs", len(taken))
    report.add(case, f"{name} p99", quantiles(taken, n=100)[98], "µs", len(taken))


async def turns(place: Place, name: str, report: Report, *, count: int) -> None:
    store = open_records(place.url)
    for history in (1_000, 10_000, 100_000):
        case = {"store": name, "history (tokens)": history}
        key = RecordKey("session", "", str(history))
        contents = [os.urandom(TURN_BYTES) for _ in range(history // TURN_TOKENS)]
        record = await store.create(key, Change(HEADER, segments=contents))

        async def turn(key: RecordKey = key) -> None:
            nonlocal record
            found = await store.acquire(key, "router", 60.0, [record.head])
            change = Change(HEADER, base=found.record.head, segments=[os.urandom(TURN_BYTES)])
            record = await store.put(key, found.record.version, change, lease="router", release=True)

        await timed(turn, 10)
        before = place.written()
        taken = await timed(turn, count)
        add_times(report, case, "turn", taken)
        report.add(case, "written", (place.written() - before) / count, "bytes", count)

        async def cold(key: RecordKey = key) -> None:
            await store.get(key)

        report.add(case, "cold", median(await timed(cold, 20)), "µs", 20)
    await store.close()


class Sizes:
    """Operations on random ones of so many records."""

    def __init__(self, store: RecordStore) -> None:
        self.store = store
        self.present = 0
        self._rng = random.Random(0)
        self._read: dict[RecordKey, Record] = {}
        """Records whose present version is known."""

    async def fill(self, size: int) -> float:
        """Make records until there are so many; return how many were made per second."""
        start, before = time.perf_counter(), self.present
        while self.present < size:
            numbers = range(self.present, min(self.present + AT_ONCE, size))
            await asyncio.gather(*(self._create(number) for number in numbers))
            self.present = numbers.stop
        return (size - before) / (time.perf_counter() - start)

    async def get(self) -> None:
        key = key_of(self._rng.randrange(self.present))
        self._read[key] = (await self.store.get(key)).record

    async def acquire(self) -> None:
        await self.store.acquire(self._rng.choice(list(self._read)[-64:]), "router", 60.0)

    async def put(self) -> None:
        key, record = self._read.popitem()
        change = Change(HEADER, TTL_S, base=record.head, segments=[os.urandom(1024)])
        await self.store.put(key, record.version, change, lease="router", release=True)

    async def page(self) -> None:
        owner, after = self._rng.randrange(OWNERS), self._rng.randrange(self.present)
        await self.store.page("session", f"owner-{owner}", f"sess_{after:032x}", 100)

    async def tend(self) -> None:
        await self.store.tend()

    async def _create(self, number: int) -> None:
        await self.store.create(key_of(number), Change(HEADER, TTL_S, segments=[os.urandom(1024)]))


async def sizes(place: Place, name: str, report: Report, *, records: list[int], count: int) -> None:
    measured = Sizes(open_records(place.url))
    await measured.store.usage()
    held = place.held()
    for size in records:
        case = {"store": name, "records": size}
        report.add(case, "fill", await measured.fill(size), "records/s", 1)
        operations = (measured.get, measured.acquire, measured.put, measured.page, measured.tend)
        for operation in operations:
            few = operation in (measured.page, measured.tend, measured.put)
            taken = await timed(operation, count // 4 if few else count)
            add_times(report, case, operation.__name__, taken)
        report.add(case, "held", (place.held() - held) / 2**20, "MiB", 1)
        report.add(case, "on disk", place.on_disk() / 2**20, "MiB", 1)
    await measured.store.close()


def key_of(number: int) -> RecordKey:
    """Return the key of a record."""
    return RecordKey("session", f"owner-{number % OWNERS}", f"sess_{number:032x}")


def main() -> None:
    parser = argument_parser(__doc__, ("turns", "sizes"))
    parser.add_argument("--records", default="", help="numbers of records, separated by commas")
    parser.add_argument("--stores", default="sqlite,redis")
    parser.add_argument("--folder", type=Path, help="where the files are; by default a temporary folder")
    arguments: argparse.Namespace = parser.parse_args()
    records = arguments.records or ("1000,10000" if arguments.quick else "10000,100000,1000000")
    count = 200 if arguments.quick else 2000
    report = Report("records")
    names = [name for name in arguments.stores.split(",") if name != "redis" or REDIS]
    for part in arguments.parts:
        for name in names:
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, PLACES[name](Path(folder)) as place:
                if part == "turns":
                    asyncio.run(turns(place, name, report, count=count))
                else:
                    asyncio.run(sizes(place, name, report, records=[*map(int, records.split(","))], count=count))
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
