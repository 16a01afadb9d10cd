"""Eviction policies in the simulation of agents (agent_sim.py), and what they see: chunks, turns, conversations.

A `Foresight` is an eviction policy with what it is told by the caller. `Belady` is told when each chunk is used
next in truth, as recorded, at whatever group. In one group no policy finds more, as long as requests do not wait.
Among several groups it is no optimum: each group keeps what is used next somewhere, also what another one has, and
the router does not know the future.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agent_traces import ChunkNames, Conversation, Request

from trunkline.controller.messages import Holder
from trunkline.kvstore.chunks import ChunkName, TieredChunk
from trunkline.kvstore.directory import Directory
from trunkline.kvstore.next_use import TurnEnd
from trunkline.kvstore.tier_policy import EvictionPolicy
from trunkline.router.routing.request import Left


class Chunk(TieredChunk):
    """A chunk at one group."""

    __slots__ = ("known_use", "running")

    def __init__(self, parent: TieredChunk, name: ChunkName) -> None:
        super().__init__(parent, name)
        self.running = 0
        """Requests under way that use it."""
        self.known_use = 0.0
        """When it is used next in truth, at whatever group, for `Belady`."""

    @property
    def on_device(self) -> bool:
        return self.running > 0


@dataclass(slots=True, eq=False)
class Turn:
    """A request under way."""

    ticket: int
    talk: Talk
    request: Request
    arrived_s: float
    names: list[bytes]
    """Of the prompt's chunks."""
    ideal: int
    """Chunks."""
    group: int = 0
    holders: list[Holder] = field(default_factory=list)
    """Groups that were said to have what its group lacks."""
    left: Left | None = None
    """The group that has most of the prompt, if its group pulls it from there."""
    path: list[Chunk] = field(default_factory=list)

    @property
    def agent(self) -> tuple[str, int]:
        """Conversation and number of the agent."""
        return self.talk.whole.id, self.request.agent


@dataclass(slots=True, eq=False)
class Talk:
    """A conversation under way."""

    whole: Conversation
    start_s: float
    names: ChunkNames

    def due_s(self, request: Request) -> float:
        """When the request was sent in the recording."""
        return self.start_s + request.at_s


class Foresight(Protocol):
    """An eviction policy, and what it is told besides. One serves all groups of a run."""

    policy: EvictionPolicy
    wants: bool
    """Whether the directory is told which chunks waiting requests will use."""

    def prepare(self, directory: Directory[Chunk]) -> None:
        """Called with each group's directory before anything else."""

    def started(self, directory: Directory[Chunk], turn: Turn, now: float) -> None:
        """The turn's prompt is about to be computed; `path` is what was found of it."""

    def went_on(self, directory: Directory[Chunk], names: Sequence[bytes], turn: Turn, now: float) -> None:
        """The turn runs at another group, which has pulled what this one has: these chunks were its last."""

    def ended(self, directory: Directory[Chunk], turn: Turn, now: float) -> None:
        """The turn has its answer; `path` is all of it, and is about to be stored."""


class Plain:
    """Least recently used, or looking ahead in the queue."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.wants = policy is EvictionPolicy.LOOK_AHEAD

    def prepare(self, directory: Directory[Chunk]) -> None:
        pass

    def started(self, directory: Directory[Chunk], turn: Turn, now: float) -> None:
        pass

    def went_on(self, directory: Directory[Chunk], names: Sequence[bytes], turn: Turn, now: float) -> None:
        pass

    def ended(self, directory: Directory[Chunk], turn: Turn, now: float) -> None:
        pass


class Predicted:
    """The next use is foreseen from when conversations come back."""

    policy = EvictionPolicy.PREDICTED
    wants = True

    def __init__(self, *, closes: bool = False) -> None:
        """`closes`: clients say which request is the last of its agent."""
        self._closes = closes

    def prepare(self, directory: Directory[Chunk]) -> None:
        pass

    def started(self, directory: Directory[Chunk], turn: Turn, now: float) -> None:
        directory.next_use.tick(now)

    def went_on(self, directory: Directory[Chunk], names: Sequence[bytes], turn: Turn, now: float) -> None:
        directory.next_use.went_on(map(ChunkName, names), turn.request.prompt, now)

    def ended(self, directory: Directory[Chunk], turn: Turn, now: float) -> None:
        client = turn.request.client
        end = TurnEnd(
            arrived=turn.arrived_s,
            prompt_chunks=len(turn.names),
            prompt_tokens=turn.request.prompt,
            output_tokens=turn.request.answer,
            tenant=f"{client.tools} {client.system}",
            is_last=self._closes and turn.request.is_last,
        )
        directory.next_use.ended(turn.path, end, now)


class Belady:
    """What is used next last is evicted first, and what is used later than all that is there stays out."""

    policy = EvictionPolicy.LOOK_AHEAD
    wants = True

    def __init__(self, talks: Sequence[Talk]) -> None:
        self._uses: dict[tuple[str, int], list[tuple[int, float]]] = {}
        """By conversation and number: steps (chunks, time); so many first chunks are used next by then."""
        self._copies: dict[bytes, dict[Directory[Chunk], Chunk]] = {}
        """By name: the chunk at each group that has it, …"""
        self._latest: dict[bytes, float] = {}
        """… and when it is used next, as far as turns that have ended know."""
        following: dict[bytes, float] = {}
        arrivals = [(talk.due_s(request), talk, request) for talk in talks for request in talk.whole.requests]
        for due_s, talk, request in sorted(arrivals, key=lambda each: each[0], reverse=True):
            names = talk.names.prompt(request.number)
            steps: list[tuple[int, float]] = []
            for count, name in enumerate(itertools.chain(names, talk.names.answer(request.number)), 1):
                use_s = following.get(name, math.inf)
                if steps and steps[-1][1] == use_s:
                    steps.pop()
                steps.append((count, use_s))
            self._uses[talk.whole.id, request.number] = steps
            following.update(dict.fromkeys(names, due_s))

    @staticmethod
    def key(chunk: Any) -> tuple[float, ...]:
        """The use by a request that waits is known better than from the recording: it is late."""
        if chunk.wants:
            return (1.0, *[-part for part in chunk.wants[0][0]], -chunk.depth)
        return (0.0, -chunk.known_use, chunk.last_use, -chunk.depth)

    def prepare(self, directory: Directory[Chunk]) -> None:
        directory.copies.shares.key = self.key

    def started(self, directory: Directory[Chunk], turn: Turn, now: float) -> None:
        pass

    def went_on(self, directory: Directory[Chunk], names: Sequence[bytes], turn: Turn, now: float) -> None:
        pass

    def ended(self, directory: Directory[Chunk], turn: Turn, now: float) -> None:
        start = 0
        for stop, use_s in self._uses[turn.talk.whole.id, turn.request.number]:
            for chunk in turn.path[start:stop]:
                self._tell(directory, chunk, use_s)
            start = stop

    def _tell(self, directory: Directory[Chunk], chunk: Chunk, use_s: float) -> None:
        """Note when a chunk is used next, at all groups that have it: elsewhere it would seem to be overdue, and
        stay for ever."""
        copies = self._copies.setdefault(chunk.name, {})
        copies[directory] = chunk
        latest = self._latest[chunk.name] = max(use_s, self._latest.get(chunk.name, 0.0))
        for other, copy in list(copies.items()):
            if copy.is_forgotten:
                del copies[other]
            elif copy.known_use < latest:
                copy.known_use = latest
                if other is not directory:
                    other.copies.offer(copy)
