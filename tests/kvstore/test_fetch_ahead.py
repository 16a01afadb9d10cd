"""What is on disk comes into host memory before the session that needs it is back."""

from __future__ import annotations

import heapq
import itertools
import random
from typing import Final

import pytest
from kvstore.paths import grow
from seeds import seeds

from trunkline.kvstore.chunks import TieredChunk
from trunkline.kvstore.directory import Directory
from trunkline.kvstore.fetch_ahead import AHEAD_PAUSE_S, AHEAD_TURNS_MAX, FetchAhead
from trunkline.kvstore.next_use import Turn, TurnEnd
from trunkline.kvstore.tier_moves import MoveStatus
from trunkline.kvstore.tier_policy import DirectoryConfig, EvictionPolicy

TOOLS_S: Final = {"test": 60.0, "build": 900.0}
"""Seconds that each tool takes, a fifth more or less."""
STEPS = itertools.count(1)
TURNS = itertools.count(1)


def settle(directory: Directory[TieredChunk], now: float) -> list[bytes]:
    """Carry out all moves; return the names of the chunks that were read, in order."""
    read: list[bytes] = []
    while moves := directory.moves(now):
        for move in moves:
            read += [] if move.is_write else [move.chunk.name]
            directory.done(move.id, MoveStatus.DONE, now, elapsed_us=100.0)
    for lost in directory.lost():
        if not lost.stored_below:
            directory.forget(lost)
    return read


def take_turn(
    directory: Directory[TieredChunk], path: list[TieredChunk], now: float, expected_s: float, ended: str = ""
) -> Turn | None:
    """A turn with this path ends, and is stored."""
    end = TurnEnd(
        arrived=now,
        prompt_chunks=len(path),
        prompt_tokens=10 * len(path),
        expected_s=expected_s,
        ended=ended,
        request=next(TURNS),
    )
    turn = directory.next_use.ended(path, end, now)
    directory.used(path, now)
    for chunk in path:
        if not chunk.host_ready and directory.save(chunk, next(STEPS)) is None:
            settle(directory, now)
            directory.save(chunk, next(STEPS))
    settle(directory, now)
    return turn


def near(path: list[TieredChunk]) -> list[bool]:
    return [chunk.host_ready for chunk in path]


def two_sessions(
    policy: EvictionPolicy = EvictionPolicy.PREDICTED,
) -> tuple[Directory[TieredChunk], list[TieredChunk]]:
    """Host memory for one of two sessions; the one that is said to come after 300 s sinks."""
    directory: Directory[TieredChunk] = Directory(
        DirectoryConfig(host_slots=5, disk_slots=20, host_free=1, policy=policy)
    )
    path = grow("a", 4)
    take_turn(directory, path, 0.0, 300.0)
    take_turn(directory, grow("soon", 4), 1.0, 20.0)
    assert near(path) == [False] * 4
    return directory, path


def test_a_session_that_is_near_changes_places_with_one_that_is_far() -> None:
    directory, path = two_sessions()
    other = grow("b", 4)
    take_turn(directory, other, 21.0, 3000.0)
    assert settle(directory, 22.0) == []
    read = settle(directory, 250.0)
    assert read == [chunk.name for chunk in path], "the beginning first"
    assert near(path) == [True] * 4
    assert not any(near(other))
    directory.check()


def test_nothing_gives_way_that_is_needed_sooner_or_hardly_later() -> None:
    directory, path = two_sessions()
    other = grow("b", 4)
    take_turn(directory, other, 249.0, 80.0)  # the first one has 300 - 181 seconds left by then
    assert settle(directory, 250.0) == []
    assert not any(near(path))
    assert all(near(other))


def test_only_the_prediction_fetches() -> None:
    directory, _ = two_sessions(EvictionPolicy.LOOK_AHEAD)
    take_turn(directory, grow("b", 4), 21.0, 3000.0)
    assert settle(directory, 250.0) == []


def test_a_session_that_is_back_or_closed_or_late_is_not_fetched_for() -> None:
    for way in ("closed", "late"):
        directory, path = two_sessions()
        take_turn(directory, grow("b", 4), 21.0, 30000.0)
        (turn,) = path[0].turns
        if way == "closed":
            directory.next_use.close(turn)
        read = settle(directory, 250.0 if way == "closed" else 5000.0)
        assert not {chunk.name for chunk in path} & set(read), way


def test_what_a_job_waits_for_comes_first() -> None:
    directory, path = two_sessions()
    other = grow("b", 4)
    take_turn(directory, other, 21.0, 3000.0)
    (soon,) = {chunk for chunk in directory.stored() if chunk.name == b"soon/0"}
    directory.mover.drop_host(soon)
    directory.want(1, (1.0,), [soon])
    reads = [move.chunk.name for move in directory.moves(250.0) if not move.is_write]
    assert reads[:2] == [soon.name, path[0].name]


def test_a_path_is_fetched_as_far_as_it_is_left() -> None:
    directory, path = two_sessions()
    take_turn(directory, grow("b", 4), 21.0, 3000.0)
    directory.copies.drop_disk(path[2])
    assert settle(directory, 250.0) == [path[0].name, path[1].name]


def test_where_there_is_no_room_it_is_tried_again_a_little_later() -> None:
    directory, path = two_sessions()
    other = grow("b", 4)
    take_turn(directory, other, 249.0, 80.0)
    assert settle(directory, 250.0) == []
    directory.next_use.close(other[0].turns[0])
    assert settle(directory, 250.0 + AHEAD_PAUSE_S / 2) == []
    assert settle(directory, 250.0 + AHEAD_PAUSE_S) == [chunk.name for chunk in path]


@pytest.mark.parametrize("is_back", [False, True])
def test_who_is_back_meanwhile_is_not_fetched_for(is_back: bool) -> None:
    directory, path = two_sessions()
    other = grow("b", 4)
    take_turn(directory, other, 249.0, 80.0)
    assert settle(directory, 250.0) == [], "there is no room"
    if is_back:
        directory.next_use.went_on([chunk.name for chunk in path], 1000, 250.5)
    for chunk in [
        *reversed(other),
        *sorted(set(directory.stored()) - {*path, *other}, key=lambda each: -each.depth),
    ]:
        directory.forget(chunk)
    read = settle(directory, 251.5)
    assert all((chunk.name in read) is not is_back for chunk in path)


def test_turns_are_bounded() -> None:
    ahead: FetchAhead[TieredChunk] = FetchAhead()
    turns = [Turn(None, float(number)) for number in range(2 * AHEAD_TURNS_MAX)]
    ahead.add(turns)
    assert len(ahead._turns) == AHEAD_TURNS_MAX
    assert ahead.next(0.0) is None


class Agents:
    """Agents whose answers call tools that take one or fifteen minutes, as the client's router tells."""

    def __init__(self, seed: int, *, ahead: bool) -> None:
        self.rng = random.Random(seed)
        self.directory: Directory[TieredChunk] = Directory(
            DirectoryConfig(host_slots=60, disk_slots=400, policy=EvictionPolicy.PREDICTED)
        )
        self.ahead = ahead
        self.paths: dict[int, list[TieredChunk]] = {}
        self.near = self.all = self.read = 0

    def run(self, turns: int) -> float:
        """Return which part of their contexts is in host memory when they come back."""
        due = [(self.rng.uniform(0.0, 900.0), agent) for agent in range(30)]
        heapq.heapify(due)
        now = 0.0
        for turn in range(turns):
            if turn == turns // 3:
                self.near = self.all = 0
            at, agent = heapq.heappop(due)
            while now + 2.0 < at:
                now += 2.0
                self._look(now)
            now = at
            tool = self.rng.choice(list(TOOLS_S))
            self._turn(turn, agent, tool, now)
            heapq.heappush(due, (now + TOOLS_S[tool] * self.rng.uniform(0.8, 1.2), agent))
        self.directory.check()
        return self.near / self.all

    def _look(self, now: float) -> None:
        if not self.ahead:
            self.directory.next_use.take_nearing()
            self.directory.next_use.tick(now)
            self.directory.next_use.take_nearing()
        self.read += len(settle(self.directory, now))

    def _turn(self, turn: int, agent: int, tool: str, now: float) -> None:
        before = self.paths.get(agent, [])
        self.near += sum(near(before))
        self.all += len(before)
        self.directory.want(agent, (1.0, float(agent)), before)
        self._look(now)
        self.directory.unwant(agent)
        path = grow(f"{agent} {turn}", len(before) + 1, before) if len(before) < 9 else grow(f"{agent} {turn}", 4)
        ended = take_turn(self.directory, path, now, 0.0)
        if ended is not None:
            self.directory.next_use.told(ended, f"calls {tool}")
        self.paths[agent] = path


@pytest.mark.parametrize("seed", seeds(1))
def test_more_is_near_when_agents_come_back(seed: int) -> None:
    without, ahead = Agents(seed, ahead=False), Agents(seed, ahead=True)
    assert ahead.run(300) > without.run(300) + 0.1
