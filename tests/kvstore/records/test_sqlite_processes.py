"""The record store in SQLite, used by processes that are killed, and where files cannot grow."""

from __future__ import annotations

import asyncio
import random
import resource
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvstore.records.labs import counted_again
from kvstore.records.turn_process import content_of
from seeds import seeds

from trunkline.kvstore.records import MissingError, RecordKey, open_records

PROGRAM = Path(__file__).with_name("turn_process.py")
LINES = 80
"""Turns that a process stores before it is killed."""

pytestmark = pytest.mark.processes


class Turns:
    """What processes said that they have stored: the last version of each session."""

    def __init__(self) -> None:
        self.last: defaultdict[int, int] = defaultdict(int)
        self.away: list[str] = []

    def take(self, line: str) -> None:
        match line.split():
            case ["turn", number, version]:
                self.last[int(number)] = max(self.last[int(number)], int(version))
            case ["away", *words]:
                self.away.append(" ".join(words))

    def check(self, url: str) -> None:
        """Check that every session is whole, and not older than what was said."""

        async def test() -> None:
            store = open_records(url)
            for number, version in self.last.items():
                try:
                    found = await store.get(RecordKey("session", "", str(number)))
                except MissingError:
                    raise AssertionError(f"session {number} is lost") from None
                assert found.record.version >= version
                contents = [segment.content for segment in found.segments]
                assert contents == [content_of(number, each + 1) for each in range(found.record.version)]
            await store.close()

        asyncio.run(test())


class Routers:
    """Processes that take turns until they are killed, and what they have said."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.turns = Turns()
        self.running: list[subprocess.Popen[str]] = []
        self._started = 0

    def start(self, *, bytes_max: int = 0) -> None:
        """Start one. `bytes_max`: size in bytes that its files cannot exceed; 0: there is no limit."""

        def limit() -> None:
            if bytes_max:
                resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_max, resource.RLIM_INFINITY))

        self._started += 1
        command = [sys.executable, str(PROGRAM), self.url, str(1000 * self._started)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=limit)
        self.running.append(process)

    def read(self, lines: int, place: int = 0) -> None:
        """Read what one of them says."""
        stdout = self.running[place].stdout
        assert stdout is not None
        for _ in range(lines):
            line = stdout.readline()
            assert line, "it has ended"
            self.turns.take(line)

    def kill(self, place: int = 0) -> None:
        """Kill one, and read what it has said before. Its last line may not be whole."""
        process = self.running.pop(place)
        process.kill()
        rest, _ = process.communicate()
        for line in rest.splitlines(keepends=True):
            if line.endswith("\n"):
                self.turns.take(line)


@pytest.fixture
def routers(tmp_path: Path) -> Iterator[Routers]:
    found = Routers(f"sqlite:{tmp_path / 'records.sqlite'}")
    yield found
    while found.running:
        found.kill()


@pytest.mark.parametrize("seed", seeds(1))
def test_what_was_stored_survives_kill_9(routers: Routers, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(3):
        routers.start()
    for _ in range(4):
        victim = rng.randrange(len(routers.running))
        routers.read(rng.randrange(1, LINES), victim)
        routers.kill(victim)
        routers.turns.check(routers.url)
        routers.start()
    while routers.running:
        routers.read(1)
        routers.kill()
    routers.turns.check(routers.url)
    counted_again(routers.url.removeprefix("sqlite:"))
    assert routers.turns.away == []
    assert sum(routers.turns.last.values()) > 20


def test_a_file_that_cannot_grow_loses_nothing(routers: Routers) -> None:
    turns = routers.turns
    routers.start(bytes_max=1 << 20)
    while not turns.away:
        routers.read(1)
    routers.kill()
    turns.check(routers.url)
    counted_again(routers.url.removeprefix("sqlite:"))
    assert "I/O error" in turns.away[0] or "full" in turns.away[0]
    stored = sum(turns.last.values())
    routers.start()
    while sum(turns.last.values()) == stored:
        routers.read(1)
    routers.kill()
    turns.check(routers.url)
    counted_again(routers.url.removeprefix("sqlite:"))
