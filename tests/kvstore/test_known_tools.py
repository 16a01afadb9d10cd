"""What it gains that the tools are known which answers call: agents whose tools take one or fifteen minutes."""

from __future__ import annotations

import heapq
import itertools
import random
from typing import Final

import pytest
from seeds import seeds

from trunkline.kvstore.chunks import ChunkName, TieredChunk
from trunkline.kvstore.directory import Directory
from trunkline.kvstore.next_use import TurnEnd
from trunkline.kvstore.tier_policy import DirectoryConfig, EvictionPolicy

TOOLS_S: Final = {"test": 60.0, "build": 900.0}
"""Seconds that each tool takes, a fifth more or less."""
AGENTS: Final = 30
ROOM: Final = 60
"""Chunks; each agent has 4 to 9."""


class Agents:
    """Each has a context that grows by a chunk in each turn and begins anew at ten."""

    def __init__(self, seed: int, policy: EvictionPolicy, *, tells: bool) -> None:
        self.rng = random.Random(seed)
        self.directory: Directory[TieredChunk] = Directory(DirectoryConfig(host_slots=ROOM, policy=policy))
        self.tells = tells
        self.paths: dict[int, list[TieredChunk]] = {}
        self.found = self.wanted = 0
        self._steps = itertools.count(1)

    def run(self, turns: int) -> float:
        """Return which part of their contexts they find, after the first third."""
        due = [(self.rng.uniform(0.0, 900.0), agent) for agent in range(AGENTS)]
        heapq.heapify(due)
        for turn in range(1, turns + 1):
            if turn == turns // 3:
                self.found = self.wanted = 0
            now, agent = heapq.heappop(due)
            tool = self.rng.choice(list(TOOLS_S))
            self._turn(turn, agent, tool, now)
            heapq.heappush(due, (now + TOOLS_S[tool] * self.rng.uniform(0.8, 1.2), agent))
        self.directory.check()
        return self.found / self.wanted

    def _turn(self, turn: int, agent: int, tool: str, now: float) -> None:
        before, uses = self.paths.get(agent, []), self.directory.next_use
        uses.tick(now)
        path = list(itertools.takewhile(lambda chunk: chunk.host_ready and not chunk.is_forgotten, before))
        self.found += len(path)
        self.wanted += len(before)
        names: list[bytes] = [chunk.name for chunk in before]
        if not 0 < len(names) < 9:
            path, names = [], [f"{turn}/{at}".encode() for at in range(3)]
        names.append(f"{turn}".encode())
        for name in names[len(path) :]:
            path.append(TieredChunk(path[-1] if path else TieredChunk(None, ChunkName(b"")), ChunkName(name)))
        end = TurnEnd(arrived=now, prompt_chunks=len(path), prompt_tokens=10 * len(path), request=turn)
        uses.ended(path, end, now)
        ended = uses.turn_of(turn)
        if self.tells and ended is not None:
            uses.told(ended, f"calls {tool}")
        self._store(path, now)
        self.paths[agent] = path

    def _store(self, path: list[TieredChunk], now: float) -> None:
        self.directory.used(path, now)
        for chunk in path:
            if not chunk.host_ready and self.directory.save(chunk, next(self._steps)) is None:
                break
        for lost in self.directory.lost():
            self.directory.forget(lost)
        for chunk in path:
            self.directory.left_device(chunk)
        for chunk in reversed(path):
            if not (chunk.is_stored or chunk.stored_below or chunk.is_forgotten):
                self.directory.forget(chunk)


@pytest.mark.parametrize("seed", seeds(1))
def test_who_knows_the_tools_finds_more(seed: int) -> None:
    recent = Agents(seed, EvictionPolicy.LRU, tells=False).run(900)
    untold = Agents(seed, EvictionPolicy.PREDICTED, tells=False).run(900)
    told = Agents(seed, EvictionPolicy.PREDICTED, tells=True).run(900)
    assert told > max(recent, untold) + 0.03
